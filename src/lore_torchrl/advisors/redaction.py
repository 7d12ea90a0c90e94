"""Keeping keys and passwords out of whatever is shown or written to a disk.

A secret is remembered once (:func:`remember`, :class:`Secret`). From then on :func:`redact`
replaces it in every text that leaves the process: logs, errors, files, W&B.
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
from itertools import islice
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
# How a secret may be spelled: escaped for JSON, a URL or HTML, and with white space, colors of
# a terminal, invisible characters and backslashes in between.
_INVISIBLE = (
    r"[\s\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    r"\ufe00-\ufe0f\ufeff]"
)
_ESCAPE = re.compile(
    r"(?:\x1b|\\+(?:x|u00)1b)(?:\[[0-?]{0,16}[ -/]{0,4}[@-~])?"
    r"|(?:\\+u(?P<json>[0-9a-f]{4})|\\+x(?P<byte>[0-9a-f]{2})|%(?:25)*(?P<url>[0-9a-f]{2})"
    r"|&\#x0{0,4}(?P<html>[0-9a-f]{2});)|&\#0{0,4}(?P<decimal>\d{2,3});"
    rf"|\\+[nrtfbv0]?|{_INVISIBLE}+"
)
# The last two letters of base64's alphabet are others where it goes into a URL.
_URL_BASE64 = str.maketrans("-_", "+/")
# Characters that one spelled secret may take. Of a text that is cut off, as many are dropped.
_LONGEST_SPELLING = 4096
# How far settings are searched: deep enough for wrappers around a client's headers, and
# never through a model, a library or a large cache.
_DEEPEST = 6
_WIDEST = 256
_OPAQUE = {"torch", "torchrl", "tensordict", "transformers", "tokenizers", "numpy", "sqlite3"}
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
    as keys: plain, as hex or base64, in either case, in escapes of JSON, HTML or URLs, and
    with white space, control or zero-width characters in between. The time is linear in the
    text. Of the text ``limit`` characters are kept; a secret at the cut leaves no beginning.
    """
    cut = limit is not None and len(text) > limit + _LONGEST_SPELLING
    if cut:
        text = text[: limit + _LONGEST_SPELLING]
    named = {
        value
        for name, value in os.environ.items()
        if _SECRET_VARIABLE.search(name) and _LIKE_A_KEY.match(value)
    }
    # The longest first: one secret may begin with another.
    if known := sorted(_known | named, key=len, reverse=True):
        for secret in known:
            text = text.replace(secret, REDACTED)
        text = _without_spellings(text, known)
    for pattern in _PATTERNS:
        text = pattern.sub(REDACTED, text)
    return (text[:-_LONGEST_SPELLING] if cut else text)[:limit]


def _without_spellings(text: str, secrets: Iterable[str]) -> str:
    plain, places = _unescaped(text)
    found = []
    for form in {form for secret in secrets for form in _forms(secret)}:
        at = plain.find(form)
        while at >= 0:
            found.append((places[at][0], places[at + len(form) - 1][1]))
            at = plain.find(form, at + len(form))
    kept, done = [], 0
    for start, end in sorted(found):
        if start >= done:
            kept += text[done:start], REDACTED
        done = max(done, end)
    return "".join((*kept, text[done:]))


def _unescaped(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return what a text spells, and where in it each character begins and ends."""
    # "İ" is the one character whose lower case has another length.
    text = text.replace("İ", "I").lower()
    parts: list[str] = []
    places: list[tuple[int, int]] = []
    done = 0

    def keep_until(at: int) -> None:
        parts.append(text[done:at])
        places.extend((index, index + 1) for index in range(done, at))

    for escape in _ESCAPE.finditer(text):
        keep_until(escape.start())
        done = escape.end()
        if escape.lastgroup is not None:
            code = escape[escape.lastgroup]
            char = chr(int(code, 10 if escape.lastgroup == "decimal" else 16))
            if char != "\\" and not re.match(_INVISIBLE, char):
                parts.append(char.lower() if char.isascii() else char)
                places.append(escape.span())
    keep_until(len(text))
    return "".join(parts).translate(_URL_BASE64), places


@lru_cache(maxsize=256)
def _forms(secret: str) -> tuple[str, ...]:
    """Return what an unescaped text holds that holds a secret: itself, its hex, its base64."""
    raw = secret.encode("utf-8", "surrogatepass")
    forms = [_unescaped(secret)[0], raw.hex()]
    # It may begin anywhere in base64's groups of three bytes. The characters at its ends
    # depend on its neighbors.
    for before in range(3):
        code = base64.b64encode(bytes(before) + raw).decode().lower()
        forms.append(code[-(-before * 4 // 3) : (before + len(raw)) * 4 // 3])
    return tuple(form for form in forms if len(form) >= _SHORTEST)


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
    found: set[str] = set()
    _collect(owner, found, set(), 0)
    return {secret for secret in found if len(secret) >= _SHORTEST}


def _collect(owner: object, found: set[str], seen: set[int], depth: int) -> None:
    if id(owner) in seen or depth > _DEEPEST:
        return
    if isinstance(owner, (type, ModuleType)) or inspect.isroutine(owner):
        return
    if type(owner).__module__.partition(".")[0] in _OPAQUE:
        return
    seen.add(id(owner))
    for name, value in list(islice(_members(owner), _WIDEST)):
        # Pydantic and we wrap secrets so.
        if hasattr(value, "get_secret_value"):
            found.add(str(value.get_secret_value()))
            continue
        if isinstance(value, bytes):
            value = value.decode("utf-8", errors="replace")
        if isinstance(value, str):
            names_it = name.lower().endswith("_env") and (value.isupper() or value in os.environ)
            if _SECRET_NAME.search(name) and not names_it:
                # "Bearer <key>" hides the key as well as the whole.
                found.update((value, *value.split()))
            elif name.lower().endswith(("url", "uri", "proxy")):
                found.update(_in_address(value))
        elif not isinstance(value, (int, float, complex, type(None))):
            _collect(value, found, seen, depth + 1)


def _in_address(url: str) -> list[str]:
    user = (url.partition("://")[2] or url).rpartition("@")[0]
    query = url.partition("?")[2]
    return [user, *user.split(":"), *(word.partition("=")[2] for word in query.split("&"))]


def _members(owner: object) -> Iterator[tuple[str, Any]]:
    if isinstance(owner, Mapping):
        yield from ((str(name), value) for name, value in owner.items())
    elif isinstance(owner, (list, tuple, set, frozenset)):
        yield from (("", value) for value in owner)
    else:
        yield from getattr(owner, "__dict__", {}).items()
        if is_dataclass(owner) and not hasattr(owner, "__dict__"):
            yield from ((field.name, getattr(owner, field.name)) for field in fields(owner))
        # A class may name its key beside its methods.
        for base in type(owner).__mro__[:-1]:
            yield from ((name, value) for name, value in vars(base).items() if type(value) is str)
