"""Checks on the metrics of a run that tell one which has gone wrong from one that is slow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch

from lore_torchrl.configs import HealthConfig, TrainConfig
from lore_torchrl.dreamer.agent import DreamerAgent

# Fewer questions say nothing at once.
_MIN_QUESTIONS = 5
# Failures that tell nothing of the advisor, which never saw the question.
_NEVER_PUT = ("not_recorded", "not_sent", "prompt_too_long", "stopped")
# Success rate in training above which low entropy is mastery rather than collapse.
_MASTERY = 0.5
# Standard deviation of beta below which it counts as constant.
_MIN_BETA_STD = 0.01


class Finding(NamedTuple):
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
    answered: float = 0.0
    failed: float = 0.0
    spent_step: int | None = None


@dataclass(eq=False)
class HealthMonitor:
    r"""Check each row of metrics for common failures of a run.

    :class:`~lore_torchrl.configs.HealthConfig` says what each check trips on and after how many
    rows; ``docs/troubleshooting.md`` what to do then.

    A row that lacks a check's metrics leaves that check as it was; so does
    ``value_overconfidence`` until an episode has ended. Where rewards are negative a part of an
    episode returns more than all of it, at most 0.

    Args:
        config: Thresholds; ``None`` switches a check off.

    Keyword Args:
        num_actions: Number of discrete actions.
        total_steps: Environment steps of the run.
        beta_max: The gate's largest weight; ``0`` for a run without advice, whose messages
            then name no advisor. Default: ``1.0``.
        multiplier_max: Largest :math:`\lambda`; ``0`` switches ``kl_over_delta`` off.
            Default: ``0.0``.
        bonus_max: Most that bonuses add to the return that the critic learns. Default: ``0.0``.
    """

    config: HealthConfig
    _: KW_ONLY
    num_actions: int
    total_steps: int
    beta_max: float = 1.0
    multiplier_max: float = 0.0
    bonus_max: float = 0.0
    _memory: _Memory = field(default_factory=_Memory, init=False)

    def observe(
        self, step: int, row: Mapping[str, float]
    ) -> tuple[dict[str, float], list[Finding]]:
        """Check the row of a step.

        Returns:
            ``health/<check>``, 1 while it lasts and else 0, for each check that has had
            its metrics; and the checks that have tripped at this very row.
        """
        findings = []
        streaks, tripped = self._memory.streaks, self._memory.tripped
        for name, wrong, patience, message in self._verdicts(step, row):
            streaks[name] = streaks.get(name, 0) + 1 if wrong else 0
            was, tripped[name] = tripped.get(name, False), streaks[name] >= patience
            if tripped[name] and not was:
                findings.append(Finding(name, message))
        return {f"health/{name}": float(on) for name, on in tripped.items()}, findings

    def _verdicts(
        self, step: int, row: Mapping[str, float]
    ) -> Iterator[tuple[str, bool, int, str]]:
        """Yield name, whether something is wrong, patience in rows, and what to tell the user.

        Checks that are off, or lack their metrics, yield nothing.
        """
        c, memory, get = self.config, self._memory, row.get

        entropy, success = get("lore/entropy_wm"), get("train/success")
        if not (c.entropy_share is None or entropy is None or success is None):
            least = c.entropy_share * math.log(self.num_actions)
            wrong = entropy < least and success < _MASTERY
            message = (
                f"The policy's entropy is {entropy:.3f} nats, below {least:.3f}, while "
                f"{success:.0%} of the episodes succeed: it has settled too early. Raise "
                "dreamer.entropy_bonus"
                f"{', or lower lore.loss.imitation_weight' if self.beta_max else ''}."
            )
            yield "entropy_collapse", wrong, c.patience, message

        kl, delta, multiplier = map(get, ("learner/lore_kl", "lore/delta", "lore/lambda"))
        if c.kl_factor is not None and self.multiplier_max and None not in (kl, delta, multiplier):
            wrong = kl > c.kl_factor * delta and multiplier >= 0.99 * self.multiplier_max
            message = (
                f"Mixture and policy lie {kl:.2f} nats apart, delta is {delta:.2f}, and the "
                "multiplier cannot rise further. Raise lore.loss.multiplier_max, or allow more "
                "with lore.loss.delta, or less advice with lore.mixer.max_kl."
            )
            yield "kl_over_delta", wrong, c.patience, message

        mean, std = get("lore/beta_mean"), get("lore/beta_std")
        # Before it learns, an agent is rightly unsure everywhere.
        known = mean is not None and std is not None and get("time/updates")
        if c.beta_share is not None and self.beta_max and known:
            wrong = mean > c.beta_share * self.beta_max and std < _MIN_BETA_STD
            message = (
                f"The gate lets {mean / self.beta_max:.0%} of the advice through everywhere: it "
                "tells no state from another. Raise lore.gate.tau, or lower lore.gate.kappa."
            )
            yield "beta_saturated", wrong, c.patience, message

        error = get("loss/model_reco", math.nan)
        if c.model_error_factor is not None and math.isfinite(error):
            memory.lowest_error = min(memory.lowest_error, error)
            wrong = error > c.model_error_factor * max(memory.lowest_error, 1e-6)
            message = (
                f"The world model's reconstruction error is {error:.2f}; it has been "
                f"{memory.lowest_error:.2f}. Lower dreamer.lr, or enlarge dreamer.buffer_size if "
                "the agent has come to new places."
            )
            yield "model_error", wrong, c.patience, message

        value = get("learner/return_high")
        memory.best_return = max(memory.best_return, get("train/return", -math.inf))
        known = value is not None and memory.best_return > -math.inf
        if c.value_margin is not None and known:
            message = (
                f"Imagined returns reach {value:.2f}, and the best episodes returned "
                f"{memory.best_return:.2f}. Raise dreamer.slow_critic_weight, or lower "
                "dreamer.imagination_horizon."
            )
            best = max(memory.best_return, 0.0) + self.bonus_max
            wrong = value > best + c.value_margin
            yield "value_overconfidence", wrong, c.patience, message

        # Where every step costs, a success may return no more than 0.
        if max(get("train/return", 0.0), get("train/success", 0.0)) > 0:
            memory.rewarded_step = step
        unrewarded = step - memory.rewarded_step
        if c.no_reward_steps is not None:
            hint = (
                "See in advice/* whether the advisor answers, and raise lore.calls.budget; see in "
                "bandit/* whether its advice is let through."
                if self.beta_max
                else "Raise dreamer.entropy_bonus for more exploration, or health.no_reward_steps "
                "if the task takes that long; lore=default asks an advisor."
            )
            message = f"No episode has returned anything for {unrewarded:,} steps. {hint}"
            yield "no_reward", unrewarded >= c.no_reward_steps, 1, message

        calls, left = get("advice/calls"), get("advice/budget_left")
        answered, failed = get("advice/answered"), get("advice/failed")
        if c.invalid_share is not None and None not in (answered, failed):
            failed -= sum(get(f"advice/error_{kind}", 0.0) for kind in _NEVER_PUT)
            lost = failed - memory.failed
            asked = lost + answered - memory.answered
            memory.answered, memory.failed = answered, failed
            if asked:
                message = (
                    f"{lost:.0f} of the advisor's {asked:.0f} latest questions failed. "
                    "advice/error_* tells of what; python examples/advise.py, with env=, advisor= "
                    "and advisor.* as in this run, shows one question and its answer."
                )
                # Once no call is left, no further row may have any.
                patience = 1 if left == 0 and asked >= _MIN_QUESTIONS else c.patience
                yield "invalid_answers", lost > c.invalid_share * asked, patience, message

        if c.budget_burn_share is not None and calls and left is not None:
            if left > 0:  # a resume may have raised the budget
                memory.spent_step = None
            elif memory.spent_step is None:
                memory.spent_step = int(get("advice/last_call_step", step))
            spent = self.total_steps if memory.spent_step is None else memory.spent_step
            message = (
                f"All {calls:.0f} calls were spent by step {spent:,} of {self.total_steps:,}. "
                "Raise lore.calls.averaging_visits, or set lore.calls.cooldown."
            )
            yield "budget_burn", spent < c.budget_burn_share * self.total_steps, 1, message

        if c.nonfinite:
            losses = [k for k, v in row.items() if k[:5] == "loss/" and not math.isfinite(v)]
            weights = get("health/nonfinite_parameters", 0.0)
            message = (
                f"Not finite: {', '.join(losses) or 'no loss'}, and {weights:.0f} parameters. The "
                "learner cannot recover: stop, and begin again with a lower dreamer.lr."
            )
            yield "nonfinite", bool(losses) or weights > 0, 1, message

    def state_dict(self) -> dict[str, Any]:
        """Return what the checks keep between rows, as JSON-able types."""
        return asdict(self._memory)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self._memory = _Memory(**state_dict)


def build_health(c: TrainConfig, steps: int, agent: DreamerAgent) -> HealthMonitor | None:
    """Build the monitor of a run of so many steps, ``None`` where ``health.enabled`` is off."""
    if not c.health.enabled:
        return None
    # The differential entropy of a continuous policy has no scale to take a share of.
    discrete, loss, subgoal = agent.action_bounds is None, c.lore.loss, c.lore.subgoal
    return HealthMonitor(
        c.health if discrete else replace(c.health, entropy_share=None),
        num_actions=agent.num_actions,
        total_steps=steps,
        beta_max=c.lore.gate.beta_max if c.lore.enabled else 0.0,
        multiplier_max=loss.multiplier_max if c.lore.enabled and loss.multiplier_lr else 0.0,
        bonus_max=subgoal.episode_budget if c.lore.enabled and subgoal.enabled else 0.0,
    )


def count_nonfinite(module: torch.nn.Module) -> dict[str, float]:
    """Return ``health/nonfinite_parameters`` of a module; waits for the device."""
    counts = [(~value.isfinite()).sum() for value in module.parameters()]
    return {"health/nonfinite_parameters": torch.stack(counts).sum().item()}


def is_finite(module: torch.nn.Module) -> bool:
    """Return whether all parameters are finite; waits for the device."""
    # One fused norm over all parameters, instead of one check for each.
    return bool(torch.nn.utils.get_total_norm(module.parameters()).isfinite())
