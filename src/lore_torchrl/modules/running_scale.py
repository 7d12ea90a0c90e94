"""Bringing a quantity of unknown size onto a scale from 0 to 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RunningScale(nn.Module):
    r"""Divide by a running maximum that slowly forgets.

    .. math::
        s \leftarrow \max(\gamma\, s,\; \max_i x_i), \qquad \hat x = \min(x / s, 1)

    The result is 1 where the quantity is as large as it has recently been anywhere.

    Keyword Args:
        decay: Forgetting :math:`\gamma` for each update, in ``(0, 1]``. Default: ``0.995``.
        floor: Smallest scale, keeps noise from being blown up to 1. Default: ``1e-3``.
    """

    scale: Tensor

    def __init__(self, *, decay: float = 0.995, floor: float = 1e-3):
        super().__init__()
        if not 0 < decay <= 1:
            raise ValueError(f"decay must lie in (0, 1], got {decay}.")
        if not floor > 0:
            raise ValueError(f"floor must be positive, got {floor}.")
        self.decay = decay
        self.register_buffer("scale", torch.tensor(float(floor)))
        self.floor = floor

    @torch.no_grad()
    def update(self, value: Tensor) -> None:
        """Take note of a batch of non-negative values of any shape."""
        if not value.numel():
            return
        peak = torch.nan_to_num(value, nan=0.0, posinf=0.0).amax()
        self.scale.copy_(torch.maximum((self.decay * self.scale).clamp_min(self.floor), peak))

    def forward(self, value: Tensor) -> Tensor:
        """Return the values on a scale from 0 to 1; what is not finite counts as 1."""
        return torch.nan_to_num(value / self.scale, nan=1.0, posinf=1.0).clamp(0.0, 1.0)
