"""A whole run with everything that measures, learns and doubts the advice."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
from tiny_run import planner, tiny_config

from lore_torchrl.advisors.flawed import TurningAdvisor
from lore_torchrl.advisors.scripted import ScriptedAdvisor
from lore_torchrl.configs import CallsConfig, EnvConfig, GateConfig, LoReConfig, LossConfig
from lore_torchrl.configs.trust import BanditConfig, PriorNetConfig
from lore_torchrl.dreamer.logging import read_metrics
from lore_torchrl.dreamer.run import build_run, train
from lore_torchrl.envs.minigrid_planner import MiniGridPlanner

EVERYTHING = LoReConfig(
    gate=GateConfig(disagreement_weight=0.3, value_source="ensemble", adapt_rate=0.1),
    loss=LossConfig(
        bonus_weight=0.01,
        distillation_weight=0.1,
        beta_imagine_max=0.5,
        imagine_bonus_weight=0.01,
    ),
    prior_net=PriorNetConfig(num_cells=8, threshold=0.3),
    bandit=BanditConfig(segment_steps=10, initial=None),
)
PARTS = ("bandit", "calibrator", "prior_net", "disagreement", "value_ensemble")


def parts_of(run) -> dict[str, torch.Tensor]:
    """What the parts have learnt and counted, the random stream included."""
    loss = run.learner.loss.actor_loss
    state = {"weights": loss.gate.weights}
    for name in PARTS:
        for key, value in getattr(loss, name).state_dict().items():
            state[f"{name}.{key}"] = value
    return {name: value.clone() for name, value in state.items()}


def test_everything_together_and_resumed(tmp_path):
    # A room where rewards come soon, for the bandit to learn from.
    env = EnvConfig(id="MiniGrid-Empty-5x5-v0", num_envs=2, max_steps=20)
    config = tiny_config(tmp_path / "run", lore=EVERYTHING, checkpoint_interval=256, env=env)
    run = build_run(config, advisor=planner())
    start = parts_of(run)
    try:
        run.trainer.train()
    finally:
        run.close()
    end = parts_of(run)
    moved = {name for name in end if name in start and not torch.equal(start[name], end[name])}
    assert any(name.startswith("prior_net.network") for name in moved)
    assert any(name.startswith("prior_net.calibrator") for name in moved)
    assert any(name.startswith("disagreement") for name in moved)
    assert any(name.startswith("value_ensemble") for name in moved)
    assert {"weights", "bandit.counts", "bandit.log_weights", "calibrator.counts"} <= moved
    assert end["bandit.episodes"] >= 2 * (128 // 10)

    rows = read_metrics(config.output_dir)
    last = {name: value for row in rows for name, value in row.items()}
    for name in (
        "bandit/evidence",
        "bandit/share",
        "bandit/prob_0.25",
        "prior_net/ece",
        "prior_net/served",
        "loss/prior_net",
        "loss/disagreement",
        "loss/value_ensemble",
        "loss/lore_bonus",
        "loss/lore_distillation",
        "loss/lore_imagined_bonus",
        "learner/lore_reliability",
        "learner/lore_learnt",
    ):
        assert math.isfinite(last[name]), name
    assert last["prior_net/served"] > 0

    lore = replace(EVERYTHING, loss=replace(EVERYTHING.loss, delta=0.03, beta_imagine_max=0.25))
    resumed = build_run(
        replace(config, total_steps=512, lore=lore, resume=str(tmp_path / "run")),
        advisor=planner(),
    )
    try:
        loss = resumed.learner.loss.actor_loss
        changed = (loss.delta, loss.actor_loss.actor_model.beta_max)
        assert changed == (pytest.approx(0.03), 0.25), "settings are the configuration's"
        again = parts_of(resumed)
        assert set(again) == set(end)
        for name, value in end.items():
            assert torch.equal(again[name], value), name
        drawn = [run.learner.loss.actor_loss.bandit.draw(20)[0] for run in (run, resumed)]
        assert torch.equal(*drawn)
    finally:
        resumed.close()


def test_the_bandit_decides_what_acts(tmp_path):
    """Without evidence, trial or probation the advice is asked for and never mixed in."""
    shut = BanditConfig(
        trial_episodes=0, probation=0.0, evidence_low=0.98, evidence_high=0.985, trust_high=0.99
    )
    config = tiny_config(tmp_path / "run", lore=LoReConfig(bandit=shut))
    summary = train(config, advisor=planner())
    assert summary["advice/calls"] > 0 and summary["bandit/share"] == 0
    assert summary["lore/src_llm"] == 0 and summary["loss/lore_prior"] == 0
    assert summary["bandit/prob_0"] == 1


@pytest.mark.slow
def test_calls_dry_up(tmp_path):
    """Situations share answers, so calls end long before the budget does."""
    config = tiny_config(tmp_path / "run", total_steps=2048)
    config = replace(
        config,
        dreamer=replace(config.dreamer, replay_ratio=0.5),
        evaluation=replace(config.evaluation, interval=100_000),
    )
    train(config, advisor=planner())
    calls = [
        row["advice/calls"] for row in read_metrics(config.output_dir) if "advice/calls" in row
    ]
    per_row = [b - a for a, b in zip([0.0, *calls], calls, strict=False)]
    peak, rest = max(per_row), per_row[-len(per_row) // 8 :]
    assert calls[-1] < 200, "the budget is not what ends them"
    assert sum(rest) / len(rest) < peak / 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_good_adviser_that_turns(tmp_path, seed):
    """Trust is gone within 50 advised episodes of the turn, most of beta within 60."""
    # Answers live for 64 steps: longer, and the cache would hide the turn.
    calls = CallsConfig(budget=10_000, ttl_steps=64, coarse=False, coarse_votes=None, refute=False)
    config = tiny_config(
        tmp_path / "run",
        seed=seed,
        total_steps=2560,
        steps_per_batch=32,
        lore=LoReConfig(calls=calls, prior_net=PriorNetConfig(enabled=False)),
        env=EnvConfig(id="MiniGrid-Empty-5x5-v0", num_envs=8, max_steps=16),
    )
    config = replace(
        config,
        dreamer=replace(config.dreamer, replay_ratio=0.25),
        logger=replace(config.logger, interval=32),
        evaluation=replace(config.evaluation, interval=100_000),
    )
    turn = 130
    adviser = TurningAdvisor(
        planner(), ScriptedAdvisor(MiniGridPlanner(), competence=-1.0), turn_after=turn
    )
    train(config, advisor=adviser)
    rows = [row for row in read_metrics(config.output_dir) if "bandit/trust" in row]
    before = [row for row in rows if row["advice/calls"] <= turn]
    after = [row for row in rows if row["advice/calls"] > turn]
    assert before[-1]["bandit/trust"] > 0.9 and before[-1]["bandit/prob_0"] < 0.1
    turned = before[-1]["bandit/advised_episodes"]

    def episodes_until(holds):
        return next(row for row in after if holds(row))["bandit/advised_episodes"] - turned

    distrusted = episodes_until(lambda row: row["bandit/trust"] == 0)
    silenced = episodes_until(lambda row: row["bandit/prob_0"] > 0.5)
    # Shown with `--log-cli-level=INFO`: docs/concepts/trust.md reports them.
    logging.getLogger(__name__).info(
        "seed %d: trust %.2f, share of zero %.3f; episodes until no trust %d, until a share of "
        "zero is the likeliest %d",
        *(seed, before[-1]["bandit/trust"], before[-1]["bandit/prob_0"], distrusted, silenced),
    )
    assert distrusted <= 50 and silenced <= 60
    # What was learnt of the good adviser's is not taken back by the bad one's.
    assert after[-1]["bandit/share"] < 0.5
