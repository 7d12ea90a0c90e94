"""Bringing the advisor's logits to the policy's scale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lore_torchrl.functional import align_temperature


class TemperatureAligner(nn.Module):
    r"""Keep the temperature at which recent advice is closest to the policy.

    .. math::
        T \leftarrow T^{1-r}\,(T^\star)^{r}, \qquad
        T^\star = \arg\min_T \mathrm{mean}\,
            \mathrm{KL}(\pi_{wm} \,\|\, \mathrm{softmax}(\ell_{llm} / T))

    The mean runs over the advised states of the call (a replay batch, in
    :class:`~lore_torchrl.objectives.LoReActorLoss`). A uniform, untrained policy drives
    :math:`T` to its upper bound: nothing sharper is closer to it.

    Temperature scaling: https://arxiv.org/abs/1706.04599.

    Keyword Args:
        minimum: Lower bound :math:`T_{\min} > 0`. Default: ``0.5``.
        maximum: Upper bound :math:`T_{\max} \ge T_{\min}`. Default: ``2.0``.
        init: First temperature. Default: ``1.0``.
        rate: Weight :math:`r` of the new estimate, in ``(0, 1]``, in log space.
            ``0`` holds the temperature at ``init``. Default: ``0.0``.

    Raises:
        ValueError: If a bound, the rate or the first temperature is out of range.

    Examples:
        >>> aligner = TemperatureAligner(rate=1.0, minimum=0.1, maximum=10.0)
        >>> prior = torch.tensor([[2.0, -2.0]])
        >>> aligner.update(torch.log_softmax(prior / 4, -1), prior, torch.ones(1, 1).bool())
        >>> torch.allclose(aligner.temperature, torch.tensor(4.0), rtol=1e-3)
        True
    """

    temperature: Tensor

    def __init__(
        self,
        *,
        minimum: float = 0.5,
        maximum: float = 2.0,
        init: float = 1.0,
        rate: float = 0.0,
    ):
        super().__init__()
        if not 0 < minimum <= maximum:
            raise ValueError(
                f"Temperature bounds need 0 < minimum <= maximum, got {minimum} and {maximum}."
            )
        if not minimum <= init <= maximum:
            raise ValueError(f"init={init} lies outside [{minimum}, {maximum}].")
        if not 0 <= rate <= 1:
            raise ValueError(f"rate must lie in [0, 1], got {rate}.")
        self.minimum = minimum
        self.maximum = maximum
        self.rate = rate
        self.register_buffer("temperature", torch.tensor(float(init)))

    @torch.no_grad()
    def update(self, log_p: Tensor, prior_logits: Tensor, valid: Tensor) -> None:
        """Move the temperature towards the optimum of this batch, if it holds advice.

        Args:
            log_p: Normalized policy log-probabilities, shape ``[N, A]``.
            prior_logits: Centered advice, shape ``[N, A]``.
            valid: Rows that carry advice, boolean, shape ``[N, 1]``.
        """
        if not self.rate:
            return
        target = align_temperature(
            log_p, prior_logits, valid, minimum=self.minimum, maximum=self.maximum
        )
        moved = self.temperature ** (1 - self.rate) * target**self.rate
        self.temperature.copy_(torch.where(valid.any(), moved, self.temperature))

    def forward(self, prior_logits: Tensor) -> Tensor:
        """Divide advice by the current temperature."""
        return prior_logits / self.temperature
