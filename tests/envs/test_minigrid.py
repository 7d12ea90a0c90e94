import sys

import numpy as np
import pytest
import torch

pytest.importorskip("minigrid")

import gymnasium as gym
from torchrl.envs import ParallelEnv, check_env_specs

from lore_torchrl.envs.adapter import read_row, sample_request
from lore_torchrl.envs.batch import row_seed
from lore_torchrl.envs.checks import check_adapter
from lore_torchrl.envs.minigrid import MiniGrid, MiniGridDescriber, MiniGridPlanner
from lore_torchrl.envs.minigrid.describer import (
    ACTIONS,
    BOX,
    DOOR,
    EMPTY,
    GOAL,
    KEY,
    LOCKED,
    OPEN,
    UNSEEN,
    WALL,
)
from lore_torchrl.envs.minigrid.environment import MISSION_WORDS, mission_features, valid_actions

IDS = (
    *("DoorKey-5x5", "DoorKey-16x16", "KeyCorridorS3R1", "MultiRoom-N2-S4", "Unlock", "Empty-8x8"),
    *("UnlockPickup", "ObstructedMaze-1Dlhb", "LavaGapS5", "MemoryS7"),
)
# Their missions name colors or kinds.
VARIES = ("KeyCorridorS3R1", "UnlockPickup", "ObstructedMaze-1Dlhb")
DOORKEY = "MiniGrid-DoorKey-5x5-v0"
FETCH = "MiniGrid-Fetch-5x5-N2-v0"


def gym_envs(env):
    """The MiniGrid objects under a serial environment."""
    return [worker._env.unwrapped for worker in env.base_env._envs]


def test_a_room_with_fewer_actions_has_a_describer_of_them():
    adapter = MiniGrid("MiniGrid-Dynamic-Obstacles-5x5-v0")
    assert check_adapter(adapter, abstract_states=True).num_actions == 3
    describer = adapter.make_describer()
    request = sample_request(adapter)
    assert request.actions == describer.actions == ("left", "right", "forward")
    assert "- forward" in request.description and "pickup" not in request.description
    assert len(adapter.make_planner()(request)) == 3


def test_a_map_is_not_remembered_where_other_things_move():
    adapter = MiniGrid("MiniGrid-Dynamic-Obstacles-5x5-v0")
    with pytest.raises(ValueError, match=r"env\.memory=false"):
        adapter.make_describer(memory=True)
    assert MiniGrid(DOORKEY).make_describer(memory=True).memory


def test_what_done_means_is_in_the_keys():
    silent, valid = (
        MiniGrid("MiniGrid-GoToDoor-5x5-v0", done_is_valid=valid) for valid in (False, True)
    )
    one, other = sample_request(silent), sample_request(valid)
    assert one.description != other.description and one.cache_key != other.cache_key
    env = valid.make_env(num_envs=1, seed=0)
    seen = read_row(env.reset(), 0, ["image", "direction", "mission"])
    env.close()
    keys = {adapter.make_describer().abstract_state(0, seen) for adapter in (silent, valid)}
    assert len(keys) == 2


def test_an_id_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="CartPole-v1 is no environment of MiniGrid"):
        MiniGrid("CartPole-v1")


@pytest.mark.parametrize("name", IDS)
def test_any_id_rolls_out_with_valid_specs(name):
    env = make_env(f"MiniGrid-{name}-v0", num_envs=2)
    check_env_specs(env)
    td = env.rollout(20, break_when_any_done=False)
    words = (name in VARIES) * (len(MISSION_WORDS) + 1)
    assert td["observation"].shape == (2, 20, 1033 + words)
    assert td["observation"].dtype == torch.float32
    assert td["image"].shape == (2, 20, 7, 7, 3) and td["image"].dtype == torch.uint8
    assert td["direction"].shape == (2, 20, 1) and td["direction"].dtype == torch.int64
    assert td["action_mask"].shape == (2, 20, 7) and td["action_mask"].dtype == torch.bool
    assert td["next", "success"].shape == (2, 20, 1)
    assert "mission_bytes" not in td


def make_env(env_id, *, num_envs=1, seed=0, evaluation=False, parallel=False, **settings):
    adapter = MiniGrid(env_id, **settings)
    return adapter.make_env(num_envs=num_envs, seed=seed, evaluation=evaluation, parallel=parallel)


def test_fewer_actions_than_seven():
    env = make_env("MiniGrid-Dynamic-Obstacles-5x5-v0", num_envs=2)
    check_env_specs(env)
    assert env.reset()["action_mask"].shape == (2, 3)


@pytest.mark.slow
def test_parallel_gives_the_rows_of_serial():
    serial = make_env(FETCH, num_envs=2, seed=3)
    parallel = make_env(FETCH, num_envs=2, seed=3, parallel=True)
    try:
        assert isinstance(parallel.base_env, ParallelEnv)
        for _ in range(3):
            one, two = serial.reset(), parallel.reset()
            assert torch.equal(one["observation"], two["observation"])
            assert list(one["mission"]) == list(two["mission"])
        check_env_specs(parallel)
    finally:
        parallel.close()


def test_same_seed_same_episodes_and_other_rows_other_episodes():
    def images(**settings):
        env = make_env("MiniGrid-DoorKey-8x8-v0", num_envs=3, **settings)
        return torch.stack([env.reset()["observation"] for _ in range(4)])

    first = images(seed=1)
    assert torch.equal(first, images(seed=1))
    assert not torch.equal(first, images(seed=2))
    assert not torch.equal(first, images(seed=1, evaluation=True))
    assert not torch.equal(first[:, 0], first[:, 1])


def test_evaluation_seeds_are_disjoint_from_training_seeds():
    last_training = row_seed(999_999, 999)
    assert row_seed(0, 0, evaluation=True) > last_training
    assert row_seed(1, 0) > row_seed(0, 999)


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"num_envs": 1001}, "1000"),
        ({"seed": -1}, "-1"),
        ({"seed": 1_000_000}, "1000000"),
    ],
)
def test_bad_settings_fail_with_the_value(settings, value):
    with pytest.raises(ValueError, match=value):
        make_env(DOORKEY, **settings)


def test_max_steps_truncates():
    td = make_env(DOORKEY, max_steps=5).rollout(7, break_when_any_done=False)
    assert td["next", "truncated"][0, :, 0].nonzero().flatten().tolist() == [4]


def test_missions_follow_their_rows_through_partial_resets():
    env = make_env(FETCH, num_envs=3, seed=0, max_steps=6)
    torch.manual_seed(0)
    td, resets = env.reset(), 0
    for _ in range(40):
        after, td = env.step_and_maybe_reset(env.rand_action(td))
        missions = [minigrid.mission for minigrid in gym_envs(env)]
        assert list(td["mission"]) == missions
        words = torch.stack([mission_features(mission) for mission in missions])
        assert torch.equal(td["observation"][:, 1033:], words)
        done = after["next", "done"].squeeze(-1)
        resets += bool(done.any() and not done.all())
    assert resets > 2


def test_observation_is_one_hot_of_the_view():
    env = make_env(DOORKEY, num_envs=2)
    td = env.reset()
    cells = td["observation"][:, :1029].reshape(2, 7, 7, 21)
    assert torch.equal(cells[..., :11].argmax(-1), td["image"][..., 0].long())
    assert torch.equal(cells[..., 11:17].argmax(-1), td["image"][..., 1].long())
    assert torch.equal(cells[..., 17:].argmax(-1), td["image"][..., 2].long())
    assert torch.equal(td["observation"][:, 1029:].argmax(-1, keepdim=True), td["direction"])
    assert torch.equal(cells.sum(-1), torch.full((2, 7, 7), 3.0))


def view(front, held=(EMPTY, 0, 0)):
    image = torch.full((7, 7, 3), WALL, dtype=torch.uint8)
    image[3, 5], image[3, 6] = torch.tensor(front), torch.tensor(held)
    return image


@pytest.mark.parametrize(
    ("front", "held", "expected"),
    [
        ((EMPTY, 0, 0), (EMPTY, 0, 0), {"forward"}),
        ((EMPTY, 0, 0), (KEY, 4, 0), {"forward", "drop"}),
        ((GOAL, 1, 0), (KEY, 4, 0), {"forward"}),
        ((WALL, 5, 0), (EMPTY, 0, 0), set()),
        ((KEY, 4, 0), (EMPTY, 0, 0), {"pickup"}),
        ((KEY, 4, 0), (KEY, 1, 0), set()),
        ((BOX, 4, 0), (EMPTY, 0, 0), {"pickup", "toggle"}),
        ((DOOR, 4, OPEN), (EMPTY, 0, 0), {"forward", "toggle"}),
        ((DOOR, 4, LOCKED), (EMPTY, 0, 0), set()),
        ((DOOR, 4, LOCKED), (KEY, 1, 0), set()),
        ((DOOR, 4, LOCKED), (KEY, 4, 0), {"toggle"}),
    ],
)
def test_action_mask(front, held, expected):
    mask = valid_actions(view(front, held)).tolist()
    allowed = {name for name, valid in zip(ACTIONS, mask, strict=True) if valid}
    assert allowed == expected | {"left", "right"}
    assert valid_actions(view(front, held), done_is_valid=True)[-1]


def test_masked_actions_change_nothing():
    env = make_env(DOORKEY, num_envs=4, seed=0)
    torch.manual_seed(0)
    td = env.rollout(300, break_when_any_done=False)
    valid = td["action_mask"].gather(-1, td["action"].argmax(-1, keepdim=True)).squeeze(-1)
    same = (td["image"] == td["next", "image"]).flatten(2).all(-1)
    same &= (td["direction"] == td["next", "direction"]).all(-1)
    assert same[~valid].all() and (~valid).any()


def test_success_is_a_rewarded_end():
    td = make_env("MiniGrid-Empty-5x5-v0", num_envs=4, seed=0).rollout(
        400, break_when_any_done=False
    )
    success = td["next", "success"]
    assert torch.equal(success, td["next", "reward"] > 0) and success.any()
    assert td["next", "done"][success].all() and not td["success"].any()


def test_missing_minigrid_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "minigrid", None)
    monkeypatch.delitem(sys.modules, "lore_torchrl.envs.minigrid")
    with pytest.raises(ImportError, match=r"pip install 'lore-torchrl\[minigrid\]'"):
        import lore_torchrl.envs.minigrid  # noqa: F401


@pytest.mark.parametrize("name", ["DoorKey-8x8", "MultiRoom-N4-S5", "LavaGapS7"])
def test_remembered_map_is_the_true_map(name):
    """Every remembered cell equals the grid's, at the place that dead reckoning gives."""
    env = gym.make(f"MiniGrid-{name}-v{int('MultiRoom' in name)}")
    world, describer = env.unwrapped, MiniGridDescriber(memory=True)
    rng = np.random.default_rng(0)
    seen, _ = env.reset(seed=2000)
    describer.observe(0, seen, None, reset=True)
    for _ in range(300):
        action = int(rng.choice(7, p=[0.2, 0.15, 0.4, 0.1, 0.05, 0.1, 0.0]))
        seen, _, terminated, truncated, _ = env.step(action)
        reset = terminated or truncated
        if reset:
            seen, _ = env.reset()
        describer.observe(0, seen, None if reset else action, reset=reset)
        facts = describer.request(0, seen).facts
        cells, (column, row) = facts["map"], facts["position"]
        forward, right = np.asarray(world.dir_vec), np.asarray(world.right_vec)
        for c, r in np.argwhere(cells[..., 0] != UNSEEN):
            at = np.asarray(world.agent_pos) + (row - r) * forward + (c - column) * right
            cell = world.grid.get(*at)
            truth = (EMPTY, 0, 0) if cell is None else cell.encode()
            if (c, r) == (column, row) and cells[c, r, 0] == EMPTY:
                continue  # never seen from outside, such as the door one starts in
            assert tuple(cells[c, r]) == tuple(truth)


def test_done_is_described_as_what_it_does():
    def said(env_id, **settings):
        return sample_request(MiniGrid(env_id, **settings)).description

    door = "MiniGrid-GoToDoor-5x5-v0"
    assert "- done: do nothing" in said(DOORKEY)
    assert "- done: say that the mission is fulfilled" in said(door, done_is_valid=True)


def test_a_thousand_remembered_maps_are_described():
    adapter = MiniGrid("MiniGrid-MultiRoom-N2-S4-v0")
    describer, planner = adapter.make_describer(memory=True), MiniGridPlanner()
    env = adapter.make_env(num_envs=20, seed=0)
    rollout = env.rollout(50, break_when_any_done=False)
    env.close()
    for row in range(20):
        action = None
        for time in range(50):
            seen = read_row(rollout[row, time], None, describer.in_keys)
            begins = action is None or bool(rollout["next", "done"][row, time - 1])
            describer.observe(row, seen, None if begins else action, reset=begins)
            request = describer.request(row, seen)
            assert request.cache_key == describer.cache_key(row, seen)
            assert isinstance(describer.abstract_state(row, seen), str)
            values = planner(request)
            assert values is None or np.isfinite(values).all()
            action = int(rollout["action"][row, time].argmax())


def view_of(*cells, carrying=None):
    """A view of empty cells with things at (ahead, right)."""
    view = np.zeros((7, 7, 3), dtype=np.uint8)
    view[..., 0] = EMPTY
    for (ahead, right), content in cells:
        view[3 + right, 6 - ahead] = content
    if carrying is not None:
        view[3, 6] = (*carrying, 0)
    return {"image": view, "direction": 0, "mission": "open the door"}


@pytest.mark.parametrize(
    ("seen", "reached"),
    [
        (view_of(), {"carry nothing"}),
        (view_of(((1, 0), (KEY, 4, 0))), {"see the key", "face the key", "carry nothing"}),
        # What is carried is not seen, and neither is a thing beside it faced.
        (view_of(((0, 1), (BOX, 1, 0)), carrying=(KEY, 4)), {"see the box", "hold the key"}),
        (view_of(((3, 2), (GOAL, 1, 0))), {"see the goal", "carry nothing"}),
        (view_of(((2, 0), (DOOR, 4, LOCKED)), carrying=(KEY, 4)), {"see the door", "hold the key"}),
        (
            view_of(((2, 0), (DOOR, 4, OPEN)), carrying=(KEY, 4)),
            {"see the door", "open the door", "open the locked door", "hold the key"},
        ),
        (
            view_of(((2, 0), (DOOR, 2, OPEN)), carrying=(KEY, 4)),
            {"see the door", "open the door", "hold the key"},
        ),
    ],
)
def test_which_subgoals_are_true_of_a_view(seen, reached):
    describer = MiniGridDescriber()
    assert describer.reached(0, seen) == reached <= set(describer.subgoals)
