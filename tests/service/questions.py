"""How the service's tests ask: about keys, one row each."""

from __future__ import annotations

import threading

from lore_torchrl.advisors.base import Advice, AdviceRequest
from lore_torchrl.service import AdviceService, Query, Reply, StepSignals

ACTIONS = ("left", "right")


def request(key: str) -> AdviceRequest:
    """Return the question about the situation ``key``."""
    return AdviceRequest(description=f"It is {key}.", actions=ACTIONS, cache_key=key)


def ask(service: AdviceService, requests) -> list[Advice | None]:
    """Ask whatever the policy says, and return the advice."""
    return [reply.advice for reply in service.ask(requests)]


def step(service: AdviceService, *keys: str, armed: bool = True, **near) -> list[Reply]:
    """Let one vector step pass, in which each row enters the situation of a key."""
    queries = [Query(key, lambda key=key: request(key), n, **near) for n, key in enumerate(keys)]
    signals = StepSignals([1.0] * len(keys), rewards=[0.0] * len(keys))
    return service.step(queries, signals if armed else None)


def join_loops():
    """Wait for the loops of closed services, so that what they still say belongs to this test."""
    for thread in threading.enumerate():
        if thread.name == "lore-advice":
            thread.join(5.0)
            assert not thread.is_alive()
