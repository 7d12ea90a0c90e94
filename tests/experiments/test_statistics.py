from __future__ import annotations

import numpy as np
import pytest

from lore_torchrl.experiments import (
    area_under_curve,
    bootstrap_interval,
    difference_interval,
    interquartile_mean,
    performance_profile,
    probability_of_improvement,
    ratio_interval,
    stratified_interval,
)


def test_interquartile_mean_of_a_multiple_of_four_is_the_trimmed_mean():
    values = np.random.default_rng(0).normal(size=(3, 20))
    middle = np.sort(values, -1)[:, 5:15].mean(-1)
    assert np.allclose(interquartile_mean(values), middle)


def test_interquartile_mean_weighs_the_edges():
    # Of five values the second and fourth count three quarters each.
    assert interquartile_mean(np.array([9.0, 1.0, 2.0, 3.0, -5.0])) == pytest.approx(2.0)
    assert interquartile_mean(np.array([0.0, 0.0, 2.0, 4.0, 9.0])) == pytest.approx(5 / 2.5)


def test_the_interval_of_a_mean_is_that_of_the_normal():
    values = np.random.default_rng(1).normal(size=200)
    low, high = bootstrap_interval(values, lambda drawn: drawn.mean(-1))
    error = values.std(ddof=1) / np.sqrt(200)
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error)


def test_equal_seeds_have_no_interval():
    assert bootstrap_interval(np.full(5, 0.7)) == (0.7, 0.7)


def test_a_ratio_lies_in_its_interval():
    generator = np.random.default_rng(2)
    above, below = generator.normal(2, 0.1, 50), generator.normal(1, 0.1, 50)
    ratio, low, high = ratio_interval(above, below)
    assert low < ratio < high and ratio == pytest.approx(2, abs=0.1)
    assert high - low < 0.2


def test_the_interval_of_a_difference_is_that_of_the_normal():
    generator = np.random.default_rng(3)
    above, below = generator.normal(-1, 2, 400), generator.normal(-3, 1, 100)
    difference, low, high = difference_interval(above, below)
    assert difference == pytest.approx(above.mean() - below.mean())
    spread = 1.96 * np.sqrt(above.var() / 400 + below.var() / 100)
    assert (difference - low, high - difference) == pytest.approx((spread, spread), rel=0.05)


def test_area_of_a_straight_line():
    steps = np.array([100, 200, 400])
    assert area_under_curve(steps, np.array([0.25, 0.5, 1.0])) == pytest.approx(
        (0.25 * 100 + 0.375 * 100 + 0.75 * 200) / 400
    )
    assert np.allclose(area_under_curve(steps, np.ones((2, 3))), 1.0)


def test_the_stratified_interval_keeps_the_weight_of_each_task():
    # Unstratified, some draws would hold one task alone and reach 0 and 1.
    value, low, high = stratified_interval(
        [np.zeros(5), np.ones(5)], lambda scores: scores.mean(-1)
    )
    assert (value, low, high) == (0.5, 0.5, 0.5)


def test_the_stratified_interval_of_a_mean_is_that_of_the_normal():
    generator = np.random.default_rng(1)
    tasks = [generator.normal(mean, 1.0, 400) for mean in (0.0, 3.0)]
    value, low, high = stratified_interval(tasks, lambda scores: scores.mean(-1))
    spread = np.sqrt(np.mean([task.var() for task in tasks]) / 800)
    assert value == pytest.approx(np.mean(tasks))
    assert (high - low) / 2 == pytest.approx(1.96 * spread, rel=0.05)


def test_the_probability_of_improvement_counts_pairs():
    above, below = np.array([1.0, 3.0, 3.0]), np.array([2.0, 3.0])
    # Pairs won: 1 never; 3 wins once and ties once, twice over.
    assert probability_of_improvement([above], [below])[0] == pytest.approx((0 + 1.5 + 1.5) / 6)
    assert probability_of_improvement([below], [above])[0] == pytest.approx(1 - 0.5)
    assert probability_of_improvement([above, above], [below, above - 9])[0] == pytest.approx(0.75)


def test_the_profile_is_one_minus_the_distribution_function():
    scores = np.random.default_rng(2).uniform(size=4_000)
    taus = np.array([0.0, 0.25, 0.5, 1.0])
    share, low, high = performance_profile([scores], taus)
    np.testing.assert_allclose(share, 1 - taus, atol=0.02)
    assert (low <= share).all() and (share <= high).all()
    # Pointwise, the share of N runs is binomial.
    width = 1.96 * np.sqrt(0.25 * 0.75 / 4_000)
    assert (high - low)[1] / 2 == pytest.approx(width, rel=0.15)
