"""What a run sees of a family before it begins, and how it refuses one that does not fit."""

from __future__ import annotations

import sys
from types import ModuleType

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.envs import DTypeCastTransform, ExcludeTransform, UnsqueezeTransform

from lore_torchrl.envs.family import build_family, row_seed
from lore_torchrl.envs.family_checks import check_family
from lore_torchrl.envs.frozen_lake import FrozenLake, FrozenLakeDescriber
from lore_torchrl.envs.gym_batch import GymFamily
from lore_torchrl.envs.pendulum import Pendulum
from lore_torchrl.envs.situation import sample_request


def broken(**parts):
    """A family with something wrong."""
    monkey = {"in_keys": ("observation",), "actions": ("a", "b", "c", "d"), "key": "k"} | parts

    class Describer:
        in_keys, actions = monkey["in_keys"], monkey["actions"]

        def observe(self, row, observation, action, *, reset):
            pass

        def cache_key(self, row, observation):
            return monkey["key"]

        def request(self, row, observation):
            request = sample_request(FrozenLake())
            return monkey.get("request", request)

    class Family:
        def make_env(self, **settings):
            env = FrozenLake().make_env(**settings)
            return monkey["env"](env) if "env" in monkey else env

        def make_describer(self, *, memory=False, image=False):
            describer = Describer()
            if "without" in monkey:
                monkeypatched = {n: getattr(describer, n) for n in dir(describer) if n[0] != "_"}
                del monkeypatched[monkey["without"]]
                return type("Describer", (), monkeypatched)()
            return describer

    return Family()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"without": "cache_key"}, "no 'cache_key'"),
        ({"in_keys": ("image",)}, "no entry 'image', which Describer reads"),
        ({"actions": ("a", "b")}, r"has 4 actions, Describer names 2"),
        ({"key": 3}, "must return text, got int"),
        ({"request": "what now?"}, "AdviceRequest, got str"),
        ({"key": "other"}, "'SFFF/FHFH/FFFH/HFFG ice 0' is not what cache_key"),
        ({"key": "SFFF/FHFH/FFFH/HFFG ice 0"}, r"actions .* are not its own"),
        ({"env": lambda env: env.base_env}, "no entry 'success'"),
        (
            {
                "env": lambda env: env.append_transform(
                    DTypeCastTransform(torch.bool, torch.float32, ["success"])
                )
            },
            r"'success' must be torch.bool \[N, 1\], got torch.float32 \[N, 1\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(parts, message):
    with pytest.raises((TypeError, ValueError), match=message):
        check_family(broken(**parts))


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
            lambda env: env.append_transform(
                DTypeCastTransform(torch.float32, torch.float64, ["observation"])
            ),
            r"'observation' must be torch.float32 \[N, D\], got torch.float64 \[2, 16\]",
        ),
        (
            lambda env: env.append_transform(UnsqueezeTransform(-2, in_keys=["observation"])),
            r"'observation' must be torch.float32 \[N, D\], got torch.float32 \[2, 1, 16\]",
        ),
    ],
)
def test_what_the_policy_cannot_see_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        check_family(broken(env=change), advised=False)


class Gym(gymnasium.Env):
    """A Gymnasium environment with actions of some kind and steps of some length."""

    observation_space = gymnasium.spaces.Dict(
        observation=gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
    )

    def __init__(self, action_space, returned=5):
        self.action_space, self.returned = action_space, returned

    def reset(self, *, seed=None, options=None):
        return {"observation": np.zeros(2, np.float32)}, {}

    def step(self, action):
        return ({"observation": np.zeros(2, np.float32)}, 0.0, False, False, {})[-self.returned :]


class OfGym(GymFamily):
    """Its environments, with a describer of four actions."""

    def __init__(self, *settings):
        self.settings = settings

    def make_gym(self, pixels=False):
        return Gym(*self.settings)

    def make_describer(self, *, memory=False, image=False):
        key = sample_request(FrozenLake()).cache_key
        actions = tuple(sample_request(FrozenLake()).actions)
        return broken(key=key, actions=actions).make_describer()


def test_actions_are_one_choice():
    check_family(OfGym(gymnasium.spaces.Discrete(4)))
    # As wide as four actions, but two choices.
    with pytest.raises(
        ValueError, match=r"one-hot, \[N, A\], or bounded .* got MultiOneHot \[2, 4\]"
    ):
        check_family(OfGym(gymnasium.spaces.MultiDiscrete([3, 1])), masked=True)


def test_an_environment_that_cannot_be_stepped_is_named():
    with pytest.raises(ValueError, match=r"OfGym: the first step .* fails.*truncated and info"):
        check_family(OfGym(gymnasium.spaces.Discrete(4), 4))


def test_what_is_no_environment_is_named():
    with pytest.raises(TypeError, match=r"make_env\(\) must return a TorchRL .* got NoneType"):
        check_family(broken(env=lambda env: None))


@pytest.mark.parametrize("part", ["in_keys", "actions"])
def test_a_single_text_is_no_list_of_names(part):
    with pytest.raises(TypeError, match=rf"Describer.{part} must list names, .* 'observation'"):
        check_family(broken(**{part: "observation"}))


def test_entries_that_nothing_reads_are_named():
    family = FrozenLake()
    family.episode_keys = ("observation",)
    with pytest.raises(TypeError, match=r"FrozenLake has episode_keys, but no summarize_episodes"):
        check_family(family)
    family.summarize_episodes = lambda last: {}
    check_family(family)


def raises(request):
    raise KeyError("map")


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (lambda request: [1.0, 0.0, 0.0], r"None or 4 numbers, one for each of .*got \[1.0, 0.0"),
        (lambda request: [1.0, 0.0, 0.0, float("nan")], "got .*nan"),
        (lambda request: 1.0, "this one fails: TypeError"),
        (lambda request: [], r"got \[\]"),
        (raises, r"first question this one fails: KeyError\('map'\)"),
        (lambda request: None, None),
        (lambda request: (0, 1, float("-inf"), 2), None),
    ],
)
def test_a_planner_is_asked_once_at_the_start(planner, message):
    key = sample_request(FrozenLake()).cache_key
    actions = tuple(sample_request(FrozenLake()).actions)
    family = broken(key=key, actions=actions)
    family.make_planner = lambda: planner
    if message is None:
        check_family(family)
    else:
        with pytest.raises(ValueError, match=message):
            check_family(family)
    check_family(family, advised=False)


def test_what_a_run_needs_beyond_that_is_named(monkeypatch):
    with pytest.raises(TypeError, match=r"no 'coarse_key'.*lore.calls.coarse=false"):
        check_family(broken(), coarse=True)
    with pytest.raises(ValueError, match=r"'action_mask', which lore\.epsilon"):
        check_family(FrozenLake(), masked=True)
    with pytest.raises(ValueError, match=r"FrozenLakeDescriber.request\(\) holds no picture"):
        check_family(FrozenLake(), image=True)
    with pytest.raises(ValueError, match="no picture"):
        sample_request(FrozenLake(), image=True)
    monkeypatch.setattr(FrozenLake, "episode_keys", ("nope",), raising=False)
    monkeypatch.setattr(FrozenLake, "summarize_episodes", dict, raising=False)
    with pytest.raises(ValueError, match=r"no entry 'nope', which summarize_episodes\(\) reads"):
        check_family(FrozenLake(), advised=False)
    check_family(broken(without="request"), advised=False)
    with pytest.raises(ValueError, match="no entry 'success'"):
        check_family(broken(env=lambda env: env.base_env), advised=False)


def test_continuous_actions_need_no_mask():
    assert check_family(Pendulum(), masked=True).action_bounds is not None


@pytest.mark.parametrize(
    ("seed", "row", "name"),
    [(-1, 0, "seed"), (1_000_000, 0, "seed"), (0, -1, "row"), (0, 1000, "row")],
)
def test_seeds_outside_their_range_are_refused(seed, row, name):
    with pytest.raises(ValueError, match=f"{name} must lie in"):
        row_seed(seed, row)


def test_options_reach_the_family(monkeypatch):
    lake = "lore_torchrl.envs.frozen_lake.FrozenLake"
    options = {"slippery": False, "map_name": "8x8"}
    family = build_family(lake, "FrozenLake-v1", max_steps=None, options=options)
    assert (family.settings["is_slippery"], len(family.squares)) == (False, 8)
    own = ModuleType("own")
    own.Thing = type(
        "Thing",
        (FrozenLake,),
        {"__init__": lambda self, env_id, *, max_steps, **rest: setattr(self, "rest", rest)},
    )
    monkeypatch.setitem(sys.modules, "own", own)
    assert build_family("own.Thing", "x", max_steps=None, options={"any": 1}).rest == {"any": 1}


def test_families_that_are_none(monkeypatch):
    with pytest.raises(ValueError, match=r"nowhere.*PYTHONPATH"):
        build_family("nowhere.Family", "x", max_steps=None, options={})
    with pytest.raises(ValueError, match=r"does not take depth. It takes map_name, slippery"):
        build_family(
            "lore_torchrl.envs.frozen_lake.FrozenLake", "x", max_steps=None, options={"depth": 3}
        )
    own = ModuleType("own")
    own.Thing = type("Thing", (), {"__init__": lambda self, env_id, *, max_steps: None})
    monkeypatch.setitem(sys.modules, "own", own)
    with pytest.raises(TypeError, match=r"own.Thing has no make_env\(\)"):
        build_family("own.Thing", "x", max_steps=None, options={})


@pytest.mark.parametrize(
    ("family", "env_id", "options", "message"),
    [
        ("frozen_lake.FrozenLake", "FrozenLake-v1", {"map_name": "5x5"}, "'4x4', '8x8'.*'5x5'"),
        ("frozen_lake.FrozenLake", "CliffWalking-v1", {}, "CliffWalking-v1 is no FrozenLake"),
        ("frozen_lake.FrozenLake", "FrozenLake-v1", {"max_steps": 9}, "set env.max_steps instead"),
        ("frozen_lake.FrozenLake", "FrozenLake-v1", {"env_id": "x"}, "set env.id instead"),
        ("snake.Snake", "Snake", {"size": 4, "apples": 30}, "at most 13, got 30.*Raise size"),
        ("snake.Snake", "Snake", {"size": 7.5}, "size must be a whole number from 4 on, got 7.5"),
        ("snake.Snake", "Snake", {"apples": 0}, "apples must be a whole number from 1 on, got 0"),
        ("finance.FinancialRegimes", "Finance", {"regimes": {"drift": 1.0}}, "list of mappings"),
        ("finance.FinancialRegimes", "Finance", {"window": 20.5}, "window must be a whole number"),
        ("frozen_lake.FrozenLake", "FrozenLake-v1", {"slippery": "no"}, "slippery.*true or false"),
        ("snake.Snake", "Snake", {"poison": "off"}, "poison must be true or false, got 'off'"),
        ("minigrid.MiniGrid", "x", {"done_is_valid": 1}, "done_is_valid must be true or false"),
        ("minigrid.MiniGrid", "x", {"encode_mission": "no"}, "true, false or null, got 'no'"),
        ("crafter.Crafter", "Crafter", {"area": 64}, "a width and a height.*got 64"),
        ("crafter.Crafter", "Crafter", {"area": [64]}, "a width and a height"),
    ],
)
def test_options_that_cannot_be_are_refused(family, env_id, options, message):
    path = f"lore_torchrl.envs.{family}"
    with pytest.raises(ValueError, match=message):
        build_family(path, env_id, max_steps=None, options=options)


def test_a_family_takes_what_a_run_gives_it(monkeypatch):
    own = ModuleType("own")
    monkeypatch.setitem(sys.modules, "own", own)
    own.Thing = type("Thing", (), {"__init__": lambda self, env_id: None})
    with pytest.raises(TypeError, match=r"Thing\(\) must take the keyword max_steps"):
        build_family("own.Thing", "x", max_steps=None, options={})
    own.Thing = type("Thing", (), {"__init__": lambda self, *, max_steps: None})
    with pytest.raises(TypeError, match=r"Thing\(\) cannot be called with env\.id.*too many pos"):
        build_family("own.Thing", "x", max_steps=None, options={})
    own.Thing = type(
        "Thing",
        (),
        {
            "__init__": lambda self, env_id, *, max_steps: None,
            "make_env": lambda self, **settings: None,
            "make_describer": lambda self: None,
        },
    )
    with pytest.raises(TypeError, match=r"make_describer\(\) must take the keywords memory, image"):
        build_family("own.Thing", "x", max_steps=None, options={})


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("make_gym", "pixels, whether to draw: too many"),
        ("summarize", "a batch: too many"),
        ("summarize_episodes", "the last steps of episodes: too many"),
    ],
)
def test_what_a_family_may_have_takes_what_it_is_given(method, message, monkeypatch):
    own = ModuleType("own")
    own.Thing = type("Thing", (FrozenLake,), {method: lambda self: {}})
    monkeypatch.setitem(sys.modules, "own", own)
    with pytest.raises(TypeError, match=rf"Thing.{method}\(\) must take {message}"):
        build_family("own.Thing", "FrozenLake-v1", max_steps=None, options={})


def test_a_coarse_key_is_text_and_a_step_can_be_described(monkeypatch):
    monkeypatch.setattr(FrozenLakeDescriber, "coarse_key", lambda *_: 3, raising=False)
    check_family(FrozenLake())
    with pytest.raises(TypeError, match=r"coarse_key\(\) must return text, got int"):
        check_family(FrozenLake(), coarse=True)
    monkeypatch.undo()
    observed = []
    monkeypatch.setattr(
        FrozenLakeDescriber,
        "observe",
        lambda self, row, observation, action, *, reset: observed.append((action, reset)),
    )
    before = torch.get_rng_state()
    check_family(FrozenLake())
    assert observed == [(None, True), (0, False)]
    assert torch.equal(torch.get_rng_state(), before)
    # Where the first step ends the episode there is no further question.
    observed.clear()
    check_family(FrozenLake(max_steps=1))
    assert observed == [(None, True)]
