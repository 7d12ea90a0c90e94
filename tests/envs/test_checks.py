"""What a run sees of an adapter before it begins, and how it refuses one that does not fit."""

from __future__ import annotations

import sys
from types import ModuleType

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.envs import (
    DTypeCastTransform,
    ExcludeTransform,
    RenameTransform,
    SqueezeTransform,
    UnsqueezeTransform,
)

from lore_torchrl.envs.adapter import MemorylessDescriber, build_adapter, sample_request
from lore_torchrl.envs.batch import row_seed
from lore_torchrl.envs.checks import check_adapter
from lore_torchrl.envs.frozen_lake import FrozenLake, FrozenLakeDescriber
from lore_torchrl.envs.gym_adapter import GymAdapter
from lore_torchrl.envs.pendulum import Pendulum

LAKE = "lore_torchrl.envs.frozen_lake.FrozenLake"
KEY = "SFFF/FHFH/FFFH/HFFG ice 0"


class Own(FrozenLake):
    """A lake with something else in place of one part of its adapter or describer."""

    def __init__(self, env=lambda env: env, planner=None, key=KEY, **parts):
        super().__init__()
        self.change, self.planner = env, planner
        question = sample_request(FrozenLake())
        methods = {"cache_key": lambda *_: key, "request": lambda *_: question}
        attributes = {"in_keys": ("observation",), "actions": ("left", "down", "right", "up")}
        known = {name: part for name, part in (methods | attributes | parts).items() if part}
        self.describer = type("Describer", (MemorylessDescriber,), known)()

    def make_env(self, **settings):
        return self.change(super().make_env(**settings))

    def make_describer(self, *, memory=False, image=False):
        return self.describer

    def make_planner(self):
        return self.planner


def cast(key, before, after):
    return lambda env: env.append_transform(DTypeCastTransform(before, after, [key]))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"in_keys": ("image",)}, "no entry 'image', which Describer reads"),
        ({"actions": ("a", "b")}, r"has 4 actions, Describer names 2"),
        ({"key": 3}, "must return text, got int"),
        ({"key": "other"}, f"'{KEY}' is not what cache_key"),
        ({"actions": ("a", "b", "c", "d")}, r"actions .* are not its own"),
        ({"env": lambda env: env.base_env}, "no entry 'success'"),
        (
            {"env": lambda env: env.append_transform(RenameTransform(["reward"], ["rew"]))},
            "no entry 'reward', which every run reads",
        ),
        (
            {"env": lambda env: env.append_transform(SqueezeTransform(-1, in_keys=["reward"]))},
            r"'reward' must be \[N, 1\], got \[N\]",
        ),
        (
            {"env": cast("success", torch.bool, torch.float32)},
            r"'success' must be torch.bool \[N, 1\], got torch.float32 \[N, 1\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(parts, message):
    with pytest.raises((TypeError, ValueError), match=message):
        check_adapter(Own(**parts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda env: FrozenLake().make_env(num_envs=3, seed=0),
            r"has batch size \[3\], not \[2\]: wrap single environments in a SerialEnv",
        ),
        (
            lambda env: env.append_transform(ExcludeTransform("observation")),
            "neither 'observation' nor 'frame'",
        ),
        (
            cast("observation", torch.float32, torch.float64),
            r"'observation' must be torch.float32 \[N, D\], got torch.float64 \[N, 16\]",
        ),
        (
            lambda env: env.append_transform(UnsqueezeTransform(-2, in_keys=["observation"])),
            r"'observation' must be torch.float32 \[N, D\], got torch.float32 \[N, 1, 16\]",
        ),
    ],
)
def test_what_the_policy_cannot_see_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        check_adapter(Own(env=change), advised=False)


def test_actions_are_one_choice():
    class Choices(Own):
        def make_gym(self, pixels=False):
            env = super().make_gym(pixels)
            # As wide as four actions, but two choices.
            env.action_space = gymnasium.spaces.MultiDiscrete([3, 1])
            return env

    with pytest.raises(ValueError, match=r"(?s)must be one-hot, .* or floats .* got MultiOneHot"):
        check_adapter(Choices(), masked=True)


def test_entries_that_nothing_reads_are_named():
    adapter = FrozenLake()
    adapter.episode_keys = ("observation",)
    with pytest.raises(TypeError, match=r"FrozenLake has episode_keys, but no summarize_episodes"):
        check_adapter(adapter)
    adapter.summarize_episodes = lambda last: {}
    check_adapter(adapter)
    adapter.episode_keys = ("nope",)
    with pytest.raises(ValueError, match=r"no entry 'nope', which summarize_episodes\(\) reads"):
        check_adapter(adapter, advised=False)


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ([1.0, 0.0, 0.0], False),
        ([], False),
        (None, True),
        ((0, 1, float("-inf"), 2), True),
    ],
)
def test_a_planner_is_asked_once_at_the_start(values, fits):
    adapter = Own(planner=lambda request: values)
    if fits:
        check_adapter(adapter)
    else:
        with pytest.raises(ValueError, match="None or one number for each of"):
            check_adapter(adapter)
    check_adapter(adapter, advised=False)


def test_what_a_run_needs_beyond_that_is_named():
    with pytest.raises(
        TypeError, match=r"no abstract_state\(\).*lore.calls.abstract_states=false .*averaged=null"
    ):
        check_adapter(Own(), abstract_states=True)
    with pytest.raises(ValueError, match=r"'action_mask', which lore\.epsilon"):
        check_adapter(FrozenLake(), masked=True)
    with pytest.raises(ValueError, match=r"FrozenLakeDescriber.request\(\) holds no picture"):
        check_adapter(FrozenLake(), image=True)
    with pytest.raises(ValueError, match="no picture"):
        sample_request(FrozenLake(), image=True)
    # A stock run has no describer.
    check_adapter(Own(cache_key=None), advised=False)
    assert check_adapter(Pendulum(), masked=True).action_bounds is not None


@pytest.mark.parametrize(
    ("seed", "row", "name"),
    [(-1, 0, "seed"), (1_000_000, 0, "seed"), (0, -1, "row"), (0, 1000, "row")],
)
def test_seeds_outside_their_range_are_refused(seed, row, name):
    with pytest.raises(ValueError, match=f"{name} must lie in"):
        row_seed(seed, row)


def build(path, env_id="x", **options):
    return build_adapter(path, env_id, max_steps=None, options=options)


@pytest.fixture
def own(monkeypatch):
    """A module of a user's, whose class ``Thing`` is made of methods."""
    module = ModuleType("own")
    monkeypatch.setitem(sys.modules, "own", module)
    return lambda *bases, **methods: setattr(module, "Thing", type("Thing", bases, methods))


def test_options_reach_the_adapter(own):
    adapter = build(LAKE, "FrozenLake8x8-v1", slippery=False)
    assert (adapter.settings["is_slippery"], len(adapter.squares)) == (False, 8)
    own(FrozenLake, __init__=lambda self, env_id, *, max_steps, **rest: setattr(self, "r", rest))
    assert build("own.Thing", any=1).r == {"any": 1}


@pytest.mark.parametrize(
    ("path", "env_id", "options", "message"),
    [
        ("frozen_lake.FrozenLake", "FrozenLake-v1", {"depth": 3}, "slippery.*'depth'"),
        ("frozen_lake.FrozenLake", "CliffWalking-v1", {}, "CliffWalking-v1 is no FrozenLake"),
        ("frozen_lake.FrozenLake", "FrozenLake-v1", {"max_steps": 9}, "set env.max_steps instead"),
        ("frozen_lake.FrozenLake", "FrozenLake-v1", {"env_id": "x"}, "set env.id instead"),
        ("snake.Snake", "Snake", {"size": 4, "apples": 30}, "at most 13, got 30.*Raise size"),
        ("snake.Snake", "Snake", {"size": 7.5}, "size must be a whole number from 4 on, got 7.5"),
        ("finance.FinancialRegimes", "Finance", {"regimes": {"drift": 1.0}}, "list of mappings"),
        ("finance.FinancialRegimes", "Finance", {"window": 20.5}, "window must be a whole number"),
        ("frozen_lake.FrozenLake", "FrozenLake-v1", {"slippery": "no"}, "slippery.*true or false"),
        ("snake.Snake", "Snake", {"poison": "off"}, "poison must be true or false, got 'off'"),
        ("minigrid.MiniGrid", "x", {"done_is_valid": 1}, "done_is_valid must be true or false"),
        ("crafter.Crafter", "Crafter", {"area": 64}, "a width and a height.*got 64"),
        ("crafter.Crafter", "Crafter", {"area": [64]}, "a width and a height"),
    ],
)
def test_options_that_cannot_be_are_refused(path, env_id, options, message):
    with pytest.raises(ValueError, match=message):
        build_adapter(f"lore_torchrl.envs.{path}", env_id, max_steps=None, options=options)


@pytest.mark.parametrize(
    ("init", "error", "message"),
    [
        (lambda self, env_id: None, ValueError, "does not take.*'max_steps'"),
        (lambda self, *, max_steps: None, ValueError, "too many positional"),
        (lambda self, env_id, *, max_steps: None, TypeError, r"own.Thing needs make_env\(\)"),
    ],
)
def test_an_adapter_takes_what_a_run_gives_it(own, init, error, message):
    own(__init__=init)
    with pytest.raises(error, match=message):
        build("own.Thing")


def test_a_path_that_leads_nowhere():
    with pytest.raises(ValueError, match=r"nowhere.*PYTHONPATH"):
        build("nowhere.Adapter")


def test_a_coarse_key_is_text_and_a_step_can_be_described(monkeypatch):
    monkeypatch.setattr(FrozenLakeDescriber, "abstract_state", lambda *_: 3)
    check_adapter(FrozenLake())
    with pytest.raises(TypeError, match=r"abstract_state\(\) must return text, got int"):
        check_adapter(FrozenLake(), abstract_states=True)
    monkeypatch.undo()
    observed = []
    monkeypatch.setattr(
        FrozenLakeDescriber,
        "observe",
        lambda self, row, observation, action, *, reset: observed.append((action, reset)),
    )
    before = torch.get_rng_state()
    check_adapter(FrozenLake())
    assert observed == [(None, True), (0, False)]
    assert torch.equal(torch.get_rng_state(), before)
    # Where the first step ends the episode there is no further question.
    observed.clear()
    check_adapter(FrozenLake(max_steps=1))
    assert observed == [(None, True)]


@pytest.mark.parametrize("first", [0, 5])
def test_a_gymnasium_environment_of_four_actions_needs_no_more_than_this(first):
    seen = set()

    class Still(gymnasium.Env):
        box = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
        observation_space = gymnasium.spaces.Dict(observation=box)
        action_space = gymnasium.spaces.Discrete(4, start=first)

        def reset(self, *, seed=None, options=None):
            return {"observation": np.zeros(2, np.float32)}, {}

        def step(self, action):
            seen.add(int(action))
            return self.reset()[0], 0.0, False, False, {}

    class Adapter(GymAdapter):
        def make_gym(self, pixels=False):
            return Still()

        def make_describer(self, *, memory=False, image=False):
            return Own().describer

    assert check_adapter(Adapter()) == (2, None, 4, None)
    Adapter().make_env(num_envs=1, seed=0).rollout(40)
    assert seen == set(range(first, first + 4))
