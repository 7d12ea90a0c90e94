"""A whole run with everything that chooses, learns and doubts the advice."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
from tiny_run import planner, tiny_config

from lore_torchrl.advisors.flawed import TurningAdvisor
from lore_torchrl.advisors.scripted import ScriptedAdvisor
from lore_torchrl.configs import (
    BanditConfig,
    CallsConfig,
    EnvConfig,
    GateConfig,
    LoReConfig,
    LossConfig,
    PriorNetConfig,
)
from lore_torchrl.control import AdviceBandit
from lore_torchrl.dreamer.logging import read_metrics
from lore_torchrl.dreamer.run import build_run, train
from lore_torchrl.envs.minigrid import MiniGridPlanner

EVERYTHING = LoReConfig(
    gate=GateConfig(disagreement_weight=0.3, value_weight=0.3, value_source="ensemble"),
    loss=LossConfig(
        prior_weight=0.3,
        multiplier_lr=1e-3,
        bonus_weight=0.01,
        beta_imagine_max=0.5,
    ),
    prior_net=PriorNetConfig(enabled=True, num_cells=8, threshold=0.3),
    bandit=BanditConfig(segment_steps=10),
)
PARTS = ("prior_net", "disagreement", "value_ensemble")


def bandit_of(run) -> AdviceBandit:
    (bandit,) = (m for m in run.collector.policy.modules() if isinstance(m, AdviceBandit))
    return bandit


def parts_of(run) -> dict[str, torch.Tensor]:
    """What the parts have learnt and counted, the random stream included."""
    modules = {name: getattr(run.learner.loss.actor_loss, name) for name in PARTS}
    modules["bandit"] = bandit_of(run)
    return {
        f"{name}.{key}": value.clone()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }


def test_everything_together_and_resumed(tmp_path):
    # A room where rewards come soon, for the bandit to learn from.
    env = EnvConfig(id="MiniGrid-Empty-5x5-v0", num_envs=2, max_steps=20)
    config = tiny_config(tmp_path / "run", lore=EVERYTHING, checkpoint_interval=128, env=env)
    run = build_run(config, advisor=planner())
    start = parts_of(run)
    try:
        run.trainer.train()
    finally:
        run.close()
    end = parts_of(run)
    moved = {name for name in end if not torch.equal(start[name], end[name])}
    for part in ("prior_net.network", "disagreement", "value_ensemble"):
        assert any(name.startswith(part) for name in moved), part
    assert {"bandit._extra_state", "bandit.advised_segments"} <= moved
    assert end["bandit.advised_segments"] >= 64 // 10 and end["bandit.ignored"] == 0

    rows = read_metrics(config.output_dir)
    last = {name: value for row in rows for name, value in row.items()}
    for name in (
        "bandit/probability",
        "bandit/baseline",
        "bandit/coefficient",
        "loss/prior_net",
        "loss/disagreement",
        "loss/value_ensemble",
        "loss/lore_imitation",
        "loss/lore_prior",
        "loss/lore_constraint",
        "loss/lore_bonus",
        "learner/lore_imitated",
        "learner/lore_learned",
    ):
        assert math.isfinite(last[name]), name
    assert any(row.get("learner/lore_imitated", 0) > 0 for row in rows)
    assert last["prior_net/served"] > 0

    lore = replace(EVERYTHING, loss=replace(EVERYTHING.loss, delta=0.03, beta_imagine_max=0.25))
    resumed = build_run(
        replace(config, total_steps=256, lore=lore, resume=str(tmp_path / "run")),
        advisor=planner(),
    )
    try:
        again = parts_of(resumed)
        assert set(again) == set(end)
        for name, value in end.items():
            assert torch.equal(again[name], value), name
    finally:
        resumed.close()


@pytest.mark.parametrize("acts", [True, False])
def test_the_bandit_decides_what_acts(tmp_path, acts):
    """Asked for is advice in either case."""
    # A bandit that is as good as certain, and segments too few to change its mind.
    bandit = BanditConfig(floor=1e-6, segment_steps=None)
    config = tiny_config(tmp_path / "run", lore=LoReConfig(bandit=bandit))
    run = build_run(config, advisor=planner())
    bandit_of(run).log_odds.fill_(12.0 if acts else -12.0)
    try:
        run.trainer.train()
    finally:
        run.close()
    rows = [row for row in read_metrics(config.output_dir) if "bandit/coefficient" in row]
    assert {row["bandit/coefficient"] for row in rows} == {float(acts)}
    assert rows[-1]["advice/calls"] > 0 and rows[-1]["lore/advised"] > 0
    assert any(row["lore/src_llm"] > 0 for row in rows) == acts
    assert any(row["lore/kl"] > 0 for row in rows) == acts
    assert (rows[-1]["bandit/advised_segments"] > 0) == acts
    bandit = bandit_of(run)
    assert bandit.advised_segments > 0 if acts else bandit.baseline_count > 0


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
def test_a_good_advisor_that_turns(tmp_path, seed):
    """Within 60 advised segments of the turn it hardly acts any more."""
    # Answers live for 64 steps: longer, and the cache would hide the turn.
    calls = CallsConfig(
        budget=10_000, ttl_steps=64, abstract_states=False, answers_averaged=None, noop_filter=False
    )
    config = tiny_config(
        tmp_path / "run",
        seed=seed,
        total_steps=2560,
        steps_per_batch=32,
        lore=LoReConfig(calls=calls),
        env=EnvConfig(id="MiniGrid-Empty-5x5-v0", num_envs=8, max_steps=16),
    )
    config = replace(
        config,
        dreamer=replace(config.dreamer, replay_ratio=0.25),
        logger=replace(config.logger, interval=32),
        evaluation=replace(config.evaluation, interval=100_000),
    )
    turn = 130
    advisor = TurningAdvisor(
        planner(), ScriptedAdvisor(MiniGridPlanner(), competence=-1.0), turn_after=turn
    )
    train(config, advisor=advisor)
    rows = [row for row in read_metrics(config.output_dir) if "bandit/probability" in row]
    before = [row for row in rows if row["advice/calls"] <= turn]
    after = [row for row in rows if row["advice/calls"] > turn]
    # It begins at 0.9; a single row may follow a segment that failed.
    assert sum(row["bandit/probability"] for row in before) / len(before) > 0.92
    dropped = next(row for row in after if row["bandit/probability"] < 0.1)
    segments = dropped["bandit/advised_segments"] - before[-1]["bandit/advised_segments"]
    logging.getLogger(__name__).info("seed %d: dropped after %d advised segments", seed, segments)
    assert segments <= 60
