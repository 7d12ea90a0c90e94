"""Features and subgoals beside the observation: encoded, reconstructed, off by default."""

from __future__ import annotations

import pytest
import torch
from dreamer_sample import ACTIONS, OBSERVATION, tiny_config, tiny_sample
from tensordict import TensorDict
from tiny_run import tiny_config as run_config

from lore_torchrl import keys
from lore_torchrl.advisors.scripted import ScriptedAdvisor
from lore_torchrl.configs import FeaturesConfig, LoReConfig, SubgoalConfig
from lore_torchrl.dreamer.acting import adapter_of, build_acting_env, build_env_agent
from lore_torchrl.dreamer.agent import build_agent
from lore_torchrl.dreamer.learner import build_learner
from lore_torchrl.dreamer.replay import stream_records
from lore_torchrl.dreamer.run import build_run
from lore_torchrl.envs.batch import close_env
from lore_torchrl.envs.minigrid import MiniGridPlanner

K, HIDDEN = 5, 12
OBSERVED = ("observation", keys.FEATURES, keys.FEATURES_MASK)


def agent_of(features_dim=K, **settings):
    torch.manual_seed(0)
    return build_agent(
        tiny_config(**settings),
        observation_dim=OBSERVATION,
        num_actions=ACTIONS,
        features_dim=features_dim,
        features_hidden=HIDDEN,
    )


def sample_of(masked=0.5) -> TensorDict:
    sample = tiny_sample(mask=None)
    mask = torch.rand(*sample.batch_size, 1) >= masked
    sample["next", keys.FEATURES_MASK] = mask
    sample["next", keys.FEATURES] = torch.randn(*sample.batch_size, K) * mask
    return sample


def loss_of(agent, sample, seed=1, **settings):
    learner = build_learner(tiny_config(**settings), agent)
    torch.manual_seed(seed)
    return learner.loss(sample.clone())


def acted(agent, td, seed=1):
    torch.manual_seed(seed)
    with torch.no_grad():
        return agent.policy()(td.clone())


def observed(n=3) -> TensorDict:
    td = TensorDict(observation=torch.randn(n, OBSERVATION), batch_size=[n])
    td.update({name: spec.zero((n,)) for name, spec in agent_of().primers().items()})
    td["is_init"] = torch.zeros(n, 1, dtype=torch.bool)
    td[keys.FEATURES], td[keys.FEATURES_MASK] = torch.randn(n, K), torch.ones(n, 1).bool()
    return td


def test_the_agent_sees_features_when_acting_and_in_its_world_model():
    agent, td = agent_of(), observed()
    assert agent.observed == OBSERVED
    assert agent.filter[0].module is agent.world_model[0].module, "one encoder of each"
    sizes = [p.numel() for p in agent.filter[1].parameters()]
    assert sum(sizes) == K * HIDDEN + 2 * HIDDEN, "weight, bias and normalization"
    other = td.clone()
    other[keys.FEATURES] += 1.0
    first, second = (acted(agent, each)["encoded_latents"] for each in (td, other))
    assert torch.equal(first[:, :-HIDDEN], second[:, :-HIDDEN])
    assert not torch.equal(first[:, -HIDDEN:], second[:, -HIDDEN:])


@pytest.mark.parametrize("symlog", [False, True])
def test_reconstruction_counts_features_where_there_are_any(symlog):
    agent, sample = agent_of(symlog=symlog), sample_of()
    with torch.no_grad():
        for parameter in agent.world_model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    torch.manual_seed(1)
    out = agent.world_model(sample.clone())["next"]
    names = (("observation", "reco"), (keys.FEATURES, "reco_features"))
    scale = (lambda x: x.sign() * x.abs().log1p()) if symlog else (lambda x: x)
    errors = [(scale(out[a]) - scale(out[b])).square().sum(-1) for a, b in names]
    known = sample["next", keys.FEATURES_MASK].squeeze(-1)
    assert errors[1][known].min() > 0 and not errors[1][~known].any()
    found = loss_of(agent, sample, symlog=symlog)["loss_model_reco"].squeeze()
    torch.testing.assert_close(found, errors[0].mean() + errors[1].mean())


def test_they_learn_and_masked_rows_teach_the_decoder_nothing():
    agent = agent_of()
    decoder = next(m for m in agent.world_model if m.out_keys == [("next", "reco_features")])
    for masked in (0.5, 1.0):
        agent.world_model.zero_grad()
        loss_of(agent, sample_of(masked))["loss_model_reco"].sum().backward()
        learns = any(p.grad is not None and p.grad.any() for p in decoder.parameters())
        assert learns == (masked < 1.0)
    learner = build_learner(tiny_config(), agent)
    learned = {id(p) for group in learner.optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in agent.world_model.parameters()} <= learned


def test_an_update_takes_them_through_the_stepper():
    agent = agent_of()
    learner = build_learner(tiny_config(), agent)
    needed = {("next", keys.FEATURES), ("next", keys.FEATURES_MASK)}
    assert needed <= set(learner.loss.in_keys)
    before = [p.clone() for p in agent.world_model.parameters()]
    metrics = learner.stepper.step(None, sample_of())
    assert all(value.isfinite().all() for value in metrics.values())
    moved = [
        not torch.equal(p, b) for p, b in zip(agent.world_model.parameters(), before, strict=True)
    ]
    assert sum(moved) > len(moved) // 2


def test_replay_keeps_them_with_each_observation():
    td = observed(2).exclude("previous_action").unsqueeze(1)
    td["action"] = torch.zeros(2, 1, ACTIONS)
    td["is_init"] = torch.ones(2, 1, 1).bool()
    flags = {key: torch.zeros(2, 1, 1).bool() for key in ("done", "terminated", "truncated")}
    later = {key: td[key].clone() for key in OBSERVED}
    later[keys.FEATURES] += 1
    td["next"] = TensorDict({**later, "reward": torch.zeros(2, 1, 1), **flags}, [2, 1])
    records = stream_records(td.auto_batch_size_(2), agent_of().observed)
    assert torch.equal(records["next", keys.FEATURES][::2], td[keys.FEATURES][:, 0])
    assert torch.equal(records["next", keys.FEATURES][1::2], td[keys.FEATURES][:, 0] + 1)


def test_off_nothing_is_different():
    agents = []
    for build in (lambda: agent_of(None), plain):
        agents.append((build(), torch.get_rng_state()))
    (off, first), (stock, second) = agents
    assert torch.equal(first, second) and off.observed == ("observation",)
    assert list(off.world_model.state_dict()) == list(stock.world_model.state_dict())
    sample = tiny_sample(mask=None)
    one, other = (loss_of(agent, sample) for agent in (off, stock))
    assert all(torch.equal(one[key], other[key]) for key in one.keys(True, True))


def plain():
    torch.manual_seed(0)
    return build_agent(tiny_config(), observation_dim=OBSERVATION, num_actions=ACTIONS)


@pytest.mark.parametrize("on", [False, True])
def test_the_settings_decide(tmp_path, on):
    lore = LoReConfig(features=FeaturesConfig(enabled=on, columns=3, hidden_dim=7))
    config = run_config(tmp_path, lore=lore)
    agent = build_env_agent(config, adapter_of(config.env))
    assert (keys.FEATURES in agent.observed) == on
    if on:
        assert agent.filter[1].module.model[0].weight.shape == (7, 3)


class TestSubgoals:
    def lore(self, **settings):
        return LoReConfig(subgoal=SubgoalConfig(enabled=True, condition=True, **settings))

    def test_it_needs_the_bonus(self):
        with pytest.raises(ValueError, match=r"lore\.subgoal\.condition.*enabled=true"):
            SubgoalConfig(condition=True)

    def test_the_latent_state_tells_the_goal(self):
        torch.manual_seed(0)
        sizes = {"observation_dim": OBSERVATION, "num_actions": ACTIONS}
        agent = build_agent(tiny_config(), **sizes, num_subgoals=3)
        assert agent.observed == ("observation", keys.SUBGOAL)
        td = observed().exclude(*keys.FEATURE_KEYS).set(keys.SUBGOAL, torch.eye(3))
        other = td.clone().set(keys.SUBGOAL, torch.zeros(3, 3))
        first, second = (acted(agent, each)["encoded_latents"] for each in (td, other))
        assert not torch.equal(first, second)
        out = agent.world_model(with_subgoal(tiny_sample(mask=None)))
        assert out["next", "reco_subgoal"].shape[-1] == 3

    def test_a_run_trains_with_it_and_is_evaluated_without_a_goal(self, tmp_path):
        config = run_config(tmp_path, lore=self.lore(imagine=True))
        run = build_run(config, advisor=ScriptedAdvisor(MiniGridPlanner(), subgoals=True))
        run.trainer.train()
        stored = run.replay_hook.replay[0].storage[:]
        goals = stored["next", keys.SUBGOAL]
        assert goals.any()
        # The head knows how often each has been reached, as the reward's bonus does.
        novelty = run.learner.loss.actor_loss.subgoal_head.novelty
        assert (novelty < 1).any()
        agent, adapter = run.agent, adapter_of(config.env)
        env = build_acting_env(config, adapter, agent, num_envs=2, evaluation=True)
        played = env.rollout(4, agent.policy(), break_when_any_done=False)
        assert played[keys.SUBGOAL].shape[-1] == goals.shape[-1]
        assert not played[keys.SUBGOAL].any() and not played["next", keys.SUBGOAL].any()
        close_env(env)
        run.close()


def with_subgoal(sample: TensorDict) -> TensorDict:
    goal = torch.nn.functional.one_hot(torch.randint(3, sample.batch_size), 3).float()
    return sample.set(("next", keys.SUBGOAL), goal)
