from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, OneHot, Unbounded
from torchrl.envs import EnvBase, SerialEnv, TransformedEnv

from lore_torchrl import keys
from lore_torchrl.functional import two_hot_variance
from lore_torchrl.modules import RunningScale, UncertaintyGate

A, K = 4, 255


def entropies(*shape):
    return torch.rand(*shape, 1)


def entropy_gate(**kwargs):
    return UncertaintyGate(entropy_weight=1.0, value_weight=0.0, **kwargs)


def rows(*values):
    return torch.tensor(values).unsqueeze(-1)


class TestFormula:
    def test_entropy_alone(self):
        entropy = entropies(6)
        gate = entropy_gate(beta_max=0.8, kappa=7.0, tau=0.6)
        out = gate.evaluate(entropy)
        torch.testing.assert_close(out.uncertainty, entropy)
        torch.testing.assert_close(out.beta, 0.8 * torch.sigmoid(7 * (entropy - 0.6)))
        assert out.active.all()

    def test_all_three_parts(self):
        entropy, value_logits, disagreement = entropies(6), torch.randn(6, K), torch.rand(6, 1)
        gate = UncertaintyGate(
            entropy_weight=2.0, value_weight=1.0, disagreement_weight=1.0, kappa=3.0, tau=0.2
        )
        gate.value_scale.scale.fill_(400.0)
        gate.disagreement_scale.scale.fill_(2.0)
        out = gate.evaluate(entropy, value_logits, disagreement)
        variance = two_hot_variance(value_logits, torch.linspace(-20, 20, K)) / 400
        assert (variance < 1).all()
        u = (2 * entropy + variance + disagreement / 2) / 4
        torch.testing.assert_close(out.uncertainty, u)
        torch.testing.assert_close(out.beta, torch.sigmoid(3 * (u - 0.2)))

    def test_scale_of_the_weights_does_not_matter(self):
        entropy, value_logits = entropies(3), torch.randn(3, K)
        one = UncertaintyGate(entropy_weight=0.7, value_weight=0.3)
        ten = UncertaintyGate(entropy_weight=7.0, value_weight=3.0)
        torch.testing.assert_close(
            one.evaluate(entropy, value_logits).beta, ten.evaluate(entropy, value_logits).beta
        )

    def test_opens_with_uncertainty(self):
        beta = entropy_gate().evaluate(rows(0.0, 0.2, 0.4, 0.6, 0.8, 1.0)).beta
        assert (beta.diff(dim=0) > 0).all()
        assert beta[0] < 0.01 and beta[-1] > 0.99

    def test_beta_max_zero_is_off(self):
        out = entropy_gate(beta_max=0.0).evaluate(entropies(5))
        assert out.beta.eq(0).all()

    def test_beta_max_scales_the_weight(self):
        entropy = entropies(5)
        full, half = (entropy_gate(beta_max=b).evaluate(entropy).beta for b in (1.0, 0.5))
        torch.testing.assert_close(half, full / 2)

    def test_no_graph(self):
        entropy = entropies(3).requires_grad_()
        assert not any(out.requires_grad for out in entropy_gate().evaluate(entropy))


class TestParts:
    @pytest.mark.parametrize(
        "weights",
        [
            {"entropy_weight": 1.0, "value_weight": 0.0},
            {"entropy_weight": 0.0, "value_weight": 1.0},
            {"entropy_weight": 0.0, "value_weight": 0.0, "disagreement_weight": 1.0},
        ],
    )
    def test_weight_zero_needs_no_input_and_no_buffer(self, weights):
        gate = UncertaintyGate(**weights)
        assert hasattr(gate, "value_scale") == bool(weights["value_weight"])
        assert hasattr(gate, "disagreement_scale") == bool(weights.get("disagreement_weight"))
        value_logits = torch.randn(3, K) if weights["value_weight"] else None
        disagreement = torch.rand(3, 1) if weights.get("disagreement_weight") else None
        out = gate.step(entropies(3), value_logits, disagreement)
        assert out.beta.shape == (3, 1)

    def test_value_weight_zero_computes_no_variance(self, monkeypatch):
        def fail(*args):
            raise AssertionError("computed")

        monkeypatch.setattr("lore_torchrl.modules.gate.two_hot_variance", fail)
        entropy_gate().evaluate(entropies(2), torch.randn(2, K))
        with pytest.raises(AssertionError, match="computed"):
            UncertaintyGate(value_weight=0.3).evaluate(entropies(2), torch.randn(2, K))

    @pytest.mark.parametrize(
        ("weights", "key"),
        [({}, "value_weight"), ({"disagreement_weight": 1.0}, "disagreement_weight")],
    )
    def test_what_is_missing_is_named(self, weights, key):
        gate = UncertaintyGate(**{"value_weight": float(not weights), **weights})
        with pytest.raises(ValueError, match=key):
            gate.step(entropies(2))

    def test_what_is_no_entropy_is_refused(self):
        """Such as the log-probabilities of any number of actions."""
        with pytest.raises(ValueError, match=r"normalized entropy.*\(3, 4\)"):
            entropy_gate().evaluate(torch.randn(3, A))

    def test_a_value_without_bins_has_no_variance(self):
        with pytest.raises(ValueError, match=r"at least 2 bins.*value_weight=0"):
            UncertaintyGate(value_weight=0.3).evaluate(entropies(2), torch.randn(2, 1))


class TestTraining:
    def test_warmup_grows_linearly_over_calls(self):
        gate = entropy_gate(warmup_steps=4)
        full = entropy_gate().evaluate(torch.ones(2, 1)).beta
        found = [gate.step(torch.ones(2, 1)).beta / full for _ in range(6)]
        expected = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.0])
        torch.testing.assert_close(torch.stack(found)[:, 0, 0], expected)

    def test_dropout_in_training_only(self):
        gate = entropy_gate(dropout=0.3)
        entropy = torch.ones(4000, 1)
        dropped = (gate.step(entropy).beta == 0).float().mean().item()
        assert dropped == pytest.approx(0.3, abs=0.03)
        state = torch.get_rng_state()
        kept = gate.eval().step(entropy).beta
        assert (kept > 0).all()
        assert torch.equal(torch.get_rng_state(), state)

    def test_without_dropout_no_random_number_is_drawn(self):
        state = torch.get_rng_state()
        entropy_gate().step(torch.ones(3, 1))
        assert torch.equal(torch.get_rng_state(), state)

    def test_only_training_calls_change_buffers(self):
        gate = UncertaintyGate(value_weight=0.3, disagreement_weight=0.5, warmup_steps=5)
        parts = entropies(3), torch.randn(3, K), torch.rand(3, 1)
        before = {name: value.clone() for name, value in gate.state_dict().items()}
        gate.evaluate(*parts)
        gate.eval().step(*parts)
        assert all(torch.equal(before[name], value) for name, value in gate.state_dict().items())
        gate.train().step(*parts)
        after = gate.state_dict()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {"steps", "value_scale.scale", "disagreement_scale.scale"}

    def test_evaluate_updates_the_scales_when_asked(self):
        gate = UncertaintyGate(value_weight=0.3)
        value_logits = torch.randn(3, K)
        gate.evaluate(entropies(3), value_logits, update=True)
        peak = two_hot_variance(value_logits, torch.linspace(-20, 20, K)).max()
        assert gate.value_scale.scale.item() == pytest.approx(peak.item())
        assert gate.steps == 0

    def test_state_dict_roundtrip(self):
        gate = UncertaintyGate(value_weight=0.3, warmup_steps=10, beta_max=0.5)
        parts = entropies(3), torch.randn(3, K)
        for _ in range(4):
            gate.step(*parts)
        resumed = UncertaintyGate(value_weight=0.3, warmup_steps=10, beta_max=0.5)
        resumed.load_state_dict(gate.state_dict())
        assert torch.equal(resumed.step(*parts).beta, gate.step(*parts).beta)


class TestRunningScale:
    def test_keeps_the_peak_and_forgets_slowly(self):
        scale = RunningScale(decay=0.9)
        scale.update(torch.tensor([1.0, 4.0]))
        scale.update(torch.tensor([0.5]))
        assert scale.scale.item() == pytest.approx(3.6)
        assert scale(torch.tensor([1.8, 9.0])).tolist() == pytest.approx([0.5, 1.0])

    def test_floor(self):
        scale = RunningScale(floor=0.5, decay=0.1)
        for _ in range(5):
            scale.update(torch.zeros(2))
        assert scale.scale.item() == 0.5

    def test_what_is_not_finite_is_uncertain_and_leaves_the_scale_usable(self):
        scale = RunningScale()
        scale.update(torch.tensor([2.0, float("nan"), float("inf")]))
        assert scale.scale.item() == 2.0
        assert scale(torch.tensor([float("nan"), float("inf"), 1.0])).tolist() == [1.0, 1.0, 0.5]

    def test_an_empty_batch_changes_nothing(self):
        scale = RunningScale(decay=0.5)
        scale.update(torch.tensor([2.0]))
        scale.update(torch.empty(0, 1))
        assert scale.scale.item() == 2.0


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"entropy_weight": -0.5}, "entropy_weight.*-0.5"),
        ({"value_weight": -0.5}, "value_weight.*-0.5"),
        ({"disagreement_weight": -0.5}, "disagreement_weight.*-0.5"),
        ({"value_weight": float("nan")}, "value_weight.*nan"),
        ({"entropy_weight": 0.0, "value_weight": 0.0}, "entropy_weight.*value_weight"),
        ({"beta_max": -2.0}, "beta_max.*-2.0"),
        ({"beta_max": float("inf")}, "beta_max.*inf"),
        ({"entropy_weight": float("inf")}, "entropy_weight.*inf"),
        ({"kappa": 0.0}, "kappa.*0.0"),
        ({"tau": float("nan")}, "tau.*nan"),
        ({"warmup_steps": float("nan")}, "warmup_steps.*nan"),
        ({"hysteresis": (0.7, 0.3)}, r"hysteresis.*\(0.7, 0.3\)"),
        ({"hysteresis": (-0.1, 0.3)}, r"hysteresis.*\(-0.1, 0.3\)"),
        ({"hysteresis": (0.1, 1.3)}, r"hysteresis.*\(0.1, 1.3\)"),
        ({"warmup_steps": -3}, "warmup_steps.*-3"),
        ({"dropout": 1.0}, "dropout.*1.0"),
        ({"scale_decay": 1.5}, "decay.*1.5"),
    ],
)
def test_bad_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match):
        UncertaintyGate(**kwargs)


def test_a_small_disagreement_is_brought_to_the_scale_too():
    """Where the latents are learned the members differ by 1e-4 and less."""
    gate = UncertaintyGate(entropy_weight=0.0, value_weight=0.0, disagreement_weight=1.0)
    spread = torch.tensor([[5e-5], [1e-4]])
    u = gate.evaluate(entropies(2), disagreement=spread, update=True).uncertainty
    torch.testing.assert_close(u, torch.tensor([[0.5], [1.0]]))


def test_a_disagreement_of_another_shape_is_refused():
    gate = UncertaintyGate(value_weight=0.0, disagreement_weight=1.0)
    with pytest.raises(ValueError, match=r"disagreement_weight.*\(3, 1\).*\(3,\)"):
        gate.evaluate(entropies(3), disagreement=torch.rand(3))


def test_it_writes_under_its_keys():
    gate = entropy_gate()
    td, out = TensorDict(batch_size=[3]), gate.evaluate(entropies(3))
    gate.write(td, out)
    assert set(td.keys(True, True)) == {"lore_uncertainty", "lore_beta"}
    assert torch.equal(td["lore_beta"], out.beta)
    assert torch.equal(td["lore_uncertainty"], out.uncertainty)


class TestHysteresis:
    def gate(self):
        return entropy_gate(hysteresis=(0.3, 0.7))

    def test_each_row_for_itself(self):
        entropy = rows(0.2, 0.2, 0.5, 0.5, 0.8, 0.8)
        was = torch.tensor([[False], [True]]).repeat(3, 1)
        out = self.gate().evaluate(entropy, was_active=was)
        assert out.active.flatten().tolist() == [False, False, False, True, True, True]
        assert out.beta.gt(0).flatten().tolist() == out.active.flatten().tolist()
        plain = entropy_gate().evaluate(entropy).beta
        assert torch.equal(out.beta[out.active], plain[out.active])

    def test_open_from_low_on_where_there_is_no_memory(self):
        out = self.gate().evaluate(rows(0.2, 0.5, 0.8))
        assert out.active.flatten().tolist() == [False, True, True]

    def test_not_carried_without_hysteresis(self):
        td = TensorDict(lore_gate=torch.zeros(2, 1).bool(), batch_size=[2])
        gate = entropy_gate()
        assert gate.carried(td) is None
        gate.write(td, gate.step(entropies(2)))
        assert ("next", keys.GATE) not in td.keys(True)

    @pytest.mark.parametrize("num_envs", [None, 3])
    def test_memory_travels_through_a_rollout(self, num_envs):
        # Normalized entropy, by environment and step.
        plan = [
            [0.5, 0.8, 0.5, 0.5, 0.2, 0.5, 0.9],
            [0.8, 0.5, 0.2, 0.8, 0.5, 0.5, 0.5],
            [0.2, 0.5, 0.5, 0.8, 0.8, 0.2, 0.5],
        ]
        opened = [[0, 1, 1, 1, 0, 0, 1], [1, 1, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0]]
        if num_envs is None:
            env = _Playback(plan[0])
        else:
            env = SerialEnv(num_envs, [lambda row=row: _Playback(row) for row in plan])
        gate = self.gate()
        env = TransformedEnv(env, gate.primer())

        def policy(td):
            gate.write(td, gate.step(td["observation"], was_active=gate.carried(td)))
            return td.set(
                "action",
                torch.nn.functional.one_hot(torch.zeros_like(td["done"][..., 0]).long(), A),
            )

        rollout = env.rollout(7, policy, break_when_any_done=False)
        found = rollout["lore_beta"].squeeze(-1).gt(0).long().tolist()
        assert found == (opened[0] if num_envs is None else opened)
        # A new episode starts shut again.
        again = env.rollout(1, policy)
        assert again["lore_gate"].logical_not().all()


class _Playback(EnvBase):
    """Shows a planned entropy, whatever the action."""

    def __init__(self, plan):
        super().__init__()
        self.rows = rows(*plan, plan[-1])
        self.time = 0
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = OneHot(A)
        self.reward_spec = Bounded(0, 1, (1,))

    def _reset(self, tensordict=None, **kwargs):
        self.time = 0
        return TensorDict(observation=self.rows[0])

    def _step(self, tensordict):
        self.time += 1
        return TensorDict(
            observation=self.rows[self.time],
            reward=torch.zeros(1),
            done=torch.zeros(1, dtype=torch.bool),
            terminated=torch.zeros(1, dtype=torch.bool),
        )

    def _set_seed(self, seed):
        pass
