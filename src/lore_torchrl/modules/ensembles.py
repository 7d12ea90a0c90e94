"""Ensembles whose members disagree where there was no data: about dynamics, and about value."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.objectives import symlog

from lore_torchrl.configs.lore import DisagreementConfig, ValueEnsembleConfig
from lore_torchrl.functional import ensemble_variance, masked_mean


class _BatchedLinear(nn.Module):
    r"""Apply :math:`K` affine maps at once: :math:`y_k = x_k W_k + b_k`, drawn independently."""

    def __init__(self, num_members: int, in_features: int, out_features: int, kind: type):
        super().__init__()
        std = in_features**-0.5
        weight = torch.empty(num_members, in_features, out_features)
        self.weight = kind(nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std))
        self.bias = kind(torch.empty(num_members, 1, out_features).uniform_(-std, std))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[K, R, in]`` to ``[K, R, out]``."""
        return torch.baddbmm(self.bias, x, self.weight)


class _BatchedMLP(nn.Module):
    r"""Evaluate :math:`K` multilayer perceptrons, with SiLU, by one product a layer."""

    def __init__(
        self,
        config: DisagreementConfig,
        in_features: int,
        out_features: int,
        kind: type = nn.Parameter,
    ):
        super().__init__()
        widths = [in_features, *[config.hidden_dim] * config.depth, out_features]
        self.num_members = config.num_members
        self.layers = nn.ModuleList(
            _BatchedLinear(self.num_members, *sizes, kind) for sizes in pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[*B, in]`` to the members' outputs ``[K, *B, out]``."""
        first, *others = self.layers
        out = first(x.reshape(-1, x.shape[-1]).expand(self.num_members, -1, -1))
        for layer in others:
            out = layer(nn.functional.silu(out))
        return out.reshape(self.num_members, *x.shape[:-1], out.shape[-1])


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be positive, got {size}.")


class LatentDisagreement(nn.Module):
    r"""Predict the next stochastic latent :math:`K` times and measure the spread.

    .. math::
        D(s, h, a) = \frac{1}{S} \sum_{d=1}^{S} \mathrm{Var}_k\bigl[f_k(s, h, a)_d\bigr]

    over stochastic state :math:`s`, belief :math:`h` and the members :math:`f_k`, which
    start independently and learn the same data (:meth:`loss`), with the population variance.
    Plan2Explore: https://arxiv.org/abs/2005.05960.

    Args:
        state_dim: Size :math:`S` of the flattened stochastic state.
        belief_dim: Size of the belief.
        num_actions: Number of actions :math:`A`, or of their dimensions.

    Keyword Args:
        **settings: As of :class:`~lore_torchrl.configs.DisagreementConfig`, which documents
            defaults and limits.

    Raises:
        ValueError: If there are fewer than two members, or a size is not positive.

    Examples:
        >>> ensemble = LatentDisagreement(4, 2, 3, hidden_dim=8)
        >>> uniform = torch.zeros(5, 3).log_softmax(-1)
        >>> ensemble.expected(torch.ones(5, 4), torch.ones(5, 2), uniform).shape
        torch.Size([5, 1])
    """

    def __init__(self, state_dim: int, belief_dim: int, num_actions: int, **settings: Any):
        super().__init__()
        _check_sizes(state_dim=state_dim, belief_dim=belief_dim, num_actions=num_actions)
        self.state_dim, self.belief_dim, self.num_actions = state_dim, belief_dim, num_actions
        in_features = state_dim + belief_dim + num_actions
        self.network = _BatchedMLP(DisagreementConfig(**settings), in_features, state_dim)
        self.in_keys = ["state", "belief"]

    def predict(self, state: Tensor, belief: Tensor, action: Tensor) -> Tensor:
        """Return the members' predictions of the next stochastic state, ``[K, *B, S]``.

        ``action`` is one-hot or continuous, in floating point, ``[*B, A]``.
        """
        return self.network(torch.cat((state, belief, action), -1).float())

    @torch.no_grad()
    def at(self, state: Tensor, belief: Tensor, action: Tensor) -> Tensor:
        """Return :math:`D(s, h, a)`, ``[*B, 1]`` in float32; arguments as of :meth:`predict`."""
        # In bfloat16 the rounding of the members would be larger than what sets them apart.
        with torch.autocast(state.device.type, enabled=False):
            out = self.predict(state.float(), belief.float(), action)
            return ensemble_variance(out).mean(-1, keepdim=True)

    @torch.no_grad()
    def expected(self, state: Tensor, belief: Tensor, log_p: Tensor) -> Tensor:
        r"""Return :math:`\sum_a \pi(a)\, D(s, h, a)` over all one-hot actions, without gradient.

        From normalized log-probabilities ``[*B, A]`` to ``[*B, 1]`` in float32.
        """
        actions = torch.eye(self.num_actions, device=state.device).expand(*log_p.shape, -1)
        latent = (x.unsqueeze(-2).expand(*log_p.shape, -1) for x in (state, belief))
        spread = self.at(*latent, actions).squeeze(-1)
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
        for name, value, size in (
            ("state", state, self.state_dim),
            ("belief", belief, self.belief_dim),
            ("action", action, self.num_actions),
            ("is_init", is_init, 1),
        ):
            if value.shape != (*state.shape[:2], size):
                raise ValueError(
                    f"{name} must be [batch, time, {size}] like the other entries, got "
                    f"{tuple(value.shape)} beside a state of {tuple(state.shape)}."
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


class ValueEnsemble(TensorDictModuleBase):
    r"""Predict the value :math:`K` times, each with a fixed random prior function.

    .. math::
        v_k(s, h) = f_k(s, h) + \beta\, p_k(s, h), \qquad
        \mathrm{Var}[V] = \mathrm{Var}_k\bigl[v_k(s, h)\bigr]

    in symlog units. Only :math:`f_k` learns (:meth:`loss`); :math:`p_k` is a random network
    that never changes, so members that fit the same data still differ where there is none.
    Randomized prior functions: https://arxiv.org/abs/1806.03335.

    Args:
        state_dim: Size of the flattened stochastic state.
        belief_dim: Size of the belief.

    Keyword Args:
        **settings: As of :class:`~lore_torchrl.configs.ValueEnsembleConfig`, which documents
            defaults and limits; a ``prior_scale`` :math:`\beta` of 0 builds no prior functions.

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

    def __init__(self, state_dim: int, belief_dim: int, **settings: Any):
        super().__init__()
        _check_sizes(state_dim=state_dim, belief_dim=belief_dim)
        c, in_features = ValueEnsembleConfig(**settings), state_dim + belief_dim
        self.prior_scale = c.prior_scale
        self.network, self.prior = _BatchedMLP(c, in_features, 1), None
        if c.prior_scale:
            # Buffers are out of every optimizer's reach.
            self.prior = _BatchedMLP(c, in_features, 1, nn.Buffer)
        self.in_keys, self.out_keys = ["state", "belief"], ["value_variance"]

    def predict(self, state: Tensor, belief: Tensor) -> Tensor:
        """Return the members' values in symlog units, ``[K, *B, 1]``, float32."""
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
