"""LogitMixer, with every kind of policy."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from kinds import EACH, A, advice, kind_of, policy_of, raw_advice
from tensordict import TensorDict

from lore_torchrl.functional import categorical_kl
from lore_torchrl.modules import AdviceBatch, LogitMixer, TemperatureAligner, UncertaintyGate
from lore_torchrl.policies.gaussian import anchor_moments, mix_gaussians

NAN, INF = float("nan"), float("inf")
CASES = pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("categorical", "logit"),
        ("categorical", "probability"),
        ("normal", "logit"),
        ("tanh_normal", "logit"),
    ],
)


def mixer_of(name, **settings):
    return LogitMixer(kind_of(name), **settings)


def ones(n, value=1.0):
    return torch.full((n, 1), value)


def assert_equal_policies(name, first, second, rows=slice(None)):
    kind = kind_of(name)
    for one, other in zip(kind.entries(first), kind.entries(second), strict=True):
        assert torch.equal(one[rows], other[rows])


class TestFormula:
    def test_logit_mode(self):
        log_p, (prior, confidence, mask) = policy_of("categorical"), raw_advice(confidence=0.5)
        given = AdviceBatch.clean(prior, confidence, mask)
        out = LogitMixer(max_kl=INF).mix(log_p, given, ones(6, 0.6))
        centered = prior - prior.mean(-1, keepdim=True)
        expected = torch.log_softmax(log_p + 0.6 * 0.5 * centered, -1)
        torch.testing.assert_close(out.policy, expected)
        torch.testing.assert_close(out.kl, categorical_kl(expected, log_p).unsqueeze(-1))

    @pytest.mark.parametrize(("beta", "part"), [(0.6, 0.3), (14.0, 1.0)])
    def test_probability_mode(self, beta, part):
        log_p, raw = policy_of("categorical"), raw_advice(confidence=0.5)
        mixer = LogitMixer(max_kl=INF, mode="probability")
        out = mixer.mix(log_p, AdviceBatch.clean(*raw), ones(6, beta))
        expected = (1 - part) * log_p.exp() + part * torch.softmax(raw[0], -1)
        torch.testing.assert_close(out.policy.exp(), expected)

    @pytest.mark.parametrize("name", ["normal", "tanh_normal"])
    def test_gaussian(self, name):
        policy, raw = policy_of(name), raw_advice(confidence=0.5)
        kind = kind_of(name)
        out = LogitMixer(kind, max_kl=INF).mix(policy, AdviceBatch.clean(*raw), ones(6, 0.6))
        prior = anchor_moments(torch.softmax(raw[0], -1), kind.anchors, 0.3)
        expected = mix_gaussians(*policy, *prior, torch.tensor(0.3))
        torch.testing.assert_close(tuple(out.policy), expected)

    @CASES
    def test_temperature_divides_the_advice_and_a_constant_does_not_matter(self, name, mode):
        policy, (prior, confidence, mask) = policy_of(name), raw_advice()
        aligner = TemperatureAligner(init=2.0, rate=0.0)
        hot = mixer_of(name, mode=mode, temperature=aligner)
        found = hot.mix(policy, AdviceBatch.clean(prior + 100, confidence, mask), ones(6))
        plain = mixer_of(name, mode=mode)
        expected = plain.mix(policy, AdviceBatch.clean(prior / 2, confidence, mask), ones(6))
        torch.testing.assert_close(found.policy, expected.policy, rtol=1e-3, atol=1e-4)


@CASES
@pytest.mark.parametrize("max_kl", [0.3, INF])
@pytest.mark.parametrize(
    "bad",
    [
        {"mask": False},
        {"prior": NAN},
        {"prior": INF},
        {"prior": -INF},
        {"confidence": NAN},
        {"confidence": INF},
        {"confidence": 0.0},
        {"confidence": -1.0},
        {"beta": 0.0},
        {"mask": False, "prior": NAN, "confidence": NAN},
    ],
    ids=str,
)
def test_unusable_rows_pass_the_policy_through_bitwise(name, mode, max_kl, bad):
    policy, (prior, confidence, mask), beta = policy_of(name, 400), raw_advice(400), ones(400)
    rows = torch.arange(400) % 2 == 0
    if "prior" in bad:
        prior[rows, 1] = bad["prior"]
    for key, tensor in {"confidence": confidence, "mask": mask, "beta": beta}.items():
        if key in bad:
            tensor[rows] = bad[key]
    mixer = mixer_of(name, mode=mode, max_kl=max_kl)
    out = mixer.mix(policy, AdviceBatch.clean(prior, confidence, mask), beta)
    assert_equal_policies(name, out.policy, policy, rows)
    assert out.kl[rows].eq(0).all() and out.kl[~rows].gt(0).all()
    assert all(entry.isfinite().all() for entry in kind_of(name).entries(out.policy))


class TestBound:
    @CASES
    @pytest.mark.parametrize("max_kl", [0.01, 0.2, 1.0])
    def test_holds_and_is_used(self, name, mode, max_kl):
        out = mixer_of(name, mode=mode, max_kl=max_kl).mix(
            policy_of(name, 500), advice(500, scale=20.0), ones(500, 4.0)
        )
        assert out.kl.max() <= max_kl * (1 + 1e-3) + 1e-5
        # Convexity gives away much where the prior is steep, of a small bound most.
        assert out.kl.max() > (0.05 if mode == "probability" else 0.3) * max_kl

    @CASES
    @given(
        seed=st.integers(0, 2**31),
        spread=st.floats(0.01, 30.0),
        scale=st.floats(0.01, 1e6),
        beta=st.floats(0.0, 50.0),
        max_kl=st.floats(0.001, 5.0),
    )
    @settings(max_examples=40, deadline=None)
    def test_of_any_policy_and_advice(self, name, mode, seed, spread, scale, beta, max_kl):
        torch.manual_seed(seed)
        policy, kind = policy_of(name, 8, spread=spread), kind_of(name)
        mixer = LogitMixer(kind, mode=mode, max_kl=max_kl)
        out = mixer.mix(policy, advice(8, scale=scale), ones(8, beta))
        mixed, own = (each.to(torch.float64) for each in (out.policy, policy))
        if name == "categorical":
            mixed, own = (each.log_softmax(-1) for each in (mixed, own))
        kl = kind.divergence(mixed, own)
        assert (kl <= max_kl * (1 + 2e-3) + 1e-4).all()

    @CASES
    def test_weight_within_the_bound_is_kept_bitwise(self, name, mode):
        policy, given = policy_of(name, 50), advice(50)
        free, bounded = (
            mixer_of(name, mode=mode, max_kl=max_kl).mix(policy, given, ones(50, 1e-3))
            for max_kl in (INF, 100.0)
        )
        assert_equal_policies(name, free.policy, bounded.policy)

    @CASES
    @pytest.mark.parametrize("spread", [1.0, 1e4])
    def test_of_a_policy_in_bfloat16(self, name, mode, spread):
        """It was 1.12 for 1, and 9,984 at logits of 1e4: all is mixed in float32."""
        half = torch.bfloat16
        kind, policy = kind_of(name), policy_of(name, 500).to(half)
        if name == "categorical":
            policy = kind.read((spread * torch.randn(500, A)).to(half))
        out = LogitMixer(kind, mode=mode).mix(policy, advice(500), ones(500, 9.0))
        assert all(entry.dtype == torch.float32 for entry in kind.entries(out.policy))
        own = kind.precise(policy)
        assert out.kl.max() <= 1.001
        torch.testing.assert_close(kind.divergence(out.policy, own), out.kl.squeeze(-1))
        # Without weight the very same policy.
        plain = LogitMixer(kind, mode=mode).mix(policy, advice(500), ones(500, 0.0))
        assert_equal_policies(name, plain.policy.to(half), policy)


@pytest.mark.parametrize("mode", ["logit", "probability"])
@pytest.mark.parametrize("max_kl", [1.0, 1e6, INF])
@pytest.mark.parametrize("scale", [3.0, 1e6, 1e20])
def test_what_a_policy_rules_out_stays_ruled_out(mode, max_kl, scale):
    """However much advice wants it."""
    kind = kind_of("categorical")
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(200, A, dtype=dtype)
        logits[:, 2] = -INF
        prior, confidence, mask = raw_advice(200)
        prior[:, 2] = scale
        mixer = LogitMixer(kind, mode=mode, max_kl=max_kl)
        out = mixer.mix(kind.read(logits), AdviceBatch.clean(prior, confidence, mask), ones(200))
        probs = out.policy.softmax(-1)
        assert probs[:, 2].eq(0).all() and out.kl.isfinite().all()
        torch.testing.assert_close(probs.sum(-1), torch.ones(200))


@EACH
def test_no_graph_to_policy_or_advice(name):
    prior, confidence, mask = raw_advice()
    kind, policy = kind_of(name), policy_of(name)
    policy = kind.read(*(entry.requires_grad_() for entry in kind.entries(policy)))
    given = AdviceBatch.clean(prior.requires_grad_(), confidence.requires_grad_(), mask)
    out = LogitMixer(kind).mix(policy, given, ones(6).requires_grad_())
    assert not any(entry.requires_grad for entry in (*kind.entries(out.policy), out.kl))


@EACH
def test_it_writes_under_its_keys(name):
    kind = kind_of(name)
    out = LogitMixer(kind).mix(policy_of(name), advice(), ones(6))
    mixer, td = LogitMixer(kind), TensorDict(batch_size=[6])
    mixer.write(td, out)
    assert set(td.keys(True, True)) == {*kind.mix_keys, "lore_kl"} == set(mixer.out_keys)
    assert torch.equal(td[kind.mix_keys[0]], kind.entries(out.policy)[0])


@EACH
def test_advice_on_other_actions_is_refused(name):
    mixer = mixer_of(name)
    mixer.check_advice(policy_of(name), torch.zeros(6, A))
    with pytest.raises(ValueError, match=r"advice has 3 logits a state, the policy 4"):
        mixer.check_advice(policy_of(name), torch.zeros(6, 3))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"max_kl": -0.5}, "max_kl.*-0.5"),
        ({"max_kl": math.nan}, "max_kl.*nan"),
        ({"mode": "soft"}, "mode.*'soft'"),
    ],
)
def test_bad_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match):
        LogitMixer(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"mode": "probability"}, r"lore.mixer.mode=logit \(two Gaussians"),
        ({"temperature": TemperatureAligner(rate=0.1)}, r"lore.temperature.rate=0 \(a Gaussian"),
    ],
)
def test_what_a_gaussian_policy_cannot_have(kwargs, match):
    with pytest.raises(ValueError, match=match):
        mixer_of("normal", **kwargs)
    mixer_of("categorical", **kwargs)


def _gate_and_mixer(name, mode):
    gate = UncertaintyGate(value_weight=0.3, hysteresis=(0.2, 0.6), warmup_steps=3, dropout=0.1)
    aligner = TemperatureAligner(rate=0.0)
    mixer = mixer_of(name, mode=mode, temperature=aligner)

    def step(entries, value_logits, was_active, *raw):
        policy = mixer.policy.read(*entries)
        out = gate.step(mixer.policy.entropy(policy), value_logits, was_active=was_active)
        mixture = mixer.mix(policy, AdviceBatch.clean(*raw), out.beta)
        return *mixer.policy.entries(mixture.policy), mixture.kl, out.beta, out.active

    return gate, mixer, step


def _arguments(name, device="cpu"):
    entries = [entry.to(device) for entry in kind_of(name).entries(policy_of(name, 8))]
    rest = (torch.randn(8, 255), torch.zeros(8, 1).bool(), *raw_advice(8))
    return entries, *(value.to(device) for value in rest)


@CASES
def test_gate_and_mixer_compile_without_a_graph_break(name, mode):
    arguments = _arguments(name)
    gate, _, step = _gate_and_mixer(name, mode)
    state = {key: value.clone() for key, value in gate.state_dict().items()}
    gate.eval()
    expected = step(*arguments)
    gate.load_state_dict(state)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for found, value in zip(compiled(*arguments), expected, strict=True):
        torch.testing.assert_close(found, value)
    gate.train()
    compiled(*arguments)
    assert gate.steps == 1


@CASES
def test_mixing_under_vmap(name, mode):
    kind, given = kind_of(name), advice(8)
    mixer, entries = mixer_of(name, mode=mode), kind.entries(policy_of(name, 8))

    def one(entries, logits, weight, valid, beta):
        out = mixer.mix(kind.read(*entries), AdviceBatch(logits, weight, valid), beta)
        return *kind.entries(out.policy), out.kl

    found = torch.vmap(one)(entries, *given[:3], ones(8))
    for value, expected in zip(found, one(entries, *given[:3], ones(8)), strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@CASES
def test_gate_and_mixer_never_wait_for_the_device(name, mode):
    arguments = _arguments(name, "cuda")
    gate, mixer, step = _gate_and_mixer(name, mode)
    gate.cuda()
    mixer.cuda()
    step(*arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(value.is_cuda for value in found)
