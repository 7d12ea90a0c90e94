"""POST JSON, get JSON, with the manners that a paid and unreliable server asks for.

The only file that imports httpx, so that a move to its successor stays one line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any
from urllib.parse import urlsplit

from lore_torchrl.advisors.errors import (
    AdviceError,
    ConnectionLostError,
    DeadlineError,
    MalformedError,
    NotSentError,
    RateLimitedError,
    Sending,
    StatusError,
    TransportError,
    UnreachableError,
)
from lore_torchrl.advisors.redaction import shown
from lore_torchrl.advisors.replies import BoundedBody, parse_object, retry_after, status_error
from lore_torchrl.advisors.secret import Secret

_log = logging.getLogger(__name__)
_RETRIED = frozenset((408, 409))


def _import_httpx() -> Any:
    try:
        import httpx
    except ImportError as err:
        raise ImportError(
            "Advisors behind HTTP need httpx: pip install 'lore-torchrl[http]'."
        ) from err
    # It logs the words that a server puts beside its status.
    logging.getLogger("httpx").addFilter(_readable)
    return httpx


def _readable(record: logging.LogRecord) -> bool:
    record.msg, record.args = shown(record.getMessage(), 500), ()
    return True


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's answer.

    Args:
        data: The JSON object.
        latency_s: Seconds from the first attempt's start to the body's end, waiting included.
        attempts: Times that the request was sent.
    """

    data: dict[str, Any]
    latency_s: float
    attempts: int


class JSONClient:
    """An HTTP client that answers or fails within its deadline, whatever the server does.

    A request is retried on connection errors and on status 408, 409, 429 and from 500 up,
    after ``retry-after-ms`` or ``Retry-After`` where sent, else after a back-off that
    doubles and is jittered. It is not retried where waiting cannot help: on a used-up
    quota (402, or 429 with such a code), and where the wait would end after the deadline.
    While a server cannot be reached, each request tries once. While one request is tried
    again, others wait for its outcome, and are not sent if it fails. The deadline covers
    everything: waiting for a free place, for the rate limit and between attempts,
    connecting, and reading the body to its end.

    The connection pool is made at the first request and belongs to that event loop. In
    another loop, as when :class:`~lore_torchrl.service.AdviceService` abandons a stuck one,
    a new pool is made. Copies and pickles start without one.

    Args:
        base_url: Scheme, host, port and path, such as ``http://127.0.0.1:8080/v1``.
        api_key: Sent as bearer token. Default: none.
        deadline_s: Total time of one request in seconds. Default: ``20.0``.
        retries: Attempts after the first. Default: ``2``.
        backoff_s: First and longest wait between attempts in seconds.
            Default: ``(0.5, 8.0)``.
        max_response_bytes: Largest body, after decompression. Default: 1 MiB.
        max_concurrency: Requests on the wire at once. Default: ``8``.
        requests_per_minute: Limit on attempts, as a bucket that holds a minute's worth;
            ``None`` for none. Default: ``None``.
        trust_env: Whether ``HTTP_PROXY`` and its like count. Default: ``True``.
        transport: An ``httpx.AsyncBaseTransport`` to use instead of the network.
        rng: Source of the jitter. Default: one of its own, since clients that share a seed
            would come back together, and a shared stream would change the run's.

    Raises:
        ImportError: If httpx, or aiolimiter where a rate is set, is not installed.
        ValueError: If an argument is out of range, or ``base_url`` is no HTTP address or
            holds credentials or a query.

    Examples:
        >>> JSONClient("http://127.0.0.1:8080/v1", api_key=Secret("sk-1"))
        JSONClient('http://127.0.0.1:8080/v1', api_key=Secret('***'))
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: Secret | None = None,
        deadline_s: float = 20.0,
        retries: int = 2,
        backoff_s: tuple[float, float] = (0.5, 8.0),
        max_response_bytes: int = 1 << 20,
        max_concurrency: int = 8,
        requests_per_minute: float | None = None,
        trust_env: bool = True,
        transport: Any = None,
        rng: random.Random | None = None,
    ) -> None:
        _import_httpx()
        if requests_per_minute is not None:
            _import_limiter()
        self.base_url = _checked_url(base_url)
        if not (math.isfinite(deadline_s) and deadline_s > 0):
            raise ValueError(f"deadline_s must be a positive number of seconds, got {deadline_s}.")
        if retries < 0:
            raise ValueError(f"retries must not be negative, got {retries}.")
        low, high = backoff_s
        if not 0 <= low <= high < math.inf:
            raise ValueError(f"backoff_s must be (first, longest), not negative, got {backoff_s}.")
        if max_response_bytes < 1:
            raise ValueError(f"max_response_bytes must be positive, got {max_response_bytes}.")
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {max_concurrency}.")
        if requests_per_minute is not None and not 0 < requests_per_minute < math.inf:
            raise ValueError(f"requests_per_minute must be positive, got {requests_per_minute}.")
        self.api_key = api_key
        self.deadline_s = deadline_s
        self.retries = retries
        self.backoff_s = (float(low), float(high))
        self.max_response_bytes = max_response_bytes
        self.max_concurrency = max_concurrency
        self.requests_per_minute = requests_per_minute
        self.trust_env = trust_env
        self.sent = 0
        self._away = False
        self._transport = transport
        self._random = rng or random.Random()
        self._pool: _Pool | None = None

    def __repr__(self) -> str:
        return f"JSONClient({self.base_url!r}, api_key={self.api_key!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        until: float | None = None,
        asked: float = math.inf,
    ) -> Reply:
        """Send ``body`` to ``path`` below the base URL.

        Args:
            path: Such as ``/chat/completions``.
            body: What is sent, as JSON.

        Keyword Args:
            until: Deadline on the running loop's clock, for several requests that share
                one. Default: ``deadline_s`` from now.
            asked: When the question was asked, on that clock. If a request has failed for good
                since, this one is not sent. Default: infinity, it is sent in any case.

        Raises:
            AdviceError: Of the kind that says why there is no answer.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        until = started + self.deadline_s if until is None else until
        content = json.dumps(body, allow_nan=False).encode()
        pool = self._current_pool(loop)
        outcome, attempts = await self._insist(pool, path, content, until, asked)
        failed = isinstance(outcome, AdviceError)
        if not (failed and outcome.sending is Sending.NEVER):
            self._away = isinstance(outcome, UnreachableError)
            pool.failed_at = loop.time() if failed and outcome.lasting else -math.inf
        if failed:
            raise outcome
        return Reply(outcome, loop.time() - started, attempts)

    async def _insist(
        self, pool: _Pool, path: str, content: bytes, until: float, asked: float
    ) -> tuple[dict[str, Any] | AdviceError, int]:
        """Send until it is answered or no further attempt is due; return how it ended."""
        if not await pool.retry_succeeds(until):
            return NotSentError("Not sent: the server failed the request before it."), 0
        reached, retry, served = False, None, True
        try:
            for attempt in range(1, self.retries + 2):
                outcome = await self._attempt(pool, path, content, until, asked)
                asked = math.inf
                served = not isinstance(outcome, AdviceError) or not outcome.lasting
                if not isinstance(outcome, AdviceError):
                    break
                reached = reached or outcome.sending is Sending.DONE
                wait = self._wait(outcome, attempt)
                if wait is None or pool.loop.time() + wait >= until:
                    break
                _log.debug("Attempt %d failed (%s), next in %.2f s", attempt, outcome, wait)
                if pool.retry is None:
                    pool.retry = retry = pool.loop.create_future()
                await asyncio.sleep(wait)
        except BaseException:
            # It was cancelled: that says nothing of the server.
            served = True
            raise
        finally:
            if retry is not None:
                pool.retry = None
                retry.set_result(served)
        if reached and isinstance(outcome, AdviceError):
            outcome = after_reaching(outcome)
        return outcome, attempt

    async def _attempt(
        self, pool: _Pool, path: str, content: bytes, until: float, asked: float
    ) -> dict[str, Any] | AdviceError:
        """Send once; return what came or what went wrong.

        Errors are returned so that none is raised inside an ``except``: httpx's own hold
        the request, and with it the key, and would hang on as context.
        """
        httpx = _import_httpx()
        progress = _Progress()
        try:
            async with asyncio.timeout_at(until):
                async with pool.places:
                    if pool.limiter is not None:
                        await pool.limiter.acquire()
                    if asked < pool.failed_at:
                        return NotSentError("Not sent: the server has failed since it was asked.")
                    self.sent += 1
                    progress.started = True
                    outcome = await self._exchange(pool.client, path, content, progress)
        except TimeoutError:
            if not progress.started:
                outcome = NotSentError("Rate limit or max_concurrency kept it past the deadline.")
            elif progress.connecting:
                outcome = UnreachableError("No connection within the deadline.")
            else:
                outcome = DeadlineError("No answer within the deadline.")
        except httpx.DecodingError as err:
            outcome = MalformedError(f"The body cannot be decoded: {err}")
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as err:
            unreachable = isinstance(err, httpx.ConnectError)
            kind = UnreachableError if unreachable else ConnectionLostError
            outcome = kind(f"{type(err).__name__}: {err}")
        return outcome

    async def _exchange(
        self, client: Any, path: str, content: bytes, progress: _Progress
    ) -> dict[str, Any] | AdviceError:
        body = BoundedBody(self.max_response_bytes)
        async with client.stream(
            "POST", self.base_url + path, content=content, extensions={"trace": progress}
        ) as response:
            status, headers = response.status_code, response.headers
            succeeded = 200 <= status < 300
            body.start(headers.get("content-encoding", ""))
            # Raw, since httpx would inflate a whole chunk, a thousandfold, before we see it.
            async for chunk in response.aiter_raw():
                if not body.feed(chunk):
                    break
        if body.error is not None:
            # The status of a refusal tells more than that its page was long.
            return body.error if succeeded else StatusError(status, f"Status {status}.")
        text = body.text()
        if not succeeded:
            return status_error(status, text, retry_after(headers, time.time()))
        return parse_object(text)

    def _wait(self, error: AdviceError, attempt: int) -> float | None:
        """Return the seconds before the next attempt, ``None`` for no such."""
        if attempt > self.retries or self._away or isinstance(error, DeadlineError):
            return None
        if isinstance(error, StatusError):
            transient = isinstance(error, RateLimitedError) or (
                type(error) is StatusError and (error.status in _RETRIED or error.status >= 500)
            )
            # 501 is what llama.cpp says of an endpoint that its model cannot serve.
            if not transient or error.status == 501:
                return None
            if error.retry_after_s is not None:
                return error.retry_after_s
        elif not isinstance(error, TransportError):
            return None
        first, longest = self.backoff_s
        # Down to half: clients that failed together should not come back together.
        return min(longest, first * 2 ** (attempt - 1)) * (0.5 + 0.5 * self._random.random())

    def _current_pool(self, loop: asyncio.AbstractEventLoop) -> _Pool:
        if self._pool is None or self._pool.loop is not loop:
            self._pool = _Pool(self, loop)
        return self._pool

    async def aclose(self) -> None:
        """Close the connections. A later request opens new ones."""
        pool, self._pool = self._pool, None
        if pool is not None and pool.loop is asyncio.get_running_loop():
            await pool.client.aclose()


def after_reaching(error: AdviceError) -> AdviceError:
    """Return the error of a question of which an earlier request had reached the server."""
    if error.sending is Sending.DONE:
        return error
    kind = ConnectionLostError if isinstance(error, UnreachableError) else DeadlineError
    return kind(str(error), usage=error.usage)


class _Progress:
    """How far one attempt got, told by httpx's transport as its ``trace`` extension."""

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
        httpx = _import_httpx()
        self.loop = loop
        # Encodings are still understood; not asking for them spares small bodies the bother.
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if owner.api_key:
            headers["authorization"] = f"Bearer {owner.api_key.reveal()}"
        self.client = httpx.AsyncClient(
            headers=headers,
            # The total deadline is the only clock.
            timeout=None,
            limits=httpx.Limits(max_connections=owner.max_concurrency),
            transport=owner._transport,
            trust_env=owner.trust_env,
            # A server's cookies would pile up, and go back to it with every request.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        )
        self.places = asyncio.Semaphore(owner.max_concurrency)
        # While one request is tried again, the outcome that others wait for.
        self.retry: asyncio.Future[bool] | None = None
        # When the last request failed for good, if none was answered since.
        self.failed_at = -math.inf
        self.limiter = None
        if owner.requests_per_minute is not None:
            self.limiter = _import_limiter()(max(1.0, owner.requests_per_minute), 60.0)
            if owner.requests_per_minute < 1:
                self.limiter = _import_limiter()(1, 60.0 / owner.requests_per_minute)

    async def retry_succeeds(self, until: float) -> bool:
        """Wait for the request that is being tried again, if any; return whether to send."""
        if self.retry is None:
            return True
        try:
            async with asyncio.timeout_at(until):
                return await asyncio.shield(self.retry)
        except TimeoutError:
            return False


def _import_limiter() -> Any:
    try:
        from aiolimiter import AsyncLimiter
    except ImportError as err:
        raise ImportError(
            "requests_per_minute needs aiolimiter: pip install 'lore-torchrl[http]'."
        ) from err
    return AsyncLimiter


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
