"""Parts of the call policy: pauses, and triggers that make a row due."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from typing import Any, ClassVar


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


class OutageBackoff(_Part):
    """Exponential back-off during an outage; one call probes the advisor after each pause.

    A failure that likely repeats (no connection, timeout, status 429 or 5xx) begins an
    outage at once. Any other failure, such as an unreadable answer, begins one at the third
    in a row. The n-th pause lasts base_steps · 2^(n-1) environment steps of all rows, at
    most ``max_steps``, or ``max_free_steps`` if the failed call was refunded. Usable advice
    ends the outage.

    :attr:`out` says whether there is an outage, :attr:`left` how many steps of its pause are
    left and :attr:`steps` how many it has lasted.

    Args:
        base_steps: First pause, in environment steps of all rows, at least 1. Default: ``32``.
        max_free_steps: Longest pause after a refunded call, at least
            ``base_steps``. Default: ``128``.
        max_steps: Longest pause, at least ``max_free_steps``. Default: ``4096``.

    Raises:
        ValueError: If a pause is out of its range.
    """

    # Unreadable answers in a row that begin an outage.
    _UNREADABLE = 3
    _saved = ("out", "left", "_next", "_before", "_unreadable")

    def __init__(
        self, base_steps: int = 32, max_free_steps: int = 128, max_steps: int = 4096
    ) -> None:
        if not 1 <= base_steps <= max_free_steps <= max_steps:
            raise ValueError(
                "OutageBackoff needs 1 <= base_steps <= max_free_steps <= max_steps, got "
                f"base_steps={base_steps}, max_free_steps={max_free_steps}, "
                f"max_steps={max_steps}."
            )
        self.base_steps = base_steps
        self.max_free_steps = max_free_steps
        self.max_steps = max_steps
        self._reset()

    def _reset(self) -> None:
        self.out = False
        self.left = self.steps = 0
        self._next = self._before = self.base_steps
        self._unreadable = 0

    @property
    def ready(self) -> bool:
        """Whether a call may be made now; during an outage a single one."""
        return self.left == 0

    def advance(self, steps: int) -> None:
        """Let ``steps`` environment steps pass."""
        self.left = max(0, self.left - steps)
        self.steps += steps if self.out else 0

    def begin_call(self) -> None:
        """Record a call. In an outage the next pause starts now: an async call may never end."""
        if self.out:
            self._before = self._next
            self._pause()

    def withdraw_call(self) -> None:
        """Undo the pause's growth: the call was not made, or its end says nothing."""
        if self.out:
            self._next = self._before

    def observe(self, *, ok: bool, lasting: bool = True, free: bool = False) -> None:
        """Record the end of one call.

        Keyword Args:
            ok: Whether it brought usable advice.
            lasting: Whether the next call would likely fail as well. Default: ``True``.
            free: Whether the failed call was refunded. Default: ``False``.
        """
        if ok:
            self._reset()
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


class Cooldown(_Part):
    """A pause after each call, and another one after each success.

    Environment steps of all rows add up: with four environments, one vector step is four.

    Args:
        steps: Environment steps between two calls. Default: ``0``.
        steps_after_success: Environment steps without a call after a success.
            Default: ``0``.

    Raises:
        ValueError: If either is negative.
    """

    _saved = ("left",)

    def __init__(self, steps: int = 0, steps_after_success: int = 0) -> None:
        if min(steps, steps_after_success) < 0:
            raise ValueError(
                f"Cooldown needs steps of at least 0, got steps={steps}, "
                f"steps_after_success={steps_after_success}."
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


class MacroBoundaries(_Part):
    """Trigger at an episode's start, and after many steps without reward.

    A boundary stays due until the row is served. Otherwise a cooldown, or a row with a
    higher score, would lose it for the episode.

    Args:
        after_reset: Whether a reset is a boundary. Default: ``True``.
        no_reward_steps: Steps of one row without a reward above 0 that make a
            boundary; ``None`` for never. Default: ``None``.

    Raises:
        ValueError: If ``no_reward_steps`` is below 1, or no boundary could ever occur.
    """

    _saved = ("_fresh", "_dry")

    def __init__(self, after_reset: bool = True, no_reward_steps: int | None = None) -> None:
        if no_reward_steps is not None and no_reward_steps < 1:
            raise ValueError(f"no_reward_steps must be at least 1 or None, got {no_reward_steps}.")
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
        self._fresh = _sized(self._fresh, len(resets), False)
        self._dry = _sized(self._dry, len(resets), 0)
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


class Novelty(_Part):
    """Trigger on rarely visited situations: 1/√n above a threshold at the n-th visit.

    Args:
        threshold: Due while 1/√n is above it, at least 0 and below 1. With 0.5 these
            are the first three visits.
        max_keys: Situations remembered, at least 1; the least recently visited is
            forgotten first. Default: ``100_000``.

    Raises:
        ValueError: If a number is out of its range.
    """

    def __init__(self, threshold: float, max_keys: int = 100_000) -> None:
        if not 0.0 <= threshold < 1.0:
            raise ValueError(f"Novelty needs a threshold in [0, 1), got {threshold}.")
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
        self._due = _sized(self._due, len(situations), False)
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
        self._visits = OrderedDict(state["visits"][-self.max_keys :])
        self._due = list(state["due"])


class TDErrorSpike(_Part):
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
    """

    _saved = ("_count", "_mean", "_variance", "_on")

    def __init__(
        self, high: float = 3.0, low: float = 1.0, *, decay: float = 0.99, warmup: int = 100
    ) -> None:
        if not (math.isfinite(high) and math.isfinite(low) and low < high):
            raise ValueError(f"TDErrorSpike needs finite low < high, got low={low}, high={high}.")
        if not 0.0 < decay < 1.0:
            raise ValueError(f"decay must lie between 0 and 1, got {decay}.")
        if warmup < 2:
            raise ValueError(f"warmup must be at least 2 values, got {warmup}.")
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
        self._on = _sized(self._on, len(td_errors), False)
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
            self._count += 1
            # A plain mean at first, so that the start is not weighted for ever.
            weight = max(1.0 - self.decay, 1.0 / self._count)
            delta = error - self._mean
            self._mean += weight * delta
            self._variance = (1.0 - weight) * (self._variance + weight * delta * delta)

    def due(self, row: int) -> bool:
        """Whether the TD error of ``row`` has spiked and not calmed down yet."""
        return self._on[row]


def _sized(values: list[Any], rows: int, start: Any) -> list[Any]:
    """Forget all rows where there is another number of environments than before."""
    return values if len(values) == rows else [start] * rows
