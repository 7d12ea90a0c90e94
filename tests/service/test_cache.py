from __future__ import annotations

import json

import pytest

from lore_torchrl.advisors.base import Advice
from lore_torchrl.service import AdviceCache, AdviceStore


def test_counts_hits_and_misses():
    cache = AdviceCache()
    assert cache.get("a") is None
    cache.put("a", Advice(logits=(1.0, 2.0)))
    assert cache.get("a") == Advice(logits=(1.0, 2.0))
    assert (cache.hits, cache.misses) == (1, 1)


def test_drops_the_least_recently_used():
    cache = AdviceCache(max_entries=2)
    cache.put("a", Advice(logits=(1.0,)))
    cache.put("b", Advice(logits=(2.0,)))
    cache.get("a")
    cache.put("c", Advice(logits=(3.0,)))
    assert "a" in cache and "b" not in cache and "c" in cache
    assert len(cache) == 2


def test_peek_leaves_counters_and_order_alone():
    cache = AdviceCache(max_entries=2)
    cache.put("a", Advice(logits=(1.0,)))
    cache.put("b", Advice(logits=(2.0,)))
    assert cache.peek("a") is not None and cache.peek("x") is None
    cache.put("c", Advice(logits=(3.0,)))
    assert "a" not in cache
    assert (cache.hits, cache.misses) == (0, 0)


def test_state_survives_json_with_its_order():
    cache = AdviceCache(max_entries=2)
    cache.put("a", Advice(logits=(1.0, 2.0), confidence=0.25))
    cache.put("b", Advice(logits=(0.0, 1.0)))
    cache.get("a")
    restored = AdviceCache(max_entries=2)
    restored.load_state_dict(json.loads(json.dumps(cache.state_dict())))
    assert restored.peek("a") == Advice(logits=(1.0, 2.0), confidence=0.25)
    assert (restored.hits, restored.misses) == (1, 0)
    restored.put("c", Advice(logits=(1.0, 1.0)))
    assert "a" in restored and "b" not in restored


def test_loading_into_a_smaller_cache_keeps_the_newest():
    cache = AdviceCache()
    for name in "abc":
        cache.put(name, Advice(logits=(1.0,)))
    small = AdviceCache(max_entries=1)
    small.load_state_dict(cache.state_dict())
    assert "c" in small and len(small) == 1


def test_plan_subgoal_and_valid_actions_survive_the_state_and_the_store(tmp_path):
    answer = Advice((1.0, 2.0), 0.5, plan=(1, 0), subgoal="eat", valid=(True, False))
    store = AdviceStore(tmp_path / "advice.sqlite")
    cache = AdviceCache(store=store)
    cache.put("a", answer)
    restored = AdviceCache()
    restored.load_state_dict(json.loads(json.dumps(cache.state_dict())))
    assert restored.peek("a") == answer
    assert AdviceCache(store=store).peek("a") == answer


@pytest.mark.parametrize("answers_averaged", [5, None])
def test_a_plan_serves_its_own_situation_alone_and_the_rest_its_abstract_state(answers_averaged):
    cache = AdviceCache(answers_averaged=answers_averaged)
    cache.put("old", Advice((1.0, 0.0), plan=(0,), valid=(True, False)), abstract_state="s")
    cache.put("own", Advice((0.0, 1.0), plan=(1,), valid=(False, True)), abstract_state="s")
    cache.put("new", Advice((0.5, 1.0), plan=(1, 1), subgoal="eat"), abstract_state="s")
    assert cache.get("own", "s").plan == (1,) and cache.get("own", "s").valid == (False, True)
    assert cache.get("old", "s").plan == (0,) and cache.get("old", "s").subgoal == ""
    # Where it has no answer, the latest serves, but for its plan; averaged, all say what is valid.
    other, valid = cache.get("other", "s"), (True, True) if answers_averaged else ()
    assert (other.plan, other.subgoal, other.valid) == ((), "eat", valid)


def test_elsewhere_an_action_is_invalid_where_all_answers_call_it_so():
    cache = AdviceCache(answers_averaged=5)
    cache.put("a", Advice((1.0, 0.0, 0.0), valid=(True, False, False)), abstract_state="s")
    cache.put("b", Advice((0.0, 1.0, 0.0), valid=(False, True, False)), abstract_state="s")
    assert cache.get("c", "s").valid == (True, True, False)
    assert cache.get("b", "s").valid == (False, True, False)
    # The step of a plan does not speak of it: neither does it empty the mask, nor lack one.
    cache.put("d", Advice((0.0, 0.0, 1.0)), abstract_state="s")
    assert cache.get("c", "s").valid == cache.get("d", "s").valid == (True, True, False)


def test_a_second_answer_about_a_situation_brings_its_own_plan():
    cache = AdviceCache(answers_averaged=5)
    cache.put("a", Advice((1.0, 0.0), plan=(0,)), abstract_state="s")
    cache.put("a", Advice((0.0, 1.0), plan=(1,)), abstract_state="s")
    cache.filter_no_op("a", 0)
    assert cache.get("a", "s").plan == (1,)


def test_what_it_knows_beside_its_answers_is_no_longer_than_they_may_be():
    cache = AdviceCache(max_entries=2, answers_averaged=5)
    for name in "abc":
        cache.put(name, Advice((1.0, 0.0)), abstract_state=f"state {name}")
        cache.get(name, f"state {name}")
        cache.filter_no_op(f"other {name}", 0)
        cache.close(f"closed {name}")
    state = cache.state_dict()
    assert list(state["visits"]) == ["state b", "state c"]
    assert list(state["no_ops"]) == ["other b", "other c"]
    assert state["closed"] == ["closed b", "closed c"]
    again = AdviceCache(max_entries=2, answers_averaged=5)
    again.load_state_dict(state)
    assert again.state_dict() == state
