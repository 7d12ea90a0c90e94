"""The prior is multiplied by what the world model and the critic say of a step of each action."""

from __future__ import annotations

import pytest
import torch
from dreamer_sample import (
    ACTIONS,
    BELIEF,
    STATE,
    advice,
    lore_around,
    lore_config,
    sober,
    tiny_agent,
)
from gaussian_sample import ANCHORS, continuous_agent
from tensordict import TensorDict

from lore_torchrl import keys
from lore_torchrl.configs import LoReConfig, LossConfig, MixerConfig, PlannerConfig
from lore_torchrl.dreamer.metrics import policy_metrics
from lore_torchrl.lore import build_lore_actor
from lore_torchrl.modules import AdviceBatch, WorldModel

N, TAU = 6, 0.5
GATE = {"tau": -1.0, "kappa": 100.0, "value_weight": 0.0}


def make_agent():
    agent = sober(tiny_agent())
    with torch.no_grad():
        # Heads start at zero: let rewards, within 17 too, and continuation tell actions apart.
        for network in (agent.imagination.world_model[1], agent.continuation):
            torch.nn.init.normal_(list(network.parameters())[-2], std=0.5)
        reward_bias = list(agent.imagination.world_model[1].parameters())[-1]
        reward_bias.fill_(-30.0)[6:9] = 0.0
    return agent


def latents(n=N):
    return torch.randn(n, STATE), torch.randn(n, BELIEF)


def world_of(agent):
    return WorldModel(agent.imagination, agent.continuation, agent.value)


def actor_of(agent, value_temperature, **mixer):
    config = lore_config(gate=GATE)
    config.mixer = MixerConfig(value_temperature=value_temperature, max_kl=float("inf"), **mixer)
    config.loss = LossConfig()
    return lore_around(config, agent).actor


def advised(mask=True):
    state, belief = latents()
    return TensorDict(state=state, belief=belief, **advice(N, mask=mask), batch_size=[N])


def test_an_action_is_worth_its_reward_and_the_discounted_value_behind_it():
    agent, (state, belief) = make_agent(), latents()
    torch.manual_seed(1)
    found = world_of(agent).action_values(state, belief, ACTIONS)
    # The same draws, row by row and by the agent's own parts.
    torch.manual_seed(1)
    every = torch.eye(ACTIONS).repeat(N, 1)
    td = TensorDict(
        state=state.repeat_interleave(ACTIONS, 0),
        belief=belief.repeat_interleave(ACTIONS, 0),
        action=every,
        batch_size=[N * ACTIONS],
    )
    after = agent.imagination.step(td)["next"]
    goes_on = agent.continuation(after.select("state", "belief"))["continuation"]
    value = agent.value(after.select("state", "belief"))["state_value"]
    expected = (after["reward"] + goes_on * value).reshape(N, ACTIONS)
    torch.testing.assert_close(found, expected)
    assert found.std(-1).min() > 1e-3 and not found.requires_grad
    torch.manual_seed(1)
    shaped = [latent[:4].unflatten(0, (2, 2)) for latent in (state, belief)]
    assert world_of(agent).action_values(*shaped, ACTIONS).shape == (2, 2, ACTIONS)


def test_the_mixture_is_the_prior_times_the_softmax_of_the_values():
    agent, td = make_agent(), advised()
    td["llm_confidence"].fill_(1.0)
    torch.manual_seed(1)
    out = actor_of(agent, TAU)(td.clone())
    values = out[keys.ACTION_VALUES]
    prior = torch.softmax(td["llm_prior_logits"], -1) * torch.softmax(values / TAU, -1)
    expected = torch.softmax(out["logits"] + out["lore_beta"] * prior.log(), -1)
    torch.testing.assert_close(out["lore_logits"].exp(), expected, rtol=1e-3, atol=1e-5)
    torch.manual_seed(1)
    drawn = world_of(agent).action_values(td["state"], td["belief"], ACTIONS)
    torch.testing.assert_close(values, drawn)
    low, high = values.aminmax(dim=-1)
    assert policy_metrics(out)["lore/value_span"] == pytest.approx((high - low).mean().item())


def test_it_explains_itself_with_the_values_that_acted():
    agent, td = make_agent(), advised()
    actor = actor_of(agent, TAU)
    out = actor(td.clone())
    before = torch.get_rng_state()
    _, batch = actor.explain(out)
    assert torch.equal(torch.get_rng_state(), before)
    policy = actor.mixer.policy.read(out["logits"])
    again = actor.mixer.mix(policy, batch, out["lore_beta"]).policy
    torch.testing.assert_close(again, out["lore_logits"])


def test_off_it_is_bitwise_as_without_and_draws_nothing():
    agent, td = make_agent(), advised()
    off = actor_of(agent, None)
    assert off.world is None and keys.ACTION_VALUES not in off.out_keys
    plain = build_lore_actor(lore_config(gate=GATE), agent.actor, agent.value, num_actions=ACTIONS)
    plain.mixer.max_kl = off.mixer.max_kl
    results = []
    for actor in (off, plain):
        torch.manual_seed(1)
        results.append((actor(td.clone()), torch.get_rng_state()))
    (one, first), (other, second) = results
    assert (one == other).all() and torch.equal(first, second)


def test_rows_without_advice_keep_the_policy():
    agent, td = make_agent(), advised(mask=False)
    out = actor_of(agent, TAU)(td)
    assert torch.equal(out["lore_logits"], out["logits"] - out["logits"].logsumexp(-1, True))


def test_masked_actions_stay_masked_and_values_that_are_no_numbers_do_not_count():
    raw = 3 * torch.randn(2, ACTIONS), torch.ones(2, 1), torch.ones(2, 1).bool()
    mask = torch.tensor([[True, True, False, True]]).expand(2, -1)
    batch = AdviceBatch.clean(*raw, mask)
    factor = torch.log_softmax(torch.tensor([[0.0, 0.0, 1e6, 0.0], [0.0, torch.nan, 0.0, 0.0]]), -1)
    found = batch.times(factor)
    assert found.prior_logits.isfinite().all()
    assert torch.softmax(found.prior_logits, -1)[:, 2].eq(0).all()
    assert torch.equal(found.prior_logits[1], batch.prior_logits[1])
    only = AdviceBatch.clean(*raw).times(factor)
    assert torch.softmax(only.prior_logits, -1)[0, 2] == 1


@pytest.mark.parametrize("max_kl", [0.01, 1.0])
def test_the_bound_holds(max_kl):
    agent, td = make_agent(), advised()
    actor = actor_of(agent, 1e-3)
    actor.mixer.max_kl = max_kl
    assert actor(td)["lore_kl"].max() <= max_kl * (1 + 1e-5)


def test_it_acts_as_eagerly_when_compiled():
    agent, td = make_agent(), advised()
    eager, compiled = actor_of(agent, TAU), actor_of(agent, TAU).compile_decision(backend="eager")
    found = []
    for actor in (eager, compiled):
        torch.manual_seed(1)
        found.append(actor(td.clone()))
    torch.testing.assert_close(found[0]["lore_logits"], found[1]["lore_logits"])


def test_what_it_needs_is_named():
    agent = continuous_agent()
    config = LoReConfig(mixer=MixerConfig(value_temperature=TAU))
    with pytest.raises(ValueError, match="value_temperature=null"):
        lore_around(config, agent, anchors=ANCHORS)
    agent = make_agent()
    with pytest.raises(ValueError, match="world=WorldModel"):
        build_lore_actor(config, agent.actor, agent.value, num_actions=ACTIONS)
    with pytest.raises(ValueError, match=r"lore.mixer.value_temperature=0.5 .*multiplier_lr=0"):
        LoReConfig(mixer=config.mixer, loss=LossConfig(multiplier_lr=1e-3))
    with pytest.raises(ValueError, match=r"lore.mixer.value_temperature=0.5 .*multiplier_init=0"):
        LoReConfig(mixer=config.mixer, loss=LossConfig(multiplier_init=0.05))
    with pytest.raises(ValueError, match=r"lore.planner.enabled=True .*value_temperature=null"):
        LoReConfig(mixer=config.mixer, planner=PlannerConfig(enabled=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu():
    agent = tiny_agent(device="cuda")
    out = actor_of(agent, TAU).cuda()(advised().cuda())
    assert out[keys.ACTION_VALUES].is_cuda and out["lore_logits"].isfinite().all()
