"""The ledger of calls: how many were paid for, how many are left."""

from __future__ import annotations

from typing import Any


class BudgetExceededError(RuntimeError):
    """More was spent than the budget holds; nothing has been taken from it."""


class CallBudget:
    """A total number of calls that may be spent and never comes back.

    Args:
        total: Calls that may be spent over the whole run, at least 0.

    Raises:
        ValueError: If ``total`` is not a whole number of at least 0.

    Examples:
        >>> budget = CallBudget(3)
        >>> budget.spend(2)
        >>> budget.remaining
        1
    """

    def __init__(self, total: int) -> None:
        if isinstance(total, bool) or not isinstance(total, int) or total < 0:
            raise ValueError(
                f"CallBudget needs a whole number of calls of at least 0, got total={total!r}. "
                "Use 0 for a run without calls."
            )
        self.total = total
        self.spent = 0

    def __repr__(self) -> str:
        return f"CallBudget(total={self.total}, spent={self.spent})"

    @property
    def remaining(self) -> int:
        """Calls that are left, never below 0."""
        # A run may be resumed with a smaller total than it had already spent.
        return max(0, self.total - self.spent)

    def spend(self, n: int = 1) -> None:
        """Take ``n`` calls from the budget.

        Args:
            n: Calls to take, at least 0. Default: ``1``.

        Raises:
            BudgetExceededError: If fewer than ``n`` calls are left; none is taken.
            ValueError: If ``n`` is negative.
        """
        if n < 0:
            raise ValueError(f"A budget is never refunded: spend() got n={n}.")
        if n > self.remaining:
            raise BudgetExceededError(
                f"{n} calls asked for, {self.remaining} of {self.total} left. "
                "Check `remaining` before spending."
            )
        self.spent += n

    def state_dict(self) -> dict[str, Any]:
        """Return what was spent. The total is configuration and is not part of it."""
        return {"spent": self.spent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what was spent.

        Args:
            state: What :meth:`state_dict` returned.
        """
        self.spent = int(state["spent"])
