"""The bonus of imagined rollouts that reach their subgoal, and the head that predicts it."""

from __future__ import annotations

import pytest
import torch
from dreamer_sample import BATCH, TIME, lore_around, sober, tiny_agent, tiny_config, tiny_sample
from tensordict import TensorDict

from lore_torchrl import keys
from lore_torchrl.configs import LossConfig
from lore_torchrl.dreamer.learner import build_learner
from lore_torchrl.functional import first_reached
from lore_torchrl.lore import LoReConfig
from lore_torchrl.modules import SubgoalHead

GOALS = 3


def test_a_rollout_is_paid_once():
    probability = torch.tensor([[0.5, 0.5, 1.0], [1.0, 1.0, 0.3], [0.0, 0.0, 0.2]])
    paid = first_reached(probability)
    expected = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [0.0, 0.0, 0.2]])
    torch.testing.assert_close(paid, expected)
    torch.testing.assert_close(paid.sum(-1), 1 - (1 - probability).prod(-1))


def test_without_a_subgoal_there_is_no_bonus():
    head = SubgoalHead(6, GOALS, weight=2.0)
    latent = torch.randn(2, 4, 4), torch.randn(2, 4, 2)
    bonus = head.bonus(*latent, torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(bonus[0], 2.0 * 0.5 ** torch.arange(1, 5))
    assert not bonus[1].any()
    # Once reached, the next time would be its second, and the fourth after that.
    for times, share in ((1.0, 0.5**0.5), (3.0, 0.5)):
        head.count(torch.tensor([9.0, times, 0.0]))
        again = head.bonus(*latent, torch.eye(GOALS)[1].expand(2, GOALS))
        torch.testing.assert_close(again, bonus[:1].expand(2, 4) * share)


def learner(*, opinions: bool):
    """A learner with a subgoal head, which differs from state to state if it has opinions."""
    agent, config = sober(tiny_agent()), tiny_config()
    lore = LoReConfig(loss=LossConfig(imitation_weight=0.0))
    lore.gate.value_weight = 0.0
    lore.subgoal.enabled = lore.subgoal.imagine = True
    names = [f"goal {i}" for i in range(GOALS)]
    around = lore_around(lore, agent, in_keys=[], subgoals=names, reached=lambda *_: ())
    head = around.actor.subgoal_head
    assert len(list(around.parameters())) == len(list(head.parameters())) > 0
    if opinions:
        torch.nn.init.normal_(head.network.model[-1].weight)
    return build_learner(config, agent, lore=around)


def sample(subgoal: int | None = 1) -> TensorDict:
    drawn = tiny_sample()
    one = torch.zeros(BATCH, TIME, GOALS)
    if subgoal is not None:
        one[..., subgoal] = 1.0
    drawn["next", keys.SUBGOAL] = one
    drawn["next", keys.REACHED] = (torch.rand(BATCH, TIME, GOALS) < 0.5).float()
    return drawn


@pytest.mark.parametrize("key", [keys.SUBGOAL, keys.REACHED])
def test_what_replay_did_not_keep_is_named(key):
    with pytest.raises(KeyError, match=f"no .'next', '{key}'.*SelectTransform"):
        learner(opinions=False).loss(sample().exclude(("next", key)))


def losses(built, drawn):
    torch.manual_seed(3)
    return built.loss(drawn.select(*built.loss.in_keys))


def test_the_bonus_moves_the_actor_and_nothing_else():
    built = learner(opinions=True)
    losses(built, sample())["loss_lore_subgoal"].backward()
    moved = {n.split(".")[1] for n, p in built.loss.named_parameters() if p.grad is not None}
    assert moved == {"actor_loss"}
    found = [n for n, p in built.loss.named_parameters() if p.grad is not None and p.grad.any()]
    assert found and all("actor_model" in name or "actor_loss.actor" in name for name in found)


@pytest.mark.parametrize(("opinions", "subgoal"), [(False, 1), (True, None)])
def test_where_no_rollout_gains_more_than_another_it_is_zero(opinions, subgoal):
    built = learner(opinions=opinions)
    assert losses(built, sample(subgoal))["loss_lore_subgoal"].item() == pytest.approx(0, abs=1e-6)


def test_done_may_lack_its_last_dimension_as_replay_gives_it():
    built, drawn = learner(opinions=True), sample()
    done = torch.rand(BATCH, TIME, 1) < 0.5
    drawn["next", "done"] = done
    whole = losses(built, drawn)["loss_lore_subgoal"]
    named = built.loss.actor_loss.subgoal.reshape(BATCH, TIME, GOALS).any(-1)
    assert torch.equal(named, ~done.squeeze(-1))
    drawn["next", "done"] = done.squeeze(-1)
    torch.testing.assert_close(losses(built, drawn)["loss_lore_subgoal"], whole)


def test_the_head_learns_what_is_true_and_moves_nothing_else():
    built, drawn = learner(opinions=False), sample()
    result = losses(built, drawn)
    assert result["loss_subgoal_head"].item() == pytest.approx(torch.tensor(2.0).log().item())
    result["loss_subgoal_head"].backward()
    moved = [n for n, p in built.loss.named_parameters() if p.grad is not None and p.grad.any()]
    assert moved and all("subgoal_head" in name for name in moved)
    # An update trains it with the rest.
    before = [p.clone() for p in built.loss.actor_loss.subgoal_head.parameters()]
    built.stepper.step(None, drawn)
    after = built.loss.actor_loss.subgoal_head.parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
