from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch
from dreamer_sample import (
    ACTIONS,
    BATCH,
    TIME,
    gradients,
    lore_config,
    tiny_config,
    tiny_learner,
    tiny_sample,
    update,
    weights,
)
from torch._dynamo.utils import counters
from torch.distributions import Categorical, kl_divergence
from torchrl.objectives import DreamerV3Loss, DreamerV3ValueLoss

from lore_torchrl import keys
from lore_torchrl.configs import PriorNetConfig
from lore_torchrl.control import AdviceBandit
from lore_torchrl.objectives import LoReDreamerV3Loss

NAN, INF = float("nan"), float("inf")
ADVICE = ("llm_prior_logits", "llm_confidence", "llm_mask")
RETURN = ("next", "lore_return")
OFF = {"imitation_weight": 0.0, "prior_weight": 0.0, "multiplier_lr": 0.0}


def prior_by_hand(loss, context, advice, *, weight=0.3):
    """KL(prior || policy), weighted and averaged, from posterior states and their advice."""
    policy = Categorical(logits=loss.actor_loss.actor_model.get_dist(context).logits)
    prior = Categorical(logits=advice["llm_prior_logits"])
    keep = advice["llm_mask"].squeeze(-1)
    kl = advice["llm_confidence"].squeeze(-1) * kl_divergence(prior, policy)
    return weight * kl[keep].mean()


def imitating(*, scale=20.0, **loss):
    """A loss that imitates, with values and a span of returns of the size of rewards."""
    found = tiny_learner(lore_config(**{"imitation_weight": 3.0, **loss})).loss
    with torch.no_grad():
        bias = found.actor_loss.value_model[0].module.model[-1].bias
        bias.fill_(-30.0)[6:9] = 0.0
    found.actor_loss.actor_loss.retnorm.high.fill_(scale)
    return found


def returns_by_hand(value, sample):
    """Lambda return from each posterior of a sample, NaN where nothing was done."""
    gamma, lmbda = 1 - 1 / 333.0, 0.95
    returns = torch.full_like(value, NAN)
    for b in range(value.shape[0]):
        after = value[b, -1]
        for t in reversed(range(value.shape[1] - 1)):
            # What is done at posterior t, and its reward, stand in record t + 1.
            record = sample[b, t + 1]
            if record["is_init"]:
                after = value[b, t]
                continue
            ahead = (1 - lmbda) * value[b, t + 1] + lmbda * after
            if record["next", "done"]:
                ahead = 0.0 if record["next", "terminated"] else value[b, t + 1]
            after = returns[b, t] = record["next", "reward"] + gamma * ahead
    return returns


def gains_by_hand(loss, result, sample):
    """How much each executed step is imitated, and its log-probability, each ``[B, T]``."""
    context, stock = result["replay_context"], loss.actor_loss.actor_loss
    value = loss.actor_loss.value_model(context.clone())["state_value"].detach()
    assert value.abs().max() < 17
    span = (stock.return_high - stock.return_low).clamp_min(1.0)
    returns = returns_by_hand(value, sample)
    gain, real = (returns - value) / span, sample.get(RETURN, returns)
    counts = ((real - value) / span > 0.05) & (gain > 0)
    gains = torch.where(counts, gain.clamp(0, 1), 0.0).squeeze(-1)
    log_p = loss.actor_loss.actor_model.get_dist(context).logits.log_softmax(-1)
    taken = sample["action"].roll(-1, 1)
    return gains, (log_p * taken).sum(-1)


def imitation_by_hand(loss, result, sample):
    gains, log_prob = gains_by_hand(loss, result, sample)
    return -3.0 * (gains * log_prob).sum() / gains.sum().clamp_min(1.0)


def rewarded(**kwargs):
    """A sample whose rewards differ enough for some steps to gain."""
    sample = tiny_sample(time=8, **kwargs)
    sample["next", "reward"] *= 10.0
    return sample


def forward(loss, sample, seed=3):
    torch.manual_seed(seed)
    return loss(sample.clone())


class TestEqualsStock:
    @pytest.mark.parametrize("why", ["weights", "masked", "nan", "no_confidence"])
    def test_over_several_updates_bitwise(self, why):
        stock = tiny_learner()
        lore = tiny_learner(lore_config(**(OFF if why == "weights" else {})))
        start = weights(stock.loss)
        for step in range(4):
            stock_sample = tiny_sample(seed=step, mask=None)
            sample = tiny_sample(seed=step, mask=why != "masked")
            if why == "nan":
                sample["next", "llm_prior_logits"][..., 1] = NAN
            if why == "no_confidence":
                sample["next", "llm_confidence"].fill_(NAN)
            expected, expected_grads, expected_state = update(stock, stock_sample, seed=step)
            found, grads, state = update(lore, sample, seed=step)
            for key, value in expected.items():
                assert torch.equal(found[key], value), key
            assert all(v == 0 for k, v in found.items() if k.startswith("loss_lore"))
            assert set(grads) == set(expected_grads)
            for name, grad in expected_grads.items():
                assert torch.equal(grads[name], grad), name
            assert torch.equal(state, expected_state)
            for key in ("state", "belief"):
                context = ("replay_context", key)
                assert torch.equal(sample[context], stock_sample[context])
            after = weights(lore.loss)
            for name, value in weights(stock.loss).items():
                assert torch.equal(after[name], value), name
        moved = [name for name, value in start.items() if not torch.equal(value, after[name])]
        assert any("actor_model" in name for name in moved)

    def test_with_weights_zero_the_advice_may_be_missing(self):
        lore = tiny_learner(lore_config(**OFF))
        assert "loss_actor" in forward(lore.loss, tiny_sample(mask=None))

    def test_a_sample_that_is_no_batch_of_sequences_is_refused(self):
        lore = tiny_learner(lore_config(**OFF))
        with pytest.raises(ValueError, match=r"batch size \[batch, time\]"):
            forward(lore.loss, tiny_sample(mask=None).reshape(-1))

    def test_self_imitation_needs_no_advice(self):
        """`LoReDreamerV3Loss` around a stock loss, in a loop without an advisor."""
        alone = {"imitation_weight": 3.0, "prior_weight": 0.0, "multiplier_lr": 0.0}
        given, without = (
            forward(imitating(**alone), rewarded(mask=mask)) for mask in (False, None)
        )
        assert without["loss_lore_imitation"] > 0
        assert torch.equal(given["loss_lore_imitation"], without["loss_lore_imitation"])
        with pytest.raises(KeyError, match="llm_prior_logits"):
            forward(imitating(prior_weight=1.0), rewarded(mask=None))

    def test_what_corrects_returns_of_followed_advice_must_be_told_of_it(self):
        loss = imitating(imitation_weight=3.0, prior_weight=0.0, multiplier_lr=0.0)
        loss.actor_loss.set_bandit(AdviceBandit())
        with pytest.raises(KeyError, match=r"llm_prior_logits.*SelectTransform"):
            forward(loss, rewarded(mask=None))

    def test_advice_changes_the_actor_only(self):
        stock, lore = tiny_learner(), tiny_learner(lore_config(delta=0.0, multiplier_init=0.5))
        expected, expected_grads, expected_state = update(stock, tiny_sample(mask=None))
        found, grads, state = update(lore, tiny_sample())
        for key, value in expected.items():
            assert torch.equal(found[key], value), key
        assert found["loss_lore_prior"] > 0 and found["loss_lore_constraint"] > 0
        changed = {n for n, grad in expected_grads.items() if not torch.equal(grads[n], grad)}
        assert changed and all("actor_model" in name for name in changed)
        assert torch.equal(state, expected_state)


class TestAlignment:
    def test_posterior_at_t_has_seen_the_observation_under_next_at_t(self):
        loss = tiny_learner(lore_config()).loss
        sample = tiny_sample()
        # Of a posterior only samples are returned, and few differ: draw several.
        drawn = [forward(loss, sample, seed)["replay_context", "state"] for seed in range(20)]
        for t in range(TIME):
            changed = sample.clone()
            changed["next", "observation"][:, t] *= -1
            same = torch.ones(BATCH, TIME, dtype=torch.bool)
            for seed, before in enumerate(drawn):
                after = forward(loss, changed, seed)["replay_context", "state"]
                same &= (before == after).all(-1)
            assert same[:, :t].all() and not same[:, t].any()

    def test_advice_under_next_at_t_meets_the_posterior_of_t(self):
        loss = tiny_learner(lore_config()).loss
        sample = tiny_sample()
        sample["next", "done"].zero_()
        sample["next", "llm_mask"][1, 2] = False
        # A decoy: advice for the observation before, which the loss must not read.
        for key, value in zip(ADVICE, (-5.0, 1.0, True), strict=True):
            sample[key] = torch.full_like(sample["next", key], value)
        result = forward(loss, sample)
        context, advice = result["replay_context"], sample["next"].select(*ADVICE)
        expected = prior_by_hand(loss, context, advice)
        torch.testing.assert_close(result["loss_lore_prior"], expected)
        for shift in (-1, 1):
            shifted = advice.apply(lambda x, shift=shift: x.roll(shift, 1))
            off_by_one = prior_by_hand(loss, context, shifted)
            assert abs(off_by_one - expected) > 1e-2
            moved = sample.clone()
            moved["next"].update(shifted)
            torch.testing.assert_close(forward(loss, moved)["loss_lore_prior"], off_by_one)

    @pytest.mark.parametrize("b", range(BATCH))
    @pytest.mark.parametrize("t", range(TIME))
    def test_single_advised_state(self, b, t):
        loss = tiny_learner(lore_config()).loss
        sample = tiny_sample(mask=False)
        sample["next", "done"].zero_()
        sample["next", "llm_mask"][b, t] = True
        result = forward(loss, sample)
        log_p = loss.actor_loss.actor_model.get_dist(result["replay_context"][b, t]).logits
        kl = kl_divergence(
            Categorical(logits=sample["next", "llm_prior_logits"][b, t]), Categorical(logits=log_p)
        )
        expected = 0.3 * sample["next", "llm_confidence"][b, t, 0] * kl
        torch.testing.assert_close(result["loss_lore_prior"], expected)
        assert result["lore_advised"].item() == pytest.approx(1 / (BATCH * TIME))


class TestImitation:
    def test_by_hand(self):
        loss, sample = imitating().eval(), rewarded()
        result = forward(loss, sample)
        gains, log_prob = gains_by_hand(loss, result, sample)
        assert 3 < (gains > 0).sum() < 16 and ((gains > 0) & (gains < 1)).sum() > 2
        expected = -3.0 * (gains * log_prob).sum() / gains.sum()
        assert gains.sum() > 1
        torch.testing.assert_close(result["loss_lore_imitation"], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result["lore_imitated"], (gains > 0).float().mean())

    @pytest.mark.parametrize("shift", [-1, 1])
    @pytest.mark.parametrize("what", ["action", "reward"])
    def test_the_step_of_posterior_t_is_that_of_record_t_plus_one(self, what, shift):
        loss, sample = imitating().eval(), rewarded()
        sample["is_init"].zero_()
        sample["next", "done"].zero_()
        sample["next", "terminated"].zero_()
        result = forward(loss, sample)
        key = "action" if what == "action" else ("next", "reward")
        moved = sample.clone()
        moved[key] = sample[key].roll(shift, 1)
        expected, off_by_one = (imitation_by_hand(loss, result, each) for each in (sample, moved))
        assert abs(expected - off_by_one) > 0.05
        found = result["loss_lore_imitation"]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    def test_stored_steps_are_imitated_in_place_of_the_samples_own(self):
        loss, sample = imitating().eval(), rewarded()
        context = forward(loss, sample)["replay_context"]
        stored = context.select("state", "belief")
        stored["action"] = sample["action"].flip(1)
        stored[keys.IMITATION_WEIGHT] = torch.rand(*stored.batch_size, 1)
        stored[keys.IMITATION_WEIGHT][0] = 0.0
        result = forward(loss, sample.clone().set(keys.IMITATION, torch.stack((stored, stored), 2)))
        log_p = loss.actor_loss.actor_model.get_dist(context).logits.log_softmax(-1)
        log_prob = (log_p * stored["action"]).sum(-1)
        weight = stored[keys.IMITATION_WEIGHT].squeeze(-1)
        expected = -3.0 * (weight * log_prob).sum() / weight.sum()
        found = result["loss_lore_imitation"]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    def test_a_step_is_imitated_up_to_its_limit(self):
        loss, sample = imitating().eval(), rewarded()
        context = forward(loss, sample)["replay_context"]
        stored = context.select("state", "belief")
        stored["action"] = sample["action"]
        log_p = loss.actor_loss.actor_model.get_dist(context).logits.log_softmax(-1)
        prob = (log_p * sample["action"]).sum(-1, keepdim=True).exp().detach()
        above = torch.rand(prob.shape) < 0.5
        found = []
        for limited in (True, False):
            stored[keys.IMITATION_LIMIT] = torch.where(above, 0.5 * prob, 1.0)
            stored[keys.IMITATION_WEIGHT] = torch.ones_like(prob)
            if not limited:
                # The same gradient without those steps, over as many.
                stored[keys.IMITATION_WEIGHT][above] = 0.0
                del stored[keys.IMITATION_LIMIT]
            result = forward(loss, sample.clone().set(keys.IMITATION, stored.unsqueeze(2)))
            term = result["loss_lore_imitation"]
            term = term if limited else term * (~above).float().mean()
            found.append(torch.autograd.grad(term, [*loss.actor_loss.actor_model.parameters()]))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)

    def test_what_each_step_is_worth_goes_back_with_the_latents(self):
        loss, sample = imitating().eval(), rewarded()
        result = forward(loss, sample)
        gains, _ = gains_by_hand(loss, result, sample)
        written = result["replay_context"][keys.IMITATION_WEIGHT]
        torch.testing.assert_close(written, gains.unsqueeze(-1), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("t", range(TIME - 1))
    def test_one_step_with_a_gain(self, t):
        """A reward in record t + 1 after an action there: posterior t learns that action."""
        loss, sample = imitating(scale=1.0).eval(), tiny_sample(mask=False)
        for key in ("done", "terminated"):
            sample["next", key].fill_(True)
        sample["is_init"].zero_()
        sample["next", "reward"].fill_(-1e3)
        sample["next", "reward"][2, t + 1] = 1e3
        result = forward(loss, sample)
        log_p = loss.actor_loss.actor_model.get_dist(result["replay_context"][2, t]).logits
        taken = sample["action"][2, t + 1].argmax()
        expected = -3.0 * log_p.log_softmax(-1)[taken]
        torch.testing.assert_close(result["loss_lore_imitation"], expected)
        assert result["lore_imitated"].item() == pytest.approx(1 / (BATCH * TIME))

    def test_nothing_is_imitated_at_the_last_posterior_and_before_a_reset(self):
        """There a critic of minus 17 would make any return a gain."""
        loss, sample = imitating(scale=1.0).eval(), tiny_sample(mask=False)
        with torch.no_grad():
            bias = loss.actor_loss.value_model[0].module.model[-1].bias
            bias.fill_(-1e3)[6] = 0.0
        sample["next", "reward"].fill_(1e3)
        sample[RETURN] = torch.full_like(sample["next", "reward"], 1e3)
        result = forward(loss, sample)
        acted = torch.ones(BATCH, TIME, dtype=torch.bool)
        acted[:, -1] = acted[0, 2] = acted[1, 0] = False
        torch.testing.assert_close(result["lore_imitated"], acted.float().mean())
        gains, log_prob = gains_by_hand(loss, result, sample)
        assert torch.equal(gains, acted.float())
        expected = -3.0 * log_prob[acted].mean()
        torch.testing.assert_close(result["loss_lore_imitation"], expected)

    def test_the_real_return_filters_and_the_lambda_return_weighs(self):
        loss, sample = imitating().eval(), rewarded()
        sample["next", "reward"][:, 5] = 60.0
        hoped, _ = gains_by_hand(loss, forward(loss, sample), sample)
        # The first sequence's end is not known, the second ended well, the third failed.
        ended = torch.tensor([NAN, 300.0, -300.0]).reshape(BATCH, 1, 1)
        sample[RETURN] = ended.expand_as(sample["next", "reward"]).clone()
        result = forward(loss, sample)
        gains, log_prob = gains_by_hand(loss, result, sample)
        assert (hoped > 0).any(-1).all(), "each has steps with a lambda return above the value"
        assert not gains[0].any() and gains[1].sum() > 1 and not gains[2].any()
        assert (gains[1] >= hoped[1]).all(), "a small gain counts too"
        expected = -3.0 * (gains * log_prob)[1].sum() / gains[1].sum()
        found = result["loss_lore_imitation"]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    def test_the_real_return_of_posterior_t_is_that_of_record_t(self):
        loss, sample = imitating().eval(), rewarded()
        for key in ("done", "terminated"):
            sample["next", key].zero_()
        sample["is_init"].zero_()
        sample[RETURN] = torch.where(torch.arange(8) % 3 == 0, 300.0, NAN).expand(BATCH, 8)
        sample[RETURN] = sample[RETURN].unsqueeze(-1).clone()
        result = forward(loss, sample)
        gains, _ = gains_by_hand(loss, result, sample)
        assert gains[:, ::3].any() and not gains[:, 1::3].any() and not gains[:, 2::3].any()
        expected = imitation_by_hand(loss, result, sample)
        found = result["loss_lore_imitation"]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    def test_the_discount_is_that_of_the_continuation(self):
        parts = imitating()
        kwargs = {"continuation_horizon": 4.0, "lmbda": 0.95}
        losses = (parts.model_loss, parts.actor_loss, parts.value_loss)
        assert LoReDreamerV3Loss(*losses, **kwargs).discount == pytest.approx(0.75)

    def test_advice_counts_where_its_first_choice_was_taken_and_gained(self):
        loss, sample = imitating().eval(), rewarded()
        first = sample["next", "llm_prior_logits"].argmax(-1)
        took = torch.rand(first.shape) < 0.5
        # The step at posterior t stands in record t + 1.
        action = torch.where(took, first, (first + 1) % ACTIONS)
        sample["action"] = torch.nn.functional.one_hot(action, ACTIONS).float().roll(1, 1)
        result = forward(loss, sample)
        gains, _ = gains_by_hand(loss, result, sample)
        assert (took & (gains > 0)).any() and (~took & (gains > 0)).any()
        context, given = result["replay_context"], sample["next"]
        policy = Categorical(logits=loss.actor_loss.actor_model.get_dist(context).logits)
        kl = kl_divergence(Categorical(logits=given["llm_prior_logits"]), policy)
        goes_on = ~given["done"].squeeze(-1)
        share = gains * took * goes_on
        values = share * given["llm_confidence"].squeeze(-1) * kl
        expected = 0.3 * values.sum() / share.sum().clamp_min(1.0)
        torch.testing.assert_close(result["loss_lore_prior"], expected, rtol=1e-4, atol=1e-6)

    def test_only_the_actor_learns_it(self):
        lore = lore_config(imitation_weight=3.0, delta=0.0, multiplier_init=0.5)
        stock = tiny_learner()
        expected, expected_grads, expected_state = update(stock, rewarded(mask=None))
        found, grads, state = update(tiny_learner(lore), rewarded())
        for key, value in expected.items():
            assert torch.equal(found[key], value), key
        assert found["loss_lore_imitation"] > 0
        changed = {n for n, grad in expected_grads.items() if not torch.equal(grads[n], grad)}
        assert changed and all("actor_model" in name for name in changed)
        assert torch.equal(state, expected_state)

    @pytest.mark.parametrize("why", ["nothing was done", "failed", "unknown"])
    def test_without_gains_the_update_is_stock_bitwise(self, why):
        stock, lore = tiny_learner(), tiny_learner(lore_config(imitation_weight=3.0))
        stock_sample, sample = rewarded(mask=None), rewarded()
        if why == "nothing was done":
            for each in (stock_sample, sample):
                each["is_init"].fill_(True)
        else:
            real = -1e10 if why == "failed" else NAN
            sample[RETURN] = torch.full_like(sample["next", "reward"], real)
        expected, expected_grads, expected_state = update(stock, stock_sample)
        found, grads, state = update(lore, sample)
        for key, value in expected.items():
            assert torch.equal(found[key], value), key
        assert found["lore_imitated"] == 0 and found["lore_advised"] > 0
        assert all(v == 0 for k, v in found.items() if k.startswith("loss_lore"))
        assert all(torch.equal(grads[name], grad) for name, grad in expected_grads.items())
        assert torch.equal(state, expected_state)
        after = weights(lore.loss)
        for name, value in weights(stock.loss).items():
            assert torch.equal(after[name], value), name

    def test_without_weight_actions_and_returns_change_nothing(self):
        """The paper's form: neither is read."""
        found = []
        for factor in (1.0, 100.0):
            loss, sample = imitating(imitation_weight=0.0), rewarded()
            sample[RETURN] = torch.full_like(sample["next", "reward"], factor)
            found.append(forward(loss, sample))
        first, second = ({k: v for k, v in each.items() if "lore" in k} for each in found)
        assert first["loss_lore_prior"] > 0 and "loss_lore_imitation" not in first
        assert all(torch.equal(second[name], value) for name, value in first.items())


class TestUnusableRows:
    @pytest.mark.parametrize(
        "bad",
        [
            {"llm_mask": False, "llm_prior_logits": NAN, "llm_confidence": NAN},
            {"llm_mask": False, "llm_prior_logits": 40.0},
            {"llm_prior_logits": NAN},
            {"llm_prior_logits": -INF},
            {"llm_confidence": INF},
        ],
        ids=str,
    )
    def test_equal_rows_without_advice_bitwise(self, bad):
        lore = lore_config(
            bonus_weight=0.2,
            delta=0.0,
            multiplier_init=0.5,
            multiplier_lr=0.1,
            temperature={"rate": 0.5},
        )
        rows = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0]]).bool()
        outcomes = []
        for case in ("empty", "bad"):
            learner = tiny_learner(lore)
            sample = tiny_sample()
            entries = dict.fromkeys(ADVICE, 0.0) if case == "empty" else bad
            for key, value in entries.items():
                sample["next", key][rows] = value
            outcomes.append((*update(learner, sample), weights(learner.loss)))
        (clean, clean_grads, clean_state, clean_weights), (found, grads, state, after) = outcomes
        for key, value in clean.items():
            assert torch.equal(found[key], value), key
        for expected, actual in ((clean_grads, grads), (clean_weights, after)):
            for name, value in expected.items():
                assert torch.equal(actual[name], value), name
        assert torch.equal(state, clean_state)
        assert found["loss_lore_prior"] > 0 and found["loss_lore_constraint"] > 0

    def test_mask_without_its_last_dimension(self):
        loss = tiny_learner(lore_config()).loss
        sample = tiny_sample()
        sample["next", "llm_mask"][1, 2] = False
        expected = forward(loss, sample)["loss_lore_prior"]
        sample["next", "llm_mask"] = sample["next", "llm_mask"].squeeze(-1)
        assert torch.equal(forward(loss, sample)["loss_lore_prior"], expected)


class TestGradients:
    def test_lore_terms_reach_only_the_actor(self):
        learner = tiny_learner(lore_config(bonus_weight=0.2, delta=0.0, multiplier_init=0.5))
        result = forward(learner.loss, tiny_sample())
        terms = {k: v for k, v in result.items() if k.startswith("loss_lore")}
        assert set(terms) == {"loss_lore_prior", "loss_lore_bonus", "loss_lore_constraint"}
        learner.optimizer.zero_grad(set_to_none=True)
        sum(terms.values()).backward()
        reached = {name for name, grad in gradients(learner.loss).items() if grad.any()}
        assert reached and all(name.startswith("actor_loss.actor_model") for name in reached)

    def test_updates_move_the_policy_towards_the_advice(self):
        lore = lore_config(prior_weight=3.0, multiplier_lr=0.0)
        learner = tiny_learner(lore, config=tiny_config(lr=1e-2))
        losses = [update(learner, tiny_sample(), seed=0)[0]["loss_lore_prior"] for _ in range(25)]
        assert losses[-1] < 0.8 * losses[0]


class TestKeys:
    def test_in_keys_are_stock_and_advice(self):
        stock, lore = tiny_learner().loss, tiny_learner(lore_config()).loss
        extra = [("next", key) for key in ADVICE]
        assert lore.in_keys == [*stock.in_keys, *extra]
        for settings in (
            {"imitation_weight": 3.0},
            {"gate": {"value_weight": 0.3, "value_source": "ensemble"}},
        ):
            lore = tiny_learner(lore_config(**settings)).loss
            stored = [keys.IMITATION] * bool(settings.get("imitation_weight"))
            assert lore.in_keys == [*stock.in_keys, *extra, RETURN, *stored]

    @pytest.mark.parametrize("key", ADVICE)
    def test_missing_advice_names_the_remedy(self, key):
        learner = tiny_learner(lore_config())
        sample = tiny_sample()
        del sample["next", key]
        with pytest.raises(KeyError, match=f"{key}.*SelectTransform"):
            learner.stepper.step(None, sample)

    @pytest.mark.parametrize("prior_weight", [0.0, 1.0])
    def test_wrong_advice_is_refused_where_it_only_acts_too(self, prior_weight):
        config = lore_config(imitation_weight=3.0, multiplier_lr=0.0, prior_weight=prior_weight)
        for key, change, error in (
            ("llm_mask", torch.Tensor.float, TypeError),
            ("llm_prior_logits", lambda logits: logits[..., :-1], ValueError),
        ):
            sample = tiny_sample()
            sample["next", key] = change(sample["next", key])
            with pytest.raises(error, match=r"must be boolean|advice has 3 logits"):
                forward(tiny_learner(config).loss, sample)

    def test_context_is_returned_as_by_the_stock_loss(self):
        result = forward(tiny_learner(lore_config()).loss, tiny_sample())
        stock = forward(tiny_learner().loss, tiny_sample(mask=None))
        context, expected = result["replay_context"], stock["replay_context"]
        assert set(context.keys()) == {"state", "belief"}
        assert (context == expected).all()


class TestStepper:
    def test_metrics_pass_through(self):
        metrics, _, _ = update(tiny_learner(lore_config(temperature={"rate": 0.1})), tiny_sample())
        names = {"loss_lore_prior", "loss_lore_constraint", "lore_kl", "lore_multiplier"}
        assert names | {"lore_delta", "lore_temperature", "lore_advised"} <= set(metrics.keys())

    def test_warmup_leaves_every_buffer_as_it_was(self):
        learner = tiny_learner(
            lore_config(delta=0.0, multiplier_lr=0.1, temperature={"rate": 0.5}),
        )
        before = weights(learner.loss)
        learner.stepper.warmup(tiny_sample())
        after = weights(learner.loss)
        assert all(torch.equal(value, after[name]) for name, value in before.items())

    def test_resumes_bitwise(self):
        config = lore_config(delta=0.0, multiplier_lr=0.1, temperature={"rate": 0.5})
        one, two = tiny_learner(config), tiny_learner(config, seed=9)
        for seed in range(2):
            update(one, tiny_sample(seed=seed))
        two.loss.load_state_dict(one.loss.state_dict())
        two.stepper.load_state_dict(copy.deepcopy(one.stepper.state_dict()))
        expected, found = update(one, tiny_sample(seed=7)), update(two, tiny_sample(seed=7))
        assert (expected[0] == found[0]).all()
        after = weights(two.loss)
        assert all(torch.equal(value, after[name]) for name, value in weights(one.loss).items())


def test_value_loss_built_with_the_wrapper():
    # The documented way: every loss is given the LoRe actor loss.
    learner = tiny_learner(lore_config())
    parts = learner.loss
    config, value_model = tiny_config(), parts.actor_loss.value_model
    value_loss = DreamerV3ValueLoss(
        value_model,
        value_loss="two_hot",
        num_value_bins=config.num_bins,
        actor_loss=parts.actor_loss,
        slow_critic_regularization=1.0,
    )
    composed = LoReDreamerV3Loss(
        parts.model_loss,
        parts.actor_loss,
        value_loss,
        replay_value_loss_weight=config.replay_value_weight,
        continuation_horizon=config.continuation_horizon,
        lmbda=config.lmbda,
    )
    result, expected = forward(composed, tiny_sample()), forward(parts, tiny_sample())
    assert torch.equal(result["loss_value"], expected["loss_value"])
    assert torch.equal(result["loss_replay_value"], expected["loss_replay_value"])


def test_a_stock_checkpoint_is_loaded_into_the_stock_losses():
    """As docs/pipeline.md tells."""
    stock, lore = tiny_learner(seed=9), tiny_learner(lore_config()).loss
    update(stock, tiny_sample(mask=None))
    parts = (lore.model_loss, lore.actor_loss.actor_loss, lore.value_loss)
    DreamerV3Loss(*parts).load_state_dict(stock.loss.state_dict())
    first, second = (forward(loss, tiny_sample(mask=False)) for loss in (lore, stock.loss))
    for name in ("loss_model_reco", "loss_actor", "loss_value"):
        assert torch.equal(first[name], second[name]), name


def test_a_stock_loss_around_the_wrapper_is_refused():
    """It would hand over no advice: there was no LoRe term, silently."""
    learner = tiny_learner(lore_config())
    actor_loss = copy.deepcopy(learner.loss.actor_loss)
    actor_loss.composed = False
    stock = DreamerV3Loss(learner.loss.model_loss, actor_loss, learner.loss.value_loss)
    with pytest.raises(KeyError, match="use LoReDreamerV3Loss in place of DreamerV3Loss"):
        forward(stock, tiny_sample())


def test_stock_actor_loss_is_refused():
    parts = tiny_learner().loss
    with pytest.raises(TypeError, match="DreamerV3ActorLoss"):
        LoReDreamerV3Loss(parts.model_loss, parts.actor_loss, parts.value_loss)


class TestCompile:
    config = lore_config(
        bonus_weight=0.1, delta=0.0, multiplier_init=0.5, temperature={"rate": 0.1}
    )

    everything = replace(
        lore_config(
            gate={"disagreement_weight": 0.3, "value_weight": 0.3, "value_source": "ensemble"},
            imitation_weight=3.0,
            bonus_weight=0.1,
            multiplier_init=0.5,
        ),
        prior_net=PriorNetConfig(enabled=True, num_cells=8, threshold=0.3),
    )

    @pytest.mark.parametrize(
        "which", ["everything", pytest.param("config", marks=pytest.mark.slow)]
    )
    def test_what_lore_adds_has_no_graph_break(self, monkeypatch, which):
        """The stock part is replaced by its result, so that any break is LoRe's own."""
        loss = tiny_learner(getattr(self, which)).loss
        sample = tiny_sample()
        sample[RETURN] = torch.full_like(sample["next", "reward"], 1e9)
        state = {name: value.clone() for name, value in loss.state_dict().items()}
        expected = forward(loss, sample)
        loss.load_state_dict(state)
        assert ("loss_disagreement" in expected) == (which == "everything")
        stock = forward(tiny_learner().loss, sample)
        monkeypatch.setattr(DreamerV3Loss, "forward", lambda self, sample: stock.clone())

        def step(sample):
            first = sample.get(loss.in_keys[0])  # as the stepper does
            return first, LoReDreamerV3Loss.forward.__wrapped__(loss, sample)

        _, found = torch.compile(step, fullgraph=True, backend="eager")(sample)
        for key in expected.keys():  # noqa: SIM118
            if "lore" in key or "prior_net" in key or "ensemble" in key:
                torch.testing.assert_close(found[key], expected[key])
        if which == "everything":
            assert found["loss_lore_imitation"] > 0 and found["loss_prior_net"] > 0

    @pytest.mark.slow
    @pytest.mark.parametrize("which", ["config", "imagination"])
    def test_learner_step_breaks_no_more_often_than_stock(self, which):
        def graph_breaks(learner, sample):
            torch._dynamo.reset()
            counters.clear()
            learner.stepper._select_scan_backends()
            step = torch.compile(learner.stepper._forward_backward, backend="eager")
            step(learner.stepper._prepare_sample(sample))
            # The first line of a reason names the break; what follows holds addresses.
            reasons = {}
            for reason, count in counters["graph_break"].items():
                context = re.search(r"Developer debug context: (.*)", reason).group(1)
                name = reason.splitlines()[0], re.sub(r"0x[0-9a-f]+", "", context)
                reasons[name] = reasons.get(name, 0) + count
            return reasons

        small = tiny_config(imagination_horizon=1)
        stock = graph_breaks(tiny_learner(config=small), tiny_sample(mask=None))
        config = self.config
        if which == "imagination":
            loss = replace(self.everything.loss, beta_imagine_max=0.5)
            config = replace(self.everything, loss=loss)
        lore = graph_breaks(tiny_learner(config, config=small), tiny_sample())
        assert lore == stock


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("which", ["constraint", "everything"])
def test_learner_step_on_cuda(which):
    lore = TestCompile.everything
    if which == "constraint":
        lore = lore_config(delta=0.0, multiplier_lr=0.1, temperature={"rate": 0.5})
    learner = tiny_learner(lore, device="cuda")
    metrics, _, _ = update(learner, tiny_sample().to("cuda"))
    assert all(value.isfinite().all() and value.is_cuda for value in metrics.values())
    assert all(value.is_cuda for value in learner.loss.buffers())
    assert learner.loss.actor_loss.multiplier.item() > 0
