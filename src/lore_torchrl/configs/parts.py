"""Settings of what decides where advice acts, and of what is learned from it."""

from __future__ import annotations

from dataclasses import dataclass

from lore_torchrl.configs.check import check


@dataclass
class DisagreementConfig:
    """Keywords of :class:`~lore_torchrl.modules.LatentDisagreement`.

    Built where ``lore.gate.disagreement_weight`` is positive.
    """

    num_members: int = 5
    hidden_dim: int = 64
    depth: int = 2

    def __post_init__(self) -> None:
        value = self.num_members
        check(value >= 2, "lore.disagreement.num_members", value, "a variance needs two members")


@dataclass
class ValueEnsembleConfig:
    """Keywords of :class:`~lore_torchrl.modules.ValueEnsemble`.

    Built where ``lore.gate.value_source`` is ``ensemble``.
    """

    num_members: int = 5
    hidden_dim: int = 64
    depth: int = 2
    prior_scale: float = 1.0

    def __post_init__(self) -> None:
        value = self.num_members
        check(value >= 2, "lore.value_ensemble.num_members", value, "a variance needs two members")


@dataclass
class PriorNetConfig:
    """Keywords of :class:`~lore_torchrl.modules.PriorNet`, and whether there is one."""

    enabled: bool = False
    depth: int = 2
    num_cells: int = 64
    threshold: float = 0.7

    def __post_init__(self) -> None:
        value = self.threshold
        check(0 <= value <= 1, "lore.prior_net.threshold", value, "it is a confidence, 0 to 1")


@dataclass
class BanditConfig:
    """Keywords of :class:`~lore_torchrl.control.AdviceBandit`, and whether there is one."""

    enabled: bool = True
    segment_steps: int | None = 128
    gain: float = 0.5
    floor: float = 0.05
    decay: float = 0.9

    def __post_init__(self) -> None:
        value = self.segment_steps
        rule = "it must be positive, or null for whole episodes"
        check(value is None or value >= 1, "lore.bandit.segment_steps", value, rule)
