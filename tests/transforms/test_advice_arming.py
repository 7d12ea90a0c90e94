from __future__ import annotations

import asyncio

import pytest
from advice_toy import (
    Act,
    assert_aligned,
    make_env,
    make_service,
)
from torchrl.collectors import Collector
from torchrl.envs.utils import check_env_specs

from lore_torchrl.advisors.base import Advice
from lore_torchrl.service import Cooldown


def test_nothing_is_spent_before_a_policy_acts():
    with make_service() as service:
        env = make_env(service)
        check_env_specs(env)
        env.rollout(6, break_when_any_done=False)
        Collector(
            env,
            Act(),
            frames_per_batch=8,
            total_frames=8,
            init_random_frames=8,
            auto_register_policy_transforms=False,
        )
        stats = service.stats()
        assert service.advisor.asked == [] and stats["calls"] == 0
        assert stats["cache_hits"] == stats["cache_misses"] == 0


def test_a_collector_spends_only_while_its_policy_acts():
    with make_service(calls_per_step=2) as service:
        env = make_env(service)
        collector = Collector(
            env,
            Act(),
            frames_per_batch=8,
            total_frames=24,
            init_random_frames=8,
            auto_register_policy_transforms=False,
        )
        frames = iter(collector)
        next(frames)
        assert service.budget.spent == 0
        first = next(frames)
        assert service.budget.spent > 0
        assert_aligned(first), assert_aligned(first["next"])
        state = collector.state_dict()
        collector.load_state_dict(state)
        spent = service.budget.spent
        collector.shutdown()
    assert spent == service.budget.spent


def test_checking_or_random_steps_after_training_spend_nothing():
    with make_service() as service:
        env = make_env(service, lengths=(30, 30))
        env.rollout(3, Act())
        before = service.state_dict()
        assert service.budget.spent > 0
        check_env_specs(env)
        env.rollout(6)
        assert service.state_dict() == before


def test_a_reset_at_the_end_of_an_episode_stays_armed():
    with make_service() as service:
        env = make_env(service, lengths=(2,))
        rollout = env.rollout(5, Act(), break_when_any_done=False)
    assert service.advisor.asked == [1, 0]
    assert rollout["llm_mask"].flatten().tolist() == [False, True, True, True, True]


def test_without_arming_the_cache_still_advises():
    with make_service() as service:
        service.cache.put("1", Advice(logits=(1.0, -1.0, 1.5), confidence=0.5))
        rollout = make_env(service).rollout(3)
    assert rollout["llm_mask"][0].flatten().tolist() == [False, True, False]
    assert_aligned(rollout)
    assert service.stats()["cache_hits"] == 0


def test_a_check_before_the_run_does_not_change_it():
    def run(check):
        with make_service(cooldown=Cooldown(3)) as service:
            env = make_env(service, lengths=(4, 7))
            if check:
                check_env_specs(env)
            rollout = env.rollout(12, Act(), break_when_any_done=False)
            return rollout, service.state_dict()

    (plain, plain_state), (checked, checked_state) = run(False), run(True)
    assert (plain == checked).all()
    assert plain_state == checked_state


class Fail:
    async def advise(self, requests):
        raise RuntimeError("no line")


class Malformed:
    async def advise(self, requests):
        return [Advice(logits=(1.0,)) for _ in requests]


class Sleep:
    async def advise(self, requests):
        await asyncio.sleep(30)


class Huge:
    async def advise(self, requests):
        return [Advice(logits=(1e300, 0.0, 0.0)) for _ in requests]


@pytest.mark.parametrize(
    ("advisor", "errors"),
    [
        (Fail(), {"RuntimeError": 3}),
        (Malformed(), {"wrong_logit_count": 3}),
        (Sleep(), {"timeout": 1}),
        (Huge(), {"not_finite": 3}),
    ],
)
def test_a_failing_advisor_leaves_zeros_and_a_running_env(advisor, errors):
    # What would likely fail again pauses the calls at once, the rest after three in a row.
    with make_service(advisor, total=3, timeout_s=0.02) as service:
        rollout = make_env(service, lengths=(9, 9), require_key=None).rollout(5, Act())
    for td in (rollout, rollout["next"]):
        assert not td["llm_mask"].any()
        assert not td["llm_prior_logits"].any() and not td["llm_confidence"].any()
    assert service.errors == errors
    assert service.budget.spent == sum(errors.values())


def test_a_cache_of_another_action_set_is_ignored():
    with make_service() as service:
        service.cache.put("0", Advice(logits=(1.0,)))
        td = make_env(service).reset()
    assert not td["llm_mask"].any()
