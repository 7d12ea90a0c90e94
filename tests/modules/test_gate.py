from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import Bounded, Composite, OneHot, Unbounded
from torchrl.envs import EnvBase, SerialEnv, TransformedEnv

from lore_torchrl import keys
from lore_torchrl.functional import two_hot_variance
from lore_torchrl.modules import RunningScale, UncertaintyGate

A, K = 4, 255


def log_probs(*shape):
    return torch.log_softmax(torch.randn(*shape, A), -1)


def entropy_gate(**kwargs):
    return UncertaintyGate(A, entropy_weight=1.0, value_weight=0.0, **kwargs)


def logits_of_entropy(*shares):
    """Log-probabilities whose entropy is the given share of its maximum, by bisection."""
    rows = []
    for share in shares:
        low, high = 0.0, 60.0
        for _ in range(60):
            middle = (low + high) / 2
            row = torch.log_softmax(torch.tensor([middle, 0.0, 0.0, 0.0]), -1)
            entropy = -(row.exp() * row).sum() / math.log(A)
            low, high = (middle, high) if entropy > share else (low, middle)
        rows.append(row)
    return torch.stack(rows)


class TestFormula:
    def test_entropy_alone(self):
        log_p = log_probs(6)
        gate = entropy_gate(beta_max=0.8, kappa=7.0, tau=0.6)
        out = gate.evaluate(log_p)
        share = -(log_p.exp() * log_p).sum(-1, keepdim=True) / math.log(A)
        torch.testing.assert_close(out.uncertainty, share)
        torch.testing.assert_close(out.beta, 0.8 * torch.sigmoid(7 * (share - 0.6)))
        assert out.active.all()

    def test_all_three_parts(self):
        log_p, value_logits, disagreement = log_probs(6), torch.randn(6, K), torch.rand(6, 1)
        gate = UncertaintyGate(
            A, entropy_weight=2.0, value_weight=1.0, disagreement_weight=1.0, kappa=3.0, tau=0.2
        )
        gate.value_scale.scale.fill_(400.0)
        gate.disagreement_scale.scale.fill_(2.0)
        out = gate.evaluate(log_p, value_logits, disagreement)
        entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True) / math.log(A)
        variance = two_hot_variance(value_logits, torch.linspace(-20, 20, K)) / 400
        assert (variance < 1).all()
        u = (2 * entropy + variance + disagreement / 2) / 4
        torch.testing.assert_close(out.uncertainty, u)
        torch.testing.assert_close(out.beta, torch.sigmoid(3 * (u - 0.2)))

    def test_scale_of_the_weights_does_not_matter(self):
        log_p, value_logits = log_probs(3), torch.randn(3, K)
        one = UncertaintyGate(A, entropy_weight=0.7, value_weight=0.3)
        ten = UncertaintyGate(A, entropy_weight=7.0, value_weight=3.0)
        torch.testing.assert_close(
            one.evaluate(log_p, value_logits).beta, ten.evaluate(log_p, value_logits).beta
        )

    def test_opens_with_uncertainty(self):
        beta = entropy_gate().evaluate(logits_of_entropy(0.0, 0.2, 0.4, 0.6, 0.8, 1.0)).beta
        assert (beta.diff(dim=0) > 0).all()
        assert beta[0] < 0.01 and beta[-1] > 0.99

    def test_beta_max_zero_is_off(self):
        out = entropy_gate(beta_max=0.0).evaluate(log_probs(5))
        assert out.beta.eq(0).all()

    def test_beta_max_is_a_buffer_that_can_be_scheduled(self):
        gate = entropy_gate()
        log_p = log_probs(5)
        before = gate.evaluate(log_p).beta
        gate.beta_max.fill_(0.5)
        torch.testing.assert_close(gate.evaluate(log_p).beta, before / 2)

    def test_no_graph(self):
        log_p = log_probs(3).requires_grad_()
        assert not any(out.requires_grad for out in entropy_gate().evaluate(log_p))


class TestParts:
    @pytest.mark.parametrize(
        ("weights", "extra_keys"),
        [
            ({"entropy_weight": 1.0, "value_weight": 0.0}, []),
            ({"entropy_weight": 0.0, "value_weight": 1.0}, ["state_value_logits"]),
            (
                {"entropy_weight": 0.0, "value_weight": 0.0, "disagreement_weight": 1.0},
                ["disagreement"],
            ),
        ],
    )
    def test_weight_zero_needs_no_key_and_no_buffer(self, weights, extra_keys, monkeypatch):
        gate = UncertaintyGate(A, **weights)
        assert gate.in_keys == ["logits", *extra_keys]
        assert hasattr(gate, "value_scale") == bool(weights["value_weight"])
        assert hasattr(gate, "disagreement_scale") == bool(weights.get("disagreement_weight"))
        entries = {
            "logits": torch.randn(3, A),
            "state_value_logits": torch.randn(3, K),
            "disagreement": torch.rand(3, 1),
        }
        td = TensorDict({key: entries[key] for key in gate.in_keys}, [3])
        assert gate(td)["lore_beta"].shape == (3, 1)

    def test_value_weight_zero_computes_no_variance(self, monkeypatch):
        def fail(*args):
            raise AssertionError("computed")

        monkeypatch.setattr("lore_torchrl.modules.gate.two_hot_variance", fail)
        entropy_gate().evaluate(log_probs(2), torch.randn(2, K))
        with pytest.raises(AssertionError, match="computed"):
            UncertaintyGate(A).evaluate(log_probs(2), torch.randn(2, K))

    @pytest.mark.parametrize(
        ("weights", "key"),
        [({}, "state_value_logits"), ({"disagreement_weight": 1.0}, "disagreement")],
    )
    def test_missing_key_is_named(self, weights, key):
        gate = UncertaintyGate(A, **{"value_weight": float(not weights), **weights})
        with pytest.raises(KeyError, match=key):
            gate(TensorDict(logits=torch.randn(2, A), batch_size=[2]))

    def test_a_value_without_bins_has_no_variance(self):
        with pytest.raises(ValueError, match=r"at least 2 bins.*value_weight=0"):
            UncertaintyGate(A).evaluate(log_probs(2), torch.randn(2, 1))


class TestTraining:
    def test_warmup_grows_linearly_over_calls(self):
        gate = entropy_gate(warmup_steps=4)
        td = TensorDict(logits=torch.zeros(2, A), batch_size=[2])
        full = entropy_gate().evaluate(torch.log_softmax(td["logits"], -1)).beta
        shares = [gate(td)["lore_beta"] / full for _ in range(6)]
        expected = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.0])
        torch.testing.assert_close(torch.stack(shares)[:, 0, 0], expected)

    def test_dropout_in_training_only(self):
        gate = entropy_gate(dropout=0.3)
        td = TensorDict(logits=torch.zeros(4000, A), batch_size=[4000])
        dropped = (gate(td)["lore_beta"] == 0).float().mean().item()
        assert dropped == pytest.approx(0.3, abs=0.03)
        state = torch.get_rng_state()
        kept = gate.eval()(td)["lore_beta"]
        assert (kept > 0).all()
        assert torch.equal(torch.get_rng_state(), state)

    def test_without_dropout_no_random_number_is_drawn(self):
        state = torch.get_rng_state()
        entropy_gate()(TensorDict(logits=torch.zeros(3, A), batch_size=[3]))
        assert torch.equal(torch.get_rng_state(), state)

    def test_only_training_calls_change_buffers(self):
        gate = UncertaintyGate(A, disagreement_weight=0.5, warmup_steps=5)
        td = TensorDict(
            logits=torch.randn(3, A),
            state_value_logits=torch.randn(3, K),
            disagreement=torch.rand(3, 1),
            batch_size=[3],
        )
        before = {name: value.clone() for name, value in gate.state_dict().items()}
        gate.evaluate(log_probs(3), td["state_value_logits"], td["disagreement"])
        gate.eval()(td)
        assert all(torch.equal(before[name], value) for name, value in gate.state_dict().items())
        gate.train()(td)
        after = gate.state_dict()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {"steps", "value_scale.scale", "disagreement_scale.scale"}

    def test_evaluate_updates_the_scales_when_asked(self):
        gate = UncertaintyGate(A)
        value_logits = torch.randn(3, K)
        gate.evaluate(log_probs(3), value_logits, update=True)
        peak = two_hot_variance(value_logits, torch.linspace(-20, 20, K)).max()
        assert gate.value_scale.scale.item() == pytest.approx(peak.item())
        assert gate.steps == 0

    def test_state_dict_roundtrip(self):
        gate = UncertaintyGate(A, warmup_steps=10, beta_max=0.5)
        td = TensorDict(
            logits=torch.randn(3, A), state_value_logits=torch.randn(3, K), batch_size=[3]
        )
        for _ in range(4):
            gate(td)
        resumed = UncertaintyGate(A, warmup_steps=10)
        resumed.load_state_dict(gate.state_dict())
        assert torch.equal(resumed(td.clone())["lore_beta"], gate(td.clone())["lore_beta"])


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
        ("kwargs", "value"), [({"decay": 0.0}, "0.0"), ({"decay": 1.5}, "1.5"), ({"floor": 0}, "0")]
    )
    def test_bad_arguments(self, kwargs, value):
        with pytest.raises(ValueError, match=f"{next(iter(kwargs))}.*{value}"):
            RunningScale(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"num_actions": 1}, "num_actions.*1"),
        ({"entropy_weight": -0.5}, "entropy_weight.*-0.5"),
        ({"value_weight": -0.5}, "value_weight.*-0.5"),
        ({"disagreement_weight": -0.5}, "disagreement_weight.*-0.5"),
        ({"value_weight": float("nan")}, "value_weight.*nan"),
        ({"entropy_weight": 0.0, "value_weight": 0.0}, "entropy_weight, value_weight"),
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
        UncertaintyGate(**{"num_actions": A, **kwargs})


def test_a_small_disagreement_is_brought_to_the_scale_too():
    """Where the latents are learnt the members differ by 1e-4 and less."""
    gate = UncertaintyGate(A, entropy_weight=0.0, value_weight=0.0, disagreement_weight=1.0)
    spread = torch.tensor([[5e-5], [1e-4]])
    log_p = torch.full((2, A), 0.25).log()
    u = gate.evaluate(log_p, disagreement=spread, update=True).uncertainty
    torch.testing.assert_close(u, torch.tensor([[0.5], [1.0]]))


def test_a_disagreement_of_another_shape_is_refused():
    gate = UncertaintyGate(A, value_weight=0.0, disagreement_weight=1.0)
    with pytest.raises(ValueError, match=r"disagreement must be \(3, 1\).*\(3,\)"):
        gate.evaluate(torch.full((3, A), 0.25).log(), disagreement=torch.rand(3))


def test_nested_keys():
    gate = UncertaintyGate(
        A,
        disagreement_weight=0.5,
        logits_key=("agent", "logits"),
        value_logits_key=("agent", "value", "logits"),
        disagreement_key=("agent", "dis"),
        uncertainty_key=("lore", "u"),
        beta_key=("lore", "beta"),
    )
    logits, values, dis = torch.randn(3, A), torch.randn(3, K), torch.rand(3, 1)
    td = TensorDict(agent={"logits": logits, "value": {"logits": values}, "dis": dis})
    td.batch_size = [3]
    expected = gate.evaluate(torch.log_softmax(logits, -1), values, dis, update=True)
    gate(td)
    torch.testing.assert_close(td["lore", "beta"], expected.beta, rtol=0.02, atol=0)
    torch.testing.assert_close(td["lore", "u"], expected.uncertainty, rtol=0.02, atol=0)


class TestHysteresis:
    def gate(self):
        return entropy_gate(hysteresis=(0.3, 0.7))

    def test_each_row_for_itself(self):
        log_p = logits_of_entropy(0.2, 0.2, 0.5, 0.5, 0.8, 0.8)
        was = torch.tensor([[False], [True]]).repeat(3, 1)
        out = self.gate().evaluate(log_p, was_active=was)
        assert out.active.flatten().tolist() == [False, False, False, True, True, True]
        assert out.beta.gt(0).flatten().tolist() == out.active.flatten().tolist()
        plain = entropy_gate().evaluate(log_p).beta
        assert torch.equal(out.beta[out.active], plain[out.active])

    def test_open_from_low_on_where_there_is_no_memory(self):
        out = self.gate().evaluate(logits_of_entropy(0.2, 0.5, 0.8))
        assert out.active.flatten().tolist() == [False, True, True]

    def test_not_carried_without_hysteresis(self):
        td = TensorDict(logits=torch.zeros(2, A), lore_gate=torch.zeros(2, 1).bool())
        td.batch_size = [2]
        entropy_gate()(td)
        assert ("next", keys.GATE) not in td.keys(True)

    @pytest.mark.parametrize("num_envs", [None, 3])
    def test_memory_travels_through_a_rollout(self, num_envs):
        # Entropy as a share of its maximum, by environment and step.
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
        env = TransformedEnv(env, gate.make_tensordict_primer())
        policy = TensorDictSequential(
            TensorDictModule(lambda x: x, ["observation"], ["logits"]),
            gate,
            TensorDictModule(
                lambda x: torch.nn.functional.one_hot(x.argmax(-1), A), ["logits"], ["action"]
            ),
        )
        rollout = env.rollout(7, policy, break_when_any_done=False)
        found = rollout["lore_beta"].squeeze(-1).gt(0).long().tolist()
        assert found == (opened[0] if num_envs is None else opened)
        # A new episode starts shut again.
        again = env.rollout(1, policy)
        assert again["lore_gate"].logical_not().all()


class _Playback(EnvBase):
    """Shows log-probabilities of a planned entropy, whatever the action."""

    def __init__(self, plan):
        super().__init__()
        self.rows = logits_of_entropy(*plan, plan[-1])
        self.time = 0
        self.observation_spec = Composite(observation=Unbounded((A,)))
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
