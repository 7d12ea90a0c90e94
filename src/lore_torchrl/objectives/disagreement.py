"""Training the ensemble whose disagreement the gate reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.objectives.common import LossModule

from lore_torchrl.functional import ensemble_variance, masked_mean
from lore_torchrl.modules.disagreement import LatentDisagreement


class LatentDisagreementLoss(LossModule):
    r"""Fit every member of a :class:`~lore_torchrl.modules.LatentDisagreement`.

    The members are Gaussians of unit variance, as in `Plan2Explore
    <https://arxiv.org/abs/2005.05960>`_, without the constant:

    .. math::
        \mathtt{loss\_disagreement} = \Bigl\langle \frac{1}{2K} \sum_k
            \bigl\| \mathrm{sg}(s_{t+1}) - f_k(\mathrm{sg}(s_t, h_t), a_{t+1}) \bigr\|^2
            \Bigr\rangle

    over replayed sequences. Record :math:`t` holds the action taken and, under
    ``"next"``, what it led to; the posterior :math:`(s_t, h_t)` has already seen that. The
    action taken *at* it is therefore the one of record :math:`t+1`. Where ``is_init`` of
    record :math:`t+1` is set, that record begins another episode and the pair is left out.

    Args:
        ensemble: The predictors. Only their parameters get a gradient.

    The input, with batch shape ``[N, T]``, needs ``state`` ``[N, T, S]`` and ``belief``
    ``[N, T, D]`` of the posterior, ``action`` ``[N, T, A]``, one-hot or continuous, and
    ``is_init`` ``[N, T, 1]``. Returns ``loss_disagreement`` and the detached ``disagreement``: the
    variance across the members at the actions taken, averaged over latent dimensions and
    pairs. Both are zero where no pair counts.

    Raises:
        TypeError: If ``ensemble`` is no :class:`~lore_torchrl.modules.LatentDisagreement`.
        ValueError: In a call, if an entry has another shape.

    Examples:
        >>> loss = LatentDisagreementLoss(LatentDisagreement(4, 2, 3, hidden_dim=8))
        >>> td = TensorDict(
        ...     state=torch.zeros(2, 5, 4), belief=torch.zeros(2, 5, 2),
        ...     action=torch.zeros(2, 5, 3), is_init=torch.zeros(2, 5, 1).bool(),
        ...     batch_size=[2, 5],
        ... )
        >>> sorted(loss(td).keys())
        ['disagreement', 'loss_disagreement']
    """

    @dataclass
    class _AcceptedKeys:
        """Configurable tensordict keys.

        Attributes:
            state (NestedKey): Posterior stochastic state. Default: ``"state"``.
            belief (NestedKey): Its deterministic state. Default: ``"belief"``.
            action (NestedKey): Action of the record. Default: ``"action"``.
            is_init (NestedKey): Where a record begins an episode. Default: ``"is_init"``.
        """

        state: NestedKey = "state"
        belief: NestedKey = "belief"
        action: NestedKey = "action"
        is_init: NestedKey = "is_init"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys

    def __init__(self, ensemble: LatentDisagreement):
        super().__init__()
        if not isinstance(ensemble, LatentDisagreement):
            raise TypeError(
                f"ensemble must be a LatentDisagreement, got {type(ensemble).__name__}."
            )
        self.ensemble = ensemble
        self.out_keys = ["loss_disagreement", "disagreement"]

    @property
    def in_keys(self) -> list[NestedKey]:
        """State, belief, action and the mark of an episode's first record."""
        tk = self.tensor_keys
        return [tk.state, tk.belief, tk.action, tk.is_init]

    def _forward_value_estimator_keys(self, **kwargs) -> None:
        return None

    def terms(self, state: Tensor, belief: Tensor, action: Tensor, is_init: Tensor) -> TensorDict:
        """Compute the loss and its metric on tensors.

        Args:
            state: Posterior stochastic states, shape ``[N, T, S]``.
            belief: Their beliefs, shape ``[N, T, D]``.
            action: Actions of the records, shape ``[N, T, A]``.
            is_init: Where a record begins an episode, boolean, shape ``[N, T, 1]``.
        """
        ensemble = self.ensemble
        shape = tuple(state.shape[:-1])
        for name, value, size in (
            ("state", state, ensemble.state_dim),
            ("belief", belief, ensemble.belief_dim),
            ("action", action, ensemble.num_actions),
            ("is_init", is_init, 1),
        ):
            if len(shape) != 2 or tuple(value.shape) != (*shape, size):
                raise ValueError(
                    f"{name} must be [batch, time, {size}] like the other entries, got "
                    f"{tuple(value.shape)} beside a state of {tuple(state.shape)}."
                )
        state, belief = state.detach(), belief.detach()
        taken = action[:, 1:].detach().to(state.dtype)
        target = state[:, 1:].float()
        counted = ~is_init[:, 1:, 0].to(torch.bool)
        predicted = ensemble.predict(state[:, :-1], belief[:, :-1], taken).float()
        error = (predicted - target).square().sum(-1).mean(0) / 2
        spread = ensemble_variance(predicted.detach()).mean(-1)
        return TensorDict(
            {
                "loss_disagreement": masked_mean(error, counted),
                "disagreement": masked_mean(spread, counted),
            },
            [],
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return the loss and its metric."""
        return self.terms(*(tensordict[key] for key in self.in_keys))
