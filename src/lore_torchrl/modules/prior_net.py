"""What all advice so far says about a latent state, learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchrl.modules import DreamerV3MLP

from lore_torchrl import keys
from lore_torchrl.configs.lore import PriorNetConfig
from lore_torchrl.functional import categorical_kl, masked_mean
from lore_torchrl.modules.advice import AdviceBatch


class PriorNet(nn.Module):
    r"""Predict the advisor's prior and how far the prediction can be relied on.

    .. math::
        (\ell_\phi, z_\phi) = f_\phi(s, h), \qquad
        \rho_\phi = \mathrm{softmax}(\ell_\phi), \qquad c_\phi = \sigma(z_\phi)

    over stochastic state :math:`s` and belief :math:`h`. :math:`c_\phi` is trained to be
    the advisor's confidence where the most likely action under :math:`\rho_\phi` is the
    advisor's first choice, and 0 where it is not (:meth:`loss`). Policy distillation: https://arxiv.org/abs/1511.06295.

    Args:
        in_features: Size of state and belief together.
        num_actions: Number of actions :math:`A`.

    Keyword Args:
        **settings: As of :class:`~lore_torchrl.configs.PriorNetConfig`, which documents defaults
            and limits.

    Raises:
        ValueError: If there are fewer than two actions, or a setting is out of range.

    Examples:
        >>> net = PriorNet(6, 3, num_cells=8)
        >>> logits, confidence = net.advise(torch.zeros(2, 4), torch.zeros(2, 2))
        >>> logits.shape, confidence.flatten().tolist()
        (torch.Size([2, 3]), [0.5, 0.5])
    """

    def __init__(self, in_features: int, num_actions: int, **settings: Any):
        super().__init__()
        c = PriorNetConfig(**settings)
        if num_actions < 2:
            raise ValueError(f"num_actions must be at least 2, got {num_actions}.")
        self.num_actions, self.threshold = num_actions, c.threshold
        # Zero output: no opinion and a confidence of one half before the first advice.
        self.network = DreamerV3MLP(
            in_features, num_actions + 1, c.depth, c.num_cells, outscale=0.0, norm_eps=1e-4
        )
        self.in_keys = ["state", "belief"]
        self.out_keys = [keys.PRIOR_NET_LOGITS, keys.PRIOR_NET_CONFIDENCE]

    def predict(self, state: Tensor, belief: Tensor) -> tuple[Tensor, Tensor]:
        """Return prior logits ``[*B, A]`` and the logit of the raw confidence ``[*B, 1]``."""
        output = self.network(state, belief).float()
        return output[..., :-1], output[..., -1:]

    @torch.no_grad()
    def advise(self, state: Tensor, belief: Tensor) -> tuple[Tensor, Tensor]:
        """Return prior logits ``[*B, A]`` and raw confidence ``[*B, 1]``, without gradient."""
        logits, raw = self.predict(state, belief)
        return logits, raw.sigmoid()

    @torch.no_grad()
    def usable(self, own: tuple[Tensor, Tensor]) -> AdviceBatch:
        """Return what :meth:`advise` said where it is sure enough; NaN is no advice."""
        return AdviceBatch.clean(*own, own[1] >= self.threshold)

    def fallback(self, state: Tensor, belief: Tensor) -> AdviceBatch:
        """Return :meth:`usable` advice for states that have no other, as in imagination."""
        return self.usable(self.advise(state, belief))

    def loss(self, own: tuple[Tensor, Tensor], advice: AdviceBatch) -> dict[str, Tensor]:
        r"""Learn the advisor's answers, bought or cached.

        With confidence :math:`c`, prior :math:`\rho = \mathrm{softmax}(\ell_{llm})` and
        :math:`y = [\arg\max \rho_\phi = \arg\max \rho]`,

        .. math::
            \mathtt{loss\_prior\_net} = \langle c\, \mathrm{KL}(\rho \,\|\, \rho_\phi)
                + \mathrm{BCE}(c_\phi, c\,y) \rangle

        over the states with an answer. The network's own advice is never a target.

        Args:
            own: What :meth:`predict` returned for detached states ``[*B]``.
            advice: The advisor's advice for them, not completed.

        Returns:
            ``loss_prior_net`` and detached ``prior_net_agreement`` (fraction of advised states
            whose first choices agree) and ``prior_net_confidence`` (its mean there).

        Raises:
            ValueError: If the advice names another number of actions than the network.
        """
        logits, raw = own
        advice.check_same(logits)
        target = advice.prior_logits
        kl = categorical_kl(torch.log_softmax(target, -1), torch.log_softmax(logits, -1))
        agrees = (logits.argmax(-1, keepdim=True) == target.argmax(-1, keepdim=True)).float()
        doubt = nn.functional.binary_cross_entropy_with_logits(
            raw, agrees * advice.weight, reduction="none"
        )
        return {
            "loss_prior_net": masked_mean(advice.weight * kl.unsqueeze(-1) + doubt, advice.valid),
            "prior_net_agreement": masked_mean(agrees, advice.valid),
            "prior_net_confidence": masked_mean(raw.detach().sigmoid(), advice.valid),
        }
