"""How much an ensemble of small critics disagrees about the value of a state."""

from __future__ import annotations

import math

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.objectives import symlog

from lore_torchrl.functional import ensemble_variance, masked_mean
from lore_torchrl.modules.batched_mlp import BatchedMLP


class ValueEnsemble(TensorDictModuleBase):
    r"""Predict the value :math:`K` times, each with a fixed random prior function.

    .. math::
        v_k(s, h) = f_k(s, h) + \beta\, p_k(s, h), \qquad
        \mathrm{Var}[V] = \mathrm{Var}_k\bigl[v_k(s, h)\bigr]

    in symlog units. Only :math:`f_k` learns (:meth:`loss`); :math:`p_k` is a random network
    that never changes, so members that fit the same data still differ where there is none.
    The variance is the population variance, divided by :math:`K`. An alternative to the
    variance of a two-hot critic, which also counts the randomness of the returns.

    Randomized prior functions: https://arxiv.org/abs/1806.03335.

    Args:
        state_dim: Size of the flattened stochastic state.
        belief_dim: Size of the belief.

    Keyword Args:
        num_members: :math:`K`, at least 2. Default: ``5``.
        hidden_dim: Width of the hidden layers. Default: ``64``.
        depth: Number of hidden layers, at least 1. Default: ``2``.
        prior_scale: :math:`\beta`, in symlog units of value; ``0`` builds no prior
            functions. Default: ``1.0``.

    Raises:
        ValueError: If there are fewer than two members, a size is not positive, or
            ``prior_scale`` is negative or not finite.

    Examples:
        >>> from tensordict import TensorDict
        >>> ensemble = ValueEnsemble(4, 2, hidden_dim=8)
        >>> td = TensorDict(state=torch.ones(5, 4), belief=torch.ones(5, 2), batch_size=[5])
        >>> ensemble(td)["value_variance"].shape
        torch.Size([5, 1])
    """

    def __init__(
        self,
        state_dim: int,
        belief_dim: int,
        *,
        num_members: int = 5,
        hidden_dim: int = 64,
        depth: int = 2,
        prior_scale: float = 1.0,
    ):
        super().__init__()
        for name, size in (("state_dim", state_dim), ("belief_dim", belief_dim)):
            if size < 1:
                raise ValueError(f"{name} must be positive, got {size}.")
        if not (prior_scale >= 0 and math.isfinite(prior_scale)):
            raise ValueError(f"prior_scale must be finite and not negative, got {prior_scale}.")
        self.prior_scale = prior_scale
        sizes = (num_members, state_dim + belief_dim, 1)
        shape = {"hidden_dim": hidden_dim, "depth": depth}
        self.network = BatchedMLP(*sizes, **shape)
        self.prior = BatchedMLP(*sizes, **shape, trainable=False) if prior_scale else None
        self.in_keys, self.out_keys = ["state", "belief"], ["value_variance"]

    def predict(self, state: Tensor, belief: Tensor) -> Tensor:
        """Return the members' values in symlog units.

        Args:
            state: Shape ``[*B, state_dim]``.
            belief: Shape ``[*B, belief_dim]``.

        Returns:
            Values with shape ``[K, *B, 1]``, float32.
        """
        # In bfloat16 the rounding of the members would be larger than what sets them apart.
        with torch.autocast(state.device.type, enabled=False):
            features = torch.cat((state, belief), -1).float()
            value = self.network(features)
            return value if self.prior is None else value + self.prior_scale * self.prior(features)

    @torch.no_grad()
    def variance(self, state: Tensor, belief: Tensor) -> Tensor:
        """Return the variance across the members, ``[*B, 1]``, float32, without gradient."""
        return ensemble_variance(self.predict(state, belief))

    def loss(self, state: Tensor, belief: Tensor, returns: Tensor) -> dict[str, Tensor]:
        r"""Regress all members on returns.

        .. math::
            \mathtt{loss\_value\_ensemble} = \Bigl\langle \frac{1}{K} \sum_k
                \bigl(v_k(\mathrm{sg}(s, h)) - \mathrm{symlog}(\mathrm{sg}(G))\bigr)^2
                \Bigr\rangle

        Args:
            state: Shape ``[*B, state_dim]``.
            belief: Shape ``[*B, belief_dim]``.
            returns: :math:`G` in units of reward, ``[*B, 1]``; what is not finite does not count.

        Returns:
            ``loss_value_ensemble`` and the detached ``value_variance``.

        Raises:
            ValueError: If ``returns`` is not one number a state.
        """
        if returns.shape != (*state.shape[:-1], 1):
            raise ValueError(
                f"returns must be {(*state.shape[:-1], 1)}, one number a state: got "
                f"{tuple(returns.shape)}."
            )
        counted = returns.isfinite()
        # A number that does not count must not reach the gradient either, were it infinite.
        target = symlog(returns.detach().float()).masked_fill(~counted, 0.0)
        predicted = self.predict(state.detach(), belief.detach())
        return {
            "loss_value_ensemble": masked_mean((predicted - target).square().mean(0), counted),
            "value_variance": masked_mean(ensemble_variance(predicted.detach()), counted),
        }

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the variance of the value."""
        state, belief = (tensordict.get(key) for key in self.in_keys)
        return tensordict.set(self.out_keys[0], self.variance(state, belief))
