"""What makes a row worth a call: macro boundaries, novelty, TD-error spikes."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any


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


class Novelty:
    """A situation that has been seen seldom: 1/√n above a threshold at its n-th visit.

    Args:
        threshold: Due while 1/√n is above it, at least 0 and below 1. With 0.5 these
            are the first three visits.
        max_keys: Situations that are remembered, at least 1; the one seen longest ago is
            forgotten first, and is new again. Default: ``100_000``.

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
            situations: Key, exact or coarse, of the situation that each row has just
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
        """Take note that ``row`` was asked about; its next situation is judged anew."""
        self._due[row] = False

    def state_dict(self) -> dict[str, Any]:
        """Return the visits, those seen longest ago first, and what is due."""
        # Pairs, since JSON may reorder a mapping.
        return {"visits": [list(item) for item in self._visits.items()], "due": list(self._due)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the visits, and what is due.

        Args:
            state: What :meth:`state_dict` returned. Of more situations than
                ``max_keys``, those seen last stay.
        """
        kept = state["visits"][-self.max_keys :]
        self._visits = OrderedDict((key, int(visits)) for key, visits in kept)
        self._due = [bool(value) for value in state["due"]]


class TDErrorSpike:
    """A row whose TD error is far above the usual, until it has calmed down again.

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
        """Take note of one step of all rows.

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
        """Restore the moving averages, and the rows that are due.

        Args:
            state: What :meth:`state_dict` returned.
        """
        self._count = int(state["count"])
        self._mean = float(state["mean"])
        self._variance = float(state["variance"])
        self._on = [bool(value) for value in state["on"]]
