from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dreamer_sample import (
    ACTIONS,
    BELIEF,
    STATE,
    gradients,
    latents,
    lore_config,
    tiny_agent,
    tiny_config,
    tiny_learner,
)
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch.distributions import Categorical, OneHotCategoricalStraightThrough, kl_divergence
from torchrl.envs import ExplorationType
from torchrl.objectives import DreamerActorLoss, DreamerV3ActorLoss, DreamerV3ValueLoss
from torchrl.objectives.utils import ValueEstimators

from lore_torchrl.control import ShareBandit
from lore_torchrl.dreamer.learner import build_lore_actor
from lore_torchrl.functional import align_temperature, clean_advice
from lore_torchrl.modules import LogitMixer, TemperatureAligner, UncertaintyGate, ValueEnsemble
from lore_torchrl.objectives import LoReActorLoss

NAN, INF = float("nan"), float("inf")


def agent_for(kind):
    """Build the agent; DreamerV1 learns through the action, so its actor must reparametrise."""
    agent = tiny_agent()
    if kind is DreamerV3ActorLoss:
        return agent
    head = ProbabilisticTensorDictModule(
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=OneHotCategoricalStraightThrough,
        default_interaction_type=ExplorationType.RANDOM,
    )
    return replace(agent, actor=ProbabilisticTensorDictSequential(agent.actor[0], head))


def stock_loss(agent, kind=DreamerV3ActorLoss, **kwargs):
    if kind is DreamerV3ActorLoss:
        kwargs = {
            "continuation_model": agent.continuation,
            "use_reinforce": True,
            "entropy_bonus": 3e-4,
            **kwargs,
        }
    loss = kind(agent.actor, agent.value, agent.imagination, imagination_horizon=3, **kwargs)
    loss.make_value_estimator(ValueEstimators.TDLambda, gamma=0.9, lmbda=0.8)
    return loss


def lore_loss(agent, *, kind=DreamerV3ActorLoss, gate=None, temperature=None, **kwargs):
    lore = build_lore_actor(lore_config(gate=gate, temperature=temperature), agent)
    return LoReActorLoss(stock_loss(agent, kind), gate=lore.gate, mixer=lore.mixer, **kwargs)


def log_policy(agent, td):
    return torch.log_softmax(agent.actor.get_dist(td).logits, -1)


def weighted(agent, td, divergence):
    """Mean of confidence times divergence over the advised rows."""
    keep = td["llm_mask"].squeeze(-1)
    values = td["llm_confidence"].squeeze(-1) * divergence
    return values[keep].mean()


def sometimes_advised(n=12):
    td = latents(n)
    td["llm_mask"] = torch.arange(n).unsqueeze(-1) % 3 != 0
    return td


BOTH = pytest.mark.parametrize("kind", [DreamerV3ActorLoss, DreamerActorLoss])


class TestEqualsStock:
    @BOTH
    @pytest.mark.parametrize("why", ["weights", "masked", "no_entries"])
    def test_losses_gradients_and_random_stream(self, kind, why):
        results = []
        for wrapped in (False, True):
            agent = agent_for(kind)
            td = latents(mask=why != "masked")
            loss = stock_loss(agent, kind)
            if why == "no_entries":
                td = td.select("state", "belief")
            if wrapped:
                off = {"prior_weight": 0.0, "multiplier_lr": 0.0}
                lore = build_lore_actor(lore_config(), agent)
                loss = LoReActorLoss(
                    loss, gate=lore.gate, mixer=lore.mixer, **(off if why == "weights" else {})
                )
            torch.manual_seed(5)
            losses, imagined = loss(td)
            sum(v for k, v in losses.items() if k.startswith("loss_")).backward()
            results.append((losses, imagined, gradients(agent.actor), torch.get_rng_state()))
        (stock, stock_imagined, stock_grads, stock_state), (lore, imagined, grads, state) = results
        assert set(stock.keys()) <= set(lore.keys())
        assert all(torch.equal(value, lore[key]) for key, value in stock.items())
        assert all(v == 0 for k, v in lore.items() if k.startswith("loss_lore"))
        assert (imagined == stock_imagined).all()
        assert torch.equal(state, stock_state)
        assert set(grads) == set(stock_grads) and any(g.any() for g in grads.values())
        assert all(torch.equal(grads[name], grad) for name, grad in stock_grads.items())

    @BOTH
    def test_with_advice_the_stock_loss_stays_what_it_was(self, kind):
        agent = agent_for(kind)
        td = latents()
        torch.manual_seed(5)
        stock, _ = stock_loss(agent, kind)(td)
        torch.manual_seed(5)
        lore, _ = lore_loss(agent, kind=kind)(td)
        assert all(torch.equal(value, lore[key]) for key, value in stock.items())
        assert lore["loss_lore_prior"] > 0


class TestPrior:
    @pytest.mark.parametrize("direction", ["prior_to_policy", "policy_to_prior"])
    def test_by_hand(self, direction):
        agent = tiny_agent()
        td = sometimes_advised()
        loss = lore_loss(
            agent, prior_weight=0.3, prior_kl=direction, temperature={"init": 1.5}
        ).eval()
        prior = Categorical(logits=td["llm_prior_logits"] / 1.5)
        policy = Categorical(logits=log_policy(agent, td))
        pair = (prior, policy) if direction == "prior_to_policy" else (policy, prior)
        expected = 0.3 * weighted(agent, td, kl_divergence(*pair))
        terms = loss.advice_terms(td)
        torch.testing.assert_close(terms["loss_lore_prior"], expected)
        other = 0.3 * weighted(agent, td, kl_divergence(*pair[::-1]))
        assert abs(other - expected) > 1e-2

    def test_without_a_mixer_the_temperature_is_one(self):
        agent = tiny_agent()
        td = sometimes_advised()
        loss = LoReActorLoss(stock_loss(agent), prior_weight=1.0, multiplier_lr=0.0)
        prior = Categorical(logits=td["llm_prior_logits"])
        expected = weighted(
            agent, td, kl_divergence(prior, Categorical(logits=log_policy(agent, td)))
        )
        terms = loss.advice_terms(td)
        torch.testing.assert_close(terms["loss_lore_prior"], expected)
        assert set(terms.keys()) == {"loss_lore_prior", "lore_advised"}

    def test_gradient_step_moves_the_policy_towards_the_advice(self):
        agent = tiny_agent()
        td = latents()
        loss = lore_loss(agent, prior_weight=1.0, multiplier_lr=0.0)
        optimizer = torch.optim.SGD(agent.actor.parameters(), lr=0.1)
        values = []
        for _ in range(5):
            term = loss.advice_terms(td)["loss_lore_prior"]
            optimizer.zero_grad()
            term.backward()
            optimizer.step()
            values.append(term.item())
        assert values == sorted(values, reverse=True)

    def test_advice_gets_no_gradient(self):
        td = latents()
        td["llm_prior_logits"].requires_grad_()
        td["llm_confidence"].requires_grad_()
        td["state"].requires_grad_()
        loss = lore_loss(tiny_agent(), bonus_weight=0.5, delta=0.0, multiplier_init=0.5)
        terms = loss.advice_terms(td)
        sum(v for k, v in terms.items() if k.startswith("loss_")).backward()
        assert td["llm_prior_logits"].grad is None
        assert td["llm_confidence"].grad is None
        assert td["state"].grad is None


class TestBonus:
    def test_by_hand(self):
        agent = tiny_agent()
        td = sometimes_advised()
        loss = lore_loss(agent, bonus_weight=0.7, temperature={"init": 0.8}).eval()
        log_prior = torch.log_softmax(td["llm_prior_logits"] / 0.8, -1)
        expected = (log_policy(agent, td).exp() * log_prior).sum(-1)
        terms = loss.advice_terms(td)
        torch.testing.assert_close(terms["loss_lore_bonus"], -0.7 * weighted(agent, td, expected))

    def test_not_computed_without_weight(self):
        assert "loss_lore_bonus" not in lore_loss(tiny_agent()).advice_terms(latents())


def test_an_action_that_the_actor_rules_out():
    """Its logit is minus infinity: all terms and gradients are finite, as stock's are."""
    agent = tiny_agent()
    ruled_out = torch.tensor([False, True, False, False])
    mask = TensorDictModule(
        lambda logits: logits.masked_fill(ruled_out, -INF), ["logits"], ["logits"]
    )
    actor = ProbabilisticTensorDictSequential(agent.actor[0], mask, agent.actor[1])
    agent = replace(agent, actor=actor)
    loss = lore_loss(
        agent, bonus_weight=0.5, distillation_weight=0.3, multiplier_init=0.5, delta=0.02
    )
    losses, _ = loss(latents())
    assert all(value.isfinite().all() for value in losses.values())
    assert {"loss_lore_prior", "loss_lore_constraint", "loss_lore_distillation"} <= set(
        losses.keys()
    )
    assert losses["loss_lore_constraint"] > 0 and loss.multiplier.isfinite()
    # What is taught is what can be done.
    assert losses["loss_lore_prior"] < 10
    sum(v for k, v in losses.items() if k.startswith("loss_")).backward()
    found = gradients(agent.actor)
    assert any(g.any() for g in found.values()) and all(g.isfinite().all() for g in found.values())


def mixture_kl(agent, loss, td):
    log_p = log_policy(agent, td)
    values = agent.value(td.select("state", "belief"))["state_value_logits"]
    beta = loss.gate.evaluate(log_p.detach(), values).beta
    assert beta.max() > 0.5
    advice = [td[key] for key in ("llm_prior_logits", "llm_confidence", "llm_mask")]
    mixture = loss.mixer.mix(log_p.detach(), *advice, beta)
    assert mixture.kl.max() > 0.05
    kl = (mixture.log_probs.exp() * (mixture.log_probs - log_p)).sum(-1)
    return kl[td["llm_mask"].squeeze(-1)].mean()


class TestConstraint:
    def test_by_hand(self):
        agent = tiny_agent()
        td = sometimes_advised()
        loss = lore_loss(agent, multiplier_init=0.5, delta=0.02).eval()
        kl = mixture_kl(agent, loss, td)
        terms = loss.advice_terms(td)
        torch.testing.assert_close(terms["loss_lore_constraint"], 0.5 * (kl - 0.02))
        torch.testing.assert_close(terms["lore_kl"], kl.detach())

    def test_zero_within_the_bound(self):
        loss = lore_loss(tiny_agent(), multiplier_init=0.5, delta=10.0)
        assert loss.advice_terms(latents())["loss_lore_constraint"] == 0

    def test_gradient_flows_only_through_the_policy(self):
        agent = tiny_agent()
        td = sometimes_advised()
        loss = lore_loss(agent, prior_weight=0.0, multiplier_init=0.5, delta=0.0)
        mixture_kl(agent, loss, td).mul(0.5).backward()
        expected = gradients(agent.actor)
        agent.actor.zero_grad()
        loss.advice_terms(td)["loss_lore_constraint"].backward()
        found = gradients(agent.actor)
        assert set(found) == set(expected) and any(g.any() for g in found.values())
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad)

    def test_gradient_reaches_only_the_actor(self):
        agent = tiny_agent()
        loss = lore_loss(agent, multiplier_init=0.5, delta=0.0, bonus_weight=0.1)
        terms = loss.advice_terms(latents())
        sum(v for k, v in terms.items() if k.startswith("loss_")).backward()
        assert gradients(agent.actor)
        assert not gradients(agent.value) and not gradients(agent.world_model)


class TestDistillation:
    def test_by_hand(self):
        agent = tiny_agent()
        td = sometimes_advised()
        loss = lore_loss(agent, prior_weight=0.0, distillation_weight=0.4, multiplier_lr=0.0).eval()
        terms = loss.advice_terms(td)
        expected = 0.4 * mixture_kl(agent, loss, td)
        torch.testing.assert_close(terms["loss_lore_distillation"], expected)
        expected.backward()
        by_hand = gradients(agent.actor)
        agent.actor.zero_grad()
        terms["loss_lore_distillation"].backward()
        found = gradients(agent.actor)
        assert set(found) == set(by_hand) and any(g.any() for g in found.values())
        for name, grad in by_hand.items():
            torch.testing.assert_close(found[name], grad)


@pytest.mark.parametrize(
    ("term", "settings"),
    [
        ("constraint", {"multiplier_init": 1.0, "delta": 0.0}),
        ("distillation", {"distillation_weight": 1.0, "multiplier_lr": 0.0}),
    ],
)
def test_a_step_brings_policy_and_mixture_together(term, settings):
    agent = tiny_agent()
    td = latents()
    loss = lore_loss(agent, prior_weight=0.0, **settings)
    optimizer = torch.optim.SGD(agent.actor.parameters(), lr=0.5)
    first = loss.advice_terms(td)["lore_kl"]
    for _ in range(20):
        optimizer.zero_grad()
        loss.advice_terms(td)[f"loss_lore_{term}"].backward()
        optimizer.step()
    assert loss.advice_terms(td)["lore_kl"] < 0.8 * first


class TestMultiplier:
    @pytest.mark.parametrize(("delta", "sign"), [(0.0, 1), (5.0, -1)])
    def test_follows_the_violation(self, delta, sign):
        agent = tiny_agent()
        td = sometimes_advised()
        loss = lore_loss(agent, multiplier_init=0.5, multiplier_lr=0.01, delta=delta)
        kl = mixture_kl(agent, loss, td).item()
        terms = loss.advice_terms(td)
        assert loss.multiplier.item() == pytest.approx(0.5 + 0.01 * (kl - delta), rel=1e-5)
        assert (loss.multiplier.item() > 0.5) == (sign > 0)
        # The loss takes the multiplier from before the step, the metric the one after it.
        assert terms["lore_multiplier"].item() == loss.multiplier.item()
        expected = 0.5 * max(kl - delta, 0.0)
        assert terms["loss_lore_constraint"].item() == pytest.approx(expected, rel=1e-5)

    def test_stays_within_its_bounds(self):
        loss = lore_loss(tiny_agent(), multiplier_lr=10.0, multiplier_max=0.7, delta=0.0)
        for _ in range(3):
            loss.advice_terms(latents())
        assert loss.multiplier.item() == pytest.approx(0.7)
        loss.delta = loss.delta_end = 5.0
        loss.advice_terms(latents())
        assert loss.multiplier.item() == 0.0

    @pytest.mark.parametrize("why", ["eval", "masked", "nan"])
    def test_holds_still(self, why):
        loss = lore_loss(tiny_agent(), multiplier_init=0.5, multiplier_lr=0.1)
        td = latents(mask=why != "masked")
        if why == "nan":
            td["llm_prior_logits"][:, 1] = NAN
        before = {name: value.clone() for name, value in loss.state_dict().items()}
        loss.train(why != "eval").advice_terms(td)
        after = loss.state_dict()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == (set() if why == "eval" else {"updates"})

    def test_is_no_parameter_and_updated_in_place(self):
        loss = lore_loss(tiny_agent(), multiplier_lr=0.1, delta=0.0)
        buffers = {name: id(value) for name, value in loss.named_buffers()}
        loss.advice_terms(latents())
        assert {name: id(value) for name, value in loss.named_buffers()} == buffers
        assert not any("multiplier" in name for name, _ in loss.named_parameters())
        assert not loss.multiplier.requires_grad

    def test_survives_save_and_load(self):
        kwargs = {"multiplier_lr": 0.1, "delta": 0.01, "delta_end": 0.0, "delta_steps": 10}
        loss = lore_loss(tiny_agent(), temperature={"rate": 0.1}, **kwargs)
        for _ in range(3):
            loss.advice_terms(latents())
        resumed = lore_loss(tiny_agent(seed=1), temperature={"rate": 0.1}, **kwargs)
        resumed.load_state_dict(loss.state_dict())
        for _ in range(2):
            expected, found = loss.advice_terms(latents()), resumed.advice_terms(latents())
            assert (expected == found).all()
        assert loss.multiplier > 0 and loss.updates == 5

    def test_reported_metrics_are_copies(self):
        loss = lore_loss(tiny_agent(), multiplier_lr=0.1, delta=0.0, temperature={"rate": 0.5})
        terms = loss.advice_terms(latents())
        before = terms.detach().clone()
        loss.advice_terms(latents())
        assert (terms.detach() == before).all()
        metrics = [key for key in terms.keys() if not key.startswith("loss_")]  # noqa: SIM118
        assert sorted(metrics) == [
            "lore_advised",
            "lore_delta",
            "lore_kl",
            "lore_multiplier",
            "lore_temperature",
        ]
        assert not any(terms[key].requires_grad for key in metrics)

    def test_off_computes_no_constraint(self):
        terms = lore_loss(tiny_agent(), multiplier_lr=0.0).advice_terms(latents())
        assert "loss_lore_constraint" not in terms and "lore_kl" not in terms


class TestDelta:
    def test_schedule_from_loose_to_tight(self):
        loss = lore_loss(tiny_agent(), delta=1.0, delta_end=0.2, delta_steps=4)
        deltas = [loss.advice_terms(latents())["lore_delta"].item() for _ in range(6)]
        assert deltas == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])

    def test_evaluation_does_not_advance_it(self):
        loss = lore_loss(tiny_agent(), delta=1.0, delta_end=0.2, delta_steps=4).eval()
        deltas = [loss.advice_terms(latents())["lore_delta"].item() for _ in range(3)]
        assert deltas == pytest.approx([1.0, 1.0, 1.0])

    def test_constant_by_default(self):
        loss = lore_loss(tiny_agent(), delta=0.3)
        deltas = [loss.advice_terms(latents())["lore_delta"].item() for _ in range(3)]
        assert deltas == pytest.approx([0.3, 0.3, 0.3])


class TestTemperature:
    def test_updated_in_training_only_before_it_is_used(self):
        agent = tiny_agent()
        td = sometimes_advised()
        loss = lore_loss(agent, temperature={"rate": 1.0, "minimum": 0.1, "maximum": 10.0})
        logits, _, valid = clean_advice(*(td[f"llm_{k}"] for k in _NAMES))
        expected = align_temperature(
            log_policy(agent, td), logits, valid, minimum=0.1, maximum=10.0
        )
        assert abs(expected - 1) > 0.1
        loss.eval().advice_terms(td)
        assert loss.mixer.temperature.temperature == 1.0
        terms = loss.train().advice_terms(td)
        torch.testing.assert_close(loss.mixer.temperature.temperature, expected)
        torch.testing.assert_close(terms["lore_temperature"], expected)
        prior = Categorical(logits=logits / expected)
        kl = kl_divergence(prior, Categorical(logits=log_policy(agent, td)))
        torch.testing.assert_close(terms["loss_lore_prior"], 0.3 * weighted(agent, td, kl))


_NAMES = ("prior_logits", "confidence", "mask")


class TestUnusableRows:
    @pytest.mark.parametrize(
        "bad",
        [{"mask": False}, {"prior_logits": NAN}, {"prior_logits": INF}, {"confidence": NAN}],
        ids=str,
    )
    @pytest.mark.parametrize("direction", ["prior_to_policy", "policy_to_prior"])
    def test_change_nothing(self, bad, direction):
        results = []
        for case in ("clean", "bad"):
            agent = tiny_agent()
            loss = lore_loss(
                agent,
                prior_kl=direction,
                bonus_weight=0.2,
                multiplier_init=0.5,
                multiplier_lr=0.1,
                delta=0.0,
                temperature={"rate": 0.5},
            )
            td = latents(9)
            rows = torch.arange(9) % 3 == 0
            if case == "clean":
                td = td[~rows]
            else:
                for name, value in bad.items():
                    td[f"llm_{name}"][rows] = value
            terms = loss.advice_terms(td)
            sum(v for k, v in terms.items() if k.startswith("loss_")).backward()
            results.append((terms.detach(), gradients(agent.actor), loss.multiplier))
        (clean, clean_grads, clean_multiplier), (terms, grads, multiplier) = results
        assert terms.pop("lore_advised").item() == pytest.approx(2 / 3)
        clean.pop("lore_advised")
        for key, value in clean.items():
            torch.testing.assert_close(terms[key], value)
        for name, grad in clean_grads.items():
            torch.testing.assert_close(grads[name], grad)
        torch.testing.assert_close(multiplier, clean_multiplier)


class TestKeys:
    def test_renamed_and_nested(self):
        agent = tiny_agent()
        td = sometimes_advised()
        expected = lore_loss(agent, bonus_weight=0.1).advice_terms(td)
        loss = lore_loss(agent, bonus_weight=0.1)
        loss.set_keys(prior_logits=("llm", "p"), confidence="sure", mask=("llm", "deep", "m"))
        renamed = td.select("state", "belief")
        renamed["llm", "p"] = td["llm_prior_logits"]
        renamed["sure"] = td["llm_confidence"]
        renamed["llm", "deep", "m"] = td["llm_mask"]
        assert (loss.advice_terms(renamed) == expected).all()
        losses, _ = loss(renamed)
        assert "loss_lore_prior" in losses and "loss_actor" in losses

    def test_what_the_wrapped_loss_knows_is_passed_on(self):
        loss = lore_loss(tiny_agent())
        loss.set_keys(belief="hidden", value="worth")
        assert loss.tensor_keys.belief == "hidden"
        assert loss.actor_loss.tensor_keys.belief == "hidden"
        assert loss.actor_loss.tensor_keys.value == "worth"

    def test_none_restores_the_default(self):
        loss = lore_loss(tiny_agent())
        loss.set_keys(mask="m")
        loss.set_keys(mask=None)
        assert loss.tensor_keys.mask == "llm_mask"

    def test_unknown_key_is_named(self):
        with pytest.raises(ValueError, match="maks"):
            lore_loss(tiny_agent()).set_keys(maks="m")


class TestAsActorLoss:
    """What DreamerV3ValueLoss and DreamerV3Loss read of the actor loss they are given."""

    def test_value_loss_reads_the_wrapped_discount(self):
        agent = tiny_agent()
        stock, lore = stock_loss(agent), lore_loss(agent)
        torch.manual_seed(1)
        _, imagined = stock(latents())
        values = []
        for actor_loss in (stock, lore):
            value_loss = DreamerV3ValueLoss(
                agent.value,
                value_loss="two_hot",
                num_value_bins=tiny_config().num_bins,
                actor_loss=actor_loss,
            )
            assert value_loss._resolved_gamma() == pytest.approx(0.9)
            values.append(value_loss(imagined.exclude("discount_weight"))[0]["loss_value"])
        assert torch.equal(*values)

    def test_value_estimator_is_that_of_the_wrapped_loss(self):
        loss = lore_loss(tiny_agent())
        loss.make_value_estimator(ValueEstimators.TDLambda, gamma=0.5, lmbda=0.5)
        assert loss.value_estimator is loss.actor_loss.value_estimator
        assert loss.value_estimator.gamma == 0.5

    def test_models_are_those_of_the_wrapped_loss(self):
        agent = tiny_agent()
        loss = lore_loss(agent)
        assert loss.actor_model is agent.actor
        assert loss.value_model is agent.value
        assert loss.model_based_env is agent.imagination

    def test_no_parameter_beyond_those_of_the_wrapped_loss(self):
        agent = tiny_agent()
        loss = lore_loss(agent)
        assert {id(p) for p in loss.parameters()} == {id(p) for p in loss.actor_loss.parameters()}


class TestBadArguments:
    @pytest.mark.parametrize(
        ("kwargs", "match"),
        [
            ({"prior_weight": -1.0}, "prior_weight.*-1.0"),
            ({"prior_weight": NAN}, "prior_weight.*nan"),
            ({"bonus_weight": -1.0}, "bonus_weight.*-1.0"),
            ({"multiplier_lr": -1.0}, "multiplier_lr.*-1.0"),
            ({"delta": -1.0}, "delta.*-1.0"),
            ({"delta_end": -1.0}, "delta_end.*-1.0"),
            ({"delta_steps": -1}, "delta_steps.*-1"),
            ({"multiplier_init": -0.5}, "-0.5"),
            ({"multiplier_init": 3.0}, "3.0 and 1.0"),
            ({"prior_kl": "forward"}, "prior_kl.*'forward'"),
        ],
    )
    def test_value_is_in_the_message(self, kwargs, match):
        with pytest.raises(ValueError, match=match):
            lore_loss(tiny_agent(), **kwargs)

    def test_constraint_needs_gate_and_mixer(self):
        stock = stock_loss(tiny_agent())
        gate = UncertaintyGate(ACTIONS)
        for kwargs in ({}, {"gate": gate}, {"mixer": LogitMixer()}):
            with pytest.raises(ValueError, match="gate and mixer"):
                LoReActorLoss(stock, **kwargs)
        LoReActorLoss(stock, multiplier_lr=0.0)

    def test_the_gate_and_the_ensemble_must_agree(self):
        ensemble = ValueEnsemble(STATE, BELIEF, hidden_dim=8)
        for source, given in (("two_hot", ensemble), ("ensemble", None)):
            gate = UncertaintyGate(ACTIONS, value_source=source)
            parts = {"gate": gate, "mixer": LogitMixer(), "value_ensemble": given}
            with pytest.raises(ValueError, match=f"value_source='{source}'.*value_ensemble with"):
                LoReActorLoss(stock_loss(tiny_agent()), **parts)
            LoReActorLoss(stock_loss(tiny_agent()), **parts, multiplier_lr=0.0)

    def test_what_is_no_actor_loss_is_named(self):
        with pytest.raises(TypeError, match="Linear"):
            LoReActorLoss(torch.nn.Linear(1, 1))


def test_advice_terms_compile_without_a_graph_break():
    loss = tiny_learner(
        lore_config(bonus_weight=0.1, multiplier_init=0.5, delta=0.0, temperature={"rate": 0.1})
    ).loss.actor_loss
    state = {name: value.clone() for name, value in loss.state_dict().items()}
    expected = loss.advice_terms(latents())
    loss.load_state_dict(state)
    compiled = torch.compile(loss.advice_terms, fullgraph=True, backend="eager")
    found = compiled(latents())
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_advice_terms_never_wait_for_the_device():
    agent = tiny_agent(device="cuda")
    lore = build_lore_actor(lore_config(temperature={"rate": 0.1}), agent, device="cuda")
    loss = LoReActorLoss(
        stock_loss(agent), gate=lore.gate, mixer=lore.mixer, bonus_weight=0.1, delta=0.0
    ).cuda()
    td = latents().to("cuda")
    loss.advice_terms(td)
    torch.cuda.set_sync_debug_mode("error")
    try:
        terms: TensorDict = loss.advice_terms(td)
        sum(v for k, v in terms.items() if k.startswith("loss_")).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert terms["loss_lore_constraint"].is_cuda and loss.multiplier.item() > 0


def test_one_aligner_serves_policy_and_loss():
    agent = tiny_agent()
    aligner = TemperatureAligner(rate=0.5)
    mixer = LogitMixer(temperature=aligner)
    loss = LoReActorLoss(
        stock_loss(agent), gate=UncertaintyGate(ACTIONS, value_weight=0.0), mixer=mixer
    )
    loss.advice_terms(latents())
    assert aligner.temperature != 1.0 and mixer.temperature is aligner


def test_gated_terms_are_scaled_by_the_gate():
    agent, td = tiny_agent(), sometimes_advised()
    gate = {"tau": 0.6, "kappa": 30.0, "beta_max": 2.0, "value_weight": 0.0}
    off = {"multiplier_lr": 0.0, "prior_weight": 0.7, "bonus_weight": 0.2}
    loss = lore_loss(agent, gate=gate, gated=True, **off)
    log_p = log_policy(agent, td)
    share = loss.gate.evaluate(log_p).beta.squeeze(-1) / 2.0
    assert share.min() < 0.2 and share.max() > 0.8
    log_prior = torch.log_softmax(clean_advice(*advice_of(td))[0], -1)
    kl = (log_prior.exp() * (log_prior - log_p)).sum(-1)
    terms = loss.advice_terms(td)
    torch.testing.assert_close(terms["loss_lore_prior"], 0.7 * weighted(agent, td, share * kl))
    expected = (log_p.exp() * log_prior).sum(-1)
    torch.testing.assert_close(
        terms["loss_lore_bonus"], -0.2 * weighted(agent, td, share * expected)
    )


def advice_of(td):
    return td["llm_prior_logits"], td["llm_confidence"], td["llm_mask"]


class Trusting(ShareBandit):
    """A bandit with a set trust."""

    def __init__(self, value):
        super().__init__()
        self.value = torch.tensor(value)

    def trust(self):
        return self.value


EVERY_TERM = {
    "prior_weight": 0.5,
    "bonus_weight": 0.5,
    "distillation_weight": 0.5,
    "multiplier_init": 0.5,
    "delta": 0.0,
}


def test_every_term_ends_with_what_was_taught():
    agent, td = tiny_agent(), sometimes_advised()
    whole = lore_loss(agent, **EVERY_TERM).advice_terms(td)
    bandit = Trusting(0.5)
    loss = lore_loss(agent, bandit=bandit, anneal_after=0.5, anneal_steps=2.0, **EVERY_TERM)
    for share in (1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0):
        terms = loss.advice_terms(td)
        assert terms["lore_taught"] == bandit.annealed == share
        for name in (name for name in whole.keys() if name.startswith("loss_")):  # noqa: SIM118
            if name != "loss_lore_constraint":
                torch.testing.assert_close(terms[name], 0.5 * share * whole[name])
    assert terms["loss_lore_constraint"] == 0.0


def test_so_many_updates_are_taught_and_no_more():
    agent, td = tiny_agent(), sometimes_advised()
    loss, again = (lore_loss(agent, anneal_after=2) for _ in range(2))
    taught = [loss.advice_terms(td)["lore_taught"].item()]
    again.load_state_dict(loss.state_dict())
    taught += [again.advice_terms(td)["lore_taught"].item() for _ in range(3)]
    assert taught == [1.0, 1.0, 0.0, 0.0]
    before = {name: value for name, value in loss.state_dict().items() if "taught" not in name}
    loss.load_state_dict(before)
    assert loss.annealing.taught == 1.0


@pytest.mark.parametrize(
    "wrong", [{"anneal_after": -1}, {"anneal_after": 1, "anneal_steps": float("inf")}]
)
def test_an_end_of_teaching_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="anneal_"):
        lore_loss(tiny_agent(), **wrong)


def test_only_updates_with_advice_in_training_count_as_taught():
    agent, td = tiny_agent(), sometimes_advised()
    loss = lore_loss(agent, anneal_after=1, anneal_steps=1)
    loss.eval().advice_terms(td)
    loss.train().advice_terms(td.clone().set("llm_mask", torch.zeros_like(td["llm_mask"])))
    assert loss.annealing.taught == 0.0
    loss.advice_terms(td)
    assert loss.annealing.taught == 1.0


@pytest.mark.parametrize("trust", [0.0, 0.25, 1.0])
def test_evidence_scales_every_term(trust):
    agent, td = tiny_agent(), sometimes_advised()
    whole = lore_loss(agent, **EVERY_TERM).advice_terms(td)
    scaled = lore_loss(agent, bandit=Trusting(trust), **EVERY_TERM).advice_terms(td)
    names = [name for name in whole.keys() if name.startswith("loss_")]  # noqa: SIM118
    assert len(names) == 4 and all(whole[name] != 0 for name in names)
    for name in names:
        torch.testing.assert_close(scaled[name], trust * whole[name])
    torch.testing.assert_close(scaled["lore_kl"], whole["lore_kl"])
