"""Which executed steps gained something over the critic, and how much."""

from __future__ import annotations

import torch
from torch import Tensor


def replay_returns(
    value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor,
    is_init: Tensor,
    *,
    gamma: float,
    lmbda: float,
) -> Tensor:
    r"""Return the lambda return of executed steps along replayed sequences.

    .. math::
        G_t = r_{t+1} + \gamma (1 - d_{t+1}) \bigl(
            (1 - \lambda) V(s_{t+1}) + \lambda G_{t+1}\bigr), \qquad G_T = V(s_T)

    with :math:`d` where the episode terminates; where it is truncated the brackets hold
    :math:`V(s_{t+1})` alone. What is done at posterior :math:`t`, and its reward, are in record
    :math:`t + 1`. TD(lambda): https://arxiv.org/abs/1506.02438.

    Args:
        value: Critic's value of each posterior :math:`V(s_t)`, ``[N, T, 1]``.
        reward: Reward of each record, ``[N, T, 1]``.
        done: Where the episode ends with a record, boolean ``[N, T, 1]``.
        terminated: Where it terminates, boolean ``[N, T, 1]``.
        is_init: Reset records, boolean ``[N, T, 1]``: what is before one led nowhere.

    Keyword Args:
        gamma: Discount :math:`\gamma`.
        lmbda: Mixing :math:`\lambda`.

    Returns:
        :math:`G_t`, ``[N, T, 1]``, NaN where no action was taken: at the last posterior of a
        sequence, and at the end of an episode.
    """
    # What a resumed run has cut off ends right before a reset record, as a truncated episode.
    cut = torch.nn.functional.pad(is_init[:, 2:], (0, 0, 0, 1))
    ahead = gamma * value[:, 1:] * ~terminated[:, 1:]
    share = lmbda * ~(done[:, 1:] | terminated[:, 1:] | cut)
    # As TorchRL's td_lambda_return_estimate, in a fifth of the operations. Its vectorized form cuts
    # sequences where episodes end, so that shapes depend on the data.
    now = reward[:, 1:].float() + (1.0 - share) * ahead
    following, returns = value[:, -1], []
    for base, weight in zip(now.unbind(1)[::-1], (gamma * share).unbind(1)[::-1], strict=True):
        following = torch.addcmul(base, weight, following)
        returns.append(following)
    returns = torch.stack(returns[::-1], 1).masked_fill(is_init[:, 1:], torch.nan)
    return torch.nn.functional.pad(returns, (0, 0, 0, 1), value=torch.nan)


def imitation_weight(
    returns: Tensor,
    value: Tensor,
    return_to_go: Tensor | None = None,
    *,
    scale: Tensor | float = 1.0,
    threshold: float = 0.05,
) -> Tensor:
    r"""Return how much each executed step is imitated.

    .. math::
        f_t = \begin{cases}
            \mathrm{clip}\bigl((G_t - V(s_t)) / S,\, 0, 1\bigr) & (R_t - V(s_t)) / S > \theta \\
            0 & \text{else}
        \end{cases}

    The real return :math:`R_t` decides whether the step is imitated at all: it belongs to an
    episode that ended better than the critic expected. The lambda return :math:`G_t` decides
    how much: it tells the steps that brought the critic's value up from those that did not.
    Self-imitation learning: https://arxiv.org/abs/1806.05635.

    Args:
        returns: :math:`G_t`, any shape; 0 is returned where it is not finite.
        value: :math:`V(s_t)`, same shape.
        return_to_go: :math:`R_t` of :class:`~lore_torchrl.replay.EpisodeReturns`, same shape;
            0 is returned where it is not finite, as before an episode has ended. Default:
            ``None``, :math:`G_t` itself.

    Keyword Args:
        scale: :math:`S`, the span of returns. Default: ``1.0``.
        threshold: :math:`\theta`. Default: ``0.05``.

    Examples:
        >>> returns, value = torch.tensor([0.9, 0.6, 0.9]), torch.tensor([0.4, 0.5, 0.4])
        >>> imitation_weight(returns, value, torch.tensor([1.0, 1.0, 0.0]))
        tensor([0.5000, 0.1000, 0.0000])
    """
    gain = (returns - value) / scale
    real = gain if return_to_go is None else (return_to_go - value) / scale
    counts = (real > threshold) & (gain > 0) & gain.isfinite() & real.isfinite()
    return torch.where(counts, gain.clamp(0.0, 1.0), 0.0)
