"""What the composed loss hands to its parts, computed by hand from a replay sample."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from dreamer_sample import lore_config, tiny_config, tiny_learner, tiny_sample
from torch.nn.functional import binary_cross_entropy
from torchrl.objectives import symlog

from lore_torchrl.configs.trust import CalibrationConfig, PriorNetConfig
from lore_torchrl.control import AdviceOutcomes, ConfidenceCalibrator
from lore_torchrl.functional import two_hot_variance
from lore_torchrl.objectives import LoReDreamerV3Loss

TIME = 12
# Of the adviser's advice and of PriorNet's.
TRUST = 0.5, 0.25


def learner(*, gate=None, threshold=0.5, config=None, **loss):
    """A learner whose PriorNet has opinions, and whose mixture is not held back by a bound."""
    lore = lore_config(gate={"value_weight": 0.0, **(gate or {})}, **loss)
    lore.mixer.max_kl = float("inf")
    lore.prior_net = PriorNetConfig(num_cells=8, threshold=threshold)
    lore.calibration = CalibrationConfig(prior_strength=1e-6)
    built = tiny_learner(lore, config=config).loss
    torch.manual_seed(5)
    with torch.no_grad():
        built.actor_loss.prior_net.network.model[-1].weight.normal_()
    return built


def half_advised():
    sample = tiny_sample(time=TIME)
    sample["next", "llm_mask"] = torch.rand_like(sample["next", "llm_confidence"]) < 0.5
    return sample


def forward(loss, sample):
    torch.manual_seed(3)
    return loss(sample.clone())


def completed(loss, result, sample):
    """Logits and confidence of each state's advice, where there is any, where it is learnt."""
    net, context, given = loss.actor_loss.prior_net, result["replay_context"], sample["next"]
    logits, sure = net.advise(context["state"], context["belief"])
    goes_on = ~given["done"]
    mask = given["llm_mask"] & goes_on
    learnt = ~given["llm_mask"] & (sure >= net.threshold) & goes_on
    assert learnt.any() and not learnt.all()
    logits = torch.where(learnt, logits, given["llm_prior_logits"])
    return logits, torch.where(learnt, sure, given["llm_confidence"]), mask, learnt


def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(-1, keepdim=True)


class TestTrust:
    """In evaluation, so that the calibrator stays as it was filled."""

    @pytest.fixture
    def found(self):
        loss, sample = learner().eval(), half_advised()
        calibrator = loss.actor_loss.calibrator
        calibrator.counts.fill_(1.0)
        for group, trust in enumerate(TRUST):
            calibrator.wins[group] = 0.4 + 0.1 * trust
        result = forward(loss, sample)
        logits, confidence, mask, learnt = completed(loss, result, sample)
        log_p = loss.actor_loss.actor_model.get_dist(result["replay_context"]).logits
        log_p = log_p.log_softmax(-1).detach()
        trust = torch.where(learnt, TRUST[1], TRUST[0])
        return loss, result, log_p, logits, confidence, mask | learnt, trust

    def test_it_scales_the_prior_term_by_whose_advice_it_is(self, found):
        _, result, log_p, logits, confidence, valid, trust = found
        expected = trust * confidence * kl(logits.log_softmax(-1), log_p)
        torch.testing.assert_close(result["loss_lore_prior"].detach(), 0.3 * expected[valid].mean())
        torch.testing.assert_close(result["lore_trust"], trust[valid].mean(), rtol=1e-4, atol=0)

    def test_it_scales_the_weight_in_the_mixture(self, found):
        loss, result, log_p, logits, confidence, valid, trust = found
        beta = loss.actor_loss.gate.evaluate(log_p).beta
        centred = logits - logits.mean(-1, keepdim=True)
        mixed = (log_p + beta * trust * confidence * centred).log_softmax(-1)
        expected = kl(mixed, log_p)[valid].mean()
        torch.testing.assert_close(result["lore_kl"], expected, rtol=1e-4, atol=1e-6)


def test_prior_nets_advice_is_judged_apart_from_the_advisers():
    loss, sample = learner(), half_advised()
    result = forward(loss, sample)
    logits, _, mask, learnt = completed(loss, result, sample)
    taken = sample["action"].argmax(-1, keepdim=True)[:, 1:]
    followed = taken == logits.argmax(-1, keepdim=True)[:, :-1]
    acted = ~sample["is_init"][:, 1:]
    counts = loss.outcomes.calibrator.counts.sum(-1)
    for group, rows in enumerate((mask, learnt)):
        rows = rows[:, :-1] & acted
        assert (rows & followed).any() and (rows & ~followed).any()
        assert counts[group] == (rows & followed).sum()


def test_prior_nets_advice_is_never_used_to_train_prior_net():
    loss, sample = learner(threshold=0.0), half_advised()
    result = forward(loss, sample)
    going_on = (~sample["next", "done"]).float().mean()
    assert result["lore_advised"] == going_on < 1, "it stands in wherever there is something to do"
    rows = sample["next", "llm_mask"].squeeze(-1)
    context, given = result["replay_context"][rows], sample["next"][rows]
    prior, confidence = given["llm_prior_logits"], given["llm_confidence"]
    logits, sure = loss.actor_loss.prior_net.advise(context["state"], context["belief"])
    agrees = logits.argmax(-1, keepdim=True) == prior.argmax(-1, keepdim=True)
    doubt = binary_cross_entropy(sure, confidence * agrees, reduction="none")
    expected = confidence * kl(prior.log_softmax(-1), logits.log_softmax(-1)) + doubt
    torch.testing.assert_close(result["loss_prior_net"].detach(), expected.mean())
    torch.testing.assert_close(result["prior_net_agreement"], agrees.float().mean())


@pytest.mark.parametrize("masked", [True, False], ids=["adviser", "PriorNet"])
def test_where_an_episode_has_ended_nothing_is_taught(masked):
    terms = []
    for other in (False, True):
        loss, sample = learner(threshold=0.0).eval(), tiny_sample(time=TIME, mask=masked)
        ended = sample["next", "done"].squeeze(-1)
        assert 0 < ended.sum() < ended.numel()
        if other:
            sample["next", "llm_prior_logits"][ended] *= -3.0
            sample["next", "llm_mask"][ended] = ~sample["next", "llm_mask"][ended]
        result = forward(loss, sample)
        terms.append(torch.stack([result[name] for name in ("loss_lore_prior", "lore_kl")]))
    assert torch.equal(*terms) and (terms[0] > 0).all()


class TestGate:
    """All that it weighs, none of it at an end of its scale."""

    PARTS = ("entropy", "value", "disagreement")

    def parts(self, loss, context):
        """The three, by hand, and the policy they are of."""
        actor_loss = loss.actor_loss
        log_p = actor_loss.actor_model.get_dist(context).logits.log_softmax(-1).detach()
        values = actor_loss.value_model(context.clone())["state_value_logits"].detach()
        variance = two_hot_variance(values, torch.linspace(-20, 20, values.shape[-1]))
        spread = loss.disagreement_loss.ensemble.disagreement(
            context["state"], context["belief"], log_p
        )
        entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True) / math.log(log_p.shape[-1])
        return log_p, values, variance, spread, entropy

    def of(self, **gate):
        settings = {"tau": 0.5, "kappa": 6.0, "value_weight": 0.3, "disagreement_weight": 0.4}
        loss, sample = learner(gate={**settings, **gate}, threshold=1.0), half_advised()
        # The same forward pass as the one that is tested, for the scales.
        context = forward(deepcopy(loss).eval(), sample)["replay_context"]
        _, _, variance, spread, _ = self.parts(loss, context)
        loss.actor_loss.gate.value_scale.scale.fill_(1.3 * variance.max())
        loss.actor_loss.gate.disagreement_scale.scale.fill_(1.3 * spread.max())
        return loss, sample

    @pytest.mark.parametrize("without", [None, *PARTS])
    def test_its_weight_in_the_loss_by_hand(self, without):
        loss, sample = self.of()
        result = forward(loss.eval(), sample)
        gate, context = loss.actor_loss.gate, result["replay_context"]
        log_p, _, variance, spread, entropy = self.parts(loss, context)
        scaled = (
            (0.7, entropy),
            (0.3, variance / gate.value_scale.scale),
            (0.4, spread / gate.disagreement_scale.scale),
        )
        assert all(0 < part.min() < part.max() < 1 for _, part in scaled[1:])
        u = sum(
            weight / 1.4 * part
            for name, (weight, part) in zip(self.PARTS, scaled, strict=True)
            if name != without
        )
        beta = torch.sigmoid(6.0 * (u - 0.5))
        given, mask = sample["next"], sample["next", "llm_mask"] & ~sample["next", "done"]
        logits = given["llm_prior_logits"]
        centred = logits - logits.mean(-1, keepdim=True)
        trust = loss.actor_loss.calibrator.trust(given["llm_confidence"])
        weight = beta * trust * given["llm_confidence"]
        expected = kl((log_p + weight * centred).log_softmax(-1), log_p)[mask].mean()
        close = torch.isclose(result["lore_kl"], expected, rtol=1e-4, atol=1e-6)
        assert close == (without is None), "each of the three is seen in it"

    def test_it_adapts_to_the_advantage_where_something_was_done(self):
        loss, sample = self.of(adapt_rate=0.5)
        sample["next", "reward"] *= 10.0
        by_hand = deepcopy(loss.actor_loss.gate)
        start = by_hand.weights.clone()
        outcomes = loss.outcomes
        result = forward(loss, sample)
        context = result["replay_context"]
        log_p, values, _, spread, _ = self.parts(loss, context)
        found = outcomes.evaluate(context.clone(), sample)
        by_hand.adapt(log_p, values, spread, found.advantage, found.valid)
        torch.testing.assert_close(loss.actor_loss.gate.weights, by_hand.weights)
        assert (by_hand.weights - start).abs().max() > 0.01
        assert not found.valid.all()

    def test_it_adapts_though_nothing_else_is_learnt(self):
        nothing = {"prior_weight": 0.0, "multiplier_lr": 0.0, "gated": True}
        loss = learner(gate={"value_weight": 0.3, "adapt_rate": 0.5}, **nothing)
        start = loss.actor_loss.gate.weights.clone()
        result = forward(loss, half_advised())
        assert not torch.equal(loss.actor_loss.gate.weights, start)
        assert not any(name.startswith("loss_lore") for name in result.to_dict())


def test_the_bonus_in_imagination_by_hand():
    loss, sample = learner(imagine_bonus_weight=0.7, threshold=0.3), half_advised()
    actor_loss, context = loss.actor_loss, forward(loss, sample)["replay_context"]
    torch.manual_seed(4)
    losses, imagined = actor_loss(context.reshape(-1).detach())
    net = actor_loss.prior_net
    logits, sure = net.advise(imagined["state"], imagined["belief"])
    sure = torch.where(sure >= 0.3, sure, 0.0)
    trust = actor_loss.calibrator.trust(sure, 1)
    policy = actor_loss.actor_model.get_dist(imagined).logits.softmax(-1)
    expected = (policy * logits.log_softmax(-1)).sum(-1, keepdim=True)
    goes_on = imagined["discount_weight"]
    assert goes_on.std() > 0, "some imagined states count for less"
    bonus = (goes_on * trust * sure * expected)[trust * sure > 0].mean()
    torch.testing.assert_close(losses["loss_lore_imagined_bonus"], -0.7 * bonus)
    # A step on it alone makes what the network advises likelier.
    losses["loss_lore_imagined_bonus"].backward()
    with torch.no_grad():
        for parameter in actor_loss.actor_model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-2 * parameter.grad
    policy = actor_loss.actor_model.get_dist(imagined).logits.softmax(-1)
    after = (policy * logits.log_softmax(-1)).sum(-1, keepdim=True)
    assert (goes_on * trust * sure * after)[trust * sure > 0].mean() > bonus


def test_the_value_ensemble_learns_discounted_returns_where_an_action_was_taken():
    config = tiny_config(continuation_horizon=4.0)
    gate = {"value_weight": 0.3, "value_source": "ensemble"}
    loss, sample = learner(gate=gate, config=config), half_advised()
    result = forward(loss, sample)
    context, following = result["replay_context"], sample[:, 1:]
    value = loss.actor_loss.value_model(context.clone())["state_value"].detach()
    gamma, lmbda = config.gamma * (1 - 1 / 4.0), config.lmbda
    returns, after = torch.zeros_like(value[:, 1:]), value[:, -1]
    for t in reversed(range(TIME - 1)):
        step, nexts = following[:, t], value[:, t + 1]
        after = torch.where(step["next", "done"], nexts, after)
        ahead = (1 - lmbda) * nexts + lmbda * after
        goes_on = ~step["next", "terminated"]
        after = returns[:, t] = step["next", "reward"] + gamma * goes_on * ahead
    acted = ~following["is_init"]
    members = loss.value_ensemble_loss.ensemble.predict(context["state"], context["belief"])
    error = (members[:, :, :-1] - symlog(returns)).square().mean(0)
    torch.testing.assert_close(result["loss_value_ensemble"], error[acted].mean())


def test_disagreement_is_about_the_action_taken_at_a_state():
    loss, sample = learner(gate={"disagreement_weight": 0.3}), half_advised()
    result = forward(loss, sample)
    state, belief = (result["replay_context", key] for key in ("state", "belief"))
    ensemble = loss.disagreement_loss.ensemble
    members = ensemble.predict(state[:, :-1], belief[:, :-1], sample["action"][:, 1:])
    error = (members - state[:, 1:]).square().sum(-1).mean(0) / 2
    expected = error[~sample["is_init"][:, 1:, 0]].mean()
    torch.testing.assert_close(result["loss_disagreement"], expected)


class TestPartsThatCouldNeverLearn:
    def compose(self, loss, **kwargs):
        parts = loss.model_loss, loss.actor_loss, loss.value_loss
        return LoReDreamerV3Loss(*parts, **kwargs)

    def test_a_calibrator_needs_outcomes_with_itself(self):
        loss = learner()
        with pytest.raises(ValueError, match=r"calibrator of actor_loss.*pass outcomes=Advice"):
            self.compose(loss)
        for other in (ConfidenceCalibrator(num_groups=2), None):
            with pytest.raises(ValueError, match=r"different calibrators.*same"):
                self.compose(loss, outcomes=AdviceOutcomes(other, loss.actor_loss.value_model))
        own = AdviceOutcomes(loss.actor_loss.calibrator, loss.actor_loss.value_model)
        assert self.compose(loss, outcomes=own).outcomes is own

    def test_outcomes_with_a_calibrator_that_nothing_asks(self):
        loss = tiny_learner(lore_config()).loss
        outcomes = AdviceOutcomes(ConfidenceCalibrator(), loss.actor_loss.value_model)
        with pytest.raises(ValueError, match=r"different calibrators.*same"):
            self.compose(loss, outcomes=outcomes)

    def test_a_gate_that_adapts_needs_outcomes(self):
        loss = tiny_learner(lore_config(gate={"adapt_rate": 0.1})).loss
        with pytest.raises(ValueError, match=r"adapt_rate.*pass outcomes=Advice"):
            self.compose(loss)
        self.compose(loss, outcomes=AdviceOutcomes(None, loss.actor_loss.value_model))

    def test_a_value_ensemble_needs_outcomes(self):
        gate = {"value_source": "ensemble", "value_weight": 0.3}
        loss = tiny_learner(lore_config(gate=gate)).loss
        with pytest.raises(ValueError, match=r"value_ensemble_loss.*pass outcomes=Advice"):
            self.compose(loss, value_ensemble_loss=loss.value_ensemble_loss)
