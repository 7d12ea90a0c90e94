"""What the other processes of the store's tests do. Run in forked children."""

from __future__ import annotations

import time

from lore_torchrl.advisors.base import Advice
from lore_torchrl.service import AdviceCache, AdviceStore, BudgetExceededError, CallBudget


def advice(n: int) -> Advice:
    """Return the answer that belongs to call ``n``."""
    return Advice(logits=(float(n), 1 / 3), confidence=0.25)


def spend_all(path, total, barrier, results):
    """Spend from the shared ledger, one and two at a time, until nothing is left."""
    with AdviceStore(path) as store:
        budget = CallBudget(total, store=store)
        barrier.wait()
        taken = 0
        while budget.remaining:
            try:
                budget.spend(1)
            except BudgetExceededError:
                continue
            taken += 1 + budget.spend_up_to(2)
            time.sleep(0.002)  # a call takes time, too; without it one process has all
        results.put(taken)


def buy_for_ever(path, acknowledge):
    """Spend, then keep the answer; tell of each only when it is done."""
    store = AdviceStore(path)
    budget = CallBudget(10_000, store=store)
    cache = AdviceCache(store=store)
    for n in range(10_000):
        budget.spend()
        acknowledge(f"spent {n}\n")
        cache.put(f"key {n}", advice(n), abstract_state="room")
        acknowledge(f"kept {n}\n")


def stop_inside(path, acknowledge):
    """Stop inside a transaction that has changed the ledger, and wait to be killed."""
    store = AdviceStore(path)
    CallBudget(10, store=store).spend(2)
    with store.write() as connection:
        connection.execute("UPDATE ledger SET calls = 0")
        acknowledge("inside\n")
        time.sleep(60)
