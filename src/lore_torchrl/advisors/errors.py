"""Everything that can go wrong with an adviser, by kind.

::

    AdviceError                 kind = "advice"
    +-- MalformedError          "malformed"        an answer that cannot be read as advice
    |   +-- NotFiniteError      "not_finite"       NaN or infinity among its numbers
    |   +-- EmptyAnswerError    "empty"            no choices, no text
    |   +-- NotJSONError        "not_json"         HTML, truncated or wrong JSON
    |   +-- TooLargeError       "too_large"        more bytes than the cap
    +-- TransportError          "transport"        no answer came
    |   +-- DeadlineError       "timeout"          not within the total deadline
    |   +-- ConnectionLostError "connection"       refused, reset, cut off
    +-- StatusError             "status_<code>"    the server refused, with this status
    |   +-- RateLimitedError    "rate_limited"     429 that may pass
    |   +-- QuotaError          "quota"            429 or 402 that will not pass
    |   +-- AuthenticationError "authentication"   401 or 403
    +-- CircuitOpenError        "circuit_open"     not asked: the adviser failed too often
    +-- NotRecordedError        "not_recorded"     a recording holds no answer to this
    +-- PromptTooLongError      "prompt_too_long"  the question is longer than the model reads

    FatalAdviceError                               not an AdviceError: it stops the run

Messages are one line, fit for a log (:func:`~lore_torchrl.advisors.redaction.shown`): short,
with every character visible, without keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from lore_torchrl.advisors.redaction import shown

_LONGEST = 500


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request cost.

    Args:
        prompt_tokens: Tokens read. Default: ``0``.
        completion_tokens: Tokens written. Default: ``0``.
        cost: Price in the currency of the configured prices. Default: ``0.0``.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cost + other.cost,
        )


class AdviceError(ValueError):
    """An answer that cannot be used, or none.

    Args:
        message: One line that says what happened, at most 500 characters.

    Keyword Args:
        usage: What the failed request cost all the same. Default: nothing.
    """

    kind = "advice"

    def __init__(self, message: str = "", *, usage: Usage | None = None):
        super().__init__(shown(message, _LONGEST))
        self.usage = usage or Usage()


class MalformedError(AdviceError):
    """An answer that cannot be read as advice."""

    kind = "malformed"


class NotFiniteError(MalformedError):
    """An answer with NaN or infinity among its numbers."""

    kind = "not_finite"


class EmptyAnswerError(MalformedError):
    """An answer without choices or text."""

    kind = "empty"


class NotJSONError(MalformedError):
    """An answer that is not the JSON it should be."""

    kind = "not_json"


class TooLargeError(MalformedError):
    """An answer with more bytes than the cap."""

    kind = "too_large"


class TransportError(AdviceError):
    """No answer came."""

    kind = "transport"


class DeadlineError(TransportError):
    """No answer came within the total deadline."""

    kind = "timeout"


class ConnectionLostError(TransportError):
    """The connection was refused, reset or cut off."""

    kind = "connection"


class StatusError(AdviceError):
    """The server refused.

    Args:
        status: HTTP status code.
        message: One line that says what happened.
    """

    def __init__(self, status: int, message: str = "", *, usage: Usage | None = None):
        super().__init__(message, usage=usage)
        self.status = status
        # Seconds after which the server wants to be asked again, where it said so.
        self.retry_after_s: float | None = None
        if type(self) is StatusError:
            self.kind = f"status_{status}"

    def __reduce__(self) -> tuple:
        # The default would take the message for the status.
        return type(self), (self.status, str(self)), self.__dict__


class RateLimitedError(StatusError):
    """Too many requests; waiting may help."""

    kind = "rate_limited"


class QuotaError(StatusError):
    """The account's quota is used up; waiting does not help."""

    kind = "quota"


class AuthenticationError(StatusError):
    """The key is missing, wrong or not allowed."""

    kind = "authentication"


class CircuitOpenError(AdviceError):
    """Not asked: the adviser has failed too often of late."""

    kind = "circuit_open"


class NotRecordedError(AdviceError):
    """A recording holds no answer to this request."""

    kind = "not_recorded"


class PromptTooLongError(AdviceError):
    """The question is longer than the model reads."""

    kind = "prompt_too_long"


class FatalAdviceError(RuntimeError):
    """What no run should go on after: the adviser cannot do what the user asked of it.

    It is no :class:`AdviceError`, since it is not counted and masked: the service raises
    it in the caller. An adviser raises it where going on would give a result that is not
    what was asked for, such as a repeated run that leaves its recording.
    """
