"""Everything that can go wrong with an advisor, by kind.

::

    AdviceError                 kind = "advice"
    +-- MalformedError          "malformed"        an answer that cannot be read as advice
    |   +-- NotFiniteError      "not_finite"       NaN or infinity among its numbers
    |   +-- EmptyAnswerError    "empty"            no choices, no text
    |   +-- NotJSONError        "not_json"         HTML, truncated or wrong JSON
    |   +-- TooLargeError       "too_large"        more bytes or values than the cap
    +-- TransportError          "transport"        no answer came
    |   +-- DeadlineError       "timeout"          not within the total deadline
    |   |   +-- NotSentError    "not_sent"         its turn did not come within the deadline
    |   +-- ConnectionLostError "connection"       reset, cut off
    |       +-- UnreachableError "unreachable"     no connection came about
    +-- StatusError             "status_<code>"    the server refused, with this status
    |   +-- RateLimitedError    "rate_limited"     429 that may pass
    |   +-- QuotaError          "quota"            429 or 402 that will not pass
    |   +-- AuthenticationError "authentication"   401 or 403
    +-- NotRecordedError        "not_recorded"     a recording holds no answer to this
    +-- PromptTooLongError      "prompt_too_long"  the question is longer than the model reads
    +-- StoppedError            "stopped"          the run was stopped before the answer came

    FatalAdviceError                               not an AdviceError: it stops the run

Messages are one line, fit for a log (:func:`~lore_torchrl.advisors.redaction.shown`): short,
with every character visible, without keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Self

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


class Sending(Enum):
    """How far a failed question got, which decides whether its call is given back."""

    #: Nothing was sent: its turn did not come in time, or it cannot be asked at all.
    NEVER = "never"
    #: No connection came about, so that no server took a byte.
    TRIED = "tried"
    #: A server may have worked on it.
    DONE = "done"


class AdviceError(ValueError):
    """An answer that cannot be used, or none.

    Args:
        message: One line that says what happened, at most 500 characters.

    Keyword Args:
        usage: What the failed request cost all the same. Default: nothing.

    Attributes:
        lasting: Whether the next question would likely fail as well, whatever it asks;
            ``None`` where this failure says nothing of it.
        sending: How far the question got. Both belong to the class, so that a recording of
            the ``kind`` repeats them.
    """

    kind = "advice"
    lasting: bool | None = False
    sending = Sending.DONE

    def __init__(self, message: str = "", *, usage: Usage | None = None):
        super().__init__(shown(message, _LONGEST))
        self.usage = usage or Usage()

    def bare(self) -> Self:
        """Return this error without its frames and context, which hold bodies and pictures."""
        self.__context__ = None
        return self.with_traceback(None)


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
    """An answer with more bytes or values than the cap."""

    kind = "too_large"


class TransportError(AdviceError):
    """No answer came."""

    kind = "transport"
    lasting = True


class DeadlineError(TransportError):
    """No answer came within the total deadline."""

    kind = "timeout"


class NotSentError(DeadlineError):
    """The deadline passed while the request waited for its turn: no fault of the server."""

    kind = "not_sent"
    lasting = None
    sending = Sending.NEVER


class ConnectionLostError(TransportError):
    """The connection was reset or cut off."""

    kind = "connection"


class UnreachableError(ConnectionLostError):
    """No connection came about: refused, no such host, or none within the deadline."""

    kind = "unreachable"
    sending = Sending.TRIED


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
            # 501 is what llama.cpp says of an endpoint that its model cannot serve.
            self.lasting = status >= 500 and status != 501

    def __reduce__(self) -> tuple:
        # The default would take the message for the status.
        return type(self), (self.status, str(self)), self.__dict__


class RateLimitedError(StatusError):
    """Too many requests; waiting may help."""

    kind = "rate_limited"
    lasting = True


class QuotaError(StatusError):
    """The account's quota is used up; waiting does not help."""

    kind = "quota"
    lasting = True


class AuthenticationError(StatusError):
    """The key is missing, wrong or not allowed."""

    kind = "authentication"
    lasting = True


class NotRecordedError(AdviceError):
    """A recording holds no answer to this request."""

    kind = "not_recorded"
    lasting = None


class PromptTooLongError(AdviceError):
    """The question is longer than the model reads."""

    kind = "prompt_too_long"
    lasting = None
    sending = Sending.NEVER


class StoppedError(AdviceError):
    """The run was stopped before the answer came."""

    kind = "stopped"
    lasting = None


class FatalAdviceError(RuntimeError):
    """What no run should go on after: the advisor cannot do what the user asked of it.

    It is no :class:`AdviceError`, since it is not counted and masked: the service raises
    it in the caller. An advisor raises it where going on would give a result that is not
    what was asked for, such as a repeated run that leaves its recording.
    """


def safe_kind(kind: object) -> str:
    """Return ``kind`` if it can name a metric and a file, and ``"other"`` if not.

    It can with 1 to 64 ASCII letters, digits, underscores and hyphens.

    Examples:
        >>> safe_kind("rate_limited"), safe_kind("../../x"), safe_kind(None)
        ('rate_limited', 'other', 'other')
    """
    safe = isinstance(kind, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", kind)
    return kind if safe else "other"


def error_of_kind(
    kind: str, message: str, *, status: int | None = None, usage: Usage | None = None
) -> AdviceError:
    """Return an error of the class above with this ``kind``, or a plain one that bears it.

    A ``kind`` that cannot name a metric becomes ``"other"``.

    Args:
        kind: The kind, such as a recording holds.
        message: One line that says what happened.

    Keyword Args:
        status: HTTP status code, of a :class:`StatusError`. Default: none.
        usage: What the failed request cost all the same. Default: nothing.

    Examples:
        >>> error_of_kind("quota", "nothing left", status=429)
        QuotaError('nothing left')
        >>> error_of_kind("ConnectionError", "the server is down").kind
        'ConnectionError'
    """
    if kind == f"status_{status}":
        return StatusError(status, message, usage=usage)
    for cls in list(globals().values()):
        if isinstance(cls, type) and issubclass(cls, AdviceError) and cls.kind == kind:
            if issubclass(cls, StatusError):
                return cls(status or 0, message, usage=usage)
            return cls(message, usage=usage)
    error = AdviceError(message, usage=usage)
    error.kind = safe_kind(kind)
    return error
