"""Advice from a language model for TorchRL's DreamerV3."""

from __future__ import annotations

from lore_torchrl.advisors import Advice, AdviceRequest, Advisor, Describer
from lore_torchrl.modules import LogitMixer, LoReActor, TemperatureAligner, UncertaintyGate
from lore_torchrl.objectives import LoReActorLoss, LoReDreamerV3Loss
from lore_torchrl.service import AdviceService, CallBudget, CallPolicy
from lore_torchrl.transforms import AdviceTransform

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "AdviceRequest",
    "AdviceService",
    "AdviceTransform",
    "Advisor",
    "CallBudget",
    "CallPolicy",
    "Describer",
    "LoReActor",
    "LoReActorLoss",
    "LoReDreamerV3Loss",
    "LogitMixer",
    "TemperatureAligner",
    "UncertaintyGate",
    "__version__",
]
