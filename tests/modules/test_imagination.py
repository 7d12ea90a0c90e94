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
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import DreamerV3DiscreteActor, IndependentNormal, NormalParamExtractor

from lore_torchrl.modules import (
    DreamerV3ContinuousActor,
    ImaginationActor,
    LogitMixer,
    PriorNet,
    TemperatureAligner,
)
from lore_torchrl.policies import Gaussian, GaussianPolicy
from lore_torchrl.policies.gaussian import gaussian_kl

ACTIONS = 4
LOW, HIGH = torch.tensor([-2.0, -1.0]), torch.tensor([2.0, 3.0])
ANCHORS = [[-2.0, 1.0], [0.0, 3.0], [0.0, 1.0], [0.0, -1.0], [2.0, 1.0]]


def discrete():
    return DreamerV3DiscreteActor(6, ACTIONS, depth=1, num_cells=8)


def bounded():
    actor = DreamerV3ContinuousActor(6, LOW, HIGH, depth=1, num_cells=8)
    with torch.no_grad():
        actor[0].module.network.model[-1].weight.mul_(100.0)
    return actor


def unbounded():
    """Names of its own, and no log-probability, as DreamerV1's actor has none."""
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


ALL = pytest.mark.parametrize("make", [discrete, bounded, unbounded])
GAUSSIAN = pytest.mark.parametrize("make", [bounded, unbounded])
MODES = pytest.mark.parametrize("mode", ["logit", "probability"])


def parts(make=discrete, beta_max=0.5, threshold=0.0, max_kl=float("inf"), mode="logit"):
    """An actor, a network with opinions, the two mixed, and latent states."""
    torch.manual_seed(0)
    actor = make()
    net = PriorNet(6, ACTIONS if make is discrete else 5, num_cells=8, threshold=threshold)
    with torch.no_grad():
        net.network.model[-1].weight.normal_(std=3.0)
    settings = {"max_kl": max_kl, "temperature": TemperatureAligner(init=0.5, rate=0.0)}
    if make is discrete:
        mixer = LogitMixer(mode=mode, **settings)
    else:
        bounds = (LOW, HIGH) if make is bounded else None
        policy = GaussianPolicy(ANCHORS, bounds=bounds, scale_range=(0.1, 1.0))
        mixer = LogitMixer(policy, **settings)
    imagined = ImaginationActor(actor, net, mixer, beta_max=beta_max)
    td = TensorDict(state=torch.randn(32, 4), belief=torch.randn(32, 2), batch_size=[32])
    return actor, net, imagined, td


def policies(actor, imagined, td):
    """The actor's own policy and the mixed one."""
    own, mixed = (each.get_dist(td.clone()) for each in (actor, imagined))
    return imagined.mixer.policy.of(own), imagined.mixer.policy.of(mixed)


def acts(actor, td):
    torch.manual_seed(5)
    with set_exploration_type(ExplorationType.RANDOM):
        return actor(td.clone())


class TestMixture:
    def test_by_hand(self):
        actor, net, imagined, td = parts()
        log_p, found = policies(actor, imagined, td)
        logits, confidence = net.advise(td["state"], td["belief"])
        centred = (logits - logits.mean(-1, keepdim=True)) / 0.5
        expected = torch.log_softmax(log_p + 0.5 * confidence * centred, -1)
        torch.testing.assert_close(found, expected)
        assert (found - log_p).abs().max() > 0.1

    @GAUSSIAN
    def test_of_a_gaussian_by_hand(self, make):
        """Precisions add up, locations are weighted by them."""
        actor, net, imagined, td = parts(make)
        policy, found = policies(actor, imagined, td)
        logits, confidence = net.advise(td["state"], td["belief"])
        probs, anchors = torch.softmax(logits / 0.5, -1), imagined.mixer.policy.anchors
        loc = probs @ anchors
        variance = (probs.unsqueeze(-1) * (anchors - loc.unsqueeze(1)) ** 2).sum(1) + 0.3**2
        own, added = policy.scale**-2, 0.5 * confidence / variance
        mixed = (own * policy.loc + added * loc) / (own + added)
        torch.testing.assert_close(found, Gaussian(mixed, (own + added) ** -0.5))
        assert (found.loc - policy.loc).abs().max() > 0.1

    @MODES
    def test_the_bound_holds(self, mode):
        actor, _, imagined, td = parts(beta_max=50.0, max_kl=0.2, mode=mode)
        p, q = (Categorical(logits=each) for each in policies(actor, imagined, td))
        kl = kl_divergence(q, p)
        assert (kl <= 0.2 + 1e-5).all() and kl.max() > 0.05

    @pytest.mark.parametrize("beta_max", [0.3, 50.0])
    def test_the_bound_of_a_gaussian_holds(self, beta_max):
        actor, _, imagined, td = parts(bounded, beta_max=beta_max, max_kl=0.2)
        policy, mixed = policies(actor, imagined, td)
        kl = gaussian_kl(*mixed, *policy)
        assert (kl <= 0.2).all() and kl.max() > 0.1

    def test_only_where_the_network_is_sure(self):
        actor, net, imagined, td = parts(threshold=0.6)
        sure = (net.advise(td["state"], td["belief"])[1] >= 0.6).squeeze(-1)
        assert 0 < sure.sum() < len(sure)
        log_p, found = policies(actor, imagined, td)
        torch.testing.assert_close(found[~sure], log_p[~sure])
        assert ((found - log_p)[sure].abs().amax(-1) > 1e-3).all()

    @ALL
    @pytest.mark.parametrize(
        "without", [{"beta_max": 0.0}, {"threshold": 1.0}, {"max_kl": 0.0}], ids=str
    )
    def test_without_weight_it_is_the_stock_actor(self, make, without):
        """A Gaussian one bitwise; a categorical one's logits are normalized first."""
        results = []
        for wrapped in (False, True):
            actor, _, imagined, td = parts(make, **without)
            out = acts(imagined if wrapped else actor, td)
            if make is discrete:
                out["logits"] = torch.log_softmax(out["logits"], -1)
            written = [out[key] for key in actor.out_keys]
            sum(value.float().square().sum() for value in written).backward()
            grads = [parameter.grad for parameter in actor.parameters()]
            assert any(grad.any() for grad in grads)
            results.append([*written, *grads, torch.get_rng_state()])
        for one, other in zip(*results, strict=True):
            if make is discrete:
                torch.testing.assert_close(one, other)
            else:
                assert torch.equal(one, other)

    @ALL
    def test_a_broken_network_costs_its_advice(self, make):
        actor, net, imagined, td = parts(make)
        with torch.no_grad():
            net.network.model[-1].weight.fill_(float("nan"))
        torch.testing.assert_close(*policies(actor, imagined, td))

    @MODES
    def test_an_action_that_the_actor_rules_out(self, mode):
        stock, net, _, td = parts()
        ruled_out = torch.tensor([False, True, False, False])
        mask = TensorDictModule(
            lambda logits: logits.masked_fill(ruled_out, -torch.inf), ["logits"], ["logits"]
        )
        actor = ProbabilisticTensorDictSequential(stock[0], mask, stock[1])
        imagined = ImaginationActor(actor, net, LogitMixer(max_kl=0.3, mode=mode), beta_max=5.0)
        played = imagined(td.clone())
        dist = imagined.get_dist(td.clone())
        probs = played["logits"].softmax(-1)
        assert probs.isfinite().all() and (probs[:, 1] == 0).all()
        torch.testing.assert_close(dist.logits.softmax(-1), probs)
        own = actor.get_dist(td.clone()).logits.softmax(-1)
        assert not played["action"][:, 1].any() and (probs - own).abs().max() > 0.05
        assert dist.log_prob(played["action"]).isfinite().all()


class TestGradient:
    @MODES
    def test_passes_through_the_policy_alone(self, mode):
        actor, net, imagined, td = parts(max_kl=0.4, mode=mode)
        log_p, found = policies(actor, imagined, td)
        # The same mixture, of which what is added is a number.
        expected = torch.log_softmax(log_p + (found - log_p).detach(), -1)
        pair = [
            torch.autograd.grad(each[:, 0].sum(), list(actor.parameters()), retain_graph=True)
            for each in (found, expected)
        ]
        assert any(grad.any() for grad in pair[0])
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)
        assert all(parameter.grad is None for parameter in net.parameters())

    @GAUSSIAN
    def test_of_a_drawn_action(self, make):
        actor, net, imagined, td = parts(make, max_kl=0.4)
        td["state"].requires_grad_()
        acted = acts(imagined, td)
        leaves = [td["state"], *actor.parameters()]
        found = torch.autograd.grad(acted["action"].square().sum(), leaves)
        # The same action, of a mixture with the same advice and weight as numbers.
        kind = imagined.mixer.policy
        policy = kind.of(actor.get_dist(td.clone()))
        with torch.no_grad():
            advice = net.fallback(td["state"], td["belief"]).prior_logits
            prior = kind.as_policy(imagined.mixer.temper(advice), policy)
            scale = acted[actor[-1].in_keys[1]]
            weight = (policy.scale / scale).square() - 1
        own, added = policy.scale**-2, weight / policy.scale.detach() ** 2
        loc = (own * policy.loc + added * prior.loc) / (own + added)
        torch.manual_seed(5)
        value = Normal(loc, (own + added) ** -0.5).rsample()
        expected = torch.autograd.grad(kind.squash(value).square().sum(), leaves)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        heads = found[-1] if make is unbounded else found[-2]
        location, scale = heads.chunk(2, 0)
        assert location.any() and scale.any()
        assert all(parameter.grad is None for parameter in net.parameters())


class TestActing:
    def test_actions_are_drawn_from_the_mixture(self):
        actor, _, imagined, td = parts(beta_max=2.0)
        many = acts(imagined, td[:1].expand(4000))
        log_p, log_prob = policies(actor, imagined, td[:1])
        mixed = log_prob[0].exp()
        torch.testing.assert_close(many["action"].float().mean(0), mixed, atol=0.03, rtol=0)
        assert (mixed - log_p[0].exp()).abs().max() > 0.1
        # What the loss scores is what acted.
        chosen = (log_prob * many["action"]).sum(-1)
        torch.testing.assert_close(many["action_log_prob"], chosen)

    def test_gaussian_actions_are_drawn_from_the_mixture(self):
        actor, net, imagined, td = parts(bounded, beta_max=2.0)
        surest = net.advise(td["state"], td["belief"])[1].argmax()
        many = td[surest].expand(4000)
        acted = acts(imagined, many)
        place = (2 * acted["action"] - HIGH - LOW) / (HIGH - LOW)
        place = place.clamp(-1 + 1e-6, 1 - 1e-6).atanh().mean(0)
        assert ((place - acted["loc"][0]).abs() < 5 * acted["scale"][0] / 4000**0.5).all()
        scored_by = imagined.get_dist(many.clone())
        torch.testing.assert_close(scored_by.log_prob(acted["action"]), acted["action_log_prob"])
        policy, _ = policies(actor, imagined, many)
        assert (policy.loc - acted["loc"]).abs().max() > 0.05

    @ALL
    def test_it_writes_what_the_actor_writes(self, make):
        actor, _, imagined, td = parts(make)
        assert imagined.in_keys == actor.in_keys and imagined.out_keys == actor.out_keys
        assert set(acts(imagined, td).keys()) == set(acts(actor, td).keys())

    def test_scoring_compiles_without_a_graph_break(self):
        _, _, imagined, td = parts()

        def score(td):
            return imagined.get_dist(td).logits

        found = torch.compile(score, fullgraph=True, backend="eager")(td.clone())
        torch.testing.assert_close(found, score(td.clone()))
