"""What decides whether advice acts, and whether a run is healthy."""

from __future__ import annotations

from lore_torchrl.control.bandit import AdviceBandit
from lore_torchrl.control.health import Finding, HealthMonitor

__all__ = ["AdviceBandit", "Finding", "HealthMonitor"]
