"""The arithmetic of LoRe as pure functions over tensors.

Nothing here reads a tensordict, draws a random number, branches on a tensor's value
or waits for the device, so every function may run inside a compiled learner step or a
captured CUDA graph. ``A`` is the number of actions, ``*B`` any batch shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST_LOG_PROB = -1e4


def masked_mean(value: Tensor, weight: Tensor) -> Tensor:
    r"""Return :math:`\sum_i w_i x_i / \max(\sum_i [w_i > 0], 1)`, zero where nothing counts.

    Entries with a zero weight are left out even where they are not finite.

    Args:
        value: Values, any shape.
        weight: Non-negative weights of the same shape (or boolean).

    Examples:
        >>> masked_mean(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
        tensor(1.)
    """
    if weight.dtype != torch.bool:
        value = value * weight.to(value.dtype)
        weight = weight > 0
    return torch.where(weight, value, 0.0).sum() / weight.sum().clamp_min(1)


def log_floor(log_p: Tensor) -> Tensor:
    r"""Return :math:`\max(\log p, -10^4)`: the logarithm of a zero that can be computed with.

    An action that is ruled out, by a mask in the actor or a softmax that underflowed, has
    the logit :math:`-\infty`, and entropy and divergences of its row would be NaN. In
    float32 :math:`e^{-10^4}` is exactly 0; see :func:`is_ruled_out`.

    Args:
        log_p: Log-probabilities, any shape.

    Examples:
        >>> log_p = log_floor(torch.tensor([0.0, -torch.inf]))
        >>> log_p.exp(), categorical_kl(log_p, log_p)
        (tensor([1., 0.]), tensor(0.))
    """
    return log_p.clamp_min(_LEAST_LOG_PROB)


def is_ruled_out(log_p: Tensor) -> Tensor:
    """Return where :func:`log_floor` has raised a logarithm: actions of probability 0.

    Args:
        log_p: What :func:`log_floor` returned, any shape.
    """
    return log_p <= _LEAST_LOG_PROB


def categorical_kl(log_p: Tensor, log_q: Tensor, dim: int = -1) -> Tensor:
    r"""Return :math:`\mathrm{KL}(p \| q)` in nats for normalized log-probabilities.

    Args:
        log_p: Normalised log-probabilities, shape ``[*B, A]``.
        log_q: Normalised log-probabilities, shape ``[*B, A]``.
        dim: Where the actions are. Default: ``-1``.

    Returns:
        Divergence with shape ``[*B]``.

    Examples:
        >>> uniform = torch.full((4,), 0.25).log()
        >>> categorical_kl(uniform, uniform)
        tensor(0.)
    """
    return (log_p.exp() * (log_p - log_q)).sum(dim)


def align_temperature(
    log_p: Tensor,
    prior_logits: Tensor,
    valid: Tensor,
    *,
    minimum: float,
    maximum: float,
    iterations: int = 24,
) -> Tensor:
    r"""Find the temperature at which the prior is closest to the policy.

    .. math::
        T^\star = \arg\min_{T \in [T_{\min}, T_{\max}]}
            \mathrm{mean}_i\, \mathrm{KL}(p_i \,\|\, \mathrm{softmax}(\ell_i / T))

    In :math:`x = 1/T` the objective is convex with derivative
    :math:`\mathrm{mean}_i(\mathbb{E}_{q_x}[\ell_i] - \mathbb{E}_{p_i}[\ell_i])`, whose
    single change of sign is bisected. See `On Calibration of Modern Neural Networks
    <https://arxiv.org/abs/1706.04599>`_ for temperature scaling.

    Args:
        log_p: Normalised policy log-probabilities, shape ``[N, A]``.
        prior_logits: Centred advice, shape ``[N, A]``.
        valid: Rows that count, boolean, shape ``[N, 1]``.
        minimum: Lower bound on the temperature.
        maximum: Upper bound on the temperature.
        iterations: Halvings of the bracket. Default: ``24``.

    Returns:
        Scalar temperature. Without a valid row it is meaningless; see
        :class:`~lore_torchrl.modules.TemperatureAligner`, which then keeps its own.
    """
    logits = torch.where(valid, prior_logits, 0.0)
    target = (log_p.exp() * logits).sum()
    # Actions first: there a CPU is several times as fast.
    logits = logits.movedim(-1, 0).contiguous()
    low = log_p.new_tensor(1.0 / maximum)
    high = log_p.new_tensor(1.0 / minimum)
    for _ in range(iterations):
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


def step_multiplier(multiplier: Tensor, violation: Tensor, lr: float, maximum: Tensor) -> Tensor:
    r"""Dual ascent: :math:`\lambda \leftarrow \mathrm{clip}(\lambda + \eta v, 0, \lambda_{\max})`.

    Args:
        multiplier: :math:`\lambda \ge 0`, scalar.
        violation: Constraint value minus its bound, scalar.
        lr: Step size :math:`\eta`.
        maximum: :math:`\lambda_{\max}`.
    """
    return torch.minimum((multiplier + lr * violation).clamp_min(0.0), maximum)


def linear_schedule(step: Tensor, start: Tensor, end: Tensor, num_steps: int) -> Tensor:
    """Interpolate from ``start`` at step 0 to ``end`` at ``num_steps`` and beyond.

    Args:
        step: Number of steps taken, scalar.
        start: Value at step 0.
        end: Value from ``num_steps`` on.
        num_steps: Length; ``0`` means ``end`` from the first step.
    """
    if num_steps <= 0:
        return end
    return start + (end - start) * (step.to(start.dtype) / num_steps).clamp(0.0, 1.0)


def ensemble_variance(members: Tensor) -> Tensor:
    r"""Population variance across the first dimension, :math:`\frac1K \sum_k (x_k - \bar x)^2`.

    Several times as fast on a CPU as :meth:`torch.Tensor.var` over that dimension.

    Args:
        members: One output for each member, shape ``[K, *B]``.

    Returns:
        Variance with shape ``[*B]``.

    Examples:
        >>> ensemble_variance(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        tensor([1., 0.])
    """
    return (members - members.mean(0)).square_().mean(0)
