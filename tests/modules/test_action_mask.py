"""Advice rules out the actions that the advisor calls invalid, within the bound."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from dreamer_sample import (
    ACTIONS,
    latents,
    lore_around,
    lore_config,
    tiny_agent,
    tiny_learner,
    tiny_sample,
)
from hypothesis import given, settings
from tensordict import TensorDict

from lore_torchrl import keys
from lore_torchrl.configs import MixerConfig
from lore_torchrl.functional import log_floor
from lore_torchrl.modules import AdviceBatch, LogitMixer, TemperatureAligner
from lore_torchrl.policies import CategoricalPolicy

N = 500
INF = float("inf")
MODES = pytest.mark.parametrize("mode", ["logit", "probability"])


def drawn(seed=0, spread=2.0, scale=3.0):
    """Policies, advice that counts in all but the last row, and masks: the first all false."""
    generator = torch.Generator().manual_seed(seed)
    log_p = torch.log_softmax(spread * torch.randn(N, ACTIONS, generator=generator), -1)
    mask = torch.ones(N, 1, dtype=torch.bool)
    mask[-1] = False
    raw = scale * torch.randn(N, ACTIONS, generator=generator), torch.ones(N, 1), mask
    actions = torch.rand(N, ACTIONS, generator=generator) < 0.6
    actions[0] = False
    return log_p, raw, actions


def test_the_prior_of_an_invalid_action_is_zero_and_of_the_others_in_proportion():
    log_p, raw, actions = drawn()
    batch = AdviceBatch.clean(*raw, actions)
    hot = TemperatureAligner(init=2.0, rate=0.0)(batch.prior_logits)
    kept = torch.where(actions | ~actions.any(-1, keepdim=True), raw[0] / 2, -INF)
    found = CategoricalPolicy().as_policy(hot, log_p).exp()
    torch.testing.assert_close(found[:-1], torch.softmax(kept, -1)[:-1], atol=1e-4, rtol=1e-3)
    assert not found[1:-1][~actions[1:-1] & actions[1:-1].any(-1, keepdim=True)].any()
    assert batch.prior_logits.isfinite().all()
    assert not batch.prior_logits[-1].any(), "a row that does not count stays zero"
    torch.testing.assert_close(batch.prior_logits.sum(-1), torch.zeros(N), atol=1e-3, rtol=0)
    with_huge = AdviceBatch.clean(1e29 * raw[0], *raw[1:], actions)
    assert with_huge.prior_logits.isfinite().all()
    assert with_huge.prior_logits.argmax(-1).eq(kept.argmax(-1))[1:-1].all()


@MODES
def test_a_mask_of_what_the_policy_rules_out_alone_leaves_the_policy(mode):
    log_p = log_floor(torch.tensor([[-INF, 0.0, -INF]]))
    raw = torch.tensor([[3.0, 0.0, 1.0]]), torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    batch = AdviceBatch.clean(*raw, torch.tensor([[True, False, True]]))
    found = LogitMixer(mode=mode, action_mask=True).mix(log_p, batch, torch.ones(1, 1)).policy
    torch.testing.assert_close(found.exp(), torch.tensor([[0.0, 1.0, 0.0]]))


@MODES
def test_a_mask_that_says_nothing_changes_nothing(mode):
    log_p, raw, actions = drawn()
    mixer, plain = LogitMixer(mode=mode, action_mask=True), AdviceBatch.clean(*raw)
    expected = mixer.mix(log_p, plain, torch.ones(N, 1)).policy
    for says in (torch.ones_like(actions), torch.zeros_like(actions)):
        found = mixer.mix(log_p, AdviceBatch.clean(*raw, says), torch.ones(N, 1)).policy
        torch.testing.assert_close(found, expected)
    assert torch.equal(found[-1], log_p[-1])


@MODES
def test_without_a_bound_the_mixture_is_the_masked_product(mode):
    log_p, raw, actions = drawn()
    mixer = LogitMixer(max_kl=INF, mode=mode)
    found = mixer.mix(log_p, AdviceBatch.clean(*raw, actions), torch.ones(N, 1)).policy
    allowed = (actions | ~actions.any(-1, keepdim=True))[:-1]
    prior = torch.where(allowed, raw[0][:-1], -INF)
    product = (log_p[:-1] + prior).softmax(-1) if mode == "logit" else prior.softmax(-1)
    torch.testing.assert_close(found[:-1].exp(), product, atol=1e-4, rtol=1e-3)


@MODES
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.0, 1e-4, 0.1, 1.0, 200.0]),
    st.sampled_from([0.1, 3.0, 60.0]),
    st.sampled_from([0.0, 0.01, 0.5, 1.0, 20.0]),
    st.sampled_from([1.0, 1e25]),
)
def test_the_bound_holds(mode, seed, max_kl, spread, beta, scale):
    log_p, raw, actions = drawn(seed, spread, scale)
    log_p = log_p.clamp_min(-1e4)
    mixer = LogitMixer(max_kl=max_kl, mode=mode)
    mixture = mixer.mix(log_p, AdviceBatch.clean(*raw, actions), torch.full((N, 1), beta))
    assert mixture.policy.isfinite().all()
    assert mixture.kl.max() <= max_kl * (1 + 1e-4) + 2e-6


def test_the_advice_keeps_at_least_half_of_the_bound():
    """One action is advised and another called invalid: the first gains as the second falls."""
    log_p = torch.full((1, 4), 0.25).log()
    raw = torch.tensor([[3.0, 0.0, 0.0, 0.0]]), torch.ones(1, 1), torch.ones(1, 1).bool()
    actions = torch.tensor([[True, True, True, False]])
    batch = AdviceBatch.clean(*raw, actions)
    found = LogitMixer().mix(log_p, batch, torch.ones(1, 1)).policy.exp()[0]
    # The mask costs ln(4/3) of the nat, the rest is the advice's: exp(sqrt(8 (1 - ln 4/3))).
    odds = math.exp(math.sqrt(8 * (1 - math.log(4 / 3))))
    assert float(found[0] / found[1]) == pytest.approx(odds, rel=1e-4)
    assert found[3] == 0


def test_a_shut_gate_lets_no_mask_through():
    log_p, raw, actions = drawn()
    batch, weight = AdviceBatch.clean(*raw, actions), torch.full((N, 1), 1e-3)
    assert LogitMixer().mix(log_p, batch, weight).kl.max() < 1e-4
    off = LogitMixer().mix(log_p, batch, torch.zeros(N, 1)).policy
    assert torch.equal(off, log_p)


def test_the_actor_reads_the_mask_only_where_it_is_asked_to():
    agent = tiny_agent()
    _, raw, actions = drawn()
    td = TensorDict(state=torch.randn(N, 8), belief=torch.randn(N, 16), batch_size=[N])
    td.update(dict(zip(keys.ADVICE_KEYS, raw, strict=True)))

    def acted(action_mask, td):
        config = lore_config(gate={"tau": -1.0, "value_weight": 0.0})
        config.mixer = MixerConfig(action_mask=action_mask, max_kl=INF)
        actor = lore_around(config, agent).actor
        torch.manual_seed(0)
        return actor(td.clone())

    plain, masked = acted(False, td), td.clone().set(keys.ACTION_MASK, actions)
    assert (acted(False, masked).exclude(keys.ACTION_MASK) == plain).all()
    assert (acted(True, td) == plain).all(), "without the entry"
    on = acted(True, masked)
    chosen = on["action"].bool()
    assert actions[1:-1][chosen[1:-1] & actions[1:-1].any(-1, keepdim=True)].all()
    assert not plain["action"].bool()[actions].all()
    assert torch.equal(on["logits"], plain["logits"]), "the policy is not masked"


def test_the_losses_learn_the_masked_prior():
    config = lore_config(prior_weight=1.0, multiplier_lr=0.0)
    config.mixer = MixerConfig(action_mask=True)
    learner, sample = tiny_learner(config), tiny_sample()
    with pytest.raises(KeyError, match="llm_action_mask"):
        learner.loss(sample.clone())
    one = torch.nn.functional.one_hot(torch.zeros(3, 4, dtype=torch.long), ACTIONS).bool()
    metrics = {}
    for name, actions in {"all": torch.ones_like(one), "one": one}.items():
        assert ("next", keys.ACTION_MASK) in learner.loss.in_keys
        torch.manual_seed(0)
        sample["next", keys.ACTION_MASK] = actions
        metrics[name] = learner.loss(sample.clone())["loss_lore_prior"]
    assert metrics["one"].isfinite() and metrics["one"] != metrics["all"]
    # A loss that is not composed reads it at the root.
    td = latents().set(keys.ACTION_MASK, one[0, :1].expand(10, -1))
    masked = learner.loss.actor_loss.advice_terms(td)["loss_lore_prior"]
    alike = learner.loss.actor_loss.advice_terms(td.set(keys.PRIOR_LOGITS, torch.zeros(10, 4)))
    torch.testing.assert_close(masked, alike["loss_lore_prior"])
    # Only one action is left to advise: the term is the cross-entropy of that one.
    sample["next", keys.PRIOR_LOGITS].zero_()
    torch.manual_seed(0)
    torch.testing.assert_close(learner.loss(sample.clone())["loss_lore_prior"], metrics["one"])
