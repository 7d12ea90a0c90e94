from __future__ import annotations

import pytest
import torch
from dreamer_sample import (
    ACTIONS,
    BELIEF,
    STATE,
    gradients,
    latents,
    lore_around,
    lore_config,
    tiny_agent,
    tiny_config,
    tiny_learner,
    tiny_sample,
)
from torch.distributions import Categorical, kl_divergence

from lore_torchrl.configs import PriorNetConfig
from lore_torchrl.modules import AdviceBatch, PriorNet


def prior_net(seed=0, **kwargs) -> PriorNet:
    torch.manual_seed(seed)
    return PriorNet(STATE + BELIEF, ACTIONS, num_cells=16, **kwargs)


def loss_of(net, td):
    advice = (td[f"llm_{name}"] for name in ("prior_logits", "confidence", "mask"))
    own = net.predict(td["state"].detach(), td["belief"].detach())
    return net.loss(own, AdviceBatch.clean(*advice))


def test_the_formula():
    net, td = prior_net(), latents(9)
    td["llm_mask"] = torch.arange(9).unsqueeze(-1) % 3 != 0
    with torch.no_grad():
        net.network.model[-1].weight.normal_()
    logits, raw = net.predict(td["state"], td["belief"])
    prior = Categorical(logits=td["llm_prior_logits"])
    kl = kl_divergence(prior, Categorical(logits=logits))
    right = (logits.argmax(-1) == td["llm_prior_logits"].argmax(-1)).float()
    claim = raw.squeeze(-1).sigmoid()
    c = td["llm_confidence"].squeeze(-1)
    target = c * right
    doubt = -(target * claim.log() + (1 - target) * (1 - claim).log())
    keep = td["llm_mask"].squeeze(-1)
    expected = (c * kl + doubt)[keep].mean()
    losses = loss_of(net, td)
    torch.testing.assert_close(losses["loss_prior_net"], expected)
    torch.testing.assert_close(losses["prior_net_agreement"], right[keep].mean())
    torch.testing.assert_close(losses["prior_net_confidence"], claim[keep].mean())


def test_nothing_to_learn_where_nobody_advised():
    net = prior_net()
    value = loss_of(net, latents(4, mask=False))["loss_prior_net"]
    value.backward()
    assert value == 0
    assert all(g is None or not g.any() for g in (p.grad for p in net.parameters()))


def test_gradients_reach_the_network_alone():
    net, td = prior_net(), latents(6)
    for key in ("state", "belief", "llm_prior_logits", "llm_confidence"):
        td[key].requires_grad_()
    loss_of(net, td)["loss_prior_net"].backward()
    assert all(
        td[key].grad is None for key in ("state", "belief", "llm_prior_logits", "llm_confidence")
    )
    assert any(p.grad is not None and p.grad.any() for p in net.parameters())


def test_it_learns_the_advice_and_knows_where():
    """Half of the space follows a rule, the other half is noise: confidence must tell."""
    torch.manual_seed(0)
    net = prior_net()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(400):
        td = latents(64, seed=int(torch.randint(10**6, ())))
        rule = td["state"][:, 0] > 0
        noise = torch.randint(ACTIONS, (64,))
        choice = torch.where(rule, (td["state"][:, 1] > 0).long(), noise)
        td["llm_prior_logits"] = 3.0 * torch.nn.functional.one_hot(choice, ACTIONS)
        td["llm_confidence"] = torch.ones(64, 1)
        optimizer.zero_grad()
        loss_of(net, td)["loss_prior_net"].backward()
        optimizer.step()
    td = latents(512, seed=99)
    logits, confidence = net.advise(td["state"], td["belief"])
    rule = td["state"][:, 0] > 0.3
    right = logits.argmax(-1) == (td["state"][:, 1] > 0).long()
    assert right[rule].float().mean() > 0.9
    assert confidence[rule].mean() > 0.75
    assert confidence[td["state"][:, 0] < -0.3].mean() < 0.45


def test_only_the_advisors_answers_are_targets():
    """PriorNet's own advice never trains PriorNet, however sure it is."""
    config = lore_config()
    config.prior_net = PriorNetConfig(enabled=True, num_cells=8, threshold=0.0)
    results = []
    for noise in (0.0, 5.0):
        dreamer = tiny_config()
        agent = tiny_agent(dreamer)
        torch.manual_seed(1)
        lore_actor = lore_around(config, agent).actor
        td = latents(8)
        td["llm_mask"] = torch.arange(8).unsqueeze(-1) < 4
        td["llm_prior_logits"][4:] += noise  # rows without advice hold anything
        loss_of(lore_actor.prior_net, td)["loss_prior_net"].backward()
        results.append(gradients(lore_actor.prior_net))
    first, second = results
    assert first and all(torch.equal(value, second[name]) for name, value in first.items())


def test_the_composed_loss_trains_it_without_touching_the_agent():
    """With and without the distillation the agent's gradients are bitwise the same."""
    results = []
    for enabled in (False, True):
        config = lore_config(prior_weight=0.0, multiplier_lr=0.0)
        config.prior_net = PriorNetConfig(enabled=enabled, num_cells=8)
        learner = tiny_learner(config)
        torch.manual_seed(4)
        result = learner.loss(tiny_sample())
        sum(v for k, v in result.items() if k.startswith("loss_")).backward()
        grads = {k: v for k, v in gradients(learner.loss).items() if "prior_net" not in k}
        results.append((result, grads, learner))
    (off, off_grads, _), (on, on_grads, learner) = results
    assert "loss_prior_net" not in off and on["loss_prior_net"] > 0
    assert set(on_grads) == set(off_grads)
    assert all(torch.equal(value, on_grads[name]) for name, value in off_grads.items())
    assert any(
        p.grad is not None and p.grad.any() for p in learner.loss.actor_loss.prior_net.parameters()
    )


def test_the_optimiser_moves_it():
    config = lore_config()
    config.prior_net = PriorNetConfig(enabled=True, num_cells=8)
    learner = tiny_learner(config)
    net = learner.loss.actor_loss.prior_net
    before = [p.clone() for p in net.parameters()]
    learner.stepper.step(None, tiny_sample())
    assert any(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_advice_on_another_number_of_actions():
    td = latents(3)
    td["llm_prior_logits"] = torch.zeros(3, ACTIONS + 1)
    with pytest.raises(ValueError, match=rf"num_actions={ACTIONS + 1}"):
        loss_of(prior_net(), td)
