"""What LoRe adds to stock DreamerV3: calls, gate, mixture, losses, learned parts, bandit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lore_torchrl.configs.setting import Settings, setting


@dataclass
class CallsConfig(Settings, prefix="lore.calls"):
    """When and how the advisor is asked. Steps are environment steps of all environments."""

    mode: str = setting(
        "blocking",
        "`blocking` waits for each answer; with `async` no step waits for one: late answers go to "
        "the cache and to their rows in replay.",
        among=("blocking", "async"),
    )
    max_in_flight: int = setting(16, "Async: most questions in flight at once.", ge=1)
    drain_s: float = setting(
        5.0, "Async: seconds that training waits at its end for answers.", ge=0, lt=math.inf
    )
    timeout_s: float = setting(30.0, "Seconds that one question may take.", gt=0, le=86_400)
    budget: int = setting(
        200,
        "Calls in the whole run, never exceeded. A resumed run forgets those since its last "
        "checkpoint, unless it has a store.",
        ge=0,
    )
    max_tokens: int | None = setting(
        None, "Tokens after which no call begins; null for no limit.", gt=0
    )
    max_cost: float | None = setting(
        None, "Money, in the currency of the advisor's prices; as above.", gt=0
    )
    calls_per_step: int = setting(
        1,
        "Most calls in one step of all environments, highest acquisition score first; as many "
        "again where episodes begin at that step.",
        ge=1,
    )
    cooldown: int = setting(0, "Steps between two calls.", ge=0)
    cooldown_after_success: int = setting(
        0, "Steps without a call after an episode succeeded.", ge=0
    )
    min_beta: float = setting(0.05, "Least weight of the gate at which a call is made.", ge=0, le=1)
    always: bool = setting(
        True,
        "`true`: any state without a cached answer may be asked about; `false`: where one of the "
        "triggers that follow is due.",
    )
    after_reset: bool = setting(True, "Trigger: a new episode.")
    no_reward_steps: int | None = setting(
        50, "Trigger: so many steps of one environment without reward; null for never.", gt=0
    )
    novelty: float | None = setting(
        None, "Trigger: n-th visit to a state, while 1/sqrt(n) > this; null for never.", ge=0, lt=1
    )
    td_spike: float | None = setting(
        None,
        "Trigger: a TD error so many standard deviations above its average, until it is below "
        "`td_spike_low`; null for never.",
        gt=0,
    )
    td_spike_low: float = setting(1.0, "Where the trigger `td_spike` ends.")
    cache_size: int = setting(100_000, "Answers in memory; the least recently used go.", ge=1)
    ttl_steps: int | None = setting(None, "Steps until an answer expires; null for never.", gt=0)
    abstract_states: bool = setting(
        True,
        "`true`: where a state is unknown, advice for one of the same abstract state serves.",
    )
    answers_averaged: int | None = setting(
        5,
        "Answers averaged for an abstract state, to outweigh a wrong one. null lets the latest "
        "serve, and a state's own answer go before it.",
        gt=0,
    )
    averaging_visits: int = setting(
        8,
        "Visits to an abstract state before its second answer, doubled for each further one.",
        ge=1,
    )
    noop_filter: bool = setting(
        True,
        "Whether advice whose action changed nothing and gained nothing is dropped for its state.",
    )
    plan_horizon: int = setting(
        0,
        "Steps of an answer's plan that are followed while the world goes as the plan expects and "
        "where a situation has no answer of its own; 0 for none.",
        ge=0,
        le=64,
    )
    store: str | None = setting(
        None,
        "SQLite file of answers and ledger, which outlives crashes and may be shared; or null.",
    )
    ledger: str = setting("default", "Ledger in the store: one budget for all runs that name it.")

    def __post_init__(self) -> None:
        super().__post_init__()
        low, rule = self.td_spike_low, f"it must be below td_spike={self.td_spike}"
        self.require(self.td_spike is None or low < self.td_spike, "td_spike_low", rule)
        for name in ("novelty", "td_spike"):
            rule = "with always=true every state may be asked about already: set always=false"
            self.require(not self.always or getattr(self, name) is None, name, rule)
        triggers = (self.after_reset or None, self.no_reward_steps, self.novelty, self.td_spike)
        rule = "without a trigger no call would be made: switch one on"
        self.require(self.always or any(t is not None for t in triggers), "always", rule)
        averages = self.abstract_states or self.answers_averaged is None
        rule = "without abstract_states there is nothing to average: set answers_averaged=null too"
        self.require(averages, "answers_averaged", rule)
        self.require(self.ledger != "", "ledger", "it needs a name")


@dataclass
class GateConfig(Settings, prefix="lore.gate"):
    """How much advice is let through: beta = beta_max * sigmoid(kappa * (u - tau))."""

    beta_max: float = setting(
        1.0, "Largest weight of the advice; 0 switches it off.", ge=0, lt=math.inf
    )
    kappa: float = setting(10.0, "Steepness of the sigmoid.", gt=0, lt=math.inf)
    tau: float = setting(0.5, "Uncertainty u, 0 to 1, at which half of beta_max is let through.")
    entropy_weight: float = setting(1.0, "Weight of the policy's normalized entropy in u.", ge=0)
    value_weight: float = setting(0.0, "Weight of the critic's variance in u.", ge=0)
    disagreement_weight: float = setting(
        0.0, "Weight in u of the disagreement of one-step predictors of the latent state.", ge=0
    )
    value_source: str = setting(
        "two_hot",
        "Variance of the critic's own distribution, or of an `ensemble` of critics.",
        among=("two_hot", "ensemble"),
    )
    hysteresis: list[float] | None = setting(
        None, "[low, high]: the gate opens at high and shuts below low; null for neither."
    )
    warmup_steps: int = setting(
        0, "Policy calls (steps_per_batch / num_envs a batch) over which beta grows from 0.", ge=0
    )
    dropout: float = setting(0.0, "Probability that a step goes without advice.", ge=0, lt=1)
    scale_decay: float = setting(
        0.995, "Forgetting of the scale of the critic's variance, at each policy call.", gt=0, le=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        pair = [0, 1] if self.hysteresis is None else self.hysteresis
        good = len(pair) == 2 and 0 <= pair[0] <= pair[1] <= 1
        self.require(good, "hysteresis", "it must be null or [low, high], 0 <= low <= high <= 1")
        self.require(math.isfinite(self.tau), "tau", "it must be finite")
        weights = (self.entropy_weight, self.value_weight, self.disagreement_weight)
        rule = "it, value_weight and disagreement_weight must be finite, one of them positive"
        self.require(0 < sum(weights) < math.inf, "entropy_weight", rule)
        used = self.value_source == "two_hot" or self.value_weight > 0
        self.require(used, "value_source", "an ensemble needs value_weight > 0")


@dataclass
class TemperatureConfig(Settings, prefix="lore.temperature"):
    """Temperature by which the advisor's logits are divided."""

    minimum: float = setting(0.5, "Lower bound.", gt=0)
    maximum: float = setting(2.0, "Upper bound.", gt=0)
    init: float = setting(1.0, "First temperature.", gt=0)
    rate: float = setting(
        0.0, "Share of a new estimate at each update, in log space; 0 holds init.", ge=0, le=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"it must be at most maximum={self.maximum}"
        self.require(self.minimum <= self.maximum, "minimum", rule)
        rule = f"it must lie within minimum={self.minimum} and maximum={self.maximum}"
        self.require(self.minimum <= self.init <= self.maximum, "init", rule)


@dataclass
class MixerConfig(Settings, prefix="lore.mixer"):
    """How advice is added to the policy."""

    max_kl: float = setting(
        1.0,
        "Bound on KL(mixed policy || policy), nats; inf for none, in a YAML file .inf.",
        ge=0,
    )
    mode: str = setting(
        "logit", "Whether logits or probabilities are mixed.", among=("logit", "probability")
    )
    min_scale: float = setting(
        0.3, "Continuous actions: scale of advice on one action, before the policy's tanh.", gt=0
    )
    action_mask: bool = setting(
        False, "Whether advice rules out the actions that the advisor calls invalid."
    )
    value_temperature: float | None = setting(
        None,
        "Temperature at which the world model's one-step values multiply the advice where it acts; "
        "null: they do not. Discrete actions only.",
        gt=0,
    )


@dataclass
class LossConfig(Settings, prefix="lore.loss"):
    """What the policy learns on real states."""

    imitation_weight: float = setting(
        1.0,
        "Weight of imitating executed steps that returned more than the critic expected; 0 learns "
        "from advice whatever it returned.",
        ge=0,
    )
    imitation_threshold: float = setting(
        0.05, "Least gain of an imitated step's episode, as a share of the span of returns.", ge=0
    )
    prior_weight: float = setting(
        0.0, "Weight of the KL between prior and policy, on imitated steps with advice.", ge=0
    )
    prior_steps: int | None = setting(
        None,
        "Updates over which prior_weight falls to 0, as in kickstarting; null keeps it.",
        gt=0,
    )
    actor_weight: float = setting(
        1.0,
        "Weight of the stock actor loss; 0 trains the actor on advice alone, as behavior cloning "
        "does.",
        ge=0,
    )
    prior_kl: str = setting(
        "prior_to_policy",
        "`prior_to_policy`: KL(prior || policy); `policy_to_prior`: KL(policy || prior).",
        among=("prior_to_policy", "policy_to_prior"),
    )
    gated: bool = setting(
        True, "`true` scales that KL by the gate: where the agent is certain it is not pulled."
    )
    bonus_weight: float = setting(0.0, "Weight of the expected log-prior under the policy.", ge=0)
    multiplier_lr: float = setting(
        0.0, "Step of the Lagrange multiplier at an update; 0 holds multiplier_init.", ge=0
    )
    multiplier_max: float = setting(0.1, "Largest multiplier.", ge=0)
    multiplier_init: float = setting(
        0.0, "First multiplier; with this and `multiplier_lr` at 0 there is no constraint.", ge=0
    )
    delta: float = setting(
        0.1, "Bound on KL(mixed policy || policy) that the multiplier enforces, nats.", ge=0
    )
    delta_end: float | None = setting(None, "Bound after delta_steps; null keeps delta.", ge=0)
    delta_steps: int = setting(0, "Updates over which delta becomes delta_end.", ge=0)
    beta_imagine_max: float = setting(0.0, "Largest weight of PriorNet in imagination.", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"it must be at most multiplier_max={self.multiplier_max}"
        self.require(self.multiplier_init <= self.multiplier_max, "multiplier_init", rule)

    @property
    def constrained(self) -> bool:
        """Whether the constraint is computed: its multiplier is, or can become, positive."""
        return self.multiplier_lr > 0 or self.multiplier_init > 0


@dataclass
class DisagreementConfig(Settings, prefix="lore.disagreement"):
    """Ensemble of one-step predictors; built where gate.disagreement_weight is positive."""

    num_members: int = setting(5, "Members; a variance needs two.", ge=2)
    hidden_dim: int = setting(64, "Width of the hidden layers.", ge=1)
    depth: int = setting(2, "Hidden layers.", ge=1)


@dataclass
class ValueEnsembleConfig(DisagreementConfig, prefix="lore.value_ensemble"):
    """Ensemble of critics; built where gate.value_source is ensemble."""

    prior_scale: float = setting(
        1.0, "Scale of the fixed random functions added to the members.", ge=0, lt=math.inf
    )


@dataclass
class PriorNetConfig(Settings, prefix="lore.prior_net"):
    """Network that learns the advisor's answers: the fallback where the cache has none."""

    enabled: bool = setting(False, "Whether there is one.")
    depth: int = setting(2, "Hidden layers.", ge=1)
    num_cells: int = setting(64, "Width of the hidden layers.", ge=1)
    threshold: float = setting(0.7, "Least confidence at which it is used.", ge=0, le=1)


@dataclass
class ProgramsConfig(Settings):
    """What all kinds of programs have in common."""

    enabled: bool = setting(False, "Whether the channel is on.")
    path: str | None = setting(
        None,
        "JSON Lines of programs, such as recordings/programs_llm.jsonl: those of this kind and "
        "environment are used. null: the adapter's hand-written one; of subgoals none, so that the "
        "describer's own serve alone.",
    )
    time_limit_s: float = setting(0.05, "Seconds that one run of a program may take.", gt=0)
    max_failures: int = setting(20, "Failures after which a program is retired.", ge=1)


@dataclass
class SubgoalConfig(ProgramsConfig, prefix="lore.subgoal"):
    """Bonus for reaching the subgoals that the advisor names, of its describer or of programs."""

    scale: float = setting(
        0.1,
        "Bonus of a subgoal's first time in the run; of the n-th it is 1/sqrt(n) of that.",
        ge=0,
        lt=math.inf,
    )
    episode_budget: float = setting(0.5, "Most bonus of one episode.", ge=0, lt=math.inf)
    imagine: bool = setting(
        False, "Whether a learned head also pays imagined rollouts that reach their subgoal."
    )
    imagine_weight: float = setting(
        0.1,
        "Bonus of an imagined rollout that surely does, at a subgoal's first time.",
        ge=0,
        lt=math.inf,
    )
    condition: bool = setting(
        False, "Whether the agent sees the open subgoal: it is embedded beside the observation."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("imagine", "condition"):
            self.require(self.enabled or not getattr(self, name), name, "it needs enabled=true")


@dataclass
class PlannerConfig(Settings, prefix="lore.planner"):
    """Planning in the latent space: the first step of the best sequences acts as advice."""

    enabled: bool = setting(False, "Whether there is a planner.")
    method: str = setting(
        "mppi",
        "`mppi`: the distribution is refitted to all sequences, weighted by softmax(score / "
        "temperature); `cem`: to the elites, however little they are ahead.",
        among=("cem", "mppi"),
    )
    seed: str = setting(
        "advice",
        "First distribution: the policy along an imagined rollout, on the first step leaned on the "
        "answer (`advice`), on its steps leaned on the advisor's `plan`, or neither (`policy`); "
        "`uniform` has no preference.",
        among=("advice", "plan", "policy", "uniform"),
    )
    horizon: int = setting(8, "Actions of a sequence.", ge=1)
    samples: int = setting(64, "Sequences drawn in each iteration.", ge=2)
    iterations: int = setting(3, "Iterations at each step.", ge=1)
    elites: int = setting(8, "CEM: best sequences that the distribution is refitted to.", ge=1)
    temperature: float = setting(0.01, "MPPI: temperature, in units of the return.", gt=0)
    lmbda: float = setting(0.95, "Mixing of the lambda return that scores a sequence.", ge=0, le=1)
    dyna_weight: float = setting(
        0.0,
        "Weight of imitating first steps of imagined trajectories that are worth more than the "
        "critic and the real return from there; needs `loss.imitation_weight`, no planner.",
        ge=0,
        lt=math.inf,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"it must be at most samples={self.samples}"
        fits = self.method != "cem" or self.elites <= self.samples
        self.require(fits, "elites", rule)


@dataclass
class SamplingConfig(Settings, prefix="lore.sampling"):
    """How sequences are drawn from replay, with and without ``lore.enabled``."""

    kind: str = setting(
        "uniform",
        "All as often, or by their episode's return: `success` (above 0) or `advantage`, its "
        "distance from the mean return.",
        among=("uniform", "success", "advantage"),
    )
    temperature: float = setting(
        1.0, "`advantage`: of the softmax over episodes, in units of the return.", gt=0
    )
    ratio: float = setting(
        8.0, "`success`: how many times as often a success is drawn.", gt=0, lt=math.inf
    )


@dataclass
class BanditConfig(Settings, prefix="lore.bandit"):
    """Whether advice acts is drawn for each segment, with the probability that it helps."""

    enabled: bool = setting(True, "`false` lets advice act everywhere.")
    segment_steps: int | None = setting(
        128, "Longest segment, environment steps; null for whole episodes.", ge=1
    )
    gain: float = setting(
        0.5, "Share of the gap to the best return that useful advice closes.", gt=0, lt=1
    )
    floor: float = setting(0.05, "Least probability; one minus it is the largest.", gt=0, lt=0.5)
    decay: float = setting(0.9, "Forgetting of the returns of unadvised segments.", gt=0, le=1)


@dataclass
class EpsilonConfig(Settings, prefix="lore.epsilon"):
    """Random valid actions on top, continuous ones evenly within their bounds."""

    eps_init: float = setting(0.0, "First epsilon; 0 switches it off.", ge=0, le=1)
    eps_end: float = setting(0.0, "Last epsilon.", ge=0, le=1)
    annealing_num_steps: int = setting(10_000, "Environment steps between the two.", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"it must be at most eps_init={self.eps_init}"
        self.require(self.eps_end <= self.eps_init, "eps_end", rule)


@dataclass
class FeaturesConfig(ProgramsConfig, prefix="lore.features"):
    """Features that programs compute, as ``llm_features``, seen beside each observation."""

    columns: int = setting(8, "Features of all programs together.", ge=1)
    hidden_dim: int = setting(32, "Width of their encoder and decoder, of one hidden layer.", ge=1)
    off_share: float = setting(
        0.2, "Share of blocks of episodes without a program, to measure what it brings.", ge=0, lt=1
    )
    block_episodes: int = setting(16, "Episodes of a block.", ge=1)


@dataclass
class ProgressConfig(ProgramsConfig, prefix="lore.progress"):
    """Potential-based shaping of the reward by a program's measure of progress."""

    episode_budget: float = setting(4.0, "Most absolute shaping of an episode.", gt=0)


@dataclass
class LoReConfig(Settings, prefix="lore"):
    """Everything that LoRe adds to stock DreamerV3."""

    enabled: bool = setting(True, "`false` is stock DreamerV3, the baseline: nothing is built.")
    compile_decision: bool = setting(
        False, "Whether the acting gate and mixer are compiled (15 s once; gains in long runs)."
    )
    imitation_ratio: int = setting(
        2, "Imitated steps a record of the batch, drawn from all of replay; 0: the batch.", ge=0
    )
    imitation_pseudocount: float = setting(
        8.0,
        "Drawn actions are imitated up to a probability of n/(n + this), n the episodes that they "
        "are drawn from; no limit on densities.",
        ge=0,
        le=1e6,
    )
    calls: CallsConfig = setting(CallsConfig, "")
    gate: GateConfig = setting(GateConfig, "")
    temperature: TemperatureConfig = setting(TemperatureConfig, "")
    mixer: MixerConfig = setting(MixerConfig, "")
    loss: LossConfig = setting(LossConfig, "")
    disagreement: DisagreementConfig = setting(DisagreementConfig, "")
    value_ensemble: ValueEnsembleConfig = setting(ValueEnsembleConfig, "")
    prior_net: PriorNetConfig = setting(PriorNetConfig, "")
    planner: PlannerConfig = setting(PlannerConfig, "")
    subgoal: SubgoalConfig = setting(SubgoalConfig, "")
    bandit: BanditConfig = setting(BanditConfig, "")
    sampling: SamplingConfig = setting(SamplingConfig, "")
    features: FeaturesConfig = setting(FeaturesConfig, "")
    epsilon: EpsilonConfig = setting(EpsilonConfig, "")
    progress: ProgressConfig = setting(ProgressConfig, "")

    def __post_init__(self) -> None:
        super().__post_init__()
        planned = self.planner.enabled and self.planner.seed == "plan"
        rule = "there are no plans: set lore.calls.plan_horizon above 0"
        self.planner.require(not planned or self.calls.plan_horizon > 0, "seed", rule)
        rule = "its plans would never act: set lore.gate.beta_max and lore.mixer.max_kl above 0"
        acts = not self.planner.enabled or min(self.gate.beta_max, self.mixer.max_kl) > 0
        self.planner.require(acts, "enabled", rule)
        rule = "its plans act in place of the gated advice: set lore.mixer.value_temperature=null"
        both = self.planner.enabled and self.mixer.value_temperature is not None
        self.planner.require(not both, "enabled", rule)
        rule = "TD errors would lack the bonus: set lore.calls.td_spike=null"
        told = not self.subgoal.enabled or self.calls.td_spike is None
        self.calls.require(told, "td_spike", rule)
        rule = "it would align with what no advice may choose: set lore.temperature.rate=0"
        aligned = self.mixer.action_mask and self.temperature.rate > 0
        self.mixer.require(not aligned, "action_mask", rule)
        rule = (
            "the losses mix without values: set lore.loss.multiplier_lr=0 and "
            "lore.loss.multiplier_init=0"
        )
        off = self.mixer.value_temperature is None or not self.loss.constrained
        self.mixer.require(off, "value_temperature", rule)
