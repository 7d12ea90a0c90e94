from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dreamer_sample import (
    ACTIONS,
    BELIEF,
    PAPER,
    STATE,
    assert_only_the_actor_learns,
    gradients,
    latents,
    lore_around,
    lore_config,
    sober,
    tiny_agent,
    tiny_config,
    tiny_learner,
    wrap,
)
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch.distributions import Categorical, OneHotCategoricalStraightThrough, kl_divergence
from torchrl.envs import ExplorationType
from torchrl.objectives import DreamerActorLoss, DreamerV3ActorLoss, DreamerV3ValueLoss
from torchrl.objectives.utils import ValueEstimators

from lore_torchrl import LoReActorLoss
from lore_torchrl.control import AdviceBandit
from lore_torchrl.functional import align_temperature
from lore_torchrl.modules import (
    AdviceBatch,
    LogitMixer,
    TemperatureAligner,
    UncertaintyGate,
    ValueEnsemble,
)

NAN, INF = float("nan"), float("inf")


def agent_for(kind):
    """Build the agent; DreamerV1 learns through the action, so its actor must reparametrise."""
    agent = tiny_agent()
    if kind is DreamerV3ActorLoss:
        return agent
    head = ProbabilisticTensorDictModule(
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=OneHotCategoricalStraightThrough,
        default_interaction_type=ExplorationType.RANDOM,
    )
    return replace(agent, actor=ProbabilisticTensorDictSequential(agent.actor[0], head))


def stock_loss(agent, kind=DreamerV3ActorLoss, **kwargs):
    if kind is DreamerV3ActorLoss:
        kwargs = {
            "continuation_model": agent.continuation,
            "use_reinforce": True,
            "entropy_bonus": 3e-4,
            **kwargs,
        }
    loss = kind(agent.actor, agent.value, agent.imagination, imagination_horizon=3, **kwargs)
    loss.make_value_estimator(ValueEstimators.TDLambda, gamma=0.9, lmbda=0.8)
    return loss


def lore_loss(agent, *, kind=DreamerV3ActorLoss, gate=None, temperature=None, **kwargs):
    """LoRe's loss; in the paper's form unless ``imitation_weight`` is given."""
    lore = lore_around(lore_config(gate=gate, temperature=temperature), agent).actor
    kwargs = {**PAPER, "gated": False, **kwargs}
    return wrap(stock_loss(agent, kind), gate=lore.gate, mixer=lore.mixer, **kwargs)


def log_policy(agent, td):
    return torch.log_softmax(agent.actor.get_dist(td).logits, -1)


def average(td, values, share=None):
    """Mean of the advised rows: of all alike, or weighted by their ``share``, at least 1 in all."""
    keep = td["llm_mask"].squeeze(-1)
    if share is None:
        return values[keep].mean()
    share = share * keep
    return (share * values).sum() / share.sum().clamp_min(1.0)


def weighted(td, divergence, share=None):
    """The same of confidence times divergence."""
    return average(td, td["llm_confidence"].squeeze(-1) * divergence, share)


def sometimes_advised(n=12):
    td = latents(n)
    td["llm_mask"] = torch.arange(n).unsqueeze(-1) % 3 != 0
    return td


BOTH = pytest.mark.parametrize("kind", [DreamerV3ActorLoss, DreamerActorLoss])


class TestEqualsStock:
    @BOTH
    @pytest.mark.parametrize(
        "why", ["weights", "masked", "no_gain", "unknown", "no_entries", "composed"]
    )
    def test_losses_gradients_and_random_stream(self, kind, why):
        results = []
        for wrapped in (False, True):
            agent = agent_for(kind)
            td = latents(mask=why != "masked")
            if why in ("masked", "unknown"):
                td["lore_return"].fill_(NAN)
            if why == "no_gain":
                td["lore_return"] = agent.value(td.select("state", "belief"))["state_value"]
            loss = stock_loss(agent, kind)
            if why in ("no_entries", "composed"):
                td = td.select("state", "belief")
            if wrapped:
                on = {**PAPER, "imitation_weight": 1.0}
                wanted = dict.fromkeys(on, 0.0) if why in ("weights", "no_entries") else on
                lore = lore_around(lore_config(), agent).actor
                loss = wrap(loss, gate=lore.gate, mixer=lore.mixer, **wanted)
                loss.composed = why == "composed"
            torch.manual_seed(5)
            losses, imagined = loss(td)
            sum(v for k, v in losses.items() if k.startswith("loss_")).backward()
            results.append((losses, imagined, gradients(agent.actor), torch.get_rng_state()))
        (stock, stock_imagined, stock_grads, stock_state), (lore, imagined, grads, state) = results
        assert set(stock.keys()) <= set(lore.keys())
        assert why not in ("weights", "no_entries", "composed") or set(stock.keys()) == set(
            lore.keys()
        )
        assert all(torch.equal(value, lore[key]) for key, value in stock.items())
        assert all(v == 0 for k, v in lore.items() if k.startswith("loss_lore"))
        assert (imagined == stock_imagined).all()
        assert torch.equal(state, stock_state)
        assert set(grads) == set(stock_grads) and any(g.any() for g in grads.values())
        assert all(torch.equal(grads[name], grad) for name, grad in stock_grads.items())

    @BOTH
    def test_with_advice_the_stock_loss_stays_what_it_was(self, kind):
        agent = agent_for(kind)
        td = latents()
        torch.manual_seed(5)
        stock, _ = stock_loss(agent, kind)(td)
        torch.manual_seed(5)
        td["lore_return"].fill_(1e6)
        lore, _ = lore_loss(agent, kind=kind, imitation_weight=3.0)(td)
        assert all(torch.equal(value, lore[key]) for key, value in stock.items())
        assert lore["loss_lore_prior"] > 0 and lore["loss_lore_imitation"] > 0


# What steps have gained over the critic, in units of S, and how much each is imitated.
GAINS = torch.tensor([-1.0, 0.0, 0.04, 0.06, 0.25, 0.5, 0.8, 1.0, 2.5, NAN, 0.3, -INF])
IMITATED = torch.tensor([0.0, 0.0, 0.0, 0.06, 0.25, 0.5, 0.8, 1.0, 1.0, 0.0, 0.3, 0.0])
TOTAL = 3.91
# What their episodes really gained, and what is then imitated of the gains above.
REAL = torch.tensor([1.0, 1.0, 1.0, 0.06, 0.04, -2.0, 1.0, NAN, 0.5, 1.0, INF, 1.0])
FILTERED = torch.tensor([0.0, 0.0, 0.04, 0.06, 0.0, 0.0, 0.8, 0.0, 1.0, 0.0, 0.0, 0.0])
IMITATION_ALONE = {"prior_weight": 0.0, "multiplier_lr": 0.0}


def executed(times=1, *, scale=1.0):
    """States with advice, actions, and returns that gained ``GAINS`` over a critic of 2."""
    td = sometimes_advised(12 * times)
    td["state_value"] = torch.full((12 * times, 1), 2.0)
    td["lore_return"] = 2.0 + scale * GAINS.repeat(times).unsqueeze(-1)
    return td


def taken_log_prob(agent, td):
    return log_policy(agent, td).gather(-1, td["action"].argmax(-1, keepdim=True)).squeeze(-1)


class TestImitation:
    @BOTH
    @pytest.mark.parametrize(("rows", "total"), [(12, TOTAL), (5, 1.0)])
    def test_by_hand(self, kind, rows, total):
        """The mean over what is imitated; less than one step in all weighs as much as one."""
        agent, td = agent_for(kind), executed()[:rows]
        loss = lore_loss(agent, kind=kind, imitation_weight=0.7)
        gains = IMITATED[:rows]
        expected = -0.7 * (gains * taken_log_prob(agent, td)).sum() / total
        terms = loss.advice_terms(td)
        torch.testing.assert_close(terms["loss_lore_imitation"], expected)
        assert terms["lore_imitated"].item() == pytest.approx((gains > 0).sum().item() / rows)

    def test_by_default_it_is_the_only_term_with_weight_one(self):
        agent, td = tiny_agent(), executed()
        found = wrap(stock_loss(agent)).advice_terms(td)
        assert set(found.keys()) == {"loss_lore_imitation", "lore_imitated"}
        expected = -(IMITATED * taken_log_prob(agent, td)).sum() / TOTAL
        torch.testing.assert_close(found["loss_lore_imitation"], expected)

    @BOTH
    def test_the_real_return_filters_and_the_lambda_return_weighs(self, kind):
        agent, td = agent_for(kind), executed()
        td["lore_lambda_return"] = td["lore_return"]
        td["lore_return"] = 2.0 + REAL.unsqueeze(-1)
        loss = lore_loss(agent, kind=kind, imitation_weight=0.7, **IMITATION_ALONE)
        expected = -0.7 * (FILTERED * taken_log_prob(agent, td)).sum() / 1.9
        terms = loss.advice_terms(td)
        torch.testing.assert_close(terms["loss_lore_imitation"], expected)
        assert terms["lore_imitated"].item() == pytest.approx(4 / 12)

    @BOTH
    @pytest.mark.parametrize("took", [False, True])
    @pytest.mark.parametrize(("p", "share"), [(0.05, 0.0), (0.5, 0.0), (0.8, 0.6), (0.95, 0.9)])
    def test_the_bandit_corrects_the_returns_of_followed_advice(self, kind, took, p, share):
        agent, td = agent_for(kind), executed()
        td["action"] = followed(td, took)
        td["lore_lambda_return"] = td["lore_return"]
        td["lore_return"] = 2.0 + REAL.unsqueeze(-1)
        loss = lore_loss(agent, kind=kind, imitation_weight=0.7, **IMITATION_ALONE)
        bandit = AdviceBandit()
        loss.set_bandit(bandit)
        bandit.log_odds.fill_(p).logit_()
        assert not any("bandit" in name for name in loss.state_dict())
        more = torch.where(td["llm_mask"].squeeze(-1) & torch.tensor(took), share, 0.0)
        gains = GAINS + more * (REAL - GAINS).clamp(min=0).nan_to_num()
        counts = (REAL > 0.05) & REAL.isfinite() & (gains > 0) & gains.isfinite()
        weight = torch.where(counts, gains.clamp(0, 1), 0.0)
        assert (weight > FILTERED).any() == (took and share > 0)
        expected = -0.7 * (weight * taken_log_prob(agent, td)).sum() / weight.sum()
        torch.testing.assert_close(loss.advice_terms(td)["loss_lore_imitation"], expected)

    @pytest.mark.parametrize("real", [-3.0, 2.0, NAN])
    def test_what_the_critic_hopes_of_an_episode_that_failed_is_not_imitated(self, real):
        """Nor of one that has not ended, whose return is not known."""
        agent, td = tiny_agent(), executed()
        td["action"] = followed(td)
        td["lore_lambda_return"] = torch.full((12, 1), 9.0)
        td["lore_return"].fill_(real)
        terms = lore_loss(agent, imitation_weight=1.0, **EVERY_TERM).advice_terms(td)
        losses = [value for name, value in terms.items() if name.startswith("loss_")]
        assert len(losses) == 4 and all(value == 0 for value in losses)
        sum(losses).backward()
        assert not any(grad.any() for grad in gradients(agent.actor).values())
        assert terms["lore_imitated"] == 0 and terms["lore_advised"] > 0

    def test_gains_are_in_units_of_the_span_of_returns(self):
        agent, td = tiny_agent(), executed(scale=4.0)
        loss = lore_loss(agent, imitation_weight=1.0, **IMITATION_ALONE)
        loss.actor_loss.retnorm.low.fill_(-1.0)
        loss.actor_loss.retnorm.high.fill_(3.0)
        expected = -(IMITATED * taken_log_prob(agent, td)).sum() / TOTAL
        torch.testing.assert_close(loss.advice_terms(td)["loss_lore_imitation"], expected)

    def test_a_wrapped_loss_that_does_not_normalize_has_a_span_of_one(self):
        stock = stock_loss(
            tiny_agent(), return_normalization=False, return_normalization_min_scale=0.1
        )
        _, imagined = stock(latents())
        scale = wrap(stock).return_scale()
        assert scale == stock._return_scale(imagined["lambda_target"]) == 1.0

    @BOTH
    def test_the_critic_is_asked_where_its_value_is_not_given(self, kind):
        agent, td = sober(agent_for(kind)), executed()
        del td["state_value"]
        value = agent.value(td.select("state", "belief"))["state_value"].detach()
        assert value.abs().max() < 17 and value.std() > 1
        td["lore_return"] = value + GAINS.unsqueeze(-1)
        loss = lore_loss(agent, kind=kind, imitation_weight=1.0, **IMITATION_ALONE)
        expected = -(IMITATED * taken_log_prob(agent, td)).sum() / TOTAL
        found = loss.advice_terms(td)["loss_lore_imitation"]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)

    def test_the_threshold(self):
        agent, td = tiny_agent(), executed()
        settings = {"imitation_weight": 1.0, "imitation_threshold": 0.4, **IMITATION_ALONE}
        gains = torch.where(IMITATED > 0.4, IMITATED, 0.0)
        expected = -(gains * taken_log_prob(agent, td)).sum() / 3.3
        terms = lore_loss(agent, **settings).advice_terms(td)
        torch.testing.assert_close(terms["loss_lore_imitation"], expected)
        assert terms["lore_imitated"].item() == pytest.approx(4 / 12)

    def test_a_pessimistic_critic_makes_no_gains(self):
        """Where nothing was ever rewarded, a value below 0 is the critic's error."""
        td = executed()
        td["state_value"].fill_(-0.3)
        td["lore_return"].zero_()
        loss = lore_loss(tiny_agent(), imitation_weight=1.0, **IMITATION_ALONE)
        assert loss.advice_terms(td)["lore_imitated"] == 1.0
        loss.least_return.zero_()  # as it begins
        assert loss.advice_terms(td)["lore_imitated"] == 0.0
        # Of returns that differ those above the worst are gains; what is unknown is left out.
        td["lore_return"][:4] = torch.tensor([[-0.4], [-0.2], [NAN], [0.5]])
        assert loss.advice_terms(td)["lore_imitated"].item() == pytest.approx(10 / 12)
        assert loss.least_return.item() == pytest.approx(-0.4)
        loss.greatest_return.zero_()
        loss.advice_terms(td)
        bounded = loss.bounded(torch.tensor([-1.0, 0.3, 2.0])).tolist()
        assert bounded == pytest.approx([-0.4, 0.3, td["lore_return"].nan_to_num().max().item()])
        assert {"least_return", "greatest_return"} <= set(loss.state_dict()), "a resume goes on"
        # Without imitation nothing keeps them: what the ensemble learns is left alone.
        alone = lore_loss(tiny_agent(), **PAPER)
        alone.least_return.zero_()
        assert alone.bounded(torch.tensor(-1.0)) == -1.0

    def test_whoever_chose_the_step(self):
        agent, td = tiny_agent(), executed()
        loss = lore_loss(agent, imitation_weight=1.0, **IMITATION_ALONE)
        expected = loss.advice_terms(td)["loss_lore_imitation"]
        td["llm_prior_logits"] = td["llm_prior_logits"].roll(1, -1)
        td["llm_mask"] = ~td["llm_mask"]
        assert torch.equal(loss.advice_terms(td)["loss_lore_imitation"], expected)

    @BOTH
    def test_gradient_reaches_only_the_actor(self, kind):
        agent, td = agent_for(kind), executed()
        del td["state_value"]
        td["lore_return"] = agent.value(td.select("state", "belief"))["state_value"].detach()
        td["lore_return"] *= torch.where(td["lore_return"] > 0, 2.0, 0.5)
        (-3.0 * taken_log_prob(agent, td).sum() / 12).backward()
        expected = gradients(agent.actor)
        agent.actor.zero_grad()
        inputs = ("state", "belief", "lore_return")
        for key in inputs:
            td[key].requires_grad_()
        loss = lore_loss(agent, kind=kind, imitation_weight=3.0, **IMITATION_ALONE)
        loss.advice_terms(td)["loss_lore_imitation"].backward()
        assert_only_the_actor_learns(agent, expected)
        assert all(td[key].grad is None for key in inputs)

    @BOTH
    @pytest.mark.parametrize("unknown", [NAN, -INF])
    def test_an_unknown_return_is_ignored(self, kind, unknown):
        results = []
        settings = {"bonus_weight": 0.2, "multiplier_init": 0.5}
        for value in (-1e3, unknown):
            agent, td = agent_for(kind), executed()
            td["action"] = followed(td)
            td["lore_return"][1::2] = value
            loss = lore_loss(agent, kind=kind, imitation_weight=1.0, delta=0.0, **settings)
            terms = loss.advice_terms(td)
            sum(v for k, v in terms.items() if k.startswith("loss_")).backward()
            results.append((terms, gradients(agent.actor)))
        (low, low_grads), (terms, grads) = results
        assert (terms == low).all() and terms["loss_lore_imitation"] > 0
        assert grads.keys() == low_grads.keys() and any(g.any() for g in grads.values())
        for name, grad in grads.items():
            assert grad.isfinite().all() and torch.equal(grad, low_grads[name])

    def test_steps_make_gaining_actions_likelier(self):
        agent, td = tiny_agent(), executed()
        loss = lore_loss(agent, imitation_weight=1.0, **IMITATION_ALONE)
        optimizer = torch.optim.SGD(agent.actor.parameters(), lr=0.5)
        before = (IMITATED * taken_log_prob(agent, td)).sum().item()
        for _ in range(10):
            optimizer.zero_grad()
            loss.advice_terms(td)["loss_lore_imitation"].backward()
            optimizer.step()
        assert (IMITATED * taken_log_prob(agent, td)).sum() > before + 1.0

    @BOTH
    def test_without_it_no_return_is_read(self, kind):
        """``imitation_weight=0`` is the paper's form: what was done and returned is not needed."""
        found = []
        for known in (True, False):
            agent, td = agent_for(kind), executed()
            if not known:
                td = td.exclude("action", "lore_return", "state_value")
            loss = lore_loss(agent, kind=kind, **EVERY_TERM)
            torch.manual_seed(5)
            losses, _ = loss(td)
            sum(v for k, v in losses.items() if k.startswith("loss_")).backward()
            found.append((losses, gradients(agent.actor)))
        (losses, grads), (others, other_grads) = found
        assert (losses == others).all() and losses["loss_lore_prior"] > 0
        assert not {"loss_lore_imitation", "lore_imitated"} & set(losses.keys())
        assert all(torch.equal(grads[name], grad) for name, grad in other_grads.items())

    @pytest.mark.parametrize("key", ["action", "lore_return"])
    def test_what_is_missing_is_named(self, key):
        loss = lore_loss(tiny_agent(), imitation_weight=3.0)
        with pytest.raises(KeyError, match=f"terms need .'{key}'. beside the latent state"):
            loss(latents().exclude(key))
        loss(latents())

    def test_it_needs_no_advice(self):
        """Self-imitation alone, the baseline, in a loop without LoRe."""
        td = latents()
        terms = wrap(stock_loss(tiny_agent()))(td.clone())[0]
        alone = wrap(stock_loss(tiny_agent()))(
            td.select("state", "belief", "action", "lore_return")
        )[0]
        assert alone["loss_lore_imitation"] > 0
        assert torch.equal(alone["loss_lore_imitation"], terms["loss_lore_imitation"])


class TestAdviceThatCannotBeRead:
    def test_none_where_terms_are_on(self):
        """Silently there was no LoRe term: as under a stock DreamerV3Loss."""
        td = latents().select("state", "belief", "action", "lore_return")
        with pytest.raises(KeyError, match="use LoReDreamerV3Loss in place of DreamerV3Loss"):
            lore_loss(tiny_agent())(td)
        with pytest.raises(KeyError, match="LoReDreamerV3Loss"):
            wrap(stock_loss(tiny_agent()))(td.select("state", "belief"))

    @pytest.mark.parametrize("missing", ["llm_confidence", "llm_mask"])
    def test_in_part(self, missing):
        with pytest.raises(KeyError, match=f"no ..{missing}.. beside it"):
            lore_loss(tiny_agent())(latents().exclude(missing))

    def test_a_mask_that_is_not_boolean(self):
        td = latents()
        td["llm_mask"] = td["llm_mask"].float()
        with pytest.raises(TypeError, match=r"must be boolean, got torch.float32"):
            lore_loss(tiny_agent())(td)

    @pytest.mark.parametrize("imitated", [0.0, 1.0])
    def test_another_number_of_actions(self, imitated):
        td = latents()
        td["llm_prior_logits"] = torch.zeros(len(td), ACTIONS + 1)
        with pytest.raises(ValueError, match=r"advice has 5 logits a state, the policy 4"):
            lore_loss(tiny_agent(), imitation_weight=imitated)(td)

    def test_a_mixing_actor_in_place_of_the_stock_one(self):
        agent = tiny_agent()
        mixing = lore_around(lore_config(), agent).actor
        with pytest.raises(TypeError, match=r"stock one.*got LoReActor"):
            wrap(stock_loss(replace(agent, actor=mixing)), **PAPER | {"multiplier_lr": 0.0})


@pytest.mark.parametrize("wrong", [0.5, "bandit", torch.nn.Linear(1, 1)])
def test_a_part_that_is_another_object_is_refused(wrong):
    loss = lore_loss(tiny_agent())
    with pytest.raises(TypeError, match="needs an AdviceBandit or None"):
        loss.set_bandit(wrong)
    for name in ("gate", "mixer"):
        with pytest.raises(TypeError, match="gate and mixer must be the policy's own"):
            LoReActorLoss(stock_loss(tiny_agent()), **{name: wrong})


EVERY_TERM = {
    "prior_weight": 0.5,
    "bonus_weight": 0.5,
    "multiplier_init": 0.5,
    "delta": 0.0,
}


ON_DEVICE = {**EVERY_TERM, "imitation_weight": 1.0, "multiplier_lr": 1e-3, "multiplier_max": 1.0}


def followed(td, rows=True):
    """Actions that are the advice's first choice in ``rows``, and its last elsewhere."""
    logits = td["llm_prior_logits"]
    best, worst = logits.argmax(-1), logits.argmin(-1)
    chosen = torch.where(torch.as_tensor(rows), best, worst)
    return torch.nn.functional.one_hot(chosen, ACTIONS).float()


@pytest.mark.parametrize("kind", [DreamerV3ActorLoss, DreamerActorLoss])
def test_the_stock_term_is_scaled_and_can_be_left_out(kind):
    agent, td, found = agent_for(kind), executed(), {}
    for weight in (1.0, 0.5, 0.0):
        torch.manual_seed(5)
        loss = lore_loss(agent, kind=kind, actor_weight=weight, **PAPER)
        found[weight] = loss(td)[0]
    full, half, none = (found[weight]["loss_actor"] for weight in (1.0, 0.5, 0.0))
    assert torch.equal(half, 0.5 * full) and none == 0.0 and full != 0.0
    assert torch.equal(found[0.0]["loss_lore_prior"], found[1.0]["loss_lore_prior"])


def test_the_prior_term_falls_to_zero_over_its_steps():
    agent, td = tiny_agent(), executed()
    loss = lore_loss(agent, **PAPER | {"prior_steps": 4})
    terms = [loss.advice_terms(td)["loss_lore_prior"].item() for _ in range(6)]
    expected = [terms[0] * share for share in (1.0, 0.75, 0.5, 0.25, 0.0, 0.0)]
    assert terms == pytest.approx(expected, rel=1e-5) and terms[0] > 0


class TestWeighedByWhatGained:
    """The terms on advice: only steps that took its first choice and gained count."""

    def weighed(self):
        td = executed(2)
        took = torch.arange(24) < 12
        td["action"] = followed(td, took)
        return td, IMITATED.repeat(2) * took

    @pytest.mark.parametrize(("rows", "total"), [(24, 3.05), (5, 0.25)])
    def test_prior_and_bonus_by_hand(self, rows, total):
        agent, (td, share) = tiny_agent(), self.weighed()
        td, share = td[:rows], share[:rows]
        assert (share * td["llm_mask"].squeeze(-1)).sum().item() == pytest.approx(total)
        settings = {"prior_weight": 0.3, "bonus_weight": 0.7, "temperature": {"init": 1.5}}
        terms = lore_loss(agent, imitation_weight=1.0, **settings).eval().advice_terms(td)
        prior = Categorical(logits=td["llm_prior_logits"] / 1.5)
        policy = Categorical(logits=log_policy(agent, td))
        expected = 0.3 * weighted(td, kl_divergence(prior, policy), share)
        torch.testing.assert_close(terms["loss_lore_prior"], expected)
        expected = (policy.probs * prior.logits).sum(-1)
        expected = -0.7 * weighted(td, expected, share)
        torch.testing.assert_close(terms["loss_lore_bonus"], expected)

    def test_constraint_and_multiplier_by_hand(self):
        agent, (td, share) = tiny_agent(), self.weighed()
        settings = {"multiplier_init": 0.5, "multiplier_lr": 0.1}
        loss = lore_loss(agent, imitation_weight=1.0, delta=0.02, **settings)
        kl = mixture_kl(agent, loss, td, share)
        assert kl > 0.03 and abs(kl - mixture_kl(agent, loss, td)) > 1e-3
        terms = loss.advice_terms(td)
        torch.testing.assert_close(terms["lore_kl"], kl.detach())
        torch.testing.assert_close(terms["loss_lore_constraint"], 0.5 * (kl - 0.02))
        assert loss.multiplier.item() == pytest.approx(0.5 + 0.1 * (kl.item() - 0.02), rel=1e-5)

    @pytest.mark.parametrize("row", range(12))
    def test_one_step_alone(self, row):
        """Row by row: it counts if it gained, took the first choice, and was advised."""
        counts = IMITATED[row] > 0 and row % 3 != 0
        for took in (True, False):
            agent, td = tiny_agent(), executed()
            td["llm_mask"] &= torch.arange(12).unsqueeze(-1) == row
            td["action"] = followed(td, took)
            terms = lore_loss(agent, imitation_weight=1.0, **EVERY_TERM).advice_terms(td)
            del terms["loss_lore_imitation"]
            found = [(v != 0).item() for k, v in terms.items() if k.startswith("loss_")]
            assert found == [bool(counts) and took] * 3

    def test_only_the_first_choice_counts(self):
        """Not the second, however near."""
        td = executed()
        td["llm_prior_logits"] = torch.tensor([1.0, 3.0, 2.99, 0.0]).repeat(12, 1)
        agent, found = tiny_agent(), []
        for action in range(ACTIONS):
            one_hot = torch.nn.functional.one_hot(torch.tensor(action), ACTIONS).float()
            td["action"] = one_hot.repeat(12, 1)
            loss = lore_loss(agent, imitation_weight=1.0)
            found.append(loss.advice_terms(td)["loss_lore_prior"].item() != 0)
        assert found == [False, True, False, False]

    def test_where_all_took_it_and_all_gained_the_terms_are_the_papers(self):
        results = []
        for weight in (0.0, 1.0):
            agent, td = tiny_agent(), executed()
            td["action"], td["lore_return"] = followed(td), torch.full((12, 1), 3.0)
            loss = lore_loss(agent, imitation_weight=weight, **EVERY_TERM)
            terms = loss.advice_terms(td)
            terms = {k: v for k, v in terms.items() if "imitat" not in k}
            sum(v for k, v in terms.items() if k.startswith("loss_")).backward()
            results.append((terms, gradients(agent.actor)))
        (paper, paper_grads), (terms, grads) = results
        assert paper.keys() == terms.keys()
        assert all(torch.equal(terms[name], value) for name, value in paper.items())
        assert all(torch.equal(grads[name], value) for name, value in paper_grads.items())


class TestPrior:
    @pytest.mark.parametrize("direction", ["prior_to_policy", "policy_to_prior"])
    def test_by_hand(self, direction):
        agent = tiny_agent()
        td = sometimes_advised()
        loss = lore_loss(
            agent, prior_weight=0.3, prior_kl=direction, temperature={"init": 1.5}
        ).eval()
        prior = Categorical(logits=td["llm_prior_logits"] / 1.5)
        policy = Categorical(logits=log_policy(agent, td))
        pair = (prior, policy) if direction == "prior_to_policy" else (policy, prior)
        expected = 0.3 * weighted(td, kl_divergence(*pair))
        terms = loss.advice_terms(td)
        torch.testing.assert_close(terms["loss_lore_prior"], expected)
        other = 0.3 * weighted(td, kl_divergence(*pair[::-1]))
        assert abs(other - expected) > 1e-2

    def test_without_a_mixer_the_temperature_is_one(self):
        agent = tiny_agent()
        td = sometimes_advised()
        off = {"imitation_weight": 0.0, "multiplier_lr": 0.0}
        loss = wrap(stock_loss(agent), prior_weight=1.0, **off)
        prior = Categorical(logits=td["llm_prior_logits"])
        expected = weighted(td, kl_divergence(prior, Categorical(logits=log_policy(agent, td))))
        terms = loss.advice_terms(td)
        torch.testing.assert_close(terms["loss_lore_prior"], expected)
        assert set(terms.keys()) == {"loss_lore_prior", "lore_advised"}

    def test_gradient_step_moves_the_policy_towards_the_advice(self):
        agent = tiny_agent()
        td = latents()
        loss = lore_loss(agent, prior_weight=1.0, multiplier_lr=0.0)
        optimizer = torch.optim.SGD(agent.actor.parameters(), lr=0.1)
        values = []
        for _ in range(5):
            term = loss.advice_terms(td)["loss_lore_prior"]
            optimizer.zero_grad()
            term.backward()
            optimizer.step()
            values.append(term.item())
        assert values == sorted(values, reverse=True)

    def test_advice_gets_no_gradient(self):
        td = latents()
        td["llm_prior_logits"].requires_grad_()
        td["llm_confidence"].requires_grad_()
        td["state"].requires_grad_()
        loss = lore_loss(tiny_agent(), bonus_weight=0.5, delta=0.0, multiplier_init=0.5)
        terms = loss.advice_terms(td)
        sum(v for k, v in terms.items() if k.startswith("loss_")).backward()
        assert td["llm_prior_logits"].grad is None
        assert td["llm_confidence"].grad is None
        assert td["state"].grad is None


class TestBonus:
    def test_by_hand(self):
        agent = tiny_agent()
        td = sometimes_advised()
        loss = lore_loss(agent, bonus_weight=0.7, temperature={"init": 0.8}).eval()
        log_prior = torch.log_softmax(td["llm_prior_logits"] / 0.8, -1)
        expected = (log_policy(agent, td).exp() * log_prior).sum(-1)
        terms = loss.advice_terms(td)
        torch.testing.assert_close(terms["loss_lore_bonus"], -0.7 * weighted(td, expected))

    def test_not_computed_without_weight(self):
        assert "loss_lore_bonus" not in lore_loss(tiny_agent()).advice_terms(latents())


def test_an_action_that_the_actor_rules_out():
    """Its logit is minus infinity: all terms and gradients are finite, as stock's are."""
    agent = tiny_agent()
    ruled_out = torch.tensor([False, True, False, False])
    mask = TensorDictModule(
        lambda logits: logits.masked_fill(ruled_out, -INF), ["logits"], ["logits"]
    )
    actor = ProbabilisticTensorDictSequential(agent.actor[0], mask, agent.actor[1])
    agent = replace(agent, actor=actor)
    loss = lore_loss(agent, bonus_weight=0.5, multiplier_init=0.5, delta=0.02)
    losses, _ = loss(latents())
    assert all(value.isfinite().all() for value in losses.values())
    assert {"loss_lore_prior", "loss_lore_constraint"} <= set(losses.keys())
    assert losses["loss_lore_constraint"] > 0 and loss.multiplier.isfinite()
    # What is distilled is what can be done.
    assert losses["loss_lore_prior"] < 10
    sum(v for k, v in losses.items() if k.startswith("loss_")).backward()
    found = gradients(agent.actor)
    assert any(g.any() for g in found.values()) and all(g.isfinite().all() for g in found.values())


def mixture_kl(agent, loss, td, share=None):
    log_p = log_policy(agent, td)
    values = agent.value(td.select("state", "belief"))["state_value_logits"]
    beta = loss.gate.evaluate(loss.mixer.policy.entropy(log_p.detach()), values).beta
    assert beta.max() > 0.5
    advice = [td[key] for key in ("llm_prior_logits", "llm_confidence", "llm_mask")]
    mixture = loss.mixer.mix(log_p.detach(), AdviceBatch.clean(*advice), beta)
    assert mixture.kl.max() > 0.05
    kl = (mixture.policy.exp() * (mixture.policy - log_p)).sum(-1)
    return average(td, kl, share)


class TestConstraint:
    def test_by_hand(self):
        agent = tiny_agent()
        td = sometimes_advised()
        loss = lore_loss(agent, multiplier_init=0.5, delta=0.02).eval()
        kl = mixture_kl(agent, loss, td)
        terms = loss.advice_terms(td)
        torch.testing.assert_close(terms["loss_lore_constraint"], 0.5 * (kl - 0.02))
        torch.testing.assert_close(terms["lore_kl"], kl.detach())

    def test_zero_within_the_bound(self):
        loss = lore_loss(tiny_agent(), multiplier_init=0.5, delta=10.0)
        assert loss.advice_terms(latents())["loss_lore_constraint"] == 0

    def test_gradient_flows_only_through_the_policy(self):
        agent = tiny_agent()
        td = sometimes_advised()
        loss = lore_loss(agent, prior_weight=0.0, multiplier_init=0.5, delta=0.0)
        mixture_kl(agent, loss, td).mul(0.5).backward()
        expected = gradients(agent.actor)
        agent.actor.zero_grad()
        loss.advice_terms(td)["loss_lore_constraint"].backward()
        found = gradients(agent.actor)
        assert set(found) == set(expected) and any(g.any() for g in found.values())
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad)

    def test_gradient_reaches_only_the_actor(self):
        agent = tiny_agent()
        loss = lore_loss(agent, multiplier_init=0.5, delta=0.0, bonus_weight=0.1)
        terms = loss.advice_terms(latents())
        sum(v for k, v in terms.items() if k.startswith("loss_")).backward()
        assert gradients(agent.actor)
        assert not gradients(agent.value) and not gradients(agent.world_model)


def test_a_step_brings_policy_and_mixture_together():
    agent = tiny_agent()
    td = latents()
    loss = lore_loss(agent, prior_weight=0.0, multiplier_init=1.0, delta=0.0)
    optimizer = torch.optim.SGD(agent.actor.parameters(), lr=0.5)
    first = loss.advice_terms(td)["lore_kl"]
    for _ in range(20):
        optimizer.zero_grad()
        loss.advice_terms(td)["loss_lore_constraint"].backward()
        optimizer.step()
    assert loss.advice_terms(td)["lore_kl"] < 0.8 * first


class TestMultiplier:
    @pytest.mark.parametrize(("delta", "sign"), [(0.0, 1), (5.0, -1)])
    def test_follows_the_violation(self, delta, sign):
        agent = tiny_agent()
        td = sometimes_advised()
        loss = lore_loss(agent, multiplier_init=0.5, multiplier_lr=0.01, delta=delta)
        kl = mixture_kl(agent, loss, td).item()
        terms = loss.advice_terms(td)
        assert loss.multiplier.item() == pytest.approx(0.5 + 0.01 * (kl - delta), rel=1e-5)
        assert (loss.multiplier.item() > 0.5) == (sign > 0)
        # The loss takes the multiplier from before the step, the metric the one after it.
        assert terms["lore_multiplier"].item() == loss.multiplier.item()
        expected = 0.5 * max(kl - delta, 0.0)
        assert terms["loss_lore_constraint"].item() == pytest.approx(expected, rel=1e-5)

    def test_stays_within_its_bounds(self):
        loss = lore_loss(tiny_agent(), multiplier_lr=10.0, multiplier_max=0.7, delta=0.0)
        for _ in range(3):
            loss.advice_terms(latents())
        assert loss.multiplier.item() == pytest.approx(0.7)
        loss.config = replace(loss.config, delta=5.0)
        loss.advice_terms(latents())
        assert loss.multiplier.item() == 0.0

    @pytest.mark.parametrize("why", ["eval", "masked", "nan"])
    def test_holds_still(self, why):
        loss = lore_loss(tiny_agent(), multiplier_init=0.5, multiplier_lr=0.1)
        td = latents(mask=why != "masked")
        if why == "nan":
            td["llm_prior_logits"][:, 1] = NAN
        before = {name: value.clone() for name, value in loss.state_dict().items()}
        loss.train(why != "eval").advice_terms(td)
        after = loss.state_dict()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == (set() if why == "eval" else {"updates"})

    def test_is_no_parameter_and_updated_in_place(self):
        loss = lore_loss(tiny_agent(), multiplier_lr=0.1, delta=0.0)
        buffers = {name: id(value) for name, value in loss.named_buffers()}
        loss.advice_terms(latents())
        assert {name: id(value) for name, value in loss.named_buffers()} == buffers
        assert not any("multiplier" in name for name, _ in loss.named_parameters())
        assert not loss.multiplier.requires_grad

    def test_survives_save_and_load(self):
        kwargs = {"multiplier_lr": 0.1, "delta": 0.01, "delta_end": 0.0, "delta_steps": 10}
        loss = lore_loss(tiny_agent(), temperature={"rate": 0.1}, **kwargs)
        for _ in range(3):
            loss.advice_terms(latents())
        resumed = lore_loss(tiny_agent(seed=1), temperature={"rate": 0.1}, **kwargs)
        resumed.load_state_dict(loss.state_dict())
        for _ in range(2):
            expected, found = loss.advice_terms(latents()), resumed.advice_terms(latents())
            assert (expected == found).all()
        assert loss.multiplier > 0 and loss.updates == 5

    def test_reported_metrics_are_copies(self):
        loss = lore_loss(tiny_agent(), multiplier_lr=0.1, delta=0.0, temperature={"rate": 0.5})
        terms = loss.advice_terms(latents())
        before = terms.detach().clone()
        loss.advice_terms(latents())
        assert (terms.detach() == before).all()
        metrics = [key for key in terms.keys() if not key.startswith("loss_")]  # noqa: SIM118
        assert sorted(metrics) == [
            "lore_advised",
            "lore_delta",
            "lore_kl",
            "lore_multiplier",
            "lore_temperature",
        ]
        assert not any(terms[key].requires_grad for key in metrics)

    def test_off_computes_no_constraint(self):
        terms = lore_loss(tiny_agent(), multiplier_lr=0.0).advice_terms(latents())
        assert "loss_lore_constraint" not in terms and "lore_kl" not in terms


class TestDelta:
    def test_schedule_from_loose_to_tight(self):
        loss = lore_loss(tiny_agent(), delta=1.0, delta_end=0.2, delta_steps=4)
        deltas = [loss.advice_terms(latents())["lore_delta"].item() for _ in range(6)]
        assert deltas == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])

    def test_evaluation_does_not_advance_it(self):
        loss = lore_loss(tiny_agent(), delta=1.0, delta_end=0.2, delta_steps=4).eval()
        deltas = [loss.advice_terms(latents())["lore_delta"].item() for _ in range(3)]
        assert deltas == pytest.approx([1.0, 1.0, 1.0])

    def test_constant_by_default(self):
        loss = lore_loss(tiny_agent(), delta=0.3)
        deltas = [loss.advice_terms(latents())["lore_delta"].item() for _ in range(3)]
        assert deltas == pytest.approx([0.3, 0.3, 0.3])


class TestTemperature:
    def test_updated_in_training_only_before_it_is_used(self):
        agent = tiny_agent()
        td = sometimes_advised()
        loss = lore_loss(agent, temperature={"rate": 1.0, "minimum": 0.1, "maximum": 10.0})
        logits, _, valid, *_ = AdviceBatch.clean(*(td[f"llm_{k}"] for k in _NAMES))
        expected = align_temperature(
            log_policy(agent, td), logits, valid, minimum=0.1, maximum=10.0
        )
        assert abs(expected - 1) > 0.1
        loss.eval().advice_terms(td)
        assert loss.mixer.temperature.temperature == 1.0
        terms = loss.train().advice_terms(td)
        torch.testing.assert_close(loss.mixer.temperature.temperature, expected)
        torch.testing.assert_close(terms["lore_temperature"], expected)
        prior = Categorical(logits=logits / expected)
        kl = kl_divergence(prior, Categorical(logits=log_policy(agent, td)))
        torch.testing.assert_close(terms["loss_lore_prior"], 0.3 * weighted(td, kl))


_NAMES = ("prior_logits", "confidence", "mask")


class TestUnusableRows:
    @pytest.mark.parametrize(
        "bad",
        [{"mask": False}, {"prior_logits": NAN}, {"prior_logits": INF}, {"confidence": NAN}],
        ids=str,
    )
    @pytest.mark.parametrize("direction", ["prior_to_policy", "policy_to_prior"])
    def test_change_nothing(self, bad, direction):
        results = []
        for case in ("clean", "bad"):
            agent = tiny_agent()
            loss = lore_loss(
                agent,
                prior_kl=direction,
                bonus_weight=0.2,
                multiplier_init=0.5,
                multiplier_lr=0.1,
                delta=0.0,
                temperature={"rate": 0.5},
            )
            td = latents(9)
            rows = torch.arange(9) % 3 == 0
            if case == "clean":
                td = td[~rows]
            else:
                for name, value in bad.items():
                    td[f"llm_{name}"][rows] = value
            terms = loss.advice_terms(td)
            sum(v for k, v in terms.items() if k.startswith("loss_")).backward()
            results.append((terms.detach(), gradients(agent.actor), loss.multiplier))
        (clean, clean_grads, clean_multiplier), (terms, grads, multiplier) = results
        assert terms.pop("lore_advised").item() == pytest.approx(2 / 3)
        clean.pop("lore_advised")
        for key, value in clean.items():
            torch.testing.assert_close(terms[key], value)
        for name, grad in clean_grads.items():
            torch.testing.assert_close(grads[name], grad)
        torch.testing.assert_close(multiplier, clean_multiplier)


class TestKeys:
    def test_a_renamed_value(self):
        agent = tiny_agent()
        critic = TensorDictModule(torch.nn.Identity(), ["state_value"], ["worth"])
        agent = replace(agent, value=TensorDictSequential(agent.value, critic))
        td = executed()
        td["lore_lambda_return"] = td["lore_return"].roll(1, 0)
        settings = {"bonus_weight": 0.1, "imitation_weight": 1.0}
        expected = lore_loss(agent, **settings).eval().advice_terms(td)
        assert expected["loss_lore_imitation"] > 0
        loss = lore_loss(agent, **settings).eval()
        loss.set_keys(value="worth")
        renamed = td.clone().rename_key_("state_value", "worth")
        assert (loss.advice_terms(renamed) == expected).all()
        losses, _ = loss(renamed)
        assert "loss_lore_prior" in losses and "loss_actor" in losses
        # The critic is asked under the same name.
        del renamed["worth"], td["state_value"]
        expected = lore_loss(agent, **settings).eval().advice_terms(td)
        assert (loss.advice_terms(renamed) == expected).all() and expected["lore_imitated"] > 0

    def test_what_the_wrapped_loss_knows_is_passed_on(self):
        loss = lore_loss(tiny_agent())
        loss.set_keys(belief="hidden", value="worth")
        assert loss.tensor_keys.belief == "hidden"
        assert loss.actor_loss.tensor_keys.belief == "hidden"
        assert loss.actor_loss.tensor_keys.value == "worth"

    def test_none_restores_the_default(self):
        loss = lore_loss(tiny_agent())
        loss.set_keys(belief="hidden")
        loss.set_keys(belief=None)
        assert loss.tensor_keys.belief == "belief"

    def test_unknown_key_is_named(self):
        with pytest.raises(ValueError, match="maks"):
            lore_loss(tiny_agent()).set_keys(maks="m")


class TestAsActorLoss:
    """What DreamerV3ValueLoss and DreamerV3Loss read of the actor loss they are given."""

    def test_value_loss_reads_the_wrapped_discount(self):
        agent = tiny_agent()
        stock, lore = stock_loss(agent), lore_loss(agent)
        torch.manual_seed(1)
        _, imagined = stock(latents())
        values = []
        for actor_loss in (stock, lore):
            value_loss = DreamerV3ValueLoss(
                agent.value,
                value_loss="two_hot",
                num_value_bins=tiny_config().num_bins,
                actor_loss=actor_loss,
            )
            assert value_loss._resolved_gamma() == pytest.approx(0.9)
            values.append(value_loss(imagined.exclude("discount_weight"))[0]["loss_value"])
        assert torch.equal(*values)

    def test_value_estimator_is_that_of_the_wrapped_loss(self):
        loss = lore_loss(tiny_agent())
        loss.make_value_estimator(ValueEstimators.TDLambda, gamma=0.5, lmbda=0.5)
        assert loss.value_estimator is loss.actor_loss.value_estimator
        assert loss.value_estimator.gamma == 0.5

    def test_models_are_those_of_the_wrapped_loss(self):
        agent = tiny_agent()
        loss = lore_loss(agent)
        assert loss.actor_model is agent.actor
        assert loss.value_model is agent.value

    def test_no_parameter_beyond_those_of_the_wrapped_loss(self):
        agent = tiny_agent()
        loss = lore_loss(agent)
        assert {id(p) for p in loss.parameters()} == {id(p) for p in loss.actor_loss.parameters()}


class TestBadArguments:
    @pytest.mark.parametrize(
        ("kwargs", "match"),
        [
            ({"imitation_weight": -1.0}, "imitation_weight.*-1.0"),
            ({"imitation_threshold": NAN}, "imitation_threshold.*nan"),
            ({"prior_weight": -1.0}, "prior_weight.*-1.0"),
            ({"prior_weight": NAN}, "prior_weight.*nan"),
            ({"bonus_weight": -1.0}, "bonus_weight.*-1.0"),
            ({"multiplier_lr": -1.0}, "multiplier_lr.*-1.0"),
            ({"delta": -1.0}, "delta.*-1.0"),
            ({"delta_end": -1.0}, "delta_end.*-1.0"),
            ({"delta_steps": -1}, "delta_steps.*-1"),
            ({"multiplier_init": -0.5}, "-0.5"),
            ({"multiplier_init": 3.0}, "multiplier_init=3.0.*multiplier_max=1.0"),
            ({"prior_kl": "forward"}, "prior_kl.*'forward'"),
        ],
    )
    def test_value_is_in_the_message(self, kwargs, match):
        with pytest.raises(ValueError, match=match):
            lore_loss(tiny_agent(), **kwargs)

    def test_constraint_needs_gate_and_mixer(self):
        stock = stock_loss(tiny_agent())
        gate = UncertaintyGate()
        for kwargs in ({}, {"gate": gate}, {"mixer": LogitMixer()}):
            with pytest.raises(ValueError, match="gate and mixer"):
                wrap(stock, multiplier_lr=1e-3, **kwargs)
        wrap(stock)

    def test_the_gate_and_the_ensemble_must_agree(self):
        ensemble = ValueEnsemble(STATE, BELIEF, hidden_dim=8)
        for source, given in (("two_hot", ensemble), ("ensemble", None)):
            gate = UncertaintyGate(value_weight=0.3, value_source=source)
            parts = {"gate": gate, "mixer": LogitMixer(), "value_ensemble": given}
            with pytest.raises(ValueError, match=f"value_source='{source}'.*value_ensemble with"):
                wrap(stock_loss(tiny_agent()), **parts, multiplier_lr=1e-3)
            wrap(stock_loss(tiny_agent()), **parts, gated=False)

    def test_what_is_no_actor_loss_is_named(self):
        with pytest.raises(TypeError, match="Linear"):
            wrap(torch.nn.Linear(1, 1))


def test_advice_terms_compile_without_a_graph_break():
    settings = {"imitation_weight": 3.0, "bonus_weight": 0.1, "multiplier_init": 0.5, "delta": 0.0}
    loss = tiny_learner(lore_config(temperature={"rate": 0.1}, **settings)).loss.actor_loss
    bandit = AdviceBandit()
    loss.set_bandit(bandit)
    state = {name: value.clone() for name, value in loss.state_dict().items()}
    compiled = torch.compile(loss.advice_terms, fullgraph=True, backend="eager")
    td = executed()
    td["action"] = followed(td)
    td["lore_lambda_return"] = td["lore_return"]
    td["lore_return"] = 2.0 + REAL.unsqueeze(-1)
    imitated = set()
    for p in (0.95, 0.05):  # which the compiled terms read anew
        bandit.log_odds.fill_(p).logit_()
        loss.load_state_dict(state)
        expected = loss.advice_terms(td)
        loss.load_state_dict(state)
        found = compiled(td)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value)
        imitated.add(expected["loss_lore_imitation"].item())
    assert len(imitated) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_advice_terms_on_cuda_are_those_of_the_cpu_compiled_or_not():
    agent = tiny_agent()
    lore = lore_around(lore_config(), agent).actor
    loss = wrap(stock_loss(agent), gate=lore.gate, mixer=lore.mixer, **ON_DEVICE).eval()
    td = executed()
    td["action"] = followed(td)
    found = {"cpu": loss.advice_terms(td)}
    loss = loss.cuda()
    found["cuda"] = loss.advice_terms(td.to("cuda"))
    found["compiled"] = torch.compile(loss.advice_terms, fullgraph=True)(td.to("cuda"))
    for key, value in found["cpu"].items():
        for where in ("cuda", "compiled"):
            torch.testing.assert_close(found[where][key].cpu(), value, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_advice_terms_never_wait_for_the_device():
    agent = tiny_agent(device="cuda")
    lore = lore_around(lore_config(temperature={"rate": 0.1}), agent).actor
    loss = wrap(stock_loss(agent), gate=lore.gate, mixer=lore.mixer, **ON_DEVICE).cuda()
    loss.set_bandit(AdviceBandit().cuda())
    td = executed()
    td["action"] = followed(td)
    td = td.to("cuda")
    loss.advice_terms(td)
    torch.cuda.set_sync_debug_mode("error")
    try:
        terms: TensorDict = loss.advice_terms(td)
        sum(v for k, v in terms.items() if k.startswith("loss_")).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert terms["loss_lore_constraint"].is_cuda and loss.multiplier.item() > 0


def test_one_aligner_serves_policy_and_loss():
    agent = tiny_agent()
    aligner = TemperatureAligner(rate=0.5)
    mixer = LogitMixer(temperature=aligner)
    loss = wrap(stock_loss(agent), mixer=mixer, prior_weight=0.3)
    loss.advice_terms(latents())
    assert aligner.temperature != 1.0 and mixer.temperature is aligner


def test_gated_terms_are_scaled_by_the_gate():
    agent, td = tiny_agent(), sometimes_advised()
    gate = {"tau": 0.6, "kappa": 30.0, "beta_max": 2.0, "value_weight": 0.0}
    off = {"multiplier_lr": 0.0, "prior_weight": 0.7, "bonus_weight": 0.2}
    loss = lore_loss(agent, gate=gate, gated=True, **off)
    log_p = log_policy(agent, td)
    share = loss.gate.evaluate(loss.mixer.policy.entropy(log_p).detach()).beta.squeeze(-1) / 2.0
    assert share.min() < 0.2 and share.max() > 0.8
    log_prior = torch.log_softmax(AdviceBatch.clean(*advice_of(td)).prior_logits, -1)
    kl = (log_prior.exp() * (log_prior - log_p)).sum(-1)
    terms = loss.advice_terms(td)
    torch.testing.assert_close(terms["loss_lore_prior"], 0.7 * weighted(td, share * kl))
    expected = (log_p.exp() * log_prior).sum(-1)
    torch.testing.assert_close(terms["loss_lore_bonus"], -0.2 * weighted(td, share * expected))


def advice_of(td):
    return td["llm_prior_logits"], td["llm_confidence"], td["llm_mask"]


def test_the_temperature_adapts_where_no_term_of_advice_is_on():
    agent = tiny_agent()
    aligner = TemperatureAligner(rate=0.5)
    loss = wrap(stock_loss(agent), mixer=LogitMixer(temperature=aligner))
    terms = loss.advice_terms(latents())
    assert "loss_lore_prior" not in terms and "loss_lore_constraint" not in terms
    assert aligner.temperature != 1.0
