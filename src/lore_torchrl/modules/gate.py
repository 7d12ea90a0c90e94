"""Deciding how much advice to let through, from how uncertain the agent is."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.data import Binary
from torchrl.envs.transforms import TensorDictPrimer

from lore_torchrl import keys
from lore_torchrl.functional import log_floor, max_entropy, two_hot_variance
from lore_torchrl.functional_gaussian import scale_entropy
from lore_torchrl.modules.running_scale import RunningScale

# The two-hot critic of DreamerV3 spans symexp(-20) to symexp(20) on an even symlog grid.
_SYMLOG_RANGE = (-20.0, 20.0)

# Disagreement is a mean over the entries of the latent, and falls below 1e-3 as they are learnt.
_LEAST_DISAGREEMENT = 1e-6


class GateOutput(NamedTuple):
    """What :meth:`UncertaintyGate.evaluate` returns, each ``[*B, 1]``."""

    uncertainty: Tensor
    beta: Tensor
    active: Tensor


class UncertaintyGate(TensorDictModuleBase):
    r"""Turn the agent's uncertainty into a weight for the advice.

    .. math::
        u &= \frac{w_H \hat H[\pi_{wm}] + w_V \widehat{\mathrm{Var}}[V] + w_D \widehat{D}}
                  {w_H + w_V + w_D} \in [0, 1] \\
        \beta &= \beta_{\max}\, \sigma(\kappa (u - \tau))

    :math:`\hat H = H / \log A` needs no statistics: its maximum is known, and a moving
    scale would hide the very fall in entropy that should shut the gate. The variance of
    the value, in symlog units, comes from the critic's own two-hot distribution or from a
    :class:`~lore_torchrl.modules.ValueEnsemble`; it and the disagreement are divided by a
    :class:`RunningScale`, of at least 1e-3 and 1e-6. Disagreement as in `Plan2Explore
    <https://arxiv.org/abs/2005.05960>`_; a weight of zero costs no compute.

    With ``scale_range`` the policy is Gaussian: its :math:`\hat H` is
    :func:`~lore_torchrl.functional_gaussian.scale_entropy`, its entropy (before the tanh of a
    bounded policy) between that of the least and that of the greatest scale, and the methods
    take its scale ``[*B, A]`` where they say log-probabilities.

    With ``hysteresis=(low, high)`` an environment's gate opens when :math:`u` reaches
    ``high`` and shuts when it falls below ``low``; between them it stays as it was. That
    memory travels in the tensordict (see :meth:`make_tensordict_primer`); without it, as
    in a loss, a gate counts as open from ``low`` on.

    Args:
        num_actions: Number of actions :math:`A`; with ``scale_range``, of their dimensions.

    Keyword Args:
        scale_range: Least and greatest scale of a Gaussian policy; ``None`` for a categorical
            one. Default: ``None``.
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
        value_source: ``"two_hot"`` computes the variance from the critic's logits;
            ``"ensemble"`` takes it as given, from ``value_variance_key``.
            Default: ``"two_hot"``.
        logits_key: Policy logits, or scale, ``[*B, A]``. Default: ``"logits"``.
        value_logits_key: Two-hot value logits, ``[*B, K]``. Default: ``"state_value_logits"``.
        value_variance_key: Variance of the value, ``[*B, 1]``; with
            ``value_source="ensemble"`` it is read in place of the logits, and the attribute
            ``value_logits_key`` names it. Default: ``"value_variance"``.
        disagreement_key: ``[*B, 1]``. Default: ``"disagreement"``.

    Raises:
        ValueError: If a weight is negative, all are zero, or another value is out of range.

    Examples:
        >>> from tensordict import TensorDict
        >>> gate = UncertaintyGate(4, value_weight=0.0, kappa=20.0)
        >>> td = TensorDict(logits=torch.tensor([[0.0] * 4, [50.0, 0, 0, 0]]), batch_size=[2])
        >>> gate(td)["lore_beta"].round(decimals=2).flatten().tolist()
        [1.0, 0.0]
    """

    beta_max: Tensor
    steps: Tensor

    def __init__(
        self,
        num_actions: int,
        *,
        scale_range: tuple[float, float] | None = None,
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
        logits_key: NestedKey = "logits",
        value_logits_key: NestedKey = "state_value_logits",
        value_variance_key: NestedKey = "value_variance",
        disagreement_key: NestedKey = "disagreement",
        uncertainty_key: NestedKey = keys.UNCERTAINTY,
        beta_key: NestedKey = keys.BETA,
        gate_key: str = keys.GATE,
    ):
        super().__init__()
        least = 2 if scale_range is None else 1
        if num_actions < least:
            raise ValueError(f"num_actions must be at least {least}, got {num_actions}.")
        if scale_range is not None and not 0 < scale_range[0] < scale_range[1]:
            raise ValueError(f"scale_range needs 0 < low < high, got {scale_range}.")
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
        if not 0 <= beta_max < math.inf:
            raise ValueError(f"beta_max must be finite and not negative, got {beta_max}.")
        if not 0 < kappa < math.inf:
            raise ValueError(f"kappa must be positive and finite, got {kappa}.")
        if not math.isfinite(tau):
            raise ValueError(f"tau must be finite, got {tau}.")
        if hysteresis is not None and not 0 <= hysteresis[0] <= hysteresis[1] <= 1:
            raise ValueError(f"hysteresis needs 0 <= low <= high <= 1, got {hysteresis}.")
        if not 0 <= warmup_steps < math.inf:
            raise ValueError(f"warmup_steps must be finite and >= 0, got {warmup_steps}.")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout}.")
        if value_source not in ("two_hot", "ensemble"):
            raise ValueError(f"value_source must be 'two_hot' or 'ensemble', got {value_source!r}.")
        if value_source == "ensemble":
            value_logits_key = value_variance_key
        self.num_actions = num_actions
        self.scale_range = scale_range
        # What the entropy is divided by; that of a scale is between 0 and 1 already.
        self.largest_entropy = max_entropy(num_actions) if scale_range is None else 1.0
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
        self.logits_key = logits_key
        self.value_logits_key = value_logits_key
        self.disagreement_key = disagreement_key
        self.gate_key = gate_key
        self.in_keys = [logits_key]
        if value_weight:
            self.in_keys.append(value_logits_key)
        if disagreement_weight:
            self.in_keys.append(disagreement_key)
        self.out_keys = [uncertainty_key, beta_key]
        if hysteresis is not None:
            self.out_keys.append(("next", gate_key))

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Return the transform that carries the hysteresis from step to step.

        Needed only with ``hysteresis``; append it to the environment that acts.
        """
        return TensorDictPrimer(
            {self.gate_key: Binary(1, dtype=torch.bool)},
            random=False,
            default_value=0,
            expand_specs=True,
        )

    def _parts(
        self, log_p: Tensor, value_logits: Tensor | None, disagreement: Tensor | None
    ) -> dict[str, Tensor]:
        parts = {}
        if self.entropy_weight:
            if self.scale_range is None:
                parts["entropy"] = -(log_p.exp() * log_p).sum(-1, keepdim=True)
            else:
                parts["entropy"] = scale_entropy(log_p, *self.scale_range)
        if self.value_weight:
            if value_logits is None:
                raise KeyError(
                    f"value_weight > 0 needs {self.value_logits_key!r}: pass value_model to the "
                    "mixing actor, or set value_weight=0."
                )
            if self.value_source == "ensemble":
                if value_logits.shape[-1] != 1:
                    raise ValueError(
                        "value_source='ensemble' needs the variance of the value, [*B, 1], got "
                        f"{tuple(value_logits.shape)}: pass a ValueEnsemble as value_model."
                    )
                parts["value"] = value_logits
            else:
                if value_logits.shape[-1] < 2:
                    raise ValueError(
                        "value_source='two_hot' needs logits of at least 2 bins, [*B, K], got "
                        f"{tuple(value_logits.shape)}: set value_weight=0 for a critic without."
                    )
                bins = torch.linspace(*_SYMLOG_RANGE, value_logits.shape[-1], device=log_p.device)
                parts["value"] = two_hot_variance(value_logits, bins)
        if self.disagreement_weight:
            if disagreement is None:
                raise KeyError(
                    f"disagreement_weight > 0 needs {self.disagreement_key!r} in the tensordict."
                )
            if disagreement.shape != log_p[..., :1].shape:
                raise ValueError(
                    f"disagreement must be {tuple(log_p[..., :1].shape)}, one number a state, got "
                    f"{tuple(disagreement.shape)}."
                )
            parts["disagreement"] = disagreement
        return parts

    @torch.no_grad()
    def evaluate(
        self,
        log_p: Tensor,
        value_logits: Tensor | None = None,
        disagreement: Tensor | None = None,
        was_active: Tensor | None = None,
        *,
        update: bool = False,
    ) -> GateOutput:
        """Compute the gate on tensors, without dropout.

        Args:
            log_p: Normalised policy log-probabilities, shape ``[*B, A]``.
            value_logits: Needed where ``value_weight > 0``, shape ``[*B, K]``; with
                ``value_source="ensemble"`` the variance itself, shape ``[*B, 1]``.
            disagreement: Needed where ``disagreement_weight > 0``, shape ``[*B, 1]``.
            was_active: Hysteresis state, boolean ``[*B, 1]``; ``None`` where unknown.
            update: Also update the running scales. Default: ``False``.
        """
        parts = self._parts(log_p, value_logits, disagreement)
        uncertainty = 0.0
        for name, part in parts.items():
            if name == "entropy":
                uncertainty = self.entropy_weight / self.largest_entropy * part
                continue
            scale = getattr(self, f"{name}_scale")
            if update:
                scale.update(part)
            uncertainty = uncertainty + getattr(self, f"{name}_weight") * scale(part)
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

    @torch.no_grad()
    def shares(
        self, log_p: Tensor, value_logits: Tensor | None = None, disagreement: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return what each part adds to the uncertainty, by its name, each ``[*B, 1]``.

        Their sum is :attr:`GateOutput.uncertainty`. For showing; no statistic changes.

        Args:
            log_p: As in :meth:`evaluate`.
            value_logits: As in :meth:`evaluate`.
            disagreement: As in :meth:`evaluate`.
        """
        parts = self._parts(log_p, value_logits, disagreement)
        shares = {}
        for name, part in parts.items():
            if name == "entropy":
                scaled = part / self.largest_entropy
            else:
                scaled = getattr(self, f"{name}_scale")(part)
            shares[name] = getattr(self, f"{name}_weight") * scaled
        return shares

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the uncertainty and the weight; in training, update the statistics."""
        policy = tensordict.get(self.logits_key)
        log_p = log_floor(policy.log_softmax(-1)) if self.scale_range is None else policy
        value_logits = tensordict.get(self.value_logits_key, None) if self.value_weight else None
        self.write(tensordict, self.step(log_p, value_logits, *self.carried(tensordict)))
        return tensordict

    def carried(self, tensordict: TensorDictBase) -> tuple[Tensor | None, Tensor | None]:
        """Read what no network of the actor computes: disagreement and hysteresis state."""
        return (
            tensordict.get(self.disagreement_key, None) if self.disagreement_weight else None,
            tensordict.get(self.gate_key, None) if self.hysteresis is not None else None,
        )

    def step(
        self,
        log_p: Tensor,
        value_logits: Tensor | None = None,
        disagreement: Tensor | None = None,
        was_active: Tensor | None = None,
    ) -> GateOutput:
        """Evaluate for acting: in training, with dropout and with updated statistics."""
        output = self.evaluate(log_p, value_logits, disagreement, was_active, update=self.training)
        if self.training:
            self.steps.add_(1)
            if self.dropout:
                kept = torch.rand_like(output.beta) >= self.dropout
                output = output._replace(beta=output.beta * kept)
        return output

    def write(self, tensordict: TensorDictBase, output: GateOutput) -> None:
        """Write an evaluation under the output keys."""
        tensordict.set(self.out_keys[0], output.uncertainty)
        tensordict.set(self.out_keys[1], output.beta)
        if self.hysteresis is not None:
            tensordict.set(self.out_keys[2], output.active)
