import asyncio
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from lore_torchrl.advisors import scripted
from lore_torchrl.advisors.base import Advice, AdviceRequest, Advisor
from lore_torchrl.advisors.errors import MalformedError, NotFiniteError
from lore_torchrl.advisors.scripted import ScriptedAdvisor
from lore_torchrl.envs.finance import MomentumPlanner

REQUEST = AdviceRequest("text", ("a", "b", "c", "d"), "key")


def planner(request):
    return [0.0, 2.0, -1.0, 1.0] if request.description == "text" else None


def chosen(advisor, count):
    answers = asyncio.run(advisor.advise([REQUEST] * count))
    return Counter(answer.logits.index(max(answer.logits)) for answer in answers)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_advice_takes_any_sequence_of_numbers(kind):
    advice = Advice(kind([0.5, -1.0]), plan=kind([1, 0]), valid=kind([True, False]))
    assert (advice.logits, advice.plan, advice.valid) == ((0.5, -1.0), (1, 0), (True, False))
    assert [type(v) for v in (*advice.logits, *advice.plan, *advice.valid)] == (
        [float] * 2 + [int] * 2 + [bool] * 2
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"logits": (1j, 0.0)},
        {"logits": 1.0},
        {"logits": ()},
        {"logits": (0.0, None)},
        {"plan": (0.5,)},
        {"plan": (2,)},
        {"subgoal": 3},
        {"valid": (True,)},
        {"confidence": 2.0},
        {"confidence": "sure"},
        {"confidence": None},
        {"logits": "12"},
        {"logits": {0: 1.0, 1: 2.0}},
        {"logits": {1.0, 2.0}},
        {"logits": (1.0, 2.0j)},
        {"valid": ("yes", "")},
        {"valid": (2, 0)},
        {"subgoal": 3},
        {"raw": None},
        {"usage": 12},
    ],
)
def test_advice_of_other_things_is_malformed(wrong):
    with pytest.raises(MalformedError, match=next(iter(wrong)).rstrip("s")):
        Advice(**{"logits": (0.0, 1.0)} | wrong)


def test_logits_and_confidence():
    advisor = ScriptedAdvisor(planner, sharpness=2.5, confidence=0.7)
    assert isinstance(advisor, Advisor)
    (answer,) = asyncio.run(advisor.advise([REQUEST]))
    assert answer.logits == (0.0, 2.5, 0.0, 0.0) and answer.confidence == 0.7


def test_a_planner_may_scale_the_confidence_of_its_advice():
    class Unsure:
        def __call__(self, request):
            return planner(request)

        def confidence(self, request):
            return 0.5 if request is REQUEST else 1.0

    (answer,) = asyncio.run(ScriptedAdvisor(Unsure(), confidence=0.6).advise([REQUEST]))
    assert answer.confidence == pytest.approx(0.3)


def test_no_answer_where_the_planner_has_none():
    other = AdviceRequest("other", ("a", "b", "c", "d"), "other")
    answers = asyncio.run(ScriptedAdvisor(planner).advise([other, REQUEST]))
    assert answers[0] is None and answers[1] is not None


@pytest.mark.parametrize(("competence", "action"), [(1.0, 1), (-1.0, 2)])
def test_full_competence_is_deterministic(competence, action):
    assert chosen(ScriptedAdvisor(planner, competence=competence), 50) == {action: 50}


@pytest.mark.parametrize(
    ("competence", "share"),
    [
        (0.0, (0.25, 0.25, 0.25, 0.25)),
        (0.6, (0.1, 0.7, 0.1, 0.1)),
        (-0.6, (0.1, 0.1, 0.7, 0.1)),
    ],
)
def test_competence_sets_the_shares(competence, share):
    counts = chosen(ScriptedAdvisor(planner, competence=competence, seed=1), 4000)
    for action, expected in enumerate(share):
        assert counts[action] / 4000 == pytest.approx(expected, abs=0.03)


def test_seed_and_state_reproduce_the_stream():
    first, second = (ScriptedAdvisor(planner, competence=0.3, seed=5) for _ in range(2))
    assert asyncio.run(first.advise([REQUEST] * 20)) == asyncio.run(second.advise([REQUEST] * 20))
    state = json.loads(json.dumps(first.state_dict()))
    later = asyncio.run(first.advise([REQUEST] * 20))
    resumed = ScriptedAdvisor(planner, competence=0.3, seed=99)
    resumed.load_state_dict(state)
    assert asyncio.run(resumed.advise([REQUEST] * 20)) == later


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"competence": 1.5}, "1.5"),
        ({"competence": float("nan")}, "nan"),
        ({"sharpness": 0.0}, "0.0"),
        ({"sharpness": float("inf")}, "inf"),
        ({"confidence": -0.1}, "-0.1"),
    ],
)
def test_bad_settings_fail_with_the_value(settings, value):
    with pytest.raises(ValueError, match=value):
        ScriptedAdvisor(planner, **settings)


def test_bad_planners_fail():
    with pytest.raises(ValueError, match="callable"):
        ScriptedAdvisor("planner")
    with pytest.raises(ValueError, match="got 2 for 4 actions"):
        asyncio.run(ScriptedAdvisor(lambda request: [0.0, 1.0]).advise([REQUEST]))


def test_imports_no_torch():
    lines = Path(scripted.__file__).read_text().splitlines()
    imports = [line for line in lines if line.lstrip().startswith(("import ", "from "))]
    assert imports and not any("torch" in line.replace("lore_torchrl", "") for line in imports)


@pytest.mark.parametrize("logit", [float("nan"), float("-inf"), 1e300, -1.1e30])
def test_advice_that_float32_does_not_hold_is_refused(logit):
    with pytest.raises(NotFiniteError, match="finite, 1e\\+30 at most"):
        Advice((0.0, logit))
    assert Advice((0.0, -1e30)).logits[1] == -1e30


def test_a_store_keeps_advisors_of_other_settings_apart():
    settings = [
        {}, {"competence": -1.0}, {"competence": 0.5}, {"competence": 0.5, "seed": 1},
        {"sharpness": 2.0}, {"confidence": 0.5},
    ]  # fmt: skip
    prefixes = {ScriptedAdvisor(planner, **kwargs).cache_prefix for kwargs in settings}
    assert len(prefixes) == len(settings)
    for calm in (0.5, 1.0):
        prefixes.add(ScriptedAdvisor(MomentumPlanner(calm_confidence=calm)).cache_prefix)
    assert len(prefixes) == len(settings) + 2
    # What is never drawn makes no difference.
    assert ScriptedAdvisor(planner, seed=1).cache_prefix in prefixes


def test_a_plan_comes_with_the_best_action_or_the_worst():
    class Plans:
        def __call__(self, request):
            return [0.0, 1.0]

        def plan(self, request, length):
            return [1, 0, 1][:length]

    request = AdviceRequest("text", ("a", "b"), "key")
    (advice,) = asyncio.run(ScriptedAdvisor(Plans(), plan_length=2).advise([request]))
    assert advice.plan == (1, 0)
    for competence, plan in ((-1.0, (0, 0)), (0.0, ())):
        wrong = ScriptedAdvisor(Plans(), plan_length=2, competence=competence)
        assert asyncio.run(wrong.advise([request]))[0].plan == plan
    with pytest.raises(ValueError, match="plan_length"):
        ScriptedAdvisor(planner, plan_length=2)
    with pytest.raises(ValueError, match="plan_length=65 is impossible: 0 to 64"):
        ScriptedAdvisor(Plans(), plan_length=65)


def test_a_subgoal_comes_with_the_best_action_alone():
    class Names:
        def __call__(self, request):
            return [0.0, 1.0]

        def subgoal(self, request):
            return "eat"

    request = AdviceRequest("text", ("a", "b"), "key")
    named = ScriptedAdvisor(Names(), subgoals=True)
    assert asyncio.run(named.advise([request]))[0].subgoal == "eat"
    assert named.cache_prefix != ScriptedAdvisor(Names()).cache_prefix
    for other in ({}, {"subgoals": True, "competence": -1.0}):
        assert asyncio.run(ScriptedAdvisor(Names(), **other).advise([request]))[0].subgoal == ""
    with pytest.raises(ValueError, match="subgoals"):
        ScriptedAdvisor(planner, subgoals=True)


@pytest.mark.parametrize("competence", [1.0, 0.0])
def test_valid_actions_come_with_every_answer_but_an_adversary_s(competence):
    class Knows:
        def __call__(self, request):
            return [1.0, 2.0]

        def valid_actions(self, request):
            return [False, True]

    request = AdviceRequest("", ("left", "right"), "key")
    told = ScriptedAdvisor(Knows(), valid_actions=True, competence=competence)
    assert asyncio.run(told.advise([request]))[0].valid == (False, True)
    for other in ({}, {"valid_actions": True, "competence": -1.0}):
        assert asyncio.run(ScriptedAdvisor(Knows(), **other).advise([request]))[0].valid == ()
    assert told.cache_prefix != ScriptedAdvisor(Knows(), competence=competence).cache_prefix
    with pytest.raises(ValueError, match="valid_actions"):
        ScriptedAdvisor(lambda request: [1.0], valid_actions=True)
