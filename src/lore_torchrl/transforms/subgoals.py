"""The transform that pays a bonus where the advisor's subgoal is reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl import logger as torchrl_logger
from torchrl.data.tensor_specs import Bounded, TensorSpec, Unbounded
from torchrl.envs.transforms.utils import _get_reset

from lore_torchrl import keys
from lore_torchrl.advisors.base import AdviceRequest, Describer
from lore_torchrl.advisors.errors import AdviceError
from lore_torchrl.configs.lore import SubgoalConfig
from lore_torchrl.sandbox import Program, ProgramSet
from lore_torchrl.transforms.program import check_program_view
from lore_torchrl.transforms.rows import RowTransform, observations_of


class SubgoalBonus(RowTransform):
    r"""Adds a bonus to the reward where a row reaches its subgoal, once an episode and subgoal.

    A row's subgoal :math:`g` is the latest that advice has named in this episode, as long as it is
    open: not true of the observation, and not reached as the row's subgoal in this episode before.
    With :math:`n_g` how often it has been reached so in the run, all rows of this step included, a
    step becomes

    .. math::
        r + \min\bigl(\mathtt{scale} / \sqrt{n_g},\; B - \textstyle\sum b\bigr)
            \quad\text{where } g \text{ is true of the next observation}

    with :math:`B` the ``episode_budget`` and :math:`\sum b` the episode's bonuses before. Goals
    from a language model, with novelty: ELLM, https://arxiv.org/abs/2302.06692; DLLM,
    https://arxiv.org/abs/2406.07381.

    It stands after an :class:`AdviceTransform` with ``subgoals=True`` and writes ``llm_subgoal``
    ``[*B, G]`` float32, one-hot, zeros where none is open; ``llm_reached`` ``[*B, G]`` float32,
    which are true of the observation; and ``raw_reward`` ``[*B, 1]``, the environment's own reward,
    unless a transform before it has: 0 at a reset.

    Args:
        describer: Its ``reached(row, observation)`` returns which of its ``subgoals`` are true of
            an observation, by that alone.

    Keyword Args:
        scale: Bonus of the first time. Default: ``0.1``.
        episode_budget: Most bonus of one episode. Default: ``0.5``.

    Raises:
        TypeError: If the describer has no ``subgoals`` or no ``reached()``.
        ValueError: If a number is negative or not finite.
    """

    follows_advice = True

    counts: Tensor
    paid: Tensor
    steps: Tensor
    faults: Tensor

    def __init__(
        self, describer: Describer, *, scale: float = 0.1, episode_budget: float = 0.5
    ) -> None:
        SubgoalConfig(scale=scale, episode_budget=episode_budget)
        self.names = subgoals_of(describer)
        super().__init__(describer, [keys.SUBGOAL, keys.REACHED, keys.RAW_REWARD])
        self.scale, self.episode_budget = scale, episode_budget
        # Times that each was reached; for the log, all bonuses, steps and failures of reached().
        self.register_buffer("counts", torch.zeros(len(self.names)))
        self.register_buffer("paid", torch.zeros((), dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("faults", torch.zeros((), dtype=torch.long))
        self._begin(0)

    def _begin(self, rows: int) -> None:
        # Their shape is that of the batch, which the first reset tells.
        self._done = self._current = self._spent = torch.zeros(rows)

    def _specs(self, batch: Sequence[int]) -> dict[str, TensorSpec]:
        true = Bounded(0.0, 1.0, (*batch, len(self.names)), dtype=torch.float32)
        reward = Unbounded((*batch, 1), dtype=torch.float32)
        return {keys.SUBGOAL: true, keys.REACHED: true.clone(), keys.RAW_REWARD: reward}

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        reached = self._reached(tensordict_reset)
        begins = _get_reset(self.parent.reset_keys[0], tensordict).view(*reached.shape[:-1], 1)
        if self._done.shape != reached.shape:
            self._done, self._current = torch.zeros_like(reached), torch.zeros_like(reached)
            self._spent = torch.zeros_like(reached[..., :1])
        for rows in (self._done, self._current, self._spent):
            rows.masked_fill_(begins, 0.0)
        advised = tensordict_reset.get(keys.SUBGOAL)
        # Rows that go on may show another observation here than the one they see.
        self._current = torch.where(begins, advised * (1.0 - reached), self._current)
        tensordict_reset.set(keys.RAW_REWARD, torch.zeros_like(self._spent))
        return self._write(tensordict_reset, reached)

    _reset_on_native_autoreset = _reset

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        reached, key = self._reached(next_tensordict), self.parent.reward_key
        hit = self._current * reached
        self._done = torch.maximum(self._done, hit)
        self.counts += hit.reshape(-1, len(self.names)).sum(0)
        # The bonus of a step is of at most one subgoal.
        bonus = (hit * self.scale * self.counts.clamp_min(1.0).rsqrt()).sum(-1, keepdim=True)
        bonus = torch.minimum(bonus, (self.episode_budget - self._spent).clamp_min(0.0))
        self._spent = self._spent + bonus
        self.paid += bonus.sum()
        self.steps += bonus.numel()
        reward = next_tensordict.get(key)
        if keys.RAW_REWARD not in next_tensordict:
            next_tensordict.set(keys.RAW_REWARD, reward.float())
        next_tensordict.set(key, reward + bonus.view(reward.shape).to(reward))
        advised = next_tensordict.get(keys.SUBGOAL)
        named = advised.any(-1, keepdim=True)
        self._current = torch.where(named, advised, self._current)
        self._current = self._current * (1.0 - self._done) * (1.0 - reached)
        return self._write(next_tensordict, reached)

    def _write(self, tensordict: TensorDictBase, reached: Tensor) -> TensorDictBase:
        # Collectors keep what they are given by reference.
        return tensordict.set(keys.SUBGOAL, self._current.clone()).set(keys.REACHED, reached)

    def _reached(self, tensordict: TensorDictBase) -> Tensor:
        """Return which subgoals are true of each row's observation, ``[*B, G]``."""
        rows = []
        for row, observation in enumerate(observations_of(tensordict, self.in_keys)):
            true: set[str] = set()
            try:
                with self._describing("what is reached"):
                    true = set(self.describer.reached(row, observation))
            except AdviceError as error:
                if not self.faults:
                    torchrl_logger.warning(f"No subgoal is reached where {error}; it is counted.")
                self.faults += 1
            rows.append([float(name in true) for name in self.names])
        return torch.tensor(rows, device=tensordict.device).view(*tensordict.batch_size, -1)

    def stats(self) -> dict[str, float]:
        """Return how often subgoals were reached, a step's mean bonus, and ``reached()`` failed."""
        mean = (self.paid / self.steps.clamp_min(1)).item()
        return {"reached": self.counts.sum().item(), "bonus": mean, "faults": self.faults.item()}


class ProgramSubgoals:
    """A describer whose subgoals are its own, if it has any, and those that programs define.

    Where a program fails, or is retired, none of its subgoals is true. A name that the describer
    has too is true where either says so. Everything else is the describer's.

    Args:
        describer: What to ask with; it needs a ``program_view``.
        programs: Programs of ``subgoals``, each checked: what they name is in the prompt.

    Raises:
        ValueError: If the describer has no ``program_view``, the programs are of another kind, or
            one was never checked.
    """

    def __init__(self, describer: Describer, programs: ProgramSet) -> None:
        check_program_view(describer)
        if programs.kind != "subgoals":
            raise ValueError(f"ProgramSubgoals needs programs of subgoals, got {programs.kind}.")
        self.describer, self.programs = describer, programs
        self.subgoals = subgoal_names(describer, [used.program for used in programs.used])

    def __getattr__(self, name: str) -> Any:
        # Unpickling looks for attributes before there are any.
        if name == "describer":
            raise AttributeError(name)
        return getattr(self.describer, name)

    def request(self, row: int, observation: Mapping[str, Any]) -> AdviceRequest:
        """Return the full question, with all names."""
        return replace(self.describer.request(row, observation), subgoals=self.subgoals)

    def reached(self, row: int, observation: Mapping[str, Any]) -> set[str]:
        """Return which of :attr:`subgoals` are true of an observation."""
        known = getattr(self.describer, "reached", None)
        true = set() if known is None else set(known(row, observation))
        active = self.programs.active()
        if active:
            view = self.describer.program_view(row, observation)
            for used, values in self.programs.compute(active, view).items():
                true.update(name for name, value in zip(used.names, values, strict=True) if value)
        return true


def subgoal_names(describer: Describer | None, programs: Sequence[Program]) -> tuple[str, ...]:
    """Return the names of a describer's subgoals and of those that ``programs`` define.

    Raises:
        ValueError: If a program was never checked, so that its names are unknown.
    """
    names = list(getattr(describer, "subgoals", ()))
    for program in programs:
        if "names" not in program.checks:
            raise ValueError(
                f"The subgoals of program {program.code_id} are not known: check it first by "
                "lore_torchrl.sandbox.judged(program, views), and keep what that returns."
            )
        names += program.checks["names"]
    return tuple(dict.fromkeys(names))


def subgoals_of(describer: Describer) -> Sequence[str]:
    """Return the names of a describer's subgoals.

    Raises:
        TypeError: If it has none, or cannot tell which are reached.
    """
    names = getattr(describer, "subgoals", ())
    if not names or not callable(getattr(describer, "reached", None)):
        raise TypeError(
            f"{type(describer).__name__} has no subgoals with reached(row, observation): give it "
            "both, name a file of programs in lore.subgoal.path, or set lore.subgoal.enabled=false."
        )
    return names
