"""Hand-written programs over :attr:`PendulumDescriber.program_fields`."""

from __future__ import annotations

from typing import Any

from lore_torchrl.envs.adapter import program_sources


def compute_features(obs: dict[str, Any]) -> dict[str, float]:
    """Return how far the rod is from upright, how fast it turns, and the energy that it lacks."""
    outward = obs["degrees"] * obs["speed"] > 0
    return {
        "from_upright": abs(obs["degrees"]) / 180.0,
        "speed": abs(obs["speed"]) / 8.0,
        "falling": 1.0 if outward else 0.0,
        "lacking": max(-1.0, obs["lacking"] / 10.0),
    }


def progress(obs: dict[str, Any]) -> float:
    """Return half for an energy that suffices to stand upright, and half for being there."""
    energy = max(0.0, 1.0 - abs(obs["lacking"]) / 10.0)
    return 0.5 * energy + 0.5 * (1.0 - abs(obs["degrees"]) / 180.0)


def reached(obs: dict[str, Any]) -> dict[str, bool]:
    """Return whether the rod is level or higher, has the energy to stand, and is upright."""
    return {
        "be level or higher": abs(obs["degrees"]) <= 90,
        "have the energy to stand upright": abs(obs["lacking"]) <= 1.0,
        "be nearly upright": abs(obs["degrees"]) <= 15,
    }


#: Source of the program of each kind.
PROGRAMS = program_sources(features=compute_features, progress=progress, subgoals=reached)
