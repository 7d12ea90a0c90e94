"""What keeps calls apart: cooldown and outages."""

from __future__ import annotations

from typing import Any


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


class OutagePause:
    """Growing pauses while the advisor fails, each ended by one call that tries it again.

    A failure that the next question would likely meet too (no connection, no answer in
    time, status 429 or 5xx) begins an outage at once, any other the third in a row: an
    answer that cannot be read says something of the question, several say something of the
    advisor. The n-th pause of an outage lasts base_steps · 2^(n-1) environment steps of all
    rows, at most ``max_steps``, or ``max_free_steps`` where the failed call cost nothing.
    Usable advice ends the outage.

    :attr:`out` says whether there is an outage, :attr:`left` how many steps of its pause are
    left and :attr:`steps` how many it has lasted.

    Args:
        base_steps: First pause, in environment steps of all rows, at least 1. Default: ``32``.
        max_free_steps: Longest pause after a call that was given back, at least
            ``base_steps``. Default: ``128``.
        max_steps: Longest pause, at least ``max_free_steps``. Default: ``4096``.

    Raises:
        ValueError: If a pause is out of its range.

    Examples:
        >>> pause = OutagePause(base_steps=4)
        >>> pause.observe(ok=False)
        >>> pause.out, pause.left
        (True, 4)
        >>> pause.advance(4)
        >>> pause.ready
        True
        >>> pause.begin_call()
        >>> pause.left, pause.ready
        (8, False)
        >>> pause.observe(ok=True)
        >>> pause.out, pause.ready
        (False, True)
    """

    # Unreadable answers in a row that begin an outage.
    _UNREADABLE = 3

    def __init__(
        self, base_steps: int = 32, max_free_steps: int = 128, max_steps: int = 4096
    ) -> None:
        if not 1 <= base_steps <= max_free_steps <= max_steps:
            raise ValueError(
                "OutagePause needs 1 <= base_steps <= max_free_steps <= max_steps, got "
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
        """Take note of a call. During an outage the next pause begins with it, not with its end:
        in async mode it may never end.
        """
        if self.out:
            self._before = self._next
            self._pause()

    def withdraw_call(self) -> None:
        """Take note that a call was not made, or tells nothing: the pauses do not grow by it."""
        if self.out:
            self._next = self._before

    def observe(self, *, ok: bool, lasting: bool = True, free: bool = False) -> None:
        """Take note of the end of one call.

        Keyword Args:
            ok: Whether it brought usable advice.
            lasting: Whether the next call would likely fail as well. Default: ``True``.
            free: Whether the failed call was given back to the budget. Default: ``False``.
        """
        if ok:
            self._reset()
            return
        if not lasting:
            self._unreadable += 1
            if self._unreadable < self._UNREADABLE:
                # It answers. The length of the next pause is kept until an answer is usable.
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
        """Restore the outage.

        Args:
            state: What :meth:`state_dict` returned.
        """
        self.out = bool(state["out"])
        self.left = int(state["left"])
        self._next = int(state["next"])
        self._before = int(state["before"])
        self._unreadable = int(state["unreadable"])
