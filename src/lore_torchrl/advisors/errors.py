"""Everything that can go wrong with an advisor, by kind.

Each class has a ``kind``, by which it is counted. Messages are one line, at most 500
characters, with every character visible and without keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any, Self

from lore_torchrl.advisors.redaction import shown

# Above any real count, and far from the end of SQLite's 64-bit integers.
_MOST_TOKENS = 2**53


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request cost: tokens read and written, and money in the currency of the prices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return self.prompt_tokens + self.completion_tokens

    def counted(self) -> Usage:
        """Return what counts of it: finite numbers of 0 or more, of tokens at most 2**53."""
        values = (self.prompt_tokens, self.completion_tokens, self.cost)
        read, written, cost = (
            min(value, _MOST_TOKENS) if isinstance(value, int | float) and 0 <= value < inf else 0
            for value in values
        )
        return Usage(int(read), int(written), float(cost))

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

    Attributes:
        usage: What the failed request cost all the same. Default: nothing.
        lasting: Whether the next question would likely fail as well; ``None`` where this
            failure says nothing of it.
        sending: How far the question got.
        final: Whether the same question can never be answered, so that it is not asked again.
    """

    kind = "advice"
    lasting: bool | None = False
    sending = Sending.DONE
    final = False

    def __init_subclass__(cls, **marks: Any) -> None:
        super().__init_subclass__()
        for name, value in marks.items():
            setattr(cls, name, value)

    def __init__(self, message: str = "", *, usage: Usage | None = None):
        super().__init__(shown(message, 500))
        self.usage = usage or Usage()

    def bare(self) -> Self:
        """Return this error without its frames and context, which hold bodies and pictures."""
        self.__context__ = None
        return self.with_traceback(None)


class MalformedError(AdviceError, kind="malformed"):
    """An answer that cannot be read as advice."""


class NotFiniteError(MalformedError, kind="not_finite"):
    """An answer with NaN or infinity among its numbers."""


class EmptyAnswerError(MalformedError, kind="empty"):
    """An answer without choices or text."""


class NotJSONError(MalformedError, kind="not_json"):
    """An answer that is not the JSON it should be."""


class TooLargeError(MalformedError, kind="too_large"):
    """An answer with more bytes or values than the cap."""


class TransportError(AdviceError, kind="transport", lasting=True):
    """No answer came."""


class DeadlineError(TransportError, kind="timeout"):
    """No answer came within the total deadline."""


class NotSentError(DeadlineError, kind="not_sent", lasting=None, sending=Sending.NEVER):
    """The deadline passed while the request waited for its turn: no fault of the server."""


class ConnectionLostError(TransportError, kind="connection"):
    """The connection was reset or cut off."""


class UnreachableError(ConnectionLostError, kind="unreachable", sending=Sending.TRIED):
    """No connection came about: refused, no such host, or none within the deadline."""


class StatusError(AdviceError):
    """The server refused with this HTTP status."""

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


class RateLimitedError(StatusError, kind="rate_limited", lasting=True):
    """Too many requests; waiting may help."""


class QuotaError(StatusError, kind="quota", lasting=True):
    """The account's quota is used up; waiting does not help."""


class AuthenticationError(StatusError, kind="authentication", lasting=True):
    """The key is missing, wrong or not allowed."""


class UnanswerableError(AdviceError, lasting=None, sending=Sending.NEVER, final=True):
    """The advisor cannot be asked this at all."""


class NotRecordedError(UnanswerableError, kind="not_recorded"):
    """A recording holds no answer to this request."""


class PromptTooLongError(UnanswerableError, kind="prompt_too_long"):
    """The question is longer than the model reads."""


class StoppedError(AdviceError, kind="stopped", lasting=None):
    """The run was stopped before the answer came."""


class FatalAdviceError(RuntimeError):
    """What no run should go on after: the advisor cannot do what the user asked of it.

    Not an :class:`AdviceError`: it is not counted and masked, the service raises it in the
    caller.
    """


def safe_kind(kind: object) -> str:
    """Return ``kind`` if it can name a metric and a file, and ``"other"`` if not.

    It can with 1 to 64 ASCII letters, digits, underscores and hyphens.
    """
    safe = isinstance(kind, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", kind)
    return kind if safe else "other"


def error_of_kind(
    kind: str, message: str, *, status: int | None = None, usage: Usage | None = None
) -> AdviceError:
    """Return an error of the class above with this ``kind``, or a plain one that bears it.

    A ``kind`` that cannot name a metric becomes ``"other"``.
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
