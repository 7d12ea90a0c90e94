"""A loopback chat server that goes wrong in every way that servers do.

Usable from any test::

    with FaultServer(["drop", "429", "fine"]) as server:      # then "fine" for ever
        ChatAdvisor("m", base_url=server.url, ...)
    with FaultServer(random_of=FAULTS, seed=3) as server: ...  # each request at random
    server.did   # Counter of what it did, by mode

:data:`FAULTS` is a short list for tests, one or two of each kind; :data:`ATTACKS` is every
fault, for ``benchmarks/attack.py``. It runs in a thread of its own with its own event loop,
and ends with its ``with`` block.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import gzip
import json
import random
import socket
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

MEGABYTE = b" " * (1 << 20)
# Bytes of a large text: with its envelope it stays below the client's cap of 1 MiB.
LARGE = 1_040_000
# What a terminal would obey: clear the screen, set the title, ring; C1's CSI; right to left.
CONTROLS = "\x1b[2J\x1b]0;owned\x07\x08\x9b31m\u202e\x00"
QUOTA = {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}
CHUNKED = b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n"


def chat_reply(path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Answer as a good server does: logprobs where asked for, else JSON; the first action wins."""
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    if not path.endswith("/chat/completions"):
        return 404, {"error": {"message": f"No route {path}"}}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    if body.get("logprobs"):
        top = [{"token": "A", "logprob": -0.105}, {"token": "B", "logprob": -3.0}]
        choice["message"] = {"role": "assistant", "content": "A"}
        choice["logprobs"] = {"content": [{"token": "A", "logprob": -0.105, "top_logprobs": top}]}
    elif "response_format" in body:
        schema = body["response_format"].get("json_schema", {}).get("schema", {})
        prior = schema.get("properties", {}).get("action_prior", {})
        count = prior.get("properties", {}).get("logits", {}).get("minItems", 7)
        logits = [4] + [0] * (count - 1)
        answer = {"action_prior": {"type": "discrete", "logits": logits}, "confidence": 0.8}
        choice["message"] = {"role": "assistant", "content": json.dumps(answer)}
    else:
        choice["message"] = {"role": "assistant", "content": "A"}
    choices = [dict(choice, index=index) for index in range(body.get("n", 1))]
    return 200, {"object": "chat.completion", "choices": choices, "usage": usage}


# ---- what a fault is made of ----


class Asked(NamedTuple):
    """A request, and the server that got it."""

    path: str
    headers: Mapping[str, str]
    body: Any
    server: FaultServer

    @property
    def key(self) -> str:
        """The API key that came with it."""
        return self.headers.get("authorization", "").removeprefix("Bearer ")


@dataclass(frozen=True)
class Sent:
    """What goes over the wire in answer to a request.

    Args:
        body: Sent with status, headers and its length, unless ``raw`` is given.
        status: HTTP status code.
        headers: Further headers; one of ``Content-Length`` replaces the true one.
        raw: All bytes, head included.
        drip: Bytes that follow ``times`` times, ``every_s`` seconds apart.
        then: What becomes of the connection: ``keep``, ``close``, ``reset`` or ``stall``.
    """

    body: str | bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    drip: bytes = b""
    times: int = 1 << 40
    every_s: float = 0.0
    then: str = "keep"

    def start(self) -> bytes:
        """Return what is sent at once."""
        if self.raw is not None:
            return self.raw
        body = self.body
        # Faults hold lone surrogates on purpose; as raw bytes they are no UTF-8 either.
        body = body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass")
        headers = {"Content-Length": str(len(body)), **self.headers}
        lines = [f"HTTP/1.1 {self.status} X", *(f"{n}: {v}" for n, v in headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


Fault = Callable[[Asked], Sent]


_OF_CHOICE = ("message", "logprobs", "finish_reason")


def sends(body: Any = "", status: int = 200, *, then: str = "keep", **headers: str) -> Fault:
    """Answer every path with ``body``: text, bytes, a value as JSON, or what makes one."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    def fault(asked: Asked) -> Sent:
        made = body() if callable(body) else body
        raw = made if isinstance(made, (str, bytes)) else json.dumps(made)
        return Sent(raw, status, named, then=then)

    return fault


def wire(raw: bytes, *, then: str = "close", **drip: Any) -> Fault:
    """Answer with these bytes, which may be no HTTP."""
    return lambda asked: Sent(raw=raw, then=then, **drip)


def refuses(message: str, status: int = 400) -> Fault:
    """Refuse with a message of the server's own."""
    return sends({"error": {"message": message}}, status)


def completes(**fields: Any) -> Fault:
    """Answer well, with some fields of the completion or of its first choice replaced."""

    def fault(asked: Asked) -> Sent:
        status, data = chat_reply(asked.path, asked.body)
        for name, value in fields.items():
            part = data["choices"][0] if name in _OF_CHOICE and "choices" in data else data
            part[name] = value() if callable(value) else value
        return Sent(json.dumps(data), status)

    return fault


def says(content: Any, **message: Any) -> Fault:
    """Answer with a message of this content, without logprobs."""
    return completes(message={"content": content, **message}, logprobs=None)


def fills(unit: str) -> Fault:
    """Answer with a message that repeats ``unit`` up to :data:`LARGE` bytes of JSON."""
    room = LARGE // (len(json.dumps(unit)) - 2)
    return completes(message=lambda: {"content": unit * room}, logprobs=None)


def lists(entry: Any) -> Callable[[], list[Any]]:
    """Return what makes a list of :data:`LARGE` bytes of JSON."""
    return lambda: [entry] * (LARGE // (len(json.dumps(entry)) + 2))


def logprobs(value: Any, times: int = 1) -> Fault:
    """Answer with logprobs of which the letter A's is ``value``, so many times."""
    entry = {"token": "A", "logprob": value}
    return completes(
        message={"content": "A"},
        logprobs=lambda: {"content": [{"token": "A", "top_logprobs": [entry] * times}]},
    )


def echoes(disguise: Callable[[str], str], status: int = 401) -> Fault:
    """Put the key, as part of a JSON string, into a message."""
    text = '{"error": {"message": "Wrong key: %s"}}'
    return lambda asked: Sent(text % disguise(asked.key), status)


def elsewhere(status: int) -> Fault:
    """Redirect to another port of the server, which counts what comes."""
    return lambda asked: Sent("", status, {"Location": asked.server.decoy_url + asked.path})


@functools.cache
def _packed(wbits: int, times: int = 1) -> bytes:
    """Return 100 MB of blanks, compressed once or several times over."""
    packer = zlib.compressobj(9, zlib.DEFLATED, wbits)
    data = b"".join(packer.compress(MEGABYTE) for _ in range(100)) + packer.flush()
    for _ in range(times - 1):
        data = gzip.compress(data)
    return data


def bomb(wbits: int, encoding: str, times: int = 1) -> Fault:
    """Answer with 100 MB in few bytes."""
    return lambda asked: Sent(_packed(wbits, times), headers={"Content-Encoding": encoding})


# ---- the faults ----

GOOD = json.dumps({"logits": [4, 0, 0, 0, 0, 0, 0], "confidence": 0.8})
COMPLETION = json.dumps({"choices": [{"message": {"content": GOOD}, "finish_reason": "stop"}]})

# What a model may write without end; each fills one answer.
_ENDLESS = {
    "think": "<think>",
    "think_pairs": "<think></think>",
    "think_ends": "</think>",
    "think_mixed": "<THINK><thinking>",
    "fences": "```",
    "fences_spaced": "``` \n ",
    "braces": "{",
    "brace_quotes": '{"',
    "objects": '{"a":',
    "brackets": "[",
    "digits": "9",
    "spaces": " ",
    "no_break_spaces": "\u00a0",
    "underscores": "_- ",
    "quotes": '"',
    "backslashes": "\\",
    "lead_in": "the best action is ",
    "emoji": "\U0001f600",
    "mixture": '<think>```{["9 ',
}

# What a model may write as its answer.
_WRITTEN = {
    "logits_nan": '{"logits": [NaN, 1, 1, 1, 1, 1, 1]}',
    "logits_infinite": '{"logits": [Infinity, -Infinity, 1, 1, 1, 1, 1]}',
    "logits_1e308": '{"logits": [1e308, -1e308, 1e308, 0, 0, 0, 0]}',
    "logits_1e999": '{"logits": [1e999, 0, 0, 0, 0, 0, 0]}',
    "logits_few": '{"logits": [1, 2]}',
    "logits_many": '{"logits": [1, 2, 3, 4, 5, 6, 7, 8, 9]}',
    "logits_text": '{"logits": ["1", "2", "3", "4", "5", "6", "7"]}',
    "logits_null": '{"logits": [null, null, null, null, null, null, null]}',
    "logits_digits": '{"logits": [' + "9" * 5_000 + "]}",
    "logits_hundred_thousand": '{"logits": [' + "1," * 100_000 + "1]}",
    "names_twice": '{"logits": {"left": 1, "LEFT": 2, "Left ": 3}}',
    "names_unknown": '{"logits": {"jump": 1, "fly": 2}}',
    "names_unknown_many": json.dumps({"logits": {f"n{i}": 1 for i in range(60_000)}}),
    "fields_twice": '{"logits": [1], "logits": "no", "action": 1, "action": 99}',
    "probabilities_zero": '{"probs": [0, 0, 0, 0, 0, 0, 0]}',
    "probabilities_overflow": '{"probs": [1e308, 1e308, 1e308, 1e308, 1e308, 1e308, 1e308]}',
    "confidence_2": '{"action": 1, "confidence": 2}',
    "confidence_nan": '{"action": 1, "confidence": NaN}',
    "action_huge": '{"action": ' + "9" * 4_000 + "}",
    "prior_null": '{"action_prior": null, "logits": null, "confidence": null}',
    "prior_deep": '{"action_prior":' * 20_000,
    "controls_written": CONTROLS * 100,
}

# Fields of a completion that are not what they should be.
_SHAPES = {
    "zeros": completes(choices=lists(0)),
    "empty_objects": completes(choices=lists({})),
    "many_votes": completes(choices=lists({"message": {"content": "Hm."}})),
    "choices_null": completes(choices=None),
    "choices_text": completes(choices="A"),
    "message_null": completes(message=None, logprobs=None),
    "content_null": says(None),
    "content_parts": says([{"type": "text", "text": GOOD}]),
    "content_number": says(17),
    "refusal": says(None, refusal=CONTROLS + "I cannot help with that."),
    "finish_length": completes(message={"content": '{"logits": [1'}, finish_reason="length"),
    "tool_calls": says(None, tool_calls=[{"function": {"name": "rm", "arguments": "{}"}}]),
    "wrong_model": completes(model="another", id=None, created="yesterday"),
    "padded": says(GOOD + " " * (LARGE - 500) + "\U0001f600"),
    "unknown_fields": completes(extra=lambda: {f"{i}": i for i in range(60_000)}),
    "top_logprobs_huge": logprobs(-0.1, 28_000),
    "logprob_nan": logprobs(float("nan")),
    "logprob_infinite": logprobs(float("inf")),
    "logprob_1e308": logprobs(1e308),
    "logprob_null": logprobs(None),
    "logprob_text": logprobs("-0.1"),
    "usage_negative": completes(usage={"prompt_tokens": -5, "completion_tokens": -(10**12)}),
    "usage_huge": completes(usage={"prompt_tokens": 10**30, "completion_tokens": 1 << 39}),
    "usage_text": completes(usage={"prompt_tokens": "many", "completion_tokens": float("nan")}),
    "all_null": completes(choices=None, usage=None, object=None, error=None),
}

# Bodies that are no completion, or hardly.
_BODIES = {
    "html": sends("<!doctype html><html><body>Please sign in</body></html>"),
    "truncated": sends('{"choices": [{"message": {"content": "{\\"logi'),
    "wrong_shape": sends('{"choices": [{"text": 3}], "object": "chat.completion"}'),
    "empty_choices": sends(
        '{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 0}}'
    ),
    "empty_text": sends('{"choices": [{"message": {"content": ""}, "finish_reason": "length"}]}'),
    "error_200": sends('{"error": {"message": "model is loading", "code": 17}}'),
    "deep": sends("[" * 50_000),
    "nan": sends(
        {
            "choices": [
                {
                    "message": {"content": '{"logits": [NaN, 1, 1, 1, 1, 1, 1]}'},
                    "logprobs": {"content": [{"token": "A", "top_logprobs": [
                        {"token": "A", "logprob": float("nan")}
                    ]}]},
                }
            ],
            "usage": {"prompt_tokens": 11, "completion_tokens": 2},
        }
    ),
    "nothing": sends(""),
    "deep_objects": sends('{"a":' * 100_000),
    "megabyte_of_blanks": sends(lambda: b" " * LARGE),
    "megabyte_of_digits": sends(lambda: b"9" * LARGE),
    "four_megabytes": sends(lambda: b'{"choices": [' + b"0," * (2 << 20) + b"0]}"),
    "html_megabyte": sends(lambda: "<p>" * (LARGE // 3), 502, Content_Type="text/html"),
    "bom": sends(b"\xef\xbb\xbf" + COMPLETION.encode()),
    "utf16": sends(COMPLETION.encode("utf-16"), Content_Type="application/json; charset=utf-16"),
    "no_utf8": sends(lambda: b"\xff\xfe\xfd" * 300_000),
    "surrogates": sends({"choices": [{"message": {"content": "\ud800\udfff\udc00" * 9}}]}),
    "surrogates_raw": sends(b'{"error": {"message": "\xed\xa0\x80"}}', 400),
    "bad_gzip": sends("no gzip", Content_Encoding="gzip"),
    "brotli": sends(b"\x0b\x02\x80", Content_Encoding="br"),
    "gzip_truncated": sends(gzip.compress(COMPLETION.encode())[:-20], Content_Encoding="gzip"),
    "bomb": bomb(31, "gzip"),
    "bomb_deflate": bomb(15, "deflate"),
    "bomb_twice": bomb(31, "gzip, gzip", times=2),
}  # fmt: skip

# What servers say of themselves, and what they make of the key.
_MESSAGES = {
    "message_controls": refuses(CONTROLS * 50),
    "message_surrogates": refuses("\ud800 half a letter \udfff"),
    "message_lines": refuses("fine\n2026-01-01 [INFO] all is well\r\n" * 50),
    "message_megabyte": refuses("no " * (LARGE // 3)),
    "message_object": sends({"error": {"message": {"a": [1, 2]}, "code": ["x"], "type": 3}}, 400),
    "message_kind": sends({"error": {"message": "../../x", "code": "../../../tmp/x"}}, 400),
    "quota": sends(QUOTA, 429),
    "echo_key": echoes(lambda key: f"Bearer {key}"),
    "echo_slashes": echoes(lambda key: key.replace("/", "\\/")),
    "echo_escapes": echoes(lambda key: "".join(f"\\u{ord(char):04x}" for char in key)),
    "echo_one_escape": echoes(lambda key: key.replace("s", "\\u0073")),
    "echo_percent": echoes(lambda key: quote(key, safe="")),
    "echo_base64": echoes(lambda key: base64.b64encode(key.encode()).decode()),
    "echo_split": echoes(lambda key: f"{key[:9]}\\n{key[9:]}"),
    "echo_on_success": echoes(lambda key: key.replace("/", "\\/"), 200),
    "echo_in_answer": lambda asked: says(asked.key)(asked),
    "echo_in_reason": lambda asked: Sent(
        raw=f"HTTP/1.1 400 {asked.key}\r\nContent-Length: 0\r\n\r\n".encode(), then="close"
    ),
}

# Every status but 200, with a message; these come with something else, or with none.
_STATUSES = {
    "201": sends(COMPLETION, 201),
    "204": wire(b"HTTP/1.1 204 X\r\n\r\n", then="keep"),
    "206": sends(COMPLETION[:40], 206, Content_Range="bytes 0-39/4000"),
    "503_html": sends("<html>Bad gateway</html>", 503),
    **{f"{status}_elsewhere": elsewhere(status) for status in (301, 302, 307)},
    "302_loop": lambda asked: Sent("", 302, {"Location": asked.server.url + "/chat/completions"}),
    "429_after": lambda asked: Sent("{}", 429, {"Retry-After": asked.server.retry_after}),
    "429_after_ms": sends("{}", 429, retry_after_ms="30", Retry_After="60"),
    **{
        f"429_after_{name}": sends("{}", 429, Retry_After=value)
        for name, value in {
            "zero": "0",
            "negative": "-5",
            "huge": "1e300",
            "nan": "nan",
            "past": "Thu, 01 Jan 1970 00:01:00 GMT",
            "future": "Fri, 31 Dec 9999 23:59:59 GMT",
            "no_date": "99 Foo 99999 99:99:99 +9999",
        }.items()
    },
}

# Bytes on the wire that are late, wrong or without end.
_WIRE = {
    "drop": wire(b""),
    "stall": wire(b"", then="stall"),
    "reset": wire(b"", then="reset"),
    "drip": wire(CHUNKED, drip=b"1\r\n \r\n", every_s=0.03),
    "cut": sends('{"choices"', Content_Length="5000", then="close"),
    "reset_in_body": sends('{"choices"', Content_Length="5000", then="reset"),
    "stall_in_body": sends('{"choices"', Content_Length="5000", then="stall"),
    "huge": lambda asked: Sent(
        raw=CHUNKED, drip=b"100000\r\n" + MEGABYTE + b"\r\n", times=asked.server.huge_bytes >> 20
    ),
    "not_http": wire(b"\x00\xff hello\r\n\r\n"),
    "http_2": wire(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "http_0_9": wire(COMPLETION.encode()),
    "status_line_only": wire(b"HTTP/1.1 200 X\r\n"),
    "status_999": wire(b"HTTP/1.1 999 X\r\nContent-Length: 2\r\n\r\n{}"),
    "slow_status": wire(b"", drip=b"H", every_s=0.05),
    "slow_headers": wire(b"HTTP/1.1 200 X\r\n", drip=b"X-A: b\r\n", every_s=0.05),
    "header_flood": wire(b"HTTP/1.1 200 X\r\n", drip=b"X-A: b\r\n" * 1_000, times=200),
    "header_megabyte": wire(b"HTTP/1.1 200 X\r\nX-A: " + b"b" * LARGE + b"\r\n\r\n"),
    "header_controls": wire(b"HTTP/1.1 400 \x1b[2J\r\nX-\x00A: \x1b]0;b\x07\r\n\r\n"),
    "continue_flood": wire(b"", drip=b"HTTP/1.1 100 Continue\r\n\r\n" * 100, every_s=0.001),
    "length_short": sends(COMPLETION, Content_Length="10", then="close"),
    "length_negative": sends(COMPLETION, Content_Length="-1", then="close"),
    "length_huge": sends(COMPLETION, Content_Length="9" * 30, then="close"),
    "length_twice": wire(b"HTTP/1.1 200 X\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
    "length_none": wire(b"HTTP/1.1 200 X\r\n\r\n" + COMPLETION.encode()[:50]),
    "chunk_negative": wire(CHUNKED + b"-5\r\n{}\r\n0\r\n\r\n"),
    "chunk_huge": wire(CHUNKED + b"ffffffffffffffff\r\n{}"),
    "chunk_short": wire(CHUNKED + b"1\r\n{}{}{}\r\n0\r\n\r\n"),
    "chunk_no_end": wire(CHUNKED + b"2\r\n{}\r\n", then="stall"),
    "chunk_extension": wire(CHUNKED + b"2;", drip=b"a" * 4_096, every_s=0.001),
    "chunk_trailers": wire(CHUNKED + b"0\r\n", drip=b"X-A: b\r\n" * 100, every_s=0.001),
    "refused": wire(b""),
    "reset_unread": wire(b"", then="reset"),
    "answer_unread": wire(b"HTTP/1.1 413 X\r\nContent-Length: 0\r\n\r\n", then="reset"),
}

_NUMBERS = (*(400, 401, 402, 403, 404, 408, 409, 413, 418, 422, 429, 500, 501, 502, 503, 504),)
_FAULTS: dict[str, Fault] = {
    **_BODIES,
    **{str(number): refuses("later", number) for number in _NUMBERS},
    **_STATUSES,
    **_WIRE,
    **_MESSAGES,
    **_SHAPES,
    **{name: says(text) for name, text in _WRITTEN.items()},
    **{f"endless_{name}": fills(unit) for name, unit in _ENDLESS.items()},
}
ATTACKS = tuple(_FAULTS)
# One or two of each kind, for tests. "slow" is no fault: it answers, after `delay_s`.
FAULTS = (
    *("drop", "stall", "drip", "reset", "cut", "429", "429_after", "500", "503_html", "html"),
    *("truncated", "wrong_shape", "nan", "empty_choices", "empty_text", "error_200", "huge"),
    *("bomb", "bad_gzip", "deep", "not_http"),
)
# These answer before they have read the request.
_UNREAD = ("reset_unread", "answer_unread")


class FaultServer:
    """Serves each request in the next mode of ``script``, then at random, then in ``after``.

    Modes are ``fine``, ``slow``, the names in :data:`ATTACKS` and any status code. A server
    whose ``after`` is ``refused`` is :meth:`away` from the start.

    Args:
        script: Modes of the first requests, in the order in which they come.
        random_of: Modes to choose from once the script is over; the sequence is the same
            for the same ``seed``.
        after: Mode once the script is over, where ``random_of`` is empty.
        seed: Seed of the choice.
        reply: Answers the mode ``fine``: path and body to status and JSON, or text as it is, and
            headers if there are to be any.
        delay_s: Delay of the mode ``slow``.
        retry_after: Header of the mode ``429_after``.
        huge_bytes: Bytes that the mode ``huge`` sends.
    """

    def __init__(
        self,
        script: Iterable[str] = (),
        *,
        random_of: Sequence[str] = (),
        after: str = "fine",
        seed: int = 0,
        reply: Callable[[str, Mapping[str, Any]], tuple] = chat_reply,
        delay_s: float = 1.0,
        retry_after: str = "0.05",
        huge_bytes: int = 100 << 20,
    ) -> None:
        self.script = list(script)
        self.random_of = tuple(random_of)
        self.after = after
        self.reply = reply
        self.delay_s = delay_s
        self.retry_after = retry_after
        self.huge_bytes = huge_bytes
        self.did: Counter[str] = Counter()
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.bytes_sent = 0
        self.followed = 0
        self.port = 0
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task] = set()
        self._ready = threading.Event()
        self._listener: asyncio.Server | None = None
        self._placeholder: socket.socket | None = None

    # ---- life ----

    def __enter__(self) -> FaultServer:
        self._thread = threading.Thread(target=self._run, name="fault-server", daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        """Base URL, up to and with ``/v1``."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def total(self) -> int:
        """Requests so far."""
        return sum(self.did.values())

    def away(self) -> None:
        """Refuse connections and cut those that are open."""
        asyncio.run_coroutine_threadsafe(self._leave(), self._loop).result(10)

    def back(self) -> None:
        """Listen again, at the same port."""
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        decoy = await asyncio.start_server(self._count_followed, "127.0.0.1", 0)
        self.decoy_url = f"http://127.0.0.1:{decoy.sockets[0].getsockname()[1]}"
        await self._listen()
        if self.after == "refused":
            await self._leave()
        self._ready.set()
        await self._stop.wait()
        decoy.close()
        await self._leave()
        self._placeholder.close()

    async def _listen(self) -> None:
        if self._placeholder is not None:
            self._placeholder.close()
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _leave(self) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Bound and not listening, the port refuses and goes to nobody else.
        self._placeholder = socket.socket()
        self._placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._placeholder.bind(("127.0.0.1", self.port))

    async def _count_followed(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.followed += 1
        writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            # A client that leaves amid an answer is no fault of ours.
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._one(reader, writer):
                    pass
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request, and return whether the connection stays open."""
        first = await reader.readexactly(1)
        mode = self._next()
        self.did[mode] += 1
        if mode in _UNREAD:
            return await self._send(_FAULTS[mode](Asked("", {}, {}, self)), reader, writer)
        head = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        path = head.split(" ", 2)[1]
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:])
            if name
        }
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        asked = Asked(path, headers, json.loads(raw or b"{}"), self)
        if len(self.requests) < 10_000:
            self.requests.append((path, headers, asked.body))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if mode == "slow":
                await asyncio.sleep(self.delay_s)
            return await self._send(self._answer(mode, asked), reader, writer)
        finally:
            self.in_flight -= 1

    def _next(self) -> str:
        if self.script:
            return self.script.pop(0)
        return self._random.choice(self.random_of) if self.random_of else self.after

    def _answer(self, mode: str, asked: Asked) -> Sent:
        if mode in ("fine", "slow"):
            status, data, *headers = self.reply(asked.path, asked.body)
            return Sent(data if isinstance(data, str) else json.dumps(data), status, *headers)
        if mode in _FAULTS:
            return _FAULTS[mode](asked)
        assert mode.isdigit(), f"unknown mode {mode}"
        return refuses("later", int(mode))(asked)

    async def _send(
        self, sent: Sent, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        await self._write(writer, sent.start())
        for _ in range(sent.times if sent.drip else 0):
            await self._write(writer, sent.drip)
            await asyncio.sleep(sent.every_s)
        if sent.then == "stall":
            await reader.read()
        elif sent.then == "reset":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        return sent.then == "keep"

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await writer.drain()
        self.bytes_sent += len(data)
