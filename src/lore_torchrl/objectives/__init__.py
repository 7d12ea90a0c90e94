"""Losses: the gated, constrained actor objective, and its place in DreamerV3."""

from __future__ import annotations

from lore_torchrl.objectives.actor import LoReActorLoss
from lore_torchrl.objectives.dreamer import LoReDreamerV3Loss
from lore_torchrl.objectives.imitation import imitation_weight, replay_returns

__all__ = [
    "LoReActorLoss",
    "LoReDreamerV3Loss",
    "imitation_weight",
    "replay_returns",
]
