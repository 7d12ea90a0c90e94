from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torchrl.modules import IndependentNormal, TanhNormal, TruncatedNormal

from lore_torchrl.functional_gaussian import anchor_moments, gaussian_kl, mix_gaussians
from lore_torchrl.modules import Gaussian, GaussianMixer, TemperatureAligner, UncertaintyGate

NAN, INF = float("nan"), float("inf")
ANCHORS = torch.tensor([[-2.0, 0.0], [0.0, 1.0], [0.0, 0.0], [2.0, -1.0]])
A, K = 2, 4


def inputs(n=6, *, confidence=1.0, beta=1.0, scale=3.0):
    return (
        Gaussian(torch.randn(n, A), torch.rand(n, A) + 0.1),
        scale * torch.randn(n, K),
        torch.full((n, 1), confidence),
        torch.ones(n, 1, dtype=torch.bool),
        torch.full((n, 1), beta),
    )


class TestFormula:
    def test_by_hand(self):
        policy, logits, confidence, mask, beta = inputs(confidence=0.5, beta=0.6)
        out = GaussianMixer(ANCHORS, max_kl=INF, min_scale=0.2).mix(
            policy, logits, confidence, mask, beta
        )
        prior = anchor_moments(torch.softmax(logits, -1), ANCHORS, 0.2)
        expected = mix_gaussians(*policy, *prior, torch.tensor(0.3))
        torch.testing.assert_close(out.policy.loc, expected[0])
        torch.testing.assert_close(out.policy.scale, expected[1])
        torch.testing.assert_close(out.kl.squeeze(-1), gaussian_kl(*expected, *policy))

    def test_temperature_divides_the_advice(self):
        batch = inputs()
        hot = GaussianMixer(ANCHORS, temperature=TemperatureAligner(init=2.0, rate=0.0))
        plain = GaussianMixer(ANCHORS)
        expected = plain.mix(batch[0], batch[1] / 2, *batch[2:])
        torch.testing.assert_close(hot.mix(*batch).policy, expected.policy)

    def test_bounded_anchors_are_mixed_before_the_tanh(self):
        mixer = GaussianMixer([[-1.0], [0.5], [3.0]], bounds=(-1.0, 3.0))
        back = 1.0 + 2.0 * torch.tanh(mixer.anchors)
        torch.testing.assert_close(back, torch.tensor([[-0.98], [0.5], [2.98]]))
        assert mixer.nearest(torch.tensor([[-0.9], [1.5], [2.9]])).flatten().tolist() == [0, 1, 2]

    def test_expected_log_probability_is_that_of_draws(self):
        policy, prior = inputs(3)[0], inputs(3)[0]
        draws = torch.distributions.Normal(*policy).sample((40_000,))
        logs = torch.distributions.Normal(*prior).log_prob(draws).sum(-1)
        found = GaussianMixer.expected_log_prob(policy, prior)
        assert ((found - logs.mean(0)).abs() < 5 * logs.std(0) / 200).all()


@pytest.mark.parametrize("max_kl", [0.3, INF])
@pytest.mark.parametrize(
    "bad",
    [
        {"mask": False},
        {"prior": NAN},
        {"prior": -INF},
        {"confidence": NAN},
        {"confidence": 0.0},
        {"beta": 0.0},
    ],
    ids=str,
)
def test_unusable_rows_pass_the_policy_through_to_the_bit(max_kl, bad):
    policy, logits, confidence, mask, beta = inputs(300)
    rows = torch.arange(300) % 2 == 0
    if "prior" in bad:
        logits[rows, 1] = bad["prior"]
    for name, tensor in {"confidence": confidence, "mask": mask, "beta": beta}.items():
        if name in bad:
            tensor[rows] = bad[name]
    out = GaussianMixer(ANCHORS, max_kl=max_kl).mix(policy, logits, confidence, mask, beta)
    for mixed, own in zip(out.policy, policy, strict=True):
        assert torch.equal(mixed[rows], own[rows]) and mixed.isfinite().all()
    assert out.kl[rows].eq(0).all() and out.kl[~rows].gt(0).all()


@pytest.mark.parametrize("max_kl", [0.01, 0.2, 1.0])
def test_bound_holds_and_is_used(max_kl):
    out = GaussianMixer(ANCHORS, max_kl=max_kl).mix(*inputs(500, confidence=0.7, beta=4.0))
    assert out.kl.max() <= max_kl * (1 + 1e-3) + 1e-5
    assert out.kl.max() > 0.3 * max_kl


def test_forward_reads_and_writes_its_keys_without_a_graph():
    policy, logits, confidence, mask, beta = inputs(5)
    names = ("loc", "scale", "llm_prior_logits", "llm_confidence", "llm_mask", "lore_beta")
    td = TensorDict(dict(zip(names, (*policy, logits, confidence, mask, beta), strict=True)), [5])
    for key in ("loc", "scale", "llm_prior_logits"):
        td[key].requires_grad_()
    mixer = GaussianMixer(ANCHORS)
    before = set(td.keys())
    expected = mixer.mix(policy, logits, confidence, mask, beta)
    mixer(td)
    assert set(td.keys()) - before == {"lore_loc", "lore_scale", "lore_kl"} == set(mixer.out_keys)
    assert torch.equal(td["lore_loc"], expected.policy.loc)
    assert torch.equal(td["lore_scale"], expected.policy.scale)
    assert not any(td[key].requires_grad for key in mixer.out_keys)


def actor(kind, **kwargs):
    net = TensorDictModule(nn.Identity(), ["loc"], ["loc"])
    head = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["action"], distribution_class=kind, distribution_kwargs=kwargs
    )
    return ProbabilisticTensorDictSequential(net, head)


def test_known_actors_pass():
    GaussianMixer(ANCHORS).check(actor(IndependentNormal))
    GaussianMixer(ANCHORS, bounds=(-2.0, 2.0)).check(actor(TanhNormal, low=-2.0, high=2.0))


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
        GaussianMixer(ANCHORS, bounds=(-2.0, 2.0)).check(made)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"anchors": [[1.0]]}, "at least 2"),
        ({"anchors": [1.0, 2.0]}, r"\[K, A\]"),
        ({"anchors": [[NAN], [1.0]]}, "finite"),
        ({"bounds": (-1.0, 1.0)}, "within bounds"),
        ({"min_scale": 0.0}, "min_scale.*0.0"),
        ({"max_kl": -1.0}, "max_kl.*-1"),
        ({"temperature": TemperatureAligner(rate=0.1)}, "lore.temperature.rate=0, got 0.1"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        GaussianMixer(**({"anchors": ANCHORS} | kwargs))


class TestGate:
    def test_weighs_the_scale_between_its_bounds(self):
        gate = UncertaintyGate(1, scale_range=(0.1, 1.0), value_weight=0.0, kappa=20.0)
        out = gate.evaluate(torch.tensor([[0.1], [0.1**0.5], [1.0]]))
        torch.testing.assert_close(out.uncertainty.flatten(), torch.tensor([0.0, 0.5, 1.0]))
        assert out.beta.flatten().round(decimals=2).tolist() == [0.0, 0.5, 1.0]
        share = gate.shares(torch.tensor([[1.0]]))["entropy"]
        assert share.item() == pytest.approx(1.0)

    def test_reads_the_scale_by_its_key(self):
        gate = UncertaintyGate(2, scale_range=(0.1, 1.0), value_weight=0.0, logits_key="scale")
        td = TensorDict(scale=torch.full((3, 2), 0.4), batch_size=[3])
        expected = gate.evaluate(td["scale"]).beta
        torch.testing.assert_close(gate(td)["lore_beta"], expected)

    @pytest.mark.parametrize("scale_range", [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0)])
    def test_bad_ranges(self, scale_range):
        with pytest.raises(ValueError, match="scale_range needs"):
            UncertaintyGate(1, scale_range=scale_range)


def test_gate_and_mixer_compile_without_a_graph_break():
    mixer = GaussianMixer(ANCHORS, bounds=(-2.0, 2.0))
    gate = UncertaintyGate(A, scale_range=(0.1, 1.0), value_weight=0.0).eval()

    def step(loc, scale, logits, confidence, mask):
        beta = gate.evaluate(scale).beta
        return mixer.mix(Gaussian(loc, scale), logits, confidence, mask, beta)

    policy, logits, confidence, mask, _ = inputs(8)
    arguments = (*policy, logits, confidence, mask)
    found = torch.compile(step, fullgraph=True, backend="eager")(*arguments)
    torch.testing.assert_close(found, step(*arguments))


def test_choices_are_the_shares_of_actions_nearest_to_each_anchor():
    mixer = GaussianMixer([[-1.0], [0.0], [1.0]], bounds=(-2.0, 2.0))
    policy = Gaussian(torch.tensor([[0.3], [-1.0]]), torch.tensor([[0.5], [0.05]]))
    # The borders lie half way between the anchors, and the tanh keeps the order.
    borders = (torch.tensor([-0.5, 0.5]) / 2).atanh()
    below = torch.special.ndtr((borders - policy.loc) / policy.scale)
    expected = torch.stack((below[:, 0], below[:, 1] - below[:, 0], 1 - below[:, 1]), -1)
    state = torch.random.get_rng_state()
    torch.testing.assert_close(mixer.choices(policy), expected, atol=1e-3, rtol=0)
    assert torch.equal(state, torch.random.get_rng_state())
    two = GaussianMixer([[-1.0, 0.0], [1.0, 0.0]])
    even = two.choices(Gaussian(torch.zeros(2), torch.tensor([0.3, 9.0])))
    torch.testing.assert_close(even, torch.tensor([0.5, 0.5]), atol=1e-3, rtol=0)
