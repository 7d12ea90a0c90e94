from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dreamer_sample import (
    PAPER,
    assert_only_the_actor_learns,
    gradients,
    lore_around,
    lore_config,
    tiny_agent,
    tiny_config,
    tiny_sample,
    unbounded,
    update,
    weights,
    wrap,
)
from gaussian_sample import ANCHORS, HIGH, LOW, advised_latents, continuous_agent
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch.distributions import Independent, Normal, kl_divergence
from torchrl.modules import IndependentNormal, TanhNormal
from torchrl.modules.models.model_based import DreamerActor
from torchrl.objectives import DreamerActorLoss, DreamerV3ActorLoss
from torchrl.objectives.utils import ValueEstimators

from lore_torchrl import keys
from lore_torchrl.dreamer.learner import build_learner
from lore_torchrl.modules import AdviceBatch, LogitMixer, PriorNet, UncertaintyGate
from lore_torchrl.policies import GaussianPolicy

V3 = {"entropy_bonus": 3e-4}
KINDS = pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (DreamerV3ActorLoss, {**V3, "use_reinforce": False}),
        (DreamerV3ActorLoss, {**V3, "use_reinforce": True}),
        (DreamerActorLoss, {}),
    ],
    ids=["v3", "v3_reinforce", "dreamer_v1"],
)


def dreamer_v1_agent(distribution=TanhNormal, **settings):
    """DreamerV1's own actor network over the tiny agent's latent states."""
    agent = continuous_agent(**settings)
    kwargs = {"low": LOW, "high": HIGH} if distribution is TanhNormal else {}
    net = DreamerActor(2, depth=1, num_cells=8, std_bias=1.0)
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["state", "belief"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"],
            ["action"],
            distribution_class=distribution,
            distribution_kwargs=kwargs,
            default_interaction_type=InteractionType.RANDOM,
        ),
    )
    actor(advised_latents().select("state", "belief"))
    return replace(agent, actor=actor)


def agent_for(kind):
    return continuous_agent() if kind is DreamerV3ActorLoss else dreamer_v1_agent()


def stock_loss(agent, kind=DreamerV3ActorLoss, **settings):
    if kind is DreamerV3ActorLoss:
        settings = {"continuation_model": agent.continuation, **V3, **settings}
    loss = kind(agent.actor, agent.value, agent.imagination, imagination_horizon=3, **settings)
    loss.make_value_estimator(ValueEstimators.TDLambda, gamma=0.9, lmbda=0.8)
    return loss


def parts(bounds=(LOW, HIGH)):
    policy = GaussianPolicy(ANCHORS, bounds=bounds, scale_range=(0.1, 1.0))
    return {"gate": UncertaintyGate(value_weight=0.0, tau=0.2), "mixer": LogitMixer(policy)}


def lore_loss(agent, kind=DreamerV3ActorLoss, settings=None, bounds=(LOW, HIGH), **kwargs):
    """LoRe's loss; in the paper's form unless ``imitation_weight`` is given."""
    kwargs = {**PAPER, "gated": False, **parts(bounds), **kwargs}
    return wrap(stock_loss(agent, kind, **(settings or {})), **kwargs)


class TestEqualsStock:
    @KINDS
    @pytest.mark.parametrize("why", ["weights", "masked", "no_gain", "no_entries"])
    def test_losses_gradients_and_random_stream(self, kind, settings, why):
        results = []
        for wrapped in (False, True):
            agent = agent_for(kind)
            loss = stock_loss(agent, kind, **settings)
            td = advised_latents(mask=why != "masked")
            if why == "masked":
                td["lore_return"].fill_(float("nan"))
            if why == "no_gain":
                td["lore_return"] = agent.value(td.select("state", "belief"))["state_value"]
            if why == "no_entries":
                td = td.select("state", "belief")
            if wrapped:
                on = {**PAPER, "imitation_weight": 1.0}
                wanted = dict.fromkeys(on, 0.0) if why == "weights" else on
                loss = wrap(loss, **parts(), **wanted)
                loss.composed = why == "no_entries"
            torch.manual_seed(5)
            losses, imagined = loss(td)
            sum(v for k, v in losses.items() if k.startswith("loss_")).backward()
            results.append((losses, imagined, gradients(agent.actor), torch.get_rng_state()))
        (stock, stock_imagined, stock_grads, stock_state), (lore, imagined, grads, state) = results
        assert all(torch.equal(value, lore[key]) for key, value in stock.items())
        assert all(v == 0 for k, v in lore.items() if k.startswith("loss_lore"))
        assert (imagined == stock_imagined).all() and torch.equal(state, stock_state)
        assert set(grads) == set(stock_grads) and any(g.any() for g in grads.values())
        assert all(torch.equal(grads[name], grad) for name, grad in stock_grads.items())

    @KINDS
    def test_with_advice_the_stock_loss_stays_what_it_was(self, kind, settings):
        agent, td = agent_for(kind), advised_latents()
        torch.manual_seed(5)
        stock, _ = stock_loss(agent, kind, **settings)(td)
        td["lore_return"].fill_(1e8)
        td["action"] = taking_first(td)
        torch.manual_seed(5)
        lore, _ = lore_loss(agent, kind, settings, imitation_weight=3.0)(td)
        assert all(torch.equal(value, lore[key]) for key, value in stock.items())
        assert lore["loss_lore_prior"] > 0 and lore["lore_kl"] > 0
        assert lore["loss_lore_imitation"] != 0 and lore["lore_imitated"] == 1


def distributions(agent, loss, td):
    """Policy, prior and mixture as torch knows them, before the tanh."""
    base = agent.actor.get_dist(td).root_dist
    policy = Independent(Normal(base.loc, base.scale), 1)
    mixer, kind = loss.mixer, loss.mixer.policy
    probs = torch.softmax(td["llm_prior_logits"], -1)
    loc = probs @ kind.anchors
    variance = (probs.unsqueeze(-1) * (kind.anchors - loc.unsqueeze(1)) ** 2).sum(1)
    scale = (variance + kind.min_scale**2).sqrt()
    prior = Independent(Normal(loc, scale), 1)
    advice = [td[f"llm_{name}"] for name in ("prior_logits", "confidence", "mask")]
    own = kind.of(agent.actor.get_dist(td)).detach()
    beta = loss.gate.evaluate(kind.entropy(own)).beta
    mixed = mixer.mix(own, AdviceBatch.clean(*advice), beta).policy
    return policy, prior, Independent(Normal(*mixed), 1)


def mean(td, values, share=None, *, weighted=True):
    """Mean of the advised rows: of all alike, or weighted by their ``share``, at least 1 in all."""
    keep = td["llm_mask"].squeeze(-1)
    if weighted:
        values = values * td["llm_confidence"].squeeze(-1)
    if share is None:
        return values[keep].mean()
    return (share * values)[keep].sum() / share[keep].sum().clamp_min(1.0)


# What steps have gained over the critic, and how much each is imitated.
GAINS = torch.tensor([-1.0, 0.0, 0.04, 0.06, 0.25, 0.5, 0.8, 1.0, 2.5, float("nan"), 0.3, 0.1])
IMITATED = torch.tensor([0.0, 0.0, 0.0, 0.06, 0.25, 0.5, 0.8, 1.0, 1.0, 0.0, 0.3, 0.1])
TOTAL = 4.01
UNDONE = {"prior_weight": 0.0, "multiplier_lr": 0.0}


def taking_first(td, rows=True):
    """Actions nearest to the advice's first anchor in ``rows``, and to its last elsewhere."""
    logits, anchors = td["llm_prior_logits"], torch.tensor(ANCHORS)
    chosen = torch.where(torch.as_tensor(rows), logits.argmax(-1), logits.argmin(-1))
    beside = anchors[chosen] + 0.3 * torch.rand(len(td), 2) - 0.15
    return beside.clamp(LOW, HIGH)


def executed():
    """States with returns that gained ``GAINS`` over a critic of 2."""
    td = advised_latents()
    td["state_value"] = torch.full((12, 1), 2.0)
    return td.set("lore_return", 2.0 + GAINS.unsqueeze(-1))


def taken_log_prob(agent, td, bounded=True):
    """Log-density of the actions, before the tanh, up to 0.99 of half the range."""
    distribution = agent.actor.get_dist(td.select("state", "belief"))
    base = distribution.root_dist if bounded else distribution.base_dist
    value = td["action"]
    if bounded:
        value = ((2 * value - HIGH - LOW) / (HIGH - LOW)).clamp(-0.99, 0.99).atanh()
    return Normal(base.loc, base.scale).log_prob(value).sum(-1)


class TestImitation:
    @KINDS
    def test_by_hand(self, kind, settings):
        agent, td = agent_for(kind), executed()
        at_bound = ((td["action"] == LOW) | (td["action"] == HIGH)).any(-1)
        assert (at_bound & (IMITATED > 0)).any() and not at_bound.all()
        terms = lore_loss(agent, kind, settings, imitation_weight=0.7).advice_terms(td)
        expected = -0.7 * (IMITATED * taken_log_prob(agent, td)).sum() / TOTAL
        torch.testing.assert_close(terms["loss_lore_imitation"], expected)
        assert terms["lore_imitated"].item() == pytest.approx(8 / 12)

    def test_an_unbounded_policy_by_hand(self):
        agent, td = dreamer_v1_agent(IndependentNormal), executed()
        wanted = {"bounds": None, "imitation_weight": 0.7}
        loss = lore_loss(agent, DreamerActorLoss, **wanted)
        expected = -0.7 * (IMITATED * taken_log_prob(agent, td, bounded=False)).sum() / TOTAL
        torch.testing.assert_close(loss.advice_terms(td)["loss_lore_imitation"], expected)

    def test_a_density_has_no_limit(self):
        agent, td = continuous_agent(), executed()
        stored = td.select("state", "belief", "action")
        stored[keys.IMITATION_WEIGHT] = torch.ones(*td.batch_size, 1)
        loss = lore_loss(agent, imitation_weight=1.0)
        free = loss.weigh(td, stored=stored)[0]["loss_lore_imitation"]
        stored[keys.IMITATION_LIMIT] = torch.full((*td.batch_size, 1), 1e-6)
        assert loss.weigh(td, stored=stored)[0]["loss_lore_imitation"] == free != 0

    def test_less_than_one_step_in_all_weighs_as_much_as_one(self):
        agent, td = continuous_agent(), executed()[:5]
        loss = lore_loss(agent, imitation_weight=1.0, **UNDONE)
        expected = -(IMITATED[:5] * taken_log_prob(agent, td)).sum()
        torch.testing.assert_close(loss.advice_terms(td)["loss_lore_imitation"], expected)

    def test_the_real_return_filters_and_the_lambda_return_weighs(self):
        """Neither episodes that failed nor those whose return is unknown are imitated."""
        agent, td = continuous_agent(), executed()
        td["lore_lambda_return"] = td["lore_return"]
        td["lore_return"] = torch.tensor([3.0, 1.0, float("nan")]).repeat(4).unsqueeze(-1)
        loss = lore_loss(agent, imitation_weight=1.0, **UNDONE)
        filtered = IMITATED * torch.tensor([1.0, 0.0, 0.0]).repeat(4)
        expected = -(filtered * taken_log_prob(agent, td)).sum()
        torch.testing.assert_close(loss.advice_terms(td)["loss_lore_imitation"], expected)

    @KINDS
    def test_gradient_reaches_only_the_actor(self, kind, settings):
        agent, td = agent_for(kind), executed()
        (-(IMITATED * taken_log_prob(agent, td)).sum() / TOTAL).backward()
        expected = gradients(agent.actor)
        agent.actor.zero_grad()
        inputs = ("state", "belief", "lore_return", "state_value")
        for key in inputs:
            td[key].requires_grad_()
        loss = lore_loss(agent, kind, settings, imitation_weight=1.0, **UNDONE)
        loss.advice_terms(td)["loss_lore_imitation"].backward()
        assert_only_the_actor_learns(agent, expected)
        assert all(td[key].grad is None for key in inputs)

    def test_an_unknown_return_is_ignored(self):
        results = []
        for value in (-1e3, float("nan")):
            agent, td = continuous_agent(), executed()
            td["action"] = taking_first(td)
            td["lore_return"][1::2] = value
            loss = lore_loss(agent, imitation_weight=1.0, bonus_weight=0.2, multiplier_init=0.5)
            terms = loss.advice_terms(td)
            sum(v for k, v in terms.items() if k.startswith("loss_")).backward()
            results.append((terms, gradients(agent.actor)))
        (low, low_grads), (terms, grads) = results
        assert (terms == low).all() and terms["loss_lore_imitation"] != 0
        assert grads.keys() == low_grads.keys() and any(g.any() for g in grads.values())
        for name, grad in grads.items():
            assert grad.isfinite().all() and torch.equal(grad, low_grads[name])

    def test_only_steps_that_took_the_first_anchor_and_gained_are_learned(self):
        agent, td = continuous_agent(), torch.cat([executed()] * 2)
        took = torch.arange(24) < 12
        td["action"] = taking_first(td, took)
        share = IMITATED.repeat(2) * took
        settings = {"prior_weight": 0.3, "bonus_weight": 0.7}
        settings |= {"multiplier_init": 0.5, "multiplier_lr": 0.01, "delta": 0.02}
        loss = lore_loss(agent, imitation_weight=1.0, **settings)
        policy, prior, mixed = distributions(agent, loss, td)
        kl = mean(td, kl_divergence(mixed, policy), share, weighted=False)
        assert kl > 0.03
        terms = loss.advice_terms(td)
        expected = {
            "loss_lore_prior": 0.3 * mean(td, kl_divergence(prior, policy), share),
            "loss_lore_bonus": 0.7
            * mean(td, kl_divergence(policy, prior) + policy.entropy(), share),
            "loss_lore_constraint": 0.5 * (kl - 0.02),
        }
        for name, value in expected.items():
            torch.testing.assert_close(terms[name], value)
        assert loss.multiplier.item() == pytest.approx(0.5 + 0.01 * (kl.item() - 0.02), rel=1e-5)

    @pytest.mark.parametrize("key", ["action", "lore_return"])
    def test_what_is_missing_is_named(self, key):
        loss = lore_loss(continuous_agent(), imitation_weight=3.0)
        with pytest.raises(KeyError, match=f"terms need .'{key}'. beside the latent state"):
            loss(advised_latents().exclude(key))

    def test_without_it_no_return_is_read(self):
        found = []
        for known in (True, False):
            td = executed() if known else executed().exclude("action", "lore_return", "state_value")
            loss = lore_loss(continuous_agent(), bonus_weight=0.2, multiplier_init=0.5)
            torch.manual_seed(5)
            found.append(loss(td)[0])
        assert (found[0] == found[1]).all() and found[0]["loss_lore_prior"] > 0
        assert "loss_lore_imitation" not in found[0]


class TestTerms:
    @pytest.mark.parametrize("direction", ["prior_to_policy", "policy_to_prior"])
    def test_prior_by_hand(self, direction):
        agent, td = continuous_agent(), advised_latents()
        loss = lore_loss(agent, prior_weight=0.3, prior_kl=direction)
        policy, prior, _ = distributions(agent, loss, td)
        pair = (prior, policy) if direction == "prior_to_policy" else (policy, prior)
        expected = 0.3 * mean(td, kl_divergence(*pair))
        torch.testing.assert_close(loss.advice_terms(td)["loss_lore_prior"], expected)
        assert abs(0.3 * mean(td, kl_divergence(*pair[::-1])) - expected) > 1e-2

    def test_bonus_by_hand(self):
        agent, td = continuous_agent(), advised_latents()
        loss = lore_loss(agent, bonus_weight=0.7)
        policy, prior, _ = distributions(agent, loss, td)
        expected = -kl_divergence(policy, prior) - policy.entropy()
        found = loss.advice_terms(td)["loss_lore_bonus"]
        torch.testing.assert_close(found, -0.7 * mean(td, expected))

    def test_constraint_and_its_multiplier_by_hand(self):
        agent, td = continuous_agent(), advised_latents()
        loss = lore_loss(agent, multiplier_init=0.5, multiplier_lr=0.01, delta=0.02)
        policy, _, mixed = distributions(agent, loss, td)
        kl = mean(td, kl_divergence(mixed, policy), weighted=False)
        assert kl > 0.05
        terms = loss.advice_terms(td)
        torch.testing.assert_close(terms["loss_lore_constraint"], 0.5 * (kl - 0.02))
        assert loss.multiplier.item() == pytest.approx(0.5 + 0.01 * (kl.item() - 0.02), rel=1e-5)

    def test_gradient_reaches_the_actor_alone(self):
        agent, td = continuous_agent(), advised_latents()
        td["llm_prior_logits"].requires_grad_()
        td["state"].requires_grad_()
        loss = lore_loss(agent, multiplier_init=0.5, delta=0.0, bonus_weight=0.1)
        terms = loss.advice_terms(td)
        sum(v for k, v in terms.items() if k.startswith("loss_")).backward()
        assert any(g.any() for g in gradients(agent.actor).values())
        assert not gradients(agent.value) and not gradients(agent.world_model)
        assert td["llm_prior_logits"].grad is None and td["state"].grad is None

    @pytest.mark.parametrize(
        "bad", [{"prior_logits": float("nan")}, {"confidence": float("nan")}], ids=str
    )
    def test_unusable_rows_change_nothing(self, bad):
        results = []
        for case in ("clean", "bad"):
            agent, td = continuous_agent(), advised_latents(9, mask=True)
            rows = torch.arange(9) % 3 == 0
            if case == "clean":
                td = td[~rows]
            else:
                for name, value in bad.items():
                    td[f"llm_{name}"][rows] = value
            loss = lore_loss(agent, bonus_weight=0.2, multiplier_init=0.5, delta=0.0)
            terms = loss.advice_terms(td)
            sum(v for k, v in terms.items() if k.startswith("loss_")).backward()
            results.append((terms, gradients(agent.actor)))
        (clean, clean_grads), (terms, grads) = results
        for name in ("loss_lore_prior", "loss_lore_bonus", "loss_lore_constraint", "lore_kl"):
            torch.testing.assert_close(terms[name], clean[name])
        for name, grad in clean_grads.items():
            torch.testing.assert_close(grads[name], grad)


@pytest.mark.parametrize("distribution", [TanhNormal, IndependentNormal])
def test_dreamer_v1_moves_to_the_advice(distribution):
    # Its heads are zero: nothing but the advice has an opinion.
    agent = dreamer_v1_agent(distribution, opinionated=False)
    td = advised_latents(16, mask=True)
    td["llm_prior_logits"] = torch.tensor([0.0, 0.0, 0.0, 9.0, 0.0]).expand(16, 5)
    td["llm_confidence"] = torch.ones(16, 1)
    own = parts((LOW, HIGH) if distribution is TanhNormal else None)
    off = {"imitation_weight": 0.0, "prior_weight": 1.0}
    loss = wrap(stock_loss(agent, DreamerActorLoss), **own, **off)
    optimizer = torch.optim.Adam(agent.actor.parameters(), lr=2e-2)

    def distance():
        action = agent.actor.get_dist(td.select("state", "belief")).deterministic_sample
        return (action - torch.tensor(ANCHORS[3])).abs().mean().item()

    before, divergences = distance(), []
    for _ in range(30):
        losses, _ = loss(td)
        optimizer.zero_grad()
        sum(value for name, value in losses.items() if name.startswith("loss_")).backward()
        optimizer.step()
        divergences.append(losses["loss_lore_prior"].item())
    assert losses["loss_actor"] == 0.0
    assert divergences[-1] < 0.2 * divergences[0]
    assert distance() < 0.5 * before


def learner(lore, *, seed=0, device="cpu"):
    agent = continuous_agent(seed=seed, device=device)
    around = None if lore is None else lore_around(lore, agent, anchors=ANCHORS)
    learner = build_learner(tiny_config(), agent, lore=around, device=device)
    if lore is not None:
        unbounded(learner.loss.actor_loss)
    return learner


def replayed(mask):
    sample = tiny_sample(mask=None)
    sample["action"] = LOW + (HIGH - LOW) * torch.rand(*sample.batch_size, 2)
    advice = advised_latents(sample.numel(), mask=mask).reshape(sample.batch_size)
    for name in ("llm_prior_logits", "llm_confidence", "llm_mask"):
        sample["next", name] = advice[name]
    return sample


def test_an_update_without_advice_is_that_of_stock_dreamer():
    stock, lore = learner(None), learner(lore_config())
    found, wanted = (update(each, replayed(mask=False)) for each in (lore, stock))
    for name, value in wanted[0].items():
        assert torch.equal(found[0][name], value), name
    assert all(torch.equal(found[1][name], grad) for name, grad in wanted[1].items())
    assert torch.equal(found[2], wanted[2])
    after, stock_after = weights(lore.loss), weights(stock.loss)
    assert all(torch.equal(after[name], value) for name, value in stock_after.items())


def test_an_update_with_advice_trains_the_actor_alone():
    stock, lore = learner(None), learner(lore_config(prior_weight=1.0))
    found, wanted = (update(each, replayed(mask=True)) for each in (lore, stock))
    assert found[0]["loss_lore_prior"] > 0 and found[0]["lore_kl"] > 0
    changed = {n for n, grad in wanted[1].items() if not torch.equal(found[1][n], grad)}
    assert changed and all(name.startswith("actor_loss.actor_model") for name in changed)


def test_an_update_imitates_gains_without_advice_and_trains_the_actor_alone():
    stock, lore = learner(None), learner(lore_config(imitation_weight=3.0))
    found, wanted = (update(each, replayed(mask=False)) for each in (lore, stock))
    assert found[0]["loss_lore_imitation"] != 0 and 0 < found[0]["lore_imitated"] < 1
    assert found[0]["loss_lore_prior"] == found[0]["loss_lore_constraint"] == 0
    changed = {n for n, grad in wanted[1].items() if not torch.equal(found[1][n], grad)}
    assert changed and all(name.startswith("actor_loss.actor_model") for name in changed)
    assert torch.equal(found[2], wanted[2])


def test_disagreement_is_learned_beside_the_agent_and_opens_its_gate():
    sample, plain = replayed(mask=True), lore_config(gate={"tau": 0.9}, gated=True)
    weighed = lore_config(gate={"tau": 0.9, "disagreement_weight": 5.0}, gated=True)
    without, found = (update(learner(each), sample) for each in (plain, weighed))
    assert found[0]["loss_disagreement"] > 0 and found[0]["disagreement"] > 0
    ensemble = {name for name in found[1] if ".ensemble." in name or ".disagreement." in name}
    assert ensemble and all(found[1][name].any() for name in ensemble)
    rest = set(without[1])
    assert set(found[1]) - ensemble == rest
    trained = {name for name in rest if not torch.equal(found[1][name], without[1][name])}
    assert trained and all(name.startswith("actor_loss.actor_model") for name in trained)
    assert torch.equal(found[2], without[2])


def learned_advice(threshold):
    """PriorNet, sure everywhere of the fourth anchor."""
    net = PriorNet(24, len(ANCHORS), num_cells=8, threshold=threshold)
    with torch.no_grad():
        net.network.model[-1].bias.copy_(torch.tensor([0.0, 0.0, 0.0, 6.0, 0.0, 3.0]))
    return net


@KINDS
class TestImagination:
    def run(self, kind, settings, *, net=None, **lore):
        agent = agent_for(kind)
        loss = stock_loss(agent, kind, **settings)
        if net is not None:
            own = {"imitation_weight": 0.0, "beta_imagine_max": 0.5, **UNDONE}
            loss = wrap(loss, **parts(), prior_net=net, **own, **lore)
        td = advised_latents().select("state", "belief")
        torch.manual_seed(5)
        losses, imagined = loss(td)
        sum(value for name, value in losses.items() if name.startswith("loss_")).backward()
        return agent, losses, imagined, torch.get_rng_state()

    def test_an_unsure_network_leaves_stock_bitwise(self, kind, settings):
        agent, losses, imagined, state = self.run(kind, settings, net=learned_advice(1.0))
        stock, stock_losses, stock_imagined, stock_state = self.run(kind, settings)
        assert all(torch.equal(losses[name], value) for name, value in stock_losses.items())
        assert (imagined == stock_imagined).all()
        grads, wanted = gradients(agent.actor), gradients(stock.actor)
        assert grads.keys() == wanted.keys() and any(grad.any() for grad in wanted.values())
        assert all(torch.equal(grads[name], grad) for name, grad in wanted.items())
        assert torch.equal(state, stock_state)

    def test_imagined_actions_lean_on_advice_and_train_the_actor_alone(self, kind, settings):
        net = learned_advice(0.5)
        agent, losses, imagined, _ = self.run(kind, settings, net=net)
        stock, _, stock_imagined, _ = self.run(kind, settings)
        wanted = torch.tensor(ANCHORS[3])
        near, far = ((each["action"] - wanted).abs().mean() for each in (imagined, stock_imagined))
        assert near < far - 0.05
        assert all(value.isfinite() for value in losses.values())
        grads, without = gradients(agent.actor), gradients(stock.actor)
        last = next(name for name in reversed(grads) if grads[name].ndim == 2)
        location, scale = grads[last].chunk(2, 0)
        assert location.any() and scale.any()
        assert not torch.equal(grads[last], without[last])
        for module in (net, agent.value, agent.world_model):
            assert not gradients(module)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_an_update_on_cuda():
    on_device = learner(lore_config(prior_weight=1.0), device="cuda")
    metrics, _, _ = update(on_device, replayed(mask=True).to("cuda"))
    assert metrics["loss_lore_prior"] > 0
    assert all(value.is_cuda for value in on_device.loss.buffers())


class TestRefused:
    def test_advice_beside_the_next_state_alone(self):
        td, loss = advised_latents(), lore_loss(dreamer_v1_agent(), DreamerActorLoss)
        replayed = td.select("state", "belief").set("next", td.exclude("state", "belief"))
        with pytest.raises(KeyError, match="at the root and not under"):
            loss(replayed)

    def test_a_gaussian_actor_without_its_mixer(self):
        agent = continuous_agent()
        for mixer in (None, LogitMixer()):
            with pytest.raises(ValueError, match="Gaussian actor needs"):
                wrap(stock_loss(agent), mixer=mixer)

    def test_a_categorical_actor_with_it(self):
        agent = tiny_agent()
        with pytest.raises(ValueError, match="Supported are TanhNormal"):
            wrap(stock_loss(agent, use_reinforce=True), **parts())

    def test_a_mixing_actor_without_anchors(self):
        with pytest.raises(ValueError, match="describer's anchors"):
            lore_around(lore_config(), continuous_agent())
