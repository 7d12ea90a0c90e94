"""How much one-step predictors disagree about what a continuous action leads to."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from lore_torchrl.functional import ensemble_variance
from lore_torchrl.functional_gaussian import squash
from lore_torchrl.modules.disagreement import LatentDisagreement


class GaussianDisagreement(LatentDisagreement):
    r"""The ensemble of :class:`LatentDisagreement`, over continuous actions.

    .. math::
        D(s, h) = \frac{1}{S} \sum_{d=1}^{S} \mathrm{Var}_k\bigl[f_k(s, h, \bar a)_d\bigr],
        \qquad \bar a = \tfrac{h + l}{2} + \tfrac{h - l}{2} \tanh(\mu)

    where :math:`\bar a` is the action that the environment would get for the policy's location
    :math:`\mu`; without bounds it is :math:`\mu` itself. The members see an action as the
    environment does.

    An expectation over the whole policy, as it is taken over named actions, would need a row
    for each of its points; this is one row, and no draw moves the random stream. The gate
    divides it by a running scale, so that only where it is large matters.

    Args:
        state_dim: Size :math:`S` of the flattened stochastic state.
        belief_dim: Size of the belief.
        num_actions: Number of action dimensions :math:`A`, at least 1.

    Keyword Args:
        bounds: Lowest and highest action of a ``TanhNormal`` policy, each a number or one for
            each dimension; ``None`` for an ``IndependentNormal``. Default: ``None``.
        loc_key: Location of the policy, before its tanh, ``[*B, A]``. Default: ``"loc"``.
        **settings: As for :class:`LatentDisagreement`, but for ``logits_key``.

    Raises:
        ValueError: If the bounds are not in order, there are fewer than two members, or a size
            is not positive.

    Examples:
        >>> from tensordict import TensorDict
        >>> ensemble = GaussianDisagreement(4, 2, 1, bounds=(-2.0, 2.0), hidden_dim=8)
        >>> td = TensorDict(
        ...     state=torch.ones(5, 4), belief=torch.ones(5, 2), loc=torch.zeros(5, 1),
        ...     batch_size=[5],
        ... )
        >>> ensemble(td)["disagreement"].shape
        torch.Size([5, 1])
    """

    low: Tensor
    high: Tensor
    _least_actions = 1

    def __init__(
        self,
        state_dim: int,
        belief_dim: int,
        num_actions: int,
        *,
        bounds: tuple[Tensor | float, Tensor | float] | None = None,
        loc_key: NestedKey = "loc",
        **settings: Any,
    ):
        super().__init__(state_dim, belief_dim, num_actions, logits_key=loc_key, **settings)
        self.bounded = bounds is not None
        low, high = bounds if self.bounded else (-math.inf, math.inf)
        for name, bound in (("low", low), ("high", high)):
            bound = torch.as_tensor(bound, dtype=torch.float32)
            self.register_buffer(name, bound.expand(num_actions).clone())
        if not (self.low < self.high).all():
            raise ValueError(
                f"bounds must be in order: got {self.low.tolist()} to {self.high.tolist()}."
            )

    @torch.no_grad()
    def disagreement(
        self, state: Tensor, belief: Tensor, policy: tuple[Tensor, Tensor | None]
    ) -> Tensor:
        """Return the disagreement about the policy's location, without gradient.

        Args:
            state: Shape ``[*B, S]``.
            belief: Shape ``[*B, belief_dim]``.
            policy: Location, before the tanh, and scale, each ``[*B, A]``. The scale is not
                read.

        Returns:
            Disagreement with shape ``[*B, 1]``, float32.
        """
        action = policy[0].float()
        if self.bounded:
            action = squash(action, self.low, self.high)
        # In bfloat16 the rounding of the members would be larger than what sets them apart.
        with torch.autocast(state.device.type, enabled=False):
            out = self.predict(state.float(), belief.float(), action)
            return ensemble_variance(out).mean(-1, keepdim=True)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the disagreement about the policy's next step."""
        state, belief, loc = (tensordict.get(key) for key in self.in_keys)
        return tensordict.set(self.out_keys[0], self.disagreement(state, belief, (loc, None)))
