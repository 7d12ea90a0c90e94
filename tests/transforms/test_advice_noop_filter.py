from __future__ import annotations

import pytest
import torch
from advice_toy import Corridor, Describe, make_service
from tensordict.nn import TensorDictModule
from torchrl.envs import SerialEnv, TransformedEnv

from lore_torchrl.advisors.base import Advice
from lore_torchrl.transforms import AdviceTransform

STAY, FORWARD = 1, 2


class Halting(Corridor):
    """A corridor in which only forward leads on; staying may be rewarded."""

    reward = 0.0

    def _step(self, tensordict):
        if int(tensordict["action"]) != FORWARD:
            self.position -= 1
        out = super()._step(tensordict)
        if int(tensordict["action"]) != FORWARD:
            out["reward"] += self.reward
        return out


class Paid(Halting):
    reward = 1.0


class Costly(Halting):
    reward = -0.01


class Stubborn:
    """Advises one action; from the second question about a situation on, another."""

    def __init__(self, first, then):
        self.first, self.then = first, then
        self.asked = []

    async def advise(self, requests):
        answers = []
        for request in requests:
            action = self.then if request.cache_key in self.asked else self.first
            self.asked.append(request.cache_key)
            answers.append(Advice(tuple(3.0 * (a == action) for a in range(3))))
        return answers


def follow(advisor, *, steps=4, env=Halting, noop_filter=True, start=STAY):
    """Roll out a policy that does what it is advised, or ``start`` without advice."""

    def act(logits, mask):
        return torch.where(mask.squeeze(-1), logits.argmax(-1), start)

    service = make_service(advisor)
    policy = TensorDictModule(act, ["llm_prior_logits", "llm_mask"], ["action"])
    transform = AdviceTransform(service, Describe(), require_key=None, noop_filter=noop_filter)
    with service:
        rollout = TransformedEnv(SerialEnv(1, lambda: env(0, 10)), transform).rollout(steps, policy)
    return rollout["action"].flatten().tolist(), service


def test_a_no_op_is_filtered_and_asked_about_again():
    actions, service = follow(Stubborn(STAY, FORWARD))
    assert actions == [STAY, FORWARD, STAY, FORWARD]
    assert service.stats()["noops_filtered"] == 2
    assert service.advisor.asked == ["0", "0", "1", "1", "2"]


def test_what_costs_something_and_changes_nothing_is_refuted():
    actions, service = follow(Stubborn(STAY, FORWARD), env=Costly)
    assert actions == [STAY, FORWARD, STAY, FORWARD] and service.stats()["noops_filtered"] == 2


def test_an_advisor_that_repeats_itself_is_heard_once_more_and_not_again():
    actions, service = follow(Stubborn(STAY, STAY), steps=6)
    assert actions == [STAY] * 6
    assert service.advisor.asked == ["0", "0"]


def test_without_refute_what_was_bought_is_served_for_ever():
    actions, service = follow(Stubborn(STAY, FORWARD), noop_filter=False)
    assert actions == [STAY] * 4
    assert service.advisor.asked == ["0"] and service.stats()["noops_filtered"] == 0


def test_an_action_that_is_rewarded_is_not_refuted():
    actions, service = follow(Stubborn(STAY, FORWARD), env=Paid)
    assert actions == [STAY] * 4 and service.stats()["noops_filtered"] == 0


def test_only_the_action_that_was_advised_is_refuted():
    class Deaf(Stubborn):
        async def advise(self, requests):
            return [Advice((3.0, 0.0, 0.0)) for _ in requests]

    service = make_service(Deaf(STAY, STAY))
    policy = TensorDictModule(lambda mask: torch.full_like(mask[..., 0], STAY, dtype=torch.long),
                              ["llm_mask"], ["action"])  # fmt: skip
    transform = AdviceTransform(service, Describe(), require_key=None, noop_filter=True)
    with service:
        rollout = TransformedEnv(SerialEnv(1, lambda: Halting(0, 9)), transform).rollout(4, policy)
    assert rollout["llm_mask"].all() and service.stats()["noops_filtered"] == 0


@pytest.mark.parametrize("rows", [2, 3])
def test_a_reset_of_one_row_refutes_nothing_in_the_others(rows):
    service = make_service(Stubborn(FORWARD, FORWARD))
    policy = TensorDictModule(lambda mask: torch.full_like(mask[..., 0], FORWARD, dtype=torch.long),
                              ["llm_mask"], ["action"])  # fmt: skip
    transform = AdviceTransform(service, Describe(), require_key=None, noop_filter=True)
    envs = [lambda n=n: Halting(n, 2 + n) for n in range(rows)]
    with service:
        env = TransformedEnv(SerialEnv(rows, envs), transform)
        env.rollout(12, policy, break_when_any_done=False)
    assert service.stats()["noops_filtered"] == 0
