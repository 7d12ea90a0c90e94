from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lore_torchrl.service import Backoff, FailureBackoff, RateLimit


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


def test_failures_double_the_pause_up_to_its_maximum():
    backoff = FailureBackoff(base_steps=3, max_steps=20)
    pauses = []
    for _ in range(5):
        backoff.observe(ok=False)
        pauses.append(backoff.left)
        backoff.advance(backoff.left)
    assert pauses == [3, 6, 12, 20, 20]
    backoff.observe(ok=True)
    backoff.observe(ok=False)
    assert backoff.left == 3


def test_failures_of_calls_in_flight_together_count_once():
    backoff = FailureBackoff(base_steps=4)
    for _ in range(8):
        backoff.observe(ok=False)
    assert backoff.left == 4
    backoff.advance(3)
    backoff.observe(ok=False)
    assert backoff.left == 1


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
        return RateLimit(3, 7), FailureBackoff(2, 16), Backoff(window_episodes=2, max_factor=8)

    def play(parts, ret, flag, steps):
        rate, failures, backoff = parts
        rate.take(min(rate.left, steps))
        failures.observe(ok=flag)
        backoff.observe(ret, advised=flag)
        for part in (rate, failures):
            part.advance(steps)
        return rate.left, failures.left, backoff.factor

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
        (lambda: FailureBackoff(0), "base_steps=0"),
        (lambda: FailureBackoff(8, 4), "base_steps=8, max_steps=4"),
        (lambda: Backoff(margin=math.nan), "got nan"),
        (lambda: Backoff(window_episodes=0), "got 0"),
        (lambda: Backoff(max_factor=12), "power of 2, got 12"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
