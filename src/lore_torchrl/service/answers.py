"""From what an advisor returned or raised to usable advice, or the kind of its failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lore_torchrl.advisors.base import Advice, AdviceRequest
from lore_torchrl.advisors.errors import AdviceError, FatalAdviceError, Sending, Usage, safe_kind


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
class Verdict:
    """What became of one batch of questions.

    Args:
        advices: One entry for each question, ``None`` where there is no usable answer.
        failures: One for each question without one, in their order.
        usage: What the batch has cost, its failures included.
        refunded: Calls of the batch that were given back to the budget.
        fatal: What is to be raised in the caller instead of being counted, if anything.
    """

    advices: list[Advice | None]
    failures: list[Failure] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    refunded: int = 0
    fatal: BaseException | None = None


def judge(requests: Sequence[AdviceRequest], outcome: Any) -> Verdict:
    """Sort what an advisor gave into advice and failures.

    Args:
        requests: The questions of one batch.
        outcome: What :meth:`~lore_torchrl.advisors.base.Advisor.advise` returned, or the
            exception that it raised, which is then the answer to every question.

    Examples:
        >>> request = AdviceRequest("a wall ahead", ("forward", "right"), "wall")
        >>> judge([request], [Advice(logits=(1.0,))]).failures[0][:2]
        ('wrong_logit_count', '1 logits for 2 actions')
        >>> [failure.kind for failure in judge([request] * 2, TimeoutError()).failures]
        ['timeout', 'timeout']
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
        verdict.failures = [Failure("wrong_answer_count", message)] * len(requests)
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
