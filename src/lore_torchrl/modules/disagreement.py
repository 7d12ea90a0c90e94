"""How much an ensemble of one-step predictors disagrees about what comes next."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lore_torchrl.functional import ensemble_variance, masked_mean
from lore_torchrl.modules.batched_mlp import BatchedMLP


class LatentDisagreement(nn.Module):
    r"""Predict the next stochastic latent :math:`K` times and measure the spread.

    .. math::
        D(s, h, a) = \frac{1}{S} \sum_{d=1}^{S} \mathrm{Var}_k\bigl[f_k(s, h, a)_d\bigr]

    over stochastic state :math:`s`, belief :math:`h` and the members :math:`f_k`, which
    start independently and learn the same data (:meth:`loss`). Where there was data they
    come to agree; elsewhere they do not. :math:`\mathrm{Var}_k` is the population variance,
    divided by :math:`K`. Plan2Explore: https://arxiv.org/abs/2005.05960.

    Args:
        state_dim: Size :math:`S` of the flattened stochastic state.
        belief_dim: Size of the belief.
        num_actions: Number of actions :math:`A`, or of their dimensions.

    Keyword Args:
        num_members: :math:`K`, at least 2. Default: ``5``.
        hidden_dim: Width of the hidden layers. Default: ``64``.
        depth: Number of hidden layers, at least 1. Default: ``2``.

    Raises:
        ValueError: If there are fewer than two members, or a size is not positive.

    Examples:
        >>> ensemble = LatentDisagreement(4, 2, 3, hidden_dim=8)
        >>> uniform = torch.zeros(5, 3).log_softmax(-1)
        >>> ensemble.expected(torch.ones(5, 4), torch.ones(5, 2), uniform).shape
        torch.Size([5, 1])
    """

    def __init__(
        self,
        state_dim: int,
        belief_dim: int,
        num_actions: int,
        *,
        num_members: int = 5,
        hidden_dim: int = 64,
        depth: int = 2,
    ):
        super().__init__()
        sizes = {"state_dim": state_dim, "belief_dim": belief_dim, "num_actions": num_actions}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be positive, got {size}.")
        self.state_dim = state_dim
        self.belief_dim = belief_dim
        self.num_actions = num_actions
        self.network = BatchedMLP(
            num_members,
            state_dim + belief_dim + num_actions,
            state_dim,
            hidden_dim=hidden_dim,
            depth=depth,
        )
        self.in_keys = ["state", "belief"]

    def predict(self, state: Tensor, belief: Tensor, action: Tensor) -> Tensor:
        """Return the members' predictions of the next stochastic state.

        Args:
            state: Shape ``[*B, S]``.
            belief: Shape ``[*B, belief_dim]``.
            action: One-hot or continuous, floating point, shape ``[*B, A]``.

        Returns:
            Predictions with shape ``[K, *B, S]``.
        """
        return self.network(torch.cat((state, belief, action), -1).float())

    @torch.no_grad()
    def at(self, state: Tensor, belief: Tensor, action: Tensor) -> Tensor:
        """Return the disagreement :math:`D(s, h, a)`, without gradient.

        Args:
            state: Shape ``[*B, S]``.
            belief: Shape ``[*B, belief_dim]``.
            action: As the environment gets it, floating point, shape ``[*B, A]``.

        Returns:
            Disagreement with shape ``[*B, 1]``, float32.
        """
        # In bfloat16 the rounding of the members would be larger than what sets them apart.
        with torch.autocast(state.device.type, enabled=False):
            out = self.predict(state.float(), belief.float(), action)
            return ensemble_variance(out).mean(-1, keepdim=True)

    @torch.no_grad()
    def expected(self, state: Tensor, belief: Tensor, log_p: Tensor) -> Tensor:
        r"""Return :math:`\sum_a \pi(a)\, D(s, h, a)` over all one-hot actions, without gradient.

        They are evaluated in one batch. The part that a one-hot action has in the first layer is a
        row of the weight: the product with state and belief is done once, whatever their number.

        Args:
            state: Shape ``[*B, S]``.
            belief: Shape ``[*B, belief_dim]``.
            log_p: Normalized policy log-probabilities, shape ``[*B, A]``.

        Returns:
            Disagreement with shape ``[*B, 1]``, float32.
        """
        with torch.autocast(state.device.type, enabled=False):
            features = torch.cat((state, belief), -1).float()
            num_members, num_features = self.network.num_members, features.shape[-1]
            first = self.network.layers[0]
            of_features, of_action = first.weight.split((num_features, self.num_actions), 1)
            rows = features.reshape(-1, num_features).expand(num_members, -1, -1)
            hidden = torch.baddbmm(first.bias, rows, of_features)
            hidden = hidden.unsqueeze(2) + of_action.unsqueeze(1)
            out = self.network.after_first(hidden.flatten(1, 2))
            spread = ensemble_variance(out).mean(-1).reshape(log_p.shape)
            return (log_p.float().exp() * spread).sum(-1, keepdim=True)

    def loss(
        self, state: Tensor, belief: Tensor, action: Tensor, is_init: Tensor
    ) -> dict[str, Tensor]:
        r"""Fit every member to replayed sequences, as Gaussians of unit variance.

        .. math::
            \mathtt{loss\_disagreement} = \Bigl\langle \frac{1}{2K} \sum_k
                \bigl\| \mathrm{sg}(s_{t+1}) - f_k(\mathrm{sg}(s_t, h_t), a_{t+1}) \bigr\|^2
                \Bigr\rangle

        The posterior of record :math:`t` has seen where its action led; what is done in it is in
        record :math:`t+1`. Pairs whose second record begins an episode are left out.

        Args:
            state: Posterior stochastic states, shape ``[N, T, S]``.
            belief: Their beliefs, shape ``[N, T, belief_dim]``.
            action: Actions of the records, one-hot or continuous, shape ``[N, T, A]``.
            is_init: Where a record begins an episode, boolean, shape ``[N, T, 1]``.

        Returns:
            ``loss_disagreement`` and the detached ``disagreement`` at the actions taken; zero
            where no pair counts.

        Raises:
            ValueError: If an entry has another shape.
        """
        sizes = {"state": self.state_dim, "belief": self.belief_dim, "action": self.num_actions}
        entries = {"state": state, "belief": belief, "action": action, "is_init": is_init}
        for name, value in entries.items():
            if value.shape != (*state.shape[:2], sizes.get(name, 1)):
                raise ValueError(
                    f"{name} must be [batch, time, {sizes.get(name, 1)}] like the other entries, "
                    f"got {tuple(value.shape)} beside a state of {tuple(state.shape)}."
                )
        state, belief = state.detach(), belief.detach()
        counted = ~is_init[:, 1:, 0].to(torch.bool)
        taken = action[:, 1:].detach().to(state.dtype)
        predicted = self.predict(state[:, :-1], belief[:, :-1], taken).float()
        error = (predicted - state[:, 1:].float()).square().sum(-1).mean(0) / 2
        spread = ensemble_variance(predicted.detach()).mean(-1)
        return {
            "loss_disagreement": masked_mean(error, counted),
            "disagreement": masked_mean(spread, counted),
        }
