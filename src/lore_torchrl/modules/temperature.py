"""Bringing the advisor's logits to the policy's scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lore_torchrl.configs.lore import TemperatureConfig
from lore_torchrl.functional import align_temperature


class TemperatureAligner(nn.Module):
    r"""Keep the temperature at which recent advice is closest to the policy.

    .. math::
        T \leftarrow T^{1-r}\,(T^\star)^{r}, \qquad
        T^\star = \arg\min_T \mathrm{mean}\,
            \mathrm{KL}(\pi_{wm} \,\|\, \mathrm{softmax}(\ell_{llm} / T))

    The mean runs over the advised states of the call, a replay batch in
    :class:`~lore_torchrl.objectives.LoReActorLoss`. Temperature scaling: https://arxiv.org/abs/1706.04599.

    Keyword Args:
        **settings: As of :class:`~lore_torchrl.configs.TemperatureConfig`, which documents defaults
            and limits.

    Examples:
        >>> aligner = TemperatureAligner(rate=1.0, minimum=0.1, maximum=10.0)
        >>> prior = torch.tensor([[2.0, -2.0]])
        >>> aligner.update(torch.log_softmax(prior / 4, -1), prior, torch.ones(1, 1).bool())
        >>> torch.allclose(aligner.temperature, torch.tensor(4.0), rtol=1e-3)
        True
    """

    temperature: Tensor

    def __init__(self, **settings: Any):
        super().__init__()
        c = TemperatureConfig(**settings)
        self.minimum, self.maximum, self.rate = c.minimum, c.maximum, c.rate
        self.register_buffer("temperature", torch.tensor(float(c.init)))

    @torch.no_grad()
    def update(self, log_p: Tensor, prior_logits: Tensor, valid: Tensor) -> None:
        """Move the temperature towards the optimum of this batch, if it holds advice.

        Arguments are as of :func:`~lore_torchrl.functional.align_temperature`.
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
