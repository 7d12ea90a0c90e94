"""Whole runs of a few hundred steps, as a user would start them."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from tiny_run import COLUMNS, DREAMER, OFF, planner, run_through, tiny_config, untimed
from torchrl.trainers.algorithms.dreamer_v3 import DreamerV3OptimizationStepper

from lore_torchrl.advisors.base import Advice
from lore_torchrl.configs import (
    BanditConfig,
    CallsConfig,
    EnvConfig,
    EpsilonConfig,
    EvaluationConfig,
    GateConfig,
    HealthConfig,
    LoggerConfig,
    LoReConfig,
    LossConfig,
    MixerConfig,
)
from lore_torchrl.dreamer import evaluation
from lore_torchrl.dreamer.advice_log import read_advice
from lore_torchrl.dreamer.checkpoint import find_checkpoint
from lore_torchrl.dreamer.logging import read_metrics
from lore_torchrl.dreamer.run import build_run, read_stop, train

QUIET = HealthConfig(enabled=False)
# Learns from advice whatever it returned, and from nothing else.
PAPER = LossConfig(imitation_weight=0.0, prior_weight=1.0, multiplier_lr=1e-3)


def weights(run) -> dict[str, torch.Tensor]:
    parts = {"world": run.agent.world_model, "actor": run.agent.actor, "value": run.agent.value}
    return {
        f"{part}.{name}": value.clone()
        for part, module in parts.items()
        for name, value in module.state_dict().items()
    }


@pytest.fixture(scope="module")
def stock_run(tmp_path_factory):
    """A run of stock DreamerV3, its rows, and where it left the random stream."""
    folder = tmp_path_factory.mktemp("runs") / "stock"
    run, rows = run_through(tiny_config(folder, lore=LoReConfig(enabled=False)))
    return run, rows, torch.get_rng_state()


@pytest.fixture(scope="module")
def lore_run(tmp_path_factory):
    """A run with LoRe, and its rows."""
    return run_through(tiny_config(tmp_path_factory.mktemp("runs") / "lore"))


def test_an_update_that_is_compiled_knows_the_bandit_by_then(tmp_path, monkeypatch):
    """What is attached after a capture is in no captured update, and returns stay uncorrected."""
    seen = []
    monkeypatch.setattr(
        DreamerV3OptimizationStepper,
        "warmup",
        lambda stepper, _sample: seen.append(stepper.loss_module.actor_loss.corrects),
    )
    config = tiny_config(tmp_path, dreamer=replace(DREAMER, compile_train_step=True))
    build_run(config, advisor=planner()).close()
    assert seen == [True]


def test_lore_with_nothing_switched_on_is_stock_to_the_bit(tmp_path, stock_run):
    stock, stock_rows, stock_random = stock_run
    lore, lore_rows = run_through(tiny_config(tmp_path / "lore", lore=OFF))
    assert torch.equal(torch.get_rng_state(), stock_random)
    assert stock.replay_hook.updates >= 10
    expected = weights(stock)
    for name, value in weights(lore).items():
        assert torch.equal(value, expected[name]), name
    for stock_row, lore_row in zip(untimed(stock_rows), untimed(lore_rows), strict=True):
        for name, value in stock_row.items():
            # LoRe logs the normalized logits, stock the raw ones: equal but for rounding.
            expected = pytest.approx(value, rel=1e-5) if name.startswith("lore/") else value
            assert lore_row[name] == expected, name


def test_lore_switched_on_is_not_stock(stock_run, lore_run):
    stock, (lore, rows) = stock_run[0], lore_run
    assert not torch.equal(
        torch.cat([p.flatten() for p in stock.agent.actor.parameters()]),
        torch.cat([p.flatten() for p in lore.agent.actor.parameters()]),
    )
    last = rows[-2] if "eval/success" in rows[-1] else rows[-1]
    assert 0 < last["advice/calls"] <= 200
    assert last["lore/src_llm"] > 0
    assert math.isfinite(last["loss/lore_imitation"]) and "bandit/probability" in last


def test_same_seed_same_run(tmp_path, lore_run):
    first, first_rows = lore_run
    second, second_rows = run_through(tiny_config(tmp_path / "again"))
    assert untimed(first_rows) == untimed(second_rows)
    expected = weights(first)
    for name, value in weights(second).items():
        assert torch.equal(value, expected[name]), name


def test_train_checkpoint_resume_evaluate(tmp_path):
    # The constraint of the paper: there is a multiplier to restore.
    lore = LoReConfig(loss=PAPER)
    config = tiny_config(tmp_path / "run", checkpoint_interval=32, lore=lore)
    summary = train(config, advisor=planner())
    assert 0 <= summary["eval/success"] <= 1
    before = read_metrics(config.output_dir)

    longer = replace(config, total_steps=192, resume=str(tmp_path / "run"))
    run = build_run(longer, advisor=planner())
    assert run.trainer.collected_frames == 128
    assert run.service.budget.spent == before[-1].get(
        "advice/calls", before[-2].get("advice/calls")
    )
    assert run.replay_hook.updates == int(
        next(row["time/updates"] for row in reversed(before) if "time/updates" in row)
    )
    multiplier = next(row["lore/lambda"] for row in reversed(before) if "lore/lambda" in row)
    assert run.learner.loss.actor_loss.multiplier.item() == pytest.approx(multiplier)
    assert multiplier > 0
    try:
        run.trainer.train()
    finally:
        run.close()
    rows = read_metrics(config.output_dir)
    steps = [row["step"] for row in rows if "time/updates" in row]
    assert steps == sorted(set(steps)), "no gaps and no doubles"
    assert steps[-1] == 192
    assert [row["step"] for row in rows if "eval/success" in row] == [64, 128, 192]


def test_resume_drops_what_came_after_the_checkpoint(tmp_path):
    config = tiny_config(tmp_path / "run", checkpoint_interval=64)
    train(config, advisor=planner())
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    first = json.loads((checkpoints[0] / "manifest.json").read_text())
    step = first["metadata"]["collected_frames"]
    assert step < 128
    run = build_run(replace(config, resume=str(checkpoints[0])), advisor=planner())
    run.close()
    assert max(row["step"] for row in read_metrics(config.output_dir)) <= step
    assert find_checkpoint(config.output_dir) == checkpoints[0], "what the next resume takes"
    assert [path.name for path in (tmp_path / "run" / "abandoned").iterdir()] == [
        path.name for path in checkpoints[1:]
    ]


@pytest.mark.parametrize("cut", [64, 128])
def test_an_evaluation_that_is_broken_off_is_made_when_the_run_is_resumed(
    tmp_path, monkeypatch, cut
):
    play = evaluation.play_episodes

    def end_at(env, adapter, policy, stopped):
        if next(reversed(read_metrics(tmp_path / "run")))["step"] == cut:
            os.kill(os.getpid(), signal.SIGTERM)
        return play(env, adapter, policy, stopped)

    config = tiny_config(tmp_path / "run", checkpoint_interval=64, lore=LoReConfig(enabled=False))
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "play_episodes", end_at)
        train(config)
    assert read_stop(tmp_path / "run") == {"step": cut, "total_steps": 128, "reason": "SIGTERM"}
    resumed = replace(config, resume=str(tmp_path / "run"))
    # A kill comes after the evaluation and before the next checkpoint.
    run = build_run(resumed)
    run.evaluation.make_up(read_metrics(tmp_path / "run"))
    run.close()
    summary = train(resumed)
    assert read_stop(tmp_path / "run") is None and 0 <= summary["eval/success"] <= 1
    rows = read_metrics(config.output_dir)
    assert [row["step"] for row in rows if "eval/success" in row] == [64, 128]


def test_half_a_line_that_a_kill_left_is_no_row(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 0.5}\n{"step": 2, "a"')
    assert read_metrics(tmp_path) == [{"step": 1, "a": 0.5}]


def test_resume_refuses_another_network(tmp_path):
    config = tiny_config(tmp_path / "run", checkpoint_interval=128)
    train(config, advisor=planner())
    other = replace(
        config, resume=str(tmp_path / "run"), dreamer=replace(config.dreamer, hidden_dim=32)
    )
    with pytest.raises(ValueError, match=r"dreamer\.hidden_dim 16 there, 32 here"):
        build_run(other, advisor=planner())


@pytest.mark.parametrize("device", ["meta", "foo", "cuda:99"])
def test_a_device_that_is_not_there_is_named(tmp_path, device):
    with pytest.raises(ValueError, match=f"device='{device}' cannot be used here"):
        build_run(tiny_config(tmp_path / "run", device=device))


def test_resume_names_a_missing_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint there"):
        build_run(tiny_config(tmp_path / "run", resume=str(tmp_path / "nowhere")))


def test_sigterm_stops_after_the_round_and_saves(tmp_path):
    config = tiny_config(tmp_path / "run", checkpoint_interval=100_000, total_steps=100_000)

    def interrupt():
        path = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (path.exists() and path.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    train(config, advisor=planner())
    assert list((tmp_path / "run" / "checkpoints").iterdir())


class Broken:
    """Fails in every way that an advisor can, in turn."""

    def __init__(self):
        self.turn = 0

    async def advise(self, requests):
        self.turn += 1
        if self.turn % 4 == 0:
            raise ConnectionError("the server is down")
        if self.turn % 4 == 1:
            return [Advice(logits=(float("nan"),) * 7)]
        if self.turn % 4 == 2:
            return [Advice(logits=(1.0,))]
        return []


def test_a_broken_advisor_costs_the_advice_and_not_the_run(tmp_path):
    # What the run does itself may well be imitated.
    lore = LoReConfig(calls=CallsConfig(budget=40), loss=PAPER)
    broken, _ = run_through(tiny_config(tmp_path / "broken", lore=lore), Broken())
    stats = broken.service.stats()
    # All the calls that the pauses of an outage leave in so short a run.
    assert stats["failed"] == stats["calls"] == sum(broken.service.errors.values()) >= 5
    assert set(broken.service.errors) >= {"ConnectionError", "not_finite", "wrong_logit_count"}
    stock, _ = run_through(tiny_config(tmp_path / "stock", lore=LoReConfig(enabled=False)))
    expected = weights(stock)
    for name, value in weights(broken).items():
        assert torch.equal(value, expected[name]), name


def test_the_mixture_is_evaluated_without_a_call(tmp_path):
    """Nothing is learned; the held-out episodes follow the answers that training has bought."""
    lore = LoReConfig(
        gate=GateConfig(kappa=1000.0, tau=-1.0, value_weight=0.0),
        mixer=MixerConfig(max_kl=float("inf")),
        loss=LossConfig(imitation_weight=0.0),
        bandit=BanditConfig(enabled=False),
    )
    found = {}
    for actor in ("policy", "mixture", "both"):
        config = tiny_config(
            tmp_path / actor,
            env=EnvConfig(id="MiniGrid-Empty-5x5-v0", num_envs=2, max_steps=20),
            dreamer=replace(DREAMER, replay_ratio=0.0),
            evaluation=EvaluationConfig(interval=128, episodes=8, actor=actor),
            lore=lore,
        )
        _, rows = run_through(config)
        found[actor] = {name: value for row in rows for name, value in row.items()}
    policy, mixture, both = found.values()
    assert mixture["eval/success"] == 1.0 > policy["eval/success"] + 0.3
    assert mixture["eval/length"] < 10
    for name in ("success", "return", "length", "episodes"):
        assert f"eval/advised/{name}" not in policy
        assert both[f"eval/{name}"] == policy[f"eval/{name}"], name
        for run in (mixture, both):
            assert run[f"eval/advised/{name}"] == mixture[f"eval/{name}"], name
    for name in ("advice/calls", "advice/cache_hits", "train/success"):
        assert mixture[name] == both[name] == policy[name], name


def test_an_evaluation_with_advice_needs_lore(tmp_path):
    for actor in ("mixture", "both"):
        with pytest.raises(ValueError, match=rf"evaluation\.actor='{actor}'.*no advice"):
            tiny_config(
                tmp_path, lore=LoReConfig(enabled=False), evaluation=EvaluationConfig(actor=actor)
            )


def test_options_together(tmp_path):
    lore = LoReConfig(
        gate=GateConfig(hysteresis=[0.2, 0.4], dropout=0.1, warmup_steps=10),
        epsilon=EpsilonConfig(eps_init=0.5, eps_end=0.1, annealing_num_steps=200),
    )
    _, rows = run_through(
        tiny_config(
            tmp_path / "run",
            lore=lore,
            logger=LoggerConfig(
                backends=["csv", "tensorboard"], interval=32, progress_bar=False, figures=False
            ),
        )
    )
    assert any(row.get("lore/src_rand", 0) > 0 for row in rows)
    assert list((tmp_path / "run" / "tensorboard").rglob("events*"))
    assert list((tmp_path / "run" / "csv").rglob("*.csv"))


def test_wandb_offline_gets_the_whole_run_without_an_account(tmp_path, monkeypatch):
    def size(folder):
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staging"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    logger = LoggerConfig(backends=["wandb"], mode="offline", interval=32, progress_bar=False)
    config = tiny_config(tmp_path / "run", logger=logger, checkpoint_interval=64, health=QUIET)
    train(config, advisor=planner())
    run = tmp_path / "run" / "wandb"
    assert list(run.rglob("*.wandb"))
    media = {
        path.parent.name for path in run.rglob("*") if path.is_file() and "media" in path.parts
    }
    assert "figures" in media, "figures as images"
    (table,) = run.rglob("advice*.table.json")
    written = json.loads(table.read_text())
    assert {"observation", "prior", "mix", "action"} <= set(written["columns"])
    assert len(written["data"]) == len(read_advice(tmp_path / "run"))
    saved = size(tmp_path / "run" / "checkpoints" / "checkpoint-000000000128")
    assert size(tmp_path / "staging") > saved > 0, "the checkpoint waits to be uploaded"
    shutil.rmtree(tmp_path / "staging")
    config.logger.upload_checkpoint, config.output_dir = False, str(tmp_path / "small")
    config.total_steps = 64
    train(config, advisor=planner())
    assert size(tmp_path / "staging") < saved


def test_every_fresh_answer_has_a_line_that_tells_what_came_of_it(tmp_path):
    config = tiny_config(tmp_path / "run")
    run, _ = run_through(config)
    lines = read_advice(tmp_path / "run")
    # An answer for a terminal or a last observation is bought for no step; environments that are
    # in one situation at the same step share an answer, and have a line each.
    calls, answers = run.service.counters.calls, {line["advice_id"] for line in lines}
    assert 0.8 * calls <= len(answers) <= calls
    assert len({(line["advice_id"], line["environment"]) for line in lines}) == len(lines)
    for answer in answers:
        steps = [line["step"] for line in lines if line["advice_id"] == answer]
        assert max(steps) - min(steps) < config.env.num_envs, "steps are counted over all"
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    for line in lines:
        assert tuple(line) == COLUMNS
        assert line["observation"].startswith("Mission: ") and line["prompt"] is None
        for name in ("prior", "policy", "mix"):
            assert sum(line[name].values()) == pytest.approx(1.0, abs=1e-3)
        assert line["action"] in line["mix"] and line["confidence"] == 1.0


def test_a_resumed_run_goes_on_with_its_lines_and_its_progress_bar(tmp_path, capfd):
    first = tiny_config(tmp_path / "run", total_steps=64, checkpoint_interval=32)
    run_through(first)
    before = read_advice(tmp_path / "run")
    bar = replace(first.logger, progress_bar=True)
    again = replace(first, total_steps=128, resume=str(tmp_path / "run"), logger=bar)
    run_through(again)
    assert re.search(r"50%.* 64/128 .*100%.* 128/128 ", capfd.readouterr().err, re.DOTALL)
    lines = read_advice(tmp_path / "run")
    assert lines[: len(before)] == before
    assert len({(line["advice_id"], line["environment"]) for line in lines}) == len(lines)


def test_figures_are_drawn(tmp_path):
    logger = LoggerConfig(interval=32, progress_bar=False, figures=True)
    train(tiny_config(tmp_path / "run", logger=logger), advisor=planner())
    names = {path.name for path in (tmp_path / "run" / "figures").iterdir()}
    assert names == {"success.png", "advice.png", "policy.png"}


def test_a_picture_that_the_family_does_not_draw_is_refused_before_the_first_step(tmp_path):
    env = EnvConfig(adapter="lore_torchrl.envs.frozen_lake.FrozenLake", id="FrozenLake-v1")
    sends = {"send_image": True}
    # Of a server that another advisor asks, too.
    for advisor in (sends, {"_target_": "some.Flawed", "advisor": sends}):
        config = tiny_config(tmp_path / "run", env=env, advisor=advisor)
        with pytest.raises(ValueError, match=r"no picture, which advisor\.send_image"):
            build_run(config, advisor=planner())
    # Stock asks nobody.
    build_run(replace(config, lore=LoReConfig(enabled=False))).close()
