"""The bandit that decides in which segments of an episode advice acts, and what tells it."""

from __future__ import annotations

from lore_torchrl.control.bandit import AdviceBandit
from lore_torchrl.control.observer import AdviceObserver

__all__ = ["AdviceBandit", "AdviceObserver"]
