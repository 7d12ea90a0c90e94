"""Deciding how much advice to let through, from how uncertain the agent is."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import Binary
from torchrl.envs.transforms import TensorDictPrimer

from lore_torchrl import keys
from lore_torchrl.configs.lore import GateConfig
from lore_torchrl.functional import two_hot_variance

# The two-hot critic of DreamerV3 spans symexp(-20) to symexp(20) on an even symlog grid.
_SYMLOG_RANGE = (-20.0, 20.0)

# Disagreement is a mean over the entries of the latent, and falls below 1e-3 as they are learned.
_LEAST_DISAGREEMENT = 1e-6


class RunningScale(nn.Module):
    r"""Divide by a running maximum that slowly forgets.

    .. math::
        s \leftarrow \max(\gamma\, s,\; \max_i x_i), \qquad \hat x = \min(x / s, 1)

    Keyword Args:
        decay: Forgetting :math:`\gamma` for each update, in ``(0, 1]``. Default: ``0.995``.
        floor: Smallest scale, positive: keeps noise from being blown up to 1. Default: ``1e-3``.
    """

    scale: Tensor

    def __init__(self, *, decay: float = 0.995, floor: float = 1e-3):
        super().__init__()
        self.decay, self.floor = decay, floor
        self.register_buffer("scale", torch.tensor(float(floor)))

    @torch.no_grad()
    def update(self, value: Tensor) -> None:
        """Take note of a batch of non-negative values of any shape."""
        if not value.numel():
            return
        peak = torch.nan_to_num(value, nan=0.0, posinf=0.0).amax()
        self.scale.copy_(torch.maximum((self.decay * self.scale).clamp_min(self.floor), peak))

    def forward(self, value: Tensor) -> Tensor:
        """Return the values on a scale from 0 to 1; what is not finite counts as 1."""
        return torch.nan_to_num(value / self.scale, nan=1.0, posinf=1.0).clamp(0.0, 1.0)


class GateOutput(NamedTuple):
    """What :meth:`UncertaintyGate.evaluate` returns, each ``[*B, 1]``."""

    uncertainty: Tensor
    beta: Tensor
    active: Tensor


class UncertaintyGate(nn.Module):
    r"""Turn the agent's uncertainty into a weight for the advice.

    .. math::
        u &= \frac{w_H \hat H[\pi_{wm}] + w_V \widehat{\mathrm{Var}}[V] + w_D \widehat{D}}
                  {w_H + w_V + w_D} \in [0, 1] \\
        \beta &= \beta_{\max}\, \sigma(\kappa (u - \tau))

    The normalized entropy :math:`\hat H` is that of the kind of policy
    (:meth:`~lore_torchrl.policies.PolicyKind.entropy`). The variance of
    the value, in symlog units, comes from the critic's own two-hot distribution or from a
    :class:`~lore_torchrl.modules.ValueEnsemble`; it and the disagreement are divided by a
    :class:`RunningScale`, of at least 1e-3 and 1e-6. Disagreement as in `Plan2Explore
    <https://arxiv.org/abs/2005.05960>`_; a weight of zero costs no compute.

    With ``hysteresis=(low, high)`` an environment's gate opens when :math:`u` reaches
    ``high`` and shuts when it falls below ``low``; between them it stays as it was. That
    memory travels in the tensordict (see :meth:`primer`); without it, as
    in a loss, a gate counts as open from ``low`` on.

    Keyword Args:
        **settings: As of :class:`~lore_torchrl.configs.GateConfig`, which documents defaults and
            limits. With ``value_source="two_hot"`` the variance is computed from the critic's
            logits ``state_value_logits``, ``[*B, K]``; ``"ensemble"`` takes it from
            ``value_variance``, ``[*B, 1]``.

    Raises:
        ValueError: If a weight is negative, all are zero, or another value is out of range.

    Examples:
        >>> gate = UncertaintyGate(kappa=20.0)
        >>> gate.evaluate(torch.tensor([[1.0], [0.0]])).beta.round(decimals=2).flatten().tolist()
        [1.0, 0.0]
    """

    steps: Tensor

    def __init__(self, **settings: Any):
        super().__init__()
        c = GateConfig(**settings)
        total = c.entropy_weight + c.value_weight + c.disagreement_weight
        self.beta_max, self.kappa, self.tau = c.beta_max, c.kappa, c.tau
        self.entropy_weight = c.entropy_weight / total
        self.value_weight = c.value_weight / total
        self.disagreement_weight = c.disagreement_weight / total
        self.hysteresis = c.hysteresis
        self.warmup_steps, self.dropout = c.warmup_steps, c.dropout
        self.value_source = c.value_source
        two_hot = c.value_source == "two_hot"
        self.value_key = "state_value_logits" if two_hot else "value_variance"
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        if c.value_weight:
            self.value_scale = RunningScale(decay=c.scale_decay)
        if c.disagreement_weight:
            self.disagreement_scale = RunningScale(decay=c.scale_decay, floor=_LEAST_DISAGREEMENT)
        self.out_keys = [keys.UNCERTAINTY, keys.BETA]
        if c.hysteresis is not None:
            self.out_keys.append(("next", keys.GATE))

    def primer(self) -> TensorDictPrimer:
        """Return the transform of the acting environment that carries the hysteresis."""
        return TensorDictPrimer(
            {keys.GATE: Binary(1, dtype=torch.bool)},
            random=False,
            default_value=0,
            expand_specs=True,
        )

    def _variance(self, value_logits: Tensor | None) -> Tensor | None:
        """Return the variance of the value, ``[*B, 1]``, of what the critic or ensemble wrote."""
        if value_logits is None or self.value_source == "ensemble":
            return value_logits
        if value_logits.shape[-1] < 2:
            raise ValueError(
                "value_source='two_hot' needs logits of at least 2 bins, [*B, K], got "
                f"{tuple(value_logits.shape)}: set value_weight=0 for a critic without."
            )
        num_bins = value_logits.shape[-1]
        bins = torch.linspace(*_SYMLOG_RANGE, num_bins, device=value_logits.device)
        return two_hot_variance(value_logits, bins)

    def _weighed(self, name: str, value: Tensor | None, like: Tensor, update: bool) -> Tensor:
        """Bring a part onto a scale from 0 to 1, and weigh it."""
        if value is None or value.shape != like.shape:
            raise ValueError(
                f"{name}_weight > 0 needs one number a state, {tuple(like.shape)}, got "
                f"{None if value is None else tuple(value.shape)}."
            )
        scale = getattr(self, f"{name}_scale")
        if update:
            scale.update(value)
        return getattr(self, f"{name}_weight") * scale(value)

    @torch.no_grad()
    def contributions(
        self,
        entropy: Tensor,
        value_logits: Tensor | None = None,
        disagreement: Tensor | None = None,
        *,
        update: bool = False,
    ) -> dict[str, Tensor]:
        """Return what each part of :meth:`evaluate` adds to the uncertainty, by its name."""
        if entropy.shape[-1] != 1:
            raise ValueError(
                "The gate takes the normalized entropy of the policy, [*B, 1], got "
                f"{tuple(entropy.shape)}."
            )
        parts = {}
        if self.entropy_weight:
            parts["entropy"] = self.entropy_weight * entropy
        if self.value_weight:
            variance = self._variance(value_logits)
            parts["value"] = self._weighed("value", variance, entropy, update)
        if self.disagreement_weight:
            parts["disagreement"] = self._weighed("disagreement", disagreement, entropy, update)
        return parts

    @torch.no_grad()
    def evaluate(
        self,
        entropy: Tensor,
        value_logits: Tensor | None = None,
        disagreement: Tensor | None = None,
        was_active: Tensor | None = None,
        *,
        update: bool = False,
    ) -> GateOutput:
        """Compute the gate on tensors, without dropout.

        Args:
            entropy: Normalized entropy of the policy, 0 to 1, shape ``[*B, 1]``.
            value_logits: Needed where ``value_weight > 0``, shape ``[*B, K]``; with
                ``value_source="ensemble"`` the variance itself, shape ``[*B, 1]``.
            disagreement: Needed where ``disagreement_weight > 0``, shape ``[*B, 1]``.
            was_active: Hysteresis state, boolean ``[*B, 1]``; ``None`` where unknown.
            update: Also update the running scales. Default: ``False``.

        Raises:
            ValueError: If a part is missing or has another shape.
        """
        parts = self.contributions(entropy, value_logits, disagreement, update=update)
        uncertainty = sum(parts.values())
        beta = self.beta_max * torch.sigmoid(self.kappa * (uncertainty - self.tau))
        if self.warmup_steps:
            beta = beta * (self.steps / self.warmup_steps).clamp(max=1.0)
        if self.hysteresis is None:
            active = torch.ones_like(beta, dtype=torch.bool)
        else:
            low, high = self.hysteresis
            active = uncertainty >= low
            if was_active is not None:
                active = active & (was_active | (uncertainty >= high))
            beta = torch.where(active, beta, 0.0)
        return GateOutput(uncertainty, beta, active)

    def carried(self, tensordict: TensorDictBase) -> Tensor | None:
        """Read the hysteresis state, if there is one."""
        return None if self.hysteresis is None else tensordict.get(keys.GATE, None)

    def step(
        self,
        entropy: Tensor,
        value_logits: Tensor | None = None,
        disagreement: Tensor | None = None,
        was_active: Tensor | None = None,
    ) -> GateOutput:
        """Evaluate for acting: in training, with dropout and with updated statistics."""
        output = self.evaluate(
            entropy, value_logits, disagreement, was_active, update=self.training
        )
        if self.training:
            self.steps.add_(1)
            if self.dropout:
                kept = torch.rand_like(output.beta) >= self.dropout
                output = output._replace(beta=output.beta * kept)
        return output

    def write(self, tensordict: TensorDictBase, output: GateOutput) -> None:
        """Write an evaluation, its hysteresis too where there is one."""
        for key, value in zip(self.out_keys, output, strict=False):
            tensordict.set(key, value)
