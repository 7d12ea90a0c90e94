"""Which rows are worth a call now: cooldown, macro boundaries, and the choice among rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lore_torchrl.service.budget import CallBudget


class Cooldown:
    """A pause after each call, and another after each success, in environment steps.

    Steps of all rows count together: with four environments, one vector step is four.

    Args:
        steps: Environment steps between two calls. Default: ``0`` (no pause).
        steps_after_success: Environment steps without a call after a success.
            Default: ``0``.

    Raises:
        ValueError: If either is negative.

    Examples:
        >>> cooldown = Cooldown(steps=8)
        >>> cooldown.start()
        >>> cooldown.advance(4)
        >>> cooldown.left, cooldown.ready
        (4, False)
    """

    def __init__(self, steps: int = 0, steps_after_success: int = 0) -> None:
        if steps < 0 or steps_after_success < 0:
            raise ValueError(
                "Cooldown counts environment steps, which cannot be negative: got "
                f"steps={steps}, steps_after_success={steps_after_success}. Use 0 for no pause."
            )
        self.steps = steps
        self.steps_after_success = steps_after_success
        self.left = 0

    @property
    def ready(self) -> bool:
        """Whether a call may be made now."""
        return self.left == 0

    def advance(self, steps: int) -> None:
        """Let ``steps`` environment steps pass."""
        self.left = max(0, self.left - steps)

    def start(self) -> None:
        """Begin the pause after a call."""
        self.left = max(self.left, self.steps)

    def success(self) -> None:
        """Begin the pause after a success; a longer pause under way goes on."""
        self.left = max(self.left, self.steps_after_success)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps that are left of the pause."""
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the pause.

        Args:
            state: What :meth:`state_dict` returned.
        """
        self.left = int(state["left"])


class MacroBoundaries:
    """Moments at which a row deserves fresh advice: a new episode, or a long dry spell.

    A boundary stays due until the row is served. Otherwise one that falls into a
    cooldown, or beside a row with a higher beta, would be lost for the episode.

    Args:
        after_reset: Whether a reset is a boundary. Default: ``True``.
        no_reward_steps: Steps of one row without a reward above 0 that make a
            boundary; ``None`` for never. Default: ``None``.

    Raises:
        ValueError: If ``no_reward_steps`` is below 1, or no boundary could ever occur.

    Examples:
        >>> boundaries = MacroBoundaries(after_reset=False, no_reward_steps=2)
        >>> for _ in range(2):
        ...     boundaries.update(resets=[False, False], rewards=[0.0, 1.0])
        >>> boundaries.due(0), boundaries.due(1)
        (True, False)
    """

    def __init__(self, after_reset: bool = True, no_reward_steps: int | None = None) -> None:
        if no_reward_steps is not None and no_reward_steps < 1:
            raise ValueError(
                f"no_reward_steps must be at least 1, got {no_reward_steps}. Use None for never."
            )
        if not after_reset and no_reward_steps is None:
            raise ValueError(
                "MacroBoundaries(after_reset=False, no_reward_steps=None) would never ask. "
                "Switch one of them on."
            )
        self.after_reset = after_reset
        self.no_reward_steps = no_reward_steps
        self._fresh: list[bool] = []
        self._dry: list[int] = []

    def update(self, *, resets: Sequence[bool], rewards: Sequence[float] | None) -> None:
        """Take note of one step of all rows.

        Args:
            resets: Whether each row has just been reset.
            rewards: Reward of each row; ``None`` where no row made a step.
        """
        if len(self._fresh) != len(resets):
            # Another number of environments: what was known of the rows says nothing now.
            self._fresh = [False] * len(resets)
            self._dry = [0] * len(resets)
        for row, reset in enumerate(resets):
            if reset:
                self._fresh[row] = self.after_reset
                self._dry[row] = 0
            elif rewards is not None:
                self._dry[row] = 0 if rewards[row] > 0 else self._dry[row] + 1

    def due(self, row: int) -> bool:
        """Whether ``row`` waits for advice."""
        dry = self.no_reward_steps is not None and self._dry[row] >= self.no_reward_steps
        return self._fresh[row] or dry

    def serve(self, row: int) -> None:
        """Take note that ``row`` was asked about, or has advice already."""
        self._fresh[row] = False
        self._dry[row] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what is due in each row."""
        return {"fresh": list(self._fresh), "dry": list(self._dry)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what is due in each row.

        Args:
            state: What :meth:`state_dict` returned.
        """
        self._fresh = [bool(value) for value in state["fresh"]]
        self._dry = [int(value) for value in state["dry"]]


class CallPolicy:
    """Chooses, at each vector step, the rows whose uncached situation is worth a call.

    A row is asked about when the cooldown is over, calls are left, its beta is at least
    ``min_beta`` and, unless ``always``, a macro boundary is due; of such rows the
    ``calls_per_step`` with the highest beta are taken. Equal betas take turns.

    Args:
        budget: The ledger that limits the calls; the service spends from it.
        cooldown: Pause after calls and successes. Default: none.
        boundaries: Macro boundaries, used where ``always`` is false. Default:
            ``MacroBoundaries()``.
        always: Whether every uncached situation is a candidate. Default: ``True``.
        min_beta: Least weight, from 0 to 1, at which advice is worth a call.
            Default: ``0.0``.
        calls_per_step: Most calls at one vector step, at least 1. Default: ``1``.

    Raises:
        ValueError: If ``min_beta`` is outside 0 to 1 or ``calls_per_step`` below 1.

    Examples:
        >>> policy = CallPolicy(CallBudget(10), min_beta=0.2)
        >>> policy.choose([0, 1, 2], betas=[0.1, 0.9, 0.3])
        [1]
    """

    def __init__(
        self,
        budget: CallBudget,
        *,
        cooldown: Cooldown | None = None,
        boundaries: MacroBoundaries | None = None,
        always: bool = True,
        min_beta: float = 0.0,
        calls_per_step: int = 1,
    ) -> None:
        if not 0.0 <= min_beta <= 1.0:
            raise ValueError(f"min_beta is a weight and must lie in [0, 1], got {min_beta}.")
        if calls_per_step < 1:
            raise ValueError(
                f"calls_per_step must be at least 1, got {calls_per_step}. "
                "To make no calls, use CallBudget(0)."
            )
        self.budget = budget
        self.cooldown = Cooldown() if cooldown is None else cooldown
        self.boundaries = MacroBoundaries() if boundaries is None else boundaries
        self.always = always
        self.min_beta = min_beta
        self.calls_per_step = calls_per_step
        self._turn = 0

    def choose(
        self,
        candidates: Sequence[int],
        *,
        betas: Sequence[float],
        resets: Sequence[bool] | None = None,
        rewards: Sequence[float] | None = None,
        successes: Sequence[bool] | None = None,
        cached: Sequence[int] = (),
        steps: int | None = None,
    ) -> list[int]:
        """Let one vector step pass and return the rows to ask about.

        The caller asks about every row returned: their pause begins here.

        Args:
            candidates: Rows whose situation is not cached.
            betas: Weight of the advice in each row; its length is the number of rows.
                A row whose beta is not finite is not asked about.
            resets: Whether each row has just been reset. Default: none was.
            rewards: Reward of each row. Default: no row made a step (a reset).
            successes: Whether each row has just succeeded. Default: none did.
            cached: Rows that have advice from the cache, which serves their boundary.
            steps: Environment steps that passed. Default: the number of rewards.

        Returns:
            Rows to ask about, highest beta first.

        Raises:
            ValueError: If the arguments speak of different numbers of rows.
        """
        rows = len(betas)
        for name, values in (("resets", resets), ("rewards", rewards), ("successes", successes)):
            if values is not None and len(values) != rows:
                raise ValueError(f"{name} has {len(values)} rows, betas has {rows}.")
        if steps is None:
            steps = 0 if rewards is None else rows
        self.cooldown.advance(steps)
        if successes is not None and any(successes):
            self.cooldown.success()
        if not self.always:
            self.boundaries.update(
                resets=[False] * rows if resets is None else resets, rewards=rewards
            )
            for row in cached:
                self.boundaries.serve(row)

        most = min(self.calls_per_step, self.budget.remaining)
        if not candidates or most == 0 or not self.cooldown.ready:
            return []
        eligible = [
            row
            for row in candidates
            if math.isfinite(betas[row])
            and betas[row] >= self.min_beta
            and (self.always or self.boundaries.due(row))
        ]
        # Without the turn, equal betas would starve every row but the first.
        eligible.sort(key=lambda row: (-betas[row], (row - self._turn) % rows))
        chosen = [int(row) for row in eligible[:most]]
        if chosen:
            self._turn = (chosen[-1] + 1) % rows
            self.cooldown.start()
            if not self.always:
                for row in chosen:
                    self.boundaries.serve(row)
        return chosen

    def stats(self) -> dict[str, float]:
        """Return ``calls`` spent, ``budget_left`` and ``cooldown_left`` (environment steps)."""
        return {
            "calls": float(self.budget.spent),
            "budget_left": float(self.budget.remaining),
            "cooldown_left": float(self.cooldown.left),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the parts. The budget, which others share, keeps its own."""
        return {
            "cooldown": self.cooldown.state_dict(),
            "boundaries": self.boundaries.state_dict(),
            "turn": self._turn,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the progress of the parts.

        Args:
            state: What :meth:`state_dict` returned.
        """
        self.cooldown.load_state_dict(state["cooldown"])
        self.boundaries.load_state_dict(state["boundaries"])
        self._turn = int(state["turn"])
