"""The calls: questions in flight, what became of each, and the counters."""

from __future__ import annotations

import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torchrl import logger as torchrl_logger

from lore_torchrl.advisors.base import Advice, AdviceRequest
from lore_torchrl.advisors.errors import (
    AdviceError,
    FatalAdviceError,
    Usage,
    error_of_kind,
    safe_kind,
)
from lore_torchrl.advisors.redaction import shown

# Latencies that the percentiles are taken over.
_LATENCIES = 1_000
# Distinct kinds of failures: each is a metric, in some loggers a file.
_MAX_KINDS = 64
# Answered questions that are remembered; the cache keeps the answers in any case.
_MAX_DONE = 1_024
_COUNTS = ("calls", "in_time", "late", "lost", "failed", "refunded", "plan_steps", "plan_saved")


@dataclass(slots=True)
class Outcome:
    """What became of one batch of questions.

    ``results`` has a usable answer, or why there is none, for each question; ``None`` where
    ``fatal``, which the caller raises, is to be raised. ``usage`` is the cost of the batch,
    ``refunded`` counts the calls that were given back.
    """

    results: list[Advice | AdviceError | None]
    usage: Usage = field(default_factory=Usage)
    refunded: int = 0
    fatal: BaseException | None = None


def judge(requests: Sequence[AdviceRequest], result: Any) -> Outcome:
    """Sort what an advisor returned, or the exception that it raised, into answers and errors."""
    if isinstance(result, (FatalAdviceError, KeyboardInterrupt, SystemExit)):
        return Outcome([None] * len(requests), _usage(result), fatal=result)
    if isinstance(result, BaseException):
        return Outcome([_error(result)] * len(requests), _usage(result))
    if not isinstance(result, (list, tuple)) or len(result) != len(requests):
        found = len(result) if isinstance(result, (list, tuple)) else type(result).__name__
        error = error_of_kind("wrong_answer_count", f"{found} for {len(requests)} questions")
        return Outcome([error] * len(requests))
    outcome = Outcome([])
    for request, answer in zip(requests, result, strict=True):
        outcome.usage += _usage(answer)
        if isinstance(answer, FatalAdviceError):
            outcome.fatal = outcome.fatal or answer
            outcome.results.append(None)
        else:
            outcome.results.append(_result(request, answer))
    return outcome


def _usage(answer: Any) -> Usage:
    usage = getattr(answer, "usage", None)
    return usage.counted() if isinstance(usage, Usage) else Usage()


def _result(request: AdviceRequest, answer: Any) -> Advice | AdviceError:
    if isinstance(answer, Advice):
        found, asked = len(answer.logits), len(request.actions)
        if found != asked:
            return error_of_kind("wrong_logit_count", f"{found} logits for {asked} actions")
        return answer.slim()  # a recorder has seen the text
    if answer is None:
        error = error_of_kind("unanswered", f"no answer to {request.cache_key!r}")
        error.lasting, error.final = None, True
        return error
    if isinstance(answer, BaseException):
        return _error(answer)
    return error_of_kind("wrong_type", f"{type(answer).__name__} where Advice was expected")


def _error(error: BaseException) -> AdviceError:
    if isinstance(error, AdviceError):
        str(error)  # judge() guards against one that cannot be shown
        error.kind = safe_kind(error.kind)
        return error
    if isinstance(error, TimeoutError):
        return error_of_kind("timeout", str(error) or "no answer within lore.calls.timeout_s")
    # An advisor's own mistake: where it is helps more than what it says.
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return error_of_kind(type(error).__name__, f"{error}{where}")


class CallCounters:
    """Counts calls; each ends as in time, late, lost or refunded.

    ``calls == in_time + late + lost`` whenever nothing is in flight: a refunded call is no
    call. Latency percentiles are over the last 1,000 answers.
    """

    def __init__(self) -> None:
        self.errors: Counter[str] = Counter()
        self.calls = self.in_time = self.late = self.lost = self.failed = self.refunded = 0
        self.plan_steps = 0  # situations that a plan advised
        self.plan_saved = 0  # those of them that had no answer and deserved a call
        self.usage = Usage()
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)
        self.logged = {"stopped"}  # kinds of failures that the log has named

    def add(self, outcome: Outcome, *, latency_s: float, late: bool) -> None:
        """Count the outcome of one batch; ``late`` if the step that asked went on without it."""
        answered = sum(isinstance(result, Advice) for result in outcome.results)
        self._latencies.extend([latency_s] * answered)
        if late:
            self.late += answered
        else:
            self.in_time += answered
        self.failed += len(outcome.results) - answered
        self.lost += len(outcome.results) - answered
        self.refund(outcome.refunded)
        for result in outcome.results:
            if isinstance(result, AdviceError):
                self.record(result.kind, str(result))

    def refund(self, count: int) -> None:
        """Take lost calls that were refunded out of the count of calls."""
        self.calls -= count
        self.lost -= count
        self.refunded += count

    def record(self, kind: str, message: str, count: int = 1) -> None:
        """Count failures by kind, beyond 64 kinds as "other", and log the first of each kind."""
        if kind not in self.errors and len(self.errors) >= _MAX_KINDS:
            kind = "other"
        self.errors[kind] += count
        if kind not in self.logged:
            self.logged.add(kind)
            torchrl_logger.warning(
                f"LoRe goes on without some advice ({kind}): {shown(message, 500).rstrip('.')}. "
                "Further failures of this kind are counted, not logged."
            )

    def latency(self, quantile: float) -> float:
        """Return a percentile of the latencies in seconds, by nearest rank; 0 without any."""
        if not self._latencies:
            return 0.0
        return float(np.quantile(self._latencies, quantile, method="inverted_cdf"))

    def stats(self) -> dict[str, float]:
        """Return all counters as ``float``."""
        return {
            **{name: float(getattr(self, name)) for name in _COUNTS},
            "answered": float(self.in_time + self.late),
            "latency_p50_s": self.latency(0.50),
            "latency_p95_s": self.latency(0.95),
            "tokens": float(self.usage.tokens),
            "cost": float(self.usage.cost),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all counters as JSON-able types, without the latencies."""
        usage = self.usage
        return {
            "errors": dict(self.errors),
            **{name: getattr(self, name) for name in _COUNTS},
            "usage": [usage.prompt_tokens, usage.completion_tokens, usage.cost],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all counters."""
        self.errors = Counter()
        for kind, count in state["errors"].items():
            self.errors[safe_kind(kind)] += count
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.usage = Usage(*state["usage"])


@dataclass(slots=True, eq=False)
class Ticket:
    """One question that was paid for; its keys have the prefix of who was asked."""

    advice_id: int
    request: AdviceRequest
    cache_key: str
    abstract_state: str | None
    started: float = field(default_factory=time.monotonic)
    done: bool = False  # answered or given up
    answer: Advice | None = None

    @property
    def age_s(self) -> float:
        """Seconds since it was asked."""
        return time.monotonic() - self.started


class TicketTable:
    """All questions in flight, and the last 1,024 that are done; its owner holds a lock."""

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

    def in_flight(self) -> list[Ticket]:
        """Return all questions in flight."""
        return list(self._open.values())

    def states(self) -> set[str]:
        """Return the abstract states that questions in flight are about."""
        return {t.abstract_state for t in self._open.values() if t.abstract_state is not None}

    def number(self, key: str) -> int:
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
        tickets = self.in_flight()
        for ticket in tickets:
            self.finish(ticket, None)
        return tickets
