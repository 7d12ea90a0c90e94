"""Ending what is taught, so that the teacher's faults do not stay."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Annealing(nn.Module):
    r"""Shrink what is learnt from advice once it has been taught for long enough.

    With :math:`n` the sum of the trust in the updates so far whose batch held advice,

    .. math::
        s = \mathrm{clip}\Bigl(1 - \frac{n - n_0}{n_1}, 0, 1\Bigr)

    Imperfect advice teaches a policy faster than reward does and then holds it below what
    reward would: while the mixture still returns more than the policy alone, nothing else ends
    that. Updates are counted by their trust, so that advice which is trusted late is taught
    for as long, and advice that is never trusted ends nothing.

    Kickstarting, whose teacher's weight is annealed: https://arxiv.org/abs/1803.03835.

    Args:
        after: :math:`n_0`, updates at full trust.
        steps: :math:`n_1`, updates at full trust from whole to none; with ``0`` it ends at once.

    Raises:
        ValueError: If one of them is negative, or ``steps`` infinite.

    Examples:
        >>> annealing = Annealing(after=2, steps=4)
        >>> for _ in range(4):
        ...     annealing.count(torch.ones(()))
        >>> annealing()
        tensor(0.5000)
    """

    taught: Tensor

    def __init__(self, *, after: float, steps: float):
        super().__init__()
        for name, value in (("after", after), ("steps", steps)):
            if not value >= 0:
                raise ValueError(f"anneal_{name} must not be negative, got {value}.")
        if math.isinf(steps):
            raise ValueError("anneal_steps must be finite; anneal_after=None teaches on.")
        self.after = after
        self.steps = steps
        self.register_buffer("taught", torch.zeros(()))

    @torch.no_grad()
    def count(self, trust: Tensor | float) -> None:
        """Count an update that had this trust.

        Args:
            trust: From 0 to 1, scalar.
        """
        self.taught.add_(trust)

    def forward(self) -> Tensor:
        """Return :math:`s`, a scalar."""
        left = self.after + self.steps - self.taught
        return (left / max(self.steps, 1e-9)).clamp(0.0, 1.0)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args, **kwargs) -> None:
        # Older checkpoints lack it.
        state_dict.setdefault(prefix + "taught", self.taught.clone())
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
