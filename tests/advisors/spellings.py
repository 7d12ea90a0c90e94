"""A key as a server may send it back: every spelling that must be hidden."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from urllib.parse import quote

KEY = "sk-hush/plus+Very_0123456789-quiet"


def _percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode())


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


#: By name.
SPELLINGS = {
    "plain": KEY,
    "upper case": KEY.upper(),
    "bearer": f"Bearer {KEY}",
    "slash escaped": KEY.replace("/", r"\/"),
    "one letter escaped": KEY.replace("s", r"\u0073", 1),
    "every letter escaped": "".join(f"\\u{ord(char):04X}" for char in KEY),
    "escaped twice": json.dumps(json.dumps("".join(f"\\u{ord(char):04x}" for char in KEY))),
    "for a URL": quote(KEY, safe=""),
    "every letter for a URL": _percent(KEY),
    "on two lines": f"{KEY[:9]}\n  {KEY[9:]}",
    "on two lines, escaped": f"{KEY[:9]}\\r\\n{KEY[9:]}",
    "a line end at every place": "\n".join(KEY),
    "spaced": " ".join(KEY),
    "base64": _base64(KEY),
}


def fragments() -> list[str]:
    """Texts, in lower case without white space, none of which a redacted text may hold."""
    plain = KEY.lower()
    found = [plain[:12], plain[-12:], KEY.replace("/", r"\/").lower()]
    found += [_base64(KEY)[8:24].lower(), _percent(KEY)[9:36].lower()]
    return [*found, "".join(rf"\u00{ord(char):02x}" for char in KEY[3:9])]


def hostile_replies() -> Iterator[tuple]:
    """Answers of a chat server that put the key wherever there is room for text."""
    for spelling in SPELLINGS.values():
        # Escapes that JSON understands stay escapes; what it cannot hold is escaped.
        string = json.dumps(spelling)
        if "\\x" not in spelling and '"' not in spelling:
            string = string.replace("\\\\", "\\")
        header = "".join(char for char in spelling if char.isascii() and char.isprintable())
        said = {"action": 0, "reason": spelling, spelling: spelling}
        yield _saying(spelling, json.dumps(said))
        yield 200, {"choices": []}, {"Content-Encoding": header}
        yield 418, f'{{"detail": {string}}}'
        yield _saying(spelling, f'{{"action": 0, "why": {string}}}')
        yield 400, f"[{string}, {string}]"
        yield 200, spelling
        yield _saying(spelling, f"Sure, {spelling}! {json.dumps(said)}")
        yield 200, f'{{"error": {string}}}'
        yield _saying(spelling, spelling)
        yield _saying(spelling, json.dumps(said))
        yield _saying(spelling, json.dumps({"logits": {spelling: 1.0}}))
        yield _saying(spelling, json.dumps({"action": spelling}))
        yield _saying(spelling, json.dumps(said))
        yield _saying(spelling, json.dumps({spelling: 1}))
        yield _saying(spelling, json.dumps({"action": "left", "confidence": spelling}))
    yield 401, f'{{"error": {{"message": {string}, "code": {string}}}}}'


def _saying(spelling: str, content: str) -> tuple[int, dict]:
    message = {"role": spelling, "content": content}
    choice = {"message": message, "finish_reason": "stop"}
    return 200, {"choices": [choice], "model": spelling, "id": spelling}


def leaks(text: str) -> list[str]:
    """The fragments of the key that a text holds, however it is broken into lines."""
    seen = "".join(char for char in text.lower() if char.isprintable() and not char.isspace())
    for mark in (r"\n", r"\r"):
        seen = seen.replace(mark, "")
    while "\\\\" in seen:
        seen = seen.replace("\\\\", "\\")
    return [fragment for fragment in fragments() if fragment in seen]
