"""Call policy: which rows of a vector step the advisor is asked about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lore_torchrl.service.budget import CallBudget
from lore_torchrl.service.store import SharedLock
from lore_torchrl.service.triggers import (
    Cooldown,
    MacroBoundaries,
    Novelty,
    OutageBackoff,
    TDErrorSpike,
)


@dataclass(slots=True)
class StepSignals:
    """What one vector step tells the call policy, one entry per row.

    ``scores`` are acquisition scores: the weight that advice would have, 0 to 1; a row whose
    score is not finite is not asked about. ``rewards`` are ``None`` at a reset, where no row
    moved. ``steps`` counts the environment steps that passed, by default the rewards. A
    ``ValueError`` tells of entries that disagree on the number of rows.
    """

    scores: Sequence[float]
    resets: Sequence[bool] | None = None
    rewards: Sequence[float] | None = None
    successes: Sequence[bool] | None = None
    td_errors: Sequence[float | None] | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        rows = len(self.scores)
        for name in ("resets", "rewards", "successes", "td_errors"):
            values = getattr(self, name)
            if values is not None and len(values) != rows:
                raise ValueError(f"{name} has {len(values)} rows, scores has {rows}.")
        if self.steps is None:
            self.steps = 0 if self.rewards is None else rows
        self.resets = [False] * rows if self.resets is None else self.resets
        self.td_errors = [None] * rows if self.td_errors is None else self.td_errors


class CallPolicy:
    """Chooses, at each vector step, the rows to ask the advisor about.

    A row is eligible if ``always``, or if a trigger is due for it: macro boundary, novelty,
    TD-error spike. No call is made during a cooldown or an outage's pause, beyond the
    budget, or for a score below ``min_beta``. Of the remaining rows the ``calls_per_step``
    with the highest score are asked about. Rows with equal scores take turns.

    Args:
        budget: Ledger that limits the calls; the service spends from it.
        cooldown: Pause after calls and successes. Default: none.
        boundaries: Macro boundaries, used where ``always`` is false; ``False`` switches
            them off. Default: ``MacroBoundaries()``.
        always: Whether every candidate is eligible. Default: ``True``.
        min_beta: Lowest acquisition score that is worth a call, 0 to 1. Default: ``0.05``.
        calls_per_step: Most calls at one vector step, at least 1. Default: ``1``.
        novelty: Trigger on rarely visited situations. Default: off.
        td_spike: Trigger on unusual TD errors. Default: off.
        outage: Back-off while the advisor fails. Default: ``OutageBackoff()``.

    Raises:
        ValueError: If ``always`` is false and no trigger is on.
    """

    def __init__(
        self,
        budget: CallBudget,
        *,
        cooldown: Cooldown | None = None,
        boundaries: MacroBoundaries | Literal[False] | None = None,
        always: bool = True,
        min_beta: float = 0.05,
        calls_per_step: int = 1,
        novelty: Novelty | None = None,
        td_spike: TDErrorSpike | None = None,
        outage: OutageBackoff | None = None,
    ) -> None:
        if not always and boundaries is False and novelty is None and td_spike is None:
            raise ValueError("always=False without a trigger would never ask. Switch one on.")
        self.budget = budget
        self.cooldown = Cooldown() if cooldown is None else cooldown
        if boundaries is None:
            boundaries = MacroBoundaries()
        self.boundaries = None if always else boundaries or None
        self.always = always
        self.min_beta = min_beta
        self.calls_per_step = calls_per_step
        self.novelty = novelty
        self.td_spike = td_spike
        self.outage = OutageBackoff() if outage is None else outage
        self._turn = 0
        self._step = self._last_call_step = 0  # environment steps: now, at the latest call
        self._lock = SharedLock()

    def choose(
        self,
        candidates: Sequence[int],
        signals: StepSignals,
        *,
        served: Sequence[int] = (),
        situations: Sequence[str | None] | None = None,
    ) -> list[int]:
        """Let one vector step pass and return the rows to ask about, highest score first.

        The caller asks about every returned row: cooldown and back-off start here. Candidates
        are the rows that a new answer would serve; ``served`` ones have advice already, which
        counts as an answer to their boundary. ``situations`` are the keys that the rows
        entered, ``None`` for a row that did not move; ``novelty`` raises a ``ValueError``
        without them. A store that cannot be read raises a ``StoreError``.
        """
        if self.novelty is not None and situations is None:
            raise ValueError("novelty counts situations: pass situations, a key for each row.")
        with self._lock:
            self._step += signals.steps
            self.cooldown.advance(signals.steps)
            self.outage.advance(signals.steps)
            if signals.successes is not None and any(signals.successes):
                self.cooldown.success()
            if self.boundaries is not None:
                self.boundaries.update(resets=signals.resets, rewards=signals.rewards)
                for row in served:
                    self.boundaries.serve(row)
            if self.novelty is not None:
                self.novelty.update(situations)
            if self.td_spike is not None:
                self.td_spike.update(signals.td_errors, resets=signals.resets)
            return self._choose(candidates, signals.scores)

    def _choose(self, candidates: Sequence[int], scores: Sequence[float]) -> list[int]:
        if not candidates or not self.cooldown.ready or not self.outage.ready:
            return []
        most = min(1 if self.outage.out else self.calls_per_step, self.budget.remaining)
        triggers = [t for t in (self.boundaries, self.novelty, self.td_spike) if t is not None]
        eligible = [
            row
            for row in candidates
            if math.isfinite(scores[row]) and scores[row] >= self.min_beta
            if self.always or any(trigger.due(row) for trigger in triggers)
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
        for trigger in triggers:
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
        names = ("cooldown", "boundaries", "novelty", "td_spike", "outage")
        return {name: part for name in names if (part := getattr(self, name)) is not None}

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
            self._step = state.get("step", 0)
            self._last_call_step = state.get("last_call_step", 0)
