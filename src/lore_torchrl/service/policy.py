"""Call policy: which rows of a vector step the advisor is asked about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lore_torchrl.configs.lore import CallsConfig
from lore_torchrl.service.budget import CallBudget
from lore_torchrl.service.store import SharedLock
from lore_torchrl.service.triggers import Cooldown, OutageBackoff, StepSignals, Trigger


class CallPolicy:
    """Chooses, at each vector step, the rows to ask the advisor about.

    A row is eligible if a trigger is due for it, or if there are no triggers. No call is made
    during a cooldown or an outage's pause, beyond the budget, or for a score below
    ``min_beta``. Of the remaining rows the ``calls_per_step`` with the highest score are asked
    about. Rows with equal scores take turns.

    Args:
        budget: Ledger that limits the calls; the service spends from it.
        triggers: :class:`MacroBoundaries`, :class:`Novelty` and :class:`TDErrorSpike`, at most one
            of each. Default: none.
        cooldown: Pause after calls and successes. Default: none.
        min_beta: Lowest acquisition score that is worth a call, 0 to 1. Default: ``0.05``.
        calls_per_step: Most calls at one vector step, at least 1. Default: ``1``.
        outage: Back-off while the advisor fails. Default: ``OutageBackoff()``.

    Raises:
        ValueError: If ``min_beta`` or ``calls_per_step`` is out of its range.
    """

    def __init__(
        self,
        budget: CallBudget,
        *,
        triggers: Sequence[Trigger] = (),
        cooldown: Cooldown | None = None,
        min_beta: float = 0.05,
        calls_per_step: int = 1,
        outage: OutageBackoff | None = None,
    ) -> None:
        CallsConfig(min_beta=min_beta, calls_per_step=calls_per_step)
        self.budget = budget
        self.triggers = tuple(triggers)
        self.cooldown = Cooldown() if cooldown is None else cooldown
        self.min_beta = min_beta
        self.calls_per_step = calls_per_step
        self.outage = OutageBackoff() if outage is None else outage
        self._turn = 0
        self._step = self._last_call_step = 0  # environment steps: now, at the latest call
        self._lock = SharedLock()

    def choose(
        self, candidates: Sequence[int], signals: StepSignals, *, served: Sequence[int] = ()
    ) -> list[int]:
        """Let one vector step pass and return the rows to ask about, highest score first.

        The caller asks about every returned row: cooldown and back-off start here. Candidates
        are the rows that a new answer would serve; ``served`` ones have advice already, which
        counts as an answer to their boundary. A store that cannot be read raises a
        ``StoreError``.
        """
        with self._lock:
            self._step += signals.steps
            self.cooldown.advance(signals.steps)
            self.outage.advance(signals.steps)
            if signals.successes is not None and any(signals.successes):
                self.cooldown.success()
            for trigger in self.triggers:
                trigger.update(signals)
                for row in served:
                    if trigger.due(row):
                        trigger.serve(row)
            return self._choose(candidates, signals.scores)

    def _choose(self, candidates: Sequence[int], scores: Sequence[float]) -> list[int]:
        if not candidates or not self.cooldown.ready or not self.outage.ready:
            return []
        most = min(1 if self.outage.out else self.calls_per_step, self.budget.remaining)
        eligible = [
            row
            for row in candidates
            if math.isfinite(scores[row]) and scores[row] >= self.min_beta
            if not self.triggers or any(trigger.due(row) for trigger in self.triggers)
        ]
        # Without turns, equal scores would starve every row but the first.
        rows = len(scores)
        eligible.sort(key=lambda row: (-scores[row], (row - self._turn) % rows))
        chosen = eligible[:most]
        if chosen:
            self._turn = (chosen[-1] + 1) % rows
            self._last_call_step = self._step
            self.cooldown.start()
            self.outage.begin_call()
        for trigger in self.triggers:
            for row in chosen:
                trigger.serve(row)
        return chosen

    def observe_result(self, *, ok: bool, lasting: bool | None = True, free: bool = False) -> None:
        """Record the end of a call, whenever it comes: see :meth:`OutageBackoff.observe`."""
        with self._lock:
            self.outage.observe(ok=ok, lasting=lasting, free=free)

    def stats(self) -> dict[str, float]:
        """Return ``budget_left`` (calls), ``cooldown_left``, ``last_call_step`` and
        ``outage_pause_left`` (environment steps).
        """
        with self._lock:
            return {
                "budget_left": float(self.budget.remaining),
                "cooldown_left": float(self.cooldown.left),
                "last_call_step": float(self._last_call_step),
                "outage_pause_left": float(self.outage.left),
            }

    def _parts(self) -> dict[str, Any]:
        triggers = {trigger.name: trigger for trigger in self.triggers}
        return {"cooldown": self.cooldown, "outage": self.outage, **triggers}

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the parts. The budget keeps its own."""
        with self._lock:
            return {
                **{name: part.state_dict() for name, part in self._parts().items()},
                "turn": self._turn,
                "step": self._step,
                "last_call_step": self._last_call_step,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the progress; a part that the state does not hold starts fresh."""
        with self._lock:
            for name, part in self._parts().items():
                if name in state:
                    part.load_state_dict(state[name])
            self._turn = state["turn"]
            self._step = state["step"]
            self._last_call_step = state["last_call_step"]
