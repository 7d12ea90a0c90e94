"""Statistics over seeds, after `Agarwal et al. (2021) <https://arxiv.org/abs/2108.13264>`_."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean of the middle half, with fractional edges: ``[..., N]`` to ``[...]``."""
    values = np.sort(values, axis=-1)
    edges = np.arange(values.shape[-1] + 1) / values.shape[-1]
    weight = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0, None)
    return (values * weight).sum(-1) / weight.sum()


def normalized_auc(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    r"""Return the area under learning curves, divided by the last step: ``[..., N]`` to ``[...]``.

    .. math::
        \frac{1}{t_N} \Bigl( t_1 y_1 + \sum_{i=2}^{N} (t_i - t_{i-1}) \frac{y_i + y_{i-1}}{2} \Bigr)

    the trapezoidal rule from step 0 on, with the first score extrapolated back to it as a
    constant. It has the unit of the score.

    Args:
        steps: Steps :math:`t` of the evaluations, ascending, ``[N]``.
        values: Scores :math:`y`, ``[..., N]``.
    """
    steps = np.concatenate(([0.0], np.asarray(steps, dtype=float)))
    values = np.concatenate((values[..., :1], values), axis=-1)
    return np.trapezoid(values, steps, axis=-1) / steps[-1]


def bootstrap(
    statistic: Callable[..., np.ndarray], *samples: np.ndarray, draws: int = 10_000
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a statistic and the ends of its 95% stratified percentile-bootstrap interval.

    Each sample, such as the seeds of one method on one task, is resampled on its own.

    Args:
        statistic: Takes the samples, ``[..., N]`` each, and returns ``[...]`` or, with one
            value for each of ``T`` thresholds, ``[..., T]``.
        samples: ``[N]`` each, of any lengths.

    Keyword Args:
        draws: Resamplings. Default: ``10_000``.
    """
    generator = np.random.default_rng(0)
    resampled = statistic(*(generator.choice(x, (draws, len(x))) for x in samples))
    low, high = np.quantile(resampled, [0.025, 0.975], axis=0)
    return statistic(*samples), low, high


def probability_of_improvement(*pairs: np.ndarray) -> np.ndarray:
    r"""Return the probability that a run of one method scores above one of another, ``[...]``.

    .. math::
        \frac{1}{M} \sum_{m=1}^{M} \frac{1}{N K} \sum_{i,j}
            [x_{m,i} > y_{m,j}] + \tfrac12 [x_{m,i} = y_{m,j}]

    the mean over tasks of the Mann-Whitney statistic.

    Args:
        pairs: For each task the scores of the first method, ``[..., N_m]``, and those of the
            second, ``[..., K_m]``: :math:`x_1, y_1, x_2, y_2, \ldots`
    """
    wins = []
    for x, y in zip(pairs[::2], pairs[1::2], strict=True):
        x, y = x[..., :, None], y[..., None, :]
        wins.append(((x > y) + 0.5 * (x == y)).mean((-2, -1)))
    return np.mean(wins, axis=0)


def performance_profile(thresholds: np.ndarray, *tasks: np.ndarray) -> np.ndarray:
    """Return the fraction of runs above each threshold, ``[..., T]``; tasks weigh the same.

    Args:
        thresholds: Ascending, ``[T]``.
        tasks: Scores of a method on each task, ``[..., N_t]``.
    """
    return np.mean([(task[..., None] > thresholds).mean(-2) for task in tasks], axis=0)
