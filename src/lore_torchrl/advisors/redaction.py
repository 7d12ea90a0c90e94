"""Keeping keys and passwords out of whatever is written to a disk."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
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
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
    re.compile(r"(?i)(?<=bearer )\s*[^\s\"',;]+"),
    re.compile(r"\b(?:sk|pk|rk|hf|gsk|xai|ghp)[-_][A-Za-z0-9_-]{8,}"),
    re.compile(r"\bAIza[A-Za-z0-9_-]{20,}"),
    re.compile(r"(?i)(?<=api[-_]key[=:])\s*[^\s\"'&,;]+"),
)
# Shorter values are words such as "none", "EMPTY" and "ollama", which stand for no key.
_SHORTEST = 7
# How far settings are searched: deep enough for wrappers around a client's headers, and
# never through a model, a library or a large cache.
_DEEPEST = 6
_WIDEST = 64
# Characters of foreign text that are looked at for each one that is shown.
_WINDOW = 16
_OPAQUE = {"torch", "torchrl", "tensordict", "transformers", "tokenizers", "numpy", "sqlite3"}


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Return ``text`` without the ``secrets``, and without what looks like one.

    Args:
        text: Any text.
        secrets: Values that must not appear. Default: none.

    Examples:
        >>> redact("401 for key hunter2hunter2", ["hunter2hunter2"])
        '401 for key [redacted]'
        >>> redact("GET http://me:word@host/v1, Authorization: Bearer abc.def")
        'GET http://[redacted]@host/v1, Authorization: Bearer [redacted]'
    """
    # The longest first: one secret may begin with another.
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    for pattern in _PATTERNS:
        text = pattern.sub(REDACTED, text)
    return text


def visible(text: str) -> str:
    r"""Return ``text`` with what a terminal acts on, or does not show, as escapes.

    Control characters, zero-width characters, marks of writing direction and lone surrogates
    become ``\\x1b``, ``\\u202e`` and so on.

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

    Args:
        text: Any text.
        limit: Characters at most. Default: ``200``.

    Examples:
        >>> shown("two\n lines"), shown("a" * 9, limit=5)
        ('two lines', 'aaaa…')
    """
    # Far more than is kept, so that a long text costs no more than a short one.
    line = visible(" ".join(text[: _WINDOW * limit].split()))
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def secrets_of(owner: object) -> set[str]:
    """Return the secrets that an object's settings and the environment hold.

    A secret is a text of at least seven characters under a name such as ``api_key``,
    ``token`` or ``Authorization``, in the object, in what it holds, or in a variable of
    the environment.

    Examples:
        >>> class Client:
        ...     api_key = "class attributes count too"
        >>> "class attributes count too" in secrets_of(Client())
        True
    """
    found = {
        value
        for name, value in os.environ.items()
        if _SECRET_VARIABLE.search(name) and len(value) >= _SHORTEST
    }
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
            if _SECRET_NAME.search(name):
                # "Bearer <key>" hides the key as well as the whole.
                found |= {part for part in (value, *value.split()) if len(part) >= _SHORTEST}
        elif not isinstance(value, (int, float, complex, type(None))):
            _collect(value, found, seen=seen, depth=depth + 1)


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
