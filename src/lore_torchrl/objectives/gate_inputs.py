"""What the gate looks at in a loss."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from lore_torchrl.modules.disagreement import LatentDisagreement
from lore_torchrl.modules.gate import UncertaintyGate
from lore_torchrl.modules.gaussian_mixing import Gaussian, GaussianMixer
from lore_torchrl.modules.mixing import LogitMixer


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
