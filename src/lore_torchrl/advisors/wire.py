"""The shapes that chat servers answer in, and what they send an image as."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError

from lore_torchrl.advisors.errors import EmptyAnswerError, MalformedError, NotFiniteError
from lore_torchrl.advisors.redaction import shown

# Above 1 only by rounding, which in 16 bits is up to 0.4 %.
_LARGEST_PROBABILITY = 1.01
# Tokens read of one position: more than the 20 that are asked for, and the one written.
_MOST_TOKENS = 128


def _at_most(values: Any, info: ValidationInfo) -> Any:
    if isinstance(values, (list, dict)) and len(values) > info.context:
        sizes = {"count": len(values), "most": info.context}
        raise PydanticCustomError("too_long", "{count} values for {most} actions", sizes)
    return values


# Refuses a list or dict with more values than `validated` allows, before any is looked at:
# an error for each of a megabyte's values takes seconds and hundreds of megabytes.
Bounded = BeforeValidator(_at_most)


def first(count: int) -> BeforeValidator:
    """Return a validator that drops all of a list or dict but its first values, unseen."""

    def cut(values: Any) -> Any:
        if isinstance(values, dict):
            return dict(list(values.items())[:count])
        return values[:count] if isinstance(values, list) else values

    return BeforeValidator(cut)


class Token(BaseModel):
    """One token and its probability, as logarithm or as it is."""

    token: str
    logprob: float | None = None
    prob: float | None = None

    @property
    def probability(self) -> float:
        """The probability, from 0 to 1 but for rounding."""
        value = self.prob
        if value is None:
            if self.logprob is None:
                raise MalformedError("A token came without its probability.")
            # Impossible tokens come as minus infinity or -9999; large ones must not overflow.
            value = self.logprob if self.logprob == math.inf else math.exp(min(self.logprob, 700.0))
        if not math.isfinite(value):
            raise NotFiniteError("A token's probability is not a finite number.")
        if not 0.0 <= value <= _LARGEST_PROBABILITY:
            raise MalformedError(f"A token's probability must lie in [0, 1], got {value:g}.")
        return value


class Position(Token):
    """The token written and those that might have been."""

    top_logprobs: Annotated[list[Token] | None, first(_MOST_TOKENS)] = None
    top_probs: Annotated[list[Token] | None, first(_MOST_TOKENS)] = None

    @property
    def top(self) -> list[tuple[str, float]]:
        """The tokens that might have been, with their probabilities.

        Raises:
            MalformedError: If one has none, or together they are more than certain.
        """
        found = [
            (entry.token, entry.probability) for entry in self.top_logprobs or self.top_probs or []
        ]
        total = sum(probability for _, probability in found)
        if total > _LARGEST_PROBABILITY:
            raise MalformedError(f"The tokens' probabilities add up to {total:g}.")
        return found


class Logprobs(BaseModel):
    """Probabilities of an answer, token by token."""

    content: Annotated[list[Position] | None, first(1)] = None


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


def validated(kind: type[_M], data: Mapping[str, Any], most: int = 0) -> _M:
    """Return ``data`` as ``kind``, or raise a :class:`MalformedError` that names the place.

    Args:
        kind: The model.
        data: What a server or a language model sent.
        most: Values that a :data:`Bounded` field may hold.
    """
    try:
        return kind.model_validate(data, context=most)
    except ValidationError as err:
        found = err.errors(include_url=False, include_input=False)[0]
        place = shown(".".join(str(part) for part in found["loc"]), 60)
        raise MalformedError(f"Unexpected shape at '{place}': {found['msg']}.") from None


def read_choices(data: Mapping[str, Any], most: int = 1) -> list[Choice]:
    """Return the first answers, of which there is at least one and are at most ``most``."""
    choices = data.get("choices")
    if isinstance(choices, list):
        data = {"choices": choices[:most]}
    choices = validated(Completion, data).choices
    if not choices:
        raise EmptyAnswerError("The server sent no choices.")
    return choices


def read_text(choice: Choice) -> str:
    """Return what the model wrote, which is not nothing."""
    if choice.message.refusal:
        raise MalformedError("The model refused to answer.")
    if not choice.message.content:
        reason = shown(choice.finish_reason or "", 60)
        reason = f" (finish_reason {reason})" if reason else ""
        raise EmptyAnswerError(f"The answer has no text{reason}.")
    # JSON can escape halves of characters, which no file and no database takes.
    return choice.message.content.encode(errors="replace").decode()


def data_url(image: bytes) -> str:
    """Return a PNG as the address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"
