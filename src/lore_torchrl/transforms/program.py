"""Base of the transforms that run programs on what each row of a batch sees."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from tensordict import TensorDictBase

from lore_torchrl import keys
from lore_torchrl.advisors.base import Describer
from lore_torchrl.advisors.errors import AdviceError
from lore_torchrl.sandbox import ProgramSet, UsedProgram, discounted_returns
from lore_torchrl.sandbox.program import Kind
from lore_torchrl.transforms.rows import (
    RowTransform,
    action_indices,
    any_true,
    entry,
    flat_rows,
    observations_of,
)


def check_program_view(describer: Describer) -> None:
    """Raise a ``ValueError`` if a describer has no ``program_view``, what programs see."""
    if not hasattr(describer, "program_view"):
        raise ValueError(
            f"{type(describer).__name__} has no program_view(): give it one, which returns "
            "what a program sees as plain Python data, or switch programs off."
        )


class ProgramTransform(RowTransform):
    """Follows the episodes of a batch and runs programs on each new observation.

    Which programs run in an episode is settled at its reset: those that are not retired, and
    whose bandit is not in a block without them. When it ends, the bandits learn its raw return.

    Args:
        programs: The programs.
        describer: Gives :meth:`program_view`, what a program sees. It must be this transform's
            own, since it remembers what the rows have seen.

    Keyword Args:
        gamma: Discount of the learner, from 0 to 1. Default: ``1 - 1/333``.
        learning: Whether the bandits choose and learn, as in training; ``False`` runs all
            programs that are not retired. Default: ``True``.

    Raises:
        ValueError: If the programs are not of this :attr:`kind`, or the describer has no
            ``program_view``, or ``gamma`` is out of range.
    """

    #: Kind of its programs, and what is written.
    kind: ClassVar[Kind]
    writes: ClassVar[Sequence[str]]

    def __init__(
        self,
        programs: ProgramSet,
        describer: Describer,
        *,
        gamma: float = 1.0 - 1.0 / 333.0,
        learning: bool = True,
    ) -> None:
        if programs.kind != self.kind:
            name = type(self).__name__
            raise ValueError(f"{name} needs programs of {self.kind}, got {programs.kind}.")
        check_program_view(describer)
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma must lie in [0, 1], got {gamma}.")
        super().__init__(describer, self.writes)
        self.programs = programs
        self.gamma, self.learning = gamma, learning
        self._begin(0)

    def _begin(self, rows: int) -> None:
        self._ended = np.ones(rows, dtype=bool)
        # Of each row's episode: the bandits' blocks, the programs that run, what they computed,
        # and the raw rewards.
        self._blocks: list[dict[UsedProgram, int]] = [{} for _ in range(rows)]
        self._running: list[list[UsedProgram]] = [[] for _ in range(rows)]
        self._values: list[dict[UsedProgram, list[np.ndarray]]] = [{} for _ in range(rows)]
        self._rewards: list[list[float]] = [[] for _ in range(rows)]

    def _candidates(self) -> list[UsedProgram]:
        """Return the programs of an episode which begins, before the bandits leave some out."""
        return self.programs.active()

    @abstractmethod
    def _write(
        self,
        tensordict: TensorDictBase,
        found: dict[int, dict[UsedProgram, np.ndarray]],
        before: TensorDictBase | None,
    ) -> None:
        """Write what the programs ``found`` on each row's new observation.

        ``before`` is the step's own tensordict, ``None`` at a reset.
        """

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        rows = tensordict_reset.numel()
        reset = self._reset_rows(tensordict, rows, len(self._ended))
        if reset is None:
            reset = np.ones(rows, dtype=bool)
        self._ended[reset] = False
        for row in np.flatnonzero(reset).tolist():
            candidates = self._candidates()
            self._blocks[row] = {used: used.bandit.block for used in candidates}
            self._running[row] = [u for u in candidates if u.bandit.on or not self.learning]
            self._values[row] = {used: [] for used in self._running[row]}
            self._rewards[row] = []
        self._write(tensordict_reset, self._compute(tensordict_reset, reset, None), None)
        return tensordict_reset

    _reset_on_native_autoreset = _reset

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rows = next_tensordict.numel()
        if rows != len(self._ended):
            raise RuntimeError(f"Reset with {len(self._ended)} rows, stepped with {rows}.")
        actions = action_indices(tensordict, self.parent.action_key, self.describer)
        stepped = ~self._ended
        # Before it is shaped.
        shaped = entry(next_tensordict, self.parent.reward_key)
        raw = next_tensordict.get(keys.RAW_REWARD, shaped)
        rewards = flat_rows(raw, rows).sum(1).tolist()
        found = self._compute(next_tensordict, stepped, actions)
        self._write(next_tensordict, found, tensordict)
        ended = stepped & any_true(next_tensordict, self.parent.done_keys, rows)
        for row in np.flatnonzero(stepped).tolist():
            self._rewards[row].append(rewards[row])
            if ended[row]:
                self._end(row)
        self._ended |= ended
        return next_tensordict

    def _compute(
        self, tensordict: TensorDictBase, where: np.ndarray, actions: list[int] | None
    ) -> dict[int, dict[UsedProgram, np.ndarray]]:
        """Run each row's programs on its observation; ``actions`` are ``None`` at a reset."""
        observations = observations_of(tensordict, self.in_keys)
        found = {}
        for row in np.flatnonzero(where).tolist():
            observation = observations[row]
            action = None if actions is None else actions[row]
            running = [used for used in self._running[row] if used.retired is None]
            found[row] = {}
            try:
                with self._describing("a step"):
                    self.describer.observe(row, observation, action, reset=actions is None)
                    if running:
                        view = self.describer.program_view(row, observation)
                        found[row] = self.programs.compute(running, view)
            except AdviceError as error:
                self.programs.fail(running, str(error))
                self._running[row] = []  # what it remembers is wrong until the reset
            for used, values in self._values[row].items():
                # Of a failure it is not known what it would have told.
                values.append(found[row].get(used, values[-1] if values else None))
        return found

    def _end(self, row: int) -> None:
        """Tell the programs of an episode what it returned."""
        if not self.learning:
            return
        rewards = np.array(self._rewards[row])
        if not np.isfinite(rewards).all():
            return  # Such an episode tells nothing.
        returns = discounted_returns(rewards, self.gamma)
        for used in self._running[row]:
            # The last observation is followed by no reward.
            told = self._values[row][used][:-1]
            if all(values is not None for values in told):
                used.observe(np.stack(told), returns)
        for used, block in self._blocks[row].items():
            self.programs.observe(used, block, float(rewards.sum()))
