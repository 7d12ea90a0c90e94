from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lore_torchrl.functional import masked_correlation, two_hot_variance
from lore_torchrl.modules import UncertaintyGate

A, K, N = 4, 255, 200


def gate_of(entropy=1.0, value=1.0, disagreement=1.0, **kwargs):
    gate = UncertaintyGate(
        A,
        entropy_weight=entropy,
        value_weight=value,
        disagreement_weight=disagreement,
        **{"value_source": "ensemble", "adapt_rate": 0.1, **kwargs},
    )
    for name in ("value", "disagreement"):
        if hasattr(gate, f"{name}_scale"):
            getattr(gate, f"{name}_scale").scale.fill_(1.0)
    return gate


def rows(n=N):
    """Independent log-probabilities, variances and disagreements, ``[n, ...]``."""
    log_p = torch.log_softmax(3 * torch.rand(n, 1) * torch.randn(n, A), -1)
    return [log_p, torch.rand(n, 1), torch.rand(n, 1)]


def entropy_of(log_p):
    return -(log_p.exp() * log_p).sum(-1, keepdim=True) / math.log(A)


def parts_of(inputs):
    return [entropy_of(inputs[0]), *inputs[1:]]


def everywhere(inputs):
    return torch.ones_like(inputs[1], dtype=torch.bool)


class TestEnsembleSource:
    def test_variance_is_taken_as_given(self):
        gate = gate_of(0.0, 1.0, 0.0, adapt_rate=0.0, kappa=3.0, tau=0.2)
        gate.value_scale.scale.fill_(2.0)
        variance = torch.rand(6, 1)
        log_p = torch.log_softmax(torch.randn(6, A), -1)
        out = gate.evaluate(log_p, variance)
        torch.testing.assert_close(out.uncertainty, variance / 2)
        torch.testing.assert_close(out.beta, torch.sigmoid(3 * (variance / 2 - 0.2)))
        assert torch.equal(gate.step(log_p, variance).beta, gate.evaluate(log_p, variance).beta)

    def test_updates_the_scale_with_it(self):
        gate = gate_of(1.0, 1.0, 0.0, scale_decay=0.5)
        gate.evaluate(torch.zeros(2, A), torch.tensor([[0.3], [7.0]]), update=True)
        assert gate.value_scale.scale.item() == pytest.approx(7.0)

    def test_key_is_the_variance_key(self):
        gate = gate_of(value_variance_key=("agent", "var"), value_logits_key="unused")
        assert gate.value_logits_key == ("agent", "var")
        assert gate.in_keys == ["logits", ("agent", "var"), "disagreement"]
        assert UncertaintyGate(A).value_logits_key == "state_value_logits"

    def test_forward_reads_it(self):
        gate = gate_of(adapt_rate=0.0).eval()
        log_p, variance, disagreement = rows(3)
        td = TensorDict(
            logits=log_p, value_variance=variance, disagreement=disagreement, batch_size=[3]
        )
        expected = gate.evaluate(log_p, variance, disagreement)
        torch.testing.assert_close(gate(td)["lore_beta"], expected.beta)

    def test_weight_zero_costs_no_compute_and_needs_no_entry(self, monkeypatch):
        def fail(*args):
            raise AssertionError("computed")

        monkeypatch.setattr("lore_torchrl.modules.gate.two_hot_variance", fail)
        gate = gate_of(1.0, 0.0, 0.0)
        assert not hasattr(gate, "value_scale") and gate.in_keys == ["logits"]
        inputs = rows(3)
        gate.evaluate(inputs[0])
        gate.adapt(inputs[0], None, None, torch.rand(3, 1), everywhere(inputs))
        # Nor does a given variance pass through the two-hot arithmetic.
        gate_of().evaluate(*rows(3))

    def test_logits_in_place_of_a_variance_are_refused(self):
        gate = gate_of(1.0, 1.0, 0.0)
        with pytest.raises(ValueError, match=r"ensemble.*\(3, 255\)"):
            gate.evaluate(rows(3)[0], torch.randn(3, K))
        with pytest.raises(KeyError, match="value_variance"):
            gate.evaluate(rows(3)[0])


class TestOff:
    def test_rate_zero_has_numbers_and_no_buffer(self):
        gate = gate_of(adapt_rate=0.0)
        assert "weights" not in gate.state_dict()
        assert isinstance(gate.entropy_weight, float)
        before = {name: value.clone() for name, value in gate.state_dict().items()}
        inputs = rows()
        gate.adapt(*inputs, torch.rand(N, 1), everywhere(inputs))
        assert all(torch.equal(before[name], value) for name, value in gate.state_dict().items())

    def test_rate_zero_computes_no_correlation(self, monkeypatch):
        def fail(*args):
            raise AssertionError("computed")

        monkeypatch.setattr("lore_torchrl.modules.gate.masked_correlation", fail)
        inputs = rows()
        gate_of(adapt_rate=0.0).adapt(*inputs, torch.rand(N, 1), everywhere(inputs))
        with pytest.raises(AssertionError, match="computed"):
            gate_of().adapt(*inputs, torch.rand(N, 1), everywhere(inputs))

    def test_before_the_first_adaptation_the_gate_is_the_same(self):
        inputs = rows()
        held, adaptive = (gate_of(0.5, 0.2, 0.3, adapt_rate=rate) for rate in (0.0, 0.1))
        torch.testing.assert_close(adaptive.weights, torch.tensor([0.5, 0.2, 0.3]))
        torch.testing.assert_close(adaptive.evaluate(*inputs).beta, held.evaluate(*inputs).beta)


class TestAdapt:
    def expected(self, inputs, advantage, valid, *, temperature=0.25):
        kept = valid.flatten().numpy()
        target = advantage.abs().flatten().numpy()[kept]
        found = [
            np.corrcoef(part.flatten().numpy()[kept], target)[0, 1] for part in parts_of(inputs)
        ]
        return torch.softmax(torch.tensor(found).float() / temperature, 0)

    @pytest.mark.parametrize("best", [0, 1, 2])
    def test_the_best_predictor_gets_the_largest_weight(self, best):
        gate = gate_of()
        for _ in range(40):
            inputs = rows()
            sign = torch.where(torch.rand(N, 1) < 0.5, -1.0, 1.0)
            noise = 0.1 * torch.rand(N, 1)
            gate.adapt(*inputs, sign * (parts_of(inputs)[best] + noise), everywhere(inputs))
        assert gate.weights.argmax() == best
        assert gate.weights[best] > 0.9
        assert gate.weights.sum().item() == pytest.approx(1.0, abs=1e-5)

    @pytest.mark.parametrize("temperature", [0.25, 0.7])
    def test_step_follows_the_formula_on_the_valid_rows(self, temperature):
        gate = gate_of(0.5, 0.2, 0.3, adapt_temperature=temperature)
        start = gate.weights.clone()
        inputs = rows()
        valid = torch.rand(N, 1) < 0.5
        advantage = torch.randn(N, 1) * (0.2 + inputs[1])
        gate.adapt(*inputs, advantage, valid)
        target = self.expected(inputs, advantage, valid, temperature=temperature)
        torch.testing.assert_close(gate.weights, 0.9 * start + 0.1 * target)

    def test_two_hot_source(self):
        gate = gate_of(1.0, 1.0, 0.0, value_source="two_hot", adapt_rate=1.0)
        gate.value_scale.scale.fill_(400.0)
        log_p, value_logits = rows()[0], torch.rand(N, 1) * torch.randn(N, K)
        variance = two_hot_variance(value_logits, torch.linspace(-20, 20, K)) / 400
        valid = torch.ones(N, 1).bool()
        gate.adapt(log_p, value_logits, None, -variance, valid)
        entropy = masked_correlation(entropy_of(log_p), variance, valid)
        target = torch.softmax(torch.stack((entropy, torch.tensor(1.0))) / 0.25, 0)
        torch.testing.assert_close(gate.weights[:2], target)
        assert gate.weights[2] == 0

    @pytest.mark.parametrize("off", [0, 1, 2])
    def test_what_is_off_stays_exactly_zero(self, off):
        weights = [0.5, 0.5, 0.5]
        weights[off] = 0.0
        gate = gate_of(*weights)
        for _ in range(5):
            inputs = rows()
            advantage = parts_of(inputs)[off]
            given = [None if i == off and i else x for i, x in enumerate(inputs)]
            gate.adapt(*given, advantage, everywhere(inputs))
        assert gate.weights[off] == 0
        assert gate.weights.sum().item() == pytest.approx(1.0, abs=1e-5)

    def test_a_part_alone_keeps_the_weight_of_one(self):
        gate = gate_of(0.0, 1.0, 0.0, adapt_rate=1.0)
        inputs = rows()
        gate.adapt(inputs[0], inputs[1], None, torch.randn(N, 1), everywhere(inputs))
        assert gate.weights.tolist() == [0.0, 1.0, 0.0]

    @pytest.mark.parametrize("count", [0, 1])
    def test_fewer_than_two_valid_rows_change_nothing(self, count):
        gate = gate_of(0.5, 0.2, 0.3, adapt_rate=1.0)
        before = gate.weights.clone()
        inputs = rows(5)
        valid = torch.zeros(5, 1).bool()
        valid[:count] = True
        advantage = torch.randn(5, 1)
        gate.adapt(*inputs, advantage, valid)
        assert torch.equal(gate.weights, before)
        # A row whose advantage is no number does not count either.
        valid[:2] = True
        advantage[1 - count] = float("nan")
        gate.adapt(*inputs, advantage, valid)
        assert torch.equal(gate.weights, before)
        advantage[1 - count] = 3.0
        gate.adapt(*inputs, advantage, valid)
        assert not torch.equal(gate.weights, before)

    @pytest.mark.parametrize("spoilt_advantage", [True, False])
    def test_what_is_not_finite_does_not_spread(self, spoilt_advantage):
        one, other = gate_of(), gate_of()
        inputs = rows()
        advantage, valid = torch.randn(N, 1), everywhere(inputs)
        valid[150:] = False
        one.adapt(*inputs, advantage, valid)
        spoilt = [x.clone() for x in inputs]
        for x in spoilt:
            x[150:] = float("nan")
        if spoilt_advantage:
            advantage[150:] = float("inf")
        other.adapt(*spoilt, advantage, torch.ones_like(valid))
        torch.testing.assert_close(one.weights, other.weights)

    def test_parts_are_judged_on_their_scale(self):
        """Beyond the scale a part counts as 1: an outlier must not decide."""
        gate = gate_of(0.0, 1.0, 1.0, adapt_rate=1.0)
        inputs = rows()
        advantage = inputs[1].clone()
        inputs[1][:3] = 1e4
        gate.adapt(*inputs, advantage, everywhere(inputs))
        clipped = [x.clamp(max=1.0) for x in inputs[1:]]
        scores = [masked_correlation(x, advantage, everywhere(inputs)) for x in clipped]
        torch.testing.assert_close(gate.weights[1:], torch.softmax(torch.stack(scores) / 0.25, 0))
        assert gate.weights[1] > 0.9

    def test_a_constant_part_counts_as_uncorrelated(self):
        gate = gate_of(adapt_rate=1.0)
        inputs = rows()
        inputs[2] = torch.full((N, 1), 0.3)
        gate.adapt(*inputs, inputs[1], everywhere(inputs))
        scores = torch.stack(
            [
                masked_correlation(entropy_of(inputs[0]), inputs[1], everywhere(inputs)),
                torch.tensor(1.0),
                torch.tensor(0.0),
            ]
        )
        torch.testing.assert_close(gate.weights, torch.softmax(scores / 0.25, 0))

    def test_evaluate_uses_the_buffer(self):
        gate = gate_of(kappa=3.0)
        gate.weights.copy_(torch.tensor([0.1, 0.7, 0.2]))
        inputs = rows()
        wanted = sum(w * x for w, x in zip((0.1, 0.7, 0.2), parts_of(inputs), strict=True))
        torch.testing.assert_close(gate.evaluate(*inputs).uncertainty, wanted)

    def test_only_the_weights_move_in_place_and_without_graph(self):
        gate = gate_of()
        buffer = gate.weights
        before = {name: value.clone() for name, value in gate.state_dict().items()}
        inputs = [x.requires_grad_() for x in rows()]
        gate.adapt(*inputs, torch.randn(N, 1), everywhere(inputs))
        assert gate.weights is buffer and not buffer.requires_grad
        changed = {n for n, v in gate.state_dict().items() if not torch.equal(before[n], v)}
        assert changed == {"weights"}

    def test_state_dict_roundtrip(self):
        gate, resumed = gate_of(adapt_rate=0.5), gate_of(adapt_rate=0.5)
        inputs = rows()
        gate.adapt(*inputs, inputs[1], everywhere(inputs))
        resumed.load_state_dict(gate.state_dict())
        assert torch.equal(resumed.evaluate(*inputs).beta, gate.evaluate(*inputs).beta)
        assert not torch.equal(gate_of().evaluate(*inputs).beta, gate.evaluate(*inputs).beta)

    def test_any_batch_shape_gives_the_same(self):
        flat, deep = gate_of(), gate_of()
        inputs = rows(12)
        advantage, valid = torch.randn(12, 1), torch.rand(12, 1) < 0.7
        flat.adapt(*inputs, advantage, valid)
        deep.adapt(*(x.reshape(3, 4, -1) for x in (*inputs, advantage, valid)))
        torch.testing.assert_close(flat.weights, deep.weights)

    def test_wrong_shapes(self):
        inputs = rows(6)
        with pytest.raises(ValueError, match=r"\(6, 1\).*\(6,\)"):
            gate_of().adapt(*inputs, torch.randn(6), everywhere(inputs))

    def test_compiles_whole(self):
        eager, compiled = gate_of(), gate_of()
        inputs = rows()
        advantage, valid = torch.randn(N, 1), torch.rand(N, 1) < 0.7

        def both(*tensors):
            compiled.adapt(*tensors)
            return compiled.evaluate(*tensors[:3])

        fused = torch.compile(both, fullgraph=True, backend="eager")
        for _ in range(2):
            out = fused(*inputs, advantage, valid)
            eager.adapt(*inputs, advantage, valid)
        torch.testing.assert_close(compiled.weights, eager.weights)
        torch.testing.assert_close(out.beta, eager.evaluate(*inputs).beta)


class TestMaskedCorrelation:
    @pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
    def test_is_pearsons_at_any_scale(self, scale):
        x = torch.randn(50)
        y = 0.5 * x + torch.randn(50)
        valid = torch.rand(50) < 0.6
        wanted = np.corrcoef(x[valid].numpy(), y[valid].numpy())[0, 1]
        found = masked_correlation(scale * x, y, valid)
        assert found.item() == pytest.approx(wanted, abs=1e-5)

    def test_constant_or_empty_is_zero(self):
        x, valid = torch.randn(50), torch.ones(50).bool()
        assert masked_correlation(torch.full((50,), 0.1), x, valid) == 0
        assert masked_correlation(torch.zeros(50), x, valid) == 0
        assert masked_correlation(x, x, ~valid) == 0


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"value_source": "critic"}, "value_source.*'critic'"),
        ({"adapt_rate": -0.1}, "adapt_rate.*-0.1"),
        ({"adapt_rate": 1.5}, "adapt_rate.*1.5"),
        ({"adapt_rate": float("nan")}, "adapt_rate.*nan"),
        ({"adapt_temperature": 0.0}, "adapt_temperature.*0.0"),
    ],
)
def test_bad_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match):
        UncertaintyGate(A, **kwargs)
