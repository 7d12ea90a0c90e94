"""Hand-written programs over :attr:`MiniGridDescriber.program_fields`."""

from __future__ import annotations

from typing import Any

from lore_torchrl.envs.adapter import program_sources


def compute_features(obs: dict[str, Any]) -> dict[str, float]:
    """Return what is carried and ahead, and where the nearest thing of each kind lies."""
    found = {
        "carrying": 0.0 if obs["carrying"] == "nothing" else 1.0,
        "front_free": 1.0 if obs["front"] in ("empty", "goal") else 0.0,
    }
    for kind in ("key", "door", "goal"):
        near, side = 0.0, 0.0
        for row, words in enumerate(obs["view"]):
            for column, word in enumerate(words):
                if kind in word and "open" not in word:
                    right = column - obs["column"]
                    closeness = 1.0 / (1.0 + abs(obs["row"] - row) + abs(right))
                    if closeness > near:
                        near = closeness
                        side = float((right > 0) - (right < 0))
        found[kind + "_near"] = near
        found[kind + "_side"] = side
    return found


def progress(obs: dict[str, Any]) -> float:
    """Return 0.25 for what is carried, 0.25 for an open door, 0.25 at most for a near goal."""
    value = 0.0 if obs["carrying"] == "nothing" else 0.25
    goal = 0.0
    for row, words in enumerate(obs["view"]):
        for column, word in enumerate(words):
            if word.endswith("(open)"):
                value = max(value, 0.5)
            if word == "goal":
                distance = abs(obs["row"] - row) + abs(obs["column"] - column)
                goal = max(goal, 1.0 / (1.0 + distance))
    return value + 0.25 * goal


def reached(obs: dict[str, Any]) -> dict[str, bool]:
    """Return whether the agent is at a door with a key, at an open one, and near the goal."""
    front, goal = obs["front"], False
    for row, words in enumerate(obs["view"]):
        for column, word in enumerate(words):
            distance = abs(obs["row"] - row) + abs(obs["column"] - column)
            goal = goal or (word == "goal" and distance <= 2)
    return {
        "be at a door with a key in hand": "door" in front and obs["carrying"].endswith("key"),
        "be at an open door": front.endswith("(open)"),
        "be two steps from the goal": goal,
    }


#: Source of the program of each kind.
PROGRAMS = program_sources(features=compute_features, progress=progress, subgoals=reached)
