"""Checks that tell a run which has gone wrong from one that is slow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Fewer calls than this say nothing about an advisor.
_LEAST_CALLS = 5
# Training success at which low entropy is mastery rather than collapse.
_MASTERY = 0.5
# Spread of beta below which it does not vary.
_STILL = 0.01


@dataclass(frozen=True)
class Finding:
    """A check that has just tripped: its name, and what to do about it."""

    check: str
    message: str


@dataclass
class _Memory:
    """What the checks keep between rows."""

    streaks: dict[str, int] = field(default_factory=dict)
    tripped: dict[str, bool] = field(default_factory=dict)
    lowest_error: float = math.inf
    best_return: float = -math.inf
    rewarded_step: int = 0
    calls: float = 0.0
    failed: float = 0.0
    spent_step: int | None = None


class HealthMonitor:
    r"""Look at each row of metrics for what usually goes wrong.

    | check | trips when | after |
    | --- | --- | --- |
    | ``entropy_collapse`` | ``lore/entropy_wm`` < ``entropy_share`` :math:`\cdot \ln A`, and ``train/success`` below one half | ``patience`` rows |
    | ``kl_over_delta`` | ``learner/lore_kl`` > ``kl_factor`` :math:`\cdot \delta`, with :math:`\lambda` at its maximum | ``patience`` rows |
    | ``beta_saturated`` | ``lore/beta_mean`` > ``beta_share`` :math:`\cdot \beta_{max}`, hardly varying, once the learner learns | ``patience`` rows |
    | ``model_error`` | ``loss/model_reco`` > ``model_error_factor`` times its lowest | ``patience`` rows |
    | ``value_overconfidence`` | ``learner/return_high`` > best ``train/return`` of a row, or 0 if that is negative, + ``value_margin`` | ``patience`` rows |
    | ``no_reward`` | ``no_reward_steps`` without a positive ``train/return`` or ``train/success`` | at once |
    | ``invalid_answers`` | of 5 calls or more since the last row, more than ``invalid_share`` failed | ``patience`` rows, or at once if no call is left |
    | ``budget_burn`` | no call is left, and the last was made before ``budget_burn_share`` of the run | at once |
    | ``nonfinite`` | a loss, or ``health/nonfinite_parameters``, is not finite or not 0 | at once |

    A row that lacks a check's metrics leaves that check as it was; so does
    ``value_overconfidence`` until an episode has ended. Where rewards are negative a part of an
    episode returns more than all of it, at most 0.

    Keyword Args:
        num_actions: :math:`A`.
        total_steps: Environment steps of the run.
        beta_max: The gate's largest weight; ``0`` for a run without advice, whose messages
            then name no advisor. Default: ``1.0``.
        multiplier_max: Largest :math:`\lambda`; ``0`` switches ``kl_over_delta`` off.
            Default: ``0.0``.
        patience: Rows in a row for which a condition must hold. Default: ``4``.
        entropy_share: Default: ``0.05``. This and each of the following: ``None`` switches
            its check off.
        kl_factor: Default: ``8.0``.
        beta_share: Default: ``0.98``.
        model_error_factor: Default: ``3.0``.
        value_margin: In units of return. Default: ``0.5``.
        no_reward_steps: Environment steps. Default: ``10_000``.
        invalid_share: Default: ``0.2``.
        budget_burn_share: Default: ``0.02``.
        nonfinite: Default: ``True``.

    Examples:
        >>> monitor = HealthMonitor(num_actions=7, total_steps=1_000, no_reward_steps=500)
        >>> metrics, findings = monitor.observe(600, {"train/return": 0.0})
        >>> metrics["health/no_reward"], findings[0].check
        (1.0, 'no_reward')
        >>> monitor.observe(700, {"train/return": 0.5})[0]["health/no_reward"]
        0.0
    """  # noqa: E501

    def __init__(
        self,
        *,
        num_actions: int,
        total_steps: int,
        beta_max: float = 1.0,
        multiplier_max: float = 0.0,
        patience: int = 4,
        entropy_share: float | None = 0.05,
        kl_factor: float | None = 8.0,
        beta_share: float | None = 0.98,
        model_error_factor: float | None = 3.0,
        value_margin: float | None = 0.5,
        no_reward_steps: int | None = 10_000,
        invalid_share: float | None = 0.2,
        budget_burn_share: float | None = 0.02,
        nonfinite: bool = True,
    ) -> None:
        self.num_actions = num_actions
        self.total_steps = total_steps
        self.beta_max = beta_max
        self.multiplier_max = multiplier_max
        self.patience = patience
        self.entropy_share = entropy_share
        self.kl_factor = kl_factor
        self.beta_share = beta_share
        self.model_error_factor = model_error_factor
        self.value_margin = value_margin
        self.no_reward_steps = no_reward_steps
        self.invalid_share = invalid_share
        self.budget_burn_share = budget_burn_share
        self.nonfinite = nonfinite
        self._memory = _Memory()

    def observe(
        self, step: int, row: Mapping[str, float]
    ) -> tuple[dict[str, float], list[Finding]]:
        """Check one row.

        Args:
            step: Environment steps so far.
            row: Metrics by name.

        Returns:
            ``health/<check>``, 1 while it lasts and else 0, for each check that has had
            its metrics; and the checks that have tripped at this very row.
        """
        findings = []
        for name in self._checks():
            verdict = getattr(self, f"_{name}")(step, row)
            if verdict is None:
                continue
            message, patience = verdict
            streaks, tripped = self._memory.streaks, self._memory.tripped
            streaks[name] = streaks.get(name, 0) + 1 if message else 0
            was = tripped.get(name, False)
            tripped[name] = streaks[name] >= patience
            if tripped[name] and not was:
                findings.append(Finding(name, message))
        return {f"health/{k}": float(v) for k, v in self._memory.tripped.items()}, findings

    def _checks(self) -> list[str]:
        on = {
            "entropy_collapse": self.entropy_share,
            "kl_over_delta": self.kl_factor if self.multiplier_max else None,
            "beta_saturated": self.beta_share if self.beta_max else None,
            "model_error": self.model_error_factor,
            "value_overconfidence": self.value_margin,
            "no_reward": self.no_reward_steps,
            "invalid_answers": self.invalid_share,
            "budget_burn": self.budget_burn_share,
            "nonfinite": self.nonfinite or None,
        }
        return [name for name, threshold in on.items() if threshold is not None]

    # Each returns None without its metrics, else a message, empty where all is well, and the
    # rows for which that must hold.

    def _entropy_collapse(self, _step: int, row: Mapping[str, float]) -> tuple[str, int] | None:
        entropy, success = row.get("lore/entropy_wm"), row.get("train/success")
        if entropy is None or success is None:
            return None
        least = self.entropy_share * math.log(self.num_actions)
        bad = entropy < least and success < _MASTERY
        return (
            f"The policy's entropy is {entropy:.3f} nats, below {least:.3f}, while {success:.0%} "
            "of the episodes succeed: it has settled too early. Raise dreamer.entropy_bonus"
            f"{', or lower lore.loss.imitation_weight' if self.beta_max else ''}." * bad,
            self.patience,
        )

    def _kl_over_delta(self, _step: int, row: Mapping[str, float]) -> tuple[str, int] | None:
        names = ("learner/lore_kl", "lore/delta", "lore/lambda")
        if any(name not in row for name in names):
            return None
        kl, delta, multiplier = (row[name] for name in names)
        bad = kl > self.kl_factor * delta and multiplier >= 0.99 * self.multiplier_max
        return (
            f"Mixture and policy lie {kl:.2f} nats apart, delta is {delta:.2f}, and the "
            "multiplier cannot rise further. Raise lore.loss.multiplier_max, or allow more with "
            "lore.loss.delta, or less advice with lore.mixer.max_kl." * bad,
            self.patience,
        )

    def _beta_saturated(self, _step: int, row: Mapping[str, float]) -> tuple[str, int] | None:
        mean, spread = row.get("lore/beta_mean"), row.get("lore/beta_std")
        # Before it learns, an agent is rightly unsure everywhere.
        if mean is None or spread is None or not row.get("time/updates"):
            return None
        bad = mean > self.beta_share * self.beta_max and spread < _STILL
        return (
            f"The gate lets {mean / max(self.beta_max, 1e-9):.0%} of the advice through "
            "everywhere: it tells no state from another. Raise lore.gate.tau, or lower "
            "lore.gate.kappa." * bad,
            self.patience,
        )

    def _model_error(self, _step: int, row: Mapping[str, float]) -> tuple[str, int] | None:
        error = row.get("loss/model_reco")
        if error is None or not math.isfinite(error):
            return None
        memory = self._memory
        memory.lowest_error = min(memory.lowest_error, error)
        bad = error > self.model_error_factor * max(memory.lowest_error, 1e-6)
        return (
            f"The world model's reconstruction error is {error:.2f}; it has been "
            f"{memory.lowest_error:.2f}. Lower dreamer.lr, or enlarge dreamer.buffer_size if the "
            "agent has come to new places." * bad,
            self.patience,
        )

    def _value_overconfidence(self, _step: int, row: Mapping[str, float]) -> tuple[str, int] | None:
        value = row.get("learner/return_high")
        memory = self._memory
        memory.best_return = max(memory.best_return, row.get("train/return", -math.inf))
        if value is None or memory.best_return == -math.inf:
            return None
        bad = value > max(memory.best_return, 0.0) + self.value_margin
        return (
            f"Imagined returns reach {value:.2f}, and the best episodes returned "
            f"{memory.best_return:.2f}. Raise dreamer.slow_critic_weight, or lower "
            "dreamer.imagination_horizon." * bad,
            self.patience,
        )

    def _no_reward(self, step: int, row: Mapping[str, float]) -> tuple[str, int]:
        memory = self._memory
        # A success may be worth nothing, where all other episodes cost.
        if max(row.get("train/return", 0.0), row.get("train/success", 0.0)) > 0:
            memory.rewarded_step = step
        bad = step - memory.rewarded_step >= self.no_reward_steps
        if self.beta_max:
            hint = (
                "See in advice/* whether the advisor answers, and raise lore.calls.budget; see in "
                "bandit/* whether its advice is let through."
            )
        else:
            hint = (
                "Raise dreamer.entropy_bonus for more exploration, or health.no_reward_steps if "
                "the task takes that long; lore=default asks an advisor."
            )
        return (
            f"No episode has returned anything for {step - memory.rewarded_step:,} steps. {hint}"
            * bad,
            1,
        )

    def _invalid_answers(self, _step: int, row: Mapping[str, float]) -> tuple[str, int] | None:
        memory = self._memory
        calls, failed = row.get("advice/calls"), row.get("advice/failed")
        if calls is None or failed is None or calls - memory.calls < _LEAST_CALLS:
            return None
        share = (failed - memory.failed) / (calls - memory.calls)
        memory.calls, memory.failed = calls, failed
        bad = share > self.invalid_share
        return (
            f"{share:.0%} of the advisor's latest calls failed. advice/error_* tells of what; "
            "python examples/advise.py shows one question and its answer." * bad,
            # There may be no row with calls any more.
            1 if row.get("advice/budget_left") == 0 else self.patience,
        )

    def _budget_burn(self, step: int, row: Mapping[str, float]) -> tuple[str, int] | None:
        calls, left = row.get("advice/calls"), row.get("advice/budget_left")
        if not calls or left is None:
            return None
        memory = self._memory
        if left == 0 and memory.spent_step is None:
            memory.spent_step = int(row.get("advice/last_call_step", step))
        spent = self.total_steps if memory.spent_step is None else memory.spent_step
        bad = spent < self.budget_burn_share * self.total_steps
        return (
            f"All {calls:.0f} calls were spent by step {spent:,} of {self.total_steps:,}. Raise "
            "lore.calls.vote_visits, or set lore.calls.cooldown." * bad,
            1,
        )

    def _nonfinite(self, _step: int, row: Mapping[str, float]) -> tuple[str, int]:
        losses = [name for name, v in row.items() if name[:5] == "loss/" and not math.isfinite(v)]
        weights = row.get("health/nonfinite_parameters", 0.0)
        bad = bool(losses) or weights > 0
        return (
            f"Not finite: {', '.join(losses) or 'no loss'}, and {weights:.0f} parameters. The "
            "learner cannot recover: stop, and resume an earlier checkpoint with a lower "
            "dreamer.lr." * bad,
            1,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what the checks keep between rows, as JSON-able types."""
        return {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(self._memory).items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self._memory = _Memory(**state_dict)
