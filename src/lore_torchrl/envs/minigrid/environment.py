"""Features of MiniGrid observations: one-hot views, bags of words, masks of valid actions."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot
from torchrl.data import Binary, Bounded, Composite, NonTensor

from lore_torchrl.envs.batch import ObservationTransform
from lore_torchrl.envs.gym_adapter import gym
from lore_torchrl.envs.minigrid.describer import (
    ACTIONS,
    BALL,
    BOX,
    COLORS,
    DOOR,
    EMPTY,
    FLOOR,
    GOAL,
    KEY,
    LAVA,
    LOCKED,
    OBJECTS,
    OPEN,
    UNSEEN,
)

# Codes of an object, its color, and its state: a door's, or the heading of an agent.
_CHANNELS = (len(OBJECTS), len(COLORS), 4)
_MISSION_BYTES = 512

MISSION_WORDS: tuple[str, ...] = (
    *COLORS,
    *("ball", "box", "door", "goal", "key", "lava", "object", "room", "square"),
    *("avoid", "fetch", "find", "get", "go", "open", "pick", "put", "reach", "traverse"),
    *("unlock", "use", "after", "and", "at", "behind", "end", "from", "front", "hallway"),
    *("in", "left", "matching", "must", "near", "next", "of", "on", "opening", "right"),
    *("rooms", "the", "then", "to", "up", "with", "you", "your", "a"),
)
_WORD_INDEX = {word: index for index, word in enumerate(MISSION_WORDS)}


def one_hot_view(image: Tensor, direction: Tensor) -> Tensor:
    """Encode views as one-hot features.

    Args:
        image: ``[*B, W, H, 3]``, object, color and state of each cell.
        direction: ``[*B, 1]``, compass direction of the agent.

    Returns:
        Float32 ``[*B, W * H * 21 + 4]``: for each cell one-hot object (11), color (6)
        and state (4), then one-hot direction.
    """
    codes = zip(image.long().unbind(-1), _CHANNELS, strict=True)
    cells = torch.cat([one_hot(code, size) for code, size in codes], -1)
    return torch.cat([cells.flatten(-3), one_hot(direction[..., 0], 4)], -1).float()


def valid_actions(
    image: Tensor, *, num_actions: int = len(ACTIONS), done_is_valid: bool = False
) -> Tensor:
    """Mark the actions that change anything, judged from the agent's view alone.

    Turning always does. Forward does where the cell ahead is empty, floor, goal, lava or an
    open door; pickup where a key, ball or box is ahead and the hands are empty; drop where they
    are full and the cell ahead is empty; toggle where a box or a door is ahead, a locked door
    only with a key of its color in hand.

    Args:
        image: ``[*B, W, H, 3]`` views; the agent's own cell holds what it carries.
        num_actions: Number of actions, a prefix of MiniGrid's seven. Default: ``7``.
        done_is_valid: Whether ``done`` is valid. Default: ``False``.

    Returns:
        Bool ``[*B, num_actions]``.
    """
    middle, last = image.shape[-3] // 2, image.shape[-2] - 1
    front, front_color, front_state = image[..., middle, last - 1, :].unbind(-1)
    held, held_color = image[..., middle, last, :2].unbind(-1)
    hands_empty = (held == EMPTY) | (held == UNSEEN)
    empty, door, box = front == EMPTY, front == DOOR, front == BOX
    has_key = (held == KEY) & (held_color == front_color)
    enterable = empty | (front == FLOOR) | (front == GOAL) | (front == LAVA)
    always = torch.ones_like(empty)
    valid = [
        always,
        always,
        enterable | (door & (front_state == OPEN)),
        (box | (front == KEY) | (front == BALL)) & hands_empty,
        empty & ~hands_empty,
        box | (door & ((front_state != LOCKED) | has_key)),
        always if done_is_valid else ~always,
    ]
    return torch.stack(valid[:num_actions], dim=-1)


@lru_cache(maxsize=4096)
def mission_features(mission: str) -> Tensor:
    """Return the multi-hot bag of words of a mission over :data:`MISSION_WORDS`.

    The last entry stands for all other words. The result is shared: do not write to it.
    """
    features = torch.zeros(len(MISSION_WORDS) + 1)
    for word in re.findall(r"[a-z]+", mission.lower()):
        features[_WORD_INDEX.get(word, len(MISSION_WORDS))] = 1.0
    return features


class TensorObservation(gym.ObservationWrapper):
    """Turns the mission into bytes: TorchRL's batched envs move tensors 1.6 times faster.

    ``with_mission`` is whether to write ``mission_bytes``, uint8 ``[512]``, which raises
    ``ValueError`` for a mission of more bytes.
    """

    def __init__(self, env: gym.Env, *, with_mission: bool) -> None:
        super().__init__(env)
        self.with_mission = with_mission
        spaces = {
            "image": env.observation_space["image"],
            "direction": gym.spaces.Box(0, 3, (1,), np.int64),
        }
        if with_mission:
            spaces["mission_bytes"] = gym.spaces.Box(0, 255, (_MISSION_BYTES,), np.uint8)
        self.observation_space = gym.spaces.Dict(spaces)

    def observation(self, observation: dict[str, Any]) -> dict[str, np.ndarray]:
        """Return view, direction and mission as arrays."""
        out = {"image": observation["image"], "direction": np.array([observation["direction"]])}
        if self.with_mission:
            raw = observation["mission"].encode()
            if len(raw) > _MISSION_BYTES:
                raise ValueError(
                    f"A mission may have {_MISSION_BYTES} bytes, got {len(raw)}: {raw.decode()!r}."
                )
            padded = bytearray(raw.ljust(_MISSION_BYTES, b"\0"))
            out["mission_bytes"] = np.frombuffer(padded, np.uint8)
        return out


class MiniGridObservation(ObservationTransform):
    """Write features, action mask and mission text beside the raw view.

    ``mission`` is that which never varies; ``None`` reads it from each row, and ``observation``
    then ends with :func:`mission_features`. The rest is as of :func:`valid_actions`.
    """

    def __init__(self, *, mission: str | None, num_actions: int, done_is_valid: bool) -> None:
        super().__init__(in_keys=["image", "direction"], out_keys=["observation", "action_mask"])
        self.mission = mission
        self.mask_settings = {"num_actions": num_actions, "done_is_valid": done_is_valid}

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        image = next_tensordict.get("image")
        features = one_hot_view(image, next_tensordict.get("direction"))
        if self.mission is not None:
            text = NonTensorData(self.mission, batch_size=image.shape[:1])
        else:
            raw = next_tensordict.pop("mission_bytes").cpu().numpy()
            missions = [row.tobytes().rstrip(b"\0").decode() for row in raw]
            words = torch.stack([mission_features(mission) for mission in missions])
            features = torch.cat([features, words.to(features.device)], dim=-1)
            text = NonTensorStack(*[NonTensorData(mission) for mission in missions])
        next_tensordict.set("observation", features)
        next_tensordict.set("action_mask", valid_actions(image, **self.mask_settings))
        return next_tensordict.set("mission", text)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare what the transform writes and drop the mission's byte form."""
        image = observation_spec["image"]
        batch, device = image.shape[:1], image.device
        num_actions = self.mask_settings["num_actions"]
        size = image.shape[1] * image.shape[2] * sum(_CHANNELS) + 4
        if self.mission is None:
            size += len(MISSION_WORDS) + 1
            del observation_spec["mission_bytes"]
        observation_spec["observation"] = Bounded(
            0.0, 1.0, shape=(*batch, size), dtype=torch.float32, device=device
        )
        observation_spec["action_mask"] = Binary(
            num_actions, shape=(*batch, num_actions), dtype=torch.bool, device=device
        )
        observation_spec["mission"] = NonTensor(
            batch, device, example_data=self.mission or "", batched=self.mission is None
        )
        return observation_spec
