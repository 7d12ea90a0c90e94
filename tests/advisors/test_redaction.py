"""What foreign text may do to a log, and which secrets may stand in any text."""

from __future__ import annotations

import io
import json
import logging
import sys
import time

import pytest
from spellings import KEY, SPELLINGS, leaks

from lore_torchrl.advisors.errors import AdviceError
from lore_torchrl.advisors.redaction import (
    redact,
    redact_all,
    redact_output,
    redacted_log,
    remember,
    secrets_of,
    shown,
)


@pytest.fixture(autouse=True)
def known_key():
    remember(KEY)


# ---- one visible line ----


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain words", "plain words"),
        ("two\nlines\tand\r\n more ", "two lines and more"),
        ("\x1b[2J\x07\x00", r"\x1b[2J\x07\x00"),
        ("left\u202eright\u2066\u200b", r"left\u202eright\u2066\u200b"),
        ("half an emoji \ud83d", r"half an emoji \ud83d"),
        ("\u6b63\u3057\u3044 é 🙂", "\u6b63\u3057\u3044 é 🙂"),
        ("", ""),
    ],
)
def test_foreign_text_is_one_visible_line(text, line):
    assert shown(text) == line
    assert line.isprintable()
    assert str(AdviceError(text)) == line


@pytest.mark.parametrize("char", ["a", "\n", "\x1b", "\ud800", "é"])
@pytest.mark.parametrize("limit", [1, 20, 200])
def test_foreign_text_is_short_however_long_it_was(char, limit):
    assert len(shown(char * 1_000_000, limit)) <= limit
    assert len(shown("x" + char * 1_000_000, limit)) <= limit


# ---- secrets ----


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_a_secret_is_hidden_however_it_is_spelled(spelling):
    text = f"İ Wrong key: {spelling}. Try another, says “the server”."
    assert leaks(text), "the test itself sees it"
    clean = redact(text)
    assert not leaks(clean)
    assert clean.startswith("İ Wrong key: ") and "another, says “the server”." in clean
    assert clean.count("[redacted]") == 1
    for dumped in (json.dumps(text), repr(text), json.dumps(json.dumps(text))):
        assert not leaks(redact(dumped))


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_a_secret_cut_off_at_the_end_of_what_is_read_is_hidden(spelling):
    # What is read of a long text ends at 16 times what is shown: amid the key.
    for kept in range(8, len(spelling), 5):
        text = " " * (16 * 200 - kept) + spelling + " and so on" * 100
        line = shown(text)
        assert not leaks(line), line


@pytest.mark.parametrize(
    "text",
    [
        "sk-hush", "sk hush plus very 0123", "a\\nb", "%41%42", "Bearer of news",
        "hf-internal-testing/tiny-random-gpt2", "sk-learn-contributions", "http://host:8080/v1",
        "mail me@host.org", "x" * 500, "0123456789" * 20, "rk_integrator_4th",
        "/data/pk_maze_v12", "runs/sk-experiment-2024/x", "xai-grok-2-latest",
    ],
)  # fmt: skip
def test_other_text_stays(text):
    assert redact(text) == text


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("http://me:pw@host/v1", "http://[redacted]@host/v1"),
        ("http://me:p@ss@host/v1", "http://[redacted]@host/v1"),
        ("http://token@host/v1", "http://[redacted]@host/v1"),
        ("hf_" + "aB3" * 9, "[redacted]"),
        ("sk-proj-12345678901234567890", "[redacted]"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer [redacted]"),
        ("bearer 0123456789abcdefg, twice", "bearer [redacted], twice"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text, clean):
    assert redact(text) == clean


def test_a_variable_of_the_environment_that_is_named_as_a_key_is_a_secret(monkeypatch):
    for key in ("quiet-value-of-letters", "quiet-value-1"):
        assert redact(key) == key
        monkeypatch.setenv("SOME_SERVICE_TOKEN", key)
        assert redact(key) == "[redacted]"


def test_a_word_in_a_variable_that_is_named_as_a_key_is_none(monkeypatch):
    monkeypatch.setenv("SORT_KEY", "episode")
    monkeypatch.setenv("MY_TOKEN", "disabled")
    assert redact("an episode, disabled") == "an episode, disabled"


def test_a_secret_is_found_wherever_a_window_of_the_search_ends(monkeypatch):
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "quiet-value-1")
    for before in (4090, 4095, 4096, 5119, 5120, 8191):
        assert redact("." * before + "quiet-value-1.") == "." * before + "[redacted]."


@pytest.mark.parametrize(
    "settings",
    [
        {"api_key": "hidden-value"},
        {"extra_body": {"headers": [{"Authorization": "Bearer hidden-value"}]}},
        {"api_key_env": "hidden-value"},
        {"base_url": "http://me:hidden-value@host/v1"},
        {"base_url": "me:hidden-value@host/v1"},
        {"base_url": "https://host/v1?key=hidden-value&a=b"},
    ],
)
def test_a_setting_named_as_a_key_is_a_secret(settings):
    assert "hidden-value" in secrets_of(settings)


def test_the_name_of_a_variable_is_none():
    settings = {"api_key_env": "OPENAI_API_KEY", "base_url": "http://127.0.0.1:8000/v1"}
    assert not {"OPENAI_API_KEY", "http://127.0.0.1:8000/v1"} & secrets_of(settings)


def test_settings_keep_their_form_without_their_secrets():
    settings = {"seed": 1, f"x{KEY}": [KEY, None, ("a", 0.5)], "env": {"id": "DoorKey"}}
    clean = redact_all(settings)
    assert clean == {
        "seed": 1,
        "x[redacted]": ["[redacted]", None, ["a", 0.5]],
        "env": {"id": "DoorKey"},
    }


@pytest.mark.parametrize(
    "piece",
    ["a", "\\", "%25", "\\n", "n\\n", KEY[:7], KEY[:-1], f"{KEY[:-1]} ", "s ", "s\u200b", "\x1b[",
     "\\u0073", "&#0", "://a:", "bearer ", "api_key=", "sk-", "İ", KEY],
)  # fmt: skip
def test_time_is_linear_in_the_text(piece):
    def seconds(length: int) -> float:
        text = piece * (length // len(piece))
        started = time.process_time()
        redact(text)
        return time.process_time() - started

    seconds(1_000)
    # A quadratic search would take 64 times as long.
    assert seconds(80_000) < 24 * max(min(seconds(10_000) for _ in range(3)), 0.002)


# ---- logs and streams ----


def log_of(caplog) -> str:
    return "\n".join(logging.Formatter().format(record) for record in caplog.records)


def test_every_record_of_any_logger_is_redacted(caplog):
    with redacted_log(), caplog.at_level("DEBUG"):
        logging.getLogger("httpcore").debug("headers %r", [(b"authorization", KEY.encode())])
        logging.getLogger("torchrl").warning(f"failed: {KEY}")
        try:
            raise RuntimeError(f"no: {KEY}")
        except RuntimeError:
            logging.getLogger("other").exception("it failed")
        logging.getLogger("other").info("%d%% done", 5)
    told = log_of(caplog)
    assert not leaks(told)
    assert "RuntimeError: no: [redacted]" in told and "5% done" in told
    logging.getLogger("other").error("as it was %s", "before")
    assert caplog.records[-1].args == ("before",)


def test_a_record_that_cannot_be_formatted_reaches_its_handler_all_the_same():
    with redacted_log():
        record = logging.getLogger("other").makeRecord("o", 30, "f", 1, "%d", ("no number",), None)
    assert (record.msg, record.args) == ("%d", ("no number",))


def test_streams_are_redacted_tracebacks_too(monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    factory = logging.getLogRecordFactory()
    try:
        redact_output()
        print("key", KEY, flush=True)  # noqa: T201
        sys.stdout.writelines(["a\n", f"{KEY}\n"])
        sys.excepthook(ValueError, ValueError(f"bad {KEY}"), None)
        assert not sys.stdout.isatty()
    finally:
        logging.setLogRecordFactory(factory)
    assert out.getvalue() == "key [redacted]\na\n[redacted]\n"
    assert "ValueError: bad [redacted]" in err.getvalue()
