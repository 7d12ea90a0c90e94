"""A loopback chat server that goes wrong in every way that servers do.

Usable from any test::

    with FaultServer(["drop", "429", "fine"]) as server:      # then "fine" for ever
        ChatAdvisor("m", base_url=server.url, ...)
    with FaultServer(random_of=FAULTS, seed=3) as server: ...  # each request at random
    server.did   # Counter of what it did, by mode

It runs in a thread of its own with its own event loop, and ends with its ``with`` block.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

MEGABYTE = b" " * (1 << 20)
QUOTA = {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}

# Every mode that is a fault. "slow" is none: it answers, after `delay_s`.
FAULTS = (
    *("drop", "stall", "drip", "reset", "cut", "429", "429_after", "500", "503_html", "html"),
    *("truncated", "wrong_shape", "nan", "empty_choices", "empty_text", "error_200", "huge"),
    *("bomb", "bad_gzip", "deep", "not_http"),
)
_TEXTS = {
    "html": "<!doctype html><html><body>Please sign in</body></html>",
    "truncated": '{"choices": [{"message": {"content": "{\\"logi',
    "wrong_shape": '{"choices": [{"text": 3}], "object": "chat.completion"}',
    "empty_choices": '{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 0}}',
    "empty_text": '{"choices": [{"message": {"content": ""}, "finish_reason": "length"}]}',
    "error_200": '{"error": {"message": "model is loading", "code": 17}}',
    "deep": "[" * 50_000,
    "nan": json.dumps(
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
}  # fmt: skip


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


class FaultServer:
    """Serves each request in the next mode of ``script``, then at random, then in ``after``.

    Args:
        script: Modes of the first requests, in the order in which they come.
        random_of: Modes to choose from once the script is over; the sequence is the same
            for the same ``seed``.
        after: Mode once the script is over, where ``random_of`` is empty.
        seed: Seed of the choice.
        reply: Answers the mode ``fine``: path and body to status and JSON, or text as it is, and
            headers if there are to be any.
        delay_s: Delay of the mode ``slow``.
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
        port: int = 0,
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
        self.port = port
        self._random = random.Random(seed)
        self._bomb: bytes | None = None
        self._tasks: set[asyncio.Task] = set()
        self._ready = threading.Event()

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

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        path = head.split(" ", 2)[1]
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:])
            if name
        }
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        body = json.loads(raw or b"{}")
        mode = self._next()
        self.did[mode] += 1
        if len(self.requests) < 10_000:
            self.requests.append((path, headers, body))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._act(mode, path, body, reader, writer)
        finally:
            self.in_flight -= 1

    def _next(self) -> str:
        if self.script:
            return self.script.pop(0)
        return self._random.choice(self.random_of) if self.random_of else self.after

    # ---- what it does ----

    async def _act(
        self,
        mode: str,
        path: str,
        body: Any,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Do it, and return whether the connection stays open."""
        if mode == "slow":
            await asyncio.sleep(self.delay_s)
        if mode in ("fine", "slow"):
            status, answer, *headers = self.reply(path, body)
            text = answer if isinstance(answer, str) else json.dumps(answer)
            return await self._send(writer, status, text, *headers)
        if mode in _TEXTS:
            return await self._send(writer, 200, _TEXTS[mode])
        if mode.isdigit():
            return await self._send(writer, int(mode), '{"error": {"message": "later"}}')
        if mode == "429_after":
            headers = {"Retry-After": self.retry_after}
            return await self._send(writer, 429, "{}", headers)
        if mode == "429_after_ms":
            headers = {"retry-after-ms": "30", "Retry-After": "60"}
            return await self._send(writer, 429, "{}", headers)
        if mode == "quota":
            return await self._send(writer, 429, json.dumps(QUOTA))
        if mode == "echo_key":
            sent = self.requests[-1][1].get("authorization", "")
            text = json.dumps({"error": {"message": f"Wrong key: {sent}"}})
            return await self._send(writer, 401, text)
        if mode == "503_html":
            return await self._send(writer, 503, "<html>Bad gateway</html>")
        if mode == "bad_gzip":
            return await self._send(writer, 200, "no gzip", {"Content-Encoding": "gzip"})
        if mode == "stall":
            await reader.read()
        elif mode == "drip":
            await self._drip(writer)
        elif mode == "reset":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        elif mode == "cut":
            await self._send(writer, 200, '{"choices"', length=5000)
        elif mode == "not_http":
            writer.write(b"\x00\xff hello\r\n\r\n")
            await writer.drain()
        elif mode == "huge":
            await self._huge(writer)
        elif mode == "bomb":
            self._bomb = self._bomb or gzip.compress(MEGABYTE * 100, 1)
            await self._send(writer, 200, self._bomb, {"Content-Encoding": "gzip"})
        elif mode != "drop":
            raise AssertionError(f"unknown mode {mode}")
        return False

    async def _send(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        text: str | bytes,
        headers: Mapping[str, str] | None = None,
        *,
        length: int | None = None,
    ) -> bool:
        raw = text if isinstance(text, bytes) else text.encode()
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {length or len(raw)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        await self._write(writer, ("\r\n".join(lines) + "\r\n\r\n").encode() + raw)
        return True

    async def _drip(self, writer: asyncio.StreamWriter) -> None:
        await self._write(writer, b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            await self._write(writer, b"1\r\n \r\n")
            await asyncio.sleep(0.03)

    async def _huge(self, writer: asyncio.StreamWriter) -> None:
        await self._write(writer, b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(self.huge_bytes >> 20):
            await self._write(writer, b"100000\r\n" + MEGABYTE + b"\r\n")
        await self._write(writer, b"0\r\n\r\n")

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await writer.drain()
        self.bytes_sent += len(data)
