"""Planning on small analytic dynamics with a known optimum, and behind the gate."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent / "policies"))

from dreamer_sample import lore_around
from kinds import EACH, A, actor_of, kind_of
from test_lore_actor import open_gate, run
from tiny_run import DREAMER

from lore_torchrl import LoRe, keys
from lore_torchrl.configs import GateConfig, LoReConfig, PlannerConfig
from lore_torchrl.dreamer.agent import build_agent
from lore_torchrl.dreamer.metrics import policy_metrics
from lore_torchrl.modules import (
    LatentPlanner,
    LogitMixer,
    LoReActor,
    PriorNet,
    TemperatureAligner,
    WorldModel,
)

LATENT = ["state", "belief"]
METHODS = pytest.mark.parametrize("method", ["cem", "mppi"])
CODE = (2, 0, 3, 3, 1)


def world_of(step, continuation=torch.ones_like) -> WorldModel:
    """A world model of plain functions; the critic expects nothing."""
    return WorldModel(
        SimpleNamespace(
            world_model=TensorDictModule(step, [*LATENT, "action"], [*LATENT, "reward"])
        ),
        TensorDictModule(continuation, ["belief"], ["continuation"]),
        TensorDictModule(torch.zeros_like, ["belief"], ["state_value"]),
    )


def greedy_trap(state, belief, action):
    """Action 0 is rewarded once and ends the episode, 1 opens what 2 is then rewarded for."""
    opened = state[..., 1:2] + (state[..., :1] * action[..., 1:2])
    dead = (belief + action[..., :1]).clamp(max=1.0)
    shut = 1.0 - opened
    reward = 0.5 * action[..., :1] + state[..., 1:2] * action[..., 2:3] + belief
    return torch.cat((shut, opened, torch.zeros_like(shut)), -1), dead, reward


def lock(state, belief, action):
    """A reward for the whole code alone; ``belief`` counts the right actions."""
    code = torch.tensor(CODE)[belief.long().clamp(0, len(CODE) - 1)]
    belief = torch.where(action.argmax(-1, keepdim=True) == code, belief + 1.0, -10.0)
    return state, belief, (belief == len(CODE)).float()


def reach(state, belief, action):
    """The action moves a point, which is to be at (1, 1.5) from the first step on."""
    place = state[..., :2] + action
    reward = -(place - torch.tensor([1.0, 1.5])).square().sum(-1, keepdim=True)
    return torch.cat((place, state[..., 2:]), -1), belief, reward


def rows(*batch: int, **entries) -> TensorDict:
    state = torch.tensor([1.0, 0.0, 0.0]).expand(*batch, 3)
    return TensorDict({"state": state, "belief": torch.zeros(*batch, 1), **entries}, batch)


def points(*batch: int) -> TensorDict:
    return rows(*batch).set("state", torch.zeros(*batch, 3))


def planner_of(name: str, world: WorldModel, **settings) -> LatentPlanner:
    torch.manual_seed(0)
    return LatentPlanner(world, actor_of(name), kind_of(name), **settings)


def trapped(**settings) -> LatentPlanner:
    world = world_of(greedy_trap, lambda belief: 1.0 - belief)
    return planner_of("categorical", world, **{"horizon": 4, "method": "cem", **settings})


class TestOptimum:
    @METHODS
    @pytest.mark.parametrize("seed", ["policy", "uniform"])
    @pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
    def test_discrete(self, method, seed, batch):
        planner = trapped(method=method, seed=seed, samples=512, temperature=0.3)
        td = planner(rows(*batch))
        assert td["planner_logits"].shape == (*batch, A)
        assert (td["planner_logits"].argmax(-1) == 1).all()
        assert td["planner_score"].shape == td["planner_seed_score"].shape == (*batch, 1)
        assert (td["planner_score"] > td["planner_seed_score"] + 0.3).all()
        plan = planner.plan(rows(*batch)).policy
        torch.testing.assert_close(plan.exp().sum(-1), torch.ones(batch))

    @METHODS
    @pytest.mark.parametrize("name", ["normal", "tanh_normal"])
    @pytest.mark.parametrize("batch", [(), (2, 3)])
    def test_continuous(self, method, name, batch):
        world = world_of(reach)
        planner = planner_of(name, world, method=method, horizon=2, samples=256, iterations=5)
        plan = planner.plan(points(*batch))
        assert plan.policy.loc.shape == plan.policy.scale.shape == (*batch, 2)
        apart = planner.kind.squash(plan.policy.loc) - torch.tensor([1.0, 1.5])
        assert apart.norm(dim=-1).max() < 0.4
        assert (plan.score > plan.seed_score).all()
        # The nearest of the named actions is the best advice.
        logits = planner(points(*batch))["planner_logits"]
        nearest = planner.kind.nearest(torch.tensor([1.0, 1.5]))
        assert (logits.argmax(-1, keepdim=True) == nearest).all()

    def test_without_its_continuation_the_trap_catches(self):
        planner = planner_of(
            "categorical", world_of(greedy_trap), method="cem", horizon=4, samples=128
        )
        assert (planner(rows(5))["planner_logits"].argmax(-1) == 0).all()

    def test_the_score_is_the_lambda_return_by_hand(self):
        planner = trapped(lmbda=0.8)
        actions = nn.functional.one_hot(torch.tensor([[1, 2, 2, 0], [0, 2, 2, 2]]), A).float()
        td = rows(2)
        found = planner.score(td["state"], td["belief"], actions).flatten()
        # The critic is 0: later rewards count for 0.8 to the power of their step.
        expected = [0.8 + 0.8**2 + 0.8**3 * 0.5, 0.5]
        torch.testing.assert_close(found, torch.tensor(expected))

    def test_where_all_scores_are_alike_mppi_keeps_the_advice(self):
        def nothing(state, belief, action):
            return state, belief, torch.zeros_like(belief)

        given = {
            "llm_prior_logits": torch.tensor([[0.0, 0.0, 0.0, 9.0]]).expand(50, -1),
            "llm_confidence": torch.ones(50, 1),
            "llm_mask": torch.ones(50, 1, dtype=torch.bool),
        }
        planner = planner_of("categorical", world_of(nothing), samples=16)
        assert (planner(rows(50, **given))["planner_logits"].argmax(-1) == 3).all()

    def test_there_is_no_gradient(self):
        planner = trapped()
        plan = planner.plan(rows(2))
        assert not any(entry.requires_grad for entry in plan)
        assert not any(parameter.grad is not None for parameter in planner.parameters())


class TestSeed:
    def test_a_plan_finds_what_chance_does_not_with_fewer_samples(self):
        plan = torch.tensor(CODE).expand(6, -1)
        settings = {"method": "cem", "horizon": len(CODE), "elites": 4, "iterations": 2}
        seeded = planner_of("categorical", world_of(lock), seed="plan", samples=16, **settings)
        blind = planner_of("categorical", world_of(lock), seed="uniform", samples=64, **settings)
        found, missed = (p.plan(rows(6, llm_plan=plan)) for p in (seeded, blind))
        assert (found.policy.argmax(-1) == CODE[0]).all()
        assert found.score.mean() > 0.3 and missed.score.mean() < 0.05

    @pytest.mark.parametrize("advised", [True, False])
    def test_an_answer_leans_the_first_step(self, advised):
        planner = trapped(seed="advice", iterations=1, samples=2000)
        given = {
            "llm_prior_logits": torch.tensor([[0.0, 0.0, 0.0, 9.0]]).expand(2, -1),
            "llm_confidence": torch.ones(2, 1),
            "llm_mask": torch.tensor([[advised], [False]]),
        }
        sequence = planner._seed(rows(2, **given))
        policy = planner._seed(rows(2))
        torch.testing.assert_close(sequence[1, 0], policy[1, 0])
        leaned = 0.2 * policy[0, 0].exp() + 0.8 * torch.tensor([0.0, 0.0, 0.0, 1.0])
        expected = leaned if advised else policy[0, 0].exp()
        torch.testing.assert_close(sequence[0, 0].exp(), expected, atol=1e-3, rtol=0)

    def test_wrong_advice_is_overruled(self):
        given = {
            "llm_prior_logits": torch.tensor([[9.0, 0.0, 0.0, 0.0]]).expand(8, -1),
            "llm_confidence": torch.ones(8, 1),
            "llm_mask": torch.ones(8, 1, dtype=torch.bool),
        }
        planner = trapped(seed="advice", samples=256)
        assert (planner(rows(8, **given))["planner_logits"].argmax(-1) == 1).all()

    def test_where_a_plan_ends_the_policy_goes_on(self):
        planner = trapped(seed="plan")

        def seed(**entries):
            torch.manual_seed(5)
            return planner._seed(rows(2, **entries))

        policy = seed()
        assert torch.equal(seed(llm_plan=torch.full((2, 4), -1)), policy)
        found = seed(llm_plan=torch.tensor([[-1, -1], [2, -1]]))
        assert torch.equal(found[0], policy[0])
        assert found[1, 0].exp()[2] > 0.8 and torch.equal(found[1, 2:], policy[1, 2:])

    @EACH
    def test_a_plan_is_followed_with_a_probability(self, name):
        step = greedy_trap if name == "categorical" else reach
        planner = planner_of(name, world_of(step), seed="plan", horizon=3)
        plan = torch.tensor([[2, 3, -1]]).expand(4, -1)
        sequence, kind = planner._seed(points(4).set("llm_plan", plan)), planner.kind
        entries = (entry[:, :2] for entry in kind.entries(sequence))
        taken = kind.nearest(kind.sample(kind.read(*entries), 500))
        followed = (taken.squeeze(-1) == plan[:, :2]).float().mean((0, 1))
        assert (followed > 0.5).all()


@EACH
def test_a_kind_fits_what_it_draws_and_blends(name):
    kind = kind_of(name)
    policy = kind.read(*actor_entries(name))
    drawn = kind.sample(policy, 20_000)
    even = torch.full((20_000, 2, 1), 1 / 20_000)
    fitted = kind.fit(drawn, even)
    for one, other in zip(kind.entries(fitted), kind.entries(policy), strict=True):
        torch.testing.assert_close(one, other, atol=0.06, rtol=0.1)
    other = kind.read(*actor_entries(name))
    for weight, expected in ((1.0, policy), (0.0, other)):
        torch.testing.assert_close(kind.blend(policy, other, weight), expected)
    # A blend is what the draws of both are fitted by.
    both = torch.cat((drawn[:5000], kind.sample(other, 15_000)))
    blended = kind.blend(policy, other, 0.25)
    for one, two in zip(kind.entries(kind.fit(both, even)), kind.entries(blended), strict=True):
        torch.testing.assert_close(one, two, atol=0.06, rtol=0.1)


def actor_entries(name: str) -> list[torch.Tensor]:
    """Two rows of logits, or of location and scale inside the range of the anchors."""
    if name == "categorical":
        return [torch.randn(2, A)]
    return [0.5 * torch.randn(2, 2), 0.2 + 0.3 * torch.rand(2, 2)]


@pytest.mark.parametrize("name", ["categorical", "tanh_normal"])
def test_compiles_without_a_graph_break(name):
    step = greedy_trap if name == "categorical" else reach
    planner = planner_of(name, world_of(step), horizon=2, iterations=1, samples=8)
    td = points(3)
    torch.manual_seed(1)
    expected = planner.plan(td)
    compiled = torch.compile(planner.plan, fullgraph=True, backend="eager")
    torch.manual_seed(1)
    torch.testing.assert_close(compiled(td), expected)


class TestBehindTheGate:
    def acting(self, name="categorical", *, max_kl=0.5, beta_max=1.0, **parts) -> LoReActor:
        if name == "categorical":
            planner = trapped(samples=128)
        else:
            planner = planner_of(name, world_of(reach), horizon=2)
        mixer = LogitMixer(planner.kind, max_kl=max_kl)
        return LoReActor(
            planner.actor, open_gate(beta_max=beta_max), mixer, planner=planner, **parts
        )

    def advised(self, n=20, mask=False):
        return rows(
            n,
            llm_prior_logits=torch.tensor([[0.0, 0.0, 0.0, 5.0]]).expand(n, -1),
            llm_confidence=torch.ones(n, 1),
            llm_mask=torch.full((n, 1), mask),
        )

    @EACH
    @pytest.mark.parametrize("max_kl", [0.05, 1.0])
    def test_it_moves_the_policy_within_the_bound(self, name, max_kl):
        td = self.advised()
        out, _ = run(self.acting(name, max_kl=max_kl), td)
        assert (out[keys.KL] <= max_kl + 1e-5).all() and (out[keys.KL] > 0.01 * max_kl).all()
        if name == "categorical":
            mixed, own = (out[key].softmax(-1)[:, 1] for key in (keys.MIX_LOGITS, "logits"))
            assert (mixed > own).all()

    def test_shut_gate_and_zero_coefficient_leave_the_policy_bitwise(self):
        td = self.advised().set(keys.COEFFICIENT, torch.zeros(20, 1))
        for actor, given in (
            (self.acting(beta_max=0.0), td.exclude(keys.COEFFICIENT)),
            (self.acting(), td),
        ):
            out, _ = run(actor, given)
            assert torch.equal(out[keys.MIX_LOGITS], out["logits"])

    def test_without_entries_of_advice_it_is_the_stock_actor(self):
        actor, td = self.acting(), rows(4)
        (found, state), (stock, expected) = run(actor, td), run(actor.actor, td)
        assert torch.equal(found["action"], stock["action"]) and torch.equal(state, expected)

    def test_a_score_that_is_no_number_leaves_the_answer(self):
        actor = self.acting()
        actor.planner.world = world_of(lambda s, b, a: (s, b, torch.full_like(b, math.nan)))
        plain = LoReActor(actor.actor, open_gate(), actor.mixer)
        td = self.advised(mask=True)
        found, expected = run(actor, td)[0], run(plain, td)[0]
        assert torch.equal(found[keys.MIX_LOGITS], expected[keys.MIX_LOGITS])

    def test_what_was_mixed_in_is_explained(self):
        actor = self.acting()
        out, _ = run(actor, self.advised(mask=True))
        _, advice = actor.explain(out)
        logits = out[keys.PLANNER_LOGITS]
        torch.testing.assert_close(advice.prior_logits, logits - logits.mean(-1, keepdim=True))
        assert (advice.weight == 1).all()

    def test_the_advisors_temperature_leaves_the_plan_alone(self):
        actor, td = self.acting(max_kl=math.inf), self.advised()
        plain, _ = run(actor, td)
        actor.mixer.temperature = TemperatureAligner(init=2.0)
        out, _ = run(actor, td)
        torch.testing.assert_close(out[keys.MIX_LOGITS], plain[keys.MIX_LOGITS])

    def test_the_decision_compiles(self):
        torch._dynamo.reset()  # what other tests have compiled counts towards its limit
        plain, compiled = self.acting(), self.acting()
        compiled.compile_decision(backend="eager", fullgraph=True)
        td = self.advised()
        found, expected = run(compiled, td)[0], run(plain, td)[0]
        torch.testing.assert_close(found[keys.MIX_LOGITS], expected[keys.MIX_LOGITS])


class TestWiring:
    def agent(self):
        return build_agent(DREAMER, observation_dim=5, num_actions=A)

    def config(self, **settings):
        small = {"enabled": True, "horizon": 2, "samples": 4, "elites": 2, "iterations": 2}
        planner = PlannerConfig(**{**small, **settings})
        return LoReConfig(planner=planner, gate=GateConfig(value_weight=0.0))

    def latents(self, agent):
        td = TensorDict(state=torch.zeros(3, agent.state_dim), batch_size=[3])
        td["belief"] = torch.zeros(3, agent.belief_dim)
        td["llm_prior_logits"], td["llm_confidence"] = torch.zeros(3, A), torch.ones(3, 1)
        return td.set("llm_mask", torch.zeros(3, 1, dtype=torch.bool))

    def test_on_the_networks_of_an_agent(self):
        agent = self.agent()
        actor = lore_around(self.config(), agent).actor
        out, _ = run(actor, self.latents(agent))
        metrics = policy_metrics(out)
        assert math.isfinite(metrics["planner/score"] + metrics["planner/seed_score"])
        assert {id(p) for p in actor.planner.world.parameters()} <= {
            id(p) for part in (agent.world_model, agent.value) for p in part.parameters()
        }

    def test_off_it_is_not_built_and_draws_nothing(self):
        agent = self.agent()
        actor = lore_around(self.config(enabled=False), agent).actor
        assert actor.planner is None
        td = self.latents(agent)
        (found, state), (stock, expected) = run(actor, td), run(agent.actor, td)
        assert torch.equal(found["action"], stock["action"]) and torch.equal(state, expected)
        assert "planner/score" not in policy_metrics(found) and keys.PLANNER_SCORE not in found

    def test_only_cem_has_elites(self):
        assert PlannerConfig(method="mppi", elites=9, samples=8).samples == 8

    def test_a_world_is_asked_for(self):
        agent, nobody = self.agent(), SimpleNamespace(actions=list("abcd"), advise=None)
        settings = {"actor": agent.actor, "value": agent.value, "advisor": nobody}
        with pytest.raises(ValueError, match=r"planner\.enabled.*world=WorldModel"):
            LoRe(self.config(), describer=nobody, **settings)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"method": "cem", "elites": 9, "samples": 8}, "elites=9"),
            ({"horizon": 0}, "horizon"),
            ({"method": "random"}, "method"),
            ({"seed": "llm"}, "seed"),
            ({"temperature": 0.0}, "temperature"),
        ],
    )
    def test_impossible_settings_name_themselves(self, settings, message):
        with pytest.raises(ValueError, match=rf"lore\.planner\.{message}"):
            trapped(**settings)

    def test_another_kind_of_policy_is_refused(self):
        with pytest.raises(ValueError, match="actor"):
            LatentPlanner(world_of(reach), actor_of("normal"))

    def test_beside_it_prior_net_is_told_of_as_before(self):
        actor = lore_around(self.config(), self.agent()).actor
        net = PriorNet(32, A, num_cells=8, threshold=0.0)
        both = LoReActor(
            actor.actor, open_gate(), actor.mixer, planner=actor.planner, prior_net=net
        )
        out, _ = run(both, self.latents(self.agent()))
        assert (out[keys.ORIGIN] == keys.ORIGIN_PRIOR_NET).all()
