"""What decides how far advice is trusted: measured outcomes, not claims."""

from __future__ import annotations

from lore_torchrl.control.bandit import ShareBandit
from lore_torchrl.control.calibration import ConfidenceCalibrator, superiority
from lore_torchrl.control.health import Finding, HealthMonitor
from lore_torchrl.control.outcomes import AdviceOutcomes, Outcomes
from lore_torchrl.control.share import EpisodeShare

__all__ = [
    "AdviceOutcomes",
    "ConfidenceCalibrator",
    "EpisodeShare",
    "Finding",
    "HealthMonitor",
    "Outcomes",
    "ShareBandit",
    "superiority",
]
