from __future__ import annotations

import math

import pytest
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
    cache = AdviceCache(votes=3)
    for key, advice in {"a": LEFT, "b": RIGHT, "c": RIGHT}.items():
        cache.put(key, advice, coarse="hall")
    assert top(cache.get("a", coarse="hall")) == 1
    assert top(cache.get("new", coarse="hall")) == 1
    assert (cache.hits, cache.near_hits) == (1, 1)


def test_without_votes_each_answer_stands_for_itself():
    cache = AdviceCache()
    for key, advice in {"a": LEFT, "b": RIGHT, "c": RIGHT}.items():
        cache.put(key, advice, coarse="hall")
    assert cache.get("a", coarse="hall") == LEFT
    assert not cache.wants("new", "hall")


def test_a_class_wants_answers_until_it_has_enough():
    cache = AdviceCache(votes=2)
    assert cache.wants("a", "hall")
    cache.put("a", LEFT, coarse="hall")
    assert not cache.wants("a", "hall"), "the same situation is no second vote"
    assert cache.wants("b", "hall")
    cache.put("b", LEFT, coarse="hall")
    assert not cache.wants("c", "hall")
    assert cache.wants("c", "other room") and not cache.wants("c", None)


def test_an_expired_answer_does_not_vote():
    cache = AdviceCache(votes=2, ttl_steps=5)
    cache.put("a", LEFT, coarse="hall")
    cache.advance(5)
    cache.put("b", RIGHT, coarse="hall")
    assert cache.get("c", coarse="hall") == RIGHT
    assert cache.wants("c", "hall")


def test_votes_survive_a_checkpoint():
    cache = AdviceCache(votes=3)
    for key, advice in {"a": LEFT, "b": RIGHT, "c": RIGHT}.items():
        cache.put(key, advice, coarse="hall")
    other = AdviceCache(votes=3)
    other.load_state_dict(cache.state_dict())
    assert other.get("a", coarse="hall") == cache.get("a", coarse="hall")


def test_impossible_votes():
    with pytest.raises(ValueError, match="votes"):
        AdviceCache(votes=0)
