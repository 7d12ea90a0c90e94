"""First steps of imagined trajectories, imitated where they are worth more than was expected."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dreamer_sample import latents, lore_config, tiny_learner, tiny_sample, update, wrap

from lore_torchrl.configs import PlannerConfig

WEIGHT = 0.5


def learner(weight: float = WEIGHT, **loss):
    config = lore_config(**{"imitation_weight": 1.0, "prior_weight": 0.0, **loss})
    built = tiny_learner(replace(config, planner=PlannerConfig(dyna_weight=weight)))
    with torch.no_grad():
        # Values of the size of rewards.
        bias = built.loss.actor_loss.value_model[0].module.model[-1].bias
        bias.fill_(-30.0)[6:9] = 0.0
    return built


def returned(value: float | None = None):
    """A sample whose real returns are all the same, unless they are drawn."""
    sample = tiny_sample()
    real = 10 * torch.randn_like(sample["next", "reward"])
    return sample.set(("next", "lore_return"), real if value is None else real.fill_(value))


def test_by_hand(monkeypatch):
    loss, sample, seen = learner().loss, returned(), []
    # What is imagined from an end leads nowhere, whatever it is worth.
    ended = sample["next", "done"].reshape(-1)
    sample["next", "lore_return"].reshape(-1)[ended] = -1e6
    stock = loss.actor_loss.actor_loss
    call = stock.forward
    monkeypatch.setattr(stock, "forward", lambda td: seen.append(call(td)) or seen[0])
    torch.manual_seed(3)
    found = loss(sample.clone())
    imagined, context = seen[0][1][:, 0], found["replay_context"]
    value = loss.actor_loss.value_model(context.clone())["state_value"].reshape(-1)
    real = sample["next", "lore_return"].reshape(-1)
    gain = imagined["lambda_target"].squeeze(-1) - torch.maximum(value, real)
    gain = (gain / stock.retnorm.scale()).detach()
    weight = torch.where((gain > 0.05) & ~ended, gain.clamp(0, 1), 0.0)
    assert (weight > 0).any() and (gain[ended] > 0.05).any()
    policy = loss.actor_loss.actor_model.get_dist(context).logits.log_softmax(-1)
    log_prob = (policy.reshape(-1, policy.shape[-1]) * imagined["action"]).sum(-1)
    expected = -WEIGHT * (weight * log_prob).sum() / weight.sum().clamp_min(1.0)
    torch.testing.assert_close(found["loss_lore_dyna"], expected)
    torch.testing.assert_close(found["lore_dyna"], (weight > 0).float().mean())


@pytest.mark.parametrize("real", [1e6, float("nan")])
def test_what_returned_more_or_is_not_known_is_not_imitated(real):
    found, *_ = update(learner(), returned(real))
    assert found["loss_lore_dyna"] == 0 and found["lore_dyna"] == 0


def test_the_critic_is_not_bounded_by_what_was_really_returned():
    loss = learner().loss.actor_loss
    for bound in (loss.least_return, loss.greatest_return):
        bound.zero_()
    imagined = latents().set("lambda_target", torch.full((10, 1), 4.9))
    for value, imitated in ((5.0, 0.0), (0.0, 1.0)):
        found = loss.imagined_terms(imagined, torch.full((10, 1), value), torch.zeros(10, 1))
        assert found["lore_dyna"] == imitated


def test_only_the_actor_learns_it_and_nothing_else_is_changed():
    sample = returned(-1e6)
    off, off_grads, off_state = update(learner(0.0), sample.clone())
    found, grads, state = update(learner(), sample.clone())
    assert found["loss_lore_dyna"] > 0 and "loss_lore_dyna" not in off
    for name, value in off.items():
        assert torch.equal(found[name], value), name
    changed = {name for name, grad in off_grads.items() if not torch.equal(grads[name], grad)}
    assert changed and all("actor_model" in name for name in changed)
    assert torch.equal(state, off_state)


def test_what_is_imagined_is_no_part_of_the_result():
    found = learner().loss(returned())
    assert "lore_imagined" not in found
    assert all(v.ndim == 0 for k, v in found.items() if k != "replay_context")


def test_without_real_returns_it_is_refused():
    stock = tiny_learner().loss.actor_loss
    with pytest.raises(ValueError, match=r"dyna_weight=0\.5.*imitation_weight"):
        wrap(stock, imitation_weight=0.0, dyna_weight=0.5)


def test_it_compiles_without_a_graph_break():
    loss = learner().loss.actor_loss
    imagined = latents().set("lambda_target", 5 * torch.randn(10, 1))
    given = imagined, torch.randn(10, 1), imagined["lore_return"]
    compiled = torch.compile(loss.imagined_terms, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*given), loss.imagined_terms(*given))
