"""Modules between the stock actor and the environment: gate, mixer, temperature."""

from __future__ import annotations

from lore_torchrl.modules.actor import LoReActor
from lore_torchrl.modules.epsilon import ValidEGreedyModule
from lore_torchrl.modules.gate import RunningScale, UncertaintyGate
from lore_torchrl.modules.mixing import LogitMixer, Mixture
from lore_torchrl.modules.temperature import TemperatureAligner

__all__ = [
    "LoReActor",
    "LogitMixer",
    "Mixture",
    "RunningScale",
    "TemperatureAligner",
    "UncertaintyGate",
    "ValidEGreedyModule",
]
