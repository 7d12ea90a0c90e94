from __future__ import annotations

import pytest
import torch
from advice_toy import (
    Act,
    Corridor,
    Describe,
    assert_aligned,
    logits_of,
    make_env,
    make_service,
)
from tensordict import TensorDict
from torchrl.data import Unbounded
from torchrl.envs import (
    Compose,
    InitTracker,
    ObservationTransform,
    RewardSum,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
)
from torchrl.envs.utils import check_env_specs

from lore_torchrl.service import Cooldown, MacroBoundaries
from lore_torchrl.transforms import AdviceTransform


def test_advice_is_about_the_observation_beside_it():
    with make_service(calls_per_step=2) as service:
        env = make_env(service, lengths=(4, 6), require_key=None)
        rollout = env.rollout(20, Act(), break_when_any_done=False)
    assert_aligned(rollout)
    assert_aligned(rollout["next"])
    assert rollout["llm_mask"].all()
    # All but the terminal observations have advice; a row off by one would miss some.
    torch.testing.assert_close(rollout["next", "llm_mask"], ~rollout["next", "done"])
    assert rollout["next", "done"].sum() >= 8


def test_the_check_of_alignment_notices_an_offset_of_one():
    with make_service(calls_per_step=2) as service:
        rollout = make_env(service, require_key=None).rollout(3, Act())
    shifted = rollout["next"].clone()
    for key in ("llm_prior_logits", "llm_confidence", "llm_mask"):
        shifted[key] = rollout[key]
    with pytest.raises(AssertionError):
        assert_aligned(shifted)


def test_the_next_root_is_the_next_of_before():
    with make_service(calls_per_step=2) as service:
        env = make_env(service, lengths=(5, 3), require_key=None)
        rollout = env.rollout(12, Act(), break_when_any_done=False)
    goes_on = ~rollout["next", "done"][:, :-1].squeeze(-1)
    for key in ("llm_prior_logits", "llm_confidence", "llm_mask"):
        torch.testing.assert_close(
            rollout["next", key][:, :-1][goes_on], rollout[key][:, 1:][goes_on]
        )


def test_terminal_observations_are_masked_and_never_asked_about():
    with make_service(calls_per_step=2) as service:
        env = make_env(service, lengths=(2, 3), require_key=None)
        rollout = env.rollout(12, Act(), break_when_any_done=False)
    done = rollout["next", "done"]
    assert done.any()
    assert not rollout["next", "llm_mask"][done].any()
    assert not rollout["next", "llm_prior_logits"][done.squeeze(-1)].any()
    assert set(service.advisor.asked) == {0, 1, 100, 101, 102}


def test_truncation_before_this_transform_is_terminal_too():
    with make_service(calls_per_step=2) as service:
        env = TransformedEnv(
            SerialEnv(2, lambda: Corridor(0, 100)),
            Compose(
                StepCounter(2, update_done=False),
                RewardSum(),
                AdviceTransform(service, Describe(), require_key=None),
            ),
        )
        check_env_specs(env)
        rollout = env.rollout(6, Act(), break_when_any_done=False)
    truncated = rollout["next", "truncated"]
    assert truncated.any()
    torch.testing.assert_close(rollout["next", "llm_mask"], ~truncated)
    assert 2 not in service.advisor.asked


class Ends(Transform):
    """Ends every episode at its second step, by its own rule."""

    def _step(self, tensordict, next_tensordict):
        end = next_tensordict["observation"] % 100 >= 2
        return next_tensordict.set("done", end).set("truncated", end)


class Doubles(ObservationTransform):
    """Maps an entry."""

    def _apply_transform(self, observation):
        return 2 * observation


@pytest.mark.parametrize("later", [StepCounter(2), Ends(), Compose(RewardSum(), StepCounter(2))])
def test_what_may_end_episodes_must_not_follow(later):
    with make_service() as service:
        env = make_env(service, require_key=None)
        env.append_transform(later)
        with pytest.raises(RuntimeError, match=r"(StepCounter|Ends), which may end episodes"):
            env.reset()
    assert service.advisor.asked == []


@pytest.mark.parametrize("first", [StepCounter(2), Ends()])
def test_what_ends_episodes_may_come_before(first):
    with make_service(calls_per_step=2) as service:
        base = SerialEnv(2, lambda: Corridor(0, 100))
        advice = AdviceTransform(service, Describe(), require_key=None)
        env = TransformedEnv(base, Compose(first, advice, RewardSum(), InitTracker()))
        env.append_transform(Doubles(in_keys=["observation"], out_keys=["observation"]))
        env.rollout(6, Act(), break_when_any_done=False)
    assert set(service.advisor.asked) == {0, 1}


def test_a_partial_reset_touches_only_its_rows():
    describer = Describe()
    with make_service(calls_per_step=3) as service:
        env = make_env(service, lengths=(2, 9, 2), describer=describer, require_key=None)
        td = env.reset()
        td = env.step_and_maybe_reset(Act()(td))[1]
        describer.diary.clear()
        env.transform.service.advisor.asked.clear()
        before = td.clone()
        stepped, after = env.step_and_maybe_reset(Act()(td))
    assert stepped["next", "done"].flatten().tolist() == [True, False, True]
    assert_aligned(after)
    assert after["llm_mask"].all()
    assert after["observation"].flatten().tolist() == [0, 102, 200]
    # The terminal observations 2 and 202 are in no diary; row 1 has no second entry.
    assert describer.diary == [(1, 102, 2, False), (0, 0, None, True), (2, 200, None, True)]
    assert service.advisor.asked == [102]
    assert before["llm_mask"].all()


def test_an_explicit_partial_reset_keeps_the_other_rows():
    with make_service() as service:
        env = make_env(service, lengths=(9, 9), require_key=None)
        td = env.reset()
        assert td["llm_mask"].flatten().tolist() == [True, False]
        td = env.step_and_maybe_reset(Act()(td))[1]
        assert td["llm_mask"].flatten().tolist() == [False, True]
        service.budget.total = service.budget.spent
        flags = TensorDict({"_reset": torch.tensor([[True], [False]])}, [2])
        written = env._reset(flags)
        reset = env.reset(td.update(flags))
    # Row 0 has the advice of its start from the cache, row 1 what it had.
    assert written["llm_mask"].all() and reset["llm_mask"].all()
    expected = logits_of(torch.tensor([[0], [101]]))
    torch.testing.assert_close(written["llm_prior_logits"], expected)
    torch.testing.assert_close(reset["llm_prior_logits"], expected)


def test_each_step_is_observed_once_with_the_action_that_led_there():
    describer = Describe()
    with make_service() as service:
        env = make_env(service, lengths=(3,), describer=describer, require_key=None)
        env.rollout(4, Act(), break_when_any_done=False)
    first = [(0, 0, None, True), (0, 1, 2, False), (0, 2, 2, False)]
    assert describer.diary == [*first, *first[:2]]


def test_rows_that_ended_are_left_alone_until_all_have():
    describer = Describe()
    with make_service(calls_per_step=2, cooldown=Cooldown(0)) as service:
        env = make_env(service, lengths=(2, 5), describer=describer, require_key=None)
        env.rollout(10, Act(), break_when_any_done=False, break_when_all_done=True)
    assert [entry[:2] for entry in describer.diary if entry[0] == 0] == [(0, 0), (0, 1)]
    assert [entry[1] for entry in describer.diary if entry[0] == 1] == [100, 101, 102, 103, 104]
    assert 2 not in service.advisor.asked and 105 not in service.advisor.asked


def test_only_the_highest_score_is_asked_about():
    with make_service() as service:
        env = make_env(service, lengths=(9, 9, 9))
        rollout = env.rollout(3, Act([0.1, 0.3, 0.9]))
        assert service.advisor.asked == [201, 202, 203]
        assert rollout["next", "llm_mask"].squeeze(-1).int().tolist() == [
            [0, 0, 0],
            [0, 0, 0],
            [1, 1, 1],
        ]
        env.rollout(1, Act([0.9, 0.3, 0.1]))
        assert service.advisor.asked[3:] == [1]


def test_where_the_gate_lets_nothing_through_no_episode_begins_with_a_call():
    for beta_max, asked in ((0.0, []), (1.0, [0, 100])):
        with make_service(min_beta=0.05) as service:
            env = make_env(service, lengths=(2, 2), beta_max=beta_max)
            env.rollout(6, Act([0.0, 0.0]), break_when_any_done=False)
            assert service.advisor.asked == asked


def test_rows_in_the_same_situation_share_one_call():
    with make_service() as service:
        env = TransformedEnv(
            SerialEnv(3, lambda: Corridor(0, 9)),
            AdviceTransform(service, Describe(), require_key=None),
        )
        rollout = env.rollout(3, Act())
    assert rollout["llm_mask"].all() and rollout["next", "llm_mask"].all()
    assert service.advisor.asked == [0, 1, 2, 3]
    assert service.budget.spent == 4


def test_the_budget_is_never_overrun():
    with make_service(total=5, calls_per_step=2) as service:
        env = make_env(service, lengths=(30, 30), require_key=None)
        rollout = env.rollout(20, Act())
    assert service.budget.spent == len(service.advisor.asked) == 5
    assert_aligned(rollout["next"])
    assert service.stats()["budget_left"] == 0


def test_cooldown_counts_the_steps_of_all_rows():
    with make_service(cooldown=Cooldown(steps=6)) as service:
        env = make_env(service, lengths=(30, 30), require_key=None)
        env.rollout(9, Act([0.9, 0.1]))
    assert service.advisor.asked == [0, 3, 6, 9]


class AfterThree(Act):
    """A policy that can use advice from its fourth step on."""

    steps = 0

    def forward(self, td):
        self.steps += 1
        td = super().forward(td)
        if self.steps <= 3:
            del td["lore_beta"]
        return td


@pytest.mark.parametrize(("policy", "asked"), [(Act, [1, 6, 7, 8, 9]), (AfterThree, [8, 9])])
def test_a_success_that_stays_true_starts_the_cooldown_once(policy, asked):
    class Reached(Corridor):
        """Tells of success from the second step of an episode to its end."""

        def __init__(self):
            super().__init__(length=20)
            self.observation_spec["success"] = Unbounded((1,), dtype=torch.bool)

        def _output(self):
            return super()._output().set("success", torch.tensor([self.position >= 2]))

    with make_service(cooldown=Cooldown(0, steps_after_success=4)) as service:
        transform = AdviceTransform(service, Describe(), success_key="success")
        env = TransformedEnv(SerialEnv(1, Reached), transform)
        env.rollout(9, policy())
        # A pause of four steps after the first success that the call policy is told of.
        assert service.advisor.asked == asked


@pytest.mark.parametrize("success_key", [None, "done"])
def test_success_starts_the_longer_cooldown(success_key):
    with make_service(cooldown=Cooldown(0, steps_after_success=4)) as service:
        env = make_env(service, lengths=(3,), require_key=None, success_key=success_key)
        rollout = env.rollout(8, Act(), break_when_any_done=False)
        assert service.advisor.asked == [0, 1, 2]
        assert service.policy.cooldown.left > 0
    assert rollout["next", "reward"].sum() == 2


def test_boundaries_wait_for_the_policy_to_act():
    boundaries = MacroBoundaries(after_reset=True)
    with make_service(triggers=[boundaries]) as service:
        env = make_env(service, lengths=(9, 4))
        env.rollout(7, Act([0.2, 0.8]), break_when_any_done=False)
    # Both rows are due after the first reset. Row 1 ends at its fourth step and is due again.
    assert service.advisor.asked == [101, 2, 100]
