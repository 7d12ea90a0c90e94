"""What foreign text may do to a log, and what may be read in it."""

from __future__ import annotations

import pytest

from lore_torchrl.advisors.redaction import shown


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


@pytest.mark.parametrize("char", ["a", "\n", "\x1b", "\ud800", "é"])
@pytest.mark.parametrize("limit", [1, 20, 200])
def test_foreign_text_is_short_however_long_it_was(char, limit):
    assert len(shown(char * 1_000_000, limit)) <= limit
    assert len(shown("x" + char * 1_000_000, limit)) <= limit
