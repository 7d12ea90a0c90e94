"""DreamerV3's actor for bounded continuous actions."""

from __future__ import annotations

import torch
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torchrl.modules import DreamerV3MLP, TanhNormal

# Beyond this the tanh is flat: tanh(3) = 0.995.
_FARTHEST = 3.0
# Of the scale's sigmoid: a policy starts wide.
_SCALE_SHIFT = 2.0


class _GaussianNet(nn.Module):
    def __init__(self, network: DreamerV3MLP, scale_range: tuple[float, float]) -> None:
        super().__init__()
        self.network = network
        self.scale_range = scale_range

    def forward(self, state: Tensor, belief: Tensor) -> tuple[Tensor, Tensor]:
        loc, raw = self.network(belief, state).float().chunk(2, -1)
        low, high = self.scale_range
        scale = low + (high - low) * torch.sigmoid(raw + _SCALE_SHIFT)
        return _FARTHEST * torch.tanh(loc / _FARTHEST), scale


class DreamerV3ContinuousActor(ProbabilisticTensorDictSequential):
    r"""DreamerV3 policy over bounded continuous actions.

    .. math::
        (u, v) = f(h, s), \quad \mu = 3 \tanh(u / 3), \quad
        \sigma = \sigma_{\min} + (\sigma_{\max} - \sigma_{\min})\, \mathrm{sigmoid}(v + 2), \\
        a = \tfrac{h + l}{2} + \tfrac{h - l}{2} \tanh(x), \qquad x \sim \mathcal N(\mu, \sigma^2)

    The bounds on :math:`\sigma` are those of `DreamerV3 <https://arxiv.org/abs/2301.04104>`_,
    network and keys those of :class:`~torchrl.modules.DreamerV3DiscreteActor`.

    Args:
        in_features: Size of stochastic state and belief together.
        low: Lowest action :math:`l`, shape ``[A]``.
        high: Highest action :math:`h`, shape ``[A]``.

    Keyword Args:
        scale_range: :math:`(\sigma_{\min}, \sigma_{\max})`. Default: ``(0.1, 1.0)``.
        depth: Hidden layers. Default: ``2``.
        num_cells: Width of each. Default: ``64``.
        norm_eps: Epsilon of the RMS normalization. Default: ``1e-4``.

    Raises:
        ValueError: If the bounds are not finite or in order, or a number is out of range.

    Examples:
        >>> from tensordict import TensorDict
        >>> actor = DreamerV3ContinuousActor(6, torch.tensor([-2.0]), torch.tensor([2.0]))
        >>> td = TensorDict(state=torch.zeros(3, 4), belief=torch.zeros(3, 2), batch_size=[3])
        >>> actor(td)["action"].shape, bool((td["action"].abs() <= 2).all())
        (torch.Size([3, 1]), True)
    """

    def __init__(
        self,
        in_features: int,
        low: Tensor,
        high: Tensor,
        *,
        scale_range: tuple[float, float] = (0.1, 1.0),
        depth: int = 2,
        num_cells: int = 64,
        norm_eps: float = 1e-4,
    ) -> None:
        bounded = low.ndim == 1 and low.shape == high.shape
        if not (bounded and (low < high).all() and (high - low).isfinite().all()):
            raise ValueError(
                "low and high must be finite, [A], low below high: got "
                f"{low.tolist()}, {high.tolist()}."
            )
        if not 0 < scale_range[0] < scale_range[1]:
            raise ValueError(f"scale_range needs 0 < low < high, got {scale_range}.")
        if depth < 1:
            raise ValueError(f"depth must be positive, got {depth}.")
        network = DreamerV3MLP(
            in_features, 2 * len(low), depth, num_cells, outscale=0.01, norm_eps=norm_eps
        )
        super().__init__(
            TensorDictModule(
                _GaussianNet(network, scale_range),
                in_keys=["state", "belief"],
                out_keys=["loc", "scale"],
            ),
            ProbabilisticTensorDictModule(
                in_keys=["loc", "scale"],
                out_keys=["action"],
                distribution_class=TanhNormal,
                distribution_kwargs={"low": low, "high": high},
                default_interaction_type=InteractionType.RANDOM,
                return_log_prob=True,
                log_prob_key="action_log_prob",
            ),
        )
        self.scale_range = scale_range
