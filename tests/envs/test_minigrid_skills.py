import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("minigrid")

from minigrid.core.constants import OBJECT_TO_IDX, STATE_TO_IDX
from torchrl.envs import check_env_specs

from lore_torchrl.envs.minigrid import MiniGrid
from lore_torchrl.envs.minigrid.skills import (
    DISTANCE_KEYS,
    RUNNING_KEYS,
    STEP_KEYS,
    MiniGridSkills,
    summarize_skills,
)

DOORKEY = "MiniGrid-DoorKey-5x5-v0"
EMPTY, DOOR, KEY, GOAL = (OBJECT_TO_IDX[name] for name in ("empty", "door", "key", "goal"))
OPEN, CLOSED, LOCKED = (STATE_TO_IDX[name] for name in ("open", "closed", "locked"))
FORWARD, PICKUP, TOGGLE = 2, 3, 5
ALL_KEYS = (*RUNNING_KEYS, *STEP_KEYS, *DISTANCE_KEYS)


def make(num_envs=2, max_steps=None):
    return MiniGrid(DOORKEY, max_steps=max_steps).make_env(num_envs=num_envs, seed=0)


def view(*things):
    image = torch.zeros(1, 7, 7, 3, dtype=torch.uint8)
    image[..., 0] = EMPTY
    for place, content in things:
        image[0][place] = torch.tensor(content, dtype=torch.uint8)
    return image


def step(before, action, after, past=None, valid=True):
    """One step of the transform alone, on views."""
    td = TensorDict(
        image=before,
        action=torch.nn.functional.one_hot(torch.tensor([action]), 7),
        action_mask=torch.full((1, 7), valid),
        batch_size=[1],
    ).update(past or {})
    following = TensorDict(image=after, batch_size=[1])
    return MiniGridSkills()._step(td, following)


def test_specs_hold_and_the_batch_carries_the_entries():
    env = make()
    check_env_specs(env)
    td = env.rollout(5)
    for key in ALL_KEYS:
        expected = torch.float32 if key in DISTANCE_KEYS else torch.bool
        assert td["next", key].shape == (2, 5, 1) and td["next", key].dtype == expected
        assert td[key].shape == (2, 5, 1)


def assert_running(td):
    """Running entries never fall within an episode and restart after its end."""
    ended = td["next", "done"][:, :-1]
    for key in RUNNING_KEYS:
        past, now = td[key], td["next", key]
        assert (now | ~past).all()
        # The next step starts from what this one wrote, unless the episode ended here.
        assert torch.equal(past[:, 1:][~ended], now[:, :-1][~ended])
        assert not past[:, 1:][ended].any()


def test_running_entries_survive_the_partial_resets_of_other_rows():
    torch.manual_seed(0)
    td = make(4, max_steps=60).rollout(400, break_when_any_done=False)
    done = td["next", "done"].squeeze(-1)
    assert (done.any(0) & ~done.all(0)).any() and td["next", "skill_key_picked"].any()
    assert_running(td)


def test_key_picked_stays_and_has_key_does_not():
    held, free = view(((3, 6), (KEY, 4, 0))), view()
    picked = step(view(((3, 5), (KEY, 4, 0))), PICKUP, held)
    assert picked["skill_key_picked"] and picked["skill_has_key"]
    dropped = step(held, 4, free, {"skill_key_picked": picked["skill_key_picked"]})
    assert dropped["skill_key_picked"] and not dropped["skill_has_key"]


@pytest.mark.parametrize(
    ("before", "action", "after", "opened", "unlocked"),
    [
        (LOCKED, TOGGLE, OPEN, True, True),
        (CLOSED, TOGGLE, OPEN, True, False),
        (LOCKED, TOGGLE, LOCKED, False, False),
        (LOCKED, 1, OPEN, True, False),  # turned from a locked door to an open one
    ],
)
def test_door_skills(before, action, after, opened, unlocked):
    out = step(view(((3, 5), (DOOR, 4, before))), action, view(((3, 5), (DOOR, 4, after))))
    assert out["skill_door_opened"].item() is opened
    assert out["skill_unlocked"].item() is unlocked


def test_distances():
    things = [((1, 4), (KEY, 4, 0)), ((5, 4), (DOOR, 4, LOCKED)), ((5, 0), (GOAL, 1, 0))]
    out = step(view(), FORWARD, view(*things))
    assert [out[key].item() for key in DISTANCE_KEYS] == [4.0, 4.0, 4.0]
    held = step(view(), FORWARD, view(*things[1:], ((3, 6), (KEY, 4, 0))))
    assert [held[key].item() for key in DISTANCE_KEYS] == [0.0, 4.0, 4.0]
    nothing = step(view(), FORWARD, view())
    assert [nothing[key].item() for key in DISTANCE_KEYS] == [-1.0, -1.0, -1.0]


def test_invalid_action_reads_the_mask_acted_upon():
    assert not step(view(), FORWARD, view())["skill_invalid_action"]
    assert step(view(), FORWARD, view(), valid=False)["skill_invalid_action"]
    td = make().rollout(50, break_when_any_done=False)
    valid = td["action_mask"].gather(-1, td["action"].argmax(-1, keepdim=True))
    assert torch.equal(td["next", "skill_invalid_action"], ~valid)


def test_summary():
    torch.manual_seed(0)
    td = make(4, max_steps=60).rollout(150, break_when_any_done=False)
    summary = summarize_skills(td)
    following = td["next"]
    picked = following["skill_key_picked"][following["done"]].float().tolist()
    assert summary["skill/pickup_key_rate"] == picked and len(set(picked)) == 2
    assert summary["skill/has_key_ratio"] == following["skill_has_key"].float().flatten().tolist()
    distance = following["skill_distance_agent_key"]
    assert summary["skill/distance_agent_key"] == distance[distance >= 0].tolist()
    assert 0 < len(summary["skill/distance_agent_key"]) < 4 * 150
    assert set(summary) == {
        *(f"skill/{name}" for name in ("pickup_key_rate", "door_open_rate", "unlock_rate")),
        *("skill/has_key_ratio", "skill/invalid_action_ratio", "skill/distance_agent_key"),
        *("skill/distance_key_door", "skill/distance_door_goal"),
    }


def test_summary_is_empty_of_what_has_no_case():
    summary = summarize_skills(make(2).rollout(3))
    assert summary["skill/pickup_key_rate"] == [] and len(summary["skill/has_key_ratio"]) == 6
