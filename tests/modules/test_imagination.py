from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import DreamerV3DiscreteActor

from lore_torchrl import keys
from lore_torchrl.modules import ImaginationActor, LogitMixer, PriorNet

ACTIONS = 4


class Trust(nn.Module):
    """A bandit and a calibrator in one, with a set trust."""

    def __init__(self, value):
        super().__init__()
        self.value = torch.tensor(float(value))
        self.groups = []

    def trust(self, confidence=None, group=None):
        if confidence is None:
            return self.value
        self.groups.append(group)
        return self.value.expand_as(confidence)


def parts(beta_max=0.5, threshold=0.0, max_kl=float("inf"), mode="logit", **kwargs):
    torch.manual_seed(0)
    actor = DreamerV3DiscreteActor(6, ACTIONS, depth=1, num_cells=8)
    net = PriorNet(6, ACTIONS, num_cells=8, threshold=threshold)
    with torch.no_grad():
        net.network.model[-1].weight.normal_(std=3.0)
    mixer = LogitMixer(max_kl=max_kl, mode=mode)
    imagined = ImaginationActor(actor, net, mixer, beta_max=beta_max, **kwargs)
    td = TensorDict(state=torch.randn(32, 4), belief=torch.randn(32, 2), batch_size=[32])
    return actor, net, imagined, td


def test_the_mixture_by_hand():
    actor, net, imagined, td = parts()
    log_p = torch.log_softmax(actor.get_dist(td).logits, -1)
    logits, confidence = net.advise(td["state"], td["belief"])
    centred = logits - logits.mean(-1, keepdim=True)
    expected = torch.log_softmax(log_p + 0.5 * confidence * centred, -1)
    torch.testing.assert_close(torch.log_softmax(imagined.get_dist(td).logits, -1), expected)


@pytest.mark.parametrize("mode", ["logit", "probability"])
def test_the_bound_holds(mode):
    actor, _, imagined, td = parts(beta_max=50.0, max_kl=0.2, mode=mode)
    p, q = actor.get_dist(td), imagined.get_dist(td)
    kl = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=q.logits),
        torch.distributions.Categorical(logits=p.logits),
    )
    assert (kl <= 0.2 + 1e-5).all() and kl.max() > 0.05


@pytest.mark.parametrize("why", ["beta", "threshold", "bandit", "calibrator"])
def test_without_weight_it_is_the_stock_actor(why):
    kwargs = {
        "beta": {"beta_max": 0.0},
        "threshold": {"threshold": 1.0},
        "bandit": {"bandit": Trust(0.0)},
        "calibrator": {"calibrator": Trust(0.0)},
    }[why]
    actor, _, imagined, td = parts(**kwargs)
    imagined.refresh()
    expected = torch.log_softmax(actor.get_dist(td).logits, -1)
    torch.testing.assert_close(torch.log_softmax(imagined.get_dist(td).logits, -1), expected)


@pytest.mark.parametrize("mode", ["logit", "probability"])
def test_an_action_that_the_actor_rules_out(mode):
    _, net, _, td = parts()
    stock = DreamerV3DiscreteActor(6, ACTIONS, depth=1, num_cells=8)
    ruled_out = torch.tensor([False, True, False, False])
    mask = TensorDictModule(
        lambda logits: logits.masked_fill(ruled_out, -torch.inf), ["logits"], ["logits"]
    )
    actor = ProbabilisticTensorDictSequential(stock[0], mask, stock[1])
    imagined = ImaginationActor(actor, net, LogitMixer(max_kl=0.3, mode=mode), beta_max=5.0)
    played = imagined(td.clone())
    scored = imagined.get_dist(played.clone())
    for logits in (played["logits"], scored.logits):
        probs = logits.softmax(-1)
        assert probs.isfinite().all() and (probs[:, 1] < 1e-37).all()
    torch.testing.assert_close(scored.logits.softmax(-1), played["logits"].softmax(-1))
    own = actor.get_dist(td).logits.softmax(-1)
    assert not played["action"][:, 1].any() and (probs - own).abs().max() > 0.05
    assert scored.log_prob(played["action"]).isfinite().all()
    assert imagined.bonus(played).isfinite()


def test_the_calibrator_is_asked_about_the_network():
    trust = Trust(1.0)
    _, _, imagined, td = parts(calibrator=trust)
    imagined.get_dist(td)
    assert trust.groups == [keys.PRIOR_NET_GROUP]


def test_gradient_reaches_the_actor_alone():
    actor, net, imagined, td = parts()
    imagined.get_dist(td).logits[:, 0].sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in actor.parameters())
    assert all(p.grad is None for p in net.parameters())


def test_actions_are_drawn_from_the_mixture():
    _, _, imagined, td = parts(beta_max=2.0)
    many = td[:1].expand(4000).clone()
    with set_exploration_type(ExplorationType.RANDOM):
        actions = imagined(many)["action"].float().mean(0)
    expected = torch.softmax(imagined.get_dist(td[:1]).logits, -1)[0]
    torch.testing.assert_close(actions, expected, atol=0.03, rtol=0)
    # What the loss scores is what acted, and the advice is not computed again for it.
    log_prob = torch.log_softmax(many["logits"], -1)
    scored = torch.log_softmax(imagined.get_dist(many.clone()).logits, -1)
    torch.testing.assert_close(scored, log_prob)
    many["lore_imagined_weight"].zero_()
    scored = torch.log_softmax(imagined.get_dist(many.clone()).logits, -1)
    assert (scored - log_prob).abs().max() > 0.1
    chosen = log_prob.gather(-1, many["action"].argmax(-1, keepdim=True)).squeeze(-1)
    torch.testing.assert_close(many["action_log_prob"], chosen)


def test_the_bonus_by_hand():
    actor, net, imagined, td = parts(threshold=0.6, bandit=Trust(0.5), calibrator=Trust(0.25))
    imagined.refresh()
    logits, confidence = net.advise(td["state"], td["belief"])
    sure = (confidence >= 0.6).squeeze(-1)
    assert 0 < sure.sum() < len(sure)
    policy = torch.softmax(actor.get_dist(td).logits, -1)
    expected = (policy * torch.log_softmax(logits, -1)).sum(-1)
    expected = 0.5 * (0.25 * confidence.squeeze(-1) * expected)[sure].mean()
    bonus = imagined.bonus(td)
    torch.testing.assert_close(bonus, expected)
    bonus.backward()
    assert any(p.grad is not None and p.grad.any() for p in actor.parameters())
    assert all(p.grad is None for p in net.parameters())
    # What acting has written is taken as it is.
    acted = imagined(td.clone())
    acted["lore_imagined_weight"].fill_(1.0)
    assert imagined.bonus(acted) < 2 * bonus < 0


def test_the_bonus_takes_the_policy_that_was_scored():
    calls = []
    bonuses, gradients = [], []
    for share in (False, True):
        actor, _, imagined, td = parts(share_policy=share)
        actor[0].register_forward_hook(lambda *_: calls.append(1))
        acted = imagined(td.clone())
        calls.clear()
        scored = imagined.get_dist(acted.select(*imagined.in_keys)).logits
        bonus = imagined.bonus(acted)
        assert len(calls) == (1 if share else 2)
        (bonus + scored[:, 0].mean()).backward()
        bonuses.append(bonus.detach())
        gradients.append([p.grad for p in actor.parameters()])
        # It is taken once, and not at all after refresh().
        other = acted.clone()
        other["belief"] += 1.0
        expected = parts()[2].bonus(other.clone())
        torch.testing.assert_close(imagined.bonus(other.clone()), expected)
        imagined.get_dist(acted.select(*imagined.in_keys))
        imagined.refresh()
        torch.testing.assert_close(imagined.bonus(other), expected)
    torch.testing.assert_close(*bonuses)
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


def test_scoring_and_bonus_compile_without_a_graph_break():
    _, _, imagined, td = parts(share_policy=True)
    acted = imagined(td.clone()).detach()

    def score(acted):
        logits = imagined.get_dist(acted.select(*imagined.in_keys)).logits
        return logits, imagined.bonus(acted)

    found = torch.compile(score, fullgraph=True, backend="eager")(acted.clone())
    torch.testing.assert_close(found, score(acted.clone()))
    assert imagined._shared_policy is None


def test_two_bonuses_before_one_gradient():
    _, _, imagined, td = parts(bandit=Trust(0.5))
    bonuses = []
    for _ in range(2):
        imagined.refresh()
        bonuses.append(imagined.bonus(td))
    sum(bonuses).backward()


@pytest.mark.parametrize("scored", [False, True])
def test_a_scored_rollout_keeps_no_graph_and_draws_the_same(scored):
    _, _, imagined, td = parts(scored=scored)
    torch.manual_seed(1)
    acted = imagined(td.clone())
    assert acted["action_log_prob"].requires_grad is not scored
    torch.manual_seed(1)
    other = parts(scored=not scored)[2]
    torch.manual_seed(1)
    assert torch.equal(acted["action"], other(td.clone())["action"])
    assert imagined.get_dist(td).logits.requires_grad


def test_a_broken_network_costs_its_advice():
    actor, net, imagined, td = parts()
    with torch.no_grad():
        net.network.model[-1].weight.fill_(float("nan"))
    expected = torch.log_softmax(actor.get_dist(td).logits, -1)
    torch.testing.assert_close(torch.log_softmax(imagined.get_dist(td).logits, -1), expected)
    assert imagined.bonus(td) == 0.0


def test_impossible_weight():
    with pytest.raises(ValueError, match="beta_max"):
        parts(beta_max=-1.0)
