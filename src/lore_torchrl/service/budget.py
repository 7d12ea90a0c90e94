"""The ledger of calls: how many were paid for, how many are left."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from lore_torchrl.advisors.errors import Usage
from lore_torchrl.configs.lore import CallsConfig
from lore_torchrl.service.store import (
    AdviceStore,
    SharedLock,
    StoreBusyError,
    StoreError,
    patience,
)


class BudgetExceededError(RuntimeError):
    """More was spent than the budget holds; nothing has been taken from it."""


class DamagedLedgerError(StoreError):
    """The ledger's row cannot be read, so that nothing is spent from it."""

    kind = "ledger"


class Spent(NamedTuple):
    """What a ledger holds; ``refunds`` are the calls of which no server took a byte."""

    calls: int = 0
    tokens: int = 0
    cost: float = 0.0
    refunds: int = 0

    def plus(self, more: Spent) -> Spent:
        """Return the sum of both."""
        return Spent(*(a + b for a, b in zip(self, more, strict=True)))


class CallBudget:
    """A total of calls, tokens and money that may be spent.

    Calls are spent before they are made. Tokens and money are known only after an answer:
    when they are used up no further call begins, and what is in flight then may still add
    to them.

    With a ``store`` the ledger is a row in its file, and all that is spent is on disk
    when :meth:`spend` returns. Every process with the same file and ``ledger`` spends
    from the same row. Reading the budget never waits for a writer: it may return the last
    known value. Only a budget with a ``store`` can be pickled: the copy spends from the same
    ledger.

    Args:
        total: Calls that may be spent over the whole run, at least 0.
        max_tokens: Tokens, at least 1, at which the budget is used up; ``None`` for no
            limit. Default: ``None``.
        max_cost: Money above 0, in the currency of the configured prices, at which the
            budget is used up; ``None`` for no limit. Default: ``None``.
        store: Where the ledger is kept; ``None`` for memory only. Default: ``None``.
        ledger: Name of the ledger in the store. Default: ``"default"``.

    Raises:
        TypeError: If it is pickled or copied without a ``store``.
        ValueError: If ``total`` is not a whole number of at least 0, or a limit not above 0.
    """

    def __init__(
        self,
        total: int,
        *,
        max_tokens: int | None = None,
        max_cost: float | None = None,
        store: AdviceStore | None = None,
        ledger: str = "default",
    ) -> None:
        if type(total) is not int or total < 0:
            raise ValueError(f"CallBudget needs a whole number of calls >= 0, got total={total!r}.")
        CallsConfig(max_tokens=max_tokens, max_cost=max_cost)
        self.total = total
        self.max_tokens = max_tokens
        self.max_cost = max_cost
        self.store = store
        self.ledger = ledger
        self._ledger = _MemoryLedger() if store is None else _StoreLedger(store, ledger)
        # Tokens, money and refunds that could not be entered yet.
        self._owed = Spent()
        self._lock = SharedLock()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.store is None:
            raise TypeError(
                "A copy of a CallBudget in memory would spend its calls again. Share a file: "
                "CallBudget(total, store=AdviceStore(path)), or set lore.calls.store=<path>."
            )
        names = ("max_tokens", "max_cost", "store", "ledger")
        return partial(CallBudget, self.total, **{name: vars(self)[name] for name in names}), ()

    @property
    def spent(self) -> int:
        """Calls made so far."""
        return self._read().calls

    @property
    def tokens(self) -> int:
        """Tokens that answers have reported so far."""
        return self._read().tokens

    @property
    def cost(self) -> float:
        """Money that answers have cost so far."""
        return self._read().cost

    @property
    def remaining(self) -> int:
        """Calls that are left, never below 0; 0 when tokens or money are used up."""
        return self._left(self._read())

    def _owe(self, more: Spent) -> None:
        with self._lock:
            self._owed = self._owed.plus(more)

    def _read(self) -> Spent:
        return self._ledger.read().plus(self._owed)

    def _change(self, change: Callable[[Spent], Spent]) -> Spent:
        """Enter what is owed, and what ``change`` makes of the ledger; return the latter."""
        owed = more = Spent()

        def enter(spent: Spent) -> Spent:
            nonlocal owed, more
            with self._lock:
                owed, self._owed = self._owed, owed
            more = change(spent.plus(owed))
            return more.plus(owed)

        try:
            self._ledger.update(enter)
        except BaseException:
            self._owe(owed)  # the transaction was undone
            raise
        return more

    def _left(self, spent: Spent) -> int:
        if self.max_tokens is not None and spent.tokens >= self.max_tokens:
            return 0
        if self.max_cost is not None and spent.cost >= self.max_cost:
            return 0
        # A run may be resumed with a smaller total than it had already spent.
        return max(0, self.total - spent.calls)

    def spend(self, n: int = 1) -> None:
        """Take ``n`` calls from the budget, before they are made.

        If fewer are left it raises a :class:`BudgetExceededError`, if the store cannot be
        written a :class:`StoreError`, and takes none.
        """
        _check_n(n)
        taken = self._change(lambda spent: Spent(calls=n if n <= self._left(spent) else 0)).calls
        # Not within the change: an exception would undo what was owed and is entered now.
        if taken < n:
            raise BudgetExceededError(
                f"{n} calls asked for, {self.remaining} of {self.total} left."
            )

    def spend_up_to(self, n: int) -> int:
        """Take ``n`` calls, or as many as are left, as :meth:`spend` does; return how many."""
        _check_n(n)
        return self._change(lambda spent: Spent(calls=min(n, self._left(spent)))).calls

    def refund(self, n: int = 1, *, sent: bool = False) -> int:
        """Give back calls that reached no server; return how many.

        Of those that were tried to be ``sent``, as on a refused connection, at most ``total``
        are given back over the life of the ledger. Where the store is busy they are given
        back with its next change; where it cannot be written, a :class:`StoreError` says so.
        """
        _check_n(n)

        def given_back(spent: Spent) -> Spent:
            if not sent:
                return Spent(calls=-n)
            most = min(n, max(0, self.total - spent.refunds))
            return Spent(calls=-most, refunds=most)

        try:
            change = self._change(given_back)
        except StoreBusyError:
            change = given_back(self._read())
            self._owe(change)
        return -change.calls

    def settle(self, usage: Usage) -> None:
        """Add what an answer has cost; a negative or non-finite number counts as 0.

        What the store cannot take now, by a :class:`StoreError`, it gets with the next change.
        """
        usage = usage.counted()
        if usage != Usage():
            self._owe(Spent(tokens=usage.tokens, cost=usage.cost))
            self._change(lambda spent: Spent())

    def state_dict(self) -> dict[str, Any]:
        """Return what was spent. The limits are configuration and are not part of it."""
        spent = self._read()._asdict()
        return {"spent": spent.pop("calls"), **spent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what was spent; a checkpoint only raises what a store holds."""
        self._ledger.restore(Spent(state["spent"], *(state[name] for name in Spent._fields[1:])))


def _check_n(n: int) -> None:
    if n < 0:
        raise ValueError(f"A number of calls must not be negative, got n={n}.")


class _MemoryLedger:
    """A ledger that ends with its process."""

    def __init__(self) -> None:
        self._spent = Spent()
        self._lock = SharedLock()

    def read(self) -> Spent:
        return self._spent

    def update(self, change: Callable[[Spent], Spent]) -> None:
        with self._lock:
            self._spent = self._spent.plus(change(self._spent))

    def restore(self, saved: Spent) -> None:
        self._spent = saved


class _StoreLedger:
    """A ledger in a row of the store."""

    def __init__(self, store: AdviceStore, name: str) -> None:
        self._store = store
        self._name = name
        self._last: Spent | None = None

    def read(self) -> Spent:
        try:
            with patience(0.0):
                self._last = self._spent(self._store.read(_READ, (self._name,)))
        except (StoreBusyError, DamagedLedgerError):
            # What was read last will do to look at: spending asks the file itself.
            self._last = self._last or Spent()
        except StoreError:
            # A store that never worked is a mistake to be told at once.
            if self._last is None:
                raise
        return self._last

    def update(self, change: Callable[[Spent], Spent]) -> None:
        with self._store.write() as connection:
            # Checked before any sum: SQLite takes a text for 0.
            spent = self._spent(connection.execute(_READ, (self._name,)).fetchall())
            connection.execute(_ADD, (self._name, *change(spent)))

    def restore(self, saved: Spent) -> None:
        self._last = saved
        # A damaged ledger is told of when a call is to be paid.
        with suppress(DamagedLedgerError):
            self.update(
                lambda spent: Spent(*(max(0, a - b) for a, b in zip(saved, spent, strict=True)))
            )

    def _spent(self, rows: list[tuple[Any, ...]]) -> Spent:
        spent = Spent(*rows[0]) if rows else Spent()
        for name, value in spent._asdict().items():
            kind = (int, float) if name == "cost" else int
            if not isinstance(value, kind) or not 0 <= value < math.inf:
                raise DamagedLedgerError(
                    f"{self._store.path}: the ledger {self._name!r} is damaged "
                    f"({name}={value!r:.40}). No call is made, since nobody knows what was spent. "
                    "Mend its row, or name another ledger."
                )
        return spent


_READ = "SELECT calls, tokens, cost, refunds FROM ledger WHERE name = ?"
_ADD = """
    INSERT INTO ledger (name, calls, tokens, cost, refunds) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (name) DO UPDATE SET
        calls = calls + excluded.calls,
        tokens = tokens + excluded.tokens,
        cost = cost + excluded.cost,
        refunds = refunds + excluded.refunds
"""
