from __future__ import annotations

import copy

import pytest
import torch
from acting import observed as observed_states
from acting import run
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torchrl.envs import ExplorationType
from torchrl.modules import (
    DreamerV3DiscreteActor,
    IndependentNormal,
    NormalParamExtractor,
    TanhNormal,
)

from lore_torchrl import keys
from lore_torchrl.modules import (
    DreamerV3ContinuousActor,
    LatentDisagreement,
    LogitMixer,
    LoReActor,
    PriorNet,
    UncertaintyGate,
)
from lore_torchrl.policies import GaussianPolicy

A, STATE, BELIEF, N = 2, 6, 4, 2000
LOW, HIGH = torch.tensor([-2.0, -1.0]), torch.tensor([2.0, 3.0])
ANCHORS = [[-2.0, 1.0], [0.0, 3.0], [0.0, 1.0], [0.0, -1.0], [2.0, 1.0]]
K = len(ANCHORS)


def dreamer_actor():
    actor = DreamerV3ContinuousActor(STATE + BELIEF, LOW, HIGH, depth=1, num_cells=16)
    # The stock initialization has all but one policy; make it have an opinion.
    with torch.no_grad():
        for parameter in actor.parameters():
            if parameter.ndim == 2 and parameter.shape[0] == 2 * A:
                parameter.mul_(100.0)
    return actor


def plain_actor(kind=IndependentNormal, **kwargs):
    net = nn.Sequential(nn.Linear(STATE, 2 * A), NormalParamExtractor())
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["state"], ["mean", "spread"]),
        ProbabilisticTensorDictModule(
            in_keys={"loc": "mean", "scale": "spread"},
            out_keys=["action"],
            distribution_class=kind,
            distribution_kwargs=kwargs,
            default_interaction_type=InteractionType.RANDOM,
            return_log_prob=True,
            log_prob_key="action_log_prob",
        ),
    )


def build(actor, *, beta_max=1.0, max_kl=1.0, **kwargs):
    bounds = (LOW, HIGH) if actor[-1].distribution_class is TanhNormal else None
    gate = UncertaintyGate(value_weight=0.0, tau=0.0, kappa=50.0, beta_max=beta_max)
    policy = GaussianPolicy(ANCHORS, bounds=bounds, scale_range=(1e-3, 10.0))
    return LoReActor(actor, gate, LogitMixer(policy, max_kl=max_kl), **kwargs)


ACTORS = pytest.mark.parametrize(
    "make_actor",
    [dreamer_actor, plain_actor, lambda: plain_actor(TanhNormal, low=LOW, high=HIGH)],
    ids=["dreamer", "normal", "tanh_normal"],
)


def observed(n=N, **kwargs):
    return observed_states(n, K, (STATE, BELIEF), **kwargs)


class TestEqualsStock:
    @ACTORS
    @pytest.mark.parametrize("mode", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC, None])
    @pytest.mark.parametrize("why", ["beta_max", "masked", "nan", "no_advice"])
    def test_bitwise(self, make_actor, mode, why):
        actor = make_actor()
        td = observed(advice=why != "no_advice", mask=why != "masked")
        if why == "nan":
            td["llm_prior_logits"][:, 0] = float("nan")
        lore = build(actor, beta_max=float(why != "beta_max"))
        stock, stock_state = run(actor, td, mode=mode)
        found, state = run(lore, td, mode=mode)
        assert torch.equal(found["action"], stock["action"])
        assert torch.equal(found["action_log_prob"], stock["action_log_prob"])
        assert torch.equal(state, stock_state)
        if why != "no_advice":
            assert found["lore_source"].eq(keys.SOURCE_POLICY).all()
            assert found["lore_kl"].eq(0).all()

    @ACTORS
    def test_rows_without_advice_beside_rows_with_it(self, make_actor):
        actor, td = make_actor(), observed()
        td["llm_mask"] = torch.rand(N, 1) < 0.5
        off = ~td["llm_mask"].squeeze(-1)
        stock, stock_state = run(actor, td)
        found, state = run(build(actor), td)
        for name in ("action", "action_log_prob"):
            assert torch.equal(found[name][off], stock[name][off])
        assert (found["action"][~off] != stock["action"][~off]).any(-1).float().mean() > 0.99
        assert torch.equal(state, stock_state)

    @pytest.mark.parametrize("shape", [(), (2, 3)])
    def test_shapes(self, shape):
        actor = dreamer_actor()
        td = observed(1)[0].expand(*shape).clone() if shape else observed(1)[0]
        stock, _ = run(actor, td)
        found, _ = run(build(actor, beta_max=0.0), td)
        assert torch.equal(found["action"], stock["action"])
        assert found["lore_source"].shape == (*shape, 1)
        assert found["action_log_prob"].shape == stock["action_log_prob"].shape


class TestMixture:
    @ACTORS
    def test_action_is_drawn_from_the_mixture(self, make_actor):
        td = observed(1).expand(20_000).clone()
        lore = build(make_actor(), max_kl=0.5)
        found, _ = run(lore, td)
        value = found["action"]
        if lore.mixer.policy.bounded:
            value = ((2 * value - HIGH - LOW) / (HIGH - LOW)).clamp(-1 + 1e-6, 1 - 1e-6).atanh()
        loc, scale = found["lore_loc"][0], found["lore_scale"][0]
        assert ((value.mean(0) - loc).abs() < 5 * scale / 20_000**0.5).all()
        torch.testing.assert_close(value.std(0), scale, rtol=0.03, atol=0.0)
        assert 0.1 < found["lore_kl"].max() <= 0.5 * (1 + 1e-3)

    @ACTORS
    def test_source_is_one_where_another_anchor_is_nearest(self, make_actor):
        actor, td = make_actor(), observed()
        lore = build(actor)
        stock, _ = run(actor, td)
        found, _ = run(lore, td)
        moved = lore.mixer.policy.nearest(found["action"]) != lore.mixer.policy.nearest(
            stock["action"]
        )
        assert torch.equal(found["lore_source"] == keys.SOURCE_ADVICE, moved)
        assert 0.02 < moved.float().mean() < 0.98

    def test_all_out_keys_are_written(self):
        lore = build(dreamer_actor())
        td = observed(3)
        found, _ = run(lore, td)
        assert set(found.keys(True, True)) - set(td.keys(True, True)) == set(lore.out_keys)
        assert {"loc", "scale", "lore_loc", "lore_scale"} <= set(lore.out_keys)

    def test_parameters_are_shared_and_copies_have_their_own(self):
        actor = dreamer_actor()
        lore = build(actor)
        assert {id(p) for p in lore.parameters()} == {id(p) for p in actor.parameters()}
        td, copied = observed(), copy.deepcopy(lore)
        assert torch.equal(run(copied, td)[0]["action"], run(lore, td)[0]["action"])

    def test_decision_compiles_without_a_graph_break(self):
        td, lore = observed(64), build(dreamer_actor())
        expected, _ = run(lore, td, mode=ExplorationType.DETERMINISTIC)
        lore.compile_decision(backend="eager", fullgraph=True)
        found, _ = run(lore, td, mode=ExplorationType.DETERMINISTIC)
        torch.testing.assert_close(found["action"], expected["action"])
        assert (run(lore, td)[0]["action"] != expected["action"]).any()

    def test_learned_advice_on_the_anchors_is_the_fallback(self):
        prior_net = PriorNet(STATE + BELIEF, K, num_cells=8, threshold=0.0)
        with torch.no_grad():
            prior_net.network.model[-1].bias.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0, 9.0]))
        lore = build(dreamer_actor(), prior_net=prior_net)
        found, _ = run(lore, observed(mask=False))
        assert found["lore_origin"].eq(keys.ORIGIN_PRIOR_NET).all()
        assert (found["lore_loc"][:, 0] > found["loc"][:, 0]).all()
        parts, advice = lore.explain(found)
        assert advice.prior_logits.argmax(-1).eq(K - 1).all() and advice.learned.all()
        torch.testing.assert_close(parts["entropy"], found["lore_uncertainty"])


def test_the_gate_weighs_disagreement_about_the_location():
    actor, td = dreamer_actor(), observed(64)
    gate = UncertaintyGate(value_weight=0.0, disagreement_weight=0.5)
    policy = GaussianPolicy(ANCHORS, bounds=(LOW, HIGH), scale_range=(0.1, 1.0))
    ensemble = LatentDisagreement(STATE, BELIEF, A, hidden_dim=8)
    lore = LoReActor(actor, gate, LogitMixer(policy), disagreement=ensemble)
    found, state = run(lore, td)
    spread = ensemble.at(td["state"], td["belief"], policy.squash(found["loc"]))
    parts, _ = lore.explain(found)
    torch.testing.assert_close(parts["disagreement"], 0.5 / 1.5 * spread / spread.max())
    torch.testing.assert_close(found["lore_uncertainty"], parts["entropy"] + parts["disagreement"])
    assert torch.equal(state, run(actor, td)[1])


def test_the_wrong_mixer_is_refused():
    gate = UncertaintyGate(value_weight=0.0)
    with pytest.raises(ValueError, match="Gaussian actor needs"):
        LoReActor(dreamer_actor(), gate, LogitMixer())
    discrete = DreamerV3DiscreteActor(10, 4, num_cells=8)
    with pytest.raises(ValueError, match="Supported are TanhNormal"):
        build(discrete)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"low": HIGH}, "low below high"),
        ({"high": torch.tensor([float("inf"), 3.0])}, "must be finite"),
        ({"scale_range": (1.0, 0.5)}, "scale_range needs"),
        ({"depth": 0}, "depth must be positive, got 0"),
    ],
)
def test_impossible_actors(changes, message):
    settings = {"low": LOW, "high": HIGH} | changes
    with pytest.raises(ValueError, match=message):
        DreamerV3ContinuousActor(6, **settings)
