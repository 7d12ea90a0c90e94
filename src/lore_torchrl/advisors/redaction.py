"""Keeping keys and passwords out of whatever is shown or written to a disk.

A secret of this process is known once (:func:`remember`) and hidden wherever text leaves
the process, in every spelling that a server could send it back in.
"""

from __future__ import annotations

import base64
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

REDACTED = "[redacted]"

_SECRET_NAME = re.compile(
    r"(?:api|access|auth|secret|private)[-_]?key|(?:^|[-_])token$|secret|passw|credential"
    r"|authorization|bearer",
    re.IGNORECASE,
)
_SECRET_VARIABLE = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS)$")
# What looks like a secret, wherever it came from.
_PATTERNS = (
    re.compile(r"(?<=://)[^/\s\"']+(?=@)"),
    re.compile(r"(?i)(?<=authorization: bearer )\s*[^\s\"',;]+"),
    re.compile(r"(?i)(?<=bearer )\s*(?=[^\s\"',;]{0,64}\d)[^\s\"',;]{16,}"),
    re.compile(r"\b(?:sk|pk|rk|gsk|xai)[-_](?=[A-Za-z_-]{0,64}\d)[A-Za-z0-9_-]{20,}"),
    re.compile(r"\b(?:hf_|ghp_|AIza)[A-Za-z0-9_-]{20,}"),
    re.compile(r"(?i)(?<=api[-_]key[=:])\s*[^\s\"'&,;]+"),
)
# What a variable that is named as a key holds, if it is one: SORT_KEY=episode is none.
_LIKE_A_KEY = re.compile(r"(?=.*\d)(?=.*[A-Za-z]).{12,}|.{16,}", re.DOTALL)
# Shorter values are words such as "none", "EMPTY" and "ollama", which stand for no key.
_SHORTEST = 7
# How far settings are searched: deep enough for wrappers around a client's headers, and
# never through a model, a library or a large cache.
_DEEPEST = 6
_WIDEST = 64
# Characters of foreign text that are looked at for each one that is shown.
_WINDOW = 16
_OPAQUE = {"torch", "torchrl", "tensordict", "transformers", "tokenizers", "numpy", "sqlite3"}
# What may stand between a secret's characters and does not hide it from a reader: white space,
# what has no width, colours of a terminal, and all these as escapes.
_BETWEEN = re.compile(
    r"[\s\x00-\x1a\x1c-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    r"\ufe00-\ufe0f\ufeff]++"
    r"|(?:\x1b|\\++(?:x|u00)1b)(?:\[[0-?]{0,16}[ -/]{0,4}[@-~])?"
    r"|\\++(?:[nrtfbv0]|(?:x|u00)(?:[01][0-9a-f]|20|7f|a0|ad)|u20[06][0-9a-f]|u202[8-f]|ufeff)"
    r"|%(?:25){0,4}(?:0[9ad]|20)"
)
# Characters that are searched at once, and beyond them, where a head found there may end.
_WINDOW_SIZE, _OVERLAP = 4096, 1024
# Such in a row: an escape holds letters, at which a secret could begin as well.
_MOST_BETWEEN = 4
_LONGEST_ESCAPE = 12

_known: set[str] = set()


def remember(*secrets: str) -> None:
    """Have :func:`redact` hide these values from now on, in this process.

    Those of fewer than seven characters are words that stand for no key, and are not hidden.
    """
    _known.update(secret for secret in secrets if len(secret) >= _SHORTEST)


def forms(secret: str) -> tuple[str, ...]:
    """Return what a text holds that holds a secret: itself, or its hex or base64 code.

    The three base64 forms are those of a secret that begins 0, 1 or 2 bytes into a group of
    three: less the characters at its ends, which depend on its neighbours.

    Examples:
        >>> forms("hunter2")
        ('hunter2', '68756e74657232', 'aHVudGVyM', 'h1bnRlcj', 'odW50ZXIy')
    """
    raw = secret.encode("utf-8", "surrogatepass")
    codes = [base64.b64encode(bytes(before) + raw).decode() for before in range(3)]
    wholly = [
        code[-(-before * 4 // 3) : (before + len(raw)) * 4 // 3]
        for before, code in enumerate(codes)
    ]
    return (secret, raw.hex(), *wholly)


def redact(text: str, secrets: Iterable[str] = (), *, cut: bool = False) -> str:
    r"""Return ``text`` without the secrets of this process, and without what looks like one.

    Hidden are the values that were remembered, those of the environment's variables that are
    named as keys, and ``secrets``: plain, as hex or base64 (standard or URL-safe, wherever it
    begins), in either case, in escapes of JSON, HTML or URLs, and with white space, control or
    zero-width characters in between. The time is linear in the text.

    Args:
        text: Any text.
        secrets: Further values that must not appear. Default: none.

    Keyword Args:
        cut: Whether the text was cut off at its end, so that the beginning of a secret there
            is hidden too. Default: ``False``.

    Examples:
        >>> redact("401 for key hunter2hunter2", ["hunter2hunter2"])
        '401 for key [redacted]'
        >>> redact(r"h\u0075nter2 hun ter2 aHVudGVyMg==", ["hunter2"])
        '[redacted] [redacted] [redacted]g=='
        >>> redact("GET http://me:word@host/v1, Authorization: Bearer abc.def")
        'GET http://[redacted]@host/v1, Authorization: Bearer [redacted]'
    """
    known = {*_known, *_of_environment(), *secrets} - {""}
    # The longest first: one secret may begin with another.
    for secret in sorted(known, key=len, reverse=True):
        for form in forms(secret):
            text = _without(text, form.lower(), cut=cut)
    for pattern in _PATTERNS:
        text = pattern.sub(REDACTED, text)
    return text


def _without(text: str, form: str, *, cut: bool) -> str:
    # "İ" is the one character whose lower case has another length.
    folded = text.replace("İ", "I").lower()
    head = _head(form[:_SHORTEST])
    kept, done, at = [], 0, 0
    while at < len(folded):
        # In windows, since a search keeps all other threads waiting.
        found = head.search(folded, at, at + _WINDOW_SIZE + _OVERLAP)
        if found is None or found.start() >= at + _WINDOW_SIZE:
            at += _WINDOW_SIZE
            continue
        end = _end(folded, found.end(), form[_SHORTEST:], cut=cut)
        if end is None:
            at = found.start() + 1
        else:
            kept += text[done : found.start()], REDACTED
            done = at = end
    return "".join((*kept, text[done:])) if kept else text


def _end(folded: str, at: int, rest: str, *, cut: bool) -> int | None:
    """Return where the rest of a form ends that goes on at a place, ``None`` if it does not."""
    for char in rest:
        gaps = 0
        while (found := _spelled(char).match(folded, at)) is None:
            gap = _BETWEEN.match(folded, at)
            if gap is None or gaps == _MOST_BETWEEN:
                # What is left may be the beginning of an escape.
                ended = cut and len(folded[at:].lstrip("\\")) < _LONGEST_ESCAPE
                return len(folded) if ended else None
            at, gaps = gap.end(), gaps + 1
        at = found.end()
    return at


@lru_cache(maxsize=256)
def _head(form: str) -> re.Pattern[str]:
    first, *others = form
    between = f"(?:{_BETWEEN.pattern}){{0,{_MOST_BETWEEN}}}?"
    # At most one backslash: each of a run of them would be tried as the beginning.
    head = f"(?:{_escapes(first)})"
    return re.compile(head + "".join(f"(?>{between}{_spelled(c).pattern})" for c in others))


@lru_cache(maxsize=256)
def _spelled(char: str) -> re.Pattern[str]:
    if char == "\\":
        return re.compile(r"\\")
    # A line end's escape before an "n" is no "n" itself, nor that of an odd character a "u".
    between = f"(?:{_BETWEEN.pattern})"
    unless = {c: f"(?!{between}{{1,{_MOST_BETWEEN}}}{c})" for c in "nrtfbv0"}
    unless |= dict.fromkeys("ux", f"(?!{between})")
    return re.compile(rf"{unless.get(char, '')}\\*+(?:{_escapes(char, '')})")


def _escapes(char: str, backslash: str = r"\\") -> str:
    """Return the ways to write a character: escaped for JSON, a URL or HTML, or itself."""
    # The last two letters of base64's alphabet are others where it goes into a URL.
    chars = {char, char.upper(), {"+": "-", "-": "+", "/": "_", "_": "/"}.get(char, char)}
    ways = []
    for one in sorted(chars):
        code = f"{ord(one):x}"
        ways += [f"{backslash}u{code:0>4}", f"{backslash}x{code:0>2}"]
        ways += [f"%(?:25){{0,4}}{code:0>2}", f"&#0{{0,4}}{ord(one)};", f"&#x0{{0,4}}{code};"]
    return "|".join((*ways, *map(re.escape, sorted(chars))))


def _of_environment() -> set[str]:
    return {
        value
        for name, value in os.environ.items()
        if _SECRET_VARIABLE.search(name) and _LIKE_A_KEY.match(value)
    }


def redact_all(value: Any) -> Any:
    """Return settings as plain mappings and lists, with every text of theirs redacted.

    Args:
        value: A dataclass, a mapping, a sequence, or what they hold.

    Examples:
        >>> redact_all({"base_url": "http://me:word@host/v1", "steps": (1, 2)})
        {'base_url': 'http://[redacted]@host/v1', 'steps': [1, 2]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {redact_all(name): redact_all(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_all(each) for each in value]
    return value


@contextmanager
def redacted_log() -> Iterator[None]:
    """Redact every record that is logged meanwhile, whoever logs it and wherever it goes.

    The records of other libraries too: at ``DEBUG``, clients of HTTP log headers.
    """
    make = logging.getLogRecordFactory()
    logging.setLogRecordFactory(_redacting(make))
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)


def _redacting(make: Callable[..., logging.LogRecord]) -> Callable[..., logging.LogRecord]:
    def redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        try:
            message = record.getMessage()
        except (TypeError, ValueError):
            # Arguments that do not fit the message: the handler tells of it.
            return record
        record.msg, record.args = redact(message), ()
        if record.exc_info:
            # Formatters take it from here.
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return record

    return redacted


def redact_output() -> None:
    """Redact all that this process logs and writes to stdout and stderr, to its end.

    For scripts: tracebacks are written after ``main`` has ended.
    """
    logging.setLogRecordFactory(_redacting(logging.getLogRecordFactory()))
    sys.stdout, sys.stderr = _RedactedStream(sys.stdout), _RedactedStream(sys.stderr)


class _RedactedStream:
    """A text stream whose writes are redacted, one by one."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def visible(text: str) -> str:
    r"""Return ``text`` with what a terminal acts on, or does not show, as escapes.

    Control characters, zero-width characters, marks of writing direction and lone surrogates
    become ``\x1b``, ``\u202e`` and so on.

    Examples:
        >>> print(visible("red: \x1b[31m"))
        red: \x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def shown(text: str, limit: int = 200) -> str:
    r"""Return the start of foreign text, such as a server's, on one line fit for a log.

    It is redacted, its white space is collapsed, and what does not show is escaped.

    Args:
        text: Any text.
        limit: Characters at most. Default: ``200``.

    Examples:
        >>> shown("two\n lines"), shown("a" * 9, limit=5)
        ('two lines', 'aaaa…')
    """
    # Far more than is kept, so that a long text costs no more than a short one.
    window = redact(text[: _WINDOW * limit], cut=len(text) > _WINDOW * limit)
    line = visible(" ".join(window.split()))
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def secrets_of(owner: object) -> set[str]:
    """Return the secrets that an object's settings and the environment hold.

    A secret is a text of at least seven characters under a name such as ``api_key``,
    ``token`` or ``Authorization``, in the object, in what it holds, or in a variable of
    the environment; and the user, password and query in an address under a name such as
    ``base_url``. A name that ends with ``_env`` is that of a variable.

    Examples:
        >>> class Client:
        ...     api_key = "class attributes count too"
        >>> "class attributes count too" in secrets_of(Client())
        True
    """
    found = _of_environment()
    _collect(owner, found, seen=set(), depth=0)
    return found


def _collect(owner: object, found: set[str], *, seen: set[int], depth: int) -> None:
    if id(owner) in seen or depth > _DEEPEST:
        return
    if isinstance(owner, (type, ModuleType)) or inspect.isroutine(owner):
        return
    if type(owner).__module__.partition(".")[0] in _OPAQUE:
        return
    seen.add(id(owner))
    for name, value in _members(owner):
        # Pydantic and we wrap secrets so that printing does not show them.
        reveal = getattr(value, "get_secret_value", None) or getattr(value, "reveal", None)
        if callable(reveal):
            revealed = str(reveal())
            if len(revealed) >= _SHORTEST:
                found.add(revealed)
            continue
        if isinstance(value, bytes):
            value = value.decode("utf-8", errors="replace")
        if isinstance(value, str):
            parts: list[str] = []
            if _SECRET_NAME.search(name) and not _names_a_variable(name, value):
                # "Bearer <key>" hides the key as well as the whole.
                parts = [value, *value.split()]
            elif name.lower().endswith(("url", "uri", "proxy")):
                parts = _in_address(value)
            found |= {part for part in parts if len(part) >= _SHORTEST}
        elif not isinstance(value, (int, float, complex, type(None))):
            _collect(value, found, seen=seen, depth=depth + 1)


def _names_a_variable(name: str, value: str) -> bool:
    # Whoever puts the key itself there has not lost it.
    return name.lower().endswith("_env") and (value.isupper() or value in os.environ)


def _in_address(url: str) -> list[str]:
    user = url.partition("://")[2] or url
    user = user.rpartition("@")[0]
    query = url.partition("?")[2]
    return [user, *user.split(":"), *(word.partition("=")[2] for word in query.split("&"))]


def _members(owner: object) -> Iterator[tuple[str, Any]]:
    if isinstance(owner, Mapping):
        if len(owner) <= _WIDEST:
            yield from ((str(name), value) for name, value in list(owner.items()))
        return
    if isinstance(owner, (list, tuple, set, frozenset)):
        if len(owner) <= _WIDEST:
            yield from (("", value) for value in list(owner))
        return
    yield from list(getattr(owner, "__dict__", {}).items())
    # What is defined on the class, down to but without the builtin ones.
    for base in type(owner).__mro__[:-1]:
        yield from (
            (name, value) for name, value in vars(base).items() if isinstance(value, (str, bytes))
        )
    if is_dataclass(owner) and not hasattr(owner, "__dict__"):
        yield from ((f.name, getattr(owner, f.name)) for f in fields(owner))
