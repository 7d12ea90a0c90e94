"""Hand-written programs over :attr:`MarketDescriber.program_fields`."""

from __future__ import annotations

from typing import Any

from lore_torchrl.envs.adapter import program_sources


def compute_features(obs: dict[str, Any]) -> dict[str, float]:
    """Return trend, last week, volatility and position."""
    return {
        "trend": obs["trend"] / 3.0,
        "week": obs["week"] / 2.0,
        "volatility": min(1.0, obs["volatility"]),
        "held": 1.0 if obs["held"] else 0.0,
        "gain": float(obs["gain"]),
        "ending": 1.0 if obs["ending"] else 0.0,
    }


def progress(obs: dict[str, Any]) -> float:
    """Return 0.5, and more where a share is held in a rise or none is in a fall."""
    trend = obs["trend"] if obs["held"] else -obs["trend"]
    return 0.5 + trend / 6.0


def reached(obs: dict[str, Any]) -> dict[str, bool]:
    """Return whether a share is held in a clear rise, and whether it is held at a profit."""
    return {
        "hold a share in a clear rise": obs["held"] and obs["trend"] >= 1.0,
        "hold a share at a profit": obs["held"] and obs["gain"] > 0,
    }


#: Source of the program of each kind.
PROGRAMS = program_sources(features=compute_features, progress=progress, subgoals=reached)
