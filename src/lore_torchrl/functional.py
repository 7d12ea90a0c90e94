"""The arithmetic of LoRe as pure functions over tensors.

Nothing here reads a tensordict, draws a random number, branches on a tensor's value
or waits for the device, so every function may run inside a compiled learner step or a
captured CUDA graph. ``A`` is the number of actions, ``*B`` any batch shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_LARGEST_LOGIT = 1e30
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
    r"""Return :math:`\mathrm{KL}(p \| q)` in nats for normalised log-probabilities.

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


def clean_advice(
    prior_logits: Tensor, confidence: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Make advice safe to compute with: rows that cannot be used become exact zeros.

    A row counts where ``mask`` is set and its logits and confidence are finite (logits up
    to 1e30, which a temperature or a weight cannot carry to infinity). The
    logits are centred, :math:`\ell - \mathrm{mean}_a\,\ell`, and detached; the
    confidence is clipped to ``[0, 1]``.

    Args:
        prior_logits: Advice, shape ``[*B, A]``.
        confidence: Shape ``[*B, 1]``.
        mask: Boolean, shape ``[*B, 1]``.

    Returns:
        Centred logits ``[*B, A]``, weight ``[*B, 1]`` (confidence, zero where the row
        does not count) and the boolean validity ``[*B, 1]``.
    """
    prior_logits = prior_logits.detach().float()
    confidence = confidence.detach().float()
    # Centred first: the mean of finite but enormous logits may not be finite.
    logits = prior_logits - prior_logits.mean(-1, keepdim=True)
    usable = (logits.abs() <= _LARGEST_LOGIT).all(-1, keepdim=True)
    valid = mask & usable & confidence.isfinite()
    logits = torch.where(valid, logits, torch.zeros_like(logits))
    weight = torch.where(valid, confidence.clamp(0.0, 1.0), torch.zeros_like(confidence))
    return logits, weight, valid


def mix_logits(log_p: Tensor, direction: Tensor, beta: Tensor, dim: int = -1) -> Tensor:
    r"""Add advice to a policy: :math:`\log\mathrm{softmax}(\log p + \beta\, d)`.

    Args:
        log_p: Normalised policy log-probabilities, shape ``[*B, A]``.
        direction: Tempered, centred, confidence-weighted advice, shape ``[*B, A]``.
        beta: Weight, broadcastable to ``[*B, 1]``.
        dim: Where the actions are. Default: ``-1``.
    """
    return torch.log_softmax(log_p + beta * direction, dim)


def mix_probs(log_p: Tensor, log_prior: Tensor, gate: Tensor, dim: int = -1) -> Tensor:
    r"""Mix two distributions: :math:`\log\left((1-g)\,p + g\,\rho\right)`.

    Args:
        log_p: Normalised policy log-probabilities, shape ``[*B, A]``.
        log_prior: Normalised prior log-probabilities, shape ``[*B, A]``.
        gate: Weight in ``[0, 1]``, broadcastable to ``[*B, 1]``.
        dim: As in :func:`mix_logits`. Each action is mixed by itself, wherever it is.
    """
    # Where the gate is shut the policy passes through untouched, to the bit.
    mixed = (1.0 - gate) * log_p.exp() + gate * log_prior.exp()
    mixed = mixed.clamp_min(torch.finfo(mixed.dtype).tiny).log()
    return torch.where(gate > 0, mixed, log_p)


def largest_weight(
    divergence: Callable[[Tensor], Tensor],
    weight: Tensor,
    max_kl: float | Tensor,
    *,
    num_points: int = 24,
) -> Tensor:
    r"""Return the largest weight up to ``weight`` at which a divergence keeps to its bound.

    .. math::
        \beta' = \max\{b \le \beta : D(b) \le \epsilon\}

    for a divergence that is zero at zero and grows with the weight. Two rounds of
    candidates, tried side by side, bracket the answer from below: a geometric one down to
    a few ten-thousandths of ``weight`` (advice may be steep), then an even one between its
    neighbours. With the default number of points an answer on the ladder is within 2% of
    the largest weight.

    Args:
        divergence: :math:`D`, from candidates ``[*B, N]`` to nats ``[*B, N]``.
        weight: Wanted weight :math:`\beta`, shape ``[*B, 1]``, not negative.
        max_kl: Bound :math:`\epsilon` in nats, broadcastable to ``[*B, 1]``.
        num_points: Candidates in a round. Default: ``24``.

    Returns:
        Weight with shape ``[*B, 1]``; equal to ``weight``, to the bit, wherever that
        already satisfies the bound.
    """

    def passed(candidates: Tensor) -> Tensor:
        # A prefix, not a count: rounding may let a later candidate slip back under.
        return (divergence(candidates) <= max_kl).long().cumprod(-1).sum(-1, keepdim=True)

    step = torch.arange(num_points, device=weight.device, dtype=weight.dtype)
    # 0, then from about 3e-4 to exactly 1.
    rungs = torch.exp2((step + 1 - num_points) * (12.0 / num_points))
    rungs = torch.cat((rungs.new_zeros(1), rungs))
    found = passed(weight * rungs[1:])
    low = weight * rungs[found]
    width = weight * rungs[(found + 1).clamp_max(num_points)] - low
    share = (step + 1) / num_points
    return low + width * (passed(low + width * share) / num_points)


def project_weight(
    mix: Callable[[Tensor, Tensor, Tensor, int], Tensor],
    log_p: Tensor,
    other: Tensor,
    weight: Tensor,
    max_kl: float | Tensor,
    *,
    num_points: int = 24,
) -> Tensor:
    r"""Return the largest weight whose mixture stays within a KL ball of the policy.

    .. math::
        \beta' = \max\{b \le \beta : \mathrm{KL}(\mathrm{mix}(b) \,\|\, p) \le \epsilon\}

    by :func:`largest_weight`: the divergence grows with the weight for both
    :func:`mix_logits` and :func:`mix_probs`.

    Args:
        mix: :func:`mix_logits` or :func:`mix_probs`.
        log_p: Normalised policy log-probabilities, shape ``[*B, A]``.
        other: Second argument of ``mix``, shape ``[*B, A]``.
        weight: Wanted weight, shape ``[*B, 1]``, not negative.
        max_kl: Radius :math:`\epsilon` in nats, broadcastable to ``[*B, 1]``.
        num_points: Candidates in a round. Default: ``24``.

    Returns:
        Weight with shape ``[*B, 1]``, as :func:`largest_weight` gives it.
    """
    # Actions first: there a CPU is several times as fast.
    log_p = log_p.movedim(-1, 0).contiguous().unsqueeze(-1)
    other = other.movedim(-1, 0).contiguous().unsqueeze(-1)

    def divergence(candidates: Tensor) -> Tensor:
        return categorical_kl(mix(log_p, other, candidates, 0), log_p, 0)

    return largest_weight(divergence, weight, max_kl, num_points=num_points)


def bounded_weight(direction: Tensor, weight: Tensor, max_kl: float | Tensor) -> Tensor:
    r"""Return a weight whose :func:`mix_logits` keeps the KL bound, without a search.

    .. math::
        \beta' = \min\Bigl(\beta,\; \frac{\sqrt{8\,\epsilon}}{\max_a d_a - \min_a d_a}\Bigr)

    Whatever the policy is: along :math:`p_b \propto p\,e^{b d}` the divergence from
    :math:`p` is :math:`\int_0^\beta b\,\mathrm{Var}_{p_b}[d]\,db`, and a variance is at most
    a quarter of the squared range (Popoviciu). :func:`project_weight` stays closer to the
    bound and costs some twenty times as much.

    Args:
        direction: Advice, shape ``[*B, A]``.
        weight: Wanted weight :math:`\beta`, shape ``[*B, 1]``, not negative.
        max_kl: Radius :math:`\epsilon` in nats, broadcastable to ``[*B, 1]``.

    Returns:
        Weight with shape ``[*B, 1]``.

    Examples:
        >>> bounded_weight(torch.tensor([[0.0, 4.0]]), torch.ones(1, 1), 0.5)
        tensor([[0.5000]])
    """
    low, high = direction.aminmax(dim=-1, keepdim=True)
    # An ulp inside, since the mixture rounds.
    largest = (8.0 * max_kl) ** 0.5 * (1.0 - 1e-6) / (high - low).clamp_min(1e-9)
    return torch.minimum(weight, largest)


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
        \mathrm{Var}[V] = \sum_k q_k\, b_k^2 - \bigl(\sum_k q_k\, b_k\bigr)^2

    Args:
        value_logits: Categorical value logits, shape ``[*B, K]``.
        bins: Support in symlog space, shape ``[K]``.

    Returns:
        Variance with shape ``[*B, 1]``.
    """
    probs = torch.softmax(value_logits.float(), -1)
    # One product gives both moments; in bfloat16, as under autocast, their difference is lost.
    with torch.autocast(probs.device.type, enabled=False):
        moments = probs @ torch.stack((bins, bins.square()), -1)
    return (moments[..., 1:] - moments[..., :1].square()).clamp_min(0.0)


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


def max_entropy(num_actions: int) -> float:
    """Entropy of the uniform distribution over ``num_actions`` actions, in nats."""
    return math.log(num_actions)


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
