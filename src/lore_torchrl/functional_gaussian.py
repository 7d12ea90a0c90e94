"""The arithmetic of advice on continuous actions, as pure functions over tensors.

As in :mod:`lore_torchrl.functional`, nothing here draws, branches on a value or waits for
the device. ``A`` is the number of action dimensions, ``K`` of anchor actions, ``*B`` any
batch shape. All Gaussians are diagonal.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def anchor_moments(probs: Tensor, anchors: Tensor, min_scale: float) -> tuple[Tensor, Tensor]:
    r"""Match a Gaussian to a distribution over anchor actions, by its first two moments.

    .. math::
        \mu = \sum_k p_k\, a_k, \qquad
        \sigma^2 = \sum_k p_k\, (a_k - \mu)^2 + \sigma_{\min}^2

    Args:
        probs: Probabilities of the anchors, shape ``[*B, K]``.
        anchors: The anchors' actions, shape ``[K, A]``.
        min_scale: :math:`\sigma_{\min}`, what remains when all weight is on one anchor.

    Returns:
        Location and scale, each ``[*B, A]``.

    Examples:
        >>> loc, scale = anchor_moments(
        ...     torch.tensor([0.5, 0.5]), torch.tensor([[-1.0], [1.0]]), 0.0
        ... )
        >>> loc.item(), scale.item()
        (0.0, 1.0)
    """
    with torch.autocast(probs.device.type, enabled=False):
        loc = probs @ anchors
    # Around the mean, not as a difference of moments, which rounding may turn negative.
    offsets = anchors - loc.unsqueeze(-2)
    variance = (probs.unsqueeze(-1) * offsets.square()).sum(-2)
    return loc, (variance + min_scale**2).sqrt()


def gaussian_kl(loc: Tensor, scale: Tensor, other_loc: Tensor, other_scale: Tensor) -> Tensor:
    r"""Return :math:`\mathrm{KL}(\mathcal N \| \mathcal N')` of diagonal Gaussians in nats.

    .. math::
        \sum_i \ln\frac{\sigma'_i}{\sigma_i}
            + \frac{\sigma_i^2 + (\mu_i - \mu'_i)^2}{2 \sigma_i'^2} - \frac12

    A bijection of the action, such as the tanh of a bounded policy, leaves it as it is.

    Args:
        loc: :math:`\mu`, shape ``[*B, A]``.
        scale: :math:`\sigma`, shape ``[*B, A]``.
        other_loc: :math:`\mu'`, shape ``[*B, A]``.
        other_scale: :math:`\sigma'`, shape ``[*B, A]``.

    Returns:
        Divergence with shape ``[*B]``.

    Examples:
        >>> one = torch.ones(1)
        >>> gaussian_kl(0 * one, one, 2 * one, one)
        tensor(2.)
    """
    ratio = scale / other_scale
    distance = (loc - other_loc) / other_scale
    return (0.5 * (ratio.square() + distance.square() - 1.0) - ratio.log()).sum(-1)


def mix_gaussians(
    loc: Tensor, scale: Tensor, prior_loc: Tensor, prior_scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Return the precision-weighted product :math:`\mathcal N \cdot \mathcal N_\rho^w`.

    .. math::
        \sigma_{mix}^{-2} = \sigma^{-2} + w\, \sigma_\rho^{-2}, \qquad
        \mu_{mix} = \sigma_{mix}^2\,(\sigma^{-2} \mu + w\, \sigma_\rho^{-2} \mu_\rho)

    Args:
        loc: :math:`\mu` of the policy, shape ``[*B, A]``.
        scale: :math:`\sigma` of the policy, shape ``[*B, A]``.
        prior_loc: :math:`\mu_\rho`, shape ``[*B, A]``.
        prior_scale: :math:`\sigma_\rho`, shape ``[*B, A]``.
        weight: :math:`w \ge 0`, broadcastable to ``[*B, 1]``; zero gives the policy, to
            the bit.

    Returns:
        Location and scale of the product, each ``[*B, A]``.
    """
    # In units of the policy's precision, so that a narrow policy does not overflow.
    added = weight * (scale / prior_scale).square()
    share = added / (1.0 + added)
    mixed = loc + share * (prior_loc - loc), scale * torch.rsqrt(1.0 + added)
    return torch.where(weight > 0, mixed[0], loc), torch.where(weight > 0, mixed[1], scale)


def bounded_gaussian_weight(
    loc: Tensor,
    scale: Tensor,
    prior_loc: Tensor,
    prior_scale: Tensor,
    weight: Tensor,
    max_kl: float | Tensor,
) -> Tensor:
    r"""Return a weight whose :func:`mix_gaussians` keeps a KL bound.

    With :math:`r_i = \sigma_i^2 / \sigma_{\rho,i}^2`,
    :math:`d_i^2 = (\mu_{\rho,i} - \mu_i)^2 / \sigma_i^2` and :math:`c_i = \frac12 + d_i^2`,

    .. math::
        w' &= \min\Bigl(w,\; \min_i \frac{\max(x_i, y_i)}{r_i}\Bigr), \qquad
        \epsilon_i = \epsilon\, \frac{c_i r_i^2}{\sum_j c_j r_j^2} \\
        x_i &= \frac{\epsilon_i + \sqrt{\epsilon_i^2 + 2 \epsilon_i c_i}}{c_i}, \qquad
        y_i = \exp\bigl(2 \epsilon_i - \max(0, d_i^2 - 1)\bigr) - 1

    Each dimension gets the share :math:`\epsilon_i` of the bound that it would use up for a
    small weight, and keeps to it: for :math:`x = w r_i` and :math:`s = x / (1 + x)` its
    divergence :math:`D_i` from the policy obeys

    .. math::
        2 D_i = \ln(1 + x) - s + d_i^2 s^2 \le
        \min\Bigl(\frac{c_i x^2}{1 + x},\; \ln(1 + x) + \max(0, d_i^2 - 1)\Bigr)

    since :math:`\ln(1 + x) - s = \sum_{n \ge 2} s^n / n \le s^2 / (2 - 2 s)`, and
    :math:`d_i^2 s^2 - s` is convex in :math:`s`. In one dimension more than a third of
    :math:`\epsilon` is used.

    Args:
        loc: As in :func:`mix_gaussians`.
        scale: As in :func:`mix_gaussians`.
        prior_loc: As in :func:`mix_gaussians`.
        prior_scale: As in :func:`mix_gaussians`.
        weight: Wanted weight :math:`w`, shape ``[*B, 1]``, not negative.
        max_kl: Radius :math:`\epsilon` in nats, finite.

    Returns:
        Weight with shape ``[*B, 1]``.

    Examples:
        >>> one = torch.ones(1, 1)
        >>> bounded_gaussian_weight(0 * one, one, one, one, 9 * one, 0.5)
        tensor([[1.7183]])
    """
    distance = ((prior_loc - loc) / scale).square()
    # A larger ratio only makes the weight smaller.
    ratio = (scale / prior_scale).square().clamp_min(1e-12)
    curve = 0.5 + distance
    used = curve * ratio.square()
    share = max_kl * used / used.sum(-1, keepdim=True)
    near = (share + (share * (share + 2.0 * curve)).sqrt()) / curve
    far = (2.0 * share - (distance - 1.0).clamp_min(0.0)).expm1()
    largest = (torch.maximum(near, far) / ratio).amin(-1, keepdim=True)
    # A few ulps inside, since the mixture rounds.
    return torch.minimum(weight, largest * (1.0 - 1e-5))


def squash(value: Tensor, low: Tensor, high: Tensor) -> Tensor:
    r"""Return the bounded action :math:`\frac{h + l}{2} + \frac{h - l}{2} \tanh(x)`.

    Args:
        value: :math:`x`, shape ``[*B, A]``.
        low: Lowest action :math:`l`, shape ``[A]``.
        high: Highest action :math:`h`, shape ``[A]``.
    """
    return (high + low) / 2 + (high - low) / 2 * value.tanh()


def gaussian_entropy(scale: Tensor) -> Tensor:
    r"""Differential entropy :math:`\sum_i \ln \sigma_i + \frac12 \ln 2 \pi e`, nats, ``[*B]``.

    Args:
        scale: Shape ``[*B, A]``.
    """
    return (scale.log() + 0.5 * math.log(2.0 * math.pi * math.e)).sum(-1)


def scale_entropy(scale: Tensor, low: float, high: float) -> Tensor:
    r"""Entropy of a Gaussian on a scale from 0, at its least, to 1, at its greatest.

    .. math::
        \hat H = \frac1A \sum_i \mathrm{clip}\Bigl(
            \frac{\ln \sigma_i - \ln \sigma_{\min}}
                 {\ln \sigma_{\max} - \ln \sigma_{\min}}, 0, 1\Bigr)

    Args:
        scale: Shape ``[*B, A]``.
        low: :math:`\sigma_{\min}`.
        high: :math:`\sigma_{\max}`.

    Returns:
        Shape ``[*B, 1]``.

    Examples:
        >>> scale_entropy(torch.tensor([[0.1], [1.0], [9.0]]), 0.1, 1.0).flatten().tolist()
        [0.0, 1.0, 1.0]
    """
    place = (scale.log() - math.log(low)) / (math.log(high) - math.log(low))
    return place.clamp(0.0, 1.0).mean(-1, keepdim=True)
