from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lore_torchrl.advisors.base import Advice
from lore_torchrl.service import AdviceCache, AdviceStore, StoreError


def advice(*logits) -> Advice:
    return Advice(logits=logits or (1 / 3, -2.0), confidence=0.1 + 0.2)


@pytest.fixture
def store(tmp_path):
    with AdviceStore(tmp_path / "advice.sqlite") as store:
        yield store


@pytest.fixture(params=["memory", "store"])
def make(request, tmp_path):
    def make(**config):
        config = {"answers_averaged": None, **config}
        if request.param == "store":
            config["store"] = AdviceStore(tmp_path / "advice.sqlite")
        return AdviceCache(**config)

    return make


def counters(cache):
    return cache.hits, cache.shared_hits, cache.misses


def travelled(cache):
    return json.loads(json.dumps(cache.state_dict()))


# ---- neighbours ----


def test_a_state_gives_the_latest_of_its_advice(make):
    cache = make()
    cache.put("a", advice(1.0), abstract_state="room")
    cache.put("b", advice(2.0), abstract_state="room")
    assert cache.get("x", "room") == advice(2.0)
    assert cache.get("a", "room") == advice(1.0)
    assert cache.get("x", "hall") is None
    assert cache.get("x") is None
    cache.put("a", advice(3.0), abstract_state="room")
    assert cache.get("x", "room") == advice(3.0)
    cache.put("a", advice(4.0), abstract_state="hall")
    assert cache.get("x", "room") == advice(2.0)
    assert counters(cache) == (1, 3, 2)


def test_the_latest_of_an_abstract_state_is_not_the_last_used(make):
    cache = make()
    cache.put("a", advice(1.0), abstract_state="room")
    cache.put("b", advice(2.0), abstract_state="room")
    cache.get("a")
    restored = make()
    restored.load_state_dict(travelled(cache))
    assert cache.get("x", "room") == restored.get("x", "room") == advice(2.0)


def test_what_the_memory_drops_is_no_neighbour():
    cache = AdviceCache(max_entries=1)
    cache.put("a", advice(1.0), abstract_state="room")
    cache.put("b", advice(2.0))
    assert cache.get("x", "room") is None


# ---- time to live ----


def test_expires_after_steps(make):
    cache = make(ttl_steps=10)
    cache.put("a", advice(1.0), abstract_state="room")
    cache.advance(9)
    cache.put("b", advice(2.0), abstract_state="hall")
    assert cache.get("a") and cache.get("x", "room")
    cache.advance(1)
    assert "a" not in cache and cache.peek("x", "room") is None
    assert cache.get("a") is None and cache.get("x", "room") is None
    assert cache.get("b") == advice(2.0)
    assert counters(cache) == (2, 1, 2)
    cache.put("a", advice(3.0))
    assert cache.get("a") == advice(3.0)


def test_an_answer_that_replaces_one_expires_by_its_own_age():
    cache = AdviceCache(ttl_steps=10)
    for steps, logits in ((0, (1.0, 0.0)), (6, (0.0, 1.0))):
        cache.advance(steps)
        cache.put("wall", Advice(logits=logits))
    cache.advance(6)
    assert cache.peek("wall").logits == (0.0, 1.0)
    cache.advance(4)
    assert cache.peek("wall") is None


def test_an_expired_neighbour_makes_way_for_the_next(make):
    cache = make(ttl_steps=10)
    cache.put("old", advice(1.0), abstract_state="hall")
    cache.advance(5)
    cache.put("new", advice(2.0), abstract_state="hall")
    assert cache.get("x", "hall") == advice(2.0)
    cache.advance(5)
    assert cache.get("x", "hall") == advice(2.0)


# ---- the store ----


@pytest.mark.parametrize("with_state", [True, False])
def test_contents_are_equal_across_a_restart(store, with_state):
    cache = AdviceCache(store=store)
    for n in range(5):
        cache.put(f"key {n}", advice(n / 7, 1e-300), abstract_state=f"room {n % 2}")
    cache.get("key 1")
    cache.pull()
    state = travelled(cache)
    store.close()

    again = AdviceCache(store=AdviceStore(store.path))
    if with_state:
        again.load_state_dict(state)
        assert again.state_dict() == cache.state_dict()
    assert len(again) == 5
    for n in range(5):
        assert again.peek(f"key {n}") == cache.peek(f"key {n}")
    for room in ("room 0", "room 1"):
        assert again.peek("x", room) == cache.peek("x", room) is not None


def test_what_was_bought_after_the_checkpoint_is_not_lost(store):
    cache = AdviceCache(store=store)
    cache.put("a", advice(1.0))
    cache.put("b", advice(2.0))
    state = travelled(cache)
    cache.put("c", advice(3.0))
    cache.put("a", advice(4.0))

    again = AdviceCache(store=store)
    again.load_state_dict(state)
    assert {key: again.peek(key).logits for key in "abc"} == {"a": (4,), "b": (2,), "c": (3,)}


def test_a_lost_file_is_written_again_from_the_checkpoint(store, tmp_path):
    cache = AdviceCache(store=store)
    cache.put("a", advice(1.0), abstract_state="room")
    elsewhere = AdviceCache(store=AdviceStore(tmp_path / "new.sqlite"))
    elsewhere.load_state_dict(travelled(cache))
    third = AdviceCache(store=AdviceStore(tmp_path / "new.sqlite"))
    assert third.peek("x", "room") == advice(1.0)


def test_entries_of_another_process_are_found_on_a_miss(store):
    ours, theirs = AdviceCache(store=store), AdviceCache(store=AdviceStore(store.path))
    assert ours.get("a") is None
    theirs.put("a", advice(1.0), abstract_state="room")
    assert ours.get("x", "room") == advice(1.0)
    theirs.put("a", advice(2.0))
    assert ours.get("a") == advice(1.0)  # a hit asks nobody
    assert ours.get("y") is None
    assert ours.get("a") == advice(2.0)


def test_the_store_keeps_what_the_memory_drops(store):
    cache = AdviceCache(2, store=store)
    for n in range(5):
        cache.put(str(n), advice(float(n)))
    assert len(cache) == 2
    assert [cache.get(str(n)) for n in range(5)] == [advice(float(n)) for n in range(5)]
    again = AdviceCache(2, store=store)
    assert [again.get(str(n)) for n in range(5)] == [advice(float(n)) for n in range(5)]


def test_what_has_expired_does_not_come_back_from_the_store(store):
    cache = AdviceCache(store=store, ttl_steps=1)
    cache.put("a", advice(1.0))
    assert cache.get("a")
    cache.advance(1)
    assert [cache.get("a"), cache.get("a")] == [None, None]
    again = AdviceCache(store=store, ttl_steps=1)
    again.load_state_dict(travelled(cache))
    assert again.get("a") is None
    again.put("a", advice(2.0))
    assert cache.get("a") == advice(2.0)


def test_prefixes_are_apart(store, caplog):
    cache = AdviceCache(store=store, prefix="prompt 1:")
    cache.put("a", advice(1.0), abstract_state="room")
    other = AdviceCache(store=store, prefix="prompt 2:")
    with caplog.at_level("WARNING", logger="torchrl"):
        other.load_state_dict(travelled(cache))
    assert "Cached answers left out: 1." in caplog.text and "'prompt 1:'" in caplog.text
    assert other.get("a", "room") is None
    other.put("a", advice(2.0))
    assert cache.peek("a") == advice(1.0)


def test_an_answer_that_cannot_be_written_is_served_from_memory(tmp_path):
    path = tmp_path / "advice.sqlite"
    path.write_bytes(b"no database at all" * 100)
    cache = AdviceCache(store=AdviceStore(path))
    with pytest.raises(StoreError):
        cache.put("a", advice(1.0))
    assert cache.get("a") == advice(1.0)


# ---- progress ----


operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 3), st.integers(0, 1)),
        st.tuples(st.just("get"), st.integers(0, 3), st.integers(0, 1)),
        st.tuples(st.just("advance"), st.integers(1, 4), st.just(0)),
    ),
    max_size=40,
)


def apply(cache, operation, n):
    kind, key, coarse = operation
    if kind == "put":
        return cache.put(str(key), advice(float(n)), abstract_state=str(coarse))
    if kind == "get":
        return cache.get(str(key), str(coarse))
    return cache.advance(key)


@settings(max_examples=60, deadline=None)
@given(
    run=operations,
    cut=st.integers(0, 40),
    ttl_steps=st.one_of(st.none(), st.integers(1, 8)),
)
def test_a_restored_cache_goes_on_as_if_nothing_had_been(run, cut, ttl_steps):
    def fresh():
        return AdviceCache(4, ttl_steps=ttl_steps)

    cache = restored = fresh()
    for n, operation in enumerate(run):
        if n == cut:
            restored = fresh()
            restored.load_state_dict(travelled(cache))
        expected = apply(cache, operation, n)
        if restored is not cache:
            assert apply(restored, operation, n) == expected
    assert restored.state_dict() == cache.state_dict()


def test_answers_of_two_processes_to_one_situation_stand_beside_each_other(store):
    first, second = (AdviceCache(store=store) for _ in "ab")
    for cache in (first, second):
        assert cache.get("k", "s") is None
    first.put("k", advice(5.0, 0.0), abstract_state="s")
    second.put("k", advice(0.0, 5.0), abstract_state="s")
    for cache in (first, second, AdviceCache(store=store)):
        assert len(cache) == 2
        assert cache.get("k", "s").logits == pytest.approx([math.log(0.5)] * 2)
