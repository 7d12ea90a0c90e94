"""Every adapter that a run can be configured with, and one of a user's own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import DREAMER, tiny_config
from torchrl.envs import check_env_specs

from lore_torchrl.advisors.scripted import ScriptedAdvisor
from lore_torchrl.configs import CallsConfig, EnvConfig, LoReConfig, TrainConfig
from lore_torchrl.dreamer.run import train
from lore_torchrl.envs.adapter import anchors_of, planner_of, read_row, sample_request
from lore_torchrl.envs.batch import close_env
from lore_torchrl.envs.checks import check_adapter
from lore_torchrl.envs.crafter import Crafter
from lore_torchrl.envs.finance import FinancialRegimes
from lore_torchrl.envs.frozen_lake import ACTIONS, FrozenLake, FrozenLakePlanner
from lore_torchrl.envs.minigrid import MiniGrid
from lore_torchrl.envs.pendulum import Pendulum
from lore_torchrl.envs.snake import APPLE, HEAD, Snake, SnakeEnv
from lore_torchrl.inspection import play

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {"area": (16, 16), "max_steps": 60}
ADAPTERS = {
    "minigrid": lambda: MiniGrid("MiniGrid-DoorKey-5x5-v0"),
    "frozen lake": FrozenLake,
    "dry lake, 8x8": lambda: FrozenLake("FrozenLake8x8-v1", slippery=False),
    "snake": Snake,
    "pendulum": Pendulum,
    "poisonous snake": lambda: Snake(poison=True, enemy=False, size=5),
    "crafter": lambda: Crafter(**SMALL),
    "market": FinancialRegimes,
    "short year": lambda: FinancialRegimes(max_steps=30, window=8),
}
OTHERS = {
    name: partial(MiniGrid, f"{name}-v0")
    for name in (
        "MiniGrid-KeyCorridorS3R1",
        "MiniGrid-MultiRoom-N2-S4",
        "MiniGrid-UnlockPickup",
        "MiniGrid-ObstructedMaze-1Dl",
        "MiniGrid-LavaGapS5",
        "MiniGrid-MemoryS7",
        "BabyAI-GoToLocal",
        "BabyAI-PutNextLocal",
    )
} | {
    f"crafter, {observe}": partial(Crafter, **SMALL, observe=observe)
    for observe in ("pixels", "both")
}
adapters = pytest.mark.parametrize("make", ADAPTERS.values(), ids=ADAPTERS)


@pytest.mark.parametrize("make", (ADAPTERS | OTHERS).values(), ids=ADAPTERS | OTHERS)
def test_specs_hold_and_environment_and_describer_fit(make):
    adapter = make()
    check_adapter(adapter)
    env = adapter.make_env(num_envs=2, seed=0)
    check_env_specs(env)
    close_env(env)


@pytest.mark.parametrize(
    ("make", "memory"),
    [(make, False) for make in ADAPTERS.values()] + [(ADAPTERS["minigrid"], True)],
    ids=[*ADAPTERS, "minigrid, memory"],
)
def test_a_program_sees_nothing_that_the_description_hides(make, memory):
    adapter = make()
    env, describer = adapter.make_env(num_envs=1, seed=0), adapter.make_describer(memory=memory)
    actions = anchors_of(describer)
    actions = torch.eye(len(describer.actions), dtype=torch.long) if actions is None else actions
    seen: dict[str, str] = {}
    stream, td, last = torch.Generator().manual_seed(0), env.reset(), None
    for _ in range(250):
        observation = read_row(td, 0, describer.in_keys)
        describer.observe(0, observation, last, reset=last is None)
        view = json.dumps(describer.program_view(0, observation))
        assert set(json.loads(view)) == set(describer.program_fields)
        assert seen.setdefault(describer.request(0, observation).description, view) == view
        last = int(torch.randint(len(actions), (), generator=stream))
        td["action"] = actions[last][None]
        stepped, td = env.step_and_maybe_reset(td)
        last = None if stepped["next", "done"].any() else last
    # A lake of 16 squares, from which one falls early, has fewer.
    assert len(set(seen.values())) > (4 if isinstance(adapter, FrozenLake) else 10)
    close_env(env)


def fingerprints() -> list[str]:
    """Of random steps of each adapter; of Crafter's more, past the first spawning of creatures."""
    found = []
    for name, make in ADAPTERS.items():
        torch.manual_seed(0)
        env = make().make_env(num_envs=2, seed=3)
        rollout = env.rollout(200 if name == "crafter" else 40, break_when_any_done=False)
        close_env(env)
        digest = hashlib.sha256()
        for key in ("observation", "success", "action", ("next", "reward"), ("next", "done")):
            digest.update(rollout[key].numpy().tobytes())
        found.append(digest.hexdigest())
    return found


@pytest.mark.slow
def test_a_seed_is_the_same_stream_in_another_process():
    here = fingerprints()
    assert len(set(here)) == len(ADAPTERS)
    # Other memory addresses, by which a set would be ordered.
    code = (
        "padding = [object() for _ in range(9999)]\n"
        "from test_adapters import fingerprints; print(*fingerprints())"
    )
    paths = [str(Path(__file__).parent), *(path for path in sys.path if path)]
    there = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert there.stdout.splitlines()[-1].split() == here


@adapters
def test_a_finished_row_stays_as_it_is(make):
    # As in evaluation, where episodes end at different times.
    env = make().make_env(num_envs=2, seed=0)
    before = env.reset()
    before["action"] = env.action_spec.rand()
    before["_step"] = torch.tensor([True, False])
    after = env.step(before)["next"]
    for key in ("observation", "success", "done"):
        assert torch.equal(after[key][1], before[key][1])
    close_env(env)


@pytest.mark.parametrize("name", ["minigrid", "snake", "market"])
def test_other_seeds_and_held_out_ones_are_other_episodes(name):
    first, other, held_out = (
        ADAPTERS[name]().make_env(num_envs=8, **settings).reset()["observation"]
        for settings in ({"seed": 0}, {"seed": 1}, {"seed": 0, "evaluation": True})
    )
    assert not torch.equal(first, other) and not torch.equal(first, held_out)


@adapters
def test_many_states_are_described(make):
    adapter = make()
    describer, planner = adapter.make_describer(), planner_of(adapter)
    env = adapter.make_env(num_envs=8, seed=0)
    rollout = env.rollout(30, break_when_any_done=False)
    close_env(env)
    texts = {}
    for step in rollout.select(*describer.in_keys).unbind(1):
        for row in range(8):
            seen = read_row(step, row, describer.in_keys)
            describer.observe(row, seen, None, reset=True)
            request = describer.request(row, seen)
            key = describer.cache_key(row, seen)
            assert request.cache_key == key and isinstance(describer.abstract_state(row, seen), str)
            assert texts.setdefault(key, request.description) == request.description
            values = planner(request)
            assert len(values) == len(describer.actions) and np.isfinite(values).all()


@pytest.mark.parametrize(
    ("make", "steps", "least"),
    [
        (FrozenLake, 100, 0.6),
        (lambda: FrozenLake(slippery=False), 20, 1.0),
        (Snake, 60, 0.9),
        (lambda: Snake(poison=True), 100, 0.9),
    ],
)
def test_planners_master_their_games(make, steps, least):
    """Success of the planner, of all held-out episodes that ended."""
    adapter = make()
    describer, planner = adapter.make_describer(), planner_of(adapter)

    def policy(tensordict):
        seen = (read_row(tensordict, row, describer.in_keys) for row in range(8))
        actions = [int(np.argmax(planner(describer.request(0, one)))) for one in seen]
        return tensordict.set("action", torch.eye(4, dtype=torch.long)[actions])

    env = adapter.make_env(num_envs=8, seed=0, evaluation=True)
    rollout = env.rollout(steps, policy, break_when_any_done=False)
    ended = rollout["next", "done"]
    assert rollout["next", "success"][ended].float().mean() >= least


def test_the_lakes_values_solve_their_equation():
    planner = FrozenLakePlanner(("SFF", "FHF", "FFG"), slippery=True)
    request = sample_request(FrozenLake(), steps=0)

    def values(square):
        return planner(type(request)("", ACTIONS, "", facts={"square": square}))

    # From square 5, down: a third each of the goal, the hole at 4 and staying at 5.
    assert values(5)[ACTIONS.index("down")] == pytest.approx((1.0 + 0.99 * max(values(5))) / 3)
    assert "@FFF\nFHFH\nFFFH\nHFFG" in request.description
    assert planner(sample_request(Snake())) is None


def test_snake_eats_grows_and_dies():
    env = SnakeEnv(size=4, apples=2, enemy=False)
    env.reset(seed=0)
    env.body.clear()
    env.body.append((0, 0))
    env.apple = (0, 1)
    observation, reward, terminated, _, _ = env.step(1)
    assert reward == 1.0 and not terminated and list(env.body) == [(0, 1), (0, 0)]
    field = observation["field"]
    assert field[0, 1] == HEAD and (field == APPLE).sum() == 1
    body, apple, other, edge = observation["observation"][:100].reshape(4, 5, 5)
    assert body.sum() == 1 and body[2, 1] == 1, "what it has moved on from, to its left"
    assert edge[:2].all() and edge[2:, 0].all() and edge[2:, 1:].sum() == 0 and not other.any()
    y, x = np.argwhere(field == APPLE)[0]
    down, right = observation["observation"][100:].reshape(2, 4)
    assert down.tolist() == [0.0, y == 0, y > 0, y / 4]
    assert right.tolist() == [x < 1, x == 1, x > 1, (x - 1) / 4]
    assert apple.sum() == (y <= 2 and x <= 3)
    env.apple = (3, 3)
    assert env.step(3)[1:3] == (-1.0, True), "back into itself"
    env.reset(seed=1)
    env.body[0] = (0, 2)
    assert env.step(0)[1:3] == (-1.0, True), "into the wall"
    env = SnakeEnv(size=4, poison=True, enemy=False)
    env.reset(seed=0)
    env.body[0], env.apple = (0, 0), (0, 1)
    assert env.step(1)[1:3] == (-1.0, False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"size": 3}, "size.*3"), ({"apples": 0}, "apples.*0")],
)
def test_impossible_snakes(settings, message):
    with pytest.raises(ValueError, match=message):
        Snake(**settings)


@pytest.mark.parametrize(
    "name", ["frozen_lake.FrozenLake", "snake.Snake", "finance.FinancialRegimes"]
)
def test_a_whole_run_and_pictures_of_it(name, tmp_path):
    path = f"lore_torchrl.envs.{name}"
    env = EnvConfig(adapter=path, id="FrozenLake-v1", num_envs=2, max_steps=20)
    config = tiny_config(tmp_path / "run", total_steps=64, env=env, checkpoint_interval=64)
    config.lore.calls.budget = 20
    summary = train(config)
    assert 0 < summary["advice/calls"] <= 20 and 0.0 <= summary["eval/success"] <= 1.0
    recording = play(tmp_path / "run", max_steps=2)
    moment = recording.episodes[0].moments[0]
    assert moment.frame.any() and len(moment.policy) == len(recording.actions)


def test_the_example_of_an_own_environment_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import custom_env

    assert len((EXAMPLES / "custom_env.py").read_text().splitlines()) < 80
    env = EnvConfig(adapter="custom_env.LockAdapter", id="Lock", num_envs=2, max_steps=20)
    config = tiny_config(tmp_path / "run", env=env, dreamer=DREAMER, total_steps=64)
    assert train(config, advisor=custom_env.NextSwitch())["advice/calls"] > 0
    lock = custom_env.LockAdapter("Lock", max_steps=2).make_gym()
    lock.reset()
    assert [lock.step(1)[3] for _ in range(2)] == [False, True]


def test_a_batched_torchrl_environment_is_used_as_it_is(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import native_env

    adapter = native_env.MeadowAdapter("Meadow", max_steps=3)
    env = adapter.make_env(num_envs=3, seed=0)
    check_env_specs(env)
    other = adapter.make_env(num_envs=3, seed=0, evaluation=True)
    assert not torch.equal(env.reset()["observation"], other.reset()["observation"])
    config = EnvConfig(adapter="native_env.MeadowAdapter", id="Meadow", num_envs=2, max_steps=20)
    config = tiny_config(tmp_path / "run", env=config, dreamer=DREAMER, total_steps=64)
    summary = train(config, advisor=ScriptedAdvisor(native_env.nearer))
    assert summary["advice/calls"] > 0 and 0.0 <= summary["eval/success"] <= 1.0


@pytest.mark.parametrize("name", ["MiniGrid-DoorKey-5x5-v0", "BabyAI-GoToLocal-v0"])
def test_rows_are_read_with_their_whole_text(name):
    env = MiniGrid(name).make_env(num_envs=3, seed=0)
    tensordict = env.reset()
    for row in range(3):
        mission = read_row(tensordict, row, ("mission",))["mission"]
        assert len(mission.split()) > 3
        assert mission == str(tensordict[row]["mission"])
        assert read_row(tensordict[row], None, ("mission",)) == {"mission": mission}
        alone, of_batch = (
            read_row(td, index, ("image",))["image"]
            for td, index in ((tensordict[row], None), (tensordict, row))
        )
        assert np.array_equal(alone, of_batch)
    env.close()


def test_a_sampled_question_holds_the_whole_mission():
    request = sample_request(MiniGrid("MiniGrid-DoorKey-5x5-v0"), steps=3)
    assert "use the key to open the door and then get to the goal" in request.description


def test_the_larger_lake_by_its_own_id():
    assert len(FrozenLake("FrozenLake8x8-v1").squares) == 8
    assert len(FrozenLake().squares) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snake", "market"])
def test_rows_in_processes_of_their_own_are_those_of_one_process(name):
    rollouts = []
    for parallel in (False, True):
        env = ADAPTERS[name]().make_env(num_envs=2, seed=5, parallel=parallel)
        unit = torch.eye(env.action_spec.shape[-1], dtype=torch.long)
        actions = unit[torch.tensor([[0, 1], [1, 2], [2, 0]])]

        tensordict, seen = env.reset(), []
        for action in actions:
            stepped, tensordict = env.step_and_maybe_reset(tensordict.set("action", action))
            seen.append(stepped["next", "observation"].clone())
        rollouts.append(torch.stack(seen))
        close_env(env)
    assert torch.equal(*rollouts)


def test_an_environment_that_cannot_be_drawn_says_so():
    class Blind(FrozenLake):
        def make_gym(self, pixels=False):
            return super().make_gym(False)

    with pytest.raises(ValueError, match="cannot be drawn"):
        Blind().make_env(num_envs=1, seed=0, pixels=True).reset()


def test_an_advisor_that_needs_a_planner_says_so(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    env = EnvConfig(adapter="custom_env.LockAdapter", id="Lock", num_envs=2)
    config = TrainConfig(env=env, output_dir=str(tmp_path), lore=LoReConfig(calls=CallsConfig()))
    with pytest.raises(ValueError, match=r"needs a planner.*make_planner"):
        train(config)
