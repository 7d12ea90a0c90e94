"""Settings of the checks on a run's health."""

from __future__ import annotations

from dataclasses import dataclass, field

from lore_torchrl.configs.check import check

CHECKS = (
    "entropy_collapse",
    "kl_over_delta",
    "beta_saturated",
    "model_error",
    "value_overconfidence",
    "no_reward",
    "invalid_answers",
    "budget_burn",
    "nonfinite",
)


@dataclass
class HealthConfig:
    """Thresholds of :class:`~lore_torchrl.dreamer.health.HealthMonitor`.

    Documented in ``configs/health``. A threshold of ``None`` switches its check off.
    """

    enabled: bool = True
    # Checks that end the run.
    stop: list[str] = field(default_factory=lambda: ["nonfinite"])
    # Rows in a row for which a condition must hold.
    patience: int = 4
    entropy_share: float | None = 0.05
    kl_factor: float | None = 8.0
    beta_share: float | None = 0.98
    model_error_factor: float | None = 3.0
    value_margin: float | None = 0.5
    no_reward_steps: int | None = 10_000
    invalid_share: float | None = 0.2
    budget_burn_share: float | None = 0.02
    nonfinite: bool = True

    def __post_init__(self) -> None:
        unknown = set(self.stop) - set(CHECKS)
        check(not unknown, "health.stop", list(self.stop), f"choose from {list(CHECKS)}")
        check(self.patience >= 1, "health.patience", self.patience, "it must be at least 1")
        for name in ("entropy_share", "beta_share", "invalid_share", "budget_burn_share"):
            value = getattr(self, name)
            rule = "it is a share, above 0 and at most 1, or null to switch the check off"
            check(value is None or 0 < value <= 1, f"health.{name}", value, rule)
        for name in ("kl_factor", "model_error_factor"):
            value = getattr(self, name)
            rule = "it must be above 1, or null to switch the check off"
            check(value is None or value > 1, f"health.{name}", value, rule)
        for name in ("value_margin", "no_reward_steps"):
            value = getattr(self, name)
            rule = "it must be positive, or null to switch the check off"
            check(value is None or value > 0, f"health.{name}", value, rule)
