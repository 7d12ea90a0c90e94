from __future__ import annotations

import pytest
import torch
from chain import LEFT, RIGHT, ChainDescriber, chain_env, play, progress_set
from torchrl.collectors import Collector
from torchrl.envs import check_env_specs

from lore_torchrl import keys
from lore_torchrl.sandbox import Program, ProgramSet, stable_number
from lore_torchrl.transforms import ProgramFeatures

pytest.importorskip("pydantic_monty")

FIRST = Program(
    "features",
    "def compute_features(obs):\n    return {'n': obs['n'] / 5, 'one': 1.0}",
    checks={"names": ["n", "one"]},
)
# It fails in state 2.
SECOND = Program(
    "features",
    "def compute_features(obs):\n    return {'z': 1 / (obs['n'] - 2)}",
    checks={"names": ["z"]},
)


def features(*programs: Program, learning: bool = True, **settings) -> ProgramFeatures:
    programs = ProgramSet(programs, **({"columns": 4, "off_share": 0.0} | settings))
    return ProgramFeatures(programs, ChainDescriber(), learning=learning)


def test_features_stand_beside_the_observation_they_are_of():
    steps, td = play(chain_env(features(FIRST), rows=2), RIGHT, RIGHT)
    n = torch.tensor([1, 2, 3]) / 5
    torch.testing.assert_close(steps[keys.FEATURES][0, :, 0], n[:-1])
    torch.testing.assert_close(steps["next", keys.FEATURES][1, :, 0], n[1:])
    assert (steps[keys.FEATURES][..., 1] == 1).all() and (steps[keys.FEATURES][..., 2:] == 0).all()
    assert steps[keys.FEATURES_MASK].all()
    assert (td[keys.CODE_ID] == stable_number(FIRST.code_id)).all()


def test_a_failure_leaves_zeros_and_no_mask_and_the_run_goes_on():
    transform = features(SECOND)
    steps, _ = play(chain_env(transform), RIGHT, RIGHT)
    assert steps["next", keys.FEATURES_MASK][0, :, 0].tolist() == [False, True]
    assert steps["next", keys.FEATURES][0, :, 0].tolist() == [0.0, 1.0]
    assert steps["next", keys.CODE_ID][0, :, 0].tolist() == [0, stable_number(SECOND.code_id)]
    assert transform.programs.stats()["failed"] == 1


def test_a_describer_that_fails_at_once_is_named():
    class Blind(ChainDescriber):
        def program_view(self, row, observation):
            raise KeyError("odd")

    transform = ProgramFeatures(ProgramSet([FIRST], columns=4, off_share=0.0), Blind())
    with pytest.raises(KeyError) as error:
        play(chain_env(transform), RIGHT)
    assert error.value.__notes__ == ["Blind failed to describe a step."]


def test_a_describer_that_fails_counts_as_a_failure_until_the_reset():
    class Blind(ChainDescriber):
        def program_view(self, row, observation):
            if int(observation["observation"][0]) == 3:
                raise KeyError("odd")
            return super().program_view(row, observation)

    transform = ProgramFeatures(ProgramSet([FIRST], columns=4, off_share=0.0), Blind())
    steps, _ = play(chain_env(transform), RIGHT, RIGHT, LEFT)
    assert steps["next", keys.FEATURES_MASK][0, :, 0].tolist() == [True, False, False]
    (used,) = transform.programs.used
    assert used.failed == 1 and "Blind failed to describe a step: KeyError: 'odd'" in used.error
    steps, _ = play(chain_env(transform), RIGHT)
    assert steps["next", keys.FEATURES_MASK][0, 0, 0]


def test_programs_have_columns_of_their_own():
    transform = features(FIRST, SECOND)
    steps, _ = play(chain_env(transform), RIGHT, RIGHT)
    assert steps["next", keys.FEATURES][0].tolist() == [
        [pytest.approx(0.4), 1.0, 0.0, 0.0],
        [pytest.approx(0.6), 1.0, 1.0, 0.0],
    ]
    assert steps["next", keys.FEATURES_MASK].all()
    both = stable_number(*sorted((FIRST.code_id, SECOND.code_id)))
    assert steps["next", keys.CODE_ID][0, :, 0].tolist() == [stable_number(FIRST.code_id), both]


def test_a_retired_program_leaves_zeros():
    transform = features(SECOND, max_failures=1)
    env = chain_env(transform)
    play(env, RIGHT)
    steps, _ = play(env, LEFT)
    assert transform.programs.used[0].retired and not steps[keys.FEATURES_MASK].any()
    assert not steps[keys.FEATURES].any()


def test_a_program_that_costs_return_is_retired_by_raw_returns():
    transform = features(FIRST, off_share=0.5, block_episodes=1)
    env = chain_env(transform)
    bandit = transform.programs.used[0].bandit
    for _ in range(40):
        # The agent is led astray by the features.
        play(env, *([LEFT] if bandit.on else [RIGHT] * 4))
    assert "return -1" in transform.programs.used[0].retired


def test_without_learning_every_program_runs_and_nothing_is_learned():
    transform = features(FIRST, learning=False, off_share=0.5)
    bandit = transform.programs.used[0].bandit
    bandit.on = False
    steps, _ = play(chain_env(transform), LEFT)
    assert steps["next", keys.FEATURES_MASK].all() and not bandit._returns


def test_a_recording_replays_bitwise():
    def collected():
        torch.manual_seed(0)
        env = chain_env(features(FIRST, SECOND, off_share=0.3, block_episodes=1), rows=2)
        collector = Collector(env, frames_per_batch=80, total_frames=80)
        batch = next(iter(collector)).clone()
        collector.shutdown()
        return batch

    first, second = collected(), collected()
    assert (first == second).all() and not first[keys.FEATURES_MASK].all()


def test_specs_hold_and_bad_settings_fail():
    check_env_specs(chain_env(features(FIRST, SECOND), rows=2))
    with pytest.raises(ValueError, match="programs of features"):
        ProgramFeatures(progress_set("return 0.0"), ChainDescriber())
    with pytest.raises(NotImplementedError):
        features(FIRST)(play(chain_env(), LEFT)[0])
