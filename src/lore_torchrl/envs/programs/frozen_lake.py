"""Hand-written programs over :attr:`FrozenLakeDescriber.program_fields`."""

from __future__ import annotations

from typing import Any

from lore_torchrl.envs.adapter import program_sources


def compute_features(obs: dict[str, Any]) -> dict[str, float]:
    """Return where the goal lies, and whether a hole lies on each side."""
    row, column, view = obs["row"], obs["column"], obs["view"]
    found = {"goal_down": 0.0, "goal_right": 0.0}
    for y, words in enumerate(view):
        for x, word in enumerate(words):
            if word == "goal":
                found["goal_down"] = (y - row) / len(view)
                found["goal_right"] = (x - column) / len(words)
    sides = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    for side, (down, right) in sides.items():
        y, x = row + down, column + right
        inside = 0 <= y < len(view) and 0 <= x < len(view[0])
        found["hole_" + side] = 1.0 if inside and view[y][x] == "hole" else 0.0
    return found


def progress(obs: dict[str, Any]) -> float:
    """Return how near the goal is in squares, 1 on it."""
    view, distance = obs["view"], 0
    for y, words in enumerate(view):
        for x, word in enumerate(words):
            if word == "goal":
                distance = abs(y - obs["row"]) + abs(x - obs["column"])
    return 1.0 - distance / (len(view) + len(view[0]))


def reached(obs: dict[str, Any]) -> dict[str, bool]:
    """Return whether the agent is half way to the goal, and beside it."""
    view, distance = obs["view"], 0
    for y, words in enumerate(view):
        for x, word in enumerate(words):
            if word == "goal":
                distance = abs(y - obs["row"]) + abs(x - obs["column"])
    return {
        "be half way to the goal": 2 * distance <= len(view) + len(view[0]) - 2,
        "be beside the goal": distance <= 1,
    }


#: Source of the program of each kind.
PROGRAMS = program_sources(features=compute_features, progress=progress, subgoals=reached)
