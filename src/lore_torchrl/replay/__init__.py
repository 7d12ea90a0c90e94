"""What is done to experience after it has been stored."""

from __future__ import annotations

from lore_torchrl.replay.imitation_sampler import ImitationSampler
from lore_torchrl.replay.late_advice import LateAdvice
from lore_torchrl.replay.returns import EpisodeReturns

__all__ = ["EpisodeReturns", "ImitationSampler", "LateAdvice"]
