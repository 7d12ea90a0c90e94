from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.distributions import Independent, Normal, kl_divergence

from lore_torchrl.policies.gaussian import (
    anchor_moments,
    bounded_gaussian_weight,
    gaussian_entropy,
    gaussian_kl,
    mix_gaussians,
    scale_entropy,
)


def gaussian(*shape):
    return torch.randn(*shape), torch.rand(*shape) + 0.1


def test_moments_are_those_of_draws():
    probs, anchors = torch.softmax(torch.randn(3, 5), -1), torch.randn(5, 2)
    loc, scale = anchor_moments(probs, anchors, 0.0)
    draws = anchors[torch.multinomial(probs, 50_000, replacement=True)]
    torch.testing.assert_close(loc, draws.mean(1), atol=0.03, rtol=0.0)
    torch.testing.assert_close(scale, draws.std(1), atol=0.03, rtol=0.0)
    wide = anchor_moments(probs, anchors, 0.7)[1]
    torch.testing.assert_close(wide.square(), scale.square() + 0.49)


def test_advice_on_one_anchor_is_that_anchor():
    loc, scale = anchor_moments(torch.tensor([0.0, 1.0]), torch.tensor([[3.0], [5.0]]), 0.25)
    assert loc.item() == 5.0 and scale.item() == 0.25


def test_divergence_and_entropy_equal_torch_distributions():
    first, second = gaussian(4, 3, 2), gaussian(4, 3, 2)
    one, two = (Independent(Normal(*pair), 1) for pair in (first, second))
    torch.testing.assert_close(gaussian_kl(*first, *second), kl_divergence(one, two))
    torch.testing.assert_close(gaussian_entropy(first[1]), one.entropy())
    assert gaussian_kl(*first, *first).eq(0).all()


def test_product_is_that_of_the_densities():
    policy, prior, weight = gaussian(6, 1), gaussian(6, 1), torch.rand(6, 1)
    mixed = Normal(*mix_gaussians(*policy, *prior, weight))
    at = torch.linspace(-3, 3, 9)
    product = Normal(*policy).log_prob(at) + weight * Normal(*prior).log_prob(at)
    # Up to a constant for each row.
    difference = mixed.log_prob(at) - product
    torch.testing.assert_close(difference, difference[:, :1].expand(6, 9), atol=2e-3, rtol=1e-4)


def test_weight_zero_is_the_policy_bitwise():
    policy = gaussian(200, 3)
    mixed = mix_gaussians(*policy, *gaussian(200, 3), torch.zeros(200, 1))
    assert torch.equal(mixed[0], policy[0]) and torch.equal(mixed[1], policy[1])


_loc = st.floats(-8, 8, width=32)
_scale = st.floats(2.0**-6, 4, width=32)
_cases = st.integers(1, 4).flatmap(
    lambda a: st.tuples(
        *(st.lists(kind, min_size=a, max_size=a) for kind in (_loc, _scale, _loc, _scale))
    )
)


def double(case):
    return [torch.tensor(values, dtype=torch.float64) for values in case]


@settings(max_examples=60, deadline=None)
@given(_cases)
def test_divergence_grows_with_the_weight(case):
    loc, scale, prior_loc, prior_scale = double(case)
    weights = torch.logspace(-6, 4, 60, dtype=torch.float64).unsqueeze(-1)
    mixed = mix_gaussians(loc, scale, prior_loc, prior_scale, weights)
    kl = gaussian_kl(*mixed, loc, scale)
    assert (kl.diff() >= -1e-9 * kl[1:].clamp_min(1.0)).all()


@settings(max_examples=60, deadline=None)
@given(_cases, st.floats(2.0**-10, 4.0, width=32), st.floats(2.0**-10, 4.0, width=32))
def test_the_formula_holds_the_bound(case, weight, max_kl):
    loc, scale, prior_loc, prior_scale = case = [value.float() for value in double(case)]
    wanted = torch.tensor([weight])
    found = bounded_gaussian_weight(*case, wanted, max_kl)
    assert 0.0 <= found.item() <= wanted.item()
    policy = loc.double(), scale.double()
    prior = prior_loc.double(), prior_scale.double()
    kl = gaussian_kl(*mix_gaussians(*policy, *prior, found.double()), *policy).item()
    assert kl <= max_kl * (1 + 1e-6) + 1e-9
    if len(loc) == 1 and found < wanted:
        assert kl > max_kl / 3


@pytest.mark.parametrize("dims", [1, 3])
def test_normalized_entropy(dims):
    scale = torch.tensor([0.05, 0.1, (0.1 * 2.0) ** 0.5, 2.0, 7.0]).unsqueeze(-1).expand(5, dims)
    expected = torch.tensor([[0.0], [0.0], [0.5], [1.0], [1.0]])
    torch.testing.assert_close(scale_entropy(scale, 0.1, 2.0), expected)
