"""Advice from a language model for TorchRL's DreamerV3."""

from __future__ import annotations

from lore_torchrl.advisors import Advice, AdviceRequest, Advisor, Describer
from lore_torchrl.configs import LoReConfig
from lore_torchrl.control import AdviceBandit
from lore_torchrl.lore import LoRe
from lore_torchrl.modules import (
    LatentDisagreement,
    LogitMixer,
    LoReActor,
    PriorNet,
    TemperatureAligner,
    UncertaintyGate,
    ValueEnsemble,
)
from lore_torchrl.objectives import LoReActorLoss, LoReDreamerV3Loss
from lore_torchrl.policies import GaussianPolicy
from lore_torchrl.replay import EpisodeReturns, ImitationSampler
from lore_torchrl.service import AdviceService, CallBudget, CallPolicy
from lore_torchrl.transforms import AdviceTransform

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "AdviceBandit",
    "AdviceRequest",
    "AdviceService",
    "AdviceTransform",
    "Advisor",
    "CallBudget",
    "CallPolicy",
    "Describer",
    "EpisodeReturns",
    "GaussianPolicy",
    "ImitationSampler",
    "LatentDisagreement",
    "LoRe",
    "LoReActor",
    "LoReActorLoss",
    "LoReConfig",
    "LoReDreamerV3Loss",
    "LogitMixer",
    "PriorNet",
    "TemperatureAligner",
    "UncertaintyGate",
    "ValueEnsemble",
    "__version__",
]
