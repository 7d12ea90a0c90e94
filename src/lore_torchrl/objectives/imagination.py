"""What learnt advice is worth along imagined trajectories."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn

from lore_torchrl import keys
from lore_torchrl.functional import clean_advice, masked_mean
from lore_torchrl.modules.mixing import LogitMixer
from lore_torchrl.modules.prior_net import PriorNet


def imagined_bonus(
    imagined: TensorDictBase,
    actor: ProbabilisticTensorDictSequential,
    prior_net: PriorNet,
    *,
    mixer: LogitMixer | None = None,
    bandit: nn.Module | None = None,
    calibrator: nn.Module | None = None,
) -> Tensor:
    r"""Return the expected log-prior of the policy's actions over imagined states.

    .. math::
        \mathrm{trust} \cdot \langle w\, \mathbb{E}_{a\sim\pi_{wm}}[\log\rho_\phi(a)] \rangle

    over the states at which PriorNet is sure enough, with :math:`w = c_\phi` times the
    calibrator's trust. The gradient reaches the actor alone.

    Args:
        imagined: Imagined trajectories with the actor's inputs, any batch shape.
        actor: Stock categorical actor.
        prior_net: The only adviser that imagined states have.

    Keyword Args:
        mixer: Its temperature tempers the advice. Default: ``None``, one.
        bandit: Its ``trust()`` scales the result. Default: ``None``, one.
        calibrator: Its ``trust(confidence, group)``, group 1, scales the weight of a state.
            Default: ``None``, one.
    """
    features = imagined.select(*actor.in_keys).detach()
    log_p = torch.log_softmax(actor.get_dist(features).logits.float(), -1)
    advice = prior_net.stand_in(*(features.get(key) for key in prior_net.in_keys))
    prior_logits, weight, valid = clean_advice(*advice[:3])
    if calibrator is not None:
        group = torch.full_like(advice.learnt, keys.PRIOR_NET_GROUP, dtype=torch.long)
        weight = weight * calibrator.trust(advice.confidence, group)
    tempered = prior_logits if mixer is None else mixer.temper(prior_logits)
    expected = (log_p.exp() * torch.log_softmax(tempered, -1)).sum(-1)
    bonus = masked_mean(weight.squeeze(-1) * expected, valid.squeeze(-1))
    return bonus if bandit is None else bandit.trust() * bonus
