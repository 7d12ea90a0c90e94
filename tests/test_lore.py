"""LoRe: one object hands out transform, policy and loss, and tells of what was forgotten."""

from __future__ import annotations

import copy
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("minigrid")

from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import InitTracker, PendulumEnv, TensorDictPrimer
from torchrl.envs.utils import ExplorationType

from lore_torchrl import LoRe, LoReActorLoss, LoReConfig
from lore_torchrl.advisors.scripted import ScriptedAdvisor
from lore_torchrl.configs import BanditConfig, CallsConfig, GateConfig, PriorNetConfig
from lore_torchrl.configs.lore import (
    EpsilonConfig,
    FeaturesConfig,
    ProgressConfig,
    SamplingConfig,
    SubgoalConfig,
)
from lore_torchrl.dreamer.agent import build_agent
from lore_torchrl.envs.minigrid import MiniGrid, MiniGridDescriber, MiniGridPlanner

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from tiny_run import DREAMER

from pipeline import stock_losses


@pytest.fixture
def env_and_agent():
    env = MiniGrid("MiniGrid-DoorKey-5x5-v0").make_env(num_envs=2, seed=0)
    agent = build_agent(
        DREAMER,
        observation_dim=env.observation_spec["observation"].shape[-1],
        num_actions=env.action_spec.shape[-1],
    )
    env = env.append_transform(InitTracker())
    return env.append_transform(TensorDictPrimer(agent.primers(), expand_specs=True)), agent


def make(agent, config: LoReConfig | None = None, **settings) -> LoRe:
    return LoRe(
        config,
        actor=agent.actor,
        value=agent.value,
        advisor=ScriptedAdvisor(MiniGridPlanner()),
        describer=MiniGridDescriber(),
        **settings,
    )


def collect(env, policy, batches: int = 1):
    return Collector(
        env,
        policy,
        frames_per_batch=8,
        total_frames=8 * batches,
        exploration_type=ExplorationType.RANDOM,
    )


def test_the_three_places_fit_together(env_and_agent, recwarn):
    env, agent = env_and_agent
    torch.manual_seed(0)
    with make(agent, LoReConfig(calls=CallsConfig(budget=3))) as lore:
        env = lore.advise(env)
        collector = collect(env, agent.policy(lore.policy()), batches=4)
        for batch in collector:
            lore.observe(batch)
        assert lore.service.budget.spent == 3
        assert {"llm_prior_logits", "llm_confidence", "llm_mask", "lore_beta"} <= set(batch.keys())
        assert lore.stats()["advice/calls"] == 3 and "bandit/probability" in lore.stats()
        collector.shutdown(close_env=False)
    # Nothing that an adopter did not cause.
    assert not [w for w in recwarn if "make_tensordict_primer" in str(w.message)]


def test_segments_of_whole_episodes_need_nothing_more(env_and_agent):
    _, agent = env_and_agent
    env = MiniGrid("MiniGrid-DoorKey-5x5-v0").make_env(num_envs=2, seed=0)
    with make(agent, LoReConfig(bandit=BanditConfig(segment_steps=None))) as lore:
        first = lore.advise(env).reset()
        lore.bandit(first)
        assert first["is_init"].all() and set(first["lore_coefficient"].flatten().tolist()) <= {
            0,
            1,
        }


def test_the_loss_shares_gate_and_mixer_with_the_policy(env_and_agent):
    _, agent = env_and_agent
    with make(agent) as lore:
        loss = lore.loss(*stock_losses(agent, DREAMER))
        assert loss.actor_loss.gate is lore.actor.gate
        assert loss.actor_loss.mixer is lore.actor.mixer
        assert not list(lore.parameters())


def test_a_describer_names_its_actions(env_and_agent):
    _, agent = env_and_agent
    describer = MiniGridDescriber()
    describer.actions = None
    networks = {"actor": agent.actor, "value": agent.value}
    with pytest.raises(ValueError, match=r"MiniGridDescriber\.actions must name the actions"):
        LoRe(**networks, advisor=ScriptedAdvisor(MiniGridPlanner()), describer=describer)


def test_learned_parts_are_built_where_they_are_on(env_and_agent):
    _, agent = env_and_agent
    config = LoReConfig(prior_net=PriorNetConfig(enabled=True))
    with pytest.raises(ValueError, match="latent_sizes"):
        make(agent, config)
    with pytest.raises(ValueError, match=r"latent_sizes must be \(state, belief\)"):
        make(agent, config, latent_sizes=(agent.state_dim,))
    with make(agent, config, latent_sizes=(agent.state_dim, agent.belief_dim)) as lore:
        assert list(lore.parameters()) == list(lore.actor.prior_net.parameters())


def test_a_describer_needs_no_abstract_states(env_and_agent):
    env, agent = env_and_agent

    class Exact:
        def __init__(self, inner):
            self.in_keys, self.actions = inner.in_keys, inner.actions
            self.observe, self.cache_key, self.request = (
                inner.observe,
                inner.cache_key,
                inner.request,
            )

    with LoRe(
        actor=agent.actor,
        value=agent.value,
        advisor=ScriptedAdvisor(MiniGridPlanner()),
        describer=Exact(MiniGridDescriber()),
    ) as lore:
        collector = collect(lore.advise(env), agent.policy(lore.policy()), batches=2)
        for batch in collector:
            lore.observe(batch)
        collector.shutdown(close_env=False)
        stats = lore.stats()
        assert stats["advice/calls"] > 0 and stats["advice/cache_shared_hits"] == 0


def test_nothing_is_built_for_the_baseline(env_and_agent):
    with pytest.raises(ValueError, match=r"lore\.enabled"):
        make(env_and_agent[1], LoReConfig(enabled=False))


def test_progress_goes_on_where_it_was_saved(env_and_agent):
    env, agent = env_and_agent
    config = LoReConfig(calls=CallsConfig(budget=2), gate=GateConfig(value_weight=0.0))
    with make(agent, config) as lore:
        collector = collect(lore.advise(env), agent.policy(lore.policy()), batches=2)
        for batch in collector:
            lore.observe(batch)
        collector.shutdown(close_env=False)
        saved = copy.deepcopy(lore.state_dict())
    with make(agent, config) as again:
        again.load_state_dict(saved)
        assert again.service.budget.spent == 2
        assert again.actor.gate.steps == lore.actor.gate.steps > 0
        for name, value in lore.bandit.state_dict().items():
            torch.testing.assert_close(again.bandit.state_dict()[name], value)


def test_what_came_late_is_counted_on(env_and_agent):
    agent = env_and_agent[1]
    with make(agent, LoReConfig(calls=CallsConfig(mode="async"))) as lore:
        lore.late.written, lore.late.missed = 5, 2
        saved = copy.deepcopy(lore.state_dict())
        lore.late.written = lore.late.missed = 0
        lore.load_state_dict(saved)
        assert (lore.stats()["advice/late_rows"], lore.stats()["advice/late_rows_missed"]) == (5, 2)
    with make(agent, LoReConfig()) as blocking:
        blocking.load_state_dict(saved)


@pytest.mark.parametrize("case", ["stock", "copy", "own"])
def test_a_policy_that_is_not_the_losses_is_told_of(env_and_agent, case, monkeypatch):
    env, agent = env_and_agent
    told = []
    monkeypatch.setattr("lore_torchrl.lore.torchrl_logger.warning", told.append)
    config = LoReConfig(calls=CallsConfig(budget=0), bandit=BanditConfig(enabled=False))
    with make(agent, config) as lore:
        lore.loss(*stock_losses(agent, DREAMER))
        policies = {"stock": agent.actor, "own": lore.policy()}
        policies["copy"] = copy.deepcopy(policies["own"])
        collector = collect(lore.advise(env), agent.policy(policies[case]), batches=12)
        for batch in collector:
            lore.observe(batch)
        collector.shutdown(close_env=False)
    expected = {"stock": "put lore.policy()", "copy": "acts with a copy", "own": ""}[case]
    assert (len(told) == 1 and expected in told[0]) if expected else not told


def test_a_truncated_episode_goes_on_with_what_episodes_return(env_and_agent):
    agent = env_and_agent[1]
    with make(agent, LoReConfig()) as lore:
        value = lore.returns().value
        records = TensorDict(state=torch.zeros(1, agent.state_dim), batch_size=[1])
        records["belief"] = torch.zeros(1, agent.belief_dim)
        critic = value(records)
        loss = lore.loss(*stock_losses(agent, DREAMER)).actor_loss
        # Before anything was rewarded what a critic expects is noise.
        assert value(records) == 0.0
        for low, high in ((-2.0, -1.0), (-1.0, 1.0), (1.0, 2.0)):
            loss.least_return.fill_(critic.item() + low)
            loss.greatest_return.fill_(critic.item() + high)
            expected = critic + min(max(0.0, low), high)
            torch.testing.assert_close(value(records), expected)


def test_wiring_that_is_forgotten_is_told_of(env_and_agent, monkeypatch):
    env, agent = env_and_agent
    told = []
    monkeypatch.setattr("lore_torchrl.lore.torchrl_logger.warning", told.append)
    with make(agent, LoReConfig(calls=CallsConfig(budget=0))) as lore:
        with pytest.raises(KeyError, match=r"env = lore\.advise\(env\)"):
            collect(env, agent.policy(lore.policy()))
        collector = collect(lore.advise(env), agent.policy(lore.policy()), batches=12)
        for batch in collector:
            with pytest.raises(ValueError, match="before the batch is flattened"):
                lore.observe(batch.reshape(-1))
            # As a SelectTransform does that does not know of them.
            lore.observe(batch.exclude("lore_kl", "lore_coefficient"))
        assert len(told) == 1 and "lore.selected_keys" in told[0]
        assert lore.bandit.advised_segments == 0
        kept = batch.select(*lore.selected_keys, ("next", "reward"), ("next", "done"))
        for _ in range(12):
            lore.observe(kept)
        collector.shutdown(close_env=False)
    assert len(told) == 1, "no loss is asked for after the tenth batch alone"


def test_advice_without_a_loss_is_told_of(env_and_agent, monkeypatch):
    env, agent = env_and_agent
    told = []
    monkeypatch.setattr("lore_torchrl.lore.torchrl_logger.warning", told.append)
    with make(agent, LoReConfig(calls=CallsConfig(budget=0))) as lore:
        collector = collect(lore.advise(env), agent.policy(lore.policy()), batches=12)
        for batch in collector:
            lore.observe(batch)
        collector.shutdown(close_env=False)
    assert len(told) == 1 and "nothing is learned from it" in told[0]


def test_what_is_no_configuration_and_no_progress_is_refused(env_and_agent, monkeypatch):
    agent = env_and_agent[1]
    with pytest.raises(TypeError, match=r"NoneType.*LoReActorLoss\(actor_loss\)"):
        LoRe(actor=agent.actor, value=agent.value, advisor=None, describer=None)
    with pytest.raises(TypeError, match=r"must be a LoReConfig, got dict.*OmegaConf"):
        make(agent, {"calls": {"budget": 3}})
    with make(agent, LoReConfig()) as lore:
        saved = lore.state_dict()
        for missing in (set(saved), {"bandit"}):
            rest = {name: part for name, part in saved.items() if name not in missing}
            with pytest.raises(KeyError, match=f"no .*{missing.copy().pop()}.*other parts on"):
                lore.load_state_dict(rest)
    told = []
    monkeypatch.setattr("lore_torchrl.lore.torchrl_logger.warning", told.append)
    with make(agent, LoReConfig(bandit=BanditConfig(enabled=False))) as lore:
        lore.load_state_dict(saved)
    assert len(told) == 1 and "bandit of the state_dict() is off here" in told[0]


@pytest.mark.parametrize(
    ("part", "value", "named"),
    [
        ("features", FeaturesConfig(enabled=True), "features.enabled"),
        ("progress", ProgressConfig(enabled=True), "progress.enabled"),
        ("sampling", SamplingConfig(kind="success"), "sampling.kind"),
        ("epsilon", EpsilonConfig(eps_init=0.1), "epsilon.eps_init"),
        ("subgoal", SubgoalConfig(enabled=True, condition=True), "subgoal.condition"),
    ],
)
def test_what_lore_does_not_build_is_refused(env_and_agent, part, value, named):
    with pytest.raises(ValueError, match=rf"\['{re.escape(named)}'\] to work"):
        make(env_and_agent[1], LoReConfig(**{part: value}))


def test_a_loss_with_another_discount_is_told_of(env_and_agent, caplog):
    agent = env_and_agent[1]
    with make(agent) as lore:
        lore.loss(*stock_losses(agent, DREAMER))
        assert not caplog.records
        lore.loss(*stock_losses(agent, DREAMER), continuation_horizon=50)
    assert [r.getMessage().split("pass ")[-1] for r in caplog.records] == ["LoRe(discount=0.98)."]


def test_parts_that_do_not_belong_together_are_refused(env_and_agent):
    env, agent = env_and_agent
    other = build_agent(DREAMER, observation_dim=5, num_actions=env.action_spec.shape[-1])
    losses = stock_losses(agent, DREAMER)
    with make(other) as lore:
        with pytest.raises(ValueError, match="trains another actor"):
            lore.loss(*losses)
        with pytest.raises(ValueError, match=r"SerialEnv\(1, make\)"):
            lore.advise(PendulumEnv())
        with pytest.raises(ValueError, match="asks for advice already"):
            lore.advise(lore.advise(env))
    with pytest.raises(TypeError, match="must be a LossConfig, got LoReConfig"):
        LoReActorLoss(losses[1], LoReConfig())


@pytest.mark.parametrize("restored", [False, True])
def test_advice_that_was_not_restored_is_told_of(env_and_agent, restored, monkeypatch):
    env, agent = env_and_agent
    told = []
    monkeypatch.setattr("lore_torchrl.lore.torchrl_logger.warning", told.append)
    with make(agent, LoReConfig(calls=CallsConfig(budget=3))) as lore:
        loss = lore.loss(*stock_losses(agent, DREAMER))
        loss.actor_loss.updates.fill_(7)  # as of a checkpoint
        if restored:  # alone, as the training script does
            lore.service.load_state_dict(lore.service.state_dict())
        collector = collect(lore.advise(env), agent.policy(lore.policy()))
        for batch in collector:
            lore.observe(batch)
        collector.shutdown(close_env=False)
    assert len(told) == (0 if restored else 1)
    assert restored or "budget starts over" in told[0]


def test_a_critic_in_several_parts_reaches_the_gate(env_and_agent):
    env, agent = env_and_agent
    body = TensorDictModule(torch.nn.LazyLinear(8), ["state"], ["h"])
    logits = TensorDictModule(torch.nn.LazyLinear(255), ["h"], ["state_value_logits"])
    decode = TensorDictModule(lambda x: x.mean(-1, keepdim=True), ["state_value_logits"], ["v"])
    agent = replace(agent, value=TensorDictSequential(body, logits, decode))
    with make(agent, LoReConfig(gate=GateConfig(value_weight=1.0))) as lore:
        assert next(iter(collect(lore.advise(env), agent.policy(lore.policy()))))["lore_kl"].any()


@pytest.mark.parametrize(("old", "new"), [("reward", "rew"), ("done", ("agent", "done"))])
def test_an_environment_whose_results_the_bandit_cannot_read_is_refused(env_and_agent, old, new):
    env, agent = env_and_agent
    with make(agent) as lore:
        keys = {"reward_keys": env.reward_keys, "done_keys": env.done_keys}
        name = f"{old}_keys"
        fake = SimpleNamespace(
            batch_size=env.batch_size,
            observation_spec=env.observation_spec,
            **{**keys, name: [new if key == old else key for key in keys[name]]},
        )
        with pytest.raises(ValueError, match=rf"reads \['{old}'\].*RenameTransform"):
            lore.advise(fake)
