"""From what an adviser returned or raised to usable advice, or the kind of its failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lore_torchrl.advisors.base import Advice, AdviceRequest
from lore_torchrl.advisors.errors import AdviceError, FatalAdviceError, Usage, safe_kind


@dataclass(slots=True)
class Verdict:
    """What became of one batch of questions.

    Args:
        advices: One entry for each question, ``None`` where there is no usable answer.
        failures: Kind and one line for each question without one, in their order.
        usage: What the batch has cost, its failures included.
        fatal: What is to be raised in the caller instead of being counted, if anything.
    """

    advices: list[Advice | None]
    failures: list[tuple[str, str]] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    fatal: BaseException | None = None


def judge(requests: Sequence[AdviceRequest], outcome: Any) -> Verdict:
    """Sort what an adviser gave into advice and failures.

    Args:
        requests: The questions of one batch.
        outcome: What :meth:`~lore_torchrl.advisors.base.Advisor.advise` returned, or the
            exception that it raised, which is then the answer to every question.

    Examples:
        >>> request = AdviceRequest("a wall ahead", ("forward", "right"), "wall")
        >>> judge([request], [Advice(logits=(1.0,))]).failures
        [('wrong_logit_count', '1 logits for 2 actions')]
        >>> judge([request, request], TimeoutError("no answer")).failures
        [('timeout', 'no answer'), ('timeout', 'no answer')]
    """
    verdict = Verdict([None] * len(requests))
    if isinstance(outcome, BaseException):
        verdict.usage = _usage(outcome)
        if isinstance(outcome, (FatalAdviceError, KeyboardInterrupt, SystemExit)):
            verdict.fatal = outcome
        else:
            verdict.failures = [_failure(outcome)] * len(requests)
        return verdict
    if not isinstance(outcome, (list, tuple)) or len(outcome) != len(requests):
        found = len(outcome) if isinstance(outcome, (list, tuple)) else type(outcome).__name__
        message = f"{found} for {len(requests)} questions"
        verdict.failures = [("wrong_answer_count", message)] * len(requests)
        return verdict
    for place, (request, answer) in enumerate(zip(requests, outcome, strict=True)):
        verdict.usage += _usage(answer)
        if isinstance(answer, FatalAdviceError):
            verdict.fatal = verdict.fatal or answer
        elif isinstance(answer, Advice) and len(answer.logits) == len(request.actions):
            # Without the raw text, which who records the answer has seen.
            verdict.advices[place] = Advice(answer.logits, answer.confidence)
        else:
            verdict.failures.append(_failure(answer, request))
    return verdict


def _usage(answer: Any) -> Usage:
    usage = getattr(answer, "usage", None)
    return usage if isinstance(usage, Usage) else Usage()


def _failure(answer: Any, request: AdviceRequest | None = None) -> tuple[str, str]:
    if isinstance(answer, Advice):
        found, asked = len(answer.logits), len(request.actions)
        return "wrong_logit_count", f"{found} logits for {asked} actions"
    if answer is None:
        return "unanswered", f"no answer to {request.cache_key!r}"
    if isinstance(answer, AdviceError):
        return safe_kind(answer.kind), str(answer)
    if isinstance(answer, TimeoutError):
        return "timeout", str(answer) or "no answer within the deadline"
    if isinstance(answer, BaseException):
        return safe_kind(type(answer).__name__), str(answer)
    return "wrong_type", f"{type(answer).__name__} where Advice was expected"
