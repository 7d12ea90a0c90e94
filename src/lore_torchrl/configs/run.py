"""One training run: environment, stock agent, logs, evaluation, health."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from lore_torchrl.configs.advisors import ScriptedAdvisorConfig
from lore_torchrl.configs.lore import LoReConfig
from lore_torchrl.configs.setting import Settings, setting

CHECKS = (
    "entropy_collapse",
    "kl_over_delta",
    "beta_saturated",
    "model_error",
    "value_overconfidence",
    "no_reward",
    "invalid_answers",
    "budget_burn",
    "nonfinite",
)


@dataclass
class EnvConfig(Settings, prefix="env"):
    """Which environment, and how it is observed."""

    adapter: str = setting(
        "lore_torchrl.envs.minigrid.MiniGrid",
        "Import path of the environment's class.",
    )
    id: str = setting(
        "MiniGrid-DoorKey-5x5-v0", "MiniGrid, BabyAI: a Gymnasium id; elsewhere a name for logs."
    )
    num_envs: int = setting(4, "Environments that step side by side.", ge=1, le=1000)
    parallel: bool = setting(False, "A process for each environment; for those with slow steps.")
    max_steps: int | None = setting(None, "Step limit of an episode; null: its own.", ge=1)
    memory: bool = setting(False, "Whether the describer remembers what was seen since the reset.")
    options: dict[str, Any] = setting(dict, "Further keywords of the adapter.")


@dataclass
class DreamerConfig(Settings, prefix="dreamer"):
    """Sizes and rates of stock DreamerV3: about 320,000 parameters, small rooms on a CPU."""

    hidden_dim: int = setting(64, "Width of every hidden layer.", ge=1)
    belief_dim: int = setting(128, "Size of the deterministic state.", ge=1)
    num_blocks: int = setting(8, "Blocks of its GRU, which must divide belief_dim.", ge=1)
    num_categoricals: int = setting(8, "Categorical variables of the stochastic state.", ge=1)
    num_classes: int = setting(8, "Classes of each.", ge=2)
    encoder_layers: int = setting(2, "Hidden layers of the encoder.", ge=1)
    decoder_layers: int = setting(2, "Hidden layers of the decoder.", ge=1)
    dynamics_layers: int = setting(1, "Hidden layers of the dynamics.", ge=1)
    prior_layers: int = setting(1, "Hidden layers of the RSSM's prior.", ge=1)
    posterior_layers: int = setting(1, "Hidden layers of the RSSM's posterior.", ge=1)
    head_layers: int = setting(1, "Hidden layers of the reward and continuation heads.", ge=1)
    actor_layers: int = setting(2, "Hidden layers of the actor.", ge=1)
    value_layers: int = setting(2, "Hidden layers of the critic.", ge=1)
    num_bins: int = setting(255, "Bins of the two-hot reward and value distributions.", ge=2)
    unimix: float = setting(0.01, "Share of uniform probability in every categorical.", ge=0, lt=1)
    norm_eps: float = setting(1e-4, "Epsilon of the RMS normalization.", gt=0)
    symlog: bool = setting(False, "Whether symlog(observation) is read; one-hot ones need none.")
    image_depth: int = setting(8, "Images: channels of the first convolution's scale.", ge=1)
    image_mults: list[int] = setting(
        lambda: [2, 3, 4, 4], "Images: multiple of image_depth of each stage, which halves sides."
    )

    batch_size: int = setting(16, "Sequences in a sample.", ge=1)
    seq_len: int = setting(16, "Records in a sequence.", ge=2)
    imagination_horizon: int = setting(12, "Imagined steps.", ge=1)
    replay_ratio: float = setting(
        32.0, "Records trained on for each environment step.", ge=0, lt=math.inf
    )
    learning_starts: int = setting(600, "Environment steps before the first update.", ge=0)
    buffer_size: int = setting(50_000, "Records in replay, all environments together.", ge=1)

    lr: float = setting(1.6e-3, "Learning rate.", gt=0)
    lr_warmup: int = setting(100, "Updates over which the learning rate grows from 0.", ge=0)
    adaptive_grad_clip: float = setting(0.3, "Largest gradient norm by parameter norm.", gt=0)
    optimizer_eps: float = setting(1e-20, "Epsilon of the optimizer.", gt=0)
    free_nats: float = setting(1.0, "KL of the world model that costs nothing, nats.", ge=0)
    dynamic_weight: float = setting(1.0, "Weight of the dynamics loss.", ge=0)
    representation_weight: float = setting(0.1, "Weight of the representation loss.", ge=0)
    entropy_bonus: float = setting(3e-4, "Weight of the policy's entropy.", ge=0)
    continuation_horizon: float = setting(
        333.0, "Horizon H of the learned continuation; rewards are discounted by 1 - 1/H.", gt=1
    )
    lmbda: float = setting(0.95, "Mixing of the lambda returns.", ge=0, le=1)
    slow_critic_weight: float = setting(1.0, "Pull towards the slow critic.", ge=0)
    slow_critic_tau: float = setting(0.02, "Rate of the slow critic.", gt=0, le=1)
    replay_value_weight: float = setting(0.3, "Weight of the critic's loss on replay.", ge=0)
    return_min_scale: float = setting(1.0, "Smallest range by which returns are normalized.", gt=0)
    compile_train_step: bool | None = setting(None, "Compile the update; null: on CUDA alone.")
    cudagraph: bool | None = setting(None, "Capture it as a CUDA graph; null as above.")
    mixed_precision: bool = setting(False, "bfloat16 autocast on CUDA.")

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"it must be a multiple of num_blocks={self.num_blocks}"
        self.require(self.belief_dim % self.num_blocks == 0, "belief_dim", rule)


@dataclass
class LoggerConfig(Settings, prefix="logger"):
    """Where numbers go. ``metrics.jsonl`` is always written; these come on top."""

    backends: list[str] = setting(
        lambda: ["csv"], "Any of these.", among=("csv", "wandb", "tensorboard")
    )
    interval: int = setting(500, "Environment steps between rows.", ge=1)
    project: str = setting("lore_torchrl", "Project in W&B.")
    group: str | None = setting(None, "Group in W&B.")
    mode: str | None = setting(
        None,
        "W&B; null is what WANDB_MODE says, else online where there is an account, else offline.",
        among=("online", "offline", "disabled"),
    )
    progress_bar: bool = setting(True, "Show a progress bar.")
    figures: bool = setting(True, "Draw figures at the end.")
    upload_checkpoint: bool = setting(
        True, "Whether W&B gets the last checkpoint at the end, replay included, as an artifact."
    )
    advice_rows: int = setting(
        2_000, "Answers in advice.jsonl, and in W&B in the table `advice`; 0 keeps none.", ge=0
    )


@dataclass
class EvaluationConfig(Settings, prefix="evaluation"):
    """Held-out evaluation, without a call, on seeds that training never uses."""

    interval: int = setting(2500, "Environment steps between evaluations.", ge=1)
    episodes: int = setting(
        100, "Episodes, each of a held-out seed, always the same.", ge=1, le=1000
    )
    deterministic: bool = setting(False, "`true` takes the likeliest action, `false` samples.")
    actor: str = setting(
        "policy",
        "Who plays: `policy`, without advice; `mixture`, of the policy and the answers cached so "
        "far; `both`, in turn. What the mixture reaches is logged as `eval/advised/` too.",
        among=("policy", "mixture", "both"),
    )


@dataclass
class HealthConfig(Settings, prefix="health"):
    """Checks on each row of metrics.

    A check that trips writes a warning that says what to do, and ``health/<check>`` is 1 while it
    lasts. A threshold of null switches its check off.
    """

    enabled: bool = setting(True, "Whether there are checks.")
    stop: list[str] = setting(
        lambda: ["nonfinite"],
        "Checks that end the run, with a checkpoint; nonfinite without one, and with an error.",
        among=CHECKS,
    )
    patience: int = setting(
        4,
        "Rows in a row for which a condition must hold. no_reward, budget_burn and nonfinite trip "
        "at once, and invalid_answers where no call is left.",
        ge=1,
    )
    entropy_share: float | None = setting(
        0.05,
        "entropy_collapse: entropy below this share of ln(actions), and most episodes fail.",
        gt=0,
        le=1,
    )
    kl_factor: float | None = setting(
        8.0,
        "kl_over_delta: lore_kl above so many times delta, the multiplier at its maximum.",
        gt=1,
    )
    beta_share: float | None = setting(
        0.98, "beta_saturated: mean beta above this share of beta_max, hardly varying.", gt=0, le=1
    )
    model_error_factor: float | None = setting(
        3.0, "model_error: reconstruction error above this many times its lowest.", gt=1
    )
    value_margin: float | None = setting(
        0.5,
        "value_overconfidence: 95th percentile of imagined returns above the best return of a "
        "row, at least 0, by this much.",
        gt=0,
    )
    no_reward_steps: int | None = setting(
        10_000, "no_reward: environment steps without a mean return above 0 or a success.", gt=0
    )
    invalid_share: float | None = setting(
        0.2, "invalid_answers: share of the questions since a row that failed.", gt=0, le=1
    )
    budget_burn_share: float | None = setting(
        0.02, "budget_burn: the last of all calls made before this share of the run.", gt=0, le=1
    )
    nonfinite: bool = setting(True, "nonfinite: a loss, or the agent, is not finite.")


@dataclass
class TrainConfig(Settings):
    """The root: one training run."""

    seed: int = setting(
        0, "Seed of everything: environments, networks, replay, advisor.", ge=0, lt=1_000_000
    )
    total_steps: int = setting(10_000, "Environment steps of all environments together.", ge=1)
    steps_per_batch: int = setting(
        32, "Environment steps between rounds of updates; a multiple of env.num_envs.", ge=1
    )
    device: str | None = setting(None, "cpu, cuda, cuda:1, ...; null: CUDA where there is one.")
    num_threads: int | None = setting(
        1, "CPU threads, of which small models want 1; null is PyTorch's choice.", ge=1
    )
    checkpoint_interval: int | None = setting(
        5_000, "Environment steps between checkpoints; null for none.", ge=1
    )
    checkpoint_keep: int = setting(2, "Checkpoints that are kept.", ge=1)
    resume: str | None = setting(None, "Run, checkpoints folder or checkpoint to go on from.")
    record: str | None = setting(
        None,
        "SQLite file to record every answer to, such as ${output_dir}/advice.sqlite; a resumed run "
        "goes on in its file. The run is repeated with advisor=recorded.",
    )
    output_dir: str = setting("outputs/run", "Where everything that the run writes goes.")
    env: EnvConfig = setting(EnvConfig, "")
    advisor: Any = setting(ScriptedAdvisorConfig, "")
    lore: LoReConfig = setting(LoReConfig, "")
    dreamer: DreamerConfig = setting(DreamerConfig, "")
    logger: LoggerConfig = setting(LoggerConfig, "")
    evaluation: EvaluationConfig = setting(EvaluationConfig, "")
    health: HealthConfig = setting(HealthConfig, "")

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"it must be a multiple of env.num_envs={self.env.num_envs}"
        self.require(self.steps_per_batch % self.env.num_envs == 0, "steps_per_batch", rule)
        rule = f"it must be at least steps_per_batch={self.steps_per_batch}"
        self.require(self.total_steps >= self.steps_per_batch, "total_steps", rule)
        usable = self.evaluation.actor == "policy" or self.lore.enabled
        rule = "with lore.enabled=false there is no advice: set it to policy"
        self.evaluation.require(usable, "actor", rule)
        for name in () if self.lore.enabled else ("features", "progress", "subgoal"):
            part = getattr(self.lore, name)
            rule = "with lore.enabled=false no channel works: use method=stock_imitation"
            part.require(not part.enabled, "enabled", rule)
        calls, mixer, planner = self.lore.calls, self.lore.mixer, self.lore.planner
        rule = "with lore.enabled=false there is no advice to use it on"
        planner.require(self.lore.enabled or not planner.enabled, "enabled", rule)
        calls.require(self.lore.enabled or not calls.plan_horizon, "plan_horizon", rule)
        mixer.require(self.lore.enabled or not mixer.action_mask, "action_mask", rule)
        valued = mixer.value_temperature is not None
        mixer.require(self.lore.enabled or not valued, "value_temperature", rule)
        per_stream = self.dreamer.buffer_size // self.env.num_envs
        least = self.dreamer.seq_len + 1
        rule = f"each of {self.env.num_envs} environments must have above seq_len + 1 = {least}"
        self.dreamer.require(per_stream > least, "buffer_size", rule)
        deadline = _longest_deadline(self.advisor)
        rule = f"advisor.deadline_s={deadline} must lie below it, or retries are cut off"
        self.lore.calls.require(deadline < self.lore.calls.timeout_s, "timeout_s", rule)


def _longest_deadline(advisor: Any) -> float:
    """Return the longest ``deadline_s`` of an advisor's settings and of those that it wraps."""
    wrapped = (getattr(advisor, name, None) for name in ("advisor", "before", "after"))
    inner = [_longest_deadline(part) for part in wrapped if part is not None]
    return max([getattr(advisor, "deadline_s", 0.0), *inner])


def restore_config(saved: Mapping[str, Any]) -> TrainConfig:
    """Rebuild a run's configuration from what ``dataclasses.asdict`` made of it.

    A setting that this version does not know is left out, one that was not saved has its
    default. The advisor's settings stay a mapping, with ``_target_``.

    Args:
        saved: Such as the content of a run's ``config.json``.
    """
    return _rebuild(TrainConfig(), saved)


def _rebuild(default: Any, saved: Mapping[str, Any]) -> Any:
    values = {}
    for part in fields(default):
        if part.name in saved:
            value, current = saved[part.name], getattr(default, part.name)
            nested = is_dataclass(current) and part.name != "advisor"
            values[part.name] = _rebuild(current, value) if nested else value
    return type(default)(**values)
