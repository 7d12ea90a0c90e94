from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lore_torchrl.service import Backoff, OutagePause, RateLimit


def travelled(part):
    return json.loads(json.dumps(part.state_dict()))


def test_the_rate_is_counted_in_a_sliding_window():
    rate = RateLimit(2, per_steps=10)
    left = []
    for _ in range(12):
        left.append(rate.left)
        if rate.left:
            rate.take(1)
        rate.advance(4)
    #        calls at 0, 4, 12 and 16, 24 and 28, ...: a window of 10 holds two of them
    assert left == [2, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0]


def test_a_smaller_rate_after_a_resume_is_kept():
    rate = RateLimit(5, per_steps=10)
    rate.take(5)
    smaller = RateLimit(2, per_steps=10)
    smaller.load_state_dict(travelled(rate))
    assert smaller.left == 0


def fail(pause, **how):
    """One call that fails, as soon as one may be made; return the pause after it."""
    pause.advance(pause.left)
    pause.begin_call()
    pause.observe(ok=False, **how)
    return pause.left


def test_pauses_of_an_outage_double_up_to_their_maximum():
    pause = OutagePause(base_steps=3, max_free_steps=10, max_steps=20)
    assert [fail(pause) for _ in range(5)] == [3, 6, 12, 20, 20]
    pause.observe(ok=True)
    assert not pause.out and fail(pause) == 3


def test_pauses_after_calls_that_cost_nothing_stay_shorter():
    pause = OutagePause(base_steps=3, max_free_steps=10, max_steps=20)
    assert [fail(pause, free=True) for _ in range(4)] == [3, 6, 10, 10]
    assert [fail(pause) for _ in range(3)] == [10, 20, 20]


def test_failures_of_calls_in_flight_together_count_once():
    pause = OutagePause(base_steps=4)
    for _ in range(8):
        pause.observe(ok=False)
    assert pause.left == 4
    pause.advance(3)
    pause.observe(ok=False)
    assert pause.left == 1


def test_single_unreadable_answers_pause_nothing_and_three_in_a_row_do():
    pause = OutagePause(base_steps=4)
    for _ in range(4):
        assert [fail(pause, lasting=False) for _ in range(2)] == [0, 0]
        pause.observe(ok=True)
    assert [fail(pause, lasting=False) for _ in range(5)] == [0, 0, 4, 8, 16]


def test_an_unreadable_answer_to_the_probing_call_ends_the_outage():
    pause = OutagePause(base_steps=4)
    assert fail(pause) == 4
    assert fail(pause, lasting=False) == 0 and not pause.out


def test_failures_that_last_end_a_row_of_unreadable_answers():
    pause = OutagePause(base_steps=4)
    assert [fail(pause, lasting=False) for _ in range(2)] == [0, 0]
    assert fail(pause) == 4
    assert fail(pause, lasting=False) == 0 and not pause.out


def test_calls_that_were_not_made_do_not_lengthen_the_pauses():
    pause = OutagePause(base_steps=4)
    fail(pause)
    for _ in range(5):
        pause.advance(pause.left)
        pause.begin_call()
        pause.withdraw_call()
        assert pause.left == 8


def test_the_next_pause_begins_with_the_probing_call_which_may_never_end():
    pause = OutagePause(base_steps=4)
    fail(pause)
    pause.advance(4)
    pause.begin_call()
    assert pause.left == 8 and not pause.ready


def test_the_factor_doubles_without_uplift_and_halves_with_it():
    backoff = Backoff(margin=0.5, window_episodes=2, max_factor=4)
    factors = []
    for uplift in (0.4, 0.0, -9.0, 0.5, 0.6, 0.7, 0.1):
        for _ in range(2):
            backoff.observe(1.0, advised=False)
        for _ in range(2):
            backoff.observe(1.0 + uplift, advised=True)
        factors.append(backoff.factor)
    assert factors == [2, 4, 4, 2, 1, 1, 2]


def test_nothing_is_judged_before_both_kinds_are_known():
    backoff = Backoff(window_episodes=3)
    for _ in range(9):
        backoff.observe(-5.0, advised=True)
    assert backoff.factor == 1
    backoff.observe(math.nan, advised=False)
    for _ in range(2):
        backoff.observe(0.0, advised=False)
    assert backoff.factor == 1
    backoff.observe(0.0, advised=False)
    assert backoff.factor == 2
    backoff.observe(0.0, advised=False)
    assert backoff.factor == 2  # once for each window of advised episodes


@settings(max_examples=40, deadline=None)
@given(
    run=st.lists(st.tuples(st.floats(-1, 1), st.booleans(), st.integers(0, 4)), max_size=40),
    cut=st.integers(1, 40),
)
def test_resumed_pauses_go_on_the_same(run, cut):
    def fresh():
        return RateLimit(3, 7), OutagePause(2, 8, 16), Backoff(window_episodes=2, max_factor=8)

    def play(parts, ret, flag, steps):
        rate, outage, backoff = parts
        rate.take(min(rate.left, steps))
        outage.begin_call()
        outage.observe(ok=flag, lasting=ret > 0, free=ret > 0.5)
        backoff.observe(ret, advised=flag)
        for part in (rate, outage):
            part.advance(steps)
        return rate.left, outage.left, backoff.factor

    parts = resumed = fresh()
    for n, seen in enumerate(run):
        if n == cut:
            resumed = fresh()
            for old, new in zip(parts, resumed, strict=True):
                new.load_state_dict(travelled(old))
        expected = play(parts, *seen)
        if resumed is not parts:
            assert play(resumed, *seen) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RateLimit(0, 10), "calls=0, per_steps=10"),
        (lambda: RateLimit(1, 0), "per_steps=0"),
        (lambda: OutagePause(0), "base_steps=0"),
        (lambda: OutagePause(8, 4), "base_steps=8, max_free_steps=4"),
        (lambda: OutagePause(8, 16, 12), "max_free_steps=16, max_steps=12"),
        (lambda: Backoff(margin=math.nan), "got nan"),
        (lambda: Backoff(window_episodes=0), "got 0"),
        (lambda: Backoff(max_factor=12), "power of 2, got 12"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
