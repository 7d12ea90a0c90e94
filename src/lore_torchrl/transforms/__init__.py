"""TorchRL transforms that bring advice and programs into the data of an environment."""

from __future__ import annotations

from lore_torchrl.transforms.advice import AdviceTransform
from lore_torchrl.transforms.features import ProgramFeatures
from lore_torchrl.transforms.progress import ProgressShaping
from lore_torchrl.transforms.subgoals import ProgramSubgoals, SubgoalBonus

__all__ = [
    "AdviceTransform",
    "ProgramFeatures",
    "ProgramSubgoals",
    "ProgressShaping",
    "SubgoalBonus",
]
