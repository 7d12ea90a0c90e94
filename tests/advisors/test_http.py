from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import pickle
import socket
import sys
import time
import tracemalloc

import pytest

pytest.importorskip("httpx")

from fault_server import ATTACKS, FAULTS, FaultServer

from lore_torchrl.advisors.errors import (
    AdviceError,
    RateLimitedError,
    Sending,
    StatusError,
)
from lore_torchrl.advisors.http import JSONClient, parse_object, retry_after, status_error
from lore_torchrl.advisors.redaction import Secret

KEY = "sk-very-secret-0123456789"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def client(server: FaultServer, **keywords) -> JSONClient:
    settings = {
        "deadline_s": 5.0,
        "backoff_s": (0.01, 0.02),
        "max_response_bytes": 100_000,
        "api_key": Secret(KEY),
    }
    return JSONClient(server.url, **(settings | keywords))


def post(asker: JSONClient):
    async def once():
        try:
            return await asker.post("/chat/completions", BODY)
        finally:
            await asker.aclose()

    return asyncio.run(once())


def failure(asker: JSONClient) -> AdviceError:
    with pytest.raises(AdviceError) as caught:
        post(asker)
    return caught.value


def test_a_good_answer_is_returned_and_the_key_sent_as_bearer_token():
    with FaultServer() as server:
        data = post(client(server))
        path, headers, body = server.requests[0]
    assert data["choices"]
    assert (path, body) == ("/v1/chat/completions", BODY)
    assert headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    "mode",
    ["drop", "reset", "cut", "not_http", "408", "409", "429", "429_after", "500", "503_html"],
)
def test_what_may_pass_is_retried(mode):
    with FaultServer([mode, mode]) as server:
        assert post(client(server))["choices"]
        assert server.total == 3


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("drop", "connection"),
        ("reset", "connection"),
        ("cut", "connection"),
        ("not_http", "connection"),
        ("429", "rate_limited"),
        ("500", "status_500"),
        ("503_html", "status_503"),
    ],
)
def test_what_does_not_pass_ends_with_its_kind(mode, kind):
    with FaultServer(after=mode) as server:
        assert failure(client(server)).kind == kind
        assert server.total == 3


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("quota", "quota"),
        ("402", "quota"),
        ("401", "authentication"),
        ("403", "authentication"),
        ("400", "status_400"),
        ("404", "status_404"),
        ("501", "status_501"),
        ("302", "status_302"),
        ("html", "not_json"),
        ("truncated", "not_json"),
        ("deep", "not_json"),
        ("error_200", "malformed"),
        ("bad_gzip", "malformed"),
        ("huge", "too_large"),
        ("bomb", "malformed"),
    ],
)
def test_what_no_retry_can_help_is_not_retried(mode, kind):
    with FaultServer(after=mode) as server:
        assert failure(client(server)).kind == kind
        assert server.total == 1


@pytest.mark.parametrize("mode", ["301_elsewhere", "307_elsewhere"])
def test_a_redirect_is_refused_and_not_followed(mode):
    with FaultServer(after=mode) as server:
        assert failure(client(server)).kind == f"status_{mode[:3]}"
        assert (server.total, server.followed) == (1, 0)


def test_a_server_that_comes_back_is_asked_again():
    with FaultServer(after="refused") as server:
        assert failure(client(server, retries=0)).kind == "unreachable"
        server.after = "fine"
        server.back()
        assert post(client(server, retries=0))["choices"]
        server.away()
        assert failure(client(server, retries=0)).kind == "unreachable"
        assert server.total == 1


@pytest.mark.slow
def test_every_fault_is_an_answer_or_a_typed_error_within_the_deadline():
    for mode in ATTACKS:
        with FaultServer(after=mode, huge_bytes=2 << 20) as server:
            started = time.monotonic()
            try:
                post(client(server, deadline_s=0.5, retries=0, max_response_bytes=1 << 20))
            except AdviceError as error:
                assert error.kind, mode
            assert time.monotonic() - started < 3.0, mode
            assert server.followed == 0, mode


@pytest.mark.parametrize("mode", ["stall", "drip"])
def test_the_deadline_is_total(mode):
    with FaultServer(after=mode) as server:
        started = time.monotonic()
        assert failure(client(server, deadline_s=0.4)).kind == "timeout"
        assert time.monotonic() - started < 3.0
        assert server.total == 1


def test_the_deadline_covers_the_wait_for_a_place():
    async def two(asker: JSONClient):
        asks = (asker.post("/x", BODY) for _ in range(2))
        return await asyncio.gather(*asks, return_exceptions=True)

    with FaultServer(after="stall") as server:
        errors = asyncio.run(two(client(server, deadline_s=0.4, max_concurrency=1)))
        assert [error.kind for error in errors] == ["timeout", "timeout"]
        assert server.most_in_flight == 1


def test_retry_after_is_waited_for_but_not_beyond_the_deadline():
    with FaultServer(["429_after"], retry_after="1") as server:
        started = time.monotonic()
        assert post(client(server))["choices"]
        assert server.total == 2
        assert time.monotonic() - started >= 0.95
    with FaultServer(["429_after"], retry_after="3600") as server:
        started = time.monotonic()
        assert failure(client(server)).kind == "rate_limited"
        assert time.monotonic() - started < 3.0
        assert server.total == 1


def test_milliseconds_win_over_seconds():
    with FaultServer(["429_after_ms"]) as server:
        assert post(client(server))["choices"]
        assert server.total == 2


@pytest.mark.parametrize("mode", ["huge", "bomb"])
def test_memory_stays_bounded(mode):
    with FaultServer(after=mode, huge_bytes=30 << 20) as server:
        asker = client(server)
        # The server's own bomb must exist before the measurement.
        failure(asker)
        tracemalloc.start()
        try:
            failure(asker)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        # The cap is 100 kB; the server, in this process, holds a megabyte or so itself.
        assert peak < 10 << 20


def test_no_more_requests_at_once_than_allowed():
    async def many(asker: JSONClient):
        await asyncio.gather(*(asker.post("/chat/completions", BODY) for _ in range(9)))

    with FaultServer(after="slow", delay_s=0.05) as server:
        asyncio.run(many(client(server, max_concurrency=3)))
        assert server.most_in_flight == 3


def test_the_rate_is_limited():
    async def many(asker: JSONClient):
        asks = (asker.post("/chat/completions", BODY) for _ in range(5))
        return await asyncio.gather(*asks, return_exceptions=True)

    with FaultServer() as server:
        outcomes = asyncio.run(many(client(server, requests_per_minute=3, deadline_s=3.0)))
        assert server.total == 3
    assert sum(isinstance(outcome, AdviceError) for outcome in outcomes) == 2


def test_waiting_for_its_own_turn_is_no_fault_of_the_server():
    async def many(asker: JSONClient):
        await asker.post("/chat/completions", BODY)
        asks = (asker.post("/chat/completions", BODY, until=0.0) for _ in range(3))
        return await asyncio.gather(*asks, return_exceptions=True)

    with FaultServer() as server:
        outcomes = asyncio.run(many(client(server, requests_per_minute=1)))
        assert [outcome.kind for outcome in outcomes] == ["not_sent"] * 3
        assert all(outcome.sending is Sending.NEVER for outcome in outcomes)
        assert server.total == 1


def test_a_server_that_is_not_there_took_no_byte_and_is_tried_once_until_it_is_back():
    with FaultServer() as server:
        asker = client(server, retries=2)
    for attempts in (3, 1, 1):
        before = asker.sent
        error = failure(asker)
        assert (error.kind, error.sending) == ("unreachable", Sending.TRIED)
        assert asker.sent - before == attempts


def test_a_host_that_never_connects_took_no_byte():
    # The kernel accepts no more connections than the backlog holds.
    with contextlib.ExitStack() as open_sockets:
        full, *waiting = (open_sockets.enter_context(socket.socket()) for _ in range(5))
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        host, port = full.getsockname()
        for one in waiting:
            one.setblocking(False)
            one.connect_ex((host, port))
        error = failure(JSONClient(f"http://{host}:{port}/v1", deadline_s=0.3, retries=0))
    assert (error.kind, error.sending) == ("unreachable", Sending.TRIED)


@pytest.mark.parametrize("fault", ["drop", "stall", "500", "reset"])
def test_what_a_server_may_have_worked_on_counts_as_sent(fault):
    with FaultServer([fault] * 3) as server:
        assert failure(client(server, deadline_s=0.3)).sending is Sending.DONE


def test_a_cancelled_request_leaves_its_place_free():
    async def cancel_then_ask(asker: JSONClient):
        task = asyncio.create_task(asker.post("/chat/completions", BODY))
        while not server.total:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asker.post("/chat/completions", BODY)

    with FaultServer(["stall"]) as server:
        asker = client(server, max_concurrency=1)
        assert asyncio.run(cancel_then_ask(asker))["choices"]


def test_it_works_in_one_loop_after_another_and_after_a_pickle():
    async def ask(asker: JSONClient):
        return await asker.post("/chat/completions", BODY)

    with FaultServer() as server:
        asker = client(server, requests_per_minute=1000)
        # Left open on purpose: the loop of an abandoned thread closes nothing either.
        asyncio.run(ask(asker))
        asyncio.run(ask(asker))
        copy = pickle.loads(pickle.dumps(asker))
        asyncio.run(ask(copy))
        assert server.total == 3
        assert server.requests[2][1]["authorization"] == f"Bearer {KEY}"


def test_every_fault_in_random_sequence_is_an_answer_or_a_typed_error():
    async def ask_many(asker: JSONClient, times: int):
        kinds = []
        for _ in range(times):
            asks = [asker.post("/chat/completions", BODY) for _ in range(8)]
            for outcome in await asyncio.gather(*asks, return_exceptions=True):
                kinds.append(getattr(outcome, "kind", None) or type(outcome).__name__)
        await asker.aclose()
        return kinds

    with FaultServer(random_of=("fine", *FAULTS), seed=1, huge_bytes=2 << 20) as server:
        asker = client(server, deadline_s=0.5, retries=1)
        kinds = asyncio.run(ask_many(asker, 20))
        assert asker.sent >= server.total
        assert set(server.did) == {"fine", *FAULTS}
    known = {
        *("dict", "connection", "timeout", "rate_limited", "status_500", "status_503"),
        *("not_json", "malformed", "too_large"),
    }
    assert set(kinds) <= known
    assert len(kinds) == 160


# ---- construction and secrets ----


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"deadline_s": 0.0}, "0.0"),
        ({"deadline_s": float("nan")}, "nan"),
        ({"retries": -1}, "-1"),
        ({"backoff_s": (2.0, 1.0)}, r"\(2.0, 1.0\)"),
        ({"max_response_bytes": 0}, "0"),
        ({"max_concurrency": 0}, "0"),
        ({"requests_per_minute": 0.0}, "0.0"),
    ],
)
def test_impossible_values_fail_at_construction(keywords, message):
    with pytest.raises(ValueError, match=message):
        JSONClient("http://127.0.0.1/v1", **keywords)


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x/v1", "http:///v1", ""])
def test_no_address(url):
    with pytest.raises(ValueError, match="base_url"):
        JSONClient(url)


@pytest.mark.parametrize(
    "url", [f"http://me:{KEY}@x/v1", f"http://x/v1?key={KEY}", f"me:{KEY}@x/v1"]
)
def test_an_address_with_a_secret_is_refused_and_not_shown(url):
    with pytest.raises(ValueError, match="base_url") as error:
        JSONClient(url)
    assert KEY not in str(error.value)


def test_a_key_that_no_header_may_hold_is_refused_and_not_shown():
    with pytest.raises(ValueError, match="API key") as error:
        Secret(f"{KEY}\nX-Evil: 1")
    assert KEY not in str(error.value)


def everything_about(error: BaseException) -> str:
    import traceback

    parts = [repr(error), str(error), repr(error.__dict__), repr(error.args)]
    parts += traceback.format_exception(error)
    seen = error.__cause__, error.__context__
    return "\n".join(parts) + "".join(everything_about(inner) for inner in seen if inner)


@pytest.mark.parametrize("mode", [*FAULTS, "echo_key", "quota", "fine"])
def test_the_key_shows_nowhere(mode, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    with FaultServer(after=mode, huge_bytes=1 << 20) as server:
        asker = client(server, deadline_s=0.4, retries=1)
        try:
            shown = repr(post(asker))
        except AdviceError as error:
            shown = everything_about(error)
        assert server.requests[0][1]["authorization"] == f"Bearer {KEY}"
    captured = capfd.readouterr()
    for text in (shown, repr(asker), str(asker), caplog.text, captured.out, captured.err):
        assert KEY not in text


def test_a_key_from_the_environment_is_not_in_a_pickle(monkeypatch):
    monkeypatch.setenv("SOME_KEY", KEY)
    asker = JSONClient("http://x/v1", api_key=Secret.from_env("SOME_KEY"))
    pickled = pickle.dumps(asker)
    assert KEY.encode() not in pickled
    assert pickle.loads(pickled).api_key.get_secret_value() == KEY


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "lore_torchrl.advisors.http")
    with pytest.raises(ImportError, match=r"lore-torchrl\[http\]"):
        importlib.import_module("lore_torchrl.advisors.http")


def test_errors_travel_between_processes():
    error = RateLimitedError(429, "later")
    error.retry_after_s = 3.0
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.status, str(copy), copy.retry_after_s, copy.kind) == (
        *(RateLimitedError, 429, "later", 3.0, "rate_limited"),
    )
    assert pickle.loads(pickle.dumps(StatusError(418, "tea"))).kind == "status_418"


def test_what_httpx_logs_of_a_server_is_without_the_key(caplog):
    caplog.set_level(logging.INFO, logger="httpx")
    with FaultServer(["echo_in_reason"] * 3) as server:
        failure(client(server))
        assert server.total
    assert "HTTP Request" in caplog.text and KEY not in caplog.text


def test_cookies_of_a_server_do_not_come_back():
    def reply(path, body):
        jar = {"set-cookie": f"c{server.total}={'x' * 2000}; Path=/"}
        return 200, "{}", jar

    with FaultServer(reply=reply) as server:
        asker = client(server)
        for _ in range(3):
            post(asker)
        assert all("cookie" not in headers for _, headers, _ in server.requests)


# ---- bodies, statuses and headers ----


def body_of(encoding: str, *chunks: bytes, limit: int = 1000) -> dict:
    """What a client reads of a body that comes in these chunks."""
    import httpx

    class Chunks(httpx.AsyncByteStream):
        async def __aiter__(self):
            for chunk in chunks:
                yield chunk

    def answer(request):
        return httpx.Response(200, headers={"content-encoding": encoding}, stream=Chunks())

    transport = httpx.MockTransport(answer)
    return post(JSONClient("http://x/v1", transport=transport, max_response_bytes=limit))


def body_error(encoding: str, *chunks: bytes, limit: int = 1000) -> str:
    with pytest.raises(AdviceError) as caught:
        body_of(encoding, *chunks, limit=limit)
    return caught.value.kind


def test_a_body_is_read_no_further_than_the_cap():
    assert body_error("", b"0" * 500, b"0" * 501) == "too_large"
    text = json.dumps({"a": "0" * 990})
    assert len(text) < 1000
    assert body_of("", *(bytes([byte]) for byte in text.encode())) == json.loads(text)


def test_a_byte_order_mark_is_no_part_of_the_json():
    assert body_of("", '{"a": "é"}'.encode("utf-8-sig")) == {"a": "é"}


@pytest.mark.parametrize("encoding", ["br", "gzip", "deflate", "gzip, gzip"])
def test_an_encoded_body_is_refused(encoding):
    assert body_error(encoding, b"{}") == "malformed"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("<html>", "not_json"),
        ('{"a": 1', "not_json"),
        ("[" * 100_000, "not_json"),
        ("[1]", "malformed"),
        ('{"a": [' + "0," * 500_000 + "0]}", "too_large"),
        ('{"error": "no"}', "malformed"),
        ('{"error": {"message": "no", "code": "insufficient_quota"}}', "quota"),
    ],
)
def test_a_body_that_is_no_answer(text, kind):
    with pytest.raises(AdviceError) as caught:
        parse_object(text)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (402, "", "quota"),
        (429, "", "rate_limited"),
        (429, '{"error": {"code": "insufficient_quota"}}', "quota"),
        (429, '{"error": {"type": "insufficient_quota", "code": null}}', "quota"),
        (401, "", "authentication"),
        (403, "<html>", "authentication"),
        (500, '"just text"', "status_500"),
        (404, '{"detail": "Not Found"}', "status_404"),
        (418, "[]", "status_418"),
    ],
)
def test_a_refusal_has_the_kind_of_its_cause(status, text, kind):
    error = status_error(status, text, None)
    assert error.kind == kind
    assert str(status) in str(error)


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("message", ['["%s"]', '"%s"', '{"%s": 1}'])
def test_a_refusal_is_quoted_on_one_short_line_that_a_terminal_only_shows(status, message):
    message %= "\\u001b[2J\\u0000\\u202e\\ud83d\\n" + "x" * 1000
    text = f'{{"error": {{"message": {message}}}}}'
    with pytest.raises(AdviceError) as caught:
        if status == 200:
            parse_object(text)
        raise status_error(status, text, None)
    error = caught.value
    assert str(error).isprintable()
    assert len(str(error)) < 250


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", "", "Fri, 31 Dec 1999 23:59:59 GMT"])
def test_a_wait_that_is_no_number_is_none(value):
    assert retry_after({"retry-after": value}) is None
    assert retry_after({"retry-after-ms": value, "retry-after": "2"}) == 2.0
