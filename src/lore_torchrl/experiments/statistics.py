"""Statistics over seeds, as `Agarwal et al. (2021) <https://arxiv.org/abs/2108.13264>`_ advise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean of the middle half along the last axis, with fractional edges.

    Args:
        values: Scores, ``[..., N]``.

    Examples:
        >>> float(interquartile_mean(np.array([0.0, 1.0, 2.0, 100.0])))
        1.5
    """
    values = np.sort(values, axis=-1)
    edges = np.arange(values.shape[-1] + 1) / values.shape[-1]
    weight = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0, None)
    return (values * weight).sum(-1) / weight.sum()


def bootstrap_interval(
    values: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray] = interquartile_mean,
    *,
    draws: int = 10_000,
    level: float = 0.95,
) -> tuple[float, float]:
    """Return the percentile-bootstrap interval of a statistic over seeds.

    Args:
        values: One score a seed, ``[N]``.
        statistic: From ``[draws, N]`` to ``[draws]``. Default: :func:`interquartile_mean`.

    Keyword Args:
        draws: Resamplings. Default: ``10_000``.
        level: Share of them inside. Default: ``0.95``.

    Examples:
        >>> bootstrap_interval(np.array([0.5, 0.5]))
        (0.5, 0.5)
    """
    generator = np.random.default_rng(0)
    resampled = generator.choice(values, (draws, len(values)))
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(statistic(resampled), [tail, 1.0 - tail])
    return float(low), float(high)


def format_score(values: np.ndarray) -> str:
    """Return interquartile mean and 95% interval of one score a seed, for a table.

    Args:
        values: Scores, ``[N]``.

    Examples:
        >>> format_score(np.array([0.5, 0.5]))
        '0.50 [0.50, 0.50]'
    """
    low, high = bootstrap_interval(values)
    return f"{interquartile_mean(values):.2f} [{low:.2f}, {high:.2f}]"


def ratio_interval(
    above: np.ndarray, below: np.ndarray, *, draws: int = 10_000, level: float = 0.95
) -> tuple[float, float, float]:
    """Return the ratio of two methods' means over seeds, with its bootstrap interval.

    The seeds of both are drawn independently.

    Args:
        above: One score a seed of the first method, ``[N]``.
        below: One score a seed of the second, ``[M]``.

    Keyword Args:
        draws: Resamplings. Default: ``10_000``.
        level: Share of them inside. Default: ``0.95``.

    Returns:
        Ratio, lower and upper end.

    Examples:
        >>> ratio_interval(np.array([1.0, 1.0]), np.array([2.0, 2.0]))
        (0.5, 0.5, 0.5)
    """
    first, second = _resampled_means(above, below, draws)
    ratio = above.mean() / max(below.mean(), 1e-12)
    return float(ratio), *_middle(first / np.maximum(second, 1e-12), level)


def difference_interval(
    above: np.ndarray, below: np.ndarray, *, draws: int = 10_000, level: float = 0.95
) -> tuple[float, float, float]:
    """Return the difference of two methods' means over seeds, with its bootstrap interval.

    For scores that may be negative, of which no ratio says anything. Arguments and what is
    returned are those of :func:`ratio_interval`.

    Examples:
        >>> difference_interval(np.array([1.0, 1.0]), np.array([-2.0, -2.0]))
        (3.0, 3.0, 3.0)
    """
    first, second = _resampled_means(above, below, draws)
    return float(above.mean() - below.mean()), *_middle(first - second, level)


def _middle(draws: np.ndarray, level: float) -> tuple[float, float]:
    """Return the ends of the interval that holds a share ``level`` of the draws."""
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(draws, [tail, 1.0 - tail])
    return float(low), float(high)


def _resampled_means(
    above: np.ndarray, below: np.ndarray, draws: int
) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    first = generator.choice(above, (draws, len(above))).mean(-1)
    return first, generator.choice(below, (draws, len(below))).mean(-1)


def paired_ratios(
    measured: Mapping[str, Sequence[float]], baseline: str
) -> dict[str, dict[str, float]]:
    """Return each measurement's median and its median ratio to a baseline, round by round.

    Args:
        measured: One number a round for each contestant, the same rounds for all.
        baseline: The contestant that the others are divided by.

    Returns:
        ``median``, ``ratio``, ``ratio_low`` and ``ratio_high`` by contestant; the interval
        is a 95% bootstrap over rounds.

    Examples:
        >>> paired_ratios({"a": [2.0, 4.0], "b": [3.0, 6.0]}, "a")["b"]["ratio"]
        1.5
    """
    results = {}
    for name, values in measured.items():
        ratios = np.array(values) / np.array(measured[baseline])
        low, high = bootstrap_interval(ratios, lambda draws: np.median(draws, axis=1))
        results[name] = {
            "median": float(np.median(values)),
            "ratio": float(np.median(ratios)),
            "ratio_low": low,
            "ratio_high": high,
        }
    return results


def area_under_curve(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the mean height of learning curves by the trapezoidal rule, from step 0 on.

    Before the first evaluation a curve is as high as there.

    Args:
        steps: Steps of the evaluations, ascending, ``[N]``.
        values: Scores, ``[..., N]``.

    Examples:
        >>> float(area_under_curve(np.array([1, 2, 3]), np.array([0.0, 0.5, 1.0])))
        0.3333333333333333
    """
    steps = np.concatenate(([0.0], np.asarray(steps, dtype=float)))
    values = np.concatenate((values[..., :1], values), axis=-1)
    return np.trapezoid(values, steps, axis=-1) / steps[-1]


def stratified_interval(
    scores: Sequence[np.ndarray],
    statistic: Callable[[np.ndarray], np.ndarray] = interquartile_mean,
    *,
    draws: int = 10_000,
    level: float = 0.95,
) -> tuple[float, float, float]:
    """Return a statistic of all runs on several tasks, with its stratified-bootstrap interval.

    Seeds are drawn anew within each task, so that every task keeps its weight.

    Args:
        scores: One array of scores a task, ``[N_t]`` each.
        statistic: From ``[..., N]`` to ``[...]``. Default: :func:`interquartile_mean`.

    Keyword Args:
        draws: Resamplings. Default: ``10_000``.
        level: Share of them inside. Default: ``0.95``.

    Returns:
        Statistic, lower and upper end.

    Examples:
        >>> stratified_interval([np.array([0.0, 0.0]), np.array([1.0, 1.0])])
        (0.5, 0.5, 0.5)
    """
    generator = np.random.default_rng(0)
    drawn = [generator.choice(task, (draws, len(task))) for task in scores]
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(statistic(np.concatenate(drawn, -1)), [tail, 1.0 - tail])
    return float(statistic(np.concatenate(scores))), float(low), float(high)


def probability_of_improvement(
    above: Sequence[np.ndarray],
    below: Sequence[np.ndarray],
    *,
    draws: int = 2_000,
    level: float = 0.95,
) -> tuple[float, float, float]:
    r"""Return the probability that a run of one method scores above one of another.

    .. math::
        \frac{1}{M} \sum_{m=1}^{M} \frac{1}{N K} \sum_{i,j}
            [x_{m,i} > y_{m,j}] + \tfrac12 [x_{m,i} = y_{m,j}]

    the mean over tasks of the Mann-Whitney statistic.

    Args:
        above: Scores of the first method, one array ``[N_t]`` a task.
        below: Scores of the second, one array ``[K_t]`` a task.

    Keyword Args:
        draws: Resamplings. Default: ``2_000``.
        level: Share of them inside. Default: ``0.95``.

    Returns:
        Probability, lower and upper end.

    Examples:
        >>> probability_of_improvement([np.array([1.0, 2.0])], [np.array([0.0, 1.0])])[0]
        0.875
    """
    generator = np.random.default_rng(0)

    def wins(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        x, y = x[..., :, None], y[..., None, :]
        return ((x > y) + 0.5 * (x == y)).mean((-2, -1))

    pairs = list(zip(above, below, strict=True))
    value = np.mean([wins(x, y) for x, y in pairs])
    drawn = np.mean(
        [
            wins(generator.choice(x, (draws, len(x))), generator.choice(y, (draws, len(y))))
            for x, y in pairs
        ],
        axis=0,
    )
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(drawn, [tail, 1.0 - tail])
    return float(value), float(low), float(high)


def performance_profile(
    scores: Sequence[np.ndarray], thresholds: np.ndarray, *, draws: int = 2_000, level: float = 0.95
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the share of runs that score above each threshold, all tasks weighing the same.

    Args:
        scores: One array of scores a task, ``[N_t]`` each.
        thresholds: Ascending, ``[T]``.

    Keyword Args:
        draws: Resamplings, stratified by task. Default: ``2_000``.
        level: Share of them inside the pointwise interval. Default: ``0.95``.

    Returns:
        Shares, lower and upper ends, ``[T]`` each.

    Examples:
        >>> performance_profile([np.array([0.2, 0.8])], np.array([0.0, 0.5, 0.9]))[0].tolist()
        [1.0, 0.5, 0.0]
    """
    generator = np.random.default_rng(0)

    def shares(task: np.ndarray) -> np.ndarray:
        return (task[..., None] > thresholds).mean(-2)

    value = np.mean([shares(task) for task in scores], axis=0)
    drawn = [shares(generator.choice(task, (draws, len(task)))) for task in scores]
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(np.mean(drawn, axis=0), [tail, 1.0 - tail], axis=0)
    return value, low, high
