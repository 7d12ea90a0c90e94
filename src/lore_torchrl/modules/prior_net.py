"""What all advice so far says about a latent state, learnt."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.modules import DreamerV3MLP

from lore_torchrl import keys
from lore_torchrl.functional import categorical_kl, clean_advice, masked_mean


class FilledAdvice(NamedTuple):
    """What :meth:`PriorNet.fill` returns.

    The completed advice, ``[*B, A]``, ``[*B, 1]`` and ``[*B, 1]``; ``learnt`` ``[*B, 1]``,
    true where it comes from the network; and ``sure`` ``[*B, 1]``, the network's confidence
    everywhere.
    """

    prior_logits: Tensor
    confidence: Tensor
    mask: Tensor
    learnt: Tensor
    sure: Tensor


class PriorNet(TensorDictModuleBase):
    r"""Predict the advisor's prior and how far the prediction can be relied on.

    .. math::
        (\ell_\phi, z_\phi) = f_\phi(s, h), \qquad
        \rho_\phi = \mathrm{softmax}(\ell_\phi), \qquad c_\phi = \sigma(z_\phi)

    over stochastic state :math:`s` and belief :math:`h`. :math:`c_\phi` is trained to be
    the advisor's confidence where the most likely action under :math:`\rho_\phi` is the
    advisor's first choice, and 0 where it is not (:meth:`loss`): of an advisor that is sure,
    the probability of its first choice. Policy distillation: https://arxiv.org/abs/1511.06295.

    Args:
        in_features: Size of state and belief together.
        num_actions: Number of actions :math:`A`.

    Keyword Args:
        depth: Hidden layers. Default: ``2``.
        num_cells: Width of each. Default: ``64``.
        norm_eps: Epsilon of the RMS normalisation. Default: ``1e-4``.
        threshold: Least confidence at which :meth:`fill` uses a prediction, in ``[0, 1]``.
            Default: ``0.7``.
        state_key: Default: ``"state"``.
        belief_key: Default: ``"belief"``.
        logits_key: Default: ``"prior_net_logits"``.
        confidence_key: Default: ``"prior_net_confidence"``.

    Raises:
        ValueError: If ``threshold`` is outside ``[0, 1]`` or a size is not positive.

    Examples:
        >>> from tensordict import TensorDict
        >>> net = PriorNet(6, 3, num_cells=8)
        >>> td = TensorDict(state=torch.zeros(2, 4), belief=torch.zeros(2, 2), batch_size=[2])
        >>> net(td)["prior_net_logits"].shape, net(td)["prior_net_confidence"].shape
        (torch.Size([2, 3]), torch.Size([2, 1]))
    """

    def __init__(
        self,
        in_features: int,
        num_actions: int,
        *,
        depth: int = 2,
        num_cells: int = 64,
        norm_eps: float = 1e-4,
        threshold: float = 0.7,
        state_key: NestedKey = "state",
        belief_key: NestedKey = "belief",
        logits_key: NestedKey = keys.PRIOR_NET_LOGITS,
        confidence_key: NestedKey = keys.PRIOR_NET_CONFIDENCE,
    ):
        super().__init__()
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold is a confidence in [0, 1], got {threshold}.")
        for name, size in (
            ("in_features", in_features),
            ("depth", depth),
            ("num_cells", num_cells),
        ):
            if size < 1:
                raise ValueError(f"{name} must be positive, got {size}.")
        if num_actions < 2:
            raise ValueError(f"num_actions must be at least 2, got {num_actions}.")
        self.num_actions = num_actions
        self.threshold = threshold
        # Zero output: no opinion and a confidence of one half before the first advice.
        self.network = DreamerV3MLP(
            in_features, num_actions + 1, depth, num_cells, outscale=0.0, norm_eps=norm_eps
        )
        self.in_keys = [state_key, belief_key]
        self.out_keys = [logits_key, confidence_key]

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
    def fill(
        self,
        own: tuple[Tensor, Tensor],
        prior_logits: Tensor,
        confidence: Tensor,
        mask: Tensor,
    ) -> FilledAdvice:
        """Put the network's advice where the advisor gave none and it is sure enough.

        Args:
            own: What :meth:`advise` returned for these states.
            prior_logits: The advisor's logits, ``[*B, A]``.
            confidence: Their confidence, ``[*B, 1]``.
            mask: Where the advisor gave advice, boolean ``[*B, 1]``.
        """
        logits, sure = own
        # A broken network costs its advice.
        sound = logits.isfinite().all(-1, keepdim=True)
        learnt = ~mask & (sure >= self.threshold) & sound
        return FilledAdvice(
            torch.where(learnt, logits, prior_logits),
            torch.where(learnt, sure, confidence),
            mask | learnt,
            learnt,
            sure,
        )

    @torch.no_grad()
    def stand_in(self, state: Tensor, belief: Tensor) -> tuple[Tensor, Tensor]:
        """Return the network's advice for states that have no other, as in imagination.

        Returns:
            Prior logits ``[*B, A]``, and the confidence ``[*B, 1]``, zero where it is below the
            threshold or not a number.
        """
        logits, sure = self.advise(state, belief)
        # A broken network costs its advice.
        sound = logits.isfinite().all(-1, keepdim=True)
        return logits, torch.where(sound & (sure >= self.threshold), sure, 0.0)

    def loss(
        self, own: tuple[Tensor, Tensor], prior_logits: Tensor, confidence: Tensor, mask: Tensor
    ) -> dict[str, Tensor]:
        r"""Learn the advisor's answers, bought or cached.

        With confidence :math:`c`, prior :math:`\rho = \mathrm{softmax}(\ell_{llm})` and
        :math:`y = [\arg\max \rho_\phi = \arg\max \rho]`,

        .. math::
            \mathtt{loss\_prior\_net} = \langle c\, \mathrm{KL}(\rho \,\|\, \rho_\phi)
                + \mathrm{BCE}(c_\phi, c\,y) \rangle

        over the states with an answer. The network's own advice is never a target.

        Args:
            own: What :meth:`predict` returned for detached states ``[*B]``.
            prior_logits: The advisor's logits for them, shape ``[*B, A]``.
            confidence: Their confidence, shape ``[*B, 1]``.
            mask: Where there is advice, boolean, shape ``[*B, 1]``.

        Returns:
            ``loss_prior_net`` and detached ``prior_net_agreement`` (share of advised states
            whose first choices agree) and ``prior_net_confidence`` (its mean there).

        Raises:
            ValueError: If the advice names another number of actions than the network.
        """
        logits, raw = own
        if logits.shape != prior_logits.shape:
            raise ValueError(
                f"The advice is {tuple(prior_logits.shape)} and PriorNet's {tuple(logits.shape)}: "
                f"build it with num_actions={prior_logits.shape[-1]}, the number of named actions."
            )
        target, weight, valid = clean_advice(prior_logits, confidence, mask)
        kl = categorical_kl(torch.log_softmax(target, -1), torch.log_softmax(logits, -1))
        agrees = (logits.argmax(-1, keepdim=True) == target.argmax(-1, keepdim=True)).float()
        doubt = nn.functional.binary_cross_entropy_with_logits(
            raw, agrees * weight, reduction="none"
        )
        return {
            "loss_prior_net": masked_mean(weight * kl.unsqueeze(-1) + doubt, valid),
            "prior_net_agreement": masked_mean(agrees, valid),
            "prior_net_confidence": masked_mean(raw.detach().sigmoid(), valid),
        }

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write prior logits and raw confidence."""
        logits, confidence = self.advise(*(tensordict.get(key) for key in self.in_keys))
        tensordict.set(self.out_keys[0], logits)
        return tensordict.set(self.out_keys[1], confidence)
