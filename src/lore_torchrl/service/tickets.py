"""The ticket table: one entry per question, from its payment to its answer."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from lore_torchrl.advisors.base import Advice, AdviceRequest

# Answered questions that are remembered; the cache keeps the answers in any case.
_MAX_DONE = 1_024


@dataclass(slots=True, eq=False)
class Ticket:
    """One question that was paid for; ``cache_key`` and ``abstract_state`` have the prefix of
    the model and prompt that were asked.
    """

    advice_id: int
    request: AdviceRequest
    cache_key: str
    abstract_state: str | None
    latent: Any
    started: float = field(default_factory=time.monotonic)
    done: bool = False  # answered or given up
    answer: Advice | None = None

    @property
    def age_s(self) -> float:
        """Seconds since it was asked."""
        return time.monotonic() - self.started


class TicketTable:
    """All questions in flight, and the last 1,024 that are done.

    Not safe for several threads at once: the service holds its lock.
    """

    def __init__(self) -> None:
        self._open: dict[str, Ticket] = {}  # by the request's own key
        self._done: dict[int, Ticket] = {}

    def __len__(self) -> int:
        """Return how many are in flight."""
        return len(self._open)

    def __getitem__(self, advice_id: int) -> Ticket | None:
        """Return a ticket by its number, ``None`` if it is unknown or forgotten."""
        if advice_id in self._done:
            return self._done[advice_id]
        return next((t for t in self._open.values() if t.advice_id == advice_id), None)

    @property
    def oldest_s(self) -> float:
        """Seconds since the oldest question in flight was asked, 0 without any."""
        return max((ticket.age_s for ticket in self._open.values()), default=0.0)

    def in_flight(self, key: str) -> int:
        """Return the number of the question in flight about a situation, 0 for none."""
        return self._open[key].advice_id if key in self._open else 0

    def add(self, tickets: Iterable[Ticket]) -> None:
        """Enter questions that are asked now."""
        self._open.update((ticket.request.cache_key, ticket) for ticket in tickets)

    def finish(self, ticket: Ticket, answer: Advice | None) -> None:
        """Enter an answer, or ``None`` for a question that none will come to."""
        if self._open.get(ticket.request.cache_key) is ticket:
            del self._open[ticket.request.cache_key]
        ticket.done, ticket.answer = True, answer
        # A picture may be large, and who looks here reads the text.
        ticket.request = replace(ticket.request, image=None)
        self._done[ticket.advice_id] = ticket
        if len(self._done) > _MAX_DONE:
            del self._done[next(iter(self._done))]

    def give_up(self) -> list[Ticket]:
        """Give up all questions in flight, and return them."""
        tickets = list(self._open.values())
        for ticket in tickets:
            self.finish(ticket, None)
        return tickets
