"""What the composed loss hands to its parts, computed by hand from a replay sample."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from dreamer_sample import lore_config, tiny_config, tiny_learner, tiny_sample
from torch.nn.functional import binary_cross_entropy
from torchrl.objectives import symlog

from lore_torchrl.configs import PriorNetConfig
from lore_torchrl.functional import two_hot_variance

TIME = 12


def learner(*, gate=None, threshold=0.5, config=None, **loss):
    """A learner whose PriorNet has opinions, and whose mixture is not held back by a bound."""
    lore = lore_config(gate={"value_weight": 0.0, **(gate or {})}, **loss)
    lore.mixer.max_kl = float("inf")
    lore.prior_net = PriorNetConfig(enabled=True, num_cells=8, threshold=threshold)
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
    """Logits and confidence of each state's advice, where there is any, where it is learned."""
    net, context, given = loss.actor_loss.prior_net, result["replay_context"], sample["next"]
    logits, sure = net.advise(context["state"], context["belief"])
    goes_on = ~given["done"]
    mask = given["llm_mask"] & goes_on
    learned = ~given["llm_mask"] & (sure >= net.threshold) & goes_on
    assert learned.any() and not learned.all()
    logits = torch.where(learned, logits, given["llm_prior_logits"])
    return logits, torch.where(learned, sure, given["llm_confidence"]), mask, learned


def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(-1, keepdim=True)


class TestWhoseAdviceItIs:
    """The advisor's where it gave some, PriorNet's where it is sure and there was none."""

    @pytest.fixture
    def found(self):
        loss, sample = learner(), half_advised()
        result = forward(loss, sample)
        logits, confidence, mask, learned = completed(loss, result, sample)
        log_p = loss.actor_loss.actor_model.get_dist(result["replay_context"]).logits
        log_p = log_p.log_softmax(-1).detach()
        return loss, result, log_p, logits, confidence, mask, learned

    def test_in_the_prior_term(self, found):
        _, result, log_p, logits, confidence, mask, learned = found
        expected = confidence * kl(logits.log_softmax(-1), log_p)
        expected = 0.3 * expected[mask | learned].mean()
        torch.testing.assert_close(result["loss_lore_prior"].detach(), expected)
        torch.testing.assert_close(result["lore_learned"], learned.float().mean())
        torch.testing.assert_close(result["lore_advised"], (mask | learned).float().mean())

    def test_in_the_mixture(self, found):
        loss, result, log_p, logits, confidence, mask, learned = found
        entropy = loss.actor_loss.mixer.policy.entropy(log_p)
        beta = loss.actor_loss.gate.evaluate(entropy).beta
        centred = logits - logits.mean(-1, keepdim=True)
        mixed = (log_p + beta * confidence * centred).log_softmax(-1)
        expected = kl(mixed, log_p)[mask | learned].mean()
        torch.testing.assert_close(result["lore_kl"], expected, rtol=1e-4, atol=1e-6)

    def test_in_what_a_step_has_followed(self):
        """Where all steps gained, those count that took the first choice of either."""
        loss, sample = learner(imitation_weight=1.0).eval(), half_advised()
        with torch.no_grad():
            loss.actor_loss.value_model[0].module.model[-1].bias.fill_(-1e3)[0] = 0.0
        result = forward(loss, sample)
        logits, confidence, mask, learned = completed(loss, result, sample)
        log_p = loss.actor_loss.actor_model.get_dist(result["replay_context"]).logits
        log_p = log_p.log_softmax(-1).detach()
        taken = sample["action"].roll(-1, 1).argmax(-1, keepdim=True)
        acted = ~sample["is_init"].roll(-1, 1)
        acted[:, -1] = False
        torch.testing.assert_close(result["lore_imitated"], acted.float().mean())
        counts = acted & (taken == logits.argmax(-1, keepdim=True))
        assert (counts & mask).any() and (counts & learned).any()
        expected = counts * confidence * kl(logits.log_softmax(-1), log_p)
        expected = 0.3 * expected[counts & (mask | learned)].mean()
        torch.testing.assert_close(result["loss_lore_prior"].detach(), expected)


def test_prior_nets_advice_is_never_used_to_train_prior_net():
    loss, sample = learner(threshold=0.0), half_advised()
    result = forward(loss, sample)
    going_on = (~sample["next", "done"]).float().mean()
    assert result["lore_advised"] == going_on < 1, (
        "it is the fallback wherever there is something to do"
    )
    rows = sample["next", "llm_mask"].squeeze(-1)
    context, given = result["replay_context"][rows], sample["next"][rows]
    prior, confidence = given["llm_prior_logits"], given["llm_confidence"]
    logits, sure = loss.actor_loss.prior_net.advise(context["state"], context["belief"])
    agrees = logits.argmax(-1, keepdim=True) == prior.argmax(-1, keepdim=True)
    doubt = binary_cross_entropy(sure, confidence * agrees, reduction="none")
    expected = confidence * kl(prior.log_softmax(-1), logits.log_softmax(-1)) + doubt
    torch.testing.assert_close(result["loss_prior_net"].detach(), expected.mean())
    torch.testing.assert_close(result["prior_net_agreement"], agrees.float().mean())


@pytest.mark.parametrize("masked", [True, False], ids=["advisor", "PriorNet"])
def test_where_an_episode_has_ended_nothing_is_distilled(masked):
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
        spread = loss.actor_loss.disagreement.expected(context["state"], context["belief"], log_p)
        entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True) / math.log(log_p.shape[-1])
        return log_p, values, variance, spread, entropy

    def of(self, **gate):
        settings = {"tau": 0.5, "kappa": 6.0, "entropy_weight": 0.7}
        settings |= {"value_weight": 0.3, "disagreement_weight": 0.4}
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
        weight = beta * given["llm_confidence"]
        expected = kl((log_p + weight * centred).log_softmax(-1), log_p)[mask].mean()
        close = torch.isclose(result["lore_kl"], expected, rtol=1e-4, atol=1e-6)
        assert close == (without is None), "each of the three is seen in it"


def test_imagination_leans_on_prior_nets_advice_by_hand():
    loss, sample = learner(beta_imagine_max=0.7, threshold=0.3), half_advised()
    actor_loss, context = loss.actor_loss, forward(loss, sample)["replay_context"]
    torch.manual_seed(4)
    _, imagined = actor_loss(context.reshape(-1).detach())
    net = actor_loss.prior_net
    logits, sure = net.advise(imagined["state"], imagined["belief"])
    sure = torch.where(sure >= 0.3, sure, 0.0)
    assert (sure > 0).any() and not (sure > 0).all()
    latent = imagined.select("state", "belief")
    own = actor_loss.actor_model.get_dist(latent.clone()).logits.log_softmax(-1)
    expected = own + 0.7 * sure * (logits - logits.mean(-1, keepdim=True))
    mixed = actor_loss.actor_loss.actor_model.get_dist(latent.clone()).logits.log_softmax(-1)
    torch.testing.assert_close(mixed, expected.log_softmax(-1))
    # What was drawn is what is scored.
    taken = (mixed * imagined["action"]).sum(-1)
    torch.testing.assert_close(imagined["action_log_prob"], taken)
    assert (mixed - own).abs().max() > 0.1


def test_the_value_ensemble_learns_discounted_returns_where_an_action_was_taken():
    config = tiny_config(continuation_horizon=4.0)
    gate = {"value_weight": 0.3, "value_source": "ensemble"}
    loss, sample = learner(gate=gate, config=config), half_advised()
    # A resumed run has cut one off here.
    sample["is_init"][2, 6] = True
    result = forward(loss, sample)
    context, following = result["replay_context"], sample[:, 1:]
    value = loss.actor_loss.value_model(context.clone())["state_value"].detach()
    gamma, lmbda = 1 - 1 / 4.0, config.lmbda
    returns, after = torch.zeros_like(value[:, 1:]), value[:, -1]
    for t in reversed(range(TIME - 1)):
        step, nexts = following[:, t], value[:, t + 1]
        after = torch.where(step["next", "done"], nexts, after)
        ahead = (1 - lmbda) * nexts + lmbda * after
        goes_on = ~step["next", "terminated"]
        after = returns[:, t] = step["next", "reward"] + gamma * goes_on * ahead
        after = torch.where(step["is_init"], value[:, t], after)
    acted = ~following["is_init"]
    members = loss.actor_loss.value_ensemble.predict(context["state"], context["belief"])
    error = (members[:, :, :-1] - symlog(returns)).square().mean(0)
    torch.testing.assert_close(result["loss_value_ensemble"], error[acted].mean())


def test_disagreement_is_about_the_action_taken_at_a_state():
    loss, sample = learner(gate={"disagreement_weight": 0.3}), half_advised()
    result = forward(loss, sample)
    state, belief = (result["replay_context", key] for key in ("state", "belief"))
    ensemble = loss.actor_loss.disagreement
    members = ensemble.predict(state[:, :-1], belief[:, :-1], sample["action"][:, 1:])
    error = (members - state[:, 1:]).square().sum(-1).mean(0) / 2
    expected = error[~sample["is_init"][:, 1:, 0]].mean()
    torch.testing.assert_close(result["loss_disagreement"], expected)
