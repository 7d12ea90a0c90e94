"""Losses: the gated, constrained actor objective, its place in DreamerV3, what learns beside it."""

from __future__ import annotations

from lore_torchrl.objectives.actor import LoReActorLoss
from lore_torchrl.objectives.disagreement import LatentDisagreementLoss
from lore_torchrl.objectives.distillation import PriorNetLoss
from lore_torchrl.objectives.dreamer import LoReDreamerV3Loss
from lore_torchrl.objectives.imitation import imitation_weight, replay_returns
from lore_torchrl.objectives.value_ensemble import ValueEnsembleLoss

__all__ = [
    "LatentDisagreementLoss",
    "LoReActorLoss",
    "LoReDreamerV3Loss",
    "PriorNetLoss",
    "ValueEnsembleLoss",
    "imitation_weight",
    "replay_returns",
]
