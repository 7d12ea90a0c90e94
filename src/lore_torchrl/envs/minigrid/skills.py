"""Running skill indicators of MiniGrid episodes."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.utils import expand_as_right
from torch import Tensor
from torchrl.data import Binary, Bounded, Composite
from torchrl.envs import Transform
from torchrl.envs.transforms.utils import _get_reset

from lore_torchrl.envs.minigrid.describer import ACTIONS, DOOR, GOAL, KEY, LOCKED, OPEN

_TOGGLE = ACTIONS.index("toggle")

RUNNING_KEYS = ("skill_key_picked", "skill_door_opened", "skill_unlocked")
STEP_KEYS = ("skill_has_key", "skill_invalid_action")
DISTANCE_KEYS = (
    "skill_distance_agent_key",
    "skill_distance_key_door",
    "skill_distance_door_goal",
)


class MiniGridSkills(Transform):
    """Write what an episode has achieved so far, judged from the egocentric view alone.

    All entries are ``[*B, 1]``, at the root and under ``"next"``. With the agent's own
    cell, which shows what it carries, and the cell ahead:

    | key | dtype | meaning |
    | --- | --- | --- |
    | ``skill_has_key`` | bool | a key is carried now |
    | ``skill_key_picked`` | bool | a key was carried at some step of this episode |
    | ``skill_door_opened`` | bool | an open door was in view at some step of this episode |
    | ``skill_unlocked`` | bool | in this episode a toggle turned the locked door ahead into an open one |
    | ``skill_invalid_action`` | bool | the action that led here was masked out by ``action_mask``; False after a reset |
    | ``skill_distance_agent_key`` | float32 | agent to nearest key in view, 0 when carried |
    | ``skill_distance_key_door`` | float32 | nearest pair of a key, in view or carried, and a door in view |
    | ``skill_distance_door_goal`` | float32 | nearest pair of a door and a goal in view |

    Distances are Manhattan distances in cells within the view, -1 where one of the two is not
    visible. It reads ``image``, ``action`` and ``action_mask``, which comes before it.
    """  # noqa: E501

    def __init__(self) -> None:
        super().__init__(in_keys=["image"], out_keys=[*RUNNING_KEYS, *STEP_KEYS, *DISTANCE_KEYS])

    def _write_view(self, image: Tensor, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Write what the view alone tells; return (carries a key, sees an open door)."""
        kind = image[..., 0].flatten(-2)
        own = image.shape[-3] // 2 * image.shape[-2] + image.shape[-2] - 1
        key, door, goal = kind == KEY, kind == DOOR, kind == GOAL
        has_key = key[..., own : own + 1]
        sees_open = (door & (image[..., 2].flatten(-2) == OPEN)).any(-1, keepdim=True)
        cells = torch.arange(kind.shape[-1], device=image.device)
        column, row = cells // image.shape[-2], cells % image.shape[-2]
        # Between all pairs of cells.
        pairwise = ((column[:, None] - column).abs() + (row[:, None] - row).abs()).float()
        tensordict.set("skill_has_key", has_key)
        tensordict.set("skill_distance_agent_key", _nearest(pairwise, cells == own, key))
        tensordict.set("skill_distance_key_door", _nearest(pairwise, key, door))
        tensordict.set("skill_distance_door_goal", _nearest(pairwise, door, goal))
        return has_key, sees_open

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        before, after = tensordict.get("image"), next_tensordict.get("image")
        action = tensordict.get("action").argmax(-1, keepdim=True)
        has_key, sees_open = self._write_view(after, next_tensordict)
        unlocked = (action == _TOGGLE) & (_front_door(before) == LOCKED)
        unlocked &= _front_door(after) == OPEN
        # A running entry is missing where the caller steps from a bare reset tensordict.
        for name, now in zip(RUNNING_KEYS, (has_key, sees_open, unlocked), strict=True):
            past = tensordict.get(name, None)
            next_tensordict.set(name, now if past is None else now | past)
        valid = tensordict.get("action_mask").gather(-1, action)
        return next_tensordict.set("skill_invalid_action", ~valid)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        has_key, sees_open = self._write_view(tensordict_reset.get("image"), tensordict_reset)
        never = torch.zeros_like(has_key)
        reset = expand_as_right(_get_reset("_reset", tensordict), never)
        # A partial reset arrives with all rows: those that go on keep their past.
        for name, now in zip(RUNNING_KEYS, (has_key, sees_open, never), strict=True):
            past = tensordict.get(name, None)
            tensordict_reset.set(name, now if past is None else torch.where(reset, now, past))
        return tensordict_reset.set("skill_invalid_action", never.clone())

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare the entries written."""
        *batch, width, height, _ = observation_spec["image"].shape
        settings = {"shape": (*batch, 1), "device": observation_spec["image"].device}
        for name in (*RUNNING_KEYS, *STEP_KEYS):
            observation_spec[name] = Binary(1, dtype=torch.bool, **settings)
        for name in DISTANCE_KEYS:
            farthest = float(width + height - 2)
            observation_spec[name] = Bounded(-1.0, farthest, dtype=torch.float32, **settings)
        return observation_spec

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Declare the running entries as state, so that partial resets receive them."""
        state_spec = input_spec["full_state_spec"]
        shape = (*self.parent.full_observation_spec["image"].shape[:-3], 1)
        for name in RUNNING_KEYS:
            state_spec[name] = Binary(1, shape=shape, dtype=torch.bool, device=input_spec.device)
        return input_spec


def summarize_skills(batch: TensorDictBase) -> dict[str, list[float]]:
    """Return what :class:`MiniGridSkills`' entries show in a collected batch, case by case.

    Of rates a case is an episode that ended in the batch (``("next", "done")``), of ratios a
    step, of distances a step where both ends were visible.

    Returns:
        Lists, empty without a case, by the names of the metrics, such as
        ``skill/pickup_key_rate``.
    """
    following = batch.get("next")
    ended = following.get("done")
    names = ("pickup_key_rate", "door_open_rate", "unlock_rate")
    cases = {
        f"skill/{name}": following.get(key)[ended]
        for name, key in zip(names, RUNNING_KEYS, strict=True)
    }
    for name, key in zip(("has_key_ratio", "invalid_action_ratio"), STEP_KEYS, strict=True):
        cases[f"skill/{name}"] = following.get(key)
    for key in DISTANCE_KEYS:
        distance = following.get(key)
        cases[key.replace("_", "/", 1)] = distance[distance >= 0.0]
    return {name: case.float().flatten().tolist() for name, case in cases.items()}


def _front_door(image: Tensor) -> Tensor:
    """Return the state of the door ahead, ``[*B, 1]``, and -1 where there is none."""
    front = image[..., image.shape[-3] // 2, image.shape[-2] - 2, :]
    state = front[..., 2:3].long()
    return torch.where(front[..., :1] == DOOR, state, -1)


def _nearest(pairwise: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the least distance between a cell of each set, ``[*B, 1]``, -1 for an empty set."""
    pair = first.unsqueeze(-1) & second.unsqueeze(-2)
    far = torch.where(pair, pairwise, torch.inf).flatten(-2).amin(-1, keepdim=True)
    return torch.where(far.isinf(), -1.0, far)
