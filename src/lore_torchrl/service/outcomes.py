"""What became of the calls: usable advice or a kind of failure, and the counters."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchrl import logger as torchrl_logger

from lore_torchrl.advisors.base import Advice, AdviceRequest
from lore_torchrl.advisors.errors import AdviceError, FatalAdviceError, Sending, Usage, safe_kind
from lore_torchrl.advisors.redaction import shown

# Latencies that the percentiles are taken over.
_LATENCIES = 1_000
# Distinct kinds of failures: each is a metric, in some loggers a file.
_MAX_KINDS = 64
_COUNTS = ("calls", "in_time", "late", "lost", "failed", "refunded")


class Failure(NamedTuple):
    """Why a question has no usable answer.

    Args:
        kind: Short name of what went wrong.
        message: One line about this case.
        lasting: As of :class:`~lore_torchrl.advisors.errors.AdviceError`.
        sending: As of :class:`~lore_torchrl.advisors.errors.AdviceError`.
    """

    kind: str
    message: str
    lasting: bool | None = False
    sending: Sending = Sending.DONE


@dataclass(slots=True)
class Outcome:
    """What became of one batch of questions.

    Args:
        answers: One entry per question, ``None`` where there is no usable answer.
        failures: One per question without an answer, in their order.
        usage: Cost of the batch, failures included.
        refunded: Calls of the batch that were given back to the budget.
        fatal: Exception to raise in the caller instead of counting it, if any.
    """

    answers: list[Advice | None]
    failures: list[Failure] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    refunded: int = 0
    fatal: BaseException | None = None


def judge(requests: Sequence[AdviceRequest], result: Any) -> Outcome:
    """Sort what an advisor returned or raised into answers and failures.

    Args:
        requests: The questions of one batch.
        result: What :meth:`~lore_torchrl.advisors.base.Advisor.advise` returned, or the
            exception it raised, which then holds for every question.

    Examples:
        >>> request = AdviceRequest("a wall ahead", ("forward", "right"), "wall")
        >>> judge([request], [Advice(logits=(1.0,))]).failures[0][:2]
        ('wrong_logit_count', '1 logits for 2 actions')
        >>> [failure.kind for failure in judge([request] * 2, TimeoutError()).failures]
        ['timeout', 'timeout']
    """
    outcome = Outcome([None] * len(requests))
    if isinstance(result, BaseException):
        outcome.usage = _usage(result)
        if isinstance(result, (FatalAdviceError, KeyboardInterrupt, SystemExit)):
            outcome.fatal = result
        else:
            outcome.failures = [_failure(result)] * len(requests)
        return outcome
    if not isinstance(result, (list, tuple)) or len(result) != len(requests):
        found = len(result) if isinstance(result, (list, tuple)) else type(result).__name__
        message = f"{found} for {len(requests)} questions"
        outcome.failures = [Failure("wrong_answer_count", message)] * len(requests)
        return outcome
    for place, (request, answer) in enumerate(zip(requests, result, strict=True)):
        outcome.usage += _usage(answer)
        if isinstance(answer, FatalAdviceError):
            outcome.fatal = outcome.fatal or answer
        elif isinstance(answer, Advice) and len(answer.logits) == len(request.actions):
            # Without the raw text, which may be megabytes; a recorder has seen it.
            outcome.answers[place] = Advice(answer.logits, answer.confidence)
        else:
            outcome.failures.append(_failure(answer, request))
    return outcome


def _usage(answer: Any) -> Usage:
    usage = getattr(answer, "usage", None)
    return usage if isinstance(usage, Usage) else Usage()


def _failure(answer: Any, request: AdviceRequest | None = None) -> Failure:
    if isinstance(answer, Advice):
        found, asked = len(answer.logits), len(request.actions)
        return Failure("wrong_logit_count", f"{found} logits for {asked} actions")
    if answer is None:
        return Failure("unanswered", f"no answer to {request.cache_key!r}", lasting=None)
    if isinstance(answer, AdviceError):
        return Failure(safe_kind(answer.kind), str(answer), answer.lasting, answer.sending)
    if isinstance(answer, TimeoutError):
        return Failure("timeout", str(answer) or "no answer within the deadline", lasting=True)
    if isinstance(answer, BaseException):
        return Failure(safe_kind(type(answer).__name__), str(answer))
    return Failure("wrong_type", f"{type(answer).__name__} where Advice was expected")


class CallCounters:
    """Counts calls; each ends as in time, late, lost or refunded.

    ``calls == in_time + late + lost`` whenever nothing is in flight: a refunded call is no
    call. Latency percentiles are over the last 1,000 answers.

    Examples:
        >>> counters = CallCounters()
        >>> counters.calls += 1
        >>> counters.add(Outcome([Advice(logits=(0.0, 3.0))]), latency_s=0.5, late=True)
        >>> counters.stats()["late"], counters.stats()["latency_p95_s"]
        (1.0, 0.5)
    """

    def __init__(self) -> None:
        self.errors: Counter[str] = Counter()
        self.calls = self.in_time = self.late = self.lost = self.failed = self.refunded = 0
        self.usage = Usage()
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)
        self.logged = {"stopped"}  # kinds of failures that the log has named

    def add(self, outcome: Outcome, *, latency_s: float, late: bool) -> None:
        """Count the outcome of one batch of calls.

        Args:
            outcome: Answers and failures.

        Keyword Args:
            latency_s: Seconds from the questions to their outcome.
            late: Whether the step that asked went on without it.
        """
        answered = sum(answer is not None for answer in outcome.answers)
        self._latencies.extend([latency_s] * answered)
        if late:
            self.late += answered
        else:
            self.in_time += answered
        self.failed += len(outcome.answers) - answered
        self.lost += len(outcome.answers) - answered
        self.refund(outcome.refunded)
        for failure in outcome.failures:
            self.record(failure.kind, failure.message)

    def refund(self, count: int) -> None:
        """Take lost calls that were refunded out of the count of calls."""
        self.calls -= count
        self.lost -= count
        self.refunded += count

    def record(self, kind: str, message: str, count: int = 1) -> None:
        """Count failures by kind, and log the first of each kind.

        Args:
            kind: Short name of what went wrong; beyond 64 kinds, "other".
            message: One line about this case.
            count: Questions that failed so. Default: ``1``.
        """
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
        ordered = sorted(self._latencies)
        return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]

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
            self.errors[safe_kind(kind)] += int(count)
        for name in _COUNTS:
            setattr(self, name, int(state[name]))
        prompt, completion, cost = state["usage"]
        self.usage = Usage(int(prompt), int(completion), float(cost))
