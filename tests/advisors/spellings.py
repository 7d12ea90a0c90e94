"""A key as a server may send it back: every spelling that must be hidden."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from urllib.parse import quote

KEY = "sk-hush/plus+Very_0123456789-quiet"


def _percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode())


def _base64(text: str, *, url: bool = False) -> str:
    encode = base64.urlsafe_b64encode if url else base64.b64encode
    return encode(text.encode()).decode()


#: By name.
SPELLINGS = {
    "plain": KEY,
    "upper case": KEY.upper(),
    "bearer": f"Bearer {KEY}",
    "slash escaped": KEY.replace("/", r"\/"),
    "one letter escaped": KEY.replace("s", r"\u0073", 1),
    "every letter escaped": "".join(f"\\u{ord(char):04X}" for char in KEY),
    "escaped twice": json.dumps(json.dumps("".join(f"\\u{ord(char):04x}" for char in KEY))),
    "as bytes": "".join(f"\\x{ord(char):02x}" for char in KEY),
    "for HTML": "".join(f"&#{ord(char)};" for char in KEY),
    "for a URL": quote(KEY, safe=""),
    "every letter for a URL": _percent(KEY),
    "for a URL twice": quote(_percent(KEY)),
    "on two lines": f"{KEY[:9]}\n  {KEY[9:]}",
    "on two lines, escaped": f"{KEY[:9]}\\r\\n{KEY[9:]}",
    "a line end at every place": "\n".join(KEY),
    "spaced": " ".join(KEY),
    "zero width": "\u200b".join(KEY),
    "zero width, escaped": f"{KEY[:5]}\\u200b\\ufeff{KEY[5:]}",
    "NUL": f"{KEY[:5]}\0{KEY[5:]}",
    "coloured": f"{KEY[:9]}\x1b[31m{KEY[9:]}",
    "hex": KEY.encode().hex(),
    "hex, upper case": KEY.encode().hex().upper(),
    "base64": _base64(KEY),
    "base64 of two lines": f"{_base64(KEY)[:19]}\n{_base64(KEY)[19:]}",
    "base64 for a URL": _base64(KEY, url=True),
    **{f"base64 after {n} bytes": _base64("x" * n + KEY + "y") for n in (1, 2, 3)},
    "base64 with bearer": _base64(f"Bearer {KEY}"),
    "base64 of an account, for a URL": _base64(f"user:{KEY}", url=True),
}


def fragments() -> list[str]:
    """Texts, in lower case without white space, none of which a redacted text may hold."""
    plain = KEY.lower()
    found = [plain[:12], plain[-12:], KEY.encode().hex()[8:32], KEY.replace("/", r"\/").lower()]
    for url in (False, True):
        for before in range(3):
            # Well inside, where the neighbours do not matter.
            found.append(_base64("x" * before + KEY, url=url)[8:24].lower())
    found += [_percent(KEY)[9:36].lower(), "".join(f"&#{ord(c)};" for c in KEY[3:9])]
    found += ["".join(f"{prefix}{ord(c):02x}" for c in KEY[3:9]) for prefix in (r"\u00", r"\x")]
    return found


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
    for mark in (r"\u200b", r"\ufeff", r"\x00", r"\x1b[31m", r"\n", r"\r", "%25"):
        seen = seen.replace(mark, "%" if mark == "%25" else "")
    while "\\\\" in seen:
        seen = seen.replace("\\\\", "\\")
    return [fragment for fragment in fragments() if fragment in seen]
