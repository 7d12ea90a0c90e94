"""What became of the calls: counters, failures by kind, latency, tokens and money."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Any

from torchrl import logger as torchrl_logger

from lore_torchrl.advisors.errors import Usage, safe_kind
from lore_torchrl.advisors.redaction import shown
from lore_torchrl.service.answers import Verdict

# Latencies that the percentiles are taken over.
_LATENCIES = 1_000
# Kinds of failures that are told apart: each is a metric, in some loggers a file.
_MOST_KINDS = 64


class CallCounters:
    """Counts calls; each ends as in time, late, lost or refunded.

    ``calls == in_time + late + lost`` holds whenever nothing is in flight: a call that was
    given back to the budget is none, and counts as ``refunded``. The latency
    percentiles are those of the last 1,000 answers.

    Examples:
        >>> from lore_torchrl.advisors.base import Advice
        >>> counters = CallCounters()
        >>> counters.calls += 1
        >>> counters.judged(Verdict([Advice(logits=(0.0, 3.0))]), latency_s=0.5, late=True)
        >>> counters.stats()["late"], counters.stats()["latency_p95_s"]
        (1.0, 0.5)
    """

    def __init__(self) -> None:
        self.errors: Counter[str] = Counter()
        self.calls = 0
        self.in_time = 0
        self.late = 0
        self.lost = 0
        self.failed = 0
        self.refunded = 0
        self.usage = Usage()
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)
        # Kinds of failures that the log has told of.
        self.logged = {"stopped"}

    def judged(self, verdict: Verdict, *, latency_s: float, late: bool) -> None:
        """Count the outcome of one batch of calls.

        Args:
            verdict: Answers and failures.

        Keyword Args:
            latency_s: Seconds from the questions to their outcome.
            late: Whether the step that asked went on without it.
        """
        answered = sum(advice is not None for advice in verdict.advices)
        self._latencies.extend([latency_s] * answered)
        if late:
            self.late += answered
        else:
            self.in_time += answered
        self.failed += len(verdict.advices) - answered
        self.lost += len(verdict.advices) - answered
        self.gave_back(verdict.refunded)
        for failure in verdict.failures:
            self.record(failure.kind, failure.message)

    def made_it(self) -> None:
        """Correct an answer counted as late to one that came in time after all."""
        self.late -= 1
        self.in_time += 1

    def gave_back(self, count: int) -> None:
        """Count lost calls that were given back to the budget."""
        self.calls -= count
        self.lost -= count
        self.refunded += count

    def dropped(self, count: int) -> None:
        """Count calls whose answers nobody waits for any more."""
        self.lost += count

    def record(self, kind: str, message: str, count: int = 1) -> None:
        """Count failures by kind and log the first of each.

        Args:
            kind: Short name of what went wrong; beyond 64 of them, all others are "other".
            message: One line about this case.
            count: Questions that it concerns. Default: ``1``.
        """
        if kind not in self.errors and len(self.errors) >= _MOST_KINDS:
            kind = "other"
        self.errors[kind] += count
        if kind not in self.logged:
            self.logged.add(kind)
            torchrl_logger.warning(
                f"LoRe goes on without some advice ({kind}): {shown(message, 500).rstrip('.')}. "
                "Further failures of this kind are counted, not logged."
            )

    def latency(self, quantile: float) -> float:
        """Return a percentile of the latest latencies in seconds, 0 before the first.

        Args:
            quantile: From 0 to 1; the nearest rank counts.
        """
        if not self._latencies:
            return 0.0
        ordered = sorted(self._latencies)
        return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]

    def stats(self) -> dict[str, float]:
        """Return all counters as ``float``."""
        return {
            "calls": float(self.calls),
            "answered": float(self.in_time + self.late),
            "failed": float(self.failed),
            "in_time": float(self.in_time),
            "late": float(self.late),
            "lost": float(self.lost),
            "refunded": float(self.refunded),
            "latency_p50_s": self.latency(0.50),
            "latency_p95_s": self.latency(0.95),
            "tokens": float(self.usage.tokens),
            "cost": float(self.usage.cost),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all counters as JSON-able types. Latencies are the clock's, and begin anew."""
        return {
            "errors": dict(self.errors),
            "calls": self.calls,
            "in_time": self.in_time,
            "late": self.late,
            "lost": self.lost,
            "failed": self.failed,
            "refunded": self.refunded,
            "usage": [self.usage.prompt_tokens, self.usage.completion_tokens, self.usage.cost],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all counters.

        Args:
            state: What :meth:`state_dict` returned.
        """
        self.errors = Counter()
        for kind, count in state["errors"].items():
            self.errors[safe_kind(kind)] += int(count)
        for name in ("calls", "in_time", "late", "lost", "failed", "refunded"):
            setattr(self, name, int(state[name]))
        prompt, completion, cost = state["usage"]
        self.usage = Usage(int(prompt), int(completion), float(cost))
