"""Losses: the gated, constrained actor objective and its place in DreamerV3."""

from __future__ import annotations

from lore_torchrl.objectives.actor import LoReActorLoss
from lore_torchrl.objectives.dreamer import LoReDreamerV3Loss

__all__ = ["LoReActorLoss", "LoReDreamerV3Loss"]
