"""What a run needs to watch over itself."""

from __future__ import annotations

from dataclasses import asdict

import torch

from lore_torchrl.configs import TrainConfig
from lore_torchrl.control import HealthMonitor
from lore_torchrl.dreamer.agent import DreamerAgent


def build_health(c: TrainConfig, steps: int, agent: DreamerAgent) -> HealthMonitor | None:
    """Build the monitor of a run, ``None`` where it is switched off.

    Args:
        c: The run.
        steps: Its environment steps.
        agent: Its networks.
    """
    if not c.health.enabled:
        return None
    settings = asdict(c.health)
    for name in ("enabled", "stop"):
        del settings[name]
    if agent.action_bounds is not None:
        # A density's entropy has no scale of its own to take a share of.
        settings["entropy_share"] = None
    loss = c.lore.loss
    return HealthMonitor(
        num_actions=agent.num_actions,
        total_steps=steps,
        beta_max=c.lore.gate.beta_max if c.lore.enabled else 0.0,
        multiplier_max=loss.multiplier_max if c.lore.enabled and loss.multiplier_lr else 0.0,
        **settings,
    )


def count_nonfinite(module: torch.nn.Module) -> dict[str, float]:
    """Return ``health/nonfinite_parameters`` of a module; waits for the device."""
    counts = [(~value.isfinite()).sum() for value in module.parameters()]
    return {"health/nonfinite_parameters": torch.stack(counts).sum().item()}


def is_finite(module: torch.nn.Module) -> bool:
    """Return whether all parameters are finite; waits for the device."""
    # One number for all parameters; fused, unlike a look at each.
    return bool(torch.nn.utils.get_total_norm(module.parameters()).isfinite())
