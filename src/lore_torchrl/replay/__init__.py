"""What is done to experience after it has been stored, and how it is drawn."""

from __future__ import annotations

from lore_torchrl.replay.imitation_sampler import ImitationSampler
from lore_torchrl.replay.late_advice import LateAdvice
from lore_torchrl.replay.returns import EpisodeReturns
from lore_torchrl.replay.sampling import SequenceWeights, WeightedSliceSampler, record_weights

__all__ = [
    "EpisodeReturns",
    "ImitationSampler",
    "LateAdvice",
    "SequenceWeights",
    "WeightedSliceSampler",
    "record_weights",
]
