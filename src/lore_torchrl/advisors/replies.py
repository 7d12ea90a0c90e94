"""What a server's bytes, status and headers mean: a bounded body, or an error of a kind."""

from __future__ import annotations

import email.utils
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

from lore_torchrl.advisors.errors import (
    AdviceError,
    AuthenticationError,
    MalformedError,
    NotJSONError,
    QuotaError,
    RateLimitedError,
    StatusError,
    TooLargeError,
)
from lore_torchrl.advisors.redaction import shown

# What OpenAI and servers like it call an account that has nothing left to spend.
_QUOTA_CODES = frozenset(
    (
        *("insufficient_quota", "quota_exceeded", "insufficient_credits", "insufficient_balance"),
        *("billing_hard_limit_reached", "billing_not_active", "access_terminated"),
    )
)
# Values that a body may hold, counted by its closing brackets and commas: far more than an
# answer has, and few enough that their objects take milliseconds and a few megabytes.
_MOST_VALUES = 1 << 15
_ENCODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 47}


class BoundedBody:
    """Collects a response's body, inflated piece by piece, and never more than a cap.

    Args:
        limit: Bytes that it takes, after decompression.

    Examples:
        >>> body = BoundedBody(4)
        >>> body.start("")
        >>> body.feed(b"1234"), body.feed(b"5"), body.error.kind
        (True, False, 'too_large')
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.error: AdviceError | None = None
        self._parts: list[bytes] = []
        self._size = self._taken = 0
        self._inflate: Any = None

    def start(self, encoding: str) -> None:
        """Take note of the ``Content-Encoding``."""
        encoding = encoding.strip().lower()
        if encoding in ("", "identity"):
            return
        if encoding not in _ENCODINGS:
            self.error = MalformedError(f"Cannot read the encoding '{shown(encoding, 40)}'.")
        else:
            self._inflate = zlib.decompressobj(_ENCODINGS[encoding])

    def feed(self, chunk: bytes) -> bool:
        """Take some bytes as they came; ``False`` says that no more are wanted."""
        if self.error is not None or (self._inflate is not None and self._inflate.eof):
            return False
        self._taken += len(chunk)
        room = self.limit - self._size + 1
        if self._inflate is not None:
            try:
                chunk = self._inflate.decompress(chunk, room)
            except zlib.error:
                self.error = MalformedError("The compressed body is damaged.")
                return False
        self._size += len(chunk)
        # Blocks that hold nothing may come without end.
        if max(self._size, self._taken) > self.limit:
            self._parts.clear()
            self.error = TooLargeError(f"The body has more than {self.limit} bytes.")
            return False
        self._parts.append(chunk)
        return True

    def text(self) -> str:
        """Return the body as text; bytes that are none become a replacement mark."""
        # Some servers begin with a byte order mark, which JSON does not allow.
        return b"".join(self._parts).decode("utf-8-sig", errors="replace")


def parse_object(text: str) -> dict[str, Any] | AdviceError:
    """Return the JSON object that a body with status 2xx holds, or what is wrong with it."""
    if _has_too_many_values(text):
        return TooLargeError(f"The body has more than {_MOST_VALUES} values.")
    try:
        data = json.loads(text)
    # RecursionError: brackets nested by the thousand. ValueError: also digits by the thousand.
    except (ValueError, RecursionError):
        return NotJSONError(f"The body is not JSON; it begins with '{shown(text, 60)}'.")
    if not isinstance(data, dict):
        return MalformedError(f"The body must be a JSON object, got {type(data).__name__}.")
    if data.get("error"):
        error = _status_error(200, data, None)
        if isinstance(error, (QuotaError, RateLimitedError)):
            return error
        return MalformedError(str(error))
    return data


def status_error(status: int, text: str, retry_after_s: float | None) -> StatusError:
    """Return the error that a refusal stands for.

    Args:
        status: HTTP status code.
        text: Body of the refusal.
        retry_after_s: Seconds after which the server wants to be asked again.
    """
    try:
        data = "" if _has_too_many_values(text) else json.loads(text)
    except (ValueError, RecursionError):
        # A proxy's page: its words say nothing to whoever reads the log.
        data = ""
    return _status_error(status, data, retry_after_s)


def _has_too_many_values(text: str) -> bool:
    return sum(map(text.count, "]},")) > _MOST_VALUES


def _status_error(status: int, data: Any, retry_after_s: float | None) -> StatusError:
    message, codes = _refusal(data)
    message = f"Status {status}: {message}" if message else f"Status {status}."
    if status == 402 or codes & _QUOTA_CODES:
        return QuotaError(status, message)
    if status == 429 or (status == 200 and "rate_limit_exceeded" in codes):
        error: StatusError = RateLimitedError(status, message)
    elif status in (401, 403):
        return AuthenticationError(status, message)
    else:
        error = StatusError(status, message)
    error.retry_after_s = retry_after_s
    return error


def _refusal(data: Any) -> tuple[str, set[str]]:
    """Return the message and the codes in a refusal's body, in the shapes that servers use."""
    error = data.get("error", data) if isinstance(data, dict) else data
    if not isinstance(error, dict):
        return shown(str(error)), set()
    codes = {str(error[name]) for name in ("code", "type") if isinstance(error.get(name), str)}
    return shown(str(error.get("message") or error.get("detail") or "")), codes


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds that a server asks to wait, ``None`` where it does not say.

    Args:
        headers: The response's, with lower-case look-up.
        now: Seconds since the epoch, for the form that names a date.

    Examples:
        >>> retry_after({"retry-after-ms": "250"}, 0.0), retry_after({"retry-after": "2"}, 0.0)
        (0.25, 2.0)
        >>> retry_after({"retry-after": "Thu, 01 Jan 1970 00:01:00 GMT"}, 50.0)
        10.0
    """
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        seconds = _number(value)
        if seconds is not None:
            return seconds * unit
        if name == "retry-after":
            try:
                date = email.utils.parsedate_to_datetime(value)
                return max(0.0, date.timestamp() - now)
            except (ValueError, OverflowError):
                return None
    return None


def _number(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
