from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.distributions import Categorical, kl_divergence

from lore_torchrl.functional import (
    align_temperature,
    categorical_kl,
    log_floor,
    masked_mean,
    two_hot_variance,
)
from lore_torchrl.modules import AdviceBatch
from lore_torchrl.policies.categorical import bounded_weight

NAN, INF = float("nan"), float("inf")


def log_probs(*shape, scale=1.0):
    return torch.log_softmax(scale * torch.randn(*shape), -1)


class TestMaskedMean:
    def test_divides_by_the_number_counted(self):
        value, mask = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([True, False, True])
        assert masked_mean(value, mask).item() == 2.5

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_leaves_out_what_is_not_finite(self, bad):
        value = torch.tensor([[3.0, bad], [bad, 5.0]])
        assert masked_mean(value, torch.eye(2).bool()).item() == 4.0

    def test_is_zero_where_nothing_counts(self):
        assert masked_mean(torch.tensor([NAN, 1.0]), torch.zeros(2).bool()).item() == 0.0

    def test_gradient_of_what_does_not_count_is_zero(self):
        value = torch.tensor([1.0, NAN], requires_grad=True)
        masked_mean(value, torch.tensor([True, False])).backward()
        assert value.grad.tolist() == [1.0, 0.0]


class TestLogFloor:
    def test_what_is_ruled_out_stays_so_and_can_be_computed_with(self):
        log_p = torch.tensor([0.3, -INF, 0.7]).log_softmax(-1)
        floored = log_floor(log_p)
        assert floored.exp()[1] == 0 and floored[1] == -1e4
        assert torch.equal(floored[[0, 2]], log_p[[0, 2]])
        assert categorical_kl(floored, floored) == 0
        other = log_floor(torch.tensor([0.1, -INF, 2.0]).log_softmax(-1))
        expected = categorical_kl(log_p[[0, 2]], other[[0, 2]])
        assert categorical_kl(floored, other) == expected

    def test_no_gradient_reaches_what_is_ruled_out(self):
        logits = torch.tensor([0.3, -INF, 0.7], requires_grad=True)
        floored = log_floor(logits.log_softmax(-1))
        (floored.exp() * floored).sum().backward()
        assert logits.grad.isfinite().all() and logits.grad[1] == 0 and logits.grad[0] != 0


class TestCategoricalKl:
    def test_equals_torch_distributions(self):
        log_p, log_q = log_probs(5, 3, 4, scale=3.0), log_probs(5, 3, 4, scale=3.0)
        expected = kl_divergence(Categorical(logits=log_p), Categorical(logits=log_q))
        torch.testing.assert_close(categorical_kl(log_p, log_q), expected)

    def test_has_a_direction(self):
        log_p, log_q = log_probs(4, scale=3.0), log_probs(4, scale=3.0)
        assert abs(categorical_kl(log_p, log_q) - categorical_kl(log_q, log_p)) > 1e-2

    def test_of_a_policy_with_itself_is_zero(self):
        log_p = log_probs(6, 5)
        assert categorical_kl(log_p, log_p).eq(0).all()


class TestAdviceBatch:
    def test_centres_and_clips(self):
        logits, weight, valid, *_ = AdviceBatch.clean(
            torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]]),
            torch.tensor([[1.7], [-0.2]]),
            torch.ones(2, 1, dtype=torch.bool),
        )
        assert logits.tolist() == [[-2.0, -1.0, 3.0], [-1.0, -1.0, 2.0]]
        assert weight.flatten().tolist() == [1.0, 0.0]
        assert valid.all()

    @pytest.mark.parametrize(
        ("logits", "confidence", "mask"),
        [
            ([NAN, 0.0], 1.0, True),
            ([INF, 0.0], 1.0, True),
            ([0.0, -INF], 1.0, True),
            ([1.0, 0.0], NAN, True),
            ([1.0, 0.0], INF, True),
            ([1.0, 0.0], 1.0, False),
            ([NAN, NAN], NAN, False),
            ([3e38, 3e38], 1.0, True),
            ([2e38, -2e38], 1.0, True),  # a temperature below 1 would make it infinite
            ([3.4e38, -3.4e38], 1.0, False),
        ],
    )
    def test_unusable_rows_become_exact_zeros(self, logits, confidence, mask):
        good = torch.tensor([[1.0, 3.0]])
        out, weight, valid, *_ = AdviceBatch.clean(
            torch.cat((good, torch.tensor([logits]))),
            torch.tensor([[0.5], [confidence]]),
            torch.tensor([[True], [mask]]),
        )
        assert out.tolist() == [[-1.0, 1.0], [0.0, 0.0]]
        assert weight.tolist() == [[0.5], [0.0]]
        assert valid.tolist() == [[True], [False]]

    def test_detaches(self):
        prior = torch.randn(3, 4, requires_grad=True)
        confidence = torch.rand(3, 1, requires_grad=True)
        outputs = AdviceBatch.clean(prior, confidence, torch.ones(3, 1).bool())
        assert not any(output.requires_grad for output in outputs[:3])

    def test_does_not_write_to_its_input(self):
        prior = torch.tensor([[NAN, 1.0]])
        AdviceBatch.clean(prior, torch.ones(1, 1), torch.ones(1, 1).bool())
        assert prior[0, 0].isnan() and prior[0, 1] == 1.0


def _kl64(log_p, direction, weight):
    """KL(mixture || policy) in float64, so that it judges the float32 weight."""
    log_p = torch.log_softmax(log_p.double(), -1)
    mixed = torch.log_softmax(log_p + weight.double() * direction.double(), -1)
    return categorical_kl(mixed, log_p).unsqueeze(-1)


_logit = st.floats(-30, 30, width=32)
_cases = st.integers(2, 7).flatmap(
    lambda a: st.tuples(
        st.lists(_logit, min_size=a, max_size=a),
        st.lists(_logit, min_size=a, max_size=a),
        st.floats(0, 1, width=32),
        st.one_of(st.floats(0, 4, width=32), st.floats(4, 2.0**20, width=32)),
        st.floats(2.0**-13, 2.0, width=32),
    )
)


class TestBoundedWeight:
    @given(case=_cases)
    @settings(max_examples=300, deadline=None, derandomize=True)
    def test_bound_holds_for_every_policy(self, case):
        policy, prior, confidence, beta, max_kl = case
        log_p = torch.log_softmax(torch.tensor([policy]), -1)
        direction = confidence * torch.tensor([prior])
        wanted = torch.tensor([[beta]])
        weight = bounded_weight(direction, wanted, max_kl)
        assert ((weight >= 0) & (weight <= wanted)).all()
        slack = 1e-5 * max_kl + 3e-7 * (1 + log_p.abs().max().item())
        assert _kl64(log_p, direction, weight) <= max_kl + slack

    def test_the_bound_is_reached_where_half_the_policy_pulls_each_way(self):
        direction = torch.tensor([[0.2, 0.0]])
        weight = bounded_weight(direction, torch.ones(1, 1), 0.001)
        kl = _kl64(torch.full((1, 2), 0.5).log(), direction, weight)
        assert 0.00099 < kl.item() <= 0.001

    @pytest.mark.parametrize("num_actions", [3, 7])
    def test_most_of_the_bound_is_used_where_the_policy_is_uniform(self, num_actions):
        log_p = torch.full((1, num_actions), 1.0 / num_actions).log()
        direction = torch.zeros(1, num_actions).index_fill(1, torch.tensor([2]), 1e3)
        weight = bounded_weight(direction, torch.ones(1, 1), 0.5)
        assert 0.3 < _kl64(log_p, direction, weight).item() <= 0.5

    def test_a_weight_that_overflows_is_cut_to_one_that_does_not(self):
        direction = torch.tensor([[1e38, -1e38, 0.0]])
        weight = bounded_weight(direction, torch.tensor([[1e6]]), 1.0)
        assert _kl64(log_probs(1, 3), direction, weight) <= 1.0 + 1e-5

    def test_without_a_bound_or_a_direction_the_weight_is_kept(self):
        wanted = torch.rand(5, 1)
        assert torch.equal(bounded_weight(torch.randn(5, 3), wanted, float("inf")), wanted)
        assert torch.equal(bounded_weight(torch.zeros(5, 3), wanted, 1.0), wanted)


class TestAlignTemperature:
    @staticmethod
    def objective(log_p, prior, valid, temperature):
        log_rho = torch.log_softmax(prior.double() / temperature, -1)
        kl = categorical_kl(log_p.double(), log_rho)
        return kl[valid.squeeze(-1)].mean()

    @pytest.mark.parametrize("seed", range(6))
    def test_is_the_argmin_of_a_fine_grid(self, seed):
        torch.manual_seed(seed)
        prior = 3 * torch.randn(40, 5)
        prior = prior - prior.mean(-1, keepdim=True)
        log_p = torch.log_softmax(prior / (0.8 + seed / 3) + 0.5 * torch.randn(40, 5), -1)
        valid = torch.rand(40, 1) < 0.6
        grid = torch.logspace(math.log10(0.2), math.log10(8.0), 4001, dtype=torch.float64)
        values = torch.stack([self.objective(log_p, prior, valid, t) for t in grid])
        best = grid[values.argmin()].item()
        found = align_temperature(log_p, prior, valid, minimum=0.2, maximum=8.0)
        assert 0.25 < best < 7.5  # otherwise this tests the bounds, not the optimum
        assert found.item() == pytest.approx(best, rel=2e-3)

    def test_recovers_a_known_temperature(self):
        prior = torch.randn(30, 4)
        prior = prior - prior.mean(-1, keepdim=True)
        found = align_temperature(
            torch.log_softmax(prior / 1.7, -1),
            prior,
            torch.ones(30, 1).bool(),
            minimum=0.1,
            maximum=10.0,
        )
        assert found.item() == pytest.approx(1.7, rel=1e-4)

    def test_uniform_policy_gives_the_maximum(self):
        prior = torch.tensor([[2.0, -1.0, -1.0]])
        found = align_temperature(
            torch.full((1, 3), 1 / 3).log(), prior, torch.ones(1, 1).bool(), minimum=0.5, maximum=4
        )
        assert found.item() == pytest.approx(4.0, rel=1e-5)

    def test_policy_sharper_than_any_prior_gives_the_minimum(self):
        prior = torch.tensor([[2.0, -1.0, -1.0]])
        log_p = torch.log_softmax(prior * 50, -1)
        found = align_temperature(log_p, prior, torch.ones(1, 1).bool(), minimum=0.5, maximum=4)
        assert found.item() == pytest.approx(0.5, rel=1e-5)

    def test_rows_that_do_not_count_are_left_out(self):
        prior = torch.randn(10, 4)
        prior = prior - prior.mean(-1, keepdim=True)
        log_p = log_probs(10, 4)
        valid = torch.arange(10).unsqueeze(-1) < 4
        bounds = {"minimum": 0.01, "maximum": 100.0}
        assert align_temperature(log_p, prior, valid, **bounds) == align_temperature(
            log_p[:4], prior[:4], valid[:4], **bounds
        )


class TestTwoHotVariance:
    bins = torch.linspace(-20, 20, 255)

    def test_closed_form_of_two_bins(self):
        logits = torch.full((1, 255), -INF)
        logits[0, 100], logits[0, 140] = math.log(0.25), math.log(0.75)
        distance = (self.bins[140] - self.bins[100]).item()
        expected = 0.25 * 0.75 * distance**2
        assert two_hot_variance(logits, self.bins).item() == pytest.approx(expected, rel=1e-4)

    def test_uniform(self):
        # Discrete uniform distribution on n points a step apart.
        step = 40 / 254
        expected = step**2 * (255**2 - 1) / 12
        variance = two_hot_variance(torch.zeros(2, 3, 255), self.bins)
        assert variance.shape == (2, 3, 1)
        torch.testing.assert_close(variance, torch.full((2, 3, 1), expected), rtol=1e-4, atol=0)

    def test_certain_critic_has_none(self):
        logits = torch.full((4, 255), -1e4)
        logits[range(4), [0, 77, 200, 254]] = 0.0
        variance = two_hot_variance(logits, self.bins)
        assert (variance >= 0).all() and variance.max() < 1e-3


def test_the_variance_of_a_two_hot_critic_survives_mixed_precision():
    bins = torch.linspace(-20.0, 20.0, 255)
    logits = -((bins - torch.tensor([[0.69], [2.4], [4.6]])) ** 2) / (2 * 0.0225)
    expected = two_hot_variance(logits, bins)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(two_hot_variance(logits, bins), expected)
    torch.testing.assert_close(expected, torch.full((3, 1), 0.0225), atol=1e-3, rtol=0.0)


def test_the_temperature_does_not_see_rows_that_do_not_count():
    log_p = torch.log_softmax(torch.randn(2, 4), -1)
    prior = torch.randn(2, 4)
    valid = torch.tensor([[True], [False]])
    bounds = {"minimum": 0.5, "maximum": 4.0}
    expected = align_temperature(log_p[:1], prior[:1], valid[:1], **bounds)
    prior[1] = torch.nan
    assert align_temperature(log_p, prior, valid, **bounds) == expected
