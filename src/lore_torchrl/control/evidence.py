"""Whether advice pays: how sure that is, and how long to go on trying where nothing tells."""

from __future__ import annotations

import torch
from torch import Tensor

# Where nearly all episodes succeed, or fail, a small drift must not look like proof.
_LEAST_VARIANCE = 0.1


def uplift_evidence(
    uplift_sum: Tensor,
    uplift_count: Tensor,
    advised_mean: Tensor,
    baseline: Tensor,
    baseline_count: Tensor,
) -> Tensor:
    r"""Approximate the probability that advised episodes return more than unadvised ones.

    .. math::
        e = \Phi\Bigl(\frac{\bar d}{\sqrt{v_1 + v_0}}\Bigr), \qquad
        v_1 = \frac{\max(m (1 - m), 0.1)}{3 + n_1}, \quad
        v_0 = \frac{\max(b (1 - b), 0.1)}{3 + n_0}

    with :math:`\bar d` the mean of the differences and of two of zero, so that it is one half
    without data. All returns lie in [0, 1].

    Args:
        uplift_sum: Sum of the advised episodes' differences to :math:`b`, decayed.
        uplift_count: :math:`n_1`, their number, decayed.
        advised_mean: :math:`m`, mean return of advised episodes.
        baseline: :math:`b`, what an unadvised episode returns now.
        baseline_count: :math:`n_0`, the number of episodes it is known from, decayed.
    """
    uplift = uplift_sum / (2.0 + uplift_count)
    variance = _variance(advised_mean) / (3.0 + uplift_count)
    variance = variance + _variance(baseline) / (3.0 + baseline_count)
    return torch.special.ndtr(uplift / variance.sqrt())


def barren_credit(barren: Tensor, hit_rate: float, least: float) -> Tensor:
    r"""Return what is left of the wish to try advice that has not paid.

    .. math::
        c = \max\Bigl(c_{\min},\; \frac{2 (1 - h)^u}{1 + (1 - h)^u}\Bigr)

    Twice the posterior probability, at even odds, of advice that makes an episode return more
    at a rate of :math:`h`, against advice that never does.

    Args:
        barren: :math:`u`, advised episodes since one last returned more.
        hit_rate: :math:`h`, in ``[0, 1)``.
        least: :math:`c_{\min}`.
    """
    odds = (1.0 - hit_rate) ** barren
    return (2.0 * odds / (1.0 + odds)).clamp_min(least)


def forgetting(episodes: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    r"""Return what decayed sums weigh each new episode with, and are multiplied by first.

    :math:`\gamma^{a}` with :math:`a` the number of episodes that ended after it, and
    :math:`\gamma^n` with :math:`n` that of all: as if they had come one by one.

    Args:
        episodes: 1 where a row is an episode, else 0, ``[N]``, in order of time.
        decay: :math:`\gamma`.
    """
    later = episodes.flip(0).cumsum(0).flip(0) - episodes
    return episodes * decay**later, decay ** episodes.sum()


def _variance(mean: Tensor) -> Tensor:
    """Return the largest variance of values in [0, 1] with this mean, floored."""
    return (mean * (1.0 - mean)).clamp_min(_LEAST_VARIANCE)
