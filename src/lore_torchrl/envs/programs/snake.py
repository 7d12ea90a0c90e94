"""Hand-written programs over :attr:`SnakeDescriber.program_fields`."""

from __future__ import annotations

from typing import Any

from lore_torchrl.envs.adapter import program_sources


def compute_features(obs: dict[str, Any]) -> dict[str, float]:
    """Return where the apple lies, and which sides of the head are deadly."""
    row, column, view = obs["row"], obs["column"], obs["view"]
    found = {"apple_down": 0.0, "apple_right": 0.0}
    for y, words in enumerate(view):
        for x, word in enumerate(words):
            if word == "apple":
                found["apple_down"] = (y - row) / len(view)
                found["apple_right"] = (x - column) / len(view)
    sides = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
    for side, (down, right) in sides.items():
        y, x = row + down, column + right
        free = 0 <= y < len(view) and 0 <= x < len(view) and view[y][x] in ("free", "apple")
        found["deadly_" + side] = 0.0 if free else 1.0
    return found


def progress(obs: dict[str, Any]) -> float:
    """Return a share that grows with apples eaten, and with how near the next one is.

    Where apples are poisonous, one that falls with both.
    """
    eaten, distance = 0, 0
    for y, words in enumerate(obs["view"]):
        for x, word in enumerate(words):
            if word == "body":
                eaten += 1
            if word == "apple":
                distance = abs(y - obs["row"]) + abs(x - obs["column"])
    near = 1.0 - distance / (2.0 * len(obs["view"]))
    done = 1.0 - 1.0 / (1.0 + eaten + 0.5 * near)
    return 1.0 - done if obs["poison"] else done


def reached(obs: dict[str, Any]) -> dict[str, bool]:
    """Return whether one apple and two are eaten, and whether one is beside the head."""
    eaten, beside = 0, False
    for y, words in enumerate(obs["view"]):
        for x, word in enumerate(words):
            if word == "body":
                eaten += 1
            if word == "apple":
                beside = abs(y - obs["row"]) + abs(x - obs["column"]) <= 1
    return {
        "have eaten an apple": eaten >= 1,
        "have eaten two apples": eaten >= 2,
        "be beside an apple": beside,
    }


#: Source of the program of each kind.
PROGRAMS = program_sources(features=compute_features, progress=progress, subgoals=reached)
