from __future__ import annotations

import contextlib
import gc
import json
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lore_torchrl.advisors.errors import (
    AdviceError,
    EmptyAnswerError,
    MalformedError,
    NotFiniteError,
    NotJSONError,
)
from lore_torchrl.advisors.parsing import find_action, parse_answer

ACTIONS = ("turn left", "right", "go_forward")


@pytest.mark.parametrize(
    "text",
    [
        '{"action_prior": {"type": "discrete", "logits": [0, 1, 2]}, "confidence": 0.5}',
        '{"action_prior": {"logits": [0, 1, 2], "confidence": 0.5}}',
        '{"logits": [0, 1, 2.0], "confidence": 0.5, "reason": "why not"}',
        '{"logits": {"Turn Left": 0, "right": 1, "go forward": 2}, "confidence": 0.5}',
        '{"logits": {"A": 0, "B": 1, "C": 2}, "confidence": 0.5}',
        'Here you are:\n```json\n{"logits": [0, 1, 2], "confidence": 0.5}\n```\nGood luck {x}!',
        'I think {left} is bad, so {"logits": [0, 1, 2], "confidence": 0.5} it is.',
        '<think>{"logits": [9, 9, 9]}</think>{"logits": [0, 1, 2], "confidence": 0.5}',
        '<Thinking>{"logits": [9, 9, 9]}</Thinking>{"logits": [0, 1, 2], "confidence": 0.5}',
        # The chat template wrote the opening tag.
        '{"logits": [9, 9, 9]}</think>{"logits": [0, 1, 2], "confidence": 0.5}',
        # It thought once more, till it was cut off.
        '<think>a</think>{"logits": [0, 1, 2], "confidence": 0.5}<think>{"logits": [9, 9, 9]}',
        "<think>" + "Hm. " * 300_000 + '</think>{"logits": [0, 1, 2], "confidence": 0.5}',
        "Hm. " * 300_000 + '{"logits": [0, 1, 2], "confidence": 0.5}',
    ],
)
def test_logits_in_every_shape(text):
    preference = parse_answer(text, ACTIONS)
    assert preference.logits == (0.0, 1.0, 2.0)
    assert preference.confidence == 0.5


@pytest.mark.parametrize(
    "text",
    [
        '{"probabilities": [0.0, 0.25, 0.75]}',
        '{"probs": {"right": 0.25, "go_forward": 0.75}}',
        '{"probs": [0, 25, 75]}',
        '{"action_prior": {"probabilities": {"B": 1, "C": 3}}}',
    ],
)
def test_probabilities_in_every_shape(text):
    preference = parse_answer(text, ACTIONS)
    shares = [math.exp(value) for value in preference.logits]
    assert shares == pytest.approx([1e-4, 0.25, 0.75])
    assert preference.confidence == pytest.approx(0.75, abs=1e-3)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "right",
            "Right.",
            "**right**",
            '"right"',
            "Action: right",
            "B",
            "b)",
            "The answer is B.",
        ),
        *('{"action": "right"}', '{"action": 1}', '{"answer": "B"}', "1", "```\nright\n```"[4:9]),
        '{"action_prior": {"action": "RIGHT"}}',
    ],
)
def test_one_action_that_is_only_named(text):
    preference = parse_answer(text, ACTIONS)
    assert preference.logits == (0.0, 3.0, 0.0)
    assert 0.8 < preference.confidence < 1.0
    assert parse_answer('{"action": 1, "confidence": 0.1}', ACTIONS).confidence == 0.1


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", EmptyAnswerError),
        ("<think>only thoughts</think>", EmptyAnswerError),
        ('<think>cut off {"logits": [0, 1, 2]}', EmptyAnswerError),
        ("0" * 5000, NotJSONError),
        ("I would rather go right", NotJSONError),
        ('{"logits": [0, 1', NotJSONError),
        ("<html>Please sign in</html>", NotJSONError),
        ("[" * 100_000, NotJSONError),
        ('{"a":' * 100_000, NotJSONError),
        ('{"logits": [' + "9" * 5000 + ", 1, 1]}", NotJSONError),
        ("[0, 1, 2]", MalformedError),
        ("null", MalformedError),
        ("{}", MalformedError),
        ('{"logits": []}', MalformedError),
        ('{"logits": [0, 1]}', MalformedError),
        ('{"logits": [0, 1, 2, 3]}', MalformedError),
        ('{"logits": [0, 1, null]}', MalformedError),
        ('{"logits": [0, 1, true]}', MalformedError),
        ('{"logits": [0, 1, "2"]}', MalformedError),
        ('{"logits": "0 1 2"}', MalformedError),
        ('{"logits": {"right": 1}}', MalformedError),
        ('{"logits": {"jump": 1, "right": 1, "C": 2}}', MalformedError),
        ('{"logits": [0, 1, 1e30]}', MalformedError),
        ('{"logits": [0, 1, NaN]}', NotFiniteError),
        ('{"logits": [0, 1, -Infinity]}', NotFiniteError),
        ('{"logits": [0, 1, 1e999]}', NotFiniteError),
        ('{"logits": [0, 1, ' + "9" * 4000 + "]}", MalformedError),
        ('{"logits": [' + "true, " * 5000 + "1]}", MalformedError),
        ('{"logits": {' + ", ".join(f'"{i}": "x"' for i in range(5000)) + "}}", MalformedError),
        ('{"logits": {"' + "\\u001b" * 5000 + '": 1, "right": 1, "C": 2}}', MalformedError),
        ('{"action": "' + "\\ud800" * 5000 + '"}', MalformedError),
        ('{"probs": [0, 0, 0]}', MalformedError),
        ('{"probs": [-1, 1, 1]}', MalformedError),
        ('{"probs": [NaN, 1, 1]}', NotFiniteError),
        ('{"probs": [1e308, 1e308, 1e308]}', MalformedError),
        ('{"action": "jump"}', MalformedError),
        ('{"action": 3}', MalformedError),
        ('{"action": -1}', MalformedError),
        ('{"action": 1.5}', MalformedError),
        ('{"logits": [0, 1, 2], "confidence": 1.1}', MalformedError),
        ('{"logits": [0, 1, 2], "confidence": -0.1}', MalformedError),
        ('{"logits": [0, 1, 2], "confidence": "high"}', MalformedError),
        ('{"logits": [0, 1, 2], "confidence": NaN}', NotFiniteError),
        ('{"action_prior": [0, 1, 2]}', MalformedError),
        ('{"action_prior": {"logits": {"right": {}}}}', MalformedError),
    ],
)
def test_anything_else_is_an_error_of_its_kind(text, kind):
    with pytest.raises(kind) as error:
        parse_answer(text, ACTIONS)
    assert type(error.value) is kind
    assert len(str(error.value)) < 500
    assert str(error.value).isprintable()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["logits", "probs", "action_prior", "confidence", "action", "B", "right"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(JSON | st.text(max_size=60))
def test_whatever_comes_is_read_or_an_advice_error(value):
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        preference = parse_answer(text, ACTIONS)
    except AdviceError:
        return
    assert len(preference.logits) == 3
    assert all(abs(value) <= 1e4 for value in preference.logits)
    assert 0.0 <= preference.confidence <= 1.0


def cost(text):
    """Return the processor time of parsing a text in seconds, whatever else the machine does."""
    gc.disable()
    started = time.thread_time()
    with contextlib.suppress(MalformedError):
        parse_answer(text, ACTIONS)
    gc.enable()
    return time.thread_time() - started


PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<think></think>", "<", "```", "```json\n", "```{}```", "{", "{}"),
        *(
            '{"a":',
            '{"a":{},',
            '{"a":[{},',
            '{"logits":[',
            '{"logits":{"a":',
            '{"',
            '"',
            "[",
            "[],",
        ),
        *("9", "9.", "the ", "the best action", "answer:", "- ", "a_", " ", "\n", "\\", "\x00"),
    ]
) | st.text('<>/think`{}[]:,"\\ -_9', min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(PIECES, PIECES, PIECES)
def test_the_time_grows_linearly_whatever_repeats(before, unit, after):
    short, long, longest = (
        before + unit * (size // len(unit)) + after for size in (1 << 14, 1 << 16, 1 << 20)
    )
    # Quadratic time would grow sixteenfold with each step, from tenths of a second on.
    assert cost(long) < 10 * cost(short) + 0.1
    assert cost(longest) < 0.5


def test_names_win_over_letters():
    assert find_action("B", ("b", "a")) == 0
    assert find_action("C", ("b", "a")) is None


def test_plan_valid_actions_and_subgoal_are_read_beside_a_preference():
    answer = {
        "logits": [0, 1, 2],
        "plan": ["forward", "turn_left", 1],
        "valid_actions": ["B", "forward"],
        "subgoal": "open the door",
    }
    actions = ("turn left", "turn right", "forward")
    advice = parse_answer(json.dumps(answer), actions, ("open the door", "take the key"))
    assert advice.plan == (2, 0, 1) and advice.valid == (False, True, True)
    assert advice.subgoal == "open the door"


@pytest.mark.parametrize(
    "wrong", [{"plan": ["fly"]}, {"plan": "left"}, {"valid_actions": [None]}, {"subgoal": "sleep"}]
)
def test_what_names_nothing_is_an_error(wrong):
    with pytest.raises(MalformedError):
        parse_answer(json.dumps({"logits": [0, 1], **wrong}), ("left", "right"), ("eat",))


def test_a_name_may_be_written_in_parts():
    assert find_action("u\u0308ber", ("unter", "\u00fcber")) == 1
