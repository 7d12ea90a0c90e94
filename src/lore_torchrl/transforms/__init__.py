"""TorchRL transforms that bring advice into the data of an environment."""

from __future__ import annotations

from lore_torchrl.transforms.advice import AdviceTransform

__all__ = ["AdviceTransform"]
