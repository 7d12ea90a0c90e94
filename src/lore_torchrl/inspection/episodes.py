"""Episodes that the agent of a checkpoint plays, with what led to each action."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from lore_torchrl import keys
from lore_torchrl.advisors.base import AdviceRequest, Advisor, Describer
from lore_torchrl.configs import EpsilonConfig, TrainConfig
from lore_torchrl.dreamer.acting import Acting, adapter_of, build_acting, build_env_agent
from lore_torchrl.dreamer.agent import DreamerAgent
from lore_torchrl.dreamer.checkpoint import RunCheckpoint, find_checkpoint, load_config, steps_of
from lore_torchrl.dreamer.learner import build_learner
from lore_torchrl.envs.adapter import EnvAdapter, anchors_of, read_row
from lore_torchrl.envs.batch import close_env
from lore_torchrl.lore import policy_kind
from lore_torchrl.policies import PolicyKind

#: Where the advice of a step came from.
SOURCES = ("none", "call", "cache", "abstract state", "PriorNet")


@dataclass(frozen=True)
class Moment:
    r"""One step.

    Args:
        frame: What a person sees, uint8 ``[H, W, 3]``.
        text: What the advisor would be told.
        policy: :math:`\pi_{wm}`, probabilities of the named actions. Where actions are
            continuous: of lying nearest to each of the describer's anchors.
        prior: :math:`\rho`, the advice as probabilities; ``None`` where there is none.
        mix: :math:`\pi_{mix}`, what the action was drawn from, as ``policy``.
        action: Index of the action taken, or of the anchor nearest to it.
        exact: A continuous action itself, else nothing.
        source: One of :data:`SOURCES`.
        confidence: The advice's confidence, 0 to 1.
        beta: The gate's :math:`\beta(s)`.
        coefficient: Mixing coefficient of the segment, 0 or 1.
        kl: KL(mix, policy), nats.
        uncertainty: What each of the gate's parts adds to it, by name.
        value: The critic's value.
        reward: Reward of the step.
    """

    frame: np.ndarray
    text: str
    policy: tuple[float, ...]
    prior: tuple[float, ...] | None
    mix: tuple[float, ...]
    action: int
    exact: tuple[float, ...]
    source: str
    confidence: float
    beta: float
    coefficient: float
    kl: float
    uncertainty: dict[str, float]
    value: float
    reward: float


@dataclass(frozen=True)
class Episode:
    """One episode, to its end or to where it was cut, and whether it succeeded."""

    moments: tuple[Moment, ...]
    success: bool

    @property
    def episode_return(self) -> float:
        """Sum of its rewards."""
        return sum(moment.reward for moment in self.moments)

    @property
    def outcome(self) -> str:
        """How it went, in words."""
        success = "success" if self.success else "no success"
        return f"{success}, return {self.episode_return:.2f}, {len(self.moments)} steps"


@dataclass(frozen=True)
class Recording:
    """Episodes that a checkpoint played, after so many environment steps of its training."""

    checkpoint: Path
    step: int
    env_id: str
    actions: tuple[str, ...]
    episodes: tuple[Episode, ...]


def play(
    checkpoint: str | Path,
    *,
    episodes: int = 1,
    calls: int = 0,
    coefficient: float | None = None,
    seed: int | None = None,
    deterministic: bool = False,
    max_steps: int | None = None,
    trust: Collection[str] = (),
    advisor: Advisor | None = None,
) -> Recording:
    """Play held-out episodes with the agent of a checkpoint, advice included.

    Advice comes from the checkpoint's cache and PriorNet; new questions are asked only with
    ``calls``, and their answers are kept nowhere. Nothing is learned, and nothing of the run
    is changed. There are no random steps (``lore.epsilon``).

    ``advisor`` is asked instead of the run's own: answers of another model or prompt are not
    shared, those in the cache included. The other settings are as of
    :class:`~lore_torchrl.configs.InspectConfig`.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        CheckpointError: If it is damaged, or names what is not in ``trust``.
        ValueError: If ``coefficient`` is out of range or the run has no bandit, or actions are
            continuous and the describer has no anchors, or the environment gives no pictures.
    """
    path = find_checkpoint(str(checkpoint))
    config = load_config(path, trust=trust, asks=bool(calls) and advisor is None)
    config = replace(config, record=None, seed=config.seed if seed is None else seed)
    config.lore.calls.mode, config.lore.calls.store = "blocking", None
    config.lore.epsilon = EpsilonConfig()
    if config.lore.enabled and advisor is None:
        if not calls:
            advisor = _CachedAnswersOnly(path)
        elif "missing" in config.advisor:
            # A question that the recording lacks must not end the inspection.
            config.advisor = {**config.advisor, "missing": "mask"}
    adapter = adapter_of(config.env)
    kind = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
    with torch.no_grad(), torch.random.fork_rng(devices=[]), set_exploration_type(kind):
        agent, acting = restore(config, adapter, path, advisor)
        try:
            if "pixels" not in set(acting.env.observation_spec.keys()):
                raise ValueError(
                    f"{type(adapter).__name__}.make_env(pixels=True) writes no `pixels`, uint8 "
                    "[N, H, W, 3], which an inspection shows: add that entry."
                )
            if acting.service is not None:
                acting.service.budget.total = acting.service.budget.spent + calls
            describer = adapter.make_describer(memory=config.env.memory)
            player = _Player(describer, agent, acting, coefficient)
            torch.manual_seed(config.seed)
            played = tuple(player.episodes(episodes, max_steps))
        finally:
            if acting.service is not None:
                acting.service.close()
            close_env(acting.env)
    return Recording(path, steps_of(path), config.env.id, describer.actions, played)


def restore(
    config: TrainConfig, adapter: EnvAdapter, path: Path, advisor: Advisor | None = None
) -> tuple[DreamerAgent, Acting]:
    """Return the agent of a checkpoint, and what it acts with in one held-out environment."""
    agent = build_env_agent(config, adapter)
    acting = build_acting(
        config, adapter, agent, num_envs=1, evaluation=True, pixels=True, advisor=advisor
    )
    learner = build_learner(config.dreamer, agent, lore=acting.lore)
    # The bandit is in no loss, only in the collector's policy; which may have random steps too.
    policy = _reader(
        lambda state: acting.policy.load_state_dict(state["policy_state_dict"], strict=False)
    )
    checkpoint = RunCheckpoint(loss_module=learner.loss, collector=policy)
    if acting.service is not None:
        checkpoint.register("advice", acting.service)
    if acting.programs is not None:
        checkpoint.register("trainer_module.programs", acting.programs)
    checkpoint.load(path, map_location="cpu")
    return agent, acting


def _reader(read: Callable[[Mapping[str, Any]], Any]) -> SimpleNamespace:
    """Return a part of a checkpoint that is read by a function, and never saved."""
    return SimpleNamespace(load_state_dict=read, state_dict=dict)


class _CachedAnswersOnly:
    """Takes the place of the run's advisor, which need not be there if nothing is asked."""

    def __init__(self, path: Path) -> None:
        found: dict[str, Any] = {}
        RunCheckpoint(advice=_reader(found.update)).load(path)
        # Answers in the cache are found only under the prefix of who gave them.
        self.cache_prefix = str(found.get("cache", {}).get("prefix", ""))

    async def advise(self, requests: Sequence[AdviceRequest]) -> list[None]:
        """Answer nothing."""
        return [None] * len(requests)


class _Player:
    """Steps one environment and describes each step."""

    def __init__(
        self, describer: Describer, agent: DreamerAgent, acting: Acting, coefficient: float | None
    ) -> None:
        self.describer, self.agent, self.acting = describer, agent, acting
        self.coefficient = coefficient
        self.kind = _kind_of(describer, agent, acting)
        acting.policy.eval()
        bandit = None if acting.lore is None else acting.lore.bandit
        if bandit is None:
            if coefficient not in (None, 1.0):
                raise ValueError(f"coefficient={coefficient}: this run has no bandit, it is 1.")
            self.coefficient = None
        elif coefficient is None:
            bandit.train()
        elif not 0 <= coefficient <= 1:
            raise ValueError(f"coefficient must lie in [0, 1], got {coefficient}.")

    def episodes(self, number: int, max_steps: int | None) -> Iterator[Episode]:
        env, now = self.acting.env, None
        for _ in range(number):
            if now is None:
                self._calls = self._count()
                now = env.reset()
            moments: list[Moment] = []
            action, ended = None, False
            while not ended and (max_steps is None or len(moments) < max_steps):
                if self.coefficient is not None:
                    carried = now[keys.COEFFICIENT]
                    now[keys.COEFFICIENT] = torch.full_like(carried, self.coefficient)
                acted = self.acting.policy(now)
                seen = read_row(acted, 0, self.describer.in_keys)
                self.describer.observe(0, seen, action, reset=action is None)
                request = self.describer.request(0, seen)
                came_from = self._source(acted, request.cache_key)
                stepped, now = env.step_and_maybe_reset(acted)
                moments.append(self._moment(stepped, request.description, came_from))
                action = moments[-1].action
                ended = bool(stepped["next", "done"].any())
            yield Episode(tuple(moments), bool(ended and stepped["next", "success"].any()))
            if not ended:
                now = None

    def _count(self) -> float:
        return 0.0 if self.acting.service is None else self.acting.service.stats()["calls"]

    def _source(self, td: TensorDictBase, key: str) -> str:
        """Tell where the advice of this step came from."""
        before, self._calls = self._calls, self._count()
        if self.acting.service is None:
            return "none"
        if bool(td[keys.MASK].any()):
            if self._calls > before:
                return "call"
            return "abstract state" if self.acting.service.lookup(key) is None else "cache"
        origin = td.get(keys.ORIGIN, None)
        learned = origin is not None and bool((origin == keys.ORIGIN_PRIOR_NET).any())
        return "PriorNet" if learned else "none"

    def _moment(self, td: TensorDictBase, text: str, source: str) -> Moment:
        actor = self.acting.lore_actor
        policy = mix = self._choices(td, self.agent.actor[-1].in_keys)
        prior, parts, confidence = None, {}, 0.0
        if actor is not None:
            mix = self._choices(td, self.kind.mix_keys)
            why, advice = actor.explain(td)
            parts = {name: float(part) for name, part in why.items()}
            if source != "none":
                prior = tuple(torch.softmax(advice.prior_logits[0], -1).tolist())
                confidence = float(advice.weight)
        value = self.agent.value(td.select("state", "belief"))["state_value"]

        def scalar(key: str, default: float) -> float:
            found = td.get(key, None)
            return default if found is None else float(found)

        return Moment(
            frame=td["pixels"][0].numpy().copy(),
            text=text,
            policy=policy,
            prior=prior,
            mix=mix,
            action=int(self.kind.nearest(td["action"][0])),
            exact=() if self.agent.action_bounds is None else tuple(td["action"][0].tolist()),
            source=source,
            confidence=confidence,
            beta=scalar(keys.BETA, 0.0),
            coefficient=scalar(keys.COEFFICIENT, 0.0 if actor is None else 1.0),
            kl=scalar(keys.KL, 0.0),
            uncertainty=parts,
            value=float(value),
            reward=float(keys.raw_reward(td["next"])),
        )

    def _choices(self, td: TensorDictBase, policy_keys: Sequence[str]) -> tuple[float, ...]:
        policy = self.kind.read(*(td[key][0].float() for key in policy_keys))
        return tuple(self.kind.choices(policy).tolist())


def _kind_of(describer: Describer, agent: DreamerAgent, acting: Acting) -> PolicyKind:
    """Return the kind of the acting policy, by which a stock agent's is shown too."""
    if acting.lore_actor is not None:
        return acting.lore_actor.mixer.policy
    anchors = anchors_of(describer)
    if agent.action_bounds is not None and anchors is None:
        raise ValueError(
            f"{type(describer).__name__} has no anchors: a continuous policy is shown by how "
            "likely its actions are to lie nearest to each of them."
        )
    return policy_kind(agent.actor, anchors)
