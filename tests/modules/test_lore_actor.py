from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from acting import observed as observed_states
from acting import run
from tensordict import TensorDict
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Normal
from torchrl.data import Bounded, OneHot
from torchrl.envs import ExplorationType
from torchrl.modules import DreamerV3DiscreteActor, OneHotCategorical

from lore_torchrl import keys
from lore_torchrl.dreamer.metrics import policy_metrics
from lore_torchrl.modules import (
    LogitMixer,
    LoReActor,
    TemperatureAligner,
    UncertaintyGate,
    ValidEGreedyModule,
)

A, STATE, BELIEF = 5, 6, 4
N = 3000


def dreamer_actor():
    actor = DreamerV3DiscreteActor(STATE + BELIEF, A, depth=1, num_cells=16)
    # The stock initialization is all but uniform; make the policy have an opinion.
    with torch.no_grad():
        actor[0].module(torch.zeros(1, STATE), torch.zeros(1, BELIEF))
        for parameter in actor.parameters():
            if parameter.ndim == 2 and parameter.shape[0] == A:
                parameter.mul_(100.0)
    return actor


def plain_actor():
    return ProbabilisticTensorDictSequential(
        TensorDictModule(
            nn.Sequential(nn.Linear(STATE, 16), nn.Tanh(), nn.Linear(16, A)), ["state"], ["logits"]
        ),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=OneHotCategorical,
            default_interaction_type=ExplorationType.RANDOM,
            return_log_prob=True,
            log_prob_key="action_log_prob",
        ),
    )


ACTORS = pytest.mark.parametrize("make_actor", [dreamer_actor, plain_actor])


def open_gate(**kwargs):
    return UncertaintyGate(value_weight=0.0, tau=0.0, kappa=50.0, **kwargs)


def observed(n=N, **kwargs):
    return observed_states(n, A, (STATE, BELIEF), **kwargs)


class TwoWays(nn.Linear):
    """Takes its inputs by name, and has a second way to be called."""

    def __init__(self):
        super().__init__(STATE + BELIEF, A)

    def forward(self, *, belief, state):
        return super().forward(torch.cat((state, belief), -1))

    def negative(self, state, belief):
        return -super().forward(torch.cat((state, belief), -1))


NAMED = {"belief": "belief", "state": "state"}
UNUSUAL = {
    "inputs by name": lambda net: TensorDictModule(net, NAMED, ["logits"], out_to_in_map=True),
    "another method": lambda net: TensorDictModule(
        net, ["state", "belief"], ["logits"], method="negative"
    ),
}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_an_actor_is_called_as_it_was_built(make, hooked):
    net, calls = make(TwoWays()), []
    if hooked:
        net.register_forward_hook(lambda *_: calls.append(1))
    stock = ProbabilisticTensorDictSequential(net, plain_actor()[-1])
    td = observed(50, mask=False)
    (mine, _), (theirs, _) = run(LoReActor(stock, open_gate(), LogitMixer()), td), run(stock, td)
    assert torch.equal(mine["action"], theirs["action"]) and len(calls) == 2 * hooked


def test_outside_of_a_collector_it_is_as_random_as_the_stock_actor():
    stock = plain_actor()
    stock[-1].default_interaction_type = ExplorationType.DETERMINISTIC
    td = observed(50, mask=False)
    actor = LoReActor(stock, open_gate(), LogitMixer())
    with torch.no_grad():
        assert torch.equal(actor(td.clone())["action"], stock(td.clone())["action"])


def test_a_head_that_it_cannot_serve_is_refused():
    stock = plain_actor()
    for changes, message in (
        ({"out_keys": ["act"]}, "must write 'action'"),
        ({"distribution_class": torch.distributions.Categorical}, "must be one-hot"),
    ):
        settings = {
            "in_keys": ["logits"],
            "out_keys": ["action"],
            "distribution_class": OneHotCategorical,
        }
        head = ProbabilisticTensorDictModule(**settings | changes)
        other = ProbabilisticTensorDictSequential(stock[0], head)
        with pytest.raises(ValueError, match=message):
            LoReActor(other, open_gate(), LogitMixer())


class TestEqualsStock:
    @ACTORS
    @pytest.mark.parametrize("mode", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC, None])
    @pytest.mark.parametrize("why", ["beta_max", "masked", "no_confidence", "nan", "no_advice"])
    def test_bitwise(self, make_actor, mode, why):
        actor = make_actor()
        td = observed(advice=why != "no_advice", mask=why != "masked")
        if why == "no_confidence":
            td["llm_confidence"].zero_()
        if why == "nan":
            td["llm_prior_logits"][:, 0] = float("nan")
        lore = LoReActor(actor, open_gate(beta_max=float(why != "beta_max")), LogitMixer())
        for seed in range(5):
            stock, stock_state = run(actor, td, seed, mode)
            found, state = run(lore, td, seed, mode)
            assert torch.equal(found["action"], stock["action"])
            assert torch.equal(found["action_log_prob"], stock["action_log_prob"])
            assert torch.equal(state, stock_state)
            assert found["action"].dtype == stock["action"].dtype
            assert found["action_log_prob"].dtype == stock["action_log_prob"].dtype
            if why != "no_advice":
                assert found["lore_source"].eq(keys.SOURCE_POLICY).all()

    @ACTORS
    @pytest.mark.parametrize("mode", ["logit", "probability"])
    def test_rows_without_advice_beside_rows_with_it(self, make_actor, mode):
        actor = make_actor()
        td = observed()
        td["llm_mask"] = torch.rand(N, 1) < 0.5
        off = ~td["llm_mask"].squeeze(-1)
        stock, stock_state = run(actor, td)
        found, state = run(LoReActor(actor, open_gate(), LogitMixer(mode=mode)), td)
        assert torch.equal(found["action"][off], stock["action"][off])
        assert torch.equal(found["action_log_prob"][off], stock["action_log_prob"][off])
        assert not torch.equal(found["action"][~off], stock["action"][~off])
        assert torch.equal(state, stock_state)

    @pytest.mark.parametrize("shape", [(), (7,), (2, 3), (1, 4, 2)])
    def test_shapes(self, shape):
        actor = dreamer_actor()
        td = observed(1)[0].expand(*shape).clone() if shape else observed(1)[0]
        stock, _ = run(actor, td)
        found, _ = run(LoReActor(actor, open_gate(beta_max=0.0), LogitMixer()), td)
        for key in ("action", "action_log_prob", "logits"):
            assert found[key].shape == stock[key].shape
        assert torch.equal(found["action"], stock["action"])
        assert found["lore_source"].shape == (*shape, 1)


class TestRuledOut:
    """An actor that masks an action gives it a logit of minus infinity."""

    @pytest.mark.parametrize("mode", ["logit", "probability"])
    @pytest.mark.parametrize("max_kl", [0.5, math.inf])
    def test_all_that_is_measured_is_finite(self, mode, max_kl):
        actor = plain_actor()
        with torch.no_grad():
            actor[0].module[-1].bias[2] = -torch.inf
        td = observed()
        lore = LoReActor(actor, open_gate(), LogitMixer(max_kl=max_kl, mode=mode))
        out, _ = run(lore, td)
        for key in ("lore_beta", "lore_kl", "lore_uncertainty", "lore_logits", "action_log_prob"):
            assert out[key].isfinite().all(), key
        assert (out["lore_beta"] > 0).all() and (out["lore_kl"] <= max_kl + 1e-5).all()
        assert (out["lore_source"] == keys.SOURCE_ADVICE).any()
        # Advice brings it back nowhere, and the bound is spent on what is possible.
        mixed, own = (out[key].softmax(-1) for key in ("lore_logits", "logits"))
        assert (mixed[:, 2] == 0).all() and (own[:, 2] == 0).all()
        possible = [0, 1, 3, 4]
        kl = (mixed * (mixed / own).log())[:, possible].sum(-1, keepdim=True)
        torch.testing.assert_close(kl, out["lore_kl"], atol=1e-5, rtol=1e-4)
        assert kl.mean() > 0.1
        entropies = policy_metrics(out)
        assert 0 < entropies["lore/entropy_wm"] < math.log(A)

    def test_without_advice_the_action_is_stock_s(self):
        actor = plain_actor()
        with torch.no_grad():
            actor[0].module[-1].bias[2] = -torch.inf
        td = observed(advice=False)
        stock, _ = run(actor, td)
        found, _ = run(LoReActor(actor, open_gate(), LogitMixer()), td)
        assert torch.equal(found["action"], stock["action"])
        assert torch.equal(found["action_log_prob"], stock["action_log_prob"])


class TestMixture:
    @ACTORS
    def test_source_is_one_exactly_where_advice_changed_the_action(self, make_actor):
        actor = make_actor()
        td = observed(scale=1.0)
        lore = LoReActor(actor, open_gate(), LogitMixer(max_kl=0.3))
        for mode in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC):
            stock, _ = run(actor, td, mode=mode)
            found, _ = run(lore, td, mode=mode)
            changed = (found["action"] != stock["action"]).any(-1, keepdim=True)
            assert torch.equal(found["lore_source"] == keys.SOURCE_ADVICE, changed)
            assert torch.equal(found["lore_source"] == keys.SOURCE_POLICY, ~changed)
            assert 0.02 < changed.float().mean() < 0.9

    @pytest.mark.parametrize("mode", ["logit", "probability"])
    def test_frequencies_are_those_of_the_mixture(self, mode):
        n = 40_000
        td = observed(1, scale=2.0).expand(n).clone()
        actor = dreamer_actor()
        found, _ = run(LoReActor(actor, open_gate(), LogitMixer(mode=mode, max_kl=0.5)), td)
        frequency = found["action"].float().mean(0)
        mixture = found["lore_logits"][0].exp()
        deviation = (mixture * (1 - mixture) / n).sqrt()
        assert ((frequency - mixture).abs() < 4.5 * deviation + 1e-6).all()
        stock = run(actor, td)[0]["logits"][0].softmax(-1)
        assert (frequency - stock).abs().max() > 20 * deviation.max()

    def test_log_probability_is_that_of_the_mixture(self):
        found, _ = run(LoReActor(dreamer_actor(), open_gate(), LogitMixer()), observed())
        index = found["action"].argmax(-1, keepdim=True)
        expected = found["lore_logits"].gather(-1, index).squeeze(-1)
        assert torch.equal(found["action_log_prob"], expected)

    def test_deterministic_takes_the_mode_of_the_mixture(self):
        lore = LoReActor(dreamer_actor(), open_gate(), LogitMixer())
        found, _ = run(lore, observed(), mode=ExplorationType.DETERMINISTIC)
        assert torch.equal(found["action"].argmax(-1), found["lore_logits"].argmax(-1))

    def test_all_out_keys_are_written(self):
        td = observed(3)
        td["lore_gate"] = torch.zeros(3, 1, dtype=torch.bool)
        lore = LoReActor(dreamer_actor(), open_gate(hysteresis=(0.1, 0.2)), LogitMixer())
        assert "lore_gate" in lore.in_keys
        found, _ = run(lore, td)
        written = set(found.keys(True, True)) - set(td.keys(True, True))
        assert written == set(lore.out_keys)
        assert found["lore_source"].dtype == torch.int64

    def test_critic_is_run_for_the_gate_only_where_it_weighs(self):
        critic = TensorDictModule(nn.Linear(BELIEF, 255), ["belief"], ["state_value_logits"])
        off = LoReActor(dreamer_actor(), open_gate(), LogitMixer(), value_model=critic)
        assert "state_value_logits" not in run(off, observed(3))[0]
        gate = UncertaintyGate(value_weight=0.3)
        on = LoReActor(dreamer_actor(), gate, LogitMixer(), value_model=critic)
        assert run(on, observed(3))[0]["lore_beta"].shape == (3, 1)
        with pytest.raises(ValueError, match=r"value_weight=0\.2"):
            LoReActor(dreamer_actor(), gate, LogitMixer())

    def test_a_critic_without_bins_is_refused_where_the_gate_weighs_it(self):
        critic = TensorDictModule(nn.Linear(BELIEF, 1), ["belief"], ["state_value"])
        with pytest.raises(ValueError, match=r"writes 'state_value_logits'.*value_weight=0"):
            gate = UncertaintyGate(value_weight=0.3)
            LoReActor(dreamer_actor(), gate, LogitMixer(), value_model=critic)

    def test_parameters_are_shared_with_the_stock_actor(self):
        actor = dreamer_actor()
        lore = LoReActor(actor, open_gate(), LogitMixer())
        assert {id(p) for p in lore.parameters()} == {id(p) for p in actor.parameters()}

    def test_copies_act_with_their_own_parameters(self):
        lore = LoReActor(dreamer_actor(), open_gate(beta_max=0.0), LogitMixer())
        td = observed()
        expected, _ = run(lore, td)
        for copied in (copy.deepcopy(lore), pickle.loads(pickle.dumps(lore))):
            assert torch.equal(run(copied, td)[0]["action"], expected["action"])
            with torch.no_grad():
                for parameter in copied.parameters():
                    parameter.zero_()
            uniform = run(copied, td)[0]["logits"].softmax(-1)
            torch.testing.assert_close(uniform, torch.full((N, A), 1 / A))
        assert torch.equal(run(lore, td)[0]["action"], expected["action"])

    @pytest.mark.parametrize("mode", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
    def test_decision_compiles_without_a_graph_break(self, mode):
        actor, td = dreamer_actor(), observed()
        td["lore_gate"] = torch.zeros(N, 1, dtype=torch.bool)
        gates = [open_gate(hysteresis=(0.2, 0.5), dropout=0.1, warmup_steps=2) for _ in "ab"]
        plain, compiled = (LoReActor(actor, gate, LogitMixer()) for gate in gates)
        compiled.compile_decision(backend="eager", fullgraph=True)
        for seed in range(3):
            expected, expected_state = run(plain, td, seed, mode)
            found, state = run(compiled, td, seed, mode)
            assert (found == expected).all()
            assert torch.equal(state, expected_state)
        assert gates[1].steps == 3

    def test_a_copy_of_a_compiled_actor_decides_with_its_own_gate(self):
        actor = LoReActor(dreamer_actor(), open_gate(), LogitMixer())
        actor.compile_decision(backend="eager")
        td = TensorDict(
            state=torch.randn(4, STATE),
            belief=torch.randn(4, BELIEF),
            llm_prior_logits=3 * torch.randn(4, A),
            llm_confidence=torch.ones(4, 1),
            llm_mask=torch.ones(4, 1, dtype=torch.bool),
            batch_size=[4],
        )
        actor(td.clone())
        for duplicate in (copy.deepcopy(actor), pickle.loads(pickle.dumps(actor))):
            duplicate.gate.beta_max = 0.0
            assert duplicate(td.clone())["lore_beta"].eq(0).all()
        assert actor(td.clone())["lore_beta"].gt(0).all()

    def test_an_actor_that_is_not_categorical_is_refused(self):
        actor = ProbabilisticTensorDictSequential(
            TensorDictModule(nn.Linear(STATE, 2 * A), ["state"], ["params"]),
            TensorDictModule(NormalParamExtractor(), ["params"], ["loc", "scale"]),
            ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=Normal),
        )
        with pytest.raises(ValueError, match=r"categorical.*loc.*scale"):
            LoReActor(actor, open_gate(), LogitMixer())


@pytest.mark.parametrize("missing", ["llm_confidence", "llm_mask"])
def test_what_is_missing_beside_advice_is_named(missing):
    lore = LoReActor(dreamer_actor(), open_gate(), LogitMixer())
    with pytest.raises(KeyError, match=f"no ..{missing}.. beside it"):
        lore(observed(3).exclude(missing))


def test_a_mask_that_is_not_boolean_is_refused():
    td = observed(3)
    td["llm_mask"] = td["llm_mask"].float()
    with pytest.raises(TypeError, match=r"must be boolean, got torch.float32"):
        LoReActor(dreamer_actor(), open_gate(), LogitMixer())(td)


def test_advice_on_another_number_of_actions_is_refused():
    td = observed(3)
    td["llm_prior_logits"] = torch.zeros(3, A + 1)
    with pytest.raises(ValueError, match=r"advice has 6 logits a state, the policy 5"):
        LoReActor(dreamer_actor(), open_gate(), LogitMixer())(td)


def test_a_gate_that_weighs_disagreement_needs_the_ensemble():
    with pytest.raises(ValueError, match=r"disagreement_weight=.*pass disagreement"):
        LoReActor(dreamer_actor(), open_gate(disagreement_weight=0.5), LogitMixer())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_it_never_waits_for_the_device():
    actor, mixer = dreamer_actor().cuda(), LogitMixer(temperature=TemperatureAligner()).cuda()
    lore, td = LoReActor(actor, open_gate().cuda(), mixer), observed(8).to("cuda")
    lore(td.clone())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            out = lore(td.clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out["action"].is_cuda and out["action"].sum(-1).eq(1).all()


class TestValidEGreedy:
    def acted(self, n=N):
        valid = torch.rand(n, A) < 0.5
        valid[:, 2] = True
        action = nn.functional.one_hot(torch.randint(A, (n,)), A)
        source = torch.randint(2, (n, 1))
        return TensorDict(action=action, action_mask=valid, lore_source=source, batch_size=[n])

    def test_random_actions_are_valid_and_marked_where_they_changed_something(self):
        before = self.acted()
        after, _ = run(ValidEGreedyModule(OneHot(A), eps_init=0.4), before)
        changed = (after["action"] != before["action"]).any(-1)
        assert after["action"].sum(-1).eq(1).all()
        taken = after["action"].bool()
        assert (before["action_mask"] & taken).any(-1)[changed].all()
        expected = torch.where(changed.unsqueeze(-1), keys.SOURCE_RANDOM, before["lore_source"])
        assert torch.equal(after["lore_source"], expected)
        # Of the random draws, those that repeat the action change nothing.
        valid = before["action_mask"]
        repeats = ((valid & before["action"].bool()).any(-1) / valid.sum(-1)).mean().item()
        assert changed.float().mean().item() == pytest.approx(0.4 * (1 - repeats), abs=0.03)

    def test_every_valid_action_is_drawn(self):
        td = self.acted(1).expand(N).clone()
        td["action_mask"][:] = torch.tensor([True, False, True, False, True])
        after, _ = run(ValidEGreedyModule(OneHot(A), eps_init=1.0), td)
        share = after["action"].float().mean(0)
        torch.testing.assert_close(share, torch.tensor([1, 0, 1, 0, 1]) / 3, rtol=0, atol=0.04)

    def test_epsilon_zero_changes_nothing(self):
        before = self.acted()
        after, _ = run(ValidEGreedyModule(OneHot(A), eps_init=0.0, eps_end=0.0), before)
        assert torch.equal(after["action"], before["action"])
        assert torch.equal(after["lore_source"], before["lore_source"])

    def test_deterministic_evaluation_explores_nothing(self):
        before = self.acted()
        module = ValidEGreedyModule(OneHot(A), eps_init=1.0)
        after, _ = run(module, before, mode=ExplorationType.DETERMINISTIC)
        assert torch.equal(after["action"], before["action"])
        assert torch.equal(after["lore_source"], before["lore_source"])

    def test_after_the_stock_actor(self):
        module = ValidEGreedyModule(OneHot(A), eps_init=1.0, eps_end=1.0, action_mask_key=None)
        td = TensorDict(
            state=torch.randn(50, STATE), belief=torch.randn(50, BELIEF), batch_size=[50]
        )
        out = module(dreamer_actor()(td))
        assert set(out["lore_source"].flatten().tolist()) == {0, 2}

    def test_anneal(self):
        module = ValidEGreedyModule(OneHot(A), eps_init=0.5, eps_end=0.1, annealing_num_steps=100)
        assert module.eps.item() == pytest.approx(0.5)
        for frames, expected in ((25, 0.4), (100, 0.1), (10_000, 0.1), (0, 0.5)):
            module.anneal(frames)
            assert module.eps.item() == pytest.approx(expected)

    def test_after_a_lore_actor(self):
        td = observed()
        td["action_mask"] = torch.ones(N, A, dtype=torch.bool)
        lore = LoReActor(dreamer_actor(), open_gate(), LogitMixer())
        acted, _ = run(lore, td)
        explored, _ = run(ValidEGreedyModule(OneHot(A), eps_init=0.3), acted)
        assert set(explored["lore_source"].unique().tolist()) == {0, 1, 2}

    def test_continuous_actions_are_drawn_evenly_within_their_bounds(self):
        low, high = torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 1.0])
        spec = Bounded(low, high, dtype=torch.float32)
        before = TensorDict(
            action=low.expand(N, 2), lore_source=torch.ones(N, 1, dtype=torch.long), batch_size=[N]
        )
        module = ValidEGreedyModule(spec, eps_init=0.4, action_mask_key=None)
        after, _ = run(module, before)
        changed = (after["action"] != low).all(-1)
        assert changed.float().mean().item() == pytest.approx(0.4, abs=0.03)
        assert torch.equal(after["action"][~changed], before["action"][~changed])
        assert torch.equal(after["lore_source"], 1 + changed.unsqueeze(-1).long())
        drawn = ((after["action"] - low) / (high - low))[changed]
        assert drawn.min() >= 0.0 and drawn.max() <= 1.0
        torch.testing.assert_close(drawn.mean(0), torch.full((2,), 0.5), rtol=0, atol=0.03)
        torch.testing.assert_close(drawn.var(0), torch.full((2,), 1 / 12), rtol=0.1, atol=0)
        assert torch.corrcoef(drawn.T)[0, 1].abs() < 0.1
        with pytest.raises(ValueError, match="no mask: set action_mask_key=None"):
            ValidEGreedyModule(spec)

    @pytest.mark.parametrize(
        ("kwargs", "match"),
        [
            ({"eps_init": 1.5}, "1.5"),
            ({"eps_end": -0.5}, "-0.5"),
            ({"eps_init": 0.1, "eps_end": 0.2}, "eps_end=0.2.*0.1"),
            ({"annealing_num_steps": 0}, "annealing_num_steps.*0"),
        ],
    )
    def test_bad_arguments(self, kwargs, match):
        with pytest.raises(ValueError, match=match):
            ValidEGreedyModule(OneHot(A), **kwargs)
