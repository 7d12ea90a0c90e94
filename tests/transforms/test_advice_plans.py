from __future__ import annotations

import pytest
import torch
from advice_toy import Corridor, Describe, make_service
from tensordict.nn import TensorDictModule
from torchrl.envs import SerialEnv, TransformedEnv
from torchrl.envs.utils import check_env_specs

from lore_torchrl.advisors.base import Advice
from lore_torchrl.transforms import AdviceTransform
from lore_torchrl.transforms.plans import PlanFollower

STAY, FORWARD = 1, 2


class Halting(Corridor):
    """A corridor in which only forward leads on."""

    def _step(self, tensordict):
        if int(tensordict["action"]) != FORWARD:
            self.position -= 1
        return super()._step(tensordict)


class PlanForward:
    """Advises to go forward, with a plan of so many steps."""

    def __init__(self, length, *, then=FORWARD):
        self.plan = (FORWARD, *[then] * (length - 1)) if length else ()
        self.asked = []

    async def advise(self, requests):
        self.asked += [request.cache_key for request in requests]
        valid = (False, True, True)
        return [Advice((0.0, 0.0, 3.0), 0.5, plan=self.plan, valid=valid) for _ in requests]


def follow(advisor, *, describer=None, steps=6, length=10, **settings):
    """Roll out a policy that does what it is advised, and stays without advice."""

    def act(logits, mask):
        return torch.where(mask.squeeze(-1), logits.argmax(-1), STAY)

    service = make_service(advisor)
    transform = AdviceTransform(
        service, describer or Describe(), require_key=None, plan_horizon=4, **settings
    )
    env = TransformedEnv(SerialEnv(1, lambda: Halting(length=length)), transform)
    policy = TensorDictModule(act, ["llm_prior_logits", "llm_mask"], ["action"])
    return env.rollout(steps, policy), service


def test_one_answer_advises_as_many_steps_as_its_plan_has():
    advisor = PlanForward(3)
    batch, service = follow(advisor)
    assert batch["action"][0].tolist() == [FORWARD] * 6
    # Three situations an answer; the plan's steps are the advisor's, with its confidence.
    assert advisor.asked == ["0", "3", "6"]
    stats = service.stats()
    assert stats["calls"] == 3 and stats["plan_steps"] == stats["plan_saved"] == 4
    assert batch["llm_prior_logits"][0, 1].tolist() == [0.0, 0.0, 3.0]
    assert batch["llm_confidence"][0, 1].item() == 0.5


def test_a_longer_plan_is_followed_as_far_as_the_horizon():
    advisor = PlanForward(7)
    batch, _ = follow(advisor)
    assert advisor.asked == ["0", "4"]
    assert batch["llm_plan"][0, 1].tolist() == [FORWARD] * 3 + [-1]


def test_the_spec_names_the_actions_and_none_alone():
    _, service = follow(PlanForward(3), steps=1)
    transform = AdviceTransform(service, Describe(), require_key=None, plan_horizon=4)
    env = TransformedEnv(SerialEnv(1, lambda: Halting(length=5)), transform)
    spec = env.observation_spec["llm_plan"]
    plan = torch.full((1, 4), STAY)
    named = {a: spec.is_in(torch.full_like(plan, a)) for a in range(-2, 4)}
    assert named == {-2: False, -1: True, 0: True, 1: True, 2: True, 3: False}


class OneState(Describe):
    """All situations are of one abstract state."""

    def abstract_state(self, row, observation):
        return "corridor"


def test_the_step_of_a_plan_goes_before_an_answer_of_the_abstract_state():
    advisor = PlanForward(3, then=STAY)
    batch, service = follow(advisor, describer=OneState(), steps=3)
    # Of situation 1 the shared answer would say forward, the plan says stay.
    assert batch["action"][0, :2].tolist() == [FORWARD, STAY]
    stats = service.stats()
    assert advisor.asked == ["0"] and (stats["plan_steps"], stats["plan_saved"]) == (1, 0)
    assert batch["llm_plan"][0, 1].tolist() == [STAY, STAY, -1, -1]


def test_a_situation_that_has_an_answer_keeps_it_whatever_a_plan_says():
    service = make_service(PlanForward(3))
    service.cache.put("1", Advice((0.0, 3.0, 0.0)), abstract_state="corridor")
    transform = AdviceTransform(service, OneState(), require_key=None, plan_horizon=4)
    env = TransformedEnv(SerialEnv(1, Halting), transform)
    service.cache.put(
        "0", Advice((0.0, 0.0, 3.0), plan=(FORWARD, FORWARD)), abstract_state="corridor"
    )
    env.rollout(1, lambda td: td.set("action", torch.full((1,), FORWARD)))
    assert service.lookup("1").plan == () and service.stats()["plan_steps"] == 0


def test_without_plans_every_situation_costs_a_call():
    advisor = PlanForward(0)
    _, service = follow(advisor)
    assert advisor.asked == [str(n) for n in range(7)] and service.stats()["plan_steps"] == 0


def test_the_rest_of_the_plan_is_written_beside_its_step():
    batch, _ = follow(PlanForward(3), steps=3)
    assert batch["llm_plan"][0].tolist() == [[2, 2, 2, -1], [2, 2, -1, -1], [2, -1, -1, -1]]


def test_a_step_that_changes_nothing_ends_the_plan():
    advisor = PlanForward(4, then=STAY)
    follow(advisor, steps=3)
    # Staying, the plan's second step, leads nowhere: what follows in the plan is not used.
    assert advisor.asked == ["0", "1"]


def test_what_a_plan_says_of_a_situation_is_kept_for_the_next_episode():
    advisor = PlanForward(3)
    _, service = follow(advisor, steps=3, length=3)
    assert advisor.asked == ["0"]
    assert service.lookup("2").plan == (FORWARD,)


class Sees(Describe):
    """Sees a thing from the second step on."""

    def things(self, row, observation):
        return {"door"} if int(observation["observation"][0]) >= 2 else set()


def test_a_new_thing_in_view_ends_the_plan():
    advisor = PlanForward(4)
    follow(advisor, describer=Sees())
    assert advisor.asked[:2] == ["0", "2"]


def test_another_action_than_the_planned_one_ends_it():
    plan = PlanFollower(4)
    plan.follow(Advice((0.0, 0.0, 3.0), plan=(FORWARD, FORWARD)))
    assert plan.step(STAY, changed=True, things=()) is None
    assert plan.step(FORWARD, changed=True, things=()) is None


def test_a_reset_ends_the_plan():
    plan = PlanFollower(4)
    plan.follow(Advice((0.0, 0.0, 3.0), plan=(FORWARD, FORWARD)))
    plan.reset(())
    assert plan.step(FORWARD, changed=True, things=()) is None


def test_a_step_says_nothing_of_what_was_said_of_another_situation():
    plan = PlanFollower(4)
    asked = Advice((0.0, 0.0, 3.0), plan=(FORWARD,) * 2, subgoal="exit", valid=(False, True, True))
    plan.follow(asked)
    step = plan.step(FORWARD, changed=True, things=())
    assert step.plan == (FORWARD,) and (step.subgoal, step.valid) == ("", ())


def test_the_valid_actions_are_written_and_all_count_where_nothing_is_said():
    batch, _ = follow(PlanForward(2), steps=2, action_mask=True)
    assert batch["llm_action_mask"][0].tolist() == [[False, True, True], [True, True, True]]


def test_the_entries_fit_their_specs():
    transform = AdviceTransform(
        make_service(PlanForward(2)), Describe(), plan_horizon=4, action_mask=True
    )
    check_env_specs(TransformedEnv(SerialEnv(2, Corridor), transform))


@pytest.mark.parametrize(
    "wrong", [{"plan": (3,)}, {"plan": (-1,)}, {"plan": (0,) * 65}, {"valid": (True,)}]
)
def test_a_plan_of_other_actions_is_no_advice(wrong):
    with pytest.raises(ValueError, match=r"plan|valid"):
        Advice((0.0, 0.0, 3.0), **wrong)


def test_a_planned_no_op_leaves_the_situation_to_be_asked_about():
    advisor = PlanForward(3)
    service = make_service(advisor)
    service.cache.filter_no_op("1", FORWARD)
    policy = TensorDictModule(
        lambda mask: torch.full_like(mask.squeeze(-1), FORWARD, dtype=torch.long),
        ["llm_mask"],
        ["action"],
    )
    transform = AdviceTransform(service, Describe(), require_key=None, plan_horizon=4)
    TransformedEnv(SerialEnv(1, Halting), transform).rollout(1, policy)
    assert advisor.asked == ["0", "1"] and service.stats()["plan_steps"] == 0


def test_a_plan_saves_no_call_where_none_would_be_made():
    service = make_service(PlanForward(3))
    service.cache.close("1")  # asked about in vain before
    transform = AdviceTransform(service, Describe(), require_key=None, plan_horizon=4)
    env = TransformedEnv(SerialEnv(1, Halting), transform)
    env.rollout(2, lambda td: td.set("action", torch.full((1,), FORWARD)))
    stats = service.stats()
    assert (stats["plan_steps"], stats["plan_saved"]) == (2, 1)
