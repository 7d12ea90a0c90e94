"""Questions about situations that have been asked about already."""

from __future__ import annotations

import asyncio

from lore_torchrl.advisors.base import Advice, AdviceRequest
from lore_torchrl.service import AdviceCache, AdviceService, CallBudget
from lore_torchrl.service.flight import Near

HALL = Near(coarse="hall")
REQUEST = AdviceRequest("a hall", ("left", "right"), "hall 1")


class Alternating:
    """Left, then right, and so on; waits where it is told to."""

    def __init__(self):
        self.turn = 0
        self.gate = None

    async def advise(self, requests):
        self.turn += 1
        while self.gate is not None and not self.gate():
            await asyncio.sleep(0.01)
        return [Advice((3.0, 0.0) if self.turn % 2 else (0.0, 3.0)) for _ in requests]


def service(mode="blocking"):
    cache = AdviceCache(votes=3, vote_visits=1)
    return AdviceService(Alternating(), budget=CallBudget(9), cache=cache, mode=mode)


def test_a_known_situation_is_asked_about_again_when_its_class_is_due():
    with service() as asked:
        asked.consult([REQUEST], [HALL])
        assert not asked.wants("hall 1", HALL, known=True)
        assert asked.consult([REQUEST], [HALL])[0].advice.logits == (3.0, 0.0)
        assert asked.budget.spent == 1, "it is not due, and costs nothing"
        asked.find("hall 1", HALL)
        assert asked.wants("hall 1", HALL, known=True)
        reply = asked.consult([REQUEST], [HALL])[0]
        assert reply.advice.logits == (0.0, 3.0) and asked.budget.spent == 2
        both = asked.find("hall 1", HALL).advice
        assert abs(both.logits[0] - both.logits[1]) < 1e-6, "from now on their average serves"


def test_in_async_mode_what_is_known_serves_until_the_second_answer_has_come():
    with service("async") as asked:
        asked.consult([REQUEST], [HALL])
        assert asked.drain(5.0) == 0
        asked.take_late()
        before = asked.stats()
        asked.find("hall 1", HALL)
        released = []
        asked.advisor.gate = lambda: bool(released)
        (reply,) = asked.consult([REQUEST], [HALL])
        assert reply.advice_id == 2 and reply.advice is None
        assert asked.find("hall 1", HALL).advice.logits == (3.0, 0.0)
        after = asked.stats()
        assert (after["in_time"], after["in_flight"]) == (before["in_time"], 1)
        released.append(True)
        assert asked.drain(5.0) == 0
        assert [advice_id for advice_id, _ in asked.take_late()] == [2]


def test_the_last_questions_are_remembered_by_their_number():
    with service() as asked:
        (reply,) = asked.consult([REQUEST], [HALL])
        assert asked.question(reply.advice_id) is REQUEST
        assert asked.question(99) is None


def test_while_a_vote_is_in_flight_no_other_is_wanted():
    released = []
    with service("async") as asked:
        asked.consult([REQUEST], [HALL])
        assert asked.drain(5.0) == 0
        asked.take_late()
        asked.advisor.gate = lambda: released
        asked.find("hall 1", HALL)
        assert asked.wants("hall 1", HALL, known=True)
        assert asked.consult([REQUEST], [HALL])[0].advice_id == 2
        for _ in range(3):
            reply = asked.find("hall 1", HALL)
            assert reply.advice_id == -2 and reply.advice.logits == (3.0, 0.0), "it stands in"
            assert not asked.wants("hall 1", HALL, known=True)
        released.append(True)
        assert asked.drain(5.0) == 0
