"""Which subgoals a latent state reaches, learned."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrl.modules import DreamerV3MLP

from lore_torchrl.functional import first_reached


class SubgoalHead(nn.Module):
    r"""Predict which subgoals are true in a latent state, and what a rollout gains by its own.

    With :math:`p_t` the probability that the rollout's subgoal :math:`g` is true after step
    :math:`t`, and :math:`n_g` how often it has been reached in the run, a rollout is paid once, as
    in DLLM (https://arxiv.org/abs/2406.07381):

    .. math::
        b_t = \frac{\beta_g}{\sqrt{n_g + 1}}\, p_t \prod_{k<t} (1 - p_k)

    :math:`n_g` is what :meth:`count` was told last, 0 at first.

    Args:
        in_features: Size of state and belief together.
        num_subgoals: Number of subgoals :math:`G`.

    Keyword Args:
        weight: :math:`\beta_g`. Default: ``0.1``.

    Raises:
        ValueError: If there are no subgoals.

    Examples:
        >>> head = SubgoalHead(6, 3)
        >>> head.bonus(torch.zeros(2, 2, 4), torch.zeros(2, 2, 2), torch.eye(3)[:2])
        tensor([[0.0500, 0.0250],
                [0.0500, 0.0250]])
    """

    def __init__(self, in_features: int, num_subgoals: int, *, weight: float = 0.1):
        super().__init__()
        if num_subgoals < 1:
            raise ValueError(f"A subgoal head needs subgoals, got {num_subgoals}.")
        self.weight = weight
        self.register_buffer("novelty", torch.ones(num_subgoals))
        # Zero output: every state is as likely as not, and no rollout gains more than another.
        self.network = DreamerV3MLP(in_features, num_subgoals, 1, 64, outscale=0.0, norm_eps=1e-4)

    @torch.no_grad()
    def count(self, reached: Tensor) -> None:
        """Take note of how often each subgoal has been reached in the run, ``[G]``."""
        self.novelty.copy_((reached + 1.0).rsqrt())

    @torch.no_grad()
    def bonus(self, state: Tensor, belief: Tensor, subgoal: Tensor) -> Tensor:
        r"""Return :math:`b_t` ``[N, H]`` of imagined states ``[N, H, ...]``.

        ``subgoal`` is one-hot, ``[N, G]``; without one there is no bonus.
        """
        reached = self.network(state, belief).float().sigmoid()
        scale = self.weight * (subgoal * self.novelty).sum(-1, keepdim=True)
        return scale * first_reached((reached * subgoal.unsqueeze(-2)).sum(-1))

    def loss(self, state: Tensor, belief: Tensor, reached: Tensor) -> dict[str, Tensor]:
        """Return the binary cross-entropy to what was true, 0 or 1, of detached states."""
        logits = self.network(state, belief).float()
        loss = nn.functional.binary_cross_entropy_with_logits(logits, reached)
        return {"loss_subgoal_head": loss}
