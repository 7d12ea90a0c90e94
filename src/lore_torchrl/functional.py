"""The arithmetic of LoRe as pure functions over tensors.

Nothing here reads a tensordict, draws a random number, branches on a tensor's value
or waits for the device, so every function may run inside a compiled learner step or a
captured CUDA graph. ``A`` is the number of actions, ``*B`` any batch shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST_LOG_PROB = -1e4


def masked_mean(value: Tensor, mask: Tensor) -> Tensor:
    r"""Return :math:`\sum_i m_i x_i / \max(\sum_i m_i, 1)`, zero where nothing counts.

    What the boolean mask, of the value's shape, leaves out need not be finite.
    """
    return torch.where(mask, value, 0.0).sum() / mask.sum().clamp_min(1)


def log_floor(log_p: Tensor) -> Tensor:
    r"""Return :math:`\max(\log p, -10^4)`: the logarithm of a zero that can be computed with.

    Of :math:`-\infty`, an action that is ruled out, entropy and divergences would be NaN. In
    float32 :math:`e^{-10^4}` is exactly 0; see :func:`is_ruled_out`.

    Examples:
        >>> log_p = log_floor(torch.tensor([0.0, -torch.inf]))
        >>> log_p.exp(), categorical_kl(log_p, log_p)
        (tensor([1., 0.]), tensor(0.))
    """
    return log_p.clamp_min(_LEAST_LOG_PROB)


def is_ruled_out(log_p: Tensor) -> Tensor:
    """Return where :func:`log_floor` has raised a logarithm: actions of probability 0."""
    return log_p <= _LEAST_LOG_PROB


def categorical_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    r"""Return :math:`\mathrm{KL}(p \| q)` in nats, ``[*B]``, of log-probabilities ``[*B, A]``."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def align_temperature(
    log_p: Tensor,
    prior_logits: Tensor,
    valid: Tensor,
    *,
    minimum: float,
    maximum: float,
) -> Tensor:
    r"""Find the temperature at which the prior is closest to the policy.

    .. math::
        T^\star = \arg\min_{T \in [T_{\min}, T_{\max}]}
            \mathrm{mean}_i\, \mathrm{KL}(p_i \,\|\, \mathrm{softmax}(\ell_i / T))

    In :math:`x = 1/T` the objective is convex with derivative
    :math:`\mathrm{mean}_i(\mathbb{E}_{q_x}[\ell_i] - \mathbb{E}_{p_i}[\ell_i])`, whose
    single change of sign is bisected. Temperature scaling: https://arxiv.org/abs/1706.04599.

    Args:
        log_p: Normalised policy log-probabilities, shape ``[N, A]``.
        prior_logits: Centred advice, shape ``[N, A]``.
        valid: Rows that count, boolean, shape ``[N, 1]``.
        minimum: Lower bound on the temperature.
        maximum: Upper bound on the temperature.

    Returns:
        Scalar temperature, meaningless without a valid row.
    """
    logits = torch.where(valid, prior_logits, 0.0)
    target = (log_p.exp() * logits).sum()
    # Actions first: there a CPU is several times as fast.
    logits = logits.movedim(-1, 0).contiguous()
    # Not new_tensor(), which copies from the host and waits for the device.
    low, high = torch.full_like(target, 1.0 / maximum), torch.full_like(target, 1.0 / minimum)
    for _ in range(24):
        middle = (low + high) / 2
        expected = (torch.softmax(middle * logits, 0) * logits).sum()
        rising = expected > target
        low, high = torch.where(rising, low, middle), torch.where(rising, middle, high)
    return 2.0 / (low + high)


def two_hot_variance(value_logits: Tensor, bins: Tensor) -> Tensor:
    r"""Variance of a two-hot critic's own distribution, in symlog units.

    .. math::
        \mathrm{Var}[V] = \sum_k q_k \bigl(b_k - \sum_j q_j\, b_j\bigr)^2

    Args:
        value_logits: Categorical value logits, shape ``[*B, K]``.
        bins: Support in symlog space, shape ``[K]``.

    Returns:
        Variance with shape ``[*B, 1]``.
    """
    # Sums of products, which autocast leaves in float32: a matrix product it would not.
    probs = torch.softmax(value_logits.float(), -1)
    mean = (probs * bins).sum(-1, keepdim=True)
    return (probs * (bins - mean).square()).sum(-1, keepdim=True)


def ensemble_variance(members: Tensor) -> Tensor:
    r"""Population variance across the first dimension, :math:`\frac1K \sum_k (x_k - \bar x)^2`.

    Several times as fast on a CPU as :meth:`torch.Tensor.var` over that dimension.
    """
    return (members - members.mean(0)).square_().mean(0)


def first_reached(probability: Tensor) -> Tensor:
    r"""Return :math:`p_t \prod_{k<t} (1 - p_k)` along the last axis: that it happens first at t."""
    before = (1.0 - probability).cumprod(-1).roll(1, -1)
    before[..., 0] = 1.0
    return probability * before
