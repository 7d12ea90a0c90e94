"""Which rows are worth a call now: what speaks for it, what against, and the choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from lore_torchrl.service.budget import CallBudget
from lore_torchrl.service.locks import SharedLock
from lore_torchrl.service.pauses import Cooldown, OutagePause
from lore_torchrl.service.triggers import MacroBoundaries, Novelty, TDErrorSpike


class CallPolicy:
    """Chooses, at each vector step, the rows whose uncached situation is worth a call.

    A row is eligible if ``always``, or if any trigger that is switched on is due for it:
    macro boundaries, novelty, TD-error spike. It is asked about if nothing speaks
    against it: calls are left, cooldown and pauses are over, and its beta is at least
    ``min_beta``. Of such rows the ``calls_per_step``
    with the highest beta are taken. Equal betas take turns.

    The asking thread may report results while another chooses.

    Args:
        budget: The ledger that limits the calls; the service spends from it.
        cooldown: Pause after calls and successes. Default: none.
        boundaries: Macro boundaries, used where ``always`` is false; ``False`` switches
            them off. Default: ``MacroBoundaries()``.
        always: Whether every uncached situation is a candidate. Default: ``True``.
        min_beta: Least weight, from 0 to 1, at which advice is worth a call.
            Default: ``0.0``.
        calls_per_step: Most calls at one vector step, at least 1. Default: ``1``.
        novelty: Trigger on situations that were seen seldom. Default: off.
        td_spike: Trigger on unusual TD errors. Default: off.
        outage: Pauses while the advisor fails. Default: ``OutagePause()``.

    Raises:
        ValueError: If ``min_beta`` is outside 0 to 1 or ``calls_per_step`` below 1; if
            triggers would do nothing beside ``always``, or none is on without it.

    Examples:
        >>> policy = CallPolicy(CallBudget(10), min_beta=0.2)
        >>> policy.choose([0, 1, 2], betas=[0.1, 0.9, 0.3])
        [1]
        >>> seldom = CallPolicy(
        ...     CallBudget(10), always=False, boundaries=False, novelty=Novelty(0.9)
        ... )
        >>> seldom.choose([0, 1], betas=[1.0, 1.0], situations=["door", "door"])
        [0]
        >>> seldom.choose([0, 1], betas=[1.0, 1.0], situations=["door", "key"])
        [1]
    """

    def __init__(
        self,
        budget: CallBudget,
        *,
        cooldown: Cooldown | None = None,
        boundaries: MacroBoundaries | Literal[False] | None = None,
        always: bool = True,
        min_beta: float = 0.0,
        calls_per_step: int = 1,
        novelty: Novelty | None = None,
        td_spike: TDErrorSpike | None = None,
        outage: OutagePause | None = None,
    ) -> None:
        if not 0.0 <= min_beta <= 1.0:
            raise ValueError(f"min_beta is a weight and must lie in [0, 1], got {min_beta}.")
        if calls_per_step < 1:
            raise ValueError(
                f"calls_per_step must be at least 1, got {calls_per_step}. "
                "To make no calls, use CallBudget(0)."
            )
        triggers = {"novelty": novelty, "td_spike": td_spike}
        given = [name for name, trigger in triggers.items() if trigger is not None]
        if always and given:
            raise ValueError(
                f"always=True asks about every uncached situation, so {', '.join(given)} would "
                "do nothing. Use always=False."
            )
        if not always and boundaries is False and not given:
            raise ValueError(
                "always=False, boundaries=False and no other trigger would never ask. Switch one "
                "of them on, or use CallBudget(0)."
            )
        self.budget = budget
        self.cooldown = Cooldown() if cooldown is None else cooldown
        if boundaries is None:
            boundaries = MacroBoundaries()
        self.boundaries = boundaries or None
        self.always = always
        self.min_beta = min_beta
        self.calls_per_step = calls_per_step
        self.novelty = novelty
        self.td_spike = td_spike
        self.outage = OutagePause() if outage is None else outage
        self._turn = 0
        # Environment steps that have passed, and that had at the latest call.
        self._step = self._last_call_step = 0
        self._lock = SharedLock()

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
        situations: Sequence[str | None] | None = None,
        td_errors: Sequence[float | None] | None = None,
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
            situations: Key of the situation each row has just entered, cached or not;
                ``None`` for a row that has not moved. Counted for ``novelty``, which
                needs it. Default: none.
            td_errors: TD error of each row, ``None`` where it is not known. Only
                ``td_spike`` reads it. Default: known of no row.

        Returns:
            Rows to ask about, highest beta first.

        Raises:
            StoreError: If the budget's store cannot be read.
            ValueError: If the arguments speak of different numbers of rows, or
                ``novelty`` is on without ``situations``.
        """
        rows = len(betas)
        per_row = {
            "resets": resets,
            "rewards": rewards,
            "successes": successes,
            "situations": situations,
            "td_errors": td_errors,
        }
        for name, values in per_row.items():
            if values is not None and len(values) != rows:
                raise ValueError(f"{name} has {len(values)} rows, betas has {rows}.")
        if self.novelty is not None and situations is None:
            raise ValueError("novelty counts situations: pass situations, a key for each row.")
        with self._lock:
            self._pass(rows if rewards is not None else 0, steps, successes)
            if not self.always:
                self._trigger(
                    [False] * rows if resets is None else resets,
                    rewards,
                    situations,
                    [None] * rows if td_errors is None else td_errors,
                )
                if self.boundaries is not None:
                    for row in cached:
                        self.boundaries.serve(row)
            return self._choose(candidates, betas)

    def _pass(self, moved: int, steps: int | None, successes: Sequence[bool] | None) -> None:
        """Let the clocks of all pauses go on."""
        steps = moved if steps is None else steps
        self._step += steps
        self.cooldown.advance(steps)
        self.outage.advance(steps)
        if successes is not None and any(successes):
            self.cooldown.success()

    def _trigger(
        self,
        resets: Sequence[bool],
        rewards: Sequence[float] | None,
        situations: Sequence[str | None] | None,
        td_errors: Sequence[float | None],
    ) -> None:
        """Show the triggers what has happened."""
        if self.boundaries is not None:
            self.boundaries.update(resets=resets, rewards=rewards)
        if self.novelty is not None:
            self.novelty.update(situations)
        if self.td_spike is not None:
            self.td_spike.update(td_errors, resets=resets)

    def _choose(self, candidates: Sequence[int], betas: Sequence[float]) -> list[int]:
        if not candidates or not self.cooldown.ready or not self.outage.ready:
            return []
        most = min(1 if self.outage.out else self.calls_per_step, self.budget.remaining)
        if most == 0:
            return []
        eligible = [
            row
            for row in candidates
            if math.isfinite(betas[row]) and betas[row] >= self.min_beta and self._due(row)
        ]
        # Without the turn, equal betas would starve every row but the first.
        rows = len(betas)
        eligible.sort(key=lambda row: (-betas[row], (row - self._turn) % rows))
        chosen = [int(row) for row in eligible[:most]]
        if chosen:
            self._turn = (chosen[-1] + 1) % rows
            self._last_call_step = self._step
            self.cooldown.start()
            self.outage.begin_call()
            self._serve(chosen)
        return chosen

    def _due(self, row: int) -> bool:
        if self.always:
            return True
        triggers = (self.boundaries, self.novelty, self.td_spike)
        return any(trigger is not None and trigger.due(row) for trigger in triggers)

    def _serve(self, chosen: Sequence[int]) -> None:
        if self.always:
            return
        for trigger in (self.boundaries, self.novelty):
            if trigger is not None:
                for row in chosen:
                    trigger.serve(row)

    def observe_result(self, *, ok: bool, lasting: bool = True, free: bool = False) -> None:
        """Take note of the end of a call, whenever it comes: see :meth:`OutagePause.observe`.

        Keyword Args:
            ok: Whether usable advice came back.
            lasting: Whether the next call would likely fail as well. Default: ``True``.
            free: Whether the failed call was given back to the budget. Default: ``False``.
        """
        with self._lock:
            self.outage.observe(ok=ok, lasting=lasting, free=free)

    def withdraw_call(self) -> None:
        """Take note that a chosen call was not made, or tells nothing of the advisor."""
        with self._lock:
            self.outage.withdraw_call()

    def stats(self) -> dict[str, float]:
        """Return ``calls`` spent, ``budget_left``, ``cooldown_left`` and ``last_call_step``.

        The last two in environment steps, the latter 0 before the first call. Also
        ``outage_pause_left`` (environment steps, 0 without an outage).
        """
        with self._lock:
            return {
                "calls": float(self.budget.spent),
                "budget_left": float(self.budget.remaining),
                "cooldown_left": float(self.cooldown.left),
                "last_call_step": float(self._last_call_step),
                "outage_pause_left": float(self.outage.left),
            }

    def _parts(self) -> dict[str, Any]:
        names = ("cooldown", "boundaries", "novelty", "td_spike", "outage")
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the parts. The budget, which others share, keeps its own."""
        with self._lock:
            state = {name: part.state_dict() for name, part in self._parts().items()}
            clock = {"step": self._step, "last_call_step": self._last_call_step}
            return {**state, "turn": self._turn, **clock}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the progress of the parts.

        Args:
            state: What :meth:`state_dict` returned. A part that was not switched on
                then begins anew.
        """
        with self._lock:
            for name, part in self._parts().items():
                if name in state:
                    part.load_state_dict(state[name])
            self._turn = int(state["turn"])
            self._step = int(state.get("step", 0))
            self._last_call_step = int(state.get("last_call_step", 0))
