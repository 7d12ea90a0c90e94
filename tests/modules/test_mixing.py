from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from torchrl.modules import DreamerV3DiscreteActor

from lore_torchrl.functional import categorical_kl
from lore_torchrl.modules import LogitMixer, LoReActor, TemperatureAligner, UncertaintyGate

NAN, INF = float("nan"), float("inf")
MODES = ["logit", "probability"]


def log_probs(n=6, a=4, scale=1.0):
    return torch.log_softmax(scale * torch.randn(n, a), -1)


def inputs(n=6, a=4, *, confidence=1.0, beta=1.0, scale=3.0):
    return (
        log_probs(n, a),
        scale * torch.randn(n, a),
        torch.full((n, 1), confidence),
        torch.ones(n, 1, dtype=torch.bool),
        torch.full((n, 1), beta),
    )


class TestFormula:
    def test_logit_mode(self):
        log_p, prior, confidence, mask, beta = inputs(confidence=0.5, beta=0.6)
        out = LogitMixer(max_kl=INF).mix(log_p, prior, confidence, mask, beta)
        centred = prior - prior.mean(-1, keepdim=True)
        expected = torch.log_softmax(log_p + 0.6 * 0.5 * centred, -1)
        torch.testing.assert_close(out.log_probs, expected)
        torch.testing.assert_close(out.kl, categorical_kl(expected, log_p).unsqueeze(-1))

    def test_probability_mode(self):
        log_p, prior, confidence, mask, beta = inputs(confidence=0.5, beta=0.6)
        out = LogitMixer(max_kl=INF, mode="probability").mix(log_p, prior, confidence, mask, beta)
        expected = 0.7 * log_p.exp() + 0.3 * torch.softmax(prior, -1)
        torch.testing.assert_close(out.log_probs.exp(), expected)

    def test_probability_mode_never_weighs_more_than_one(self):
        log_p, prior, confidence, mask, beta = inputs(beta=7.0)
        out = LogitMixer(max_kl=INF, mode="probability").mix(log_p, prior, confidence, mask, beta)
        torch.testing.assert_close(out.log_probs.exp(), torch.softmax(prior, -1))

    @pytest.mark.parametrize("mode", MODES)
    def test_temperature_divides_the_advice(self, mode):
        log_p, prior, confidence, mask, beta = inputs()
        hot = LogitMixer(mode=mode, temperature=TemperatureAligner(init=2.0))
        plain = LogitMixer(mode=mode)
        torch.testing.assert_close(
            hot.mix(log_p, prior, confidence, mask, beta).log_probs,
            plain.mix(log_p, prior / 2, confidence, mask, beta).log_probs,
        )

    @pytest.mark.parametrize("mode", MODES)
    def test_a_constant_added_to_the_advice_does_not_matter(self, mode):
        log_p, prior, confidence, mask, beta = inputs()
        mixer = LogitMixer(mode=mode)
        torch.testing.assert_close(
            mixer.mix(log_p, prior + 100, confidence, mask, beta).log_probs,
            mixer.mix(log_p, prior, confidence, mask, beta).log_probs,
            rtol=1e-4,
            atol=1e-4,
        )

    @pytest.mark.parametrize("mode", MODES)
    def test_normalised(self, mode):
        out = LogitMixer(mode=mode).mix(*inputs(200, 7))
        torch.testing.assert_close(out.log_probs.logsumexp(-1), torch.zeros(200))


class TestUnusableRows:
    @pytest.mark.parametrize("mode", MODES)
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
    def test_pass_the_policy_through_to_the_bit(self, mode, max_kl, bad):
        log_p, prior, confidence, mask, beta = inputs(400)
        rows = torch.arange(400) % 2 == 0
        if "prior" in bad:
            prior[rows, 1] = bad["prior"]
        for name, tensor in {"confidence": confidence, "mask": mask, "beta": beta}.items():
            if name in bad:
                tensor[rows] = bad[name]
        out = LogitMixer(mode=mode, max_kl=max_kl).mix(log_p, prior, confidence, mask, beta)
        assert torch.equal(out.log_probs[rows], log_p[rows])
        assert out.kl[rows].eq(0).all()
        good = LogitMixer(mode=mode, max_kl=max_kl).mix(
            *(tensor[~rows] for tensor in (log_p, prior, confidence, mask, beta))
        )
        assert torch.equal(out.log_probs[~rows], good.log_probs)
        assert out.kl[~rows].gt(0).all() and out.log_probs.isfinite().all()


class TestBound:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("max_kl", [0.01, 0.2, 1.0])
    def test_holds_and_is_used(self, mode, max_kl):
        out = LogitMixer(mode=mode, max_kl=max_kl).mix(*inputs(500, 5, scale=20.0))
        assert out.kl.max() <= max_kl * (1 + 1e-4) + 1e-6
        # Convexity gives away much where the prior is steep, of a small bound most.
        assert out.kl.max() > (0.5 if mode == "logit" else 0.05) * max_kl

    def test_written_divergence_is_that_of_the_written_logits(self):
        log_p, prior, confidence, mask, beta = inputs(50)
        out = LogitMixer(max_kl=0.2).mix(log_p, prior, confidence, mask, beta)
        expected = categorical_kl(out.log_probs.double(), log_p.double()).unsqueeze(-1)
        torch.testing.assert_close(out.kl.double(), expected, rtol=1e-4, atol=1e-6)

    def test_weight_within_the_bound_is_kept_to_the_bit(self):
        batch = inputs(50, beta=0.3)
        free = LogitMixer(max_kl=INF).mix(*batch)
        bounded = LogitMixer(max_kl=100.0).mix(*batch)
        assert torch.equal(free.log_probs, bounded.log_probs)


class TestForward:
    def tensordict(self, n=5):
        log_p, prior, confidence, mask, beta = inputs(n)
        return TensorDict(
            logits=log_p + 3.0,
            llm_prior_logits=prior,
            llm_confidence=confidence,
            llm_mask=mask,
            lore_beta=beta,
            batch_size=[n],
        )

    def test_reads_and_writes_its_keys_and_leaves_the_rest(self):
        td = self.tensordict()
        before = td.clone()
        mixer = LogitMixer()
        mixer(td)
        assert set(td.keys()) - set(before.keys()) == {"lore_logits", "lore_kl"}
        assert all(torch.equal(td[key], before[key]) for key in before.keys())  # noqa: SIM118
        expected = mixer.mix(
            torch.log_softmax(before["logits"], -1), *(before[k] for k in mixer.in_keys[1:])
        )
        assert torch.equal(td["lore_logits"], expected.log_probs)
        assert torch.equal(td["lore_kl"], expected.kl)

    def test_nested_keys(self):
        td = self.tensordict()
        expected = LogitMixer()(td.clone())
        nested = TensorDict(
            {
                ("pi", "logits"): td["logits"],
                ("llm", "prior"): td["llm_prior_logits"],
                ("llm", "confidence"): td["llm_confidence"],
                ("llm", "mask"): td["llm_mask"],
                ("lore", "beta"): td["lore_beta"],
            },
            [5],
        )
        mixer = LogitMixer(
            logits_key=("pi", "logits"),
            prior_logits_key=("llm", "prior"),
            confidence_key=("llm", "confidence"),
            mask_key=("llm", "mask"),
            beta_key=("lore", "beta"),
            mix_key=("lore", "logits"),
            kl_key=("lore", "kl"),
        )
        mixer(nested)
        assert torch.equal(nested["lore", "logits"], expected["lore_logits"])
        assert torch.equal(nested["lore", "kl"], expected["lore_kl"])

    def test_no_graph_to_policy_or_advice(self):
        td = self.tensordict()
        for key in ("logits", "llm_prior_logits", "llm_confidence", "lore_beta"):
            td[key].requires_grad_()
        LogitMixer(temperature=TemperatureAligner())(td)
        assert not td["lore_logits"].requires_grad and not td["lore_kl"].requires_grad


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


def _gate_and_mixer(mode):
    gate = UncertaintyGate(4, value_weight=0.3, hysteresis=(0.2, 0.6), warmup_steps=3, dropout=0.1)
    mixer = LogitMixer(mode=mode, temperature=TemperatureAligner())

    def step(logits, value_logits, was_active, prior, confidence, mask):
        td = TensorDict(
            logits=logits,
            state_value_logits=value_logits,
            lore_gate=was_active,
            llm_prior_logits=prior,
            llm_confidence=confidence,
            llm_mask=mask,
            batch_size=logits.shape[:-1],
        )
        mixer(gate(td))
        return td["lore_logits"], td["lore_beta"], td["next", "lore_gate"]

    return gate, step


def _arguments(device="cpu"):
    log_p, prior, confidence, mask, _ = inputs(8)
    arguments = (log_p, torch.randn(8, 255), torch.zeros(8, 1).bool(), prior, confidence, mask)
    return [argument.to(device) for argument in arguments]


@pytest.mark.parametrize("mode", MODES)
def test_gate_and_mixer_compile_without_a_graph_break(mode):
    arguments = _arguments()
    gate, step = _gate_and_mixer(mode)
    state = {name: value.clone() for name, value in gate.state_dict().items()}
    gate.eval()
    expected = step(*arguments)
    gate.load_state_dict(state)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for found, value in zip(compiled(*arguments), expected, strict=True):
        torch.testing.assert_close(found, value)
    gate.train()
    compiled(*arguments)
    assert gate.steps == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
class TestCuda:
    @pytest.mark.parametrize("mode", MODES)
    def test_gate_and_mixer_never_wait_for_the_device(self, mode):
        arguments = _arguments("cuda")
        gate, step = _gate_and_mixer(mode)
        gate.cuda()
        step(*arguments)
        torch.cuda.set_sync_debug_mode("error")
        try:
            log_probs, beta, active = step(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert log_probs.is_cuda and beta.is_cuda and active.is_cuda

    def test_actor_never_waits_for_the_device(self):
        actor = DreamerV3DiscreteActor(6, 4, depth=1, num_cells=8, device="cuda")
        gate = UncertaintyGate(4, value_weight=0.0).cuda()
        lore = LoReActor(actor, gate, LogitMixer(temperature=TemperatureAligner()).cuda())
        _, _, _, prior, confidence, mask = _arguments("cuda")
        td = TensorDict(
            state=torch.randn(8, 4),
            belief=torch.randn(8, 2),
            llm_prior_logits=prior,
            llm_confidence=confidence,
            llm_mask=mask,
            batch_size=[8],
        ).to("cuda")
        lore(td.clone())
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.no_grad():
                out = lore(td.clone())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert out["action"].is_cuda and out["action"].sum(-1).eq(1).all()
