from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from test_imagination import Trust
from torch import nn
from torch.distributions import Normal
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, NormalParamExtractor

from lore_torchrl.functional_gaussian import gaussian_kl
from lore_torchrl.modules import (
    DreamerV3ContinuousActor,
    Gaussian,
    GaussianImaginationActor,
    GaussianMixer,
    PriorNet,
    TemperatureAligner,
)

LOW, HIGH = torch.tensor([-2.0, -1.0]), torch.tensor([2.0, 3.0])
ANCHORS = [[-2.0, 1.0], [0.0, 3.0], [0.0, 1.0], [0.0, -1.0], [2.0, 1.0]]


def bounded_actor():
    actor = DreamerV3ContinuousActor(6, LOW, HIGH, depth=1, num_cells=8)
    with torch.no_grad():
        actor[0].module.network.model[-1].weight.mul_(100.0)
    return actor


def unbounded_actor():
    """Names of its own, and no log-probability, as the first Dreamer's actor has none."""
    net = nn.Sequential(nn.Linear(4, 4), NormalParamExtractor())
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["state"], ["mean", "spread"]),
        ProbabilisticTensorDictModule(
            in_keys={"loc": "mean", "scale": "spread"},
            out_keys=["action"],
            distribution_class=IndependentNormal,
            default_interaction_type=InteractionType.RANDOM,
        ),
    )


ACTORS = pytest.mark.parametrize("make", [bounded_actor, unbounded_actor])


def parts(make=bounded_actor, beta_max=0.5, threshold=0.0, max_kl=float("inf"), **kwargs):
    torch.manual_seed(0)
    actor = make()
    net = PriorNet(6, len(ANCHORS), num_cells=8, threshold=threshold)
    with torch.no_grad():
        net.network.model[-1].weight.normal_(std=3.0)
    mixer = GaussianMixer(
        ANCHORS,
        bounds=(LOW, HIGH) if make is bounded_actor else None,
        max_kl=max_kl,
        temperature=TemperatureAligner(init=0.5, rate=0.0),
    )
    imagined = GaussianImaginationActor(actor, net, mixer, beta_max=beta_max, **kwargs)
    td = TensorDict(state=torch.randn(32, 4), belief=torch.randn(32, 2), batch_size=[32])
    return actor, net, imagined, td


def by_hand(net, mixer, policy, td, beta=0.5):
    """Precisions and weighted means, from the advice as it is."""
    logits, confidence = net.advise(td["state"], td["belief"])
    probs = torch.softmax(logits / 0.5, -1).detach()
    loc = probs @ mixer.anchors
    variance = (probs.unsqueeze(-1) * (mixer.anchors - loc.unsqueeze(1)) ** 2).sum(1) + 0.3**2
    added, own = beta * confidence.detach() / variance, policy.scale**-2
    return Gaussian((own * policy.loc + added * loc) / (own + added), (own + added) ** -0.5)


@ACTORS
def test_the_mixture_by_hand(make):
    actor, net, imagined, td = parts(make)
    mixer = imagined.mixer
    policy = mixer.policy_of(actor.get_dist(td.clone()))
    found = mixer.policy_of(imagined.get_dist(td.clone()))
    for one, other in zip(found, by_hand(net, mixer, policy, td), strict=True):
        torch.testing.assert_close(one, other)
    assert (found.loc - policy.loc).abs().max() > 0.1


@pytest.mark.parametrize("beta_max", [0.3, 50.0])
def test_the_bound_holds(beta_max):
    actor, _, imagined, td = parts(beta_max=beta_max, max_kl=0.2)
    policy_of = imagined.mixer.policy_of
    kl = gaussian_kl(*policy_of(imagined.get_dist(td.clone())), *policy_of(actor.get_dist(td)))
    assert (kl <= 0.2).all() and kl.max() > 0.1


@ACTORS
@pytest.mark.parametrize("why", ["beta", "threshold", "bandit", "calibrator", "bound"])
def test_without_weight_it_is_the_stock_actor_to_the_bit(make, why):
    kwargs = {
        "beta": {"beta_max": 0.0},
        "threshold": {"threshold": 1.0},
        "bandit": {"bandit": Trust(0.0)},
        "calibrator": {"calibrator": Trust(0.0)},
        "bound": {"max_kl": 0.0},
    }[why]
    results = []
    for wrapped in (False, True):
        actor, _, imagined, td = parts(make, **kwargs)
        imagined.refresh()
        torch.manual_seed(5)
        with set_exploration_type(ExplorationType.RANDOM):
            out = (imagined if wrapped else actor)(td)
        out["action"].square().sum().backward()
        gradients = [parameter.grad for parameter in actor.parameters()]
        assert any(gradient.any() for gradient in gradients)
        written = [out[key] for key in actor.out_keys]
        results.append([*written, *gradients, torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@ACTORS
def test_gradient_passes_through_the_policy_and_not_through_the_advice(make):
    actor, net, imagined, td = parts(make, max_kl=0.4)
    td["state"].requires_grad_()
    torch.manual_seed(5)
    with set_exploration_type(ExplorationType.RANDOM):
        acted = imagined(td.clone())
    leaves = [td["state"], *actor.parameters()]
    found = torch.autograd.grad(acted["action"].square().sum(), leaves)
    # The same action, of a mixture with the same advice and weight as numbers.
    mixer, policy = imagined.mixer, imagined.mixer.policy_of(actor.get_dist(td.clone()))
    with torch.no_grad():
        prior = mixer.as_policy(acted["lore_imagined_prior"])
        mixed = [acted[key] for key in actor[-1].in_keys]
        weight = (policy.scale / mixed[1]).square() - 1
    own, added = policy.scale**-2, weight / policy.scale.detach() ** 2
    loc = (own * policy.loc + added * prior.loc) / (own + added)
    torch.manual_seed(5)
    value = Normal(loc, (own + added) ** -0.5).rsample()
    expected = torch.autograd.grad(mixer.squash(value).square().sum(), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    heads = found[-1] if make is unbounded_actor else found[-2]
    location, scale = heads.chunk(2, 0)
    assert location.any() and scale.any()
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("scored", [False, True])
def test_what_the_loss_scores_is_what_acted(scored):
    _, net, imagined, td = parts(beta_max=2.0, scored=scored)
    surest = net.advise(td["state"], td["belief"])[1].argmax()
    many = td[surest].expand(4000).clone()
    with set_exploration_type(ExplorationType.RANDOM):
        acted = imagined(many)
    assert acted["action"].requires_grad is not scored
    place = ((2 * acted["action"] - HIGH - LOW) / (HIGH - LOW)).clamp(-1 + 1e-6, 1 - 1e-6).atanh()
    assert ((place.mean(0) - acted["loc"][0]).abs() < 5 * acted["scale"][0] / 4000**0.5).all()
    scored_by = imagined.get_dist(acted.select(*imagined.in_keys))
    torch.testing.assert_close(scored_by.log_prob(acted["action"]), acted["action_log_prob"])
    # The advice is not computed again for it.
    acted["lore_imagined_weight"].zero_()
    stock = imagined.mixer.policy_of(imagined.get_dist(acted.select(*imagined.in_keys)))
    assert (stock.loc - imagined.mixer.policy_of(scored_by).loc)[0].abs().max() > 0.05


def test_the_bonus_by_hand():
    actor, net, imagined, td = parts(threshold=0.6, bandit=Trust(0.5), calibrator=Trust(0.25))
    logits, confidence = net.advise(td["state"], td["belief"])
    sure = (confidence >= 0.6).squeeze(-1)
    assert 0 < sure.sum() < len(sure)
    mixer = imagined.mixer
    policy = mixer.policy_of(actor.get_dist(td.clone()))
    rho = Normal(*mixer.as_policy(logits / 0.5))
    draws = Normal(*policy).sample((20_000,))
    sampled = (0.25 * confidence.squeeze(-1) * rho.log_prob(draws).sum(-1).mean(0))[sure].mean()
    bonus = imagined.bonus(td.clone())
    torch.testing.assert_close(bonus, 0.5 * sampled, rtol=0.02, atol=0.0)
    bonus.backward()
    assert any(p.grad is not None and p.grad.any() for p in actor.parameters())
    assert all(p.grad is None for p in net.parameters())


def test_a_broken_network_costs_its_advice():
    actor, net, imagined, td = parts()
    with torch.no_grad():
        net.network.model[-1].weight.fill_(float("nan"))
    policy_of = imagined.mixer.policy_of
    expected = policy_of(actor.get_dist(td.clone()))
    for one, other in zip(policy_of(imagined.get_dist(td.clone())), expected, strict=True):
        assert torch.equal(one, other)
    assert imagined.bonus(td) == 0.0
