from __future__ import annotations

import asyncio
import json
import pickle
import threading
import time

import pytest
from questions import ask, join_loops, request, step
from torchrl import logger as torchrl_logger

from lore_torchrl.advisors.base import Advice
from lore_torchrl.advisors.errors import (
    AdviceError,
    DeadlineError,
    FatalAdviceError,
    StatusError,
    Usage,
)
from lore_torchrl.advisors.flawed import StaleAdvisor, TurningAdvisor
from lore_torchrl.advisors.recorded import RecordingAdvisor
from lore_torchrl.advisors.scripted import ScriptedAdvisor
from lore_torchrl.service import (
    AdviceCache,
    AdviceService,
    AdviceStore,
    CallBudget,
    CallPolicy,
    Cooldown,
    StoreError,
)


class KnownAdvisor:
    """Prefers the second action, the more the longer the key."""

    def __init__(self):
        self.asked = []

    async def advise(self, requests):
        self.asked.append([item.cache_key for item in requests])
        return [Advice(logits=(0.0, float(len(item.cache_key)))) for item in requests]

    def state_dict(self):
        return {"asked": self.asked}

    def load_state_dict(self, state):
        self.asked = state["asked"]


class Answering:
    """Answers with whatever a function of the requests gives or raises."""

    def __init__(self, answer):
        self.answer = answer

    async def advise(self, requests):
        answer = self.answer(requests)
        return await answer if asyncio.iscoroutine(answer) else answer


def make_service(advisor, total=10, **config):
    config.setdefault("timeout_s", 5.0)
    return AdviceService(advisor, budget=CallBudget(total), **config)


def raising(error):
    def answer(requests):
        raise error

    return answer


def test_answers_in_order_and_remembers():
    advisor = KnownAdvisor()
    with make_service(advisor) as service:
        answers = ask(service, [request("aa"), request("b")])
        assert [answer.logits for answer in answers] == [(0.0, 2.0), (0.0, 1.0)]
        assert step(service, "aa")[0].advice == service.lookup("aa") == answers[0]
    assert service.budget.spent == 2
    stats = service.stats()
    assert stats.pop("latency_p50_s") > 0 and stats.pop("latency_p95_s") > 0
    assert all(type(value) is float for value in stats.values())
    assert {name: value for name, value in stats.items() if value} == {
        "calls": 2.0,
        "answered": 2.0,
        "in_time": 2.0,
        "cache_hits": 1.0,
        "hit_rate": 1.0,
        "budget_left": 8.0,
    }


def test_equal_keys_are_asked_once_and_cached_keys_never():
    advisor = KnownAdvisor()
    with make_service(advisor) as service:
        first, second = ask(service, [request("a"), request("a")])
        third, other = ask(service, [request("a"), request("bb")])
    assert first == second == third != other
    assert advisor.asked == [["a"], ["bb"]]
    assert service.budget.spent == 2


def test_beyond_the_budget_nothing_is_asked():
    advisor = KnownAdvisor()
    with make_service(advisor, total=1) as service:
        answers = ask(service, [request("a"), request("b")])
        assert ask(service, [request("c")]) == [None]
    assert answers[0] is not None and answers[1] is None
    assert advisor.asked == [["a"]]
    assert service.errors == {"budget": 2}


def test_the_budget_is_spent_before_the_call():
    seen = []
    service = make_service(Answering(lambda requests: seen.append(service.budget.spent)))
    with service:
        ask(service, [request("a")])
    assert seen == [1]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (raising(RuntimeError("no line")), "RuntimeError"),
        (raising(AdviceError("not a number")), "advice"),
        (raising(asyncio.CancelledError()), "CancelledError"),
        (lambda requests: [], "wrong_answer_count"),
        (lambda requests: None, "wrong_answer_count"),
        (lambda requests: [Advice(logits=(1.0,))] * len(requests), "wrong_logit_count"),
        (lambda requests: [(0.0, 1.0)] * len(requests), "wrong_type"),
        (lambda requests: [None] * len(requests), "unanswered"),
        (lambda requests: [Advice(logits=(float("nan"), 0.0))], "not_finite"),
        (lambda requests: [DeadlineError("too slow")], "timeout"),
        (lambda requests: [StatusError(503, "busy")], "status_503"),
    ],
)
def test_a_failure_is_counted_and_the_run_goes_on(monkeypatch, answer, kind):
    warnings = []
    monkeypatch.setattr(torchrl_logger, "warning", warnings.append)
    with make_service(Answering(answer)) as service:
        for _ in range(3):
            assert ask(service, [request("a")]) == [None]
    assert service.errors == {kind: 3}
    # One line for the kind, and one if three in a row stop the asking.
    assert 1 <= len(warnings) <= 2 and all(kind in line for line in warnings)
    assert service.stats()["failed"] == service.stats()["calls"] == 3
    assert service.budget.spent == 3
    assert service.lookup("a") is None


def test_one_bad_answer_leaves_the_others():
    good = Advice(logits=(0.0, 1.0))
    with make_service(Answering(lambda requests: [good, None])) as service:
        assert ask(service, [request("a"), request("b")]) == [good, None]
    assert service.stats()["answered"] == service.stats()["failed"] == 1


def test_a_late_answer_is_given_up_at_the_deadline():
    service = make_service(Answering(lambda requests: asyncio.sleep(60)), timeout_s=0.05)
    with service:
        start = time.perf_counter()
        assert ask(service, [request("a"), request("b")]) == [None, None]
        assert time.perf_counter() - start < 2.0
    assert service.errors == {"timeout": 2}


def test_an_advisor_that_blocks_its_loop_is_left_behind():
    release = threading.Event()
    stuck = [True]

    def answer(requests):
        if stuck.pop():
            release.wait(10)
        return [Advice(logits=(0.0, 1.0))]

    with make_service(Answering(answer), timeout_s=0.05) as service:
        assert ask(service, [request("a")]) == [None]
        stuck.append(False)
        assert ask(service, [request("b")]) != [None]
        release.set()
    assert service.errors == {"timeout": 1}
    join_loops()


def test_keyboard_interrupt_passes_through():
    service = make_service(Answering(raising(KeyboardInterrupt())))
    with service, pytest.raises(KeyboardInterrupt):
        ask(service, [request("a")])
    assert service.budget.spent == 1
    assert not service.errors


def test_works_inside_a_running_loop():
    service = make_service(KnownAdvisor())

    async def cell():
        return ask(service, [request("a")])

    with service:
        assert asyncio.run(cell())[0].logits == (0.0, 1.0)


def test_the_thread_starts_late_and_ends_with_close():
    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "lore-advice"]

    before = len(threads())
    service = make_service(KnownAdvisor())
    assert len(threads()) == before
    ask(service, [request("a")])
    assert len(threads()) == before + 1
    service.close()
    service.close()
    assert len(threads()) == before
    assert ask(service, [request("b")])[0] is not None
    service.close()


def test_a_copy_in_another_process_spends_from_the_same_ledger(tmp_path):
    budget = CallBudget(2, store=AdviceStore(tmp_path / "advice.sqlite"))
    cache = AdviceCache(store=budget.store)
    with AdviceService(KnownAdvisor(), budget=budget, cache=cache) as service:
        ask(service, [request("a")])
        copy = pickle.loads(pickle.dumps(service))
        assert copy.policy.budget is copy.budget
        assert copy.lookup("a") == service.lookup("a")
        with copy:
            assert ask(copy, [request("bb"), request("c")])[0].logits == (0.0, 2.0)
        # Neither can ask more, and each counts its own calls.
        assert ask(service, [request("d")]) == [None]
    assert copy.budget.spent == service.budget.spent == 2
    assert copy.stats()["calls"] == service.stats()["calls"] == 1


def test_a_copy_that_would_spend_the_budget_again_is_refused():
    with pytest.raises(TypeError, match=r"store=AdviceStore\(path\)"):
        pickle.dumps(make_service(KnownAdvisor()))


def test_a_copy_whose_late_answers_would_be_lost_is_refused(tmp_path):
    budget = CallBudget(2, store=AdviceStore(tmp_path / "advice.sqlite"))
    with pytest.raises(TypeError, match="mode='blocking'"):
        pickle.dumps(AdviceService(KnownAdvisor(), budget=budget, mode="async"))


def test_state_survives_json():
    service = make_service(KnownAdvisor(), total=4)
    with service:
        ask(service, [request("a"), request("bb")])
        step(service, "a", "x")
    service.policy.cooldown.left = 3
    service.errors["timeout"] += 2

    restored = make_service(KnownAdvisor(), total=4)
    restored.load_state_dict(json.loads(json.dumps(service.state_dict())))
    timed = {"latency_p50_s": 0.0, "latency_p95_s": 0.0}
    assert restored.stats() == service.stats() | timed
    assert restored.errors == {"timeout": 2}
    assert restored.lookup("bb").logits == (0.0, 2.0)
    assert restored.advisor.asked == [["a", "bb"], ["x"]]


def test_bad_input_is_named():
    with pytest.raises(TypeError, match="advise"):
        make_service(object())
    other = CallPolicy(CallBudget(3), cooldown=Cooldown(1))
    with pytest.raises(ValueError, match="same CallBudget"):
        make_service(KnownAdvisor(), policy=other)
    with pytest.raises(ValueError, match=r"mode='eager' is impossible"):
        make_service(KnownAdvisor(), mode="eager")


def test_each_failed_answer_is_counted_by_its_kind_and_charged():
    answers = [
        Advice(logits=(0.0, 1.0), usage=Usage(10, 2, 0.5)),
        StatusError(429, "slow down", usage=Usage(1, 0, 0.25)),
        None,
    ]
    with make_service(Answering(lambda requests: answers)) as service:
        assert ask(service, [request(key) for key in "abc"]) == [answers[0], None, None]
    assert service.errors == {"status_429": 1, "unanswered": 1}
    assert service.stats()["tokens"] == service.budget.tokens == 13
    assert service.stats()["cost"] == service.budget.cost == 0.75
    assert service.stats()["lost"] == 2


def test_what_the_advisor_has_nothing_to_say_of_is_not_asked_again():
    advisor = Answering(lambda requests: [None] * len(requests))
    with make_service(advisor) as service:
        for key in ("a", "a", "a", "b"):
            assert step(service, key)[0].advice is None
        assert service.budget.spent == 2
        assert service.errors == {"unanswered": 2}


def test_a_failed_batch_is_charged_once():
    error = AdviceError("cut off", usage=Usage(7))
    with make_service(Answering(raising(error))) as service:
        ask(service, [request("a"), request("b")])
    assert service.errors == {"advice": 2}
    assert service.budget.tokens == 7


@pytest.mark.parametrize(
    "answer",
    [
        raising(FatalAdviceError("not in the recording")),
        lambda requests: [FatalAdviceError("not in the recording")],
    ],
)
def test_a_fatal_error_reaches_the_caller(answer):
    with make_service(Answering(answer)) as service:
        with pytest.raises(FatalAdviceError, match="not in the recording"):
            ask(service, [request("a")])
        assert not service.errors
        assert service.stats()["lost"] == 1


def test_another_prompt_does_not_share_answers():
    advisor = KnownAdvisor()
    with make_service(advisor) as service:
        advisor.cache_prefix = "prompt 1"
        ask(service, [request("a")])
        assert service.lookup("a") is not None
        advisor.cache_prefix = "prompt 2"
        assert service.lookup("a") is None
        ask(service, [request("a")])
    assert advisor.asked == [["a"], ["a"]]


def test_results_reach_the_policy():
    good = [Advice(logits=(0.0, 1.0))]
    answers = [[None], [DeadlineError()], good]
    advisor = Answering(lambda requests: answers.pop(0))
    with make_service(advisor) as service:
        outages = []
        for _ in range(3):
            ask(service, [request("a")])
            outages.append(service.policy.outage.out)
    # Nothing to say is no failure of the advisor's.
    assert outages == [False, True, False]


def test_a_disk_that_fails_costs_the_advice_and_not_the_run(tmp_path, monkeypatch):
    store = AdviceStore(tmp_path / "advice.sqlite")
    budget = CallBudget(5, store=store)

    class Right:
        async def advise(self, requests):
            return [Advice(logits=(0.0, 3.0)) for _ in requests]

    with AdviceService(Right(), budget=budget, cache=AdviceCache(store=store)) as service:
        assert ask(service, [request("wall")]) != [None]
        assert service.stats()["budget_left"] == 4

        def full(*args, **kwargs):
            raise StoreError("disk full")

        monkeypatch.setattr(store, "write", full)
        assert ask(service, [request("door")]) == [None]
        assert service.lookup("wall") is not None
        monkeypatch.setattr(store, "read", full)
        assert service.lookup("nothing") is None
        assert step(service, "door")[0].advice is None
        assert service.state_dict()["cache"]["entries"][0][0] == "wall"
        assert service.errors["store"] >= 4
        assert service.stats()["calls"] == 1


def test_an_advisor_whose_advise_is_not_async_is_named():
    class Plain:
        def advise(self, requests):
            return [Advice((1.0, 0.0)) for _ in requests]

    with make_service(Plain()) as service, pytest.raises(FatalAdviceError, match="async def"):
        ask(service, [request("a")])


def test_another_advisor_starts_fresh_with_the_answers_that_there_are(tmp_path):
    def planner(request):
        return [0.0, 1.0]

    def advisors():
        right = ScriptedAdvisor(planner, competence=0.5)
        return [right, StaleAdvisor(right), TurningAdvisor(right, right), KnownAdvisor()]

    for saved, before in enumerate(advisors()):
        with make_service(before) as service:
            ask(service, [request("a")])
            state = json.loads(json.dumps(service.state_dict()))
        for loaded, after in enumerate(advisors()):
            with make_service(after) as service:
                service.load_state_dict(state)
                assert service.stats()["calls"] == 1
                if loaded == saved and hasattr(after, "state_dict"):
                    assert after.state_dict() == before.state_dict()
    recorded = RecordingAdvisor(advisors()[0], tmp_path / "answers.sqlite")
    with make_service(recorded) as service:
        service.load_state_dict(state)
    recorded.close()
