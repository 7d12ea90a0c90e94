"""POST JSON, get JSON, from a server that costs money and may fail in any way.

The only file that imports httpx.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any
from urllib.parse import urlsplit

try:
    import httpx
    from aiolimiter import AsyncLimiter
except ImportError as err:
    raise ImportError(
        "Advisors behind HTTP need httpx and aiolimiter: pip install 'lore-torchrl[http]'."
    ) from err

from lore_torchrl.advisors.base import check
from lore_torchrl.advisors.errors import (
    AdviceError,
    AuthenticationError,
    ConnectionLostError,
    DeadlineError,
    MalformedError,
    NotJSONError,
    NotSentError,
    QuotaError,
    RateLimitedError,
    Sending,
    StatusError,
    TooLargeError,
    UnreachableError,
)
from lore_torchrl.advisors.redaction import Secret, shown

_log = logging.getLogger(__name__)
# Statuses below 500 that may pass.
_RETRIED = (408, 409)
# What OpenAI and servers like it call an account that has nothing left to spend.
_QUOTA_CODES = {
    *("insufficient_quota", "quota_exceeded", "insufficient_credits", "insufficient_balance"),
    *("billing_hard_limit_reached", "billing_not_active", "access_terminated"),
}
# Values that a body may hold, counted by its closing brackets and commas: far more than an
# answer has, and few enough that their objects take milliseconds and a few megabytes.
_MOST_VALUES = 1 << 15


def _readable(record: logging.LogRecord) -> bool:
    # httpx logs the words that a server puts beside its status.
    record.msg, record.args = shown(record.getMessage(), 500), ()
    return True


logging.getLogger("httpx").addFilter(_readable)


@dataclass(eq=False)
class JSONClient:
    """An HTTP client that answers or fails within its deadline, whatever the server does.

    A request is retried on connection errors and on status 408, 409, 429 and from 500 up,
    after the seconds in ``retry-after-ms`` or ``Retry-After`` where sent, else after a back-off
    that doubles and is jittered; not on a used-up quota (402, or 429 with such a code), and not
    where the wait would end after the deadline. While a server cannot be reached, each
    request tries once. The deadline covers everything, waits included. The connection
    pool belongs to one event loop; another loop, a copy or a pickle starts a new one.

    Args:
        base_url: Scheme, host, port and path, such as ``http://127.0.0.1:8080/v1``.
        api_key: Sent as bearer token. Default: none.
        transport: What sends requests. Default: the network. The other settings are those
            of :class:`~lore_torchrl.advisors.chat.ChatAdvisor`.

    Raises:
        ValueError: If an argument is out of range, or ``base_url`` is no plain HTTP address.
    """

    base_url: str
    _: KW_ONLY
    api_key: Secret | None = None
    deadline_s: float = 20.0
    retries: int = 2
    backoff_s: tuple[float, float] = (0.5, 8.0)
    max_response_bytes: int = 1 << 20
    max_concurrency: int = 8
    requests_per_minute: float | None = None
    transport: httpx.AsyncBaseTransport | None = None

    def __post_init__(self) -> None:
        rate, deadline_s = self.requests_per_minute, self.deadline_s
        if rate is not None:
            check(0 < rate < math.inf, "requests_per_minute", rate, "a positive number, or None")
        self.base_url = _checked_url(self.base_url)
        check(0 < deadline_s < math.inf, "deadline_s", deadline_s, "a positive number of seconds")
        first, longest = self.backoff_s
        valid = 0 <= first <= longest < math.inf
        check(valid, "backoff_s", self.backoff_s, "(first, longest) in seconds")
        for name, least in (("retries", 0), ("max_response_bytes", 1), ("max_concurrency", 1)):
            check(getattr(self, name) >= least, name, getattr(self, name), f"{least} or more")
        #: Attempts so far.
        self.sent = 0
        self._away = False
        self._random = random.Random()
        self._pool: _Pool | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    async def post(
        self, path: str, body: Mapping[str, Any], *, until: float | None = None
    ) -> dict[str, Any]:
        """Send ``body`` to ``path`` below the base URL, and return the JSON object that came.

        Args:
            path: Such as ``/chat/completions``.
            body: What is sent.
            until: Deadline on the running loop's clock. Default: ``deadline_s`` from now.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self.deadline_s if until is None else until
        content = json.dumps(body, allow_nan=False).encode()
        if self._pool is None or self._pool.loop is not loop:
            self._pool = _Pool(self, loop)
        outcome = await self._insist(self._pool, path, content, until)
        if not isinstance(outcome, AdviceError):
            self._away = False
            return outcome
        if outcome.sending is not Sending.NEVER:
            self._away = isinstance(outcome, UnreachableError)
        raise outcome

    async def aclose(self) -> None:
        """Close the connections. A later request opens new ones."""
        pool, self._pool = self._pool, None
        if pool is not None and pool.loop is asyncio.get_running_loop():
            await pool.client.aclose()

    async def _insist(
        self, pool: _Pool, path: str, content: bytes, until: float
    ) -> dict[str, Any] | AdviceError:
        """Send until it is answered or no further attempt is due; return how it ended."""
        reached = False
        for attempt in range(1, self.retries + 2):
            outcome = await self._attempt(pool, path, content, until)
            if not isinstance(outcome, AdviceError):
                return outcome
            reached = reached or outcome.sending is Sending.DONE
            wait = self._wait(outcome, attempt)
            if wait is None or pool.loop.time() + wait >= until:
                break
            _log.debug("Attempt %d failed (%s), next in %.2f s", attempt, outcome, wait)
            await asyncio.sleep(wait)
        return after_reaching(outcome) if reached else outcome

    async def _attempt(
        self, pool: _Pool, path: str, content: bytes, until: float
    ) -> dict[str, Any] | AdviceError:
        """Send once; return what came or what went wrong."""
        # Errors are returned: one raised inside an `except` has httpx's own, with the key, as
        # its context.
        progress = _Progress()
        try:
            async with asyncio.timeout_at(until):
                async with pool.places:
                    if pool.limiter is not None:
                        await pool.limiter.acquire()
                    self.sent += 1
                    progress.started = True
                    return await self._exchange(pool.client, path, content, progress)
        except AdviceError as error:
            return error.bare()
        except TimeoutError:
            if not progress.started:
                return NotSentError("Rate limit or max_concurrency kept it past the deadline.")
            if progress.connecting:
                return UnreachableError("No connection within the deadline.")
            return DeadlineError("No answer within the deadline.")
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as err:
            unreachable = isinstance(err, httpx.ConnectError)
            kind = UnreachableError if unreachable else ConnectionLostError
            return kind(f"{type(err).__name__} at {self.base_url}: {err}")

    async def _exchange(
        self, client: httpx.AsyncClient, path: str, content: bytes, progress: _Progress
    ) -> dict[str, Any]:
        async with client.stream(
            "POST", self.base_url + path, content=content, extensions={"trace": progress}
        ) as response:
            status = response.status_code
            try:
                text = await _read_body(response, self.max_response_bytes)
            except MalformedError as error:
                # The status of a refusal tells more than that its page was long.
                if 200 <= status < 300:
                    raise
                raise StatusError(status, f"Status {status}: {error}") from None
        if not 200 <= status < 300:
            error = status_error(status, text, retry_after(response.headers))
            if status == 404 and type(error) is StatusError:
                where = f"POST {self.base_url}{path}; most servers want a base_url that ends in /v1"
                raise StatusError(status, f"{error} ({where})")
            raise error
        return parse_object(text)

    def _wait(self, error: AdviceError, attempt: int) -> float | None:
        """Return the seconds before the next attempt, ``None`` for no such."""
        if attempt > self.retries or self._away:
            return None
        if isinstance(error, (DeadlineError, QuotaError, AuthenticationError)):
            return None
        status = getattr(error, "status", None)
        if not (error.lasting or status in _RETRIED):
            return None
        if status is not None and error.retry_after_s is not None:
            return error.retry_after_s
        first, longest = self.backoff_s
        return min(longest, first * 2 ** (attempt - 1)) * (0.5 + 0.5 * self._random.random())


def after_reaching(error: AdviceError) -> AdviceError:
    """Return the error of a question of which an earlier request had reached the server."""
    if error.sending is Sending.DONE:
        return error
    kind = ConnectionLostError if isinstance(error, UnreachableError) else DeadlineError
    return kind(str(error), usage=error.usage)


class _Progress:
    """How far one attempt got, as httpx's ``trace`` extension reports it."""

    def __init__(self) -> None:
        self.started = False
        self.connecting = False

    async def __call__(self, event: str, info: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.started":
            self.connecting = True
        elif event.endswith("send_request_headers.started"):
            self.connecting = False


class _Pool:
    """What belongs to one event loop: connections, places and the rate limit."""

    def __init__(self, owner: JSONClient, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if owner.api_key:
            headers["authorization"] = f"Bearer {owner.api_key.get_secret_value()}"
        self.client = httpx.AsyncClient(
            headers=headers,
            timeout=None,
            limits=httpx.Limits(max_connections=owner.max_concurrency),
            transport=owner.transport,
            # A server's cookies would pile up, and go back to it with every request.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        )
        self.places = asyncio.Semaphore(owner.max_concurrency)
        self.limiter = None
        if (rate := owner.requests_per_minute) is not None:
            bucket = (rate, 60.0) if rate >= 1 else (1, 60.0 / rate)
            self.limiter = AsyncLimiter(*bucket)


def _checked_url(base_url: str) -> str:
    parts = urlsplit(base_url)
    # The value stays out of these two messages: it may hold a password or a key. Without a
    # scheme that is no netloc.
    if "@" in (parts.netloc or base_url):
        raise ValueError(
            "base_url, or OPENAI_BASE_URL, must not hold credentials: put the key into the "
            "variable OPENAI_API_KEY."
        )
    if parts.query or parts.fragment:
        raise ValueError("base_url must end with its path, without '?' and '#'.")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"base_url must be http(s)://host[:port][/path], got {base_url!r}.")
    return base_url.rstrip("/")


async def _read_body(response: httpx.Response, limit: int) -> str:
    """Return a body as text, and never read more than ``limit`` bytes."""
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        # It may unfold a thousandfold, and none was accepted.
        raise MalformedError(
            f"The body is encoded as '{shown(encoding, 40)}', against the request."
        )
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > limit:
            raise TooLargeError(f"The body has more than {limit} bytes.")
    return body.decode("utf-8-sig", errors="replace")


def parse_object(text: str) -> dict[str, Any]:
    """Return the JSON object that a body with status 2xx holds, or raise an ``AdviceError``."""
    data = _read_json(text)
    if not isinstance(data, dict):
        raise MalformedError(f"The body must be a JSON object, got {type(data).__name__}.")
    if data.get("error"):
        error = _status_error(200, data, None)
        if isinstance(error, (QuotaError, RateLimitedError)):
            raise error
        raise MalformedError(str(error))
    return data


def _read_json(text: str) -> Any:
    if sum(map(text.count, "]},")) > _MOST_VALUES:
        raise TooLargeError(f"The body has more than {_MOST_VALUES} values.")
    try:
        return json.loads(text)
    # RecursionError: brackets nested by the thousand. ValueError: also digits by the thousand.
    except (ValueError, RecursionError):
        begins = shown(text, 60)
        raise NotJSONError(f"The body is not JSON; it begins with '{begins}'.") from None


def status_error(status: int, text: str, retry_after_s: float | None) -> StatusError:
    """Return the error for a status beyond 2xx, of which ``text`` is the body."""
    try:
        data = _read_json(text)
    except MalformedError:
        # A proxy's page: its words say nothing to whoever reads the log.
        data = ""
    return _status_error(status, data, retry_after_s)


def _status_error(status: int, data: Any, retry_after_s: float | None) -> StatusError:
    refusal = data.get("error", data) if isinstance(data, dict) else data
    codes: set[str] = set()
    if isinstance(refusal, dict):
        codes = {str(refusal.get(name)) for name in ("code", "type")}
        refusal = refusal.get("message") or refusal.get("detail") or ""
    message = shown(str(refusal))
    message = f"Status {status}: {message}" if message else f"Status {status}."
    if status == 402 or codes & _QUOTA_CODES:
        return QuotaError(status, message)
    if status in (401, 403):
        return AuthenticationError(status, message)
    limited = status == 429 or (status == 200 and "rate_limit_exceeded" in codes)
    error = (RateLimitedError if limited else StatusError)(status, message)
    error.retry_after_s = retry_after_s
    return error


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks to wait, ``None`` where it does not say.

    A date in ``Retry-After`` is not read.
    """
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, ""))
        except ValueError:
            continue
        if 0 <= seconds < math.inf:
            return seconds * unit
    return None
