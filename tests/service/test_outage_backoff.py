from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from lore_torchrl.service import OutageBackoff


def travelled(part):
    return json.loads(json.dumps(part.state_dict()))


def fail(pause, **how):
    """One call that fails, as soon as one may be made; return the pause after it."""
    pause.advance(pause.left)
    pause.begin_call()
    pause.observe(ok=False, **how)
    return pause.left


def test_pauses_of_an_outage_double_up_to_their_maximum():
    pause = OutageBackoff(base_steps=3, max_free_steps=10, max_steps=20)
    assert [fail(pause) for _ in range(5)] == [3, 6, 12, 20, 20]
    pause.observe(ok=True)
    assert not pause.out and fail(pause) == 3


def test_pauses_after_calls_that_cost_nothing_stay_shorter():
    pause = OutageBackoff(base_steps=3, max_free_steps=10, max_steps=20)
    assert [fail(pause, free=True) for _ in range(4)] == [3, 6, 10, 10]
    assert [fail(pause) for _ in range(3)] == [10, 20, 20]


def test_failures_of_calls_in_flight_together_count_once():
    pause = OutageBackoff(base_steps=4)
    for _ in range(8):
        pause.observe(ok=False)
    assert pause.left == 4
    pause.advance(3)
    pause.observe(ok=False)
    assert pause.left == 1


def test_single_unreadable_answers_pause_nothing_and_three_in_a_row_do():
    pause = OutageBackoff(base_steps=4)
    for _ in range(4):
        assert [fail(pause, lasting=False) for _ in range(2)] == [0, 0]
        pause.observe(ok=True)
    assert [fail(pause, lasting=False) for _ in range(5)] == [0, 0, 4, 8, 16]


def test_an_unreadable_answer_to_the_probing_call_ends_the_outage():
    pause = OutageBackoff(base_steps=4)
    assert fail(pause) == 4
    assert fail(pause, lasting=False) == 0 and not pause.out


def test_failures_that_last_end_a_row_of_unreadable_answers():
    pause = OutageBackoff(base_steps=4)
    assert [fail(pause, lasting=False) for _ in range(2)] == [0, 0]
    assert fail(pause) == 4
    assert fail(pause, lasting=False) == 0 and not pause.out


def test_calls_that_were_not_made_do_not_lengthen_the_pauses():
    pause = OutageBackoff(base_steps=4)
    fail(pause)
    for _ in range(5):
        pause.advance(pause.left)
        pause.begin_call()
        pause.observe(ok=False, lasting=None)
        assert pause.left == 8


def test_the_next_pause_begins_with_the_probing_call_which_may_never_end():
    pause = OutageBackoff(base_steps=4)
    fail(pause)
    pause.advance(4)
    pause.begin_call()
    assert pause.left == 8 and not pause.ready


@settings(max_examples=40, deadline=None)
@given(
    run=st.lists(st.tuples(st.floats(-1, 1), st.booleans(), st.integers(0, 4)), max_size=40),
    cut=st.integers(1, 40),
)
def test_resumed_pauses_go_on_the_same(run, cut):
    def play(outage, kind, flag, steps):
        outage.begin_call()
        outage.observe(ok=flag, lasting=kind > 0, free=kind > 0.5)
        outage.advance(steps)
        return outage.left

    outage = resumed = OutageBackoff(2, 8, 16)
    for n, seen in enumerate(run):
        if n == cut:
            resumed = OutageBackoff(2, 8, 16)
            resumed.load_state_dict(travelled(outage))
        expected = play(outage, *seen)
        if resumed is not outage:
            assert play(resumed, *seen) == expected
            assert resumed.steps == outage.steps
