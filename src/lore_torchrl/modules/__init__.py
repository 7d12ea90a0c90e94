"""Modules between the stock actor and the environment: gate, mixer, learned advice, planner."""

from __future__ import annotations

from lore_torchrl.modules.actor import LoReActor
from lore_torchrl.modules.advice import AdviceBatch
from lore_torchrl.modules.continuous_actor import DreamerV3ContinuousActor
from lore_torchrl.modules.ensembles import LatentDisagreement, ValueEnsemble
from lore_torchrl.modules.epsilon import ValidEGreedyModule
from lore_torchrl.modules.gate import RunningScale, UncertaintyGate
from lore_torchrl.modules.imagination import ImaginationActor
from lore_torchrl.modules.mixing import LogitMixer, Mixture
from lore_torchrl.modules.planner import LatentPlanner, Plan
from lore_torchrl.modules.prior_net import PriorNet
from lore_torchrl.modules.subgoals import SubgoalHead
from lore_torchrl.modules.temperature import TemperatureAligner
from lore_torchrl.modules.world import WorldModel

__all__ = [
    "AdviceBatch",
    "DreamerV3ContinuousActor",
    "ImaginationActor",
    "LatentDisagreement",
    "LatentPlanner",
    "LoReActor",
    "LogitMixer",
    "Mixture",
    "Plan",
    "PriorNet",
    "RunningScale",
    "SubgoalHead",
    "TemperatureAligner",
    "UncertaintyGate",
    "ValidEGreedyModule",
    "ValueEnsemble",
    "WorldModel",
]
