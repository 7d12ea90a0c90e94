"""An ensemble of small networks whose members are evaluated together."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class BatchedLinear(nn.Module):
    r"""Apply :math:`K` affine maps at once: :math:`y_k = x_k W_k + b_k`.

    The members are drawn independently: weights from a normal distribution with standard
    deviation :math:`1/\sqrt{\mathrm{in}}`, cut at two of them, and biases uniformly within
    :math:`\pm 1/\sqrt{\mathrm{in}}`.

    Args:
        num_members: :math:`K`.
        in_features: Inputs of a member.
        out_features: Outputs of a member.

    Keyword Args:
        trainable: ``False`` keeps weight and bias as buffers. Default: ``True``.
    """

    weight: Tensor
    bias: Tensor

    def __init__(
        self, num_members: int, in_features: int, out_features: int, *, trainable: bool = True
    ):
        super().__init__()
        std = in_features**-0.5
        weight = torch.empty(num_members, in_features, out_features)
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
        bias = torch.empty(num_members, 1, out_features).uniform_(-std, std)
        for name, value in (("weight", weight), ("bias", bias)):
            if trainable:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[K, R, in]`` to ``[K, R, out]``."""
        return torch.baddbmm(self.bias, x, self.weight)


class BatchedMLP(nn.Module):
    r"""Evaluate :math:`K` multilayer perceptrons of one shape on the same input.

    Each layer is one product for all members; between the layers stands SiLU.

    Args:
        num_members: :math:`K`, at least 2.
        in_features: Inputs.
        out_features: Outputs of a member.

    Keyword Args:
        hidden_dim: Width of the hidden layers. Default: ``64``.
        depth: Number of hidden layers, at least 1. Default: ``2``.
        trainable: ``False`` keeps everything in buffers, out of every optimiser's reach.
            Default: ``True``.

    Raises:
        ValueError: If there are fewer than two members or a size is not positive.

    Examples:
        >>> BatchedMLP(3, 4, 2, hidden_dim=8)(torch.zeros(6, 5, 4)).shape
        torch.Size([3, 6, 5, 2])
    """

    def __init__(
        self,
        num_members: int,
        in_features: int,
        out_features: int,
        *,
        hidden_dim: int = 64,
        depth: int = 2,
        trainable: bool = True,
    ):
        super().__init__()
        if num_members < 2:
            raise ValueError(
                f"num_members must be at least 2, since one member has no variance: "
                f"got {num_members}."
            )
        sizes = {
            "in_features": in_features,
            "out_features": out_features,
            "hidden_dim": hidden_dim,
            "depth": depth,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be positive, got {size}.")
        self.num_members = num_members
        self.in_features = in_features
        self.out_features = out_features
        widths = [in_features, *[hidden_dim] * depth, out_features]
        self.layers = nn.ModuleList(
            BatchedLinear(num_members, before, after, trainable=trainable)
            for before, after in pairwise(widths)
        )

    def after_first(self, hidden: Tensor) -> Tensor:
        """Map what the first layer gave, ``[K, R, hidden_dim]``, to ``[K, R, out]``.

        Where no gradient is wanted, ``hidden`` is overwritten.
        """
        for layer in list(self.layers)[1:]:
            hidden = layer(nn.functional.silu(hidden, inplace=not hidden.requires_grad))
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[*B, in]`` to the members' outputs ``[K, *B, out]``."""
        rows = x.reshape(-1, self.in_features).expand(self.num_members, -1, -1)
        out = self.after_first(self.layers[0](rows))
        return out.reshape(self.num_members, *x.shape[:-1], self.out_features)
