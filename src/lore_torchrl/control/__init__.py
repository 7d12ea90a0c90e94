"""The bandit that decides in which segments of an episode advice acts."""

from __future__ import annotations

from lore_torchrl.control.bandit import AdviceBandit

__all__ = ["AdviceBandit"]
