"""Deciding how much advice to let through, from how uncertain the agent is."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.data import Binary
from torchrl.envs.transforms import TensorDictPrimer

from lore_torchrl import keys
from lore_torchrl.functional import two_hot_variance
from lore_torchrl.modules.running_scale import RunningScale

# The two-hot critic of DreamerV3 spans symexp(-20) to symexp(20) on an even symlog grid.
_SYMLOG_RANGE = (-20.0, 20.0)

# Disagreement is a mean over the entries of the latent, and falls below 1e-3 as they are learned.
_LEAST_DISAGREEMENT = 1e-6


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

    The normalized entropy :math:`\hat H` is computed by the kind of policy
    (:meth:`~lore_torchrl.policies.PolicyKind.entropy`), by its known maximum: a moving
    scale would hide the very fall in entropy that should shut the gate. The variance of
    the value, in symlog units, comes from the critic's own two-hot distribution or from a
    :class:`~lore_torchrl.modules.ValueEnsemble`; it and the disagreement are divided by a
    :class:`RunningScale`, of at least 1e-3 and 1e-6. Disagreement as in `Plan2Explore
    <https://arxiv.org/abs/2005.05960>`_; a weight of zero costs no compute.

    With ``hysteresis=(low, high)`` an environment's gate opens when :math:`u` reaches
    ``high`` and shuts when it falls below ``low``; between them it stays as it was. That
    memory travels in the tensordict (see :meth:`primer`); without it, as
    in a loss, a gate counts as open from ``low`` on.

    Keyword Args:
        beta_max: Largest weight :math:`\beta_{\max}`; ``0`` switches advice off.
            A buffer: ``fill_`` it to schedule it. Default: ``1.0``.
        kappa: Steepness :math:`\kappa`. Default: ``10.0``.
        tau: Midpoint :math:`\tau` on the scale of :math:`u`. Default: ``0.5``.
        entropy_weight: :math:`w_H`. Default: ``0.7``.
        value_weight: :math:`w_V`. Default: ``0.3``.
        disagreement_weight: :math:`w_D`. Default: ``0.0``.
        hysteresis: ``(low, high)`` on the scale of :math:`u`, or ``None``. Default: ``None``.
        warmup_steps: Calls over which :math:`\beta_{\max}` grows from zero, linearly.
            Default: ``0``.
        dropout: Probability that a row's :math:`\beta` is zeroed, in training only.
            Default: ``0.0``.
        scale_decay: Forgetting of the running scales. Default: ``0.995``.
        value_source: ``"two_hot"`` computes the variance from the critic's logits ``[*B, K]``;
            ``"ensemble"`` takes it as given, ``[*B, 1]``. Default: ``"two_hot"``.
        value_key: Entry in which the critic or the ensemble writes them. Default: ``None``,
            ``"state_value_logits"`` or ``"value_variance"``.

    Raises:
        ValueError: If a weight is negative, all are zero, or another value is out of range.

    Examples:
        >>> gate = UncertaintyGate(value_weight=0.0, kappa=20.0)
        >>> gate.evaluate(torch.tensor([[1.0], [0.0]])).beta.round(decimals=2).flatten().tolist()
        [1.0, 0.0]
    """

    beta_max: Tensor
    steps: Tensor

    def __init__(
        self,
        *,
        beta_max: float = 1.0,
        kappa: float = 10.0,
        tau: float = 0.5,
        entropy_weight: float = 0.7,
        value_weight: float = 0.3,
        disagreement_weight: float = 0.0,
        hysteresis: tuple[float, float] | None = None,
        warmup_steps: int = 0,
        dropout: float = 0.0,
        scale_decay: float = 0.995,
        value_source: Literal["two_hot", "ensemble"] = "two_hot",
        value_key: NestedKey | None = None,
    ):
        super().__init__()
        weights = {
            "entropy_weight": entropy_weight,
            "value_weight": value_weight,
            "disagreement_weight": disagreement_weight,
        }
        for name, weight in weights.items():
            if not 0 <= weight < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {weight}.")
        total = sum(weights.values())
        if not total > 0:
            raise ValueError(f"At least one of {', '.join(weights)} must be positive.")
        if hysteresis is not None and not 0 <= hysteresis[0] <= hysteresis[1] <= 1:
            raise ValueError(f"hysteresis needs 0 <= low <= high <= 1, got {hysteresis}.")
        for name, value, holds in (
            ("beta_max must be finite and not negative", beta_max, 0 <= beta_max < math.inf),
            ("kappa must be positive and finite", kappa, 0 < kappa < math.inf),
            ("tau must be finite", tau, math.isfinite(tau)),
            ("warmup_steps must be finite and >= 0", warmup_steps, 0 <= warmup_steps < math.inf),
            ("dropout must lie in [0, 1)", dropout, 0 <= dropout < 1),
        ):
            if not holds:
                raise ValueError(f"{name}, got {value}.")
        if value_source not in ("two_hot", "ensemble"):
            raise ValueError(f"value_source must be 'two_hot' or 'ensemble', got {value_source!r}.")
        if value_key is None:
            value_key = "state_value_logits" if value_source == "two_hot" else "value_variance"
        self.kappa = kappa
        self.tau = tau
        self.entropy_weight = entropy_weight / total
        self.value_weight = value_weight / total
        self.disagreement_weight = disagreement_weight / total
        self.hysteresis = hysteresis
        self.warmup_steps = warmup_steps
        self.dropout = dropout
        self.value_source = value_source
        self.register_buffer("beta_max", torch.tensor(float(beta_max)))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        if value_weight:
            self.value_scale = RunningScale(decay=scale_decay)
        if disagreement_weight:
            self.disagreement_scale = RunningScale(decay=scale_decay, floor=_LEAST_DISAGREEMENT)
        self.value_key = value_key
        self.out_keys = [keys.UNCERTAINTY, keys.BETA]
        if hysteresis is not None:
            self.out_keys.append(("next", keys.GATE))

    def primer(self) -> TensorDictPrimer:
        """Return the transform that carries the hysteresis from step to step.

        Needed only with ``hysteresis``; append it to the environment that acts.
        """
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
        """Return what each part adds to the uncertainty, by its name, each ``[*B, 1]``.

        Args:
            entropy: As in :meth:`evaluate`.
            value_logits: As in :meth:`evaluate`.
            disagreement: As in :meth:`evaluate`.
            update: As in :meth:`evaluate`.
        """
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
            beta = torch.where(active, beta, torch.zeros_like(beta))
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
        """Write an evaluation under the output keys."""
        # Without hysteresis there is no entry for the last.
        for key, value in zip(self.out_keys, output, strict=False):
            tensordict.set(key, value)
