from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from lore_torchrl.sandbox import Program, ProgramBandit, ProgramSet

pytest.importorskip("pydantic_monty")


def features(*names: str, scale: float = 1.0) -> Program:
    pairs = ", ".join(f"'{name}': {scale} * obs['n']" for name in names)
    return Program(
        "features",
        f"def compute_features(obs):\n    return {{{pairs}}}",
        checks={"names": sorted(names)},
    )


def test_a_later_program_takes_free_columns():
    programs = ProgramSet([features("a", "b")], columns=4)
    programs.add(features("c"))
    assert [used.columns for used in programs.used] == [slice(0, 2), slice(2, 3)]
    with pytest.raises(ValueError, match="of 1 free columns"):
        programs.add(features("d", "e"))
    programs.retire(programs.used[0], "a test")
    with pytest.raises(ValueError, match="of 1 free columns"):
        programs.add(features("d", "e"))
    with pytest.raises(ValueError, match="in use already"):
        programs.add(features("c"))
    with pytest.raises(ValueError, match="at least one"):
        ProgramSet([])
    unchecked = replace(features("a"), checks={})
    with pytest.raises(ValueError, match=f"{unchecked.code_id}, which was never .*: put it last"):
        ProgramSet([unchecked, features("c")], columns=64)


def test_a_result_is_computed_once_for_each_view():
    programs = ProgramSet([features("a")])
    [used] = programs.used
    for n in (1, 2, 1, 1):
        assert programs.compute([used], {"n": n})[used].tolist() == [n]
    assert (used.run, used.cached, used.failed) == (2, 2, 0)


def test_failures_are_counted_and_retire_a_program():
    broken = Program("features", "def compute_features(obs):\n    return {'a': 1 / obs['n']}")
    programs = ProgramSet([broken], max_failures=3)
    [used] = programs.used
    for _ in range(3):
        assert programs.compute([used], {"n": 0}) == {}
        assert programs.compute([used], {"n": 2})
    assert (
        used.retired.startswith("3 failures, the last: ZeroDivisionError")
        and programs.active() == []
    )
    assert programs.stats() == {"run": 4, "cached": 2, "failed": 3, "retired": 1, "score": 0}


def test_more_features_than_columns_are_a_failure():
    wide = features("a", "b", "c")
    programs = ProgramSet([Program("features", wide.code, checks={"names": ["a", "b"]})])
    programs.used[0].names = None
    assert programs.compute(programs.used, {"n": 1}) == {} and programs.used[0].failed == 1


def test_a_score_stays_where_the_latest_returns_tell_nothing():
    [used] = ProgramSet([features("a")]).used
    values = np.arange(10.0)[:, None]
    for _ in range(16):
        used.observe(values, values[:, 0])
    assert used.score == pytest.approx(1.0)
    for _ in range(512):
        used.observe(values, np.zeros(10))
    assert used.score > 0.0


def test_other_names_than_before_are_a_failure():
    code = "def compute_features(obs):\n    return {obs['name']: 1.0}"
    programs = ProgramSet([Program("features", code)])
    assert programs.compute(programs.used, {"name": "a"})
    assert not programs.compute(programs.used, {"name": "b"})
    again = ProgramSet([Program("features", code)])
    again.load_state_dict(json.loads(json.dumps(programs.state_dict())))
    assert not again.compute(again.used, {"name": "b"}), "nor after a resume"


def test_the_program_that_tells_most_of_returns_comes_first():
    programs = ProgramSet([features("a"), features("b", scale=2.0)])
    first, second = programs.used
    rng = np.random.default_rng(0)
    for _ in range(16):
        returns = rng.random(20)
        first.observe(rng.random((20, 1)), returns)
        second.observe(returns[:, None] ** 2, returns)
    assert second.score > 0.99 and first.score < 0.2
    assert programs.active() == [second, first]


def test_a_program_whose_score_is_unknown_has_its_turn():
    programs = ProgramSet([features("a"), features("b")])
    first, second = programs.used
    first.score = 0.4
    for _ in range(16):
        assert programs.active() == [second, first]
        second.observe(np.arange(3.0)[:, None], np.zeros(3))
    assert second.score is None and programs.active() == [first, second]


def test_an_evaluation_counts_and_keeps_its_results_for_itself():
    programs = ProgramSet(
        [Program("features", "def compute_features(obs):\n    return {obs['n']: 1.0}")]
    )
    held_out = programs.for_evaluation()
    assert held_out.compute(held_out.used, {"n": "b"})
    assert programs.compute(programs.used, {"n": "a"}) and programs.used[0].names == ["a"]
    assert not programs.compute(programs.used, {"n": "b"}), "another name than before"
    assert (programs.used[0].failed, held_out.used[0].failed) == (1, 0)


def test_a_set_goes_on_with_the_same_programs_in_the_same_columns_alone():
    saved = ProgramSet([features("a"), features("b")]).state_dict()
    ProgramSet([features("a"), features("b"), features("c")]).load_state_dict(saved)
    for others in (["b", "a"], ["a"], ["a", "c"]):
        with pytest.raises(ValueError, match="Keep those of the file and their order"):
            ProgramSet([features(name) for name in others]).load_state_dict(saved)


def played(gain: float, *, blocks: int = 60, **settings) -> ProgramBandit:
    bandit = ProgramBandit(**({"off_share": 0.3, "block_episodes": 4} | settings))
    stream = random.Random(1)
    for _ in range(4 * blocks):
        bandit.observe(bandit.block, gain * bandit.on + stream.random())
    return bandit


def test_a_bandit_finds_out_what_costs_return():
    assert not played(-0.5).pays
    assert played(0.5).pays and played(0.5).gain == pytest.approx(0.5, abs=0.2)
    assert not played(-0.5, blocks=60, off_share=0.3, seed=5).pays
    assert played(-0.5, off_share=0.0).pays and played(-0.5, off_share=0.0).gain is None


@pytest.mark.parametrize("value", [-0.7, 1 / 3])
def test_a_bandit_sees_no_loss_where_all_returns_are_equal(value):
    for seed in range(20):
        bandit = ProgramBandit(off_share=0.3, block_episodes=4, seed=seed)
        for _ in range(400):
            bandit.observe(bandit.block, value)
        assert bandit.gain == pytest.approx(0.0, abs=1e-9) and bandit.pays


def test_a_bandit_ignores_episodes_of_an_earlier_block():
    bandit = ProgramBandit(off_share=0.5, block_episodes=1)
    bandit.observe(0, 1.0)
    bandit.observe(0, 1.0)
    assert bandit.block == 1


def test_a_set_goes_on_where_it_was_saved():
    programs = ProgramSet([features("a")], block_episodes=2)
    stream = np.random.default_rng(0)
    episodes = [(stream.random((5, 1), dtype=np.float32), stream.random(5)) for _ in range(18)]

    def play(each: ProgramSet, values: np.ndarray, returns: np.ndarray) -> None:
        [used] = each.used
        each.compute([used], {"n": len(used.seen)})
        used.observe(values, returns)
        each.observe(used, used.bandit.block, 1.0)

    for episode in episodes[:9]:
        play(programs, *episode)
    restored = ProgramSet([features("a")], block_episodes=2)
    restored.load_state_dict(json.loads(json.dumps(programs.state_dict())))
    for episode in episodes[9:]:
        for each in (programs, restored):
            play(each, *episode)
    assert restored.state_dict() == programs.state_dict()
    assert restored.used[0].score is not None
