"""Call policy: which rows of a vector step the advisor is asked about."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lore_torchrl.service.budget import CallBudget
from lore_torchrl.service.outage import OutageBackoff
from lore_torchrl.service.store import SharedLock


@dataclass(slots=True)
class StepSignals:
    """What one vector step tells the call policy, one entry per row.

    Args:
        scores: Acquisition score of each row: the weight that advice would have, 0 to 1. A
            row whose score is not finite is not asked about.
        resets: Whether each row was just reset. Default: none was.
        rewards: Reward of each row; ``None`` at a reset, where no row moved. Default: ``None``.
        successes: Whether each row just succeeded. Default: none did.
        td_errors: TD error of each row, ``None`` where unknown. Default: unknown.
        steps: Environment steps that passed. Default: the number of rewards.

    Raises:
        ValueError: If the entries disagree on the number of rows.
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

    The thread that asks may report results while another one chooses.

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
        ValueError: If ``min_beta`` is outside 0 to 1 or ``calls_per_step`` below 1; if
            triggers would do nothing beside ``always``, or none is on without it.

    Examples:
        >>> policy = CallPolicy(CallBudget(10), min_beta=0.2)
        >>> policy.choose([0, 1, 2], StepSignals([0.1, 0.9, 0.3]))
        [1]
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
                f"always=True makes every candidate eligible, so {', '.join(given)} would do "
                "nothing. Use always=False."
            )
        if not always and boundaries is False and not given:
            raise ValueError(
                "always=False, boundaries=False and no other trigger would never ask. Switch one "
                "of them on, or use CallBudget(0)."
            )
        self.budget = budget
        self.cooldown = Cooldown() if cooldown is None else cooldown
        self.boundaries = MacroBoundaries() if boundaries is None else boundaries or None
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
        """Let one vector step pass and return the rows to ask about.

        The caller asks about every returned row: cooldown and back-off start here.

        Args:
            candidates: Rows that a new answer would serve.
            signals: What the step tells about each row.

        Keyword Args:
            served: Rows that have advice already, which counts as an answer to their
                boundary. Default: none.
            situations: Key of the situation each row entered, ``None`` for a row that did
                not move. ``novelty`` needs it. Default: none.

        Returns:
            Rows to ask about, highest score first.

        Raises:
            StoreError: If the budget's store cannot be read.
            ValueError: If ``novelty`` is on without ``situations``.
        """
        if self.novelty is not None and situations is None:
            raise ValueError("novelty counts situations: pass situations, a key for each row.")
        with self._lock:
            self._step += signals.steps
            self.cooldown.advance(signals.steps)
            self.outage.advance(signals.steps)
            if signals.successes is not None and any(signals.successes):
                self.cooldown.success()
            if not self.always:
                self._update_triggers(signals, situations, served)
            return self._choose(candidates, signals.scores)

    def _update_triggers(
        self,
        signals: StepSignals,
        situations: Sequence[str | None] | None,
        served: Sequence[int],
    ) -> None:
        if self.boundaries is not None:
            self.boundaries.update(resets=signals.resets, rewards=signals.rewards)
        if self.novelty is not None:
            self.novelty.update(situations)
        if self.td_spike is not None:
            self.td_spike.update(signals.td_errors, resets=signals.resets)
        if self.boundaries is not None:
            for row in served:
                self.boundaries.serve(row)

    def _choose(self, candidates: Sequence[int], scores: Sequence[float]) -> list[int]:
        if not candidates or not self.cooldown.ready or not self.outage.ready:
            return []
        most = min(1 if self.outage.out else self.calls_per_step, self.budget.remaining)
        if most == 0:
            return []
        eligible = [
            row
            for row in candidates
            if math.isfinite(scores[row]) and scores[row] >= self.min_beta and self._due(row)
        ]
        # Without turns, equal scores would starve every row but the first.
        rows = len(scores)
        eligible.sort(key=lambda row: (-scores[row], (row - self._turn) % rows))
        chosen = [int(row) for row in eligible[:most]]
        if chosen:
            self._turn = (chosen[-1] + 1) % rows
            self._last_call_step = self._step
            self.cooldown.start()
            self.outage.begin_call()
            for trigger in (self.boundaries, self.novelty):
                if trigger is not None and not self.always:
                    for row in chosen:
                        trigger.serve(row)
        return chosen

    def _due(self, row: int) -> bool:
        triggers = (self.boundaries, self.novelty, self.td_spike)
        return self.always or any(t is not None and t.due(row) for t in triggers)

    def observe_result(self, *, ok: bool, lasting: bool = True, free: bool = False) -> None:
        """Record the end of a call, whenever it comes: see :meth:`OutageBackoff.observe`."""
        with self._lock:
            self.outage.observe(ok=ok, lasting=lasting, free=free)

    def withdraw_call(self) -> None:
        """Record that a chosen call was not made, or that its end says nothing."""
        with self._lock:
            self.outage.withdraw_call()

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
            state = {name: part.state_dict() for name, part in self._parts().items()}
            clock = {"step": self._step, "last_call_step": self._last_call_step}
            return {**state, "turn": self._turn, **clock}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the progress; a part that the state does not hold starts fresh."""
        with self._lock:
            for name, part in self._parts().items():
                if name in state:
                    part.load_state_dict(state[name])
            self._turn = int(state["turn"])
            self._step = int(state.get("step", 0))
            self._last_call_step = int(state.get("last_call_step", 0))


class Cooldown:
    """A pause after each call, and another one after each success, in environment steps.

    Steps of all rows add up: with four environments, one vector step is four.

    Args:
        steps: Environment steps between two calls. Default: ``0``.
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
        """Start the pause after a call."""
        self.left = max(self.left, self.steps)

    def success(self) -> None:
        """Start the pause after a success, unless a longer one is running."""
        self.left = max(self.left, self.steps_after_success)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps left."""
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the steps left."""
        self.left = int(state["left"])


class MacroBoundaries:
    """Trigger at an episode's start, and after many steps without reward.

    A boundary stays due until the row is served. Otherwise a cooldown, or a row with a
    higher score, would lose it for the episode.

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
        """Record one step of all rows.

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
        """Record that ``row`` was asked about, or has advice already."""
        self._fresh[row] = False
        self._dry[row] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what is due in each row."""
        return {"fresh": list(self._fresh), "dry": list(self._dry)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what is due in each row."""
        self._fresh = [bool(value) for value in state["fresh"]]
        self._dry = [int(value) for value in state["dry"]]


class Novelty:
    """Trigger on rarely visited situations: 1/√n above a threshold at the n-th visit.

    Args:
        threshold: Due while 1/√n is above it, at least 0 and below 1. With 0.5 these
            are the first three visits.
        max_keys: Situations remembered, at least 1; the least recently visited is
            forgotten first. Default: ``100_000``.

    Raises:
        ValueError: If a number is out of its range.

    Examples:
        >>> novelty = Novelty(0.6)
        >>> for _ in range(3):
        ...     novelty.update(["door"])
        ...     novelty.due(0)
        True
        True
        False
    """

    def __init__(self, threshold: float, max_keys: int = 100_000) -> None:
        if not 0.0 <= threshold < 1.0:
            raise ValueError(
                f"Novelty is 1/sqrt(visits), so its threshold must lie in [0, 1), got {threshold}."
            )
        if max_keys < 1:
            raise ValueError(f"max_keys must be at least 1, got {max_keys}.")
        self.threshold = threshold
        self.max_keys = max_keys
        self._visits: OrderedDict[str, int] = OrderedDict()
        self._due: list[bool] = []

    def update(self, situations: Sequence[str | None]) -> None:
        """Count one visit for each row.

        Args:
            situations: Key, exact or of the abstract state, of the situation that each row has just
                entered; ``None`` where it entered none.
        """
        if len(self._due) != len(situations):
            self._due = [False] * len(situations)
        for row, key in enumerate(situations):
            if key is None:
                continue
            visits = self._visits.pop(key, 0) + 1
            self._visits[key] = visits
            if len(self._visits) > self.max_keys:
                self._visits.popitem(last=False)
            self._due[row] = 1.0 / math.sqrt(visits) > self.threshold

    def due(self, row: int) -> bool:
        """Whether the situation of ``row`` is novel."""
        return self._due[row]

    def serve(self, row: int) -> None:
        """Record that ``row`` was asked about; its next visit is judged again."""
        self._due[row] = False

    def state_dict(self) -> dict[str, Any]:
        """Return the visits, those seen longest ago first, and what is due."""
        # Pairs, since JSON may reorder a mapping.
        return {"visits": [list(item) for item in self._visits.items()], "due": list(self._due)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the visits, and what is due."""
        kept = state["visits"][-self.max_keys :]
        self._visits = OrderedDict((key, int(visits)) for key, visits in kept)
        self._due = [bool(value) for value in state["due"]]


class TDErrorSpike:
    """Trigger on TD errors far above the mean, with hysteresis.

    z = (|td| - mean) / std, with mean and std over all rows as moving averages. A row
    becomes due at z >= ``high`` and stays so, also after a call, until z <= ``low`` or
    its episode ends: the gap keeps a value near one threshold from flickering.

    Args:
        high: z at which a row becomes due. Default: ``3.0``.
        low: z at which it is no longer, below ``high``. Default: ``1.0``.
        decay: Weight of the past in the moving averages, between 0 and 1.
            Default: ``0.99``.
        warmup: Values that are only averaged, at least 2. Default: ``100``.

    Raises:
        ValueError: If a number is out of its range.

    Examples:
        >>> spike = TDErrorSpike(high=3.0, low=1.0, warmup=4)
        >>> for value in (0.9, 1.1, 0.9, 1.1, 9.0):
        ...     spike.update([value], resets=[False])
        >>> spike.due(0)
        True
    """

    def __init__(
        self, high: float = 3.0, low: float = 1.0, *, decay: float = 0.99, warmup: int = 100
    ) -> None:
        if not (math.isfinite(high) and math.isfinite(low) and low < high):
            raise ValueError(f"TDErrorSpike needs finite low < high, got low={low}, high={high}.")
        if not 0.0 < decay < 1.0:
            raise ValueError(f"decay must lie between 0 and 1, got {decay}. Try 0.99.")
        if warmup < 2:
            raise ValueError(f"warmup must be at least 2 values, got {warmup}. Try 100.")
        self.high = high
        self.low = low
        self.decay = decay
        self.warmup = warmup
        self._count = 0
        self._mean = 0.0
        self._variance = 0.0
        self._on: list[bool] = []

    def update(self, td_errors: Sequence[float | None], *, resets: Sequence[bool]) -> None:
        """Record one step of all rows.

        Args:
            td_errors: TD error of each row, of either sign. A row with ``None``, or a
                number that is not finite, stays as it is.
            resets: Whether each row has just been reset.
        """
        if len(self._on) != len(td_errors):
            self._on = [False] * len(td_errors)
        for row, (value, reset) in enumerate(zip(td_errors, resets, strict=True)):
            if reset:
                self._on[row] = False
            if value is None or not math.isfinite(value):
                continue
            error = min(abs(value), 1e100)  # its square must stay finite
            if self._count >= self.warmup:
                # The floor keeps a signal that hardly moved from spiking at its first move.
                scale = max(math.sqrt(self._variance), 0.01 * self._mean, 1e-8)
                z = (error - self._mean) / scale
                self._on[row] = z > self.low if self._on[row] else z >= self.high
            self._average(error)

    def _average(self, error: float) -> None:
        self._count += 1
        # A plain mean at first, so that the start is not weighted for ever.
        weight = max(1.0 - self.decay, 1.0 / self._count)
        delta = error - self._mean
        self._mean += weight * delta
        self._variance = (1.0 - weight) * (self._variance + weight * delta * delta)

    def due(self, row: int) -> bool:
        """Whether the TD error of ``row`` has spiked and not calmed down yet."""
        return self._on[row]

    def state_dict(self) -> dict[str, Any]:
        """Return the moving averages, and the rows that are due."""
        return {
            "count": self._count,
            "mean": self._mean,
            "variance": self._variance,
            "on": list(self._on),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the moving averages, and the rows that are due."""
        self._count = int(state["count"])
        self._mean = float(state["mean"])
        self._variance = float(state["variance"])
        self._on = [bool(value) for value in state["on"]]
