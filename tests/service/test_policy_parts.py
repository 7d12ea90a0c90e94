"""The call policy with all its parts switched on."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_steps import ROWS, make_policy, step

from lore_torchrl.service import (
    Cooldown,
    MacroBoundaries,
    Novelty,
    OutageBackoff,
    StepSignals,
    TDErrorSpike,
)


def triggered(*triggers):
    return make_policy(triggers=triggers, calls_per_step=ROWS)


def test_novelty_makes_a_row_eligible():
    policy = triggered(Novelty(0.9))
    assert step(policy, situations=["a", "b", "a"]) == [0, 1]
    assert step(policy, situations=["a", "b", "c"]) == [2]
    # A cached situation counts as visited too.
    assert step(policy, situations=["d", "a", "b"], candidates=[1, 2]) == []
    assert step(policy, situations=["d", "e", "d"]) == [1]


def test_a_spike_makes_a_row_eligible_until_it_calms_down():
    spike = TDErrorSpike()
    spike.warmup, spike.decay = 30, 0.999
    policy = triggered(spike)
    for n in range(10):
        assert step(policy, td_errors=[0.9, 1.1, 1.0 + 0.1 * (-1) ** n]) == []
    assert step(policy, td_errors=[1.0, 2.0, None]) == [1]
    assert step(policy) == [1]
    assert step(policy, td_errors=[1.0, 1.0, 1.0]) == []


def test_any_trigger_is_enough_beside_the_boundaries():
    policy = triggered(MacroBoundaries(), Novelty(0.9))
    assert step(policy, situations=["a"] * ROWS) == [0]
    seen = {"resets": [False, True, False], "rewards": None, "situations": [None, "a", "b"]}
    assert step(policy, **seen) == [1, 2]


def test_a_dead_advisor_is_asked_ever_more_seldom():
    outage = OutageBackoff(base_steps=ROWS, max_free_steps=ROWS, max_steps=8 * ROWS)
    policy = make_policy(outage=outage)
    asked = []
    for t in range(40):
        for _ in step(policy):
            asked.append(t)
            policy.observe_result(ok=False)
    assert asked == [0, 1, 3, 7, 15, 23, 31, 39]
    assert policy.stats()["outage_pause_left"] == 8 * ROWS
    policy.observe_result(ok=True)
    assert step(policy)


def test_what_tries_an_advisor_again_is_a_single_call():
    policy = make_policy(outage=OutageBackoff(base_steps=ROWS), calls_per_step=ROWS)
    assert len(step(policy)) == ROWS
    policy.observe_result(ok=False)
    assert [len(step(policy)) for _ in range(3)] == [1, 0, 1]
    policy.observe_result(ok=True)
    assert len(step(policy)) == ROWS


def test_switched_off_parts_leave_no_trace():
    policy = make_policy()
    always = {"cooldown", "outage"}
    assert set(policy.state_dict()) == always | {"turn", "step", "last_call_step"}
    left = {"budget_left", "cooldown_left", "outage_pause_left"}
    assert set(policy.stats()) == left | {"last_call_step"}


def test_an_older_state_leaves_new_parts_fresh():
    policy = make_policy(cooldown=Cooldown(9))
    step(policy)
    newer = make_policy(triggers=[Novelty(0.9)], cooldown=Cooldown(9))
    newer.load_state_dict(policy.state_dict())
    assert newer.cooldown.left == 9
    policy.load_state_dict(newer.state_dict())
    assert policy.cooldown.left == 9


def everything(total, *, pause, after_success, calls_per_step, always, min_beta):
    spike = TDErrorSpike(high=1.0, low=0.2)
    spike.warmup, spike.decay = 4, 0.9
    triggers = [MacroBoundaries(no_reward_steps=2), Novelty(0.6), spike]
    return make_policy(
        total,
        triggers=[] if always else triggers,
        cooldown=Cooldown(pause, after_success),
        min_beta=min_beta,
        calls_per_step=calls_per_step,
        outage=OutageBackoff(base_steps=2, max_free_steps=8, max_steps=16),
    )


limits = st.fixed_dictionaries(
    {
        "pause": st.integers(0, 12),
        "after_success": st.integers(0, 20),
        "calls_per_step": st.integers(1, 4),
        "always": st.booleans(),
        "min_beta": st.floats(0, 1),
    }
)


def in_rows(values):
    return st.lists(values, min_size=ROWS, max_size=ROWS)


steps_of_a_run = st.lists(
    st.tuples(
        st.fixed_dictionaries(
            {
                "scores": in_rows(st.floats(0, 1)),
                "resets": in_rows(st.booleans()),
                "candidates": st.lists(st.integers(0, ROWS - 1), unique=True),
                "rewards": st.one_of(st.none(), in_rows(st.floats(-1, 1))),
                "successes": in_rows(st.booleans()),
                "situations": in_rows(st.one_of(st.none(), st.sampled_from("abcd"))),
                "td_errors": in_rows(st.one_of(st.none(), st.floats(-5, 5))),
            }
        ),
        in_rows(st.booleans()),  # whether a call about this row brings advice
    ),
    max_size=40,
)


def play(policy, seen, good):
    chosen = step(policy, **seen)
    for row in chosen:
        policy.observe_result(ok=good[row])
    return chosen


@settings(max_examples=80, deadline=None)
@given(run=steps_of_a_run, total=st.integers(0, 12), limits=limits)
def test_no_limit_is_ever_overrun(run, total, limits):
    policy = everything(total, **limits)
    now, may_ask_at, calls = 0, 0, []
    for seen, good in run:
        now += 0 if seen["rewards"] is None else ROWS
        if any(seen["successes"]):
            may_ask_at = max(may_ask_at, now + limits["after_success"])
        paused_until = now + max(0, policy.outage.left - (seen["rewards"] is not None) * ROWS)
        chosen = play(policy, seen, good)
        calls += [now] * len(chosen)
        assert len(chosen) <= limits["calls_per_step"]
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= set(seen["candidates"])
        assert len(calls) <= total
        if chosen:
            assert now >= may_ask_at and now >= paused_until
            assert all(seen["scores"][row] >= limits["min_beta"] for row in chosen)
            may_ask_at = max(may_ask_at, now + limits["pause"])


@settings(max_examples=40, deadline=None)
@given(run=steps_of_a_run, cut=st.integers(1, 30), limits=limits)
def test_a_resumed_policy_chooses_the_same(run, cut, limits):
    policy = resumed = everything(30, **limits)
    for n, event in enumerate(run):
        if n == cut:
            resumed = everything(30, **limits)
            resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
            resumed.budget.load_state_dict(policy.budget.state_dict())
        expected = play(policy, *event)
        if resumed is not policy:
            assert play(resumed, *event) == expected
    assert resumed.state_dict() == policy.state_dict()


def test_rows_that_disagree_are_named():
    with pytest.raises(ValueError, match="td_errors has 0 rows"):
        StepSignals([1.0], td_errors=[])
