"""One object that builds what belongs together, and hands out its three places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torchrl._utils import logger as torchrl_logger
from torchrl.data import ReplayBufferEnsemble
from torchrl.envs import EnvBase, InitTracker, StepCounter
from torchrl.modules import TanhNormal
from torchrl.objectives import (
    DreamerActorLoss,
    DreamerV3ActorLoss,
    DreamerV3ModelLoss,
    DreamerV3ValueLoss,
)

from lore_torchrl import keys
from lore_torchrl.advisors.base import Advisor, Describer
from lore_torchrl.configs.lore import CallsConfig, LoReConfig
from lore_torchrl.control import AdviceBandit, AdviceObserver
from lore_torchrl.modules import (
    LatentDisagreement,
    LatentPlanner,
    LogitMixer,
    LoReActor,
    PriorNet,
    SubgoalHead,
    TemperatureAligner,
    UncertaintyGate,
    ValueEnsemble,
    WorldModel,
)
from lore_torchrl.objectives import LoReActorLoss, LoReDreamerV3Loss
from lore_torchrl.policies import CategoricalPolicy, GaussianPolicy, PolicyKind
from lore_torchrl.policies.base import head_of
from lore_torchrl.replay import EpisodeReturns, ImitationSampler, LateAdvice
from lore_torchrl.service import (
    AdviceCache,
    AdviceService,
    AdviceStore,
    CallBudget,
    CallPolicy,
    Cooldown,
    MacroBoundaries,
    Novelty,
    TDErrorSpike,
)
from lore_torchrl.service.triggers import Trigger
from lore_torchrl.transforms import AdviceTransform, SubgoalBonus

# Batches after which it is checked that the policy which collects is the one of the losses.
_CHECKED_AFTER = 10


class LoRe:
    r"""Advice for a Dreamer: build what belongs together, and hand out its three places.

    .. code-block:: python

        lore = LoRe(actor=actor, value=critic, advisor=advisor, describer=describer)
        env = lore.advise(env)                                  # 1. the environment asks
        acting = lore.policy()                                  # 2. takes the stock actor's place
        loss = lore.loss(model_loss, actor_loss, value_loss)    # 3. around the stock losses
        for batch in collector:
            lore.observe(batch)

    The policy is mixed with advice where the gate opens, within a KL bound
    (:class:`~lore_torchrl.modules.LoReActor`); in which segments of an episode advice acts is
    drawn by :class:`~lore_torchrl.control.AdviceBandit`; what is learned is decided by returns
    (:class:`~lore_torchrl.objectives.LoReActorLoss`). Imagination and losses keep the stock actor.

    Args:
        config: Settings; ``examples/train.py`` has the same defaults, and also uses
            :meth:`returns` and :meth:`imitation_sampler`. Default: ``LoReConfig()``.

    Keyword Args:
        actor: Stock actor over ``state`` and ``belief``, categorical or Gaussian.
        value: Critic of the same states, with two-hot logits for ``config.gate.value_weight``.
        advisor: Whom to ask: an object with ``async advise(requests)``.
        describer: Turns observations into questions. Answers are shared within abstract states
            where it has an ``abstract_state``.
        latent_sizes: Sizes of stochastic state and belief, for the parts that learn (``prior_net``,
            ``disagreement``, ``value_ensemble``, ``subgoal.imagine``), which are off by default.
            Default: ``None``.
        scale_range: Least and greatest scale of a Gaussian actor. Default: the actor's own
            attribute of that name.
        world: World model of the same states, which ``config.planner`` and
            ``config.mixer.value_temperature`` need, both off by default. Default: ``None``.
        discount: Discount of the real returns that are imitated. Default: ``1 - 1/333``, that of
            DreamerV3's continuation.
        success_key: Entry under ``"next"`` that is true where an episode has succeeded; ``None``
            counts an episode that ends with a reward above 0. Default: ``None``.
        seed: Seed of the bandit and of the steps drawn for the imitation. Default: ``0``.
        device: Device of the policy. Default: that of the actor.

    Attributes:
        service: The :class:`~lore_torchrl.service.AdviceService`: calls, cache, ledger.
        actor: The :class:`~lore_torchrl.modules.LoReActor`.
        bandit: The :class:`~lore_torchrl.control.AdviceBandit`, or ``None``.
        subgoals: The :class:`~lore_torchrl.transforms.SubgoalBonus`, or ``None``.
        late: Brings late answers to replay in async mode, else ``None``.
        observed_keys: Entries that replay must keep with each observation, at the root and under
            ``"next"``; under ``"next"`` alone where replay holds no observation of a reset, as
            in TorchRL's recipe.
        selected_keys: What a ``SelectTransform`` of the collector must let through: the
            ``observed_keys`` under ``"next"`` and what :meth:`observe` reads.

    Raises:
        TypeError: If ``config`` is no :class:`~lore_torchrl.configs.LoReConfig`, or advisor or
            describer lack what makes them one.
        ValueError: If ``config.enabled`` is false, a part needs what is not given, or ``config``
            has parts on that only ``examples/train.py`` builds: ``features``, ``progress``,
            ``sampling``, ``epsilon``, ``subgoal.condition``.
    """

    def __init__(
        self,
        config: LoReConfig | None = None,
        *,
        actor: ProbabilisticTensorDictSequential,
        value: TensorDictModuleBase,
        advisor: Advisor,
        describer: Describer,
        latent_sizes: tuple[int, int] | None = None,
        scale_range: tuple[float, float] | None = None,
        world: WorldModel | None = None,
        discount: float = 1.0 - 1.0 / 333.0,
        success_key: NestedKey | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        self.config = c = LoReConfig() if config is None else config
        if not isinstance(c, LoReConfig):
            raise TypeError(
                f"config must be a LoReConfig, got {type(c).__name__}. From Hydra: "
                "OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(LoReConfig), config))."
            )
        if not c.enabled:
            raise ValueError(
                "lore.enabled is false: build the stock policy and losses, without a LoRe."
            )
        if not (hasattr(advisor, "advise") and hasattr(describer, "actions")):
            raise TypeError(
                "advisor needs an async advise(requests) and describer its actions, got "
                f"{type(advisor).__name__} and {type(describer).__name__}. Self-imitation without "
                "advice needs neither: LoReDreamerV3Loss(model_loss, LoReActorLoss(actor_loss), "
                "value_loss)."
            )
        for part in (advisor, describer):
            if isinstance(part, type):
                raise TypeError(f"{part.__name__} is a class: make one, {part.__name__}(...).")
        if not describer.actions:
            raise ValueError(
                f"{type(describer).__name__}.actions must name the actions, got "
                f"{describer.actions!r}."
            )
        foreign = {
            "features.enabled": c.features.enabled,
            "progress.enabled": c.progress.enabled,
            "sampling.kind": c.sampling.kind != "uniform",
            "epsilon.eps_init": c.epsilon.eps_init > 0,
            "subgoal.condition": c.subgoal.condition,
            "subgoal.path": c.subgoal.path is not None,
        }
        if any(foreign.values()):
            raise ValueError(
                f"LoRe does not put {[name for name, on in foreign.items() if on]} to work: these "
                "change environment, agent or replay. Train with examples/train.py, or leave them "
                "at their defaults and add their parts to your pipeline yourself."
            )
        if device is None:
            device = next(actor.parameters()).device
        self.seed, self.discount, self.device = seed, discount, torch.device(device)
        self._describer, self._success_key, self._value = describer, success_key, value
        self.subgoals: SubgoalBonus | None = None
        if c.subgoal.enabled:
            paid = {"scale": c.subgoal.scale, "episode_budget": c.subgoal.episode_budget}
            self.subgoals = SubgoalBonus(describer, **paid)
        self.actor = build_lore_actor(
            c,
            actor,
            value,
            num_actions=len(describer.actions),
            anchors=getattr(describer, "anchors", None),
            latent_sizes=latent_sizes,
            scale_range=scale_range,
            world=world,
            num_subgoals=0 if self.subgoals is None else len(self.subgoals.names),
            device=self.device,
        )
        self.bandit = build_bandit(c, seed=seed, device=self.device)
        self.service = build_service(c.calls, advisor)
        late = self.service.mode == "async"
        self.late = LateAdvice() if late else None
        self.observed_keys = keys.ADVICE_KEYS
        if c.mixer.action_mask:
            self.observed_keys += (keys.ACTION_MASK,)
        if self.late is not None:
            self.observed_keys += (keys.ADVICE_ID, keys.FALLBACK)
        if c.subgoal.imagine:
            self.observed_keys += (keys.SUBGOAL, keys.REACHED)
        self.observer = AdviceObserver(self.bandit, exhausted=lambda: self.service.exhausted)
        # What observe() reads, and the replay under "next".
        self._read_keys: tuple[NestedKey, ...] = (keys.KL,)
        if self.bandit is not None:
            self._read_keys += (keys.COEFFICIENT, ("next", "step_count"))
        if self.subgoals is not None:
            self._read_keys += (("next", keys.RAW_REWARD),)
        origin = () if self.actor.prior_net is None else (keys.ORIGIN,)
        under_next = tuple(("next", key) for key in self.observed_keys)
        self.selected_keys = (*under_next, *self._read_keys, *origin)
        self._batches = 0
        self._warned = False
        self._loss: LoReActorLoss | None = None

    # ---- the three places ----

    def advise(self, env: EnvBase, *, describer: Describer | None = None) -> EnvBase:
        """Return an environment that asks for advice, to use in place of ``env``, a batched one.

        Nothing may be appended after it that ends episodes. What the bandit reads is added where
        the environment lacks it: a ``StepCounter`` and, for segments of whole episodes, an
        ``InitTracker``.

        Args:
            env: Environment that acts.

        Keyword Args:
            describer: Describer of an environment beside the one that trains, such as one for
                evaluation: the answers cached so far are looked up there, no call is made, and
                :attr:`actor` acts in every segment. Default: ``None``, the one that trains.

        Raises:
            ValueError: If ``env`` has no batch size, asks for advice already, or writes its reward
                or its ends under names that the bandit does not read.
        """
        if not env.batch_size:
            raise ValueError("Advice is given to rows: wrap the environment in SerialEnv(1, make).")
        if keys.PRIOR_LOGITS in set(env.observation_spec.keys()):
            raise ValueError("env asks for advice already: call lore.advise once, on one without.")
        if self.actor.gate.hysteresis is not None:
            env = env.append_transform(self.actor.gate.primer())
        if describer is not None:
            return env.append_transform(self.transform(describer))
        if self.bandit is not None:
            own = {"reward": env.reward_keys, "done": env.done_keys}
            wrong = {name: found for name, found in own.items() if name not in found}
            if wrong:
                raise ValueError(
                    f"The bandit reads {list(wrong)}, and the environment writes {wrong}: rename "
                    "them (RenameTransform), or set bandit.enabled=false."
                )
            env = env.append_transform(self.bandit.primer())
            written = set(env.observation_spec.keys(True, True))
            if "step_count" not in written:
                env = env.append_transform(StepCounter())
            if self.bandit.segment_steps is None and "is_init" not in written:
                env = env.append_transform(InitTracker())
        env = env.append_transform(self.transform())
        return env if self.subgoals is None else env.append_transform(self.subgoals)

    def transform(self, describer: Describer | None = None) -> AdviceTransform:
        """Return the transform alone that writes the advice; :meth:`advise` appends all.

        Args:
            describer: As of :meth:`advise`. Default: ``None``.
        """
        calls = self.config.calls
        return AdviceTransform(
            self.service,
            describer or self._describer,
            # An entry that nobody writes: the transform looks up and never asks.
            require_key=keys.BETA if describer is None else "lore_asks",
            beta_key=keys.BETA if self.actor.prior_net is None else keys.ACQUISITION,
            beta_max=self.config.gate.beta_max,
            success_key=self._success_key,
            abstract_states=calls.abstract_states,
            noop_filter=calls.noop_filter,
            plan_horizon=calls.plan_horizon,
            action_mask=self.config.mixer.action_mask,
            subgoals=self.subgoals is not None and describer is None,
            value_key=None if calls.td_spike is None else "state_value",
            discount=self.discount,
        )

    def policy(self) -> TensorDictModuleBase:
        """Return what takes the stock actor's place in the policy that collects.

        The policy that is evaluated keeps the stock actor: it acts without advice.
        """
        parts = self.policy_modules()
        return parts[0] if len(parts) == 1 else TensorDictSequential(*parts)

    def policy_modules(self) -> list[TensorDictModuleBase]:
        """Return the parts of :meth:`policy`: the bandit, the actor, and the critic if its TD
        errors are asked for.
        """
        parts = [self.actor] if self.bandit is None else [self.bandit, self.actor]
        return parts if self.config.calls.td_spike is None else [*parts, self._value]

    def loss(
        self,
        model_loss: DreamerV3ModelLoss,
        actor_loss: DreamerV3ActorLoss,
        value_loss: DreamerV3ValueLoss,
        **settings: Any,
    ) -> LoReDreamerV3Loss:
        """Return the composed loss of stock losses with LoRe's terms.

        ``settings`` are those of :class:`~lore_torchrl.objectives.LoReDreamerV3Loss`.
        """
        loss = LoReDreamerV3Loss(model_loss, self.actor_loss(actor_loss), value_loss, **settings)
        if abs(loss.discount - self.discount) > 1e-6:
            torchrl_logger.warning(
                f"The loss discounts by {loss.discount:g} and lore.returns() by {self.discount:g}: "
                f"pass LoRe(discount={loss.discount:g})."
            )
        return loss

    def actor_loss(self, actor_loss: DreamerV3ActorLoss | DreamerActorLoss) -> LoReActorLoss:
        """Wrap a stock actor loss alone, for DreamerV1 and loops that compose their losses.

        Raises:
            ValueError: If the loss trains another actor than the one that acts.
        """
        acts, critic = self.actor, self.actor.value_model
        acting, trained = (next(a.parameters()) for a in (acts.actor, actor_loss.actor_model))
        if acting is not trained:
            raise ValueError(
                "The actor loss trains another actor than LoRe(actor=...): pass the same."
            )
        self._loss = LoReActorLoss(
            actor_loss,
            self.config.loss,
            gate=acts.gate,
            mixer=acts.mixer,
            prior_net=acts.prior_net,
            disagreement=acts.disagreement,
            value_ensemble=critic if isinstance(critic, ValueEnsemble) else None,
            dyna_weight=self.config.planner.dyna_weight,
            subgoal_head=acts.subgoal_head,
        )
        self._loss.set_bandit(self.bandit)
        return self._loss

    # ---- replay ----

    def returns(self) -> EpisodeReturns | None:
        """Return what writes real returns into replay, or ``None`` where nothing is imitated."""
        if not self.config.loss.imitation_weight:
            return None

        @torch.no_grad()
        def value(records: TensorDictBase) -> Tensor:
            states = records.select(*self._value.in_keys).to(self.device)
            value = self._value(states).get("state_value")
            return value if self._loss is None else self._loss.bounded(value)

        return EpisodeReturns(value, gamma=self.discount)

    def imitation_sampler(
        self, replay: ReplayBufferEnsemble, *, batch_size: int
    ) -> ImitationSampler | None:
        """Return what draws the steps to imitate from all of replay, or ``None`` without.

        ``batch_size`` is the number of records of a batch, sequences times length.
        """
        c = self.config
        if not (c.loss.imitation_weight and c.imitation_ratio):
            return None
        return ImitationSampler(
            replay,
            num_steps=c.imitation_ratio * batch_size,
            pseudocount=c.imitation_pseudocount,
            seed=self.seed,
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return what learns beside the agent, for the optimizer; nothing by default."""
        acts, critic = self.actor, self.actor.value_model
        ensemble = critic if isinstance(critic, ValueEnsemble) else None
        for part in (acts.prior_net, acts.disagreement, acts.subgoal_head, ensemble):
            if part is not None:
                yield from part.parameters()

    # ---- once a collector batch ----

    def observe(self, batch: TensorDictBase) -> None:
        """Take note of collected steps ``[E, T]``: segments, and whose advice acted.

        It reads ``lore_kl``, ``lore_coefficient`` and, under ``"next"``, ``reward``, ``done`` and
        ``step_count``; where one is missing it warns once and ignores the batch.

        Raises:
            ValueError: If the batch has not two dimensions, environments and steps.
        """
        if len(batch.batch_size) != 2:
            raise ValueError(
                f"observe() needs a collector's batch [E, T], got {tuple(batch.batch_size)}: call "
                "it before the batch is flattened."
            )
        self._batches += 1
        if self._batches == 1:
            self._check_restored()
        missing = [key for key in self._read_keys if batch.get(key, None) is None]
        if missing and not self._warned:
            self._warned = True
            torchrl_logger.warning(
                f"lore.observe() finds no {missing} in the batch and ignores it. "
                "Either the policy that collects has the stock actor: put lore.policy() in its "
                "place. Or a SelectTransform drops them: let lore.selected_keys through."
            )
        if missing:
            return
        if self._batches == _CHECKED_AFTER:
            self._check_wiring()
        self.observer(batch)
        if self.actor.subgoal_head is not None:
            self.actor.subgoal_head.count(self.subgoals.counts)

    def _check_restored(self) -> None:
        service = self.service
        kept = service.restored or service.cache.store is not None or not service.budget.total
        if self._loss is not None and not kept and int(self._loss.updates) > 0:
            torchrl_logger.warning(
                "The loss was restored and the advice was not: the budget starts over. Save and "
                'restore lore.state_dict() too, as by checkpoint.register("advice", lore).'
            )

    def _check_wiring(self) -> None:
        if self._loss is None:
            torchrl_logger.warning(
                f"No lore.loss(...) after {self._batches} batches: advice is paid for and acts, "
                "and nothing is learned from it."
            )
        elif self._loss.active and not int(self.actor.gate.steps):
            torchrl_logger.warning(
                "The collector acts with a copy of lore.policy(): the copy's bandit is told of no "
                "result, and its gate has running scales and a warm-up that the losses do not see. "
                "Give the collector the policy itself."
            )

    def stats(self) -> dict[str, float]:
        """Return numbers for the log, by name; waits for the device."""
        values = self.observer.stats()
        values |= advice_stats(self.service, self.late)
        if self.subgoals is not None:
            values |= {f"subgoal/{name}": value for name, value in self.subgoals.stats().items()}
        if self._loss is not None:
            values |= {
                "lore/lambda": self._loss.multiplier.item(),
                "lore/delta": self._loss.current_delta().item(),
                "lore/temperature": self.actor.mixer.temperature.temperature.item(),
            }
        return values

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return answers, ledger, gate and bandit; the learned parts are the loss's."""
        state = {
            "service": self.service.state_dict(),
            "gate": self.actor.gate.state_dict(),
            "observer": self.observer.state_dict(),
        }
        if self.bandit is not None:
            state["bandit"] = self.bandit.state_dict()
        if self.subgoals is not None:
            state["subgoals"] = self.subgoals.state_dict()
        if self.late is not None:
            state["late"] = self.late.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises:
            KeyError: If it lacks a part that is on here; nothing is loaded then.
        """
        parts = {"service", "gate", "observer"}
        parts |= {name for name in ("bandit", "subgoals") if getattr(self, name) is not None}
        if missing := sorted(parts - set(state_dict)):
            raise KeyError(
                f"This state_dict() has {sorted(state_dict)}, but no {', '.join(missing)}: it is "
                "of no LoRe, or of one with other parts on. Build LoRe with the settings that it "
                "was saved with."
            )
        if unused := sorted(set(state_dict) - parts - {"late"}):
            torchrl_logger.warning(
                f"{', '.join(unused)} of the state_dict() is off here: left out."
            )
        self.actor.gate.load_state_dict(state_dict["gate"])
        if self.bandit is not None:
            self.bandit.load_state_dict(state_dict["bandit"])
        if self.subgoals is not None:
            self.subgoals.load_state_dict(state_dict["subgoals"])
        # Of counts alone, and a run may go on in the other mode.
        if self.late is not None and "late" in state_dict:
            self.late.load_state_dict(state_dict["late"])
        self.observer.load_state_dict(state_dict["observer"])
        self.service.load_state_dict(state_dict["service"])

    def close(self) -> None:
        """Release the advisor's thread and the store, within ``config.calls.drain_s`` + 2 s."""
        self.service.close(drain_s=self.config.calls.drain_s)

    def __enter__(self) -> LoRe:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def build_lore_actor(
    config: LoReConfig,
    actor: ProbabilisticTensorDictSequential,
    value: TensorDictModuleBase,
    *,
    num_actions: int,
    anchors: Tensor | Sequence[Sequence[float]] | None = None,
    latent_sizes: tuple[int, int] | None = None,
    scale_range: tuple[float, float] | None = None,
    world: WorldModel | None = None,
    num_subgoals: int = 0,
    device: torch.device | str = "cpu",
) -> LoReActor:
    """Build gate, mixer, aligner and the parts that learn around a stock actor.

    Arguments are as of :class:`LoRe`; ``num_actions`` is the number of actions that advice names,
    ``anchors`` are as of :class:`~lore_torchrl.policies.GaussianPolicy`, ``num_subgoals`` is the
    number of the describer's subgoals.

    Raises:
        ValueError: If a part needs what is not given.
    """
    c = config

    def sizes(wanted: str) -> tuple[int, int]:
        if latent_sizes is None:
            raise ValueError(
                f"{wanted} learns from the latent state: pass latent_sizes=(state, belief)."
            )
        if len(latent_sizes) != 2 or not all(type(n) is int and n > 0 for n in latent_sizes):
            raise ValueError(f"latent_sizes must be (state, belief), got {latent_sizes!r}.")
        return latent_sizes

    if world is None and (c.planner.enabled or c.mixer.value_temperature is not None):
        raise ValueError(
            "planner.enabled and mixer.value_temperature step the world model: pass "
            "world=WorldModel(imagination, continuation, value)."
        )
    # What is drawn for LoRe's own networks must not move the agent's random stream.
    cuda = [device] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        gate = UncertaintyGate(**vars(c.gate))
        kind = policy_kind(actor, anchors, scale_range=scale_range, min_scale=c.mixer.min_scale)
        if isinstance(kind, GaussianPolicy) and len(kind.actions) != num_actions:
            raise ValueError(
                f"Each named action needs an anchor: got {len(kind.actions)} for {num_actions}."
            )
        aligner = TemperatureAligner(**vars(c.temperature))
        mixer = LogitMixer(
            kind,
            max_kl=c.mixer.max_kl,
            mode=c.mixer.mode,
            temperature=aligner,
            action_mask=c.mixer.action_mask,
        )
        critic: TensorDictModuleBase = _logits_of(value, gate.value_key)
        if c.gate.value_source == "ensemble":
            shape = sizes("gate.value_source=ensemble")
            critic = ValueEnsemble(*shape, **vars(c.value_ensemble))
        disagreement = prior_net = planner = subgoal_head = None
        if c.gate.disagreement_weight:
            shape = sizes("gate.disagreement_weight > 0")
            dims = num_actions if anchors is None else len(anchors[0])
            disagreement = LatentDisagreement(*shape, dims, **vars(c.disagreement))
        if c.prior_net.enabled:
            shape = sizes("prior_net.enabled")
            prior_net = PriorNet(sum(shape), num_actions, **vars(c.prior_net))
        if c.planner.enabled:
            planner = LatentPlanner(world, actor, kind, **vars(c.planner))
        if c.subgoal.imagine:
            shape, weight = sizes("subgoal.imagine"), c.subgoal.imagine_weight
            subgoal_head = SubgoalHead(sum(shape), num_subgoals, weight=weight)
    parts = {
        "disagreement": disagreement,
        "prior_net": prior_net,
        "planner": planner,
        "subgoal_head": subgoal_head,
    }
    values = {}
    if c.mixer.value_temperature is not None:
        values = {"world": world, "value_temperature": c.mixer.value_temperature}
    lore_actor = LoReActor(actor, gate, mixer, value_model=critic, **parts, **values)
    for part in (gate, mixer, critic, *parts.values()):
        if part is not None:
            part.to(device)
    return lore_actor.compile_decision() if c.compile_decision else lore_actor


def policy_kind(
    actor: ProbabilisticTensorDictSequential,
    anchors: Tensor | Sequence[Sequence[float]] | None = None,
    *,
    scale_range: tuple[float, float] | None = None,
    min_scale: float = 0.3,
) -> PolicyKind:
    """Return the kind of a stock actor's policy, with the describer's anchors.

    Raises:
        ValueError: If actions are continuous, and there are no anchors or no scale range.
    """
    head = head_of(actor)
    if "loc" not in getattr(head, "dist_keys", ()):
        return CategoricalPolicy()
    if anchors is None:
        raise ValueError("Advice on continuous actions needs the describer's anchors.")
    scale_range = scale_range or getattr(actor, "scale_range", None)
    if scale_range is None:
        raise ValueError(
            "The entropy of a Gaussian policy is measured between its least and its greatest "
            "scale: pass scale_range=(low, high)."
        )
    bounds, kwargs = None, head.distribution_kwargs or {}
    if head.distribution_class is TanhNormal:
        bounds = (kwargs.get("low", -1.0), kwargs.get("high", 1.0))
    return GaussianPolicy(anchors, bounds=bounds, scale_range=scale_range, min_scale=min_scale)


def build_bandit(
    config: LoReConfig, *, seed: int = 0, device: torch.device | str = "cpu"
) -> AdviceBandit | None:
    """Build the bandit that chooses where advice acts, if the configuration has one."""
    settings = dict(vars(config.bandit))
    if not settings.pop("enabled"):
        return None
    return AdviceBandit(**settings, seed=seed).to(device)


def build_service(config: CallsConfig, advisor: Advisor) -> AdviceService:
    """Build the service that asks ``advisor`` within the configured limits."""
    c = config
    store = None if c.store is None else AdviceStore(c.store)
    budget = CallBudget(
        c.budget, max_tokens=c.max_tokens, max_cost=c.max_cost, store=store, ledger=c.ledger
    )
    if store is not None and (spent := budget.spent):
        torchrl_logger.info(f"Ledger {c.ledger!r}: {spent} of {c.budget} calls are spent.")
    cache = AdviceCache(
        c.cache_size,
        store=store,
        ttl_steps=c.ttl_steps,
        answers_averaged=c.answers_averaged,
        averaging_visits=c.averaging_visits,
        prefix=getattr(advisor, "cache_prefix", ""),
    )
    triggers: list[Trigger] = []
    if not c.always:
        if c.after_reset or c.no_reward_steps is not None:
            triggers.append(MacroBoundaries(c.after_reset, c.no_reward_steps))
        if c.novelty is not None:
            triggers.append(Novelty(c.novelty))
        if c.td_spike is not None:
            triggers.append(TDErrorSpike(c.td_spike, c.td_spike_low))
    policy = CallPolicy(
        budget,
        triggers=triggers,
        cooldown=Cooldown(c.cooldown, c.cooldown_after_success),
        min_beta=c.min_beta,
        calls_per_step=c.calls_per_step,
    )
    return AdviceService(
        advisor,
        budget=budget,
        policy=policy,
        cache=cache,
        timeout_s=c.timeout_s,
        mode=c.mode,
        max_in_flight=c.max_in_flight,
    )


def advice_stats(service: AdviceService, late: LateAdvice | None = None) -> dict[str, float]:
    """Return the advisor's numbers, and those of late answers, by their names in the log."""
    values = service.stats() | ({} if late is None else late.stats())
    errors = {f"error_{kind}": float(count) for kind, count in service.errors.copy().items()}
    return {f"advice/{name}": value for name, value in (values | errors).items()}


def _logits_of(critic: TensorDictModuleBase, key: NestedKey) -> TensorDictModuleBase:
    """Return a critic up to the part that writes its logits: their decoding is not wanted."""
    parts = list(critic) if isinstance(critic, TensorDictSequential) else [critic]
    last = next((index for index, part in enumerate(parts) if key in part.out_keys), 0)
    return parts[0] if last == 0 else TensorDictSequential(*parts[: last + 1])
