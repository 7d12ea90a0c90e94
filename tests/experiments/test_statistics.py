from __future__ import annotations

import numpy as np
import pytest

from lore_torchrl.experiments import (
    bootstrap,
    interquartile_mean,
    normalized_auc,
    performance_profile,
    probability_of_improvement,
)


def mean(values):
    return values.mean(-1)


def test_interquartile_mean_of_a_multiple_of_four_is_the_trimmed_mean():
    values = np.random.default_rng(0).normal(size=(3, 20))
    middle = np.sort(values, -1)[:, 5:15].mean(-1)
    assert np.allclose(interquartile_mean(values), middle)


def test_interquartile_mean_weighs_the_edges():
    # Of five values the second and fourth count three quarters each.
    assert interquartile_mean(np.array([9.0, 1.0, 2.0, 3.0, -5.0])) == pytest.approx(2.0)
    assert interquartile_mean(np.array([0.0, 0.0, 2.0, 4.0, 9.0])) == pytest.approx(5 / 2.5)


def test_the_normalized_auc_is_the_trapezoidal_rule_from_step_0():
    steps = np.array([100, 200, 400])
    assert normalized_auc(steps, np.array([0.25, 0.5, 1.0])) == pytest.approx(
        (0.25 * 100 + 0.375 * 100 + 0.75 * 200) / 400
    )
    assert np.allclose(normalized_auc(steps, np.ones((2, 3))), 1.0)


def test_the_interval_of_a_mean_is_that_of_the_normal():
    values = np.random.default_rng(1).normal(size=200)
    value, low, high = bootstrap(mean, values)
    error = values.std(ddof=1) / np.sqrt(200)
    assert value == values.mean()
    assert low == pytest.approx(value - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(value + 1.96 * error, abs=0.1 * error)


def test_equal_seeds_have_no_interval():
    assert bootstrap(interquartile_mean, np.full(5, 0.7)) == pytest.approx((0.7, 0.7, 0.7))


def test_the_interval_of_a_difference_is_that_of_the_normal():
    generator = np.random.default_rng(3)
    above, below = generator.normal(-1, 2, 400), generator.normal(-3, 1, 100)
    difference, low, high = bootstrap(lambda x, y: mean(x) - mean(y), above, below)
    assert difference == pytest.approx(above.mean() - below.mean())
    spread = 1.96 * np.sqrt(above.var() / 400 + below.var() / 100)
    assert (difference - low, high - difference) == pytest.approx((spread, spread), rel=0.05)


def test_each_task_is_resampled_on_its_own():
    # Unstratified, some draws would hold one task alone and reach 0 and 1.
    def pooled(*tasks):
        return mean(np.concatenate(tasks, -1))

    assert bootstrap(pooled, np.zeros(5), np.ones(5)) == (0.5, 0.5, 0.5)


def test_the_probability_of_improvement_counts_pairs():
    above, below = np.array([1.0, 3.0, 3.0]), np.array([2.0, 3.0])
    # Pairs won: 1 never; 3 wins once and ties once, twice over.
    assert probability_of_improvement(above, below) == pytest.approx((0 + 1.5 + 1.5) / 6)
    assert probability_of_improvement(below, above) == pytest.approx(1 - 0.5)
    # The mean over two tasks.
    both = probability_of_improvement(above, below, above, above - 9)
    assert both == pytest.approx(0.75)


def test_the_profile_is_one_minus_the_distribution_function():
    scores = np.random.default_rng(2).uniform(size=4_000)
    taus = np.array([0.0, 0.25, 0.5, 1.0])
    fraction, low, high = bootstrap(lambda x: performance_profile(taus, x), scores, draws=500)
    np.testing.assert_allclose(fraction, 1 - taus, atol=0.02)
    assert (low <= fraction).all() and (fraction <= high).all()
    # Pointwise, the fraction of N runs is binomial.
    width = 1.96 * np.sqrt(0.25 * 0.75 / 4_000)
    assert (high - low)[1] / 2 == pytest.approx(width, rel=0.2)
