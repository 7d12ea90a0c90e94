"""Learning what the adviser says, from all advice in replay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.objectives.common import LossModule

from lore_torchrl import keys
from lore_torchrl.functional import categorical_kl, clean_advice, masked_mean
from lore_torchrl.modules.prior_net import PriorNet


class PriorNetLoss(LossModule):
    r"""Distil the adviser's advice into a :class:`~lore_torchrl.modules.PriorNet`.

    On the states that carry an answer of the adviser, bought or cached, with confidence
    :math:`c`, prior :math:`\rho = \mathrm{softmax}(\ell_{llm})` and
    :math:`y = [\arg\max \rho_\phi = \arg\max \rho]`,

    .. math::
        \mathtt{loss\_prior\_net} = \langle c\, \mathrm{KL}(\rho \,\|\, \rho_\phi)
            + \mathrm{BCE}(c_\phi, c\,y) \rangle

    The network's own advice is never among the targets: the loss reads only what the
    adviser wrote. State and belief are detached, so the world model learns nothing from
    it. Policy distillation: https://arxiv.org/abs/1511.06295.

    Args:
        prior_net: The network.

    The input needs ``state``, ``belief`` and, aligned with them, ``llm_prior_logits``
    ``[*B, A]``, ``llm_confidence`` ``[*B, 1]`` and ``llm_mask`` ``[*B, 1]``. Returns
    ``loss_prior_net`` and detached ``prior_net_agreement`` (share of advised states where
    the first choices agree) and ``prior_net_confidence`` (mean raw confidence there).

    Raises:
        TypeError: If ``prior_net`` is no :class:`~lore_torchrl.modules.PriorNet`.
        KeyError: In a call, if an entry is missing.
        ValueError: In a call, if the advice names another number of actions than the network.

    Examples:
        >>> loss = PriorNetLoss(PriorNet(6, 3, num_cells=8))
        >>> td = TensorDict(
        ...     state=torch.zeros(2, 4), belief=torch.zeros(2, 2),
        ...     llm_prior_logits=torch.tensor([[0.0, 3, 0], [0, 0, 0]]),
        ...     llm_confidence=torch.ones(2, 1), llm_mask=torch.tensor([[True], [False]]),
        ...     batch_size=[2],
        ... )
        >>> sorted(loss(td).keys())
        ['loss_prior_net', 'prior_net_agreement', 'prior_net_confidence']
    """

    @dataclass
    class _AcceptedKeys:
        """Configurable tensordict keys.

        Attributes:
            prior_logits (NestedKey): Raw advice. Default: ``"llm_prior_logits"``.
            confidence (NestedKey): Its confidence. Default: ``"llm_confidence"``.
            mask (NestedKey): Where there is advice. Default: ``"llm_mask"``.
        """

        prior_logits: NestedKey = keys.PRIOR_LOGITS
        confidence: NestedKey = keys.CONFIDENCE
        mask: NestedKey = keys.MASK

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys

    def __init__(self, prior_net: PriorNet):
        super().__init__()
        if not isinstance(prior_net, PriorNet):
            raise TypeError(f"prior_net must be a PriorNet, got {type(prior_net).__name__}.")
        self.prior_net = prior_net
        self.out_keys = ["loss_prior_net", "prior_net_agreement", "prior_net_confidence"]

    @property
    def in_keys(self) -> list[NestedKey]:
        """What the network reads, and the advice."""
        tk = self.tensor_keys
        return [*self.prior_net.in_keys, tk.prior_logits, tk.confidence, tk.mask]

    def _forward_value_estimator_keys(self, **kwargs) -> None:
        return None

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return the loss and its metrics; zero where no state carries advice."""
        state, belief, *advice = (tensordict[key] for key in self.in_keys)
        return self.terms(self.prior_net.predict(state.detach(), belief.detach()), *advice)

    def terms(
        self,
        own: tuple[Tensor, Tensor],
        prior_logits: Tensor,
        confidence: Tensor,
        mask: Tensor,
    ) -> TensorDict:
        """Compute the loss and its metrics on tensors.

        Args:
            own: What :meth:`PriorNet.predict` returned for detached states ``[*B]``.
            prior_logits: The adviser's logits for them, shape ``[*B, A]``.
            confidence: Their confidence, shape ``[*B, 1]``.
            mask: Where there is advice, boolean, shape ``[*B, 1]``.
        """
        if own[0].shape != prior_logits.shape:
            raise ValueError(
                f"The advice is {tuple(prior_logits.shape)} and PriorNet's {tuple(own[0].shape)}: "
                f"build it with num_actions={prior_logits.shape[-1]}, the number of named actions."
            )
        logits, weight, valid = clean_advice(prior_logits, confidence, mask)
        own, raw = own
        kl = categorical_kl(torch.log_softmax(logits, -1), torch.log_softmax(own, -1))
        agrees = (own.argmax(-1, keepdim=True) == logits.argmax(-1, keepdim=True)).float()
        doubt = torch.nn.functional.binary_cross_entropy_with_logits(
            raw, agrees * weight, reduction="none"
        )
        valid = valid.squeeze(-1)

        def mean(value: Tensor) -> Tensor:
            return masked_mean(value, valid)

        return TensorDict(
            {
                "loss_prior_net": mean(weight.squeeze(-1) * kl + doubt.squeeze(-1)),
                "prior_net_agreement": mean(agrees.squeeze(-1)),
                "prior_net_confidence": mean(raw.detach().sigmoid().squeeze(-1)),
            },
            [],
        )
