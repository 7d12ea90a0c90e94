"""How much the values of a program tell about returns."""

from __future__ import annotations

import numpy as np

_RIDGE = 1e-2


def discounted_returns(rewards: np.ndarray, gamma: float) -> np.ndarray:
    r"""Return :math:`G_t = r_t + \gamma G_{t+1}` of the rewards ``[T]`` of one episode."""
    returns, following = np.zeros(len(rewards)), 0.0
    for step in range(len(rewards) - 1, -1, -1):
        following = returns[step] = rewards[step] + gamma * following
    return returns


def score(values: np.ndarray, returns: np.ndarray) -> float | None:
    r"""Return what values tell of returns ``[N]``.

    Of progress ``[N]``, which should rise with them, the
    `rank correlation <https://doi.org/10.2307/1412159>`_, from -1 to 1. Of features ``[N, K]`` the
    best absolute one of a column or, if that is more, the :math:`R^2` of a ridge fit on every other
    sample, measured on the rest, from 0 to 1.

    Returns:
        ``None`` where the returns do not vary or there are fewer than 8 samples.
    """
    values = np.asarray(values, dtype=np.float64)
    if len(returns) < 8 or np.ptp(returns) == 0:
        return None
    if values.ndim == 1:
        return rank_correlation(values, returns)
    best = max(abs(rank_correlation(column, returns)) for column in values.T)
    return best if values.shape[1] == 1 else max(best, ridge_r2(values, returns))


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return Spearman's correlation, ties sharing their mean rank; 0 where one is constant."""
    ranks = []
    for values in (first, second):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse.reshape(-1)])
    if min(np.ptp(rank) for rank in ranks) == 0:
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])


def ridge_r2(values: np.ndarray, returns: np.ndarray) -> float:
    """Return the held-out share of variance that a ridge fit explains, at least 0."""
    scale = values.std(0)
    x = (values - values.mean(0)) / np.where(scale > 0, scale, 1.0)
    x = np.column_stack((x, np.ones(len(x))))
    fitted, held = slice(0, None, 2), slice(1, None, 2)
    penalty = _RIDGE * len(x[fitted]) * np.eye(x.shape[1])
    penalty[-1, -1] = 0.0
    weights = np.linalg.solve(x[fitted].T @ x[fitted] + penalty, x[fitted].T @ returns[fitted])
    spread = np.square(returns[held] - returns[held].mean()).sum()
    residual = np.square(returns[held] - x[held] @ weights).sum()
    return float(max(0.0, 1.0 - residual / spread)) if spread else 0.0
