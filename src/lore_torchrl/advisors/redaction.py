"""Keeping keys and passwords out of whatever is shown or written to a disk.

A secret is remembered once (:func:`remember`, :class:`Secret`). From then on :func:`redact`
replaces it in every text that leaves the process: logs, errors, files, W&B.
"""

from __future__ import annotations

import base64
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
# What a variable that is named as a key holds, if it is one: SORT_KEY=episode is none.
_LIKE_A_KEY = re.compile(r"(?=.*\d)(?=.*[A-Za-z]).{12,}|.{16,}", re.DOTALL)
# What looks like a secret, wherever it came from.
_PATTERNS = (
    re.compile(r"(?<=://)[^/\s\"']+(?=@)"),
    re.compile(r"(?i)(?<=authorization: bearer )\s*[^\s\"',;]+"),
    re.compile(r"(?i)(?<=bearer )\s*(?=[^\s\"',;]{0,64}\d)[^\s\"',;]{16,}"),
    re.compile(r"\b(?:sk|pk|rk|gsk|xai)[-_](?=[A-Za-z_-]{0,64}\d)[A-Za-z0-9_-]{20,}"),
    re.compile(r"\b(?:hf_|ghp_|AIza)[A-Za-z0-9_-]{20,}"),
    re.compile(r"(?i)(?<=api[-_]key[=:])\s*[^\s\"'&,;]+"),
)
# Shorter values are placeholders such as "none", "EMPTY" and "ollama".
_SHORTEST = 7
# White space, or a line's end that is escaped, which may stand between the characters of a secret.
_GAP = r"(?:\s|\\{1,16}[nrt])*+"
# Characters that one spelled secret may take. Of a text that is cut off, as many are dropped.
_LONGEST_SPELLING = 4096
# How deep settings are searched: through wrappers, to a client's headers.
_DEEPEST = 6
# Characters of foreign text that are read for each one that is shown.
_WINDOW = 16

_known: set[str] = set()


class Secret:
    """An API key that no repr, log line or error shows; :func:`redact` hides it from now on.

    Pickled, one that came from an environment variable travels as the variable's name.

    Raises:
        ValueError: If it holds what no HTTP header may. The message does not show it.
    """

    __slots__ = ("_value", "_variable")

    def __init__(self, value: str, *, variable: str | None = None) -> None:
        if not all("!" <= char <= "~" for char in value):
            raise ValueError(
                f"The API key{f' in {variable}' if variable else ''} holds characters that no "
                "HTTP header may, such as spaces or line ends."
            )
        self._value = value
        self._variable = variable
        remember(value)

    @classmethod
    def from_env(cls, variable: str) -> Secret | None:
        """Return the key in an environment variable, ``None`` where it is unset or empty."""
        value = os.environ.get(variable, "").strip()
        return cls(value, variable=variable) if value else None

    def get_secret_value(self) -> str:
        """Return the key itself, for the one header that needs it."""
        return self._value

    def __repr__(self) -> str:
        return "Secret('***')"

    def __reduce__(self) -> tuple:
        if self._variable is not None:
            return Secret.from_env, (self._variable,)
        return Secret, (self._value,)


def remember(*secrets: str) -> None:
    """Have :func:`redact` hide these values from now on, in this process.

    Those of fewer than seven characters are placeholders, and are not hidden.
    """
    _known.update(secret for secret in secrets if len(secret) >= _SHORTEST)


def redact(text: str, *, limit: int | None = None) -> str:
    r"""Return ``text`` without the secrets of this process, and without what looks like one.

    Hidden are the remembered values and those of the environment's variables that are named
    as keys: plain, in base64, in either case, in escapes of JSON or URLs, and with white space in
    between. The time is linear in the text. Of the text ``limit`` characters are kept; a secret
    at the cut leaves no beginning.
    """
    cut = limit is not None and len(text) > limit + _LONGEST_SPELLING
    if cut:
        text = text[: limit + _LONGEST_SPELLING]
    # The longest first: one secret may begin with another.
    for secret in sorted(_known | _named(tuple(os.environ.items())), key=len, reverse=True):
        text = _spelled(secret).sub(REDACTED, text)
    for pattern in _PATTERNS:
        text = pattern.sub(REDACTED, text)
    return (text[:-_LONGEST_SPELLING] if cut else text)[:limit]


@lru_cache(maxsize=8)
def _named(environment: tuple[tuple[str, str], ...]) -> set[str]:
    """Return what variables hold that are named as keys."""
    return {
        value
        for name, value in environment
        if _SECRET_VARIABLE.search(name) and _LIKE_A_KEY.match(value)
    }


@lru_cache(maxsize=256)
def _spelled(secret: str) -> re.Pattern[str]:
    """Return what finds a secret however it is spelled."""
    # Backslashes double whenever JSON is put into JSON.
    chars = (
        rf"(?:\\{{0,16}}{re.escape(char)}|\\{{1,16}}u{ord(char):04x}|%{ord(char):02x})"
        for char in secret
    )
    base64_form = base64.b64encode(secret.encode(errors="replace")).decode().rstrip("=")
    return re.compile(f"{_GAP.join(chars)}|{re.escape(base64_form)}", re.IGNORECASE)


def redact_all(value: Any) -> Any:
    """Return settings as plain mappings and lists, with every text of theirs redacted."""
    if is_dataclass(value):
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
    """Redact every record that is logged meanwhile, by other libraries too."""
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
            # Arguments that do not fit the message: the handler reports them.
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
    """Return ``text`` with what a terminal acts on, or does not show, as escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def shown(text: str, limit: int = 200) -> str:
    r"""Return the start of foreign text, such as a server's, on one line fit for a log.

    It is redacted and cut at ``limit`` characters, its white space is collapsed, and what does
    not show is escaped.
    """
    # Far more than is kept, since white space is collapsed; not all, which may be a megabyte.
    line = visible(" ".join(redact(text, limit=_WINDOW * limit).split()))
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def secrets_of(owner: object) -> set[str]:
    """Return the secrets that an object's settings hold.

    A secret is a text of at least seven characters under a name such as ``api_key``,
    ``token`` or ``Authorization``, in the object or in what it holds; and the user, password
    and query in an address under a name such as ``base_url``. A name that ends with ``_env``
    is that of a variable.
    """
    return {secret for secret in _secrets("", owner, _DEEPEST, set()) if len(secret) >= _SHORTEST}


def _secrets(name: str, value: object, depth: int, seen: set[int]) -> Iterator[str]:
    # Pydantic and we wrap secrets so.
    if hasattr(value, "get_secret_value"):
        yield str(value.get_secret_value())
    elif isinstance(value, str):
        names_it = name.lower().endswith("_env") and (value.isupper() or value in os.environ)
        if _SECRET_NAME.search(name) and not names_it:
            # "Bearer <key>" hides the key as well as the whole.
            yield from (value, *value.split())
        elif name.lower().endswith(("url", "uri", "proxy")):
            yield from _in_address(value)
    elif depth and id(value) not in seen:
        seen.add(id(value))
        for member, held in _members(value):
            yield from _secrets(member, held, depth - 1, seen)


def _in_address(url: str) -> list[str]:
    user = (url.partition("://")[2] or url).rpartition("@")[0]
    query = url.partition("?")[2]
    return [user, *user.split(":"), *(word.partition("=")[2] for word in query.split("&"))]


def _members(owner: object) -> Iterable[tuple[str, Any]]:
    if isinstance(owner, Mapping):
        return ((str(name), value) for name, value in owner.items())
    if isinstance(owner, (list, tuple)):
        return (("", value) for value in owner)
    if is_dataclass(owner):
        return ((field.name, getattr(owner, field.name)) for field in fields(owner))
    if isinstance(owner, (type, ModuleType)):
        return ()
    return getattr(owner, "__dict__", {}).items()
