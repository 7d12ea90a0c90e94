"""A circuit breaker: stop asking a server that keeps failing, then try it with one call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from lore_torchrl.advisors.errors import CircuitOpenError


class CircuitBreaker:
    """Closed while calls succeed, open after ``failures`` in a row, half-open after a while.

    Open, it refuses every call for ``reset_s`` seconds. Then it lets one call through, the
    probe, and refuses the others until the probe is decided: success closes it, failure
    opens it for another ``reset_s``. Every call admitted must be decided by exactly one of
    :meth:`success`, :meth:`failure` and :meth:`undecided`; use it from one event loop.

    Args:
        failures: Failures in a row that open it. Default: ``5``.
        reset_s: Seconds that it stays open. Default: ``30.0``.
        clock: Returns seconds that never run backwards. Default: ``time.monotonic``.

    Raises:
        ValueError: If ``failures`` is below 1, or ``reset_s`` no positive finite number.

    Examples:
        >>> now = [0.0]
        >>> breaker = CircuitBreaker(failures=1, reset_s=10.0, clock=lambda: now[0])
        >>> breaker.admit()
        >>> breaker.failure()
        >>> breaker.state
        'open'
        >>> now[0] = 10.0
        >>> breaker.state
        'half_open'
        >>> breaker.admit()
        >>> breaker.success()
        >>> breaker.state
        'closed'
    """

    def __init__(
        self,
        *,
        failures: int = 5,
        reset_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if failures < 1:
            raise ValueError(f"failures must be at least 1, got {failures}.")
        if not (math.isfinite(reset_s) and reset_s > 0):
            raise ValueError(f"reset_s must be a positive number of seconds, got {reset_s}.")
        self.failures = failures
        self.reset_s = reset_s
        self._clock = clock
        self._in_a_row = 0
        self._opened_at: float | None = None
        self._probing = False

    @property
    def state(self) -> str:
        """``"closed"``, ``"open"`` or ``"half_open"``."""
        if self._opened_at is None:
            return "closed"
        return "half_open" if self._clock() - self._opened_at >= self.reset_s else "open"

    def admit(self) -> None:
        """Let a call through.

        Raises:
            CircuitOpenError: If it is open, or half-open with its probe under way.
        """
        state = self.state
        if state == "closed":
            return
        if state == "open":
            left = self.reset_s - (self._clock() - self._opened_at)
            raise CircuitOpenError(
                f"Not asked: {self._in_a_row} failures in a row; next try in {left:.1f} s."
            )
        if self._probing:
            raise CircuitOpenError("Not asked: the server is being tried with another call.")
        self._probing = True

    def success(self) -> None:
        """Take note that the server works."""
        self._in_a_row = 0
        self._opened_at = None
        self._probing = False

    def failure(self) -> None:
        """Take note that the server failed."""
        self._in_a_row += 1
        # A call admitted before it opened must not extend the wait when it fails late.
        if self._probing or (self._opened_at is None and self._in_a_row >= self.failures):
            self._opened_at = self._clock()
        self._probing = False

    def undecided(self) -> None:
        """Take back a call that was cancelled: it says nothing of the server."""
        self._probing = False

    def reset(self) -> None:
        """Forget everything, as after a change of event loop with calls under way."""
        self.success()
