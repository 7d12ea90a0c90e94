"""Features of MiniGrid observations as pure functions over batches of views."""

from __future__ import annotations

import re
from functools import lru_cache

import torch
from torch import Tensor

from lore_torchrl.envs.minigrid_describe import (
    ACTIONS,
    BALL,
    BOX,
    COLORS,
    DOOR,
    DOOR_STATES,
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

NUM_OBJECTS = len(OBJECTS)
NUM_COLORS = len(COLORS)
NUM_DIRECTIONS = 4
# The state channel holds a door's state, or the heading where an agent is encoded.
NUM_STATES = max(len(DOOR_STATES), NUM_DIRECTIONS)

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
        image: ``[*B, W, H, 3]``, object, colour and state of each cell.
        direction: ``[*B, 1]``, compass direction of the agent.

    Returns:
        Float32 ``[*B, W * H * 21 + 4]``: for each cell one-hot object (11), colour (6)
        and state (4), then one-hot direction.

    Examples:
        >>> view = torch.zeros(2, 7, 7, 3, dtype=torch.uint8)
        >>> one_hot_view(view, torch.zeros(2, 1, dtype=torch.int64)).shape
        torch.Size([2, 1033])
    """
    batch, (width, height) = image.shape[:-3], image.shape[-3:-1]
    per_cell = NUM_OBJECTS + NUM_COLORS + NUM_STATES
    size = width * height * per_cell + NUM_DIRECTIONS
    channel = torch.tensor([0, NUM_OBJECTS, NUM_OBJECTS + NUM_COLORS], device=image.device)
    cell = torch.arange(width * height, device=image.device)[:, None] * per_cell
    index = torch.cat(
        [
            (image.long().flatten(-3, -2) + channel + cell).flatten(-2),
            direction.long() + (size - NUM_DIRECTIONS),
        ],
        dim=-1,
    )
    return torch.zeros(*batch, size, device=image.device).scatter_(-1, index, 1.0)


def valid_actions(
    image: Tensor, *, num_actions: int = len(ACTIONS), done_is_valid: bool = False
) -> Tensor:
    """Mark the actions that change anything, judged from the agent's view alone.

    Turning always does. Forward does where the cell ahead is empty, floor, goal, lava
    (which ends the episode) or an open door; pickup where a key, ball or box is ahead
    and the hands are empty; drop where they are full and the cell ahead is empty; toggle
    where a box or a door is ahead, a locked door only with a key of its colour in hand.

    Args:
        image: ``[*B, W, H, 3]`` egocentric views; the agent's own cell, in the middle of
            the last row, holds what it carries.
        num_actions: Number of actions, a prefix of MiniGrid's seven. Default: ``7``.
        done_is_valid: What to say of ``done``, which only GoToDoor and GoToObject react
            to. Default: ``False``.

    Returns:
        Bool ``[*B, num_actions]``.

    Examples:
        >>> view = torch.ones(7, 7, 3, dtype=torch.uint8)  # empty cells everywhere
        >>> valid_actions(view).tolist()
        [True, True, True, False, False, False, False]
    """
    middle, last = image.shape[-3] // 2, image.shape[-2] - 1
    front, front_color, front_state = image[..., middle, last - 1, :].unbind(-1)
    held, held_color = image[..., middle, last, :2].unbind(-1)
    hands_empty = (held == EMPTY) | (held == UNSEEN)
    empty, door, box = front == EMPTY, front == DOOR, front == BOX
    locked = front_state == LOCKED
    has_key = (held == KEY) & (held_color == front_color)
    pickable = box | (front == KEY) | (front == BALL)
    enterable = empty | (front == FLOOR) | (front == GOAL) | (front == LAVA)
    always = torch.ones_like(empty)
    mask = torch.stack(
        [
            always,
            always,
            enterable | (door & (front_state == OPEN)),
            pickable & hands_empty,
            empty & ~hands_empty,
            box | (door & (~locked | has_key)),
            always if done_is_valid else ~always,
        ],
        dim=-1,
    )
    return mask[..., :num_actions]


@lru_cache(maxsize=4096)
def mission_features(mission: str) -> Tensor:
    """Return the multi-hot bag of words of a mission over :data:`MISSION_WORDS`.

    The last entry stands for all words outside the vocabulary. The result is shared
    between calls: do not write to it.

    Examples:
        >>> int(mission_features("pick up the red ball").sum())
        5
    """
    features = torch.zeros(len(MISSION_WORDS) + 1)
    for word in re.findall(r"[a-z]+", mission.lower()):
        features[_WORD_INDEX.get(word, len(MISSION_WORDS))] = 1.0
    return features
