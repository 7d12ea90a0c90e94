"""One vector step: look-ups, averaging, and questions about situations that have advice."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import nullcontext

import pytest
from questions import join_loops, request, step

from lore_torchrl.advisors.base import Advice
from lore_torchrl.advisors.errors import AdviceError, FatalAdviceError, Usage
from lore_torchrl.service import (
    AdviceCache,
    AdviceService,
    CallBudget,
    CallPolicy,
    Query,
    StepSignals,
)

LEFT, RIGHT = Advice((3.0, 0.0)), Advice((0.0, 3.0))


class Alternating:
    """Left, then right, and so on; waits where it is told to."""

    def __init__(self):
        self.asked = []
        self.held = False

    async def advise(self, requests):
        self.asked += [item.cache_key for item in requests]
        answer = LEFT if len(self.asked) % 2 else RIGHT
        while self.held:
            await asyncio.sleep(0.01)
        return [answer for _ in requests]


class Counting(AdviceCache):
    """Counts look-ups."""

    looks = 0

    def get(self, *args, **kwargs):
        self.looks += 1
        return super().get(*args, **kwargs)

    def peek(self, *args, **kwargs):
        self.looks += 1
        return super().peek(*args, **kwargs)


def make_service(mode="blocking", cache=None, **policy):
    budget = CallBudget(9)
    cache = AdviceCache(answers_averaged=3, averaging_visits=1) if cache is None else cache
    policy = CallPolicy(budget, **policy)
    return AdviceService(Alternating(), budget=budget, policy=policy, cache=cache, mode=mode)


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_a_situation_is_looked_up_once_per_step(mode):
    cache = Counting()
    with make_service(mode, cache) as service:
        step(service, "hall")
        assert cache.looks == 1 and service.budget.spent == 1
        service.drain(5.0)
        step(service, "hall")
        assert cache.looks == 2 and service.budget.spent == 1


def test_rows_in_one_situation_share_a_question():
    with make_service(calls_per_step=3) as service:
        replies = step(service, "hall", "hall", "door")
        assert [reply.advice_id for reply in replies] == [1, 1, 2]
        assert service.advisor.asked == ["hall", "door"]


def test_without_signals_nothing_is_asked_or_counted():
    with make_service() as service:
        before = service.state_dict()
        assert step(service, "hall", armed=False) == [(0, None, False)]
        assert service.state_dict() == before


def test_the_question_is_phrased_only_if_it_is_asked():
    def phrase():
        raise AssertionError("not asked")

    with make_service() as service:
        queries = [Query("hall", lambda: request("hall")), Query("door", phrase, row=1)]
        service.step(queries, StepSignals([1.0, 0.5], rewards=[0.0, 0.0]))


def test_a_known_situation_is_asked_about_again_when_its_abstract_state_is_due():
    with make_service() as service:
        assert step(service, "1", abstract_state="hall") == [(1, LEFT, False)]
        # The visit makes it due; the answer serves this row, then the average serves.
        assert step(service, "1", abstract_state="hall") == [(2, RIGHT, False)]
        (both,) = step(service, "1", armed=False, abstract_state="hall")
        assert abs(both.advice.logits[0] - both.advice.logits[1]) < 1e-6
        assert service.budget.spent == 2


def test_in_async_mode_the_known_advice_is_a_fallback_until_the_second_answer():
    with make_service("async") as service:
        step(service, "1", abstract_state="hall")
        assert service.drain(5.0) == 0
        service.advisor.held = True
        for _ in range(3):
            # No other question is asked meanwhile.
            assert step(service, "1", abstract_state="hall") == [(2, LEFT, True)]
        assert service.stats()["in_flight"] == 1 and service.answers([2]) == {}
        service.advisor.held = False
        assert service.drain(5.0) == 0
        assert service.answers([2]) == {2: RIGHT}


def test_a_bought_answer_beside_a_filtered_one_goes_before_a_plan():
    with make_service(cache=AdviceCache(answers_averaged=3, averaging_visits=100)) as service:
        step(service, "1", abstract_state="hall")
        assert step(service, "1", abstract_state="hall", no_op=0) == [(2, RIGHT, False)]
        (reply,) = step(service, "1", abstract_state="hall", planned=Advice((0.0, 2.0)))
        assert reply.advice == RIGHT and service.stats()["plan_steps"] == 0


def test_a_further_answer_is_no_answer_to_another_situation():
    with make_service() as service:
        for _ in range(2):
            step(service, "room", abstract_state="hall")
        assert service.lookup("room#2") is None
        assert step(service, "room#2") == [(3, LEFT, False)]


class OddError(Exception):
    def __str__(self):
        raise ValueError("no text")


class OddAdviceError(AdviceError, kind="odd"):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize("mode", ["blocking", "async"])
@pytest.mark.parametrize(
    ("answer", "errors"),
    [
        (OddAdviceError(), {"ValueError": 1}),
        (Advice((0.0, 1.0), usage=Usage(None, "3", float("nan"))), {}),
        (Advice((0.0, 1.0), usage=Usage(10**400, -2, float("inf"))), {}),
        (OddError(), {"ValueError": 1}),
    ],
)
def test_odd_costs_and_odd_errors_cost_the_advice_at_most(mode, answer, errors):
    class Strange:
        async def advise(self, requests):
            if isinstance(answer, Exception):
                raise answer
            return [answer for _ in requests]

    budget = CallBudget(9)
    with AdviceService(Strange(), budget=budget, policy=CallPolicy(budget), mode=mode) as service:
        step(service, "hall")
        assert service.drain(5.0) == 0 and service.errors == errors
        stats = service.stats()
        assert all(abs(value) < 2**54 for value in stats.values())
        assert stats["answered"] == (not errors) and budget.spent == 1


class Panic(BaseException):
    """As an extension in Rust raises it."""


class Silent:
    """Blocks the event loop, or ends in a way that is no Exception."""

    def __init__(self, error=None):
        self.error = error
        self.release = threading.Event()

    async def advise(self, requests):
        if self.error is not None:
            raise self.error
        self.release.wait(5.0)


def test_a_panic_costs_the_answer():
    budget = CallBudget(9)
    with AdviceService(Silent(Panic("no")), budget=budget, policy=CallPolicy(budget)) as service:
        step(service, "hall")
        assert service.errors == {"Panic": 1}


def test_in_async_mode_the_next_steps_give_up_a_blocked_advisor_and_raise_what_is_fatal():
    for advisor, fatal in ((Silent(FatalAdviceError("no")), True), (Silent(), False)):
        budget = CallBudget(1)
        service = AdviceService(
            advisor, budget=budget, policy=CallPolicy(budget), mode="async", timeout_s=0.1
        )
        step(service, "hall")
        end = time.monotonic() + 4.0
        with pytest.raises(FatalAdviceError) if fatal else nullcontext():
            while time.monotonic() < end and not service.errors:
                step(service, "hall")
                time.sleep(0.01)
        assert fatal or service.errors == {"timeout": 1}
        assert service.exhausted
        service.close()
        advisor.release.set()
        join_loops()


def test_a_no_op_is_filtered_and_asked_about_again():
    with make_service() as service:
        assert step(service, "wall") == [(1, LEFT, False)]
        assert step(service, "wall", no_op=0) == [(2, RIGHT, False)]
        assert service.stats()["noops_filtered"] == 1


def test_the_last_questions_are_remembered_by_their_number():
    with make_service() as service:
        (reply,) = step(service, "hall")
        assert service.question(reply.advice_id) == request("hall")
        assert service.question(99) is None
