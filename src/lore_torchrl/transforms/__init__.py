"""TorchRL transforms that bring advice into the data of an environment."""

from __future__ import annotations

from lore_torchrl.transforms.advice import AdviceTransform
from lore_torchrl.transforms.subgoals import SubgoalBonus

__all__ = ["AdviceTransform", "SubgoalBonus"]
