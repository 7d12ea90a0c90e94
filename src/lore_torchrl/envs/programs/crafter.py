"""Hand-written programs over :attr:`CrafterDescriber.program_fields`."""

from __future__ import annotations

from typing import Any

from lore_torchrl.envs.adapter import program_sources


def compute_features(obs: dict[str, Any]) -> dict[str, float]:
    """Return the lowest need, what is unlocked and in hand, and how near the next things are."""
    held = obs["inventory"]
    needs = [held[name] for name in ("health", "food", "drink", "energy")]
    found = {
        "lowest_need": min(needs) / 9.0,
        "unlocked": len(obs["unlocked"]) / 22.0,
        "wood": min(held["wood"], 5) / 5.0,
        "pickaxe": 1.0 if held["wood_pickaxe"] else 0.0,
    }
    for kind in ("tree", "water", "zombie", "table"):
        near = 0.0
        for row, words in enumerate(obs["view"]):
            for column, word in enumerate(words):
                if word == kind:
                    distance = abs(obs["row"] - row) + abs(obs["column"] - column)
                    near = max(near, 1.0 / distance)
        found[kind + "_near"] = near
    return found


def progress(obs: dict[str, Any]) -> float:
    """Return the share of achievements unlocked, and a little for materials in hand."""
    held = obs["inventory"]
    materials = sum(min(held[name], 5) for name in ("wood", "stone", "coal", "iron", "sapling"))
    return 0.9 * len(obs["unlocked"]) / 22.0 + 0.1 * materials / 25.0


def reached(obs: dict[str, Any]) -> dict[str, bool]:
    """Return whether there is enough in hand for what is built next, and no need is low."""
    held = obs["inventory"]
    needs = [held[name] for name in ("health", "food", "drink", "energy")]
    return {
        "have wood for a table and a pickaxe": held["wood"] >= 2,
        "have wood and stone for a pickaxe": held["wood"] >= 1 and held["stone"] >= 1,
        "have no low need": min(needs) >= 5,
    }


#: Source of the program of each kind.
PROGRAMS = program_sources(features=compute_features, progress=progress, subgoals=reached)
