"""What holds for every kind of policy beside the mixture: drawing, entropy, what fits."""

from __future__ import annotations

import pytest
import torch
from kinds import EACH, A, actor_of, kind_of, policy_of
from tensordict import TensorDict
from torch import nn
from torchrl.envs import ExplorationType, set_exploration_type

from lore_torchrl.modules import LatentDisagreement, LogitMixer, LoReActor, UncertaintyGate

N = 400


@EACH
@pytest.mark.parametrize("random", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_policy_mixed_with_nothing_is_drawn_as_the_stock_actor_draws(name, random, dtype):
    actor, kind = actor_of(name).to(dtype), kind_of(name).to(dtype)
    td = TensorDict(state=torch.randn(N, 3, dtype=dtype), batch_size=[N])
    mode = ExplorationType.RANDOM if random else ExplorationType.DETERMINISTIC
    torch.manual_seed(3)
    with torch.no_grad(), set_exploration_type(mode):
        stock = actor(td.clone())
    stock_state = torch.get_rng_state()
    policy = kind.read(*(stock[key] for key in actor[-1].in_keys))
    torch.manual_seed(3)
    choice, changed = kind.draw(policy, policy, random)
    action, log_prob = kind.act(actor[-1], policy, choice)
    assert torch.equal(torch.get_rng_state(), stock_state)
    if name == "categorical":
        # The stock mode of a tie is two-hot.
        action, stock["action"] = (
            torch.where(stock["action"].sum(-1, keepdim=True) == 1, each, 0)
            for each in (action, stock["action"])
        )
    assert torch.equal(action, stock["action"]) and action.dtype == stock["action"].dtype
    assert torch.equal(log_prob.detach(), stock["action_log_prob"])
    assert not changed.any()


@EACH
def test_written_and_read_again_it_is_the_same(name):
    kind, policy = kind_of(name), policy_of(name)
    again = kind.read(*kind.entries(policy))
    torch.testing.assert_close(again, policy)
    assert len(kind.entries(policy)) == len(kind.mix_keys)
    assert kind.num_actions(policy) == A


@EACH
def test_the_policy_of_an_actors_distribution(name):
    actor, kind = actor_of(name), kind_of(name)
    td = TensorDict(state=torch.randn(N, 3), batch_size=[N])
    policy = kind.of(actor.get_dist(td.clone()))
    written = actor(td)
    torch.testing.assert_close(policy, kind.read(*(written[key] for key in actor[-1].in_keys)))
    # Log-probabilities of the same actions differ by the tanh alone.
    if name != "tanh_normal":
        found = kind.log_prob(policy, written["action"])
        torch.testing.assert_close(found, written["action_log_prob"])


@EACH
def test_entropy_lies_between_nothing_and_one(name):
    kind = kind_of(name)
    found = kind.entropy(policy_of(name, N, spread=3.0))
    assert found.shape == (N, 1) and (found >= 0).all() and (found <= 1 + 1e-6).all()
    assert found.std() > 0.05
    if name == "categorical":
        torch.testing.assert_close(
            kind.entropy(torch.zeros(1, A).log_softmax(-1)), torch.ones(1, 1)
        )


@EACH
def test_advice_as_a_policy_and_what_it_expects(name):
    kind, policy, tempered = kind_of(name), policy_of(name, 3), torch.randn(3, A)
    prior = kind.as_policy(tempered, policy)
    assert kind.divergence(prior, policy).gt(0).all()
    assert kind.divergence(prior, prior).abs().max() < 1e-6
    if name == "categorical":
        torch.testing.assert_close(prior, tempered.log_softmax(-1))
        expected = (policy.exp() * prior).sum(-1)
        torch.testing.assert_close(kind.expected_log_prob(policy, prior), expected)


@EACH
def test_choices_are_probabilities(name):
    kind = kind_of(name)
    found = kind.choices(policy_of(name, 3))
    assert found.shape == (3, A) and (found >= 0).all()
    torch.testing.assert_close(found.sum(-1), torch.ones(3))


@EACH
def test_disagreement_is_about_what_the_policy_does(name):
    kind, policy = kind_of(name), policy_of(name, 5)
    size = A if name == "categorical" else 2
    ensemble = LatentDisagreement(6, 4, size, hidden_dim=8)
    state, belief = torch.randn(5, 6), torch.randn(5, 4)
    before = torch.get_rng_state()
    found = kind.disagreement(ensemble, state, belief, policy)
    assert torch.equal(torch.get_rng_state(), before)
    if name == "categorical":
        each = [
            ensemble.at(state, belief, nn.functional.one_hot(torch.full((5,), a), A).float())
            for a in range(A)
        ]
        expected = (policy.exp() * torch.cat(each, -1)).sum(-1, keepdim=True)
    else:
        expected = ensemble.at(state, belief, kind.squash(policy.loc))
    torch.testing.assert_close(found, expected)


@EACH
@pytest.mark.parametrize("other", ["categorical", "normal", "tanh_normal"])
def test_an_actor_of_another_kind_is_refused(name, other):
    if name == other:
        return kind_of(name).check(actor_of(other))
    with pytest.raises(ValueError, match="actor"):
        kind_of(name).check(actor_of(other))


@EACH
def test_an_actor_that_mixes_already_is_refused(name):
    actor, mixer = actor_of(name), LogitMixer(kind_of(name))
    mixing = LoReActor(actor, UncertaintyGate(value_weight=0.0), mixer)
    with pytest.raises(TypeError, match=r"stock one.*got LoReActor"):
        mixer.policy.check(mixing)
