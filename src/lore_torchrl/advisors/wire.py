"""The shapes that chat servers answer in, and what they send an image as."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from lore_torchrl.advisors.errors import EmptyAnswerError, MalformedError, NotFiniteError


class Token(BaseModel):
    """One token and its probability, as logarithm or as it is."""

    token: str
    logprob: float | None = None
    prob: float | None = None

    @property
    def probability(self) -> float:
        """The probability, 0 or more."""
        value = self.prob
        if value is None:
            if self.logprob is None:
                raise MalformedError("A token came without its probability.")
            # Above 0 only by rounding; NaN and infinity fall to the check below.
            value = math.exp(min(self.logprob, 1.0))
        if not math.isfinite(value) or (self.logprob or 0.0) == math.inf:
            raise NotFiniteError("A token's probability is not a finite number.")
        return max(value, 0.0)


class Position(Token):
    """The token written and those that might have been."""

    top_logprobs: list[Token] | None = None
    top_probs: list[Token] | None = None


class Logprobs(BaseModel):
    """Probabilities of an answer, token by token."""

    content: list[Position] | None = None


class Message(BaseModel):
    """What the model wrote, or that it refused to."""

    content: str | None = None
    refusal: str | None = None


class Choice(BaseModel):
    """One of the answers to a question."""

    message: Message
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Completion(BaseModel):
    """All answers to a question."""

    choices: list[Choice]


_M = TypeVar("_M", bound=BaseModel)


def validated(kind: type[_M], data: Mapping[str, Any]) -> _M:
    """Return ``data`` as ``kind``, or raise a :class:`MalformedError` that names the place."""
    try:
        return kind.model_validate(data)
    except ValidationError as err:
        first = err.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise MalformedError(f"Unexpected shape at {place}: {first['msg']}.") from None


def read_choices(data: Mapping[str, Any]) -> list[Choice]:
    """Return the answers, of which there is at least one."""
    choices = validated(Completion, data).choices
    if not choices:
        raise EmptyAnswerError("The server sent no choices.")
    return choices


def read_text(choice: Choice) -> str:
    """Return what the model wrote, which is not nothing."""
    if choice.message.refusal:
        raise MalformedError("The model refused to answer.")
    if not choice.message.content:
        reason = f" (finish_reason {choice.finish_reason})" if choice.finish_reason else ""
        raise EmptyAnswerError(f"The answer has no text{reason}.")
    return choice.message.content


def data_url(image: bytes) -> str:
    """Return a PNG as the address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"
