"""Pendulum, and what continuous actions ask of an adapter and of a run."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_run import tiny_config
from torchrl.data import Bounded, OneHot, Unbounded

from lore_torchrl.advisors.scripted import ScriptedAdvisor
from lore_torchrl.configs import (
    BanditConfig,
    EnvConfig,
    EpsilonConfig,
    GateConfig,
    LoReConfig,
    LossConfig,
    MixerConfig,
    PriorNetConfig,
    TemperatureConfig,
)
from lore_torchrl.dreamer.logging import read_metrics
from lore_torchrl.dreamer.run import build_run, train
from lore_torchrl.envs.adapter import read_row, sample_request
from lore_torchrl.envs.checks import check_adapter
from lore_torchrl.envs.pendulum import (
    TORQUES,
    Pendulum,
    PendulumDescriber,
    PendulumPlanner,
    energy,
)
from lore_torchrl.inspection import draw, play
from lore_torchrl.service import AdviceService, CallBudget
from lore_torchrl.transforms import AdviceTransform

ADAPTER = "lore_torchrl.envs.pendulum.Pendulum"


def test_the_planner_swings_up_and_holds_on_held_out_seeds():
    adapter = Pendulum()
    describer, planner = adapter.make_describer(), adapter.make_planner()

    def policy(tensordict):
        best = [
            int(
                np.argmax(
                    planner(describer.request(row, read_row(tensordict, row, ["observation"])))
                )
            )
            for row in range(6)
        ]
        return tensordict.set("action", torch.tensor(describer.anchors)[best])

    env = adapter.make_env(num_envs=6, seed=0, evaluation=True)
    rollout = env.rollout(200, policy)
    env.close()
    returns = rollout["next", "reward"].sum((1, 2))
    assert -260.0 < returns.mean() < -100.0 and returns.min() > -420.0
    ended = rollout["next", "success"][..., 0]
    assert rollout["next", "done"][:, -1].all() and not rollout["next", "terminated"].any()
    assert ended[:, -1].all() and not ended[:, :-1].any()


@pytest.mark.parametrize("degrees", [-156.4, -150.0, 150.0, 180.0])
def test_the_planner_swings_up_from_rest(degrees):
    adapter = Pendulum()
    describer, planner = adapter.make_describer(), adapter.make_planner()
    env = adapter.make_env(num_envs=1, seed=0)
    seen = env.reset()
    inner = env.base_env._envs[0]._env.unwrapped
    anchors = torch.tensor(describer.anchors)
    angle = np.radians(degrees)
    seen["observation"] = torch.tensor([[np.cos(angle), np.sin(angle), 0.0]]).float()
    inner.state = np.array([angle, 0.0])
    best = 0.0
    for _ in range(150):
        values = planner(describer.request(0, read_row(seen, 0, ["observation"])))
        seen = env.step(seen.set("action", anchors[[int(np.argmax(values))]]))["next"]
        best = max(best, float(np.cos(inner.state[0])))
    env.close()
    assert best > 0.99


def held(adapter, angles):
    """Success at the end of an episode that passes through ``angles``."""
    env = adapter.make_env(num_envs=1, seed=0)
    env.reset()
    inner = env.base_env._envs[0]._env.unwrapped
    for angle in angles:
        inner.state = np.array([angle, 0.0])
        outcome = env.step(env.rand_action())["next"]
    assert bool(outcome["done"])
    env.close()
    return bool(outcome["success"])


def test_success_is_to_be_upright_without_a_break_to_the_end():
    adapter = Pendulum(max_steps=6, hold_steps=3)
    down, up = math.pi, 0.0
    assert held(adapter, [down, down, down, up, up, up])
    assert held(adapter, [up] * 6)
    assert not held(adapter, [up, up, up, up, up, down])
    assert not held(adapter, [down, up, up, down, up, up])


def test_the_count_restarts_with_each_episode():
    env = Pendulum(max_steps=3, hold_steps=1).make_gym()
    env.reset(seed=0)
    env.unwrapped.state = np.array([0.0, 0.0])
    for expected in (1, 2, 3):
        observation, *_ = env.step(np.zeros(1, dtype=np.float32))
        env.unwrapped.state = np.array([0.0, 0.0])
        assert observation["held"].item() >= expected
    observation, _ = env.reset()
    assert observation["held"].item() <= 1


def test_torque_speed_and_energy_have_the_signs_that_the_text_gives_them():
    env = Pendulum(max_steps=9, hold_steps=1).make_gym()
    env.reset(seed=0)
    for name, torque in (("strong clockwise", -2.0), ("strong counterclockwise", 2.0)):
        env.unwrapped.state = np.array([math.pi, 0.0])
        observation, *_ = env.step(np.array([TORQUES[name]], dtype=np.float32))
        assert TORQUES[name] == torque and observation["observation"][2] * torque > 0
    # Without torque or rounding the energy stays what it is, up to the step's length.
    env.unwrapped.state = np.array([2.0, 1.0])
    observation, *_ = env.step(np.zeros(1, dtype=np.float32))
    cosine, sine, speed = observation["observation"]
    assert energy(math.atan2(sine, cosine), speed) == pytest.approx(energy(2.0, 1.0), abs=0.3)


def test_a_question_tells_of_its_rounded_situation():
    describer = Pendulum().make_describer()

    def seen(degrees, speed):
        angle = math.radians(degrees)
        return {"observation": np.array([math.cos(angle), math.sin(angle), speed])}

    request = describer.request(0, seen(91.0, -2.1))
    assert "leaning to the left, at 90 degrees, turning clockwise at 2.00" in request.description
    assert request.cache_key == "90,-2.0" == describer.cache_key(0, seen(84.0, -1.6))
    assert describer.cache_key(0, seen(3.0, 0.3)) == "5,0.5"
    assert describer.abstract_state(0, seen(3.0, 0.3)) == "0,0.0"
    assert describer.cache_key(0, seen(179.0, 0.0)) == describer.cache_key(0, seen(-179.0, 0.0))
    values = PendulumPlanner()(describer.request(0, seen(20.0, 0.0)))
    assert list(TORQUES)[int(np.argmax(values))] == "strong clockwise"
    assert PendulumPlanner()(replace(request, facts={})) is None


def test_a_sampled_question_comes_after_torques_of_the_anchors():
    assert sample_request(Pendulum(), steps=4) != sample_request(Pendulum(), steps=0)


def test_the_describer_is_told_of_the_torque_nearest_to_what_was_done(monkeypatch):
    adapter, told = Pendulum(), []
    describer = adapter.make_describer()

    def observe(row, observation, action, *, reset):
        told.append(None if action is None else describer.actions[action])

    monkeypatch.setattr(describer, "observe", observe)
    service = AdviceService(ScriptedAdvisor(PendulumPlanner()), budget=CallBudget(9))
    env = adapter.make_env(num_envs=2, seed=0)
    env.append_transform(AdviceTransform(service, describer, require_key=None))
    action = torch.tensor([[0.9], [-1.6]])
    stepped = env.step(env.reset().set("action", action))
    assert told == [None, None, "counterclockwise", "strong clockwise"]
    assert stepped["next", "llm_mask"].all() and stepped["llm_prior_logits"].shape == (2, 7)
    monkeypatch.setattr(type(describer), "anchors", ((0.0, 0.0),) * 7)
    wrong = AdviceTransform(service, describer, require_key=None)
    env = adapter.make_env(num_envs=2, seed=0)
    env.append_transform(wrong)
    with pytest.raises(ValueError, match="anchors have 2 dimensions"):
        env.step(env.reset().set("action", action))
    service.close()


def test_a_pendulum_that_cannot_be_held_long_enough():
    with pytest.raises(ValueError, match=r"hold_steps=300.*200 steps"):
        Pendulum(hold_steps=300)


class TestCheck:
    def test_sizes_and_bounds(self):
        sizes = check_adapter(Pendulum())
        assert sizes[:3] == (3, None, 1)
        assert [bound.tolist() for bound in sizes.action_bounds] == [[-2.0], [2.0]]

    @pytest.mark.parametrize(
        ("anchors", "message"),
        [
            (None, r"needs anchors, one action for each of its names, \[7, 1\], got None"),
            (((0.0,),) * 3, r"\[7, 1\], got \[3, 1\]"),
            (((5.0,),) * 7, r"within the action's bounds, \[-2.0\] to \[2.0\]"),
        ],
    )
    def test_anchors_that_do_not_fit(self, anchors, message, monkeypatch):
        describer = Pendulum().make_describer()
        monkeypatch.setattr(type(describer), "anchors", anchors)
        with pytest.raises(ValueError, match=message):
            check_adapter(Pendulum())
        check_adapter(Pendulum(), advised=False)

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            (Unbounded((2, 1)), "one-hot, .* or floats"),
            (Bounded(-1, float("inf"), (2, 1)), "within finite bounds"),
            (Bounded(-1, 1, (2, 1), dtype=torch.int64), "(?s)torch.int64"),
            (Bounded(-1, 1, (2, 1, 1)), r"(?s)Bounded.*\[2, 1, 1\]"),
            (OneHot(3, (2, 1, 3)), r"(?s)OneHot.*\[2, 1, 3\]"),
        ],
    )
    def test_actions_that_do_not_fit(self, spec, message, monkeypatch):
        make = Pendulum.make_env

        def unbounded(self, **settings):
            env = make(self, **settings)
            env.base_env.action_spec = spec
            env.empty_cache()
            return env

        monkeypatch.setattr(Pendulum, "make_env", unbounded)
        with pytest.raises(ValueError, match=message):
            check_adapter(Pendulum())


def config(folder, **lore):
    env = EnvConfig(adapter=ADAPTER, id="Pendulum-v1", num_envs=2, options={"hold_steps": 5})
    env.max_steps = 20
    return tiny_config(folder, env=env, lore=LoReConfig(**lore))


def test_a_whole_run_with_advice(tmp_path):
    # Returns begin below what the critic expects: nothing would pay in so short a run.
    loss, bandit = LossConfig(imitation_weight=0.0, prior_weight=0.3), BanditConfig(enabled=False)
    made = config(tmp_path / "run", loss=loss, bandit=bandit)
    made.checkpoint_interval = 80
    made.lore.calls.noop_filter = False
    summary = train(made)
    assert summary["advice/calls"] > 0 and summary["lore/kl"] > 0
    assert summary["loss/lore_prior"] > 0 and math.isfinite(summary["loss/actor"])
    line = json.loads((tmp_path / "run" / "advice.jsonl").read_text().splitlines()[0])
    assert set(line["prior"]) == set(TORQUES) and line["mix"]["loc"] != line["policy"]["loc"]
    assert abs(line["action"][0]) <= 2.0
    recording = play(tmp_path / "run")
    moments = recording.episodes[0].moments
    assert recording.actions == tuple(TORQUES)
    for moment in moments:
        for probs in (moment.policy, moment.mix):
            assert len(probs) == 7 and sum(probs) == pytest.approx(1.0, abs=1e-5)
        (torque,) = moment.exact
        apart = [abs(torque - anchor) for anchor in TORQUES.values()]
        assert moment.action == apart.index(min(apart))
    advised = [moment for moment in moments if moment.kl > 0]
    assert advised and all(moment.mix != moment.policy for moment in advised)
    assert draw(recording, 0, 0).shape == (360, 720, 3)


@pytest.mark.slow
def test_a_run_that_does_not_wait_for_answers_goes_on_from_its_checkpoint(tmp_path):
    made = config(tmp_path, bandit=BanditConfig(enabled=False))
    made.checkpoint_interval, made.lore.calls.mode = 64, "async"
    summary = train(made)
    resumed = train(replace(made, total_steps=176, resume=str(tmp_path)))
    assert resumed["advice/calls"] >= summary["advice/calls"] > 0
    steps = [row["step"] for row in read_metrics(tmp_path)]
    assert steps[-1] == 176 and steps == sorted(steps)


def test_a_whole_run_with_disagreement(tmp_path):
    made = config(tmp_path, gate=GateConfig(disagreement_weight=0.5))
    summary = train(made)
    assert summary["loss/disagreement"] > 0 and summary["learner/disagreement"] > 0
    assert math.isfinite(summary["loss/actor"]) and math.isfinite(summary["loss/lore_imitation"])


def test_random_steps_reach_the_replay_and_the_latent_state(tmp_path):
    made = config(tmp_path, epsilon=EpsilonConfig(eps_init=1.0, eps_end=1.0))
    run = build_run(made)
    seen = []
    run.trainer.register_op("batch_process", seen.append)
    try:
        run.trainer.train()
    finally:
        run.close()
    rows = read_metrics(tmp_path)
    assert {row["lore/src_rand"] for row in rows if "lore/src_rand" in row} == {1}
    assert any(math.isfinite(row.get("loss/actor", math.nan)) for row in rows)
    taken = torch.cat([batch["action"] for batch in seen], 1)
    carried = torch.cat([batch["next", "previous_action"] for batch in seen], 1)
    assert torch.equal(taken, carried) and taken.abs().max() <= 2.0
    stored = run.replay_hook.replay.sample()
    actions = stored["action"][~stored["is_init"].squeeze(-1)]
    assert len(actions) and torch.isin(actions, taken).all()


def test_a_whole_run_with_advice_in_imagination(tmp_path):
    made = config(
        tmp_path,
        bandit=BanditConfig(enabled=False),
        loss=LossConfig(beta_imagine_max=0.5),
        prior_net=PriorNetConfig(enabled=True, num_cells=8, threshold=0.0),
    )
    summary = train(made)
    assert math.isfinite(summary["loss/actor"]) and math.isfinite(summary["learner/actor_entropy"])
    assert summary["loss/prior_net"] > 0


def test_a_whole_run_of_stock_dreamer(tmp_path, monkeypatch):
    made = config(tmp_path, enabled=False)
    made.checkpoint_interval = 80
    stock = train(made)
    assert math.isfinite(stock["loss/actor"]) and stock["eval/return"] < 0
    assert not any(name.startswith("advice/") for name in stock)
    moment = play(tmp_path, max_steps=1).episodes[0].moments[0]
    assert moment.mix == moment.policy and moment.source == "none" and moment.exact
    monkeypatch.delattr(PendulumDescriber, "anchors")
    with pytest.raises(ValueError, match="PendulumDescriber has no anchors"):
        play(tmp_path, max_steps=1)


@pytest.mark.parametrize(
    ("lore", "message"),
    [
        ({"mixer": MixerConfig(mode="probability")}, r"lore.mixer.mode=logit \(two Gaussians"),
        ({"temperature": TemperatureConfig(rate=0.1)}, r"lore.temperature.rate=0 \(a Gaussian"),
    ],
)
def test_what_needs_discrete_actions_is_named(tmp_path, lore, message):
    with pytest.raises(ValueError, match=message):
        train(config(tmp_path, **lore))
