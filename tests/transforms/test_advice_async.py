"""Async advice from the environment's step to the replay row, without a step that waits."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
import torch
from advice_toy import Act, Corridor, Describe, Know, assert_aligned, logits_of, make_env
from torchrl.data import (
    LazyTensorStorage,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.envs import SerialEnv, TransformedEnv
from torchrl.envs.utils import check_env_specs

from lore_torchrl.replay import LateAdvice
from lore_torchrl.service import (
    AdviceCache,
    AdviceService,
    CallBudget,
    CallPolicy,
    TDErrorSpike,
)
from lore_torchrl.service.outcomes import CallCounters
from lore_torchrl.transforms import AdviceTransform


class Held(Know):
    """Knows, and says it when it is let."""

    def __init__(self):
        super().__init__()
        self.let = threading.Event()

    async def advise(self, requests):
        while not self.let.is_set():
            await asyncio.sleep(0.002)
        return await super().advise(requests)


def make_service(advisor, total=1000, *, max_in_flight=100, **policy):
    budget = CallBudget(total)
    return AdviceService(
        advisor,
        budget=budget,
        policy=CallPolicy(budget, **policy),
        timeout_s=60.0,
        mode="async",
        max_in_flight=max_in_flight,
    )


def make_replay(capacity):
    return ReplayBufferEnsemble(
        *[
            TensorDictReplayBuffer(
                storage=LazyTensorStorage(capacity),
                writer=TensorDictRoundRobinWriter(track_generations=True),
            )
            for _ in range(2)
        ],
        routing_key="env_index",
    )


def store(replay, late, rollout):
    records = rollout.select("next").reshape(-1)
    records["env_index"] = torch.arange(len(rollout)).repeat_interleave(rollout.shape[1])
    late.note(records, replay.extend(records))


@pytest.fixture
def slow(monkeypatch):
    """An advisor that is known to take its time."""
    monkeypatch.setattr(CallCounters, "latency", lambda *_: 1000.0)


@pytest.fixture
def held():
    advisor = Held()
    yield advisor
    advisor.let.set()


def test_steps_pass_while_the_advisor_is_held_and_its_answers_reach_their_rows(held, slow):
    replay, late = make_replay(40), LateAdvice()
    with make_service(held, calls_per_step=2) as service:
        env = make_env(service, lengths=(50, 50), require_key=None)
        rollout = env.rollout(20, Act())
        assert rollout.shape == (2, 20)
        assert service.stats()["in_flight"] == 42 and held.asked == []
        assert not rollout["llm_mask"].any() and not rollout["next", "llm_mask"].any()
        ids = rollout["next", "llm_advice_id"]
        assert len(ids.unique()) == ids.numel() and (ids > 0).all()
        store(replay, late, rollout)
        held.let.set()
        assert service.drain(30.0) == 0
        assert late.apply(replay, service.answers) == 40
        stats = service.stats()
        # The cache has them as well: the same steps again need no question.
        again = env.rollout(20, Act())
    for member in range(2):
        stored = replay[member][:]["next"]
        assert stored["llm_mask"].all()
        expected = logits_of(rollout["next", "observation"][member])
        torch.testing.assert_close(stored["llm_prior_logits"], expected)
        torch.testing.assert_close(stored["llm_confidence"], torch.full((20, 1), 0.5))
    assert stats["late"] == stats["answered"] == 42 and stats["in_time"] == 0
    assert again["llm_mask"].all() and not again["llm_advice_id"].any()
    assert_aligned(again), assert_aligned(again["next"])


def test_rows_overwritten_meanwhile_are_skipped(held, slow):
    replay, late = make_replay(10), LateAdvice()
    with make_service(held, calls_per_step=2) as service:
        env = make_env(service, lengths=(50, 50), require_key=None)
        rollout = env.rollout(25, Act())
        for start in (0, 10, 20):
            store(replay, late, rollout[:, start : start + 10])
        held.let.set()
        service.drain(30.0)
        assert late.apply(replay, service.answers) == 20
    assert late.stats()["late_rows_missed"] == 30
    for member in range(2):
        assert_aligned(replay[member][:]["next"])
        assert replay[member][:]["next", "llm_mask"].all()


def test_rows_in_the_same_situation_share_a_question(held, slow):
    with make_service(held) as service:
        env = TransformedEnv(
            SerialEnv(3, lambda: Corridor(0, 9)),
            AdviceTransform(service, Describe(), require_key=None),
        )
        rollout = env.rollout(3, Act())
        # A second episode through the same situations adds none.
        again = env.rollout(3, Act())
        assert service.budget.spent == 4
    expected = torch.arange(1, 4).reshape(1, 3, 1).expand(3, 3, 1)
    assert torch.equal(rollout["llm_advice_id"], expected)
    assert torch.equal(again["llm_advice_id"], expected)


def test_no_more_questions_than_may_be_in_flight(held, slow):
    with make_service(held, max_in_flight=3, calls_per_step=2) as service:
        rollout = make_env(service, lengths=(50, 50), require_key=None).rollout(10, Act())
        assert service.budget.spent == service.stats()["in_flight"] == 3
    assert (rollout["llm_advice_id"] > 0).sum() == 3


def test_an_advisor_that_is_silent_for_longer_than_ever_gets_one_question_at_a_time(held):
    with make_service(held) as service:
        env = make_env(service, lengths=(50, 50), require_key=None)
        env.rollout(10, Act())
        assert service.budget.spent == 1
        held.let.set()
        assert service.drain(10.0) == 0
        env.rollout(10, Act())
        assert service.budget.spent > 1


def test_the_budget_is_never_exceeded(held, slow):
    held.let.set()
    with make_service(held, total=5, calls_per_step=2) as service:
        make_env(service, lengths=(50, 50), require_key=None).rollout(20, Act())
        service.drain(30.0)
    assert len(held.asked) == service.budget.spent == 5


def test_terminal_observations_wait_for_nothing(held):
    with make_service(held, calls_per_step=2) as service:
        env = make_env(service, lengths=(2, 3), require_key=None)
        rollout = env.rollout(12, Act(), break_when_any_done=False)
    done = rollout["next", "done"]
    assert done.any() and not rollout["next", "llm_advice_id"][done].any()


def test_specs_hold_and_cost_nothing(held):
    with make_service(held) as service:
        check_env_specs(make_env(service))
        assert service.budget.spent == 0


def test_blocking_advice_carries_the_number_of_its_question():
    budget = CallBudget(10)
    with AdviceService(Know(), budget=budget) as service:
        env = make_env(service, lengths=(9,), require_key=None)
        first, again = env.rollout(3, Act()), env.rollout(3, Act())
    assert first["llm_advice_id"].flatten().tolist() == [1, 2, 3]
    assert not again["llm_advice_id"].any() and again["llm_mask"].all()


class Coarse(Describe):
    def abstract_state(self, row, observation):
        return str(int(observation["observation"][0]) // 100)


def test_situations_of_one_abstract_state_share_advice():
    with AdviceService(Know(), budget=CallBudget(10)) as service:
        env = make_env(
            service, lengths=(9, 9), describer=Coarse(), require_key=None, abstract_states=True
        )
        rollout = env.rollout(5, Act())
        assert sorted(service.advisor.asked) == [0, 101]
        assert service.stats()["cache_shared_hits"] > 0
    assert rollout["llm_mask"][0].all()


def test_a_fallback_is_no_answer_to_the_question_asked_meanwhile(held):
    held.let.set()
    replay, late = make_replay(10), LateAdvice()
    cache = AdviceCache(answers_averaged=2, averaging_visits=2)
    with AdviceService(held, budget=CallBudget(2), cache=cache, mode="async") as service:
        env = make_env(
            service, lengths=(9,), describer=Coarse(), require_key=None, abstract_states=True
        )
        env.reset()
        service.drain(30.0)
        held.let.clear()
        rollout = env.rollout(3, Act())
        # The second visit makes the abstract state due for another answer; the first one
        # serves meanwhile.
        assert rollout["llm_advice_id"].flatten().tolist() == [0, 2, 0]
        assert rollout["llm_fallback"].flatten().tolist() == [False, True, False]
        first = logits_of(torch.zeros(3, 1))
        torch.testing.assert_close(rollout["llm_prior_logits"][0], first)
        store(replay, late, rollout)
        held.let.set()
        service.drain(30.0)
        assert late.apply(replay, service.answers) == 1
    stored = replay[0][:]["next"]
    assert stored["llm_advice_id"].flatten().tolist() == [2, 0, 0] and stored["llm_mask"].all()
    assert not stored["llm_fallback"].any()
    torch.testing.assert_close(stored["llm_prior_logits"][0], logits_of(torch.ones(1)))
    torch.testing.assert_close(stored["llm_prior_logits"][1:], first[1:])


class ActWithValue(Act):
    """Writes the value of each observation as well: ten a step, but for a jump."""

    out_keys = ("action", "lore_beta", "state_value")

    def forward(self, td):
        td = super().forward(td)
        position = td["observation"].float() % 100
        td["state_value"] = 10.0 * position + 500.0 * (position == 5)
        return td


def test_td_errors_reach_the_policy_of_calls():
    heard = []

    class Listening(CallPolicy):
        def choose(self, candidates, signals, **told):
            heard.append(signals.td_errors)
            return []

    budget = CallBudget(2)
    with AdviceService(Know(), budget=budget, policy=Listening(budget)) as service:
        env = make_env(
            service, lengths=(7,), require_key=None, value_key="state_value", discount=0.5
        )
        env.rollout(8, ActWithValue(), break_when_any_done=False)
    assert heard[:2] == [[None], [None]], "neither at the reset nor before there are two values"
    # r + 0.5 * V' - V, with V = 10 t
    assert heard[2:5] == [[5.0], [0.0], [-5.0]]
    assert heard[6] == [0.5 * 550 - 40]
    assert heard[8:] == [[None], [None]], "a new episode"


def test_a_spike_without_values_is_refused():
    budget = CallBudget(2)
    policy = CallPolicy(budget, triggers=[TDErrorSpike()])
    with pytest.raises(ValueError, match="value_key=None"):
        AdviceTransform(AdviceService(Know(), budget=budget, policy=policy), Describe())


class Plans(Held):
    """Names a subgoal too, and a plan of two steps."""

    async def advise(self, requests):
        answers = await super().advise(requests)
        return [replace(a, plan=(2, 2), subgoal="end") for a in answers]


class Aims(Describe):
    subgoals = ("end",)


def test_a_late_plan_begins_and_a_late_subgoal_counts_where_the_situation_is_met_again(slow):
    held = Plans()
    with make_service(held, total=1) as service:
        env = make_env(
            service,
            lengths=(3,),
            describer=Aims(),
            require_key=None,
            plan_horizon=4,
            subgoals=True,
        )
        waits = env.rollout(2, Act())
        held.let.set()
        service.drain(30.0)
        again = env.rollout(2, Act())
    assert not waits["llm_mask"].any() and not waits["llm_subgoal"].any()
    assert again["llm_plan"][0].tolist() == [[2, 2, -1, -1], [2, -1, -1, -1]]
    assert again["llm_subgoal"][0, 0].tolist() == [1.0]
    assert service.stats()["plan_steps"] == 1 and held.asked == [0]
