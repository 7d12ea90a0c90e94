"""The service in async mode: nothing waits, nothing is asked or paid twice, all is counted."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
from questions import join_loops, request, step

from lore_torchrl.advisors.base import Advice
from lore_torchrl.advisors.errors import AdviceError, FatalAdviceError
from lore_torchrl.service import AdviceService, CallBudget, CallPolicy


class Held:
    """Answers, with the length of the key, when it is let; some keys fail."""

    def __init__(self, failing=()):
        self.asked = []
        self.failing = failing
        self.let = threading.Event()

    async def advise(self, requests):
        self.asked += [item.cache_key for item in requests]
        while not self.let.is_set():
            await asyncio.sleep(0.002)
        return [
            AdviceError("no") if item.cache_key in self.failing else self.answer(item.cache_key)
            for item in requests
        ]

    @staticmethod
    def answer(key):
        return Advice(logits=(0.0, float(len(key))))


def numbers(service, *keys):
    """Ask whatever the policy says, and return the numbers of the questions."""
    return [reply.advice_id for reply in service.ask([request(key) for key in keys])]


def make_service(advisor, total=10, **config):
    config.setdefault("timeout_s", 20.0)
    return AdviceService(advisor, budget=CallBudget(total), mode="async", **config)


def settled(service):
    """Every call made is accounted for, once."""
    stats = service.stats()
    assert stats["calls"] == stats["in_time"] + stats["late"] + stats["lost"] + stats["in_flight"]
    assert stats["answered"] == stats["in_time"] + stats["late"]
    return stats


def test_a_question_gets_an_id_at_once_and_its_answer_later():
    advisor = Held()
    with make_service(advisor) as service:
        ids = numbers(service, "a", "bb")
        assert ids == [1, 2]
        assert service.budget.spent == 2
        assert service.lookup("a") is None and service.answers(ids) == {}
        assert settled(service)["in_flight"] == 2
        advisor.let.set()
        assert service.drain(10.0) == 0
        assert service.answers(ids) == {1: Held.answer("a"), 2: Held.answer("bb")}
        assert service.lookup("a") == Held.answer("a")
        stats = settled(service)
    assert stats["late"] == 2 and stats["in_time"] == stats["lost"] == stats["in_flight"] == 0
    assert stats["latency_p95_s"] >= stats["latency_p50_s"] > 0


def test_an_abstract_state_in_flight_is_not_asked_about_twice():
    advisor, budget = Held(), CallBudget(10)
    policy = CallPolicy(budget, calls_per_step=4)
    with AdviceService(advisor, budget=budget, policy=policy, mode="async") as service:
        service.counters.latency = lambda _: 60.0  # no reason to take the server for silent
        step(service, "a", "b", abstract_state="hall")
        step(service, "c", "d", abstract_state="hall")
        step(service, "e", abstract_state="cellar")
        assert settled(service)["in_flight"] == 2
        advisor.let.set()
        service.drain(10.0)
        assert advisor.asked == ["a", "e"]
        assert service.cache.get("c", "hall") == Held.answer("a")


def test_a_situation_in_flight_is_not_asked_about_twice():
    advisor = Held()
    with make_service(advisor) as service:
        assert numbers(service, "a", "a") == [1, 1]
        assert numbers(service, "b", "a") == [2, 1]
        assert step(service, "a") == [(1, None, False)]
        advisor.let.set()
        service.drain(10.0)
        assert numbers(service, "a") == [0]
        assert step(service, "a") == [(0, Held.answer("a"), False)]
    assert sorted(advisor.asked) == ["a", "b"]
    assert service.budget.spent == 2


def test_no_more_than_allowed_are_in_flight():
    advisor = Held()
    with make_service(advisor, max_in_flight=2) as service:
        assert numbers(service, "a", "b", "c") == [1, 2, 0]
        assert step(service, "e") == [(0, None, False)], "nor by a step, which is no error"
        assert numbers(service, "d") == [0]
        assert service.errors == {"in_flight": 2}
        assert service.budget.spent == 2
        advisor.let.set()
        service.drain(10.0)
        assert numbers(service, "d") == [3]


def test_the_budget_is_never_exceeded():
    advisor = Held()
    advisor.let.set()
    with make_service(advisor, total=3) as service:
        ids = [i for n in range(5) for i in numbers(service, f"{n}", f"{n}x")]
        service.drain(10.0)
    assert sum(map(bool, ids)) == service.budget.spent == len(advisor.asked) == 3
    assert service.errors["budget"] == 7


def test_failures_are_lost_and_told():
    advisor = Held(failing=("b",))
    advisor.let.set()
    with make_service(advisor) as service:
        numbers(service, "a", "b")
        service.drain(10.0)
        assert service.answers([1, 2]) == {1: Held.answer("a"), 2: None}
        stats = settled(service)
        assert stats["failed"] == stats["lost"] == 1
        assert service.errors == {"advice": 1}
        # What has failed may be asked about again, under another number.
        assert numbers(service, "b") == [3]


def test_closing_with_questions_in_flight_is_bounded():
    service = make_service(Held())
    numbers(service, "a")
    start = time.perf_counter()
    service.close(drain_s=0.1)
    assert time.perf_counter() - start < 5.0
    assert settled(service)["lost"] == 1
    assert service.budget.spent == 1
    assert service.answers([1]) == {1: None}
    service.close()
    assert settled(service)["lost"] == 1


def test_closing_waits_for_what_comes_within_the_bound():
    advisor = Held()
    service = make_service(advisor)
    numbers(service, "a")
    threading.Timer(0.1, advisor.let.set).start()
    service.close(drain_s=10.0)
    assert settled(service)["late"] == 1
    assert service.lookup("a") == Held.answer("a")


class Stuck:
    """Blocks its event loop, which no cancellation ends."""

    def __init__(self):
        self.let = threading.Event()

    async def advise(self, requests):
        self.let.wait(30)
        return [Held.answer(item.cache_key) for item in requests]


def test_an_advisor_that_blocks_its_loop_is_given_up():
    advisor = Stuck()
    service = make_service(advisor, timeout_s=0.05)
    assert numbers(service, "a") == [1]
    time.sleep(0.7)  # the deadline, and half a second of grace
    advisor.let.set()
    assert numbers(service, "b")[0] > 1
    assert service.drain(10.0) == 0
    assert service.lookup("b") is not None
    assert service.errors == {"timeout": 1}
    settled(service)
    service.close()
    join_loops()


def test_what_is_given_up_pauses_the_calls():
    advisor = Stuck()
    service = make_service(advisor, timeout_s=0.05)
    numbers(service, "a")
    time.sleep(0.7)  # the deadline, and half a second of grace
    service.answers(())
    assert not service.policy.outage.ready and service.errors == {"timeout": 1}
    advisor.let.set()
    service.close()
    join_loops()


def test_closing_over_a_blocked_loop_is_bounded():
    advisor = Stuck()
    service = make_service(advisor)
    numbers(service, "a")
    start = time.perf_counter()
    service.close(drain_s=0.05)
    assert time.perf_counter() - start < 10.0
    assert settled(service)["lost"] == 1
    advisor.let.set()
    join_loops()


class Raising:
    def __init__(self, error):
        self.error = error

    async def advise(self, requests):
        raise self.error


@pytest.mark.parametrize("error", [FatalAdviceError("stop"), KeyboardInterrupt()])
def test_a_fatal_error_reaches_the_run_at_its_next_call(error):
    with make_service(Raising(error)) as service:
        numbers(service, "a")
        service.drain(10.0)
        with pytest.raises(type(error)):
            service.answers(())
        assert settled(service)["lost"] == 1
        assert not service.errors


def test_what_was_in_flight_at_a_checkpoint_is_lost_and_paid():
    advisor = Held()
    with make_service(advisor) as service:
        numbers(service, "a", "b")
        state = json.loads(json.dumps(service.state_dict()))
    resumed = make_service(Held(), total=3)
    resumed.load_state_dict(state)
    stats = settled(resumed)
    assert stats["calls"] == stats["lost"] == resumed.budget.spent == 2
    assert stats["in_flight"] == 0
    assert step(resumed, "a", armed=False) == [(0, None, False)]
    with resumed:
        # Numbers go on, so that rows of before are no rows of now.
        assert numbers(resumed, "a", "c") == [3, 0]


def test_many_threads_of_answers_lose_no_count():
    advisor = Held()
    advisor.let.set()
    with make_service(advisor, total=300, max_in_flight=300) as service:
        for n in range(300):
            numbers(service, str(n))
            step(service, str(n // 2), armed=False)
        assert service.drain(30.0) == 0
        stats = settled(service)
        assert stats["answered"] == 300
        assert None not in service.answers(range(1, 301)).values()


class Connected(Held):
    """Holds a connection that belongs to the loop it was opened in."""

    async def advise(self, requests):
        self.loop = asyncio.get_running_loop()
        return await super().advise(requests)

    async def aclose(self):
        self.closed_in = asyncio.get_running_loop()


def test_the_advisor_closes_in_its_own_loop():
    advisor = Connected()
    advisor.let.set()
    with make_service(advisor) as service:
        numbers(service, "a")
        service.drain(10.0)
    assert advisor.closed_in is advisor.loop
