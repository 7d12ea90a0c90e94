"""What the gate looks at in a loss, and what a loss needs beside it."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from lore_torchrl.modules.disagreement import LatentDisagreement
from lore_torchrl.modules.gate import UncertaintyGate
from lore_torchrl.modules.gaussian_mixing import Gaussian, GaussianMixer
from lore_torchrl.modules.mixing import LogitMixer
from lore_torchrl.modules.prior_net import PriorNet
from lore_torchrl.modules.value_ensemble import ValueEnsemble


@torch.no_grad()
def gate_inputs(
    gate: UncertaintyGate,
    mixer: LogitMixer | GaussianMixer,
    policy: Tensor | Gaussian,
    tensordict: TensorDictBase,
    *,
    critic: TensorDictModuleBase,
    disagreement: LatentDisagreement | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return what a gate weighs: the policy's spread, the critic's, the disagreement.

    Args:
        gate: Tells which of them it wants.
        mixer: Knows the kind of policy.
        policy: As the mixer knows it, without gradient.
        tensordict: Latent states, and whichever entries are known already.

    Keyword Args:
        critic: Writes the gate's value logits where they are not.
        disagreement: Ensemble; without one the entry is read. Default: ``None``.
    """
    value_logits = spread = None
    if gate.value_weight:
        if tensordict.get(gate.value_logits_key, None) is None:
            tensordict = critic(tensordict.select(*critic.in_keys))
        value_logits = tensordict.get(gate.value_logits_key)
    if gate.disagreement_weight and disagreement is not None:
        latent = (tensordict.get(key) for key in disagreement.in_keys[:2])
        spread = disagreement.disagreement(*latent, policy)
    elif gate.disagreement_weight:
        spread = tensordict.get(gate.disagreement_key, None)
    return mixer.gate_input(policy), value_logits, spread


def check_not_negative(**values: float) -> None:
    """Raise a ``ValueError`` that names the first of the values that is below 0, or no number."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}.")


def check_parts(
    gate: UncertaintyGate | None,
    mixer: LogitMixer | GaussianMixer | None,
    prior_net: PriorNet | None,
    value_ensemble: ValueEnsemble | None,
    *,
    constrained: bool,
    distilled: bool,
    gated: bool,
    imagined: bool,
) -> None:
    """Raise a ``ValueError`` where a part is missing that a term of an actor loss needs."""
    if constrained and (gate is None or mixer is None):
        raise ValueError(
            "The constraint compares the policy with the mixture that acts: pass the "
            "policy's gate and mixer, or set multiplier_lr=0."
        )
    looked_at = constrained or distilled or gated
    if gated and gate is None:
        raise ValueError("gated=True needs the policy's gate.")
    weighs_value = looked_at and gate is not None and gate.value_weight > 0
    if weighs_value and (gate.value_source == "ensemble") == (value_ensemble is None):
        raise ValueError(
            f"The gate has value_source={gate.value_source!r}: pass the policy's ensemble as "
            "value_ensemble with 'ensemble', and None with 'two_hot'."
        )
    if distilled and (gate is None or mixer is None):
        raise ValueError("distillation_weight needs the policy's gate and mixer.")
    if imagined and prior_net is None:
        raise ValueError("beta_imagine_max needs prior_net.")
