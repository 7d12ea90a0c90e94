"""Back-off while the advisor fails."""

from __future__ import annotations

from typing import Any


class OutageBackoff:
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

    Examples:
        >>> outage = OutageBackoff(base_steps=4)
        >>> outage.observe(ok=False)
        >>> outage.out, outage.left
        (True, 4)
        >>> outage.advance(4)
        >>> outage.ready
        True
        >>> outage.begin_call()
        >>> outage.left, outage.ready
        (8, False)
        >>> outage.observe(ok=True)
        >>> outage.out, outage.ready
        (False, True)
    """

    # Unreadable answers in a row that begin an outage.
    _UNREADABLE = 3

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
        if not lasting:
            self._unreadable += 1
            if self._unreadable < self._UNREADABLE:
                # The advisor responds. The next pause keeps its length until usable advice.
                self.out, self.left = False, 0
                return
        else:
            self._unreadable = 0
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

    def state_dict(self) -> dict[str, Any]:
        """Return the outage, what is left of its pause, and the length of the next."""
        return {
            "out": self.out,
            "left": self.left,
            "next": self._next,
            "before": self._before,
            "unreadable": self._unreadable,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the outage."""
        self.out = bool(state["out"])
        self.left = int(state["left"])
        self._next = int(state["next"])
        self._before = int(state["before"])
        self._unreadable = int(state["unreadable"])
