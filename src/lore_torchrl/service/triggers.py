"""Triggers of the call policy, which make a row due, and its pauses."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from lore_torchrl.configs.lore import CallsConfig


@dataclass(slots=True)
class StepSignals:
    """What one vector step tells the call policy, one entry per row.

    ``scores`` are acquisition scores: the weight that advice would have, 0 to 1; a row whose
    score is not finite is not asked about. ``rewards`` are ``None`` at a reset, where no row
    moved. ``steps`` counts the environment steps that passed, by default the rewards. A
    ``ValueError`` tells of entries that disagree on the number of rows. ``situations`` are the keys
    that the rows entered, ``None`` for a row that did not move: the service fills them in.
    """

    scores: Sequence[float]
    resets: Sequence[bool] | None = None
    rewards: Sequence[float] | None = None
    successes: Sequence[bool] | None = None
    td_errors: Sequence[float | None] | None = None
    steps: int | None = None
    situations: Sequence[str | None] | None = None

    def __post_init__(self) -> None:
        rows = len(self.scores)
        for name in ("resets", "rewards", "successes", "td_errors", "situations"):
            values = getattr(self, name)
            if values is not None and len(values) != rows:
                raise ValueError(f"{name} has {len(values)} rows, scores has {rows}.")
        if self.steps is None:
            self.steps = 0 if self.rewards is None else rows
        self.resets = [False] * rows if self.resets is None else self.resets
        self.situations = [None] * rows if self.situations is None else self.situations
        self.td_errors = [None] * rows if self.td_errors is None else self.td_errors


class _Part:
    """Saves the attributes that are named in ``_saved``, without their underscore."""

    _saved: ClassVar[tuple[str, ...]]

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as JSON-able types."""
        return {name.lstrip("_"): copy(getattr(self, name)) for name in self._saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the progress."""
        for name in self._saved:
            setattr(self, name, copy(state[name.lstrip("_")]))


class _Pause(_Part):
    """Environment steps of all rows during which no call is made."""

    left = 0

    @property
    def ready(self) -> bool:
        """Whether a call may be made now; during an outage a single one."""
        return self.left == 0

    def advance(self, steps: int) -> None:
        """Let ``steps`` environment steps pass."""
        self.left = max(0, self.left - steps)


@dataclass(eq=False)
class OutageBackoff(_Pause):
    """Exponential back-off during an outage; one call probes the advisor after each pause.

    A failure that likely repeats (no connection, timeout, status 429 or 5xx) begins an
    outage at once, any other one, such as an unreadable answer, at the third in a row. The
    n-th pause lasts base_steps · 2^(n-1) environment steps of all rows, at most
    ``max_steps``, or ``max_free_steps`` if the failed call was refunded. Usable advice ends
    the outage. :attr:`out` tells of one, :attr:`steps` how long it has lasted. Raises a
    ``ValueError`` unless 1 <= base_steps <= max_free_steps <= max_steps.
    """

    base_steps: int = 32
    max_free_steps: int = 128
    max_steps: int = 4096

    # Unreadable answers in a row that begin an outage.
    _UNREADABLE = 3
    _saved = ("out", "left", "steps", "_next", "_before", "_unreadable")

    def __post_init__(self) -> None:
        if not 1 <= self.base_steps <= self.max_free_steps <= self.max_steps:
            raise ValueError(f"Pauses must grow from 1 on, got {self}.")
        self._reset()

    def _reset(self) -> None:
        self.out = False
        self.left = self.steps = 0
        self._next = self._before = self.base_steps
        self._unreadable = 0

    def advance(self, steps: int) -> None:
        """Let ``steps`` environment steps pass."""
        super().advance(steps)
        self.steps += steps if self.out else 0

    def begin_call(self) -> None:
        """Record a call. In an outage the next pause starts now: an async call may never end."""
        if self.out:
            self._before = self._next
            self._pause()

    def observe(self, *, ok: bool, lasting: bool | None = True, free: bool = False) -> None:
        """Record the end of one call: ``ok`` with usable advice, ``free`` if it was refunded.

        A failure is ``lasting`` if the next call would likely fail as well; ``None`` if its
        end says nothing, or it was not made: then the pause does not grow.
        """
        if ok:
            self._reset()
            return
        if lasting is None:
            self._next = self._before if self.out else self._next
            return
        self._unreadable = 0 if lasting else self._unreadable + 1
        if not lasting and self._unreadable < self._UNREADABLE:
            # The advisor responds. The next pause keeps its length until usable advice.
            self.out, self.left = False, 0
            return
        # A call made before the outage began does not lengthen it when it fails.
        if not self.out:
            self.out, self.steps = True, 0
            self._pause()
        if free:
            self.left = min(self.left, self.max_free_steps)
            self._next = min(self._next, self.max_free_steps)

    def _pause(self) -> None:
        self.left = self._next
        self._next = min(2 * self._next, self.max_steps)


@dataclass(eq=False)
class Cooldown(_Pause):
    """A pause of ``steps`` after each call, and of ``steps_after_success`` after a success.

    Both count environment steps of all rows together and are 0 by default; a ``ValueError``
    tells of negative ones.
    """

    steps: int = 0
    steps_after_success: int = 0

    _saved = ("left",)

    def __post_init__(self) -> None:
        CallsConfig(cooldown=self.steps, cooldown_after_success=self.steps_after_success)

    def start(self) -> None:
        """Start the pause after a call."""
        self.left = max(self.left, self.steps)

    def success(self) -> None:
        """Start the pause after a success, unless a longer one is running."""
        self.left = max(self.left, self.steps_after_success)


class MacroBoundaries(_Part):
    """Trigger at an episode's start, and after many steps without reward.

    A boundary stays due until the row is served. ``after_reset`` says whether a reset is one
    (by default), ``no_reward_steps`` after how many steps of one row without a reward above 0
    there is one; ``None``, the default, for never. Raises a ``ValueError`` if that is below 1,
    or no boundary could ever occur.
    """

    name = "boundaries"
    _saved = ("_fresh", "_dry")

    def __init__(self, after_reset: bool = True, no_reward_steps: int | None = None) -> None:
        CallsConfig(always=False, after_reset=after_reset, no_reward_steps=no_reward_steps)
        self.after_reset = after_reset
        self.no_reward_steps = no_reward_steps
        self._fresh: list[bool] = []
        self._dry: list[int] = []

    def update(self, signals: StepSignals) -> None:
        """Record one step of all rows."""
        self._fresh = _sized(self._fresh, len(signals.resets), False)
        self._dry = _sized(self._dry, len(signals.resets), 0)
        for row, reset in enumerate(signals.resets):
            if reset:
                self._fresh[row] = self.after_reset
                self._dry[row] = 0
            elif signals.rewards is not None:
                self._dry[row] = 0 if signals.rewards[row] > 0 else self._dry[row] + 1

    def due(self, row: int) -> bool:
        """Whether ``row`` waits for advice."""
        dry = self.no_reward_steps is not None and self._dry[row] >= self.no_reward_steps
        return self._fresh[row] or dry

    def serve(self, row: int) -> None:
        """Record that ``row`` was asked about, or has advice already."""
        self._fresh[row] = False
        self._dry[row] = 0


class Novelty(_Part):
    """Trigger on rarely visited situations: while 1/√n at the n-th visit is above a threshold.

    With 0.5 these are the first three visits. The 100,000 most recently visited situations are
    remembered. Raises a ``ValueError`` if ``threshold`` is not in ``[0, 1)``.
    """

    name = "novelty"
    max_keys = 100_000

    def __init__(self, threshold: float) -> None:
        CallsConfig(always=False, novelty=threshold)
        self.threshold = threshold
        self._visits: OrderedDict[str, int] = OrderedDict()
        self._due: list[bool] = []

    def update(self, signals: StepSignals) -> None:
        """Count a visit to the situation that each row has entered."""
        self._due = _sized(self._due, len(signals.situations), False)
        for row, key in enumerate(signals.situations):
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
        self._visits = OrderedDict(state["visits"][-self.max_keys :])
        self._due = list(state["due"])


class TDErrorSpike(_Part):
    """Trigger on TD errors far above the mean, with hysteresis.

    z = (|td| - mean) / std, with moving averages over all rows, in which the past weighs
    0.99; the first 100 values are only averaged. A row becomes due at z >= ``high`` (3 by
    default) and stays so, also after a call, until z <= ``low`` (1) or its episode ends.
    Raises a ``ValueError`` if not ``low < high``, with ``high`` above 0.
    """

    name = "td_spike"
    decay, warmup = 0.99, 100
    _saved = ("_count", "_mean", "_variance", "_on")

    def __init__(self, high: float = 3.0, low: float = 1.0) -> None:
        CallsConfig(always=False, td_spike=high, td_spike_low=low)
        self.high = high
        self.low = low
        self._count = 0
        self._mean = self._variance = 0.0
        self._on: list[bool] = []

    def update(self, signals: StepSignals) -> None:
        """Record one step of all rows; without a finite error a row stays as it is."""
        self._on = _sized(self._on, len(signals.td_errors), False)
        for row, value in enumerate(signals.td_errors):
            if signals.resets[row]:
                self._on[row] = False
            if value is None or not math.isfinite(value):
                continue
            error = min(abs(value), 1e100)  # its square must stay finite
            if self._count >= self.warmup:
                # The floor keeps a signal that hardly moved from spiking at its first move.
                scale = max(math.sqrt(self._variance), 0.01 * self._mean, 1e-8)
                z = (error - self._mean) / scale
                self._on[row] = z > self.low if self._on[row] else z >= self.high
            self._count += 1
            # A plain mean at first, so that the start is not weighted for ever.
            weight = max(1.0 - self.decay, 1.0 / self._count)
            delta = error - self._mean
            self._mean += weight * delta
            self._variance = (1.0 - weight) * (self._variance + weight * delta * delta)

    def due(self, row: int) -> bool:
        """Whether the TD error of ``row`` has spiked and not calmed down yet."""
        return self._on[row]

    def serve(self, row: int) -> None:
        """Leave ``row`` due until it calms down."""


def _sized(values: list[Any], rows: int, start: Any) -> list[Any]:
    """Forget all rows where there is another number of environments than before."""
    return values if len(values) == rows else [start] * rows


Trigger = MacroBoundaries | Novelty | TDErrorSpike
