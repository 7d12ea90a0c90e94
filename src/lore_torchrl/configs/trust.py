"""Settings of what decides how far advice is trusted, and of what is learnt from it."""

from __future__ import annotations

from dataclasses import dataclass, field

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

    enabled: bool = True
    depth: int = 2
    num_cells: int = 64
    threshold: float = 0.7
    # Of the calibrator of its confidence.
    num_bins: int = 10
    decay: float = 0.999
    prior_strength: float = 10.0

    def __post_init__(self) -> None:
        value = self.threshold
        check(0 <= value <= 1, "lore.prior_net.threshold", value, "it is a confidence, 0 to 1")


@dataclass
class CalibrationConfig:
    """Keywords of :class:`~lore_torchrl.control.ConfidenceCalibrator` for the advice."""

    enabled: bool = True
    num_bins: int = 10
    decay: float = 0.999
    prior_strength: float = 200.0

    def __post_init__(self) -> None:
        value = self.decay
        check(0 < value <= 1, "lore.calibration.decay", value, "it must lie in (0, 1]")


@dataclass
class BanditConfig:
    """Keywords of :class:`~lore_torchrl.control.ShareBandit`, and whether there is one."""

    enabled: bool = True
    segment_steps: int | None = 128
    arms: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 1.0])
    initial: list[float] | None = field(default_factory=lambda: [0.1, 0.05, 0.05, 0.8])
    learning_rate: float = 0.2
    exploration: float = 0.05
    sharing: float = 0.001
    decay: float = 0.97
    trial_episodes: int = 4
    last_trial_episodes: int = 12
    retrial_growth: float | None = 1.6
    probation: float = 0.12
    hit_rate: float = 0.3
    evidence_low: float = 0.6
    evidence_high: float = 0.8
    trust_low: float = 0.8
    trust_high: float = 0.99
    gated: bool = True

    def __post_init__(self) -> None:
        check(
            len(self.arms) >= 2 and self.arms[0] == 0.0,
            "lore.bandit.arms",
            list(self.arms),
            "it needs 0 first, the arm without advice, and at least one more share of beta",
        )
        check(
            self.initial is None or len(self.initial) == len(self.arms),
            "lore.bandit.initial",
            self.initial,
            "it needs one weight for each arm, or null for equal ones",
        )
        value = self.retrial_growth
        rule = "it must be above 1, or null for a single trial"
        check(value is None or value > 1, "lore.bandit.retrial_growth", value, rule)
        value = self.segment_steps
        rule = "it must be positive, or null for whole episodes"
        check(value is None or value >= 1, "lore.bandit.segment_steps", value, rule)
