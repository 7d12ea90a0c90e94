from __future__ import annotations

import json
import math

import torch

from lore_torchrl.advisors.base import Advice
from lore_torchrl.service import AdviceCache
from lore_torchrl.service.cache import average

LEFT, RIGHT = Advice(logits=(3.0, 0.0)), Advice(logits=(0.0, 3.0))


def top(advice: Advice) -> int:
    return max(range(len(advice.logits)), key=advice.logits.__getitem__)


def test_the_average_is_the_mean_of_the_distributions():
    sure, unsure = Advice((0.0, 2.0, 1.0), 1.0), Advice((5.0, 0.0, 0.0), 0.25)
    mean = (
        torch.tensor(sure.logits).softmax(0) + 0.25 * torch.tensor(unsure.logits).softmax(0)
    ) / 1.25
    found = average([sure, unsure])
    torch.testing.assert_close(torch.tensor(found.logits).exp(), mean)
    assert math.isclose(found.confidence, 0.625)


def test_one_answer_is_left_as_it_is():
    assert average([LEFT]) is LEFT


def test_answers_that_claim_nothing_are_averaged_evenly():
    found = average([Advice((0.0, 3.0), 0.0), Advice((3.0, 0.0), 0.0)])
    assert math.isclose(found.logits[0], found.logits[1]) and found.confidence == 0.0


def test_steep_answers_stay_finite():
    found = average([Advice((0.0, 1e6)), Advice((0.0, 1e6))])
    assert all(math.isfinite(value) for value in found.logits) and top(found) == 1


def test_a_wrong_answer_is_outvoted_even_in_its_own_situation():
    cache = AdviceCache(answers_averaged=3)
    for key, advice in {"a": LEFT, "b": RIGHT, "c": RIGHT}.items():
        cache.put(key, advice, abstract_state="hall")
    assert top(cache.get("a", abstract_state="hall")) == 1
    assert top(cache.get("new", abstract_state="hall")) == 1
    assert (cache.hits, cache.shared_hits) == (1, 1)


def test_a_second_answer_about_a_situation_is_its_own():
    cache = AdviceCache(answers_averaged=3)
    cache.put("a", LEFT, abstract_state="hall")
    cache.filter_no_op("a", 0)
    cache.put("a", RIGHT, abstract_state="hall")
    assert top(cache.get("a", abstract_state="hall")) == 1
    assert (cache.hits, cache.shared_hits) == (1, 0)


def test_without_averaging_each_answer_serves_as_it_is():
    cache = AdviceCache(answers_averaged=None)
    for key, advice in {"a": LEFT, "b": RIGHT, "c": RIGHT}.items():
        cache.put(key, advice, abstract_state="hall")
    assert cache.get("a", abstract_state="hall") == LEFT
    assert not cache.wants("new", "hall", known=True)


def visit(cache: AdviceCache, key: str, times: int) -> None:
    for _ in range(times):
        cache.get(key, abstract_state="hall")


def test_a_class_wants_answers_the_more_it_is_visited():
    cache = AdviceCache(answers_averaged=3, averaging_visits=2)
    assert cache.wants("a", "hall")
    cache.put("a", LEFT, abstract_state="hall")
    visit(cache, "a", 1)
    assert not cache.wants("a", "hall", known=True)
    visit(cache, "b", 1)
    assert cache.wants("a", "hall", known=True) and cache.wants("b", "hall", known=True)
    assert not cache.wants("c", "other room", known=True)
    cache.put("b", LEFT, abstract_state="hall")
    visit(cache, "b", 3)
    assert not cache.wants("c", "hall", known=True), "the third answer takes twice the visits"
    visit(cache, "b", 1)
    assert cache.wants("c", "hall", known=True)
    cache.put("c", LEFT, abstract_state="hall")
    visit(cache, "c", 1_000)
    assert not cache.wants("c", "hall", known=True), "all its answers are there"


def test_a_peek_is_no_visit():
    cache = AdviceCache(answers_averaged=2, averaging_visits=1)
    cache.put("a", LEFT, abstract_state="hall")
    cache.peek("a", abstract_state="hall")
    assert not cache.wants("a", "hall", known=True)


def test_a_situation_may_vote_more_than_once():
    cache = AdviceCache(answers_averaged=3)
    for advice in (LEFT, RIGHT, RIGHT):
        cache.put("a", advice, abstract_state="hall")
    assert len(cache) == 3
    assert top(cache.get("a", abstract_state="hall")) == 1


def test_a_refuted_answer_serves_its_class_but_not_its_situation():
    cache = AdviceCache(answers_averaged=3)
    cache.put("a", LEFT, abstract_state="hall")
    cache.filter_no_op("a", 0)
    cache.filter_no_op("a", 0)
    assert cache.get("a", abstract_state="hall") is None
    assert cache.wants("a", "hall")
    assert cache.get("b", abstract_state="hall") == LEFT
    cache.put("a", RIGHT, abstract_state="hall")
    assert cache.get("a", abstract_state="hall") == RIGHT
    assert cache.noops_filtered == 1


def test_without_votes_too_a_refuted_answer_makes_way():
    cache = AdviceCache()
    cache.put("a", LEFT)
    cache.filter_no_op("a", 0)
    assert cache.get("a") is None and cache.wants("a")
    cache.put("a", RIGHT)
    assert cache.get("a") == RIGHT


def test_an_advisor_that_repeats_what_was_refuted_is_not_asked_again():
    cache = AdviceCache(answers_averaged=3)
    cache.put("a", LEFT, abstract_state="hall")
    cache.filter_no_op("a", 0)
    cache.put("a", LEFT, abstract_state="hall")
    assert not cache.wants("a", "hall")
    assert len(cache) == 1


def test_an_expired_answer_does_not_vote():
    cache = AdviceCache(answers_averaged=2, ttl_steps=5)
    cache.put("a", LEFT, abstract_state="hall")
    cache.advance(5)
    cache.put("b", RIGHT, abstract_state="hall")
    assert cache.get("c", abstract_state="hall") == RIGHT


def test_votes_survive_a_checkpoint():
    cache = AdviceCache(answers_averaged=3)
    for key, advice in {"a": LEFT, "b": RIGHT, "c": RIGHT}.items():
        cache.put(key, advice, abstract_state="hall")
    cache.put("a", RIGHT, abstract_state="room")
    cache.filter_no_op("a", 0)
    cache.put("a", LEFT, abstract_state="hall")
    visit(cache, "b", 5)
    other = AdviceCache(answers_averaged=3)
    other.load_state_dict(json.loads(json.dumps(cache.state_dict())))
    assert other.get("a", abstract_state="hall") == cache.get("a", abstract_state="hall")
    assert not other.wants("a", "hall") and other.noops_filtered == 1
    assert other.state_dict() == cache.state_dict()


def test_an_average_that_prefers_a_no_op_puts_it_last():
    cache = AdviceCache()
    for probs in ((0.5, 0.4, 0.1), (0.1, 0.4, 0.5)):
        cache.put("k", Advice(tuple(map(math.log, probs))), abstract_state="s")
    assert top(cache.get("k", "s")) == 1
    cache.filter_no_op("k", 1)
    here, elsewhere = cache.get("k", "s"), cache.get("other", "s")
    assert here.logits[1] < min(here.logits[::2]) and top(here) != 1 and top(elsewhere) == 1
    # Another one too, which a single answer prefers: what is left comes first.
    cache.filter_no_op("k", 0)
    assert top(cache.get("k", "s")) == 2
