from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_steps import ROWS, make_policy, step

from lore_torchrl.service import Cooldown, MacroBoundaries, StepSignals


def test_asks_for_the_highest_score_only():
    assert step(make_policy(), scores=(0.2, 0.9, 0.5)) == [1]
    assert step(make_policy(), scores=(0.2, 0.9, 0.5), candidates=[0, 2]) == [2]
    assert step(make_policy(calls_per_step=2), scores=(0.2, 0.9, 0.5)) == [1, 2]


def test_equal_scores_take_turns():
    policy = make_policy()
    assert [step(policy)[0] for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_min_beta_and_nan_are_not_asked_about():
    policy = make_policy(min_beta=0.5)
    assert step(policy, scores=(0.49, float("nan"), 0.1)) == []
    assert step(policy, scores=(0.5, float("nan"), 0.1)) == [0]


def test_cooldown_counts_the_steps_of_all_rows():
    policy = make_policy(cooldown=Cooldown(steps=7))
    asked = [bool(step(policy)) for _ in range(7)]
    # Three steps pass at each vector step, so seven are over at the third.
    assert asked == [True, False, False, True, False, False, True]


def test_a_reset_lets_no_step_pass():
    policy = make_policy(cooldown=Cooldown(steps=1))
    assert step(policy)
    assert not step(policy, rewards=None, resets=[True] * ROWS)
    assert step(policy)


def test_success_starts_the_longer_cooldown():
    policy = make_policy(cooldown=Cooldown(steps=0, steps_after_success=6))
    assert step(policy)
    assert not step(policy, successes=[False, True, False])
    assert policy.stats()["cooldown_left"] == 6
    assert not step(policy)
    assert step(policy)


def test_success_does_not_shorten_a_pause():
    policy = make_policy(cooldown=Cooldown(steps=30, steps_after_success=3))
    step(policy)
    step(policy, successes=[True, False, False])
    assert policy.cooldown.left == 27


def test_with_boundaries_only_a_reset_row_is_asked_about():
    policy = make_policy(triggers=[MacroBoundaries(after_reset=True)])
    assert step(policy) == []
    assert step(policy, resets=[False, True, False], rewards=None) == [1]
    assert step(policy) == []


def test_a_boundary_waits_until_it_is_served():
    policy = make_policy(triggers=[MacroBoundaries()])
    assert step(policy, resets=[True] * ROWS, rewards=None, scores=(0.1, 0.3, 0.2)) == [1]
    assert step(policy) == [2]
    assert step(policy, candidates=[1, 2], served=[0]) == []
    assert step(policy) == []


def test_a_dry_spell_is_a_boundary_and_reward_ends_it():
    boundaries = MacroBoundaries(after_reset=False, no_reward_steps=3)
    policy = make_policy(triggers=[boundaries], calls_per_step=ROWS)
    asked = [step(policy, rewards=[0.0, 1.0 if t == 2 else 0.0, -0.1]) for t in range(1, 6)]
    assert asked == [[], [], [0, 2], [], [1]]


def test_cached_advice_on_the_way_does_not_end_a_dry_spell():
    boundaries = MacroBoundaries(after_reset=False, no_reward_steps=3)
    policy = make_policy(triggers=[boundaries], calls_per_step=ROWS)
    quiet = {"rewards": [0.0] * ROWS}
    assert step(policy, **quiet) == []
    assert step(policy, candidates=[1, 2], served=[0], **quiet) == []
    assert step(policy, **quiet) == list(range(ROWS))


def test_the_latest_call_is_dated_in_environment_steps():
    policy = make_policy(cooldown=Cooldown(steps=2 * ROWS))
    dates = []
    for _ in range(5):
        step(policy)
        dates.append(policy.stats()["last_call_step"] / ROWS)
    assert dates == [1.0, 1.0, 3.0, 3.0, 5.0]
    other = make_policy()
    assert other.stats()["last_call_step"] == 0.0
    other.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert other.stats()["last_call_step"] == 5.0 * ROWS
    step(other)
    assert other.stats()["last_call_step"] == 5.0 * ROWS


def test_no_call_without_budget():
    policy = make_policy(total=2, calls_per_step=3)
    assert len(step(policy)) == 2
    assert step(policy) == []
    assert policy.stats() == {
        "budget_left": 0.0,
        "cooldown_left": 0.0,
        "last_call_step": float(ROWS),
        "outage_pause_left": 0.0,
    }


steps_of_a_run = st.lists(
    st.tuples(
        st.lists(st.floats(0, 1), min_size=ROWS, max_size=ROWS),  # scores
        st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),  # resets
        st.sets(st.integers(0, ROWS - 1)),  # candidates
        st.one_of(  # rewards
            st.none(), st.lists(st.floats(-1, 1), min_size=ROWS, max_size=ROWS)
        ),
        st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),  # successes
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(
    run=steps_of_a_run,
    total=st.integers(0, 10),
    pause=st.integers(0, 12),
    after_success=st.integers(0, 20),
    always=st.booleans(),
    min_beta=st.floats(0, 1),
    calls_per_step=st.integers(1, 4),
)
def test_no_limit_is_ever_overrun(
    run, total, pause, after_success, always, min_beta, calls_per_step
):
    policy = make_policy(
        total,
        cooldown=Cooldown(pause, after_success),
        triggers=[] if always else [MacroBoundaries(no_reward_steps=2)],
        min_beta=min_beta,
        calls_per_step=calls_per_step,
    )
    now, may_ask_at, calls = 0, 0, 0
    for scores, resets, candidates, rewards, successes in run:
        now += 0 if rewards is None else ROWS
        if any(successes):
            may_ask_at = max(may_ask_at, now + after_success)
        chosen = step(
            policy,
            scores=scores,
            resets=resets,
            candidates=sorted(candidates),
            rewards=rewards,
            successes=successes,
        )
        calls += len(chosen)
        assert len(chosen) <= calls_per_step
        assert len(set(chosen)) == len(chosen)
        assert calls <= total
        assert set(chosen) <= candidates
        if chosen:
            assert now >= may_ask_at
            assert all(scores[row] >= min_beta for row in chosen)
            may_ask_at = max(may_ask_at, now + pause)


@settings(max_examples=20, deadline=None)
@given(run=steps_of_a_run, cut=st.integers(0, 40))
def test_a_resumed_policy_chooses_the_same(run, cut):
    def fresh():
        return make_policy(
            20,
            cooldown=Cooldown(2, 9),
            triggers=[MacroBoundaries(no_reward_steps=2)],
        )

    policy = fresh()
    for t, (scores, resets, candidates, rewards, successes) in enumerate(run):
        if t == cut:
            resumed = fresh()
            resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
            resumed.budget.load_state_dict(policy.budget.state_dict())
        seen = {
            "scores": scores,
            "resets": resets,
            "candidates": sorted(candidates),
            "rewards": rewards,
            "successes": successes,
        }
        expected = step(policy, **seen)
        if t >= cut:
            assert step(resumed, **seen) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_policy().choose([0], StepSignals([1.0], rewards=[0.0, 0.0])), "2 rows"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
