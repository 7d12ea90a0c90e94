from __future__ import annotations

import pytest
import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torchrl.modules import IndependentNormal, TanhNormal, TruncatedNormal

from lore_torchrl.policies import Gaussian, GaussianPolicy

NAN = float("nan")
ANCHORS = torch.tensor([[-2.0, 0.0], [0.0, 1.0], [0.0, 0.0], [2.0, -1.0]])


def build(anchors=ANCHORS, **settings):
    return GaussianPolicy(anchors, **{"scale_range": (0.1, 1.0), **settings})


def test_bounded_anchors_are_mixed_before_the_tanh():
    kind = build([[-1.0], [0.5], [3.0]], bounds=(-1.0, 3.0))
    back = 1.0 + 2.0 * torch.tanh(kind.anchors)
    torch.testing.assert_close(back, torch.tensor([[-0.98], [0.5], [2.98]]))
    assert kind.nearest(torch.tensor([[-0.9], [1.5], [2.9]])).flatten().tolist() == [0, 1, 2]


def test_expected_log_probability_is_that_of_draws():
    policy, prior = (Gaussian(torch.randn(3, 2), torch.rand(3, 2) + 0.1) for _ in "ab")
    draws = torch.distributions.Normal(*policy).sample((40_000,))
    logs = torch.distributions.Normal(*prior).log_prob(draws).sum(-1)
    found = build().expected_log_prob(policy, prior)
    assert ((found - logs.mean(0)).abs() < 5 * logs.std(0) / 200).all()


def actor(kind, **kwargs):
    net = TensorDictModule(nn.Identity(), ["loc"], ["loc"])
    head = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["action"], distribution_class=kind, distribution_kwargs=kwargs
    )
    return ProbabilisticTensorDictSequential(net, head)


def test_known_actors_pass():
    build(ANCHORS).check(actor(IndependentNormal))
    build(ANCHORS, bounds=(-2.0, 2.0)).check(actor(TanhNormal, low=-2.0, high=2.0))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (actor(TruncatedNormal), "TruncatedNormal.*Supported are TanhNormal"),
        (actor(IndependentNormal), "ends in IndependentNormal"),
        (actor(TanhNormal), r"within \[-1.0, -1.0\] to \[1.0"),
        (actor(TanhNormal, low=-2.0, high=2.0, tanh_loc=True), r"tanh_loc=True.*network"),
        (actor(TanhNormal, low=-2.0, high=2.0, event_dims=0), "last dimension"),
    ],
)
def test_other_actors_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        build(ANCHORS, bounds=(-2.0, 2.0)).check(made)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"anchors": [[1.0]]}, "at least 2"),
        ({"anchors": [1.0, 2.0]}, r"\[K, A\]"),
        ({"anchors": [[NAN], [1.0]]}, "finite"),
        ({"bounds": (-1.0, 1.0)}, "within bounds"),
        ({"min_scale": 0.0}, "min_scale.*0.0"),
        ({"scale_range": (0.0, 1.0)}, "scale_range needs"),
        ({"scale_range": (1.0, 1.0)}, "scale_range needs"),
        ({"scale_range": (2.0, 1.0)}, "scale_range needs"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(**kwargs)


def test_choices_are_the_fractions_of_actions_nearest_to_each_anchor():
    kind = build([[-1.0], [0.0], [1.0]], bounds=(-2.0, 2.0))
    policy = Gaussian(torch.tensor([[0.3], [-1.0]]), torch.tensor([[0.5], [0.05]]))
    # The borders lie half way between the anchors, and the tanh keeps the order.
    borders = (torch.tensor([-0.5, 0.5]) / 2).atanh()
    below = torch.special.ndtr((borders - policy.loc) / policy.scale)
    expected = torch.stack((below[:, 0], below[:, 1] - below[:, 0], 1 - below[:, 1]), -1)
    state = torch.random.get_rng_state()
    torch.testing.assert_close(kind.choices(policy), expected, atol=1e-3, rtol=0)
    assert torch.equal(state, torch.random.get_rng_state())
    two = build([[-1.0, 0.0], [1.0, 0.0]])
    even = two.choices(Gaussian(torch.zeros(2), torch.tensor([0.3, 9.0])))
    torch.testing.assert_close(even, torch.tensor([0.5, 0.5]), atol=1e-3, rtol=0)


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"bounds must be numbers or \[A\].*got low \[1, 2\]"):
        build(bounds=(torch.full((1, 2), -2.0), torch.full((1, 2), 2.0)))
    with pytest.raises(ValueError, match="policy has 1 dimensions, the anchors 2"):
        build().read(torch.zeros(3, 1), torch.ones(3, 1))
