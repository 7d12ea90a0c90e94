"""A whole training run that waits for no advisor."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import torch
from tiny_run import planner, tiny_config

from lore_torchrl.configs import CallsConfig, EvaluationConfig, LoReConfig
from lore_torchrl.dreamer.advice_log import read_advice
from lore_torchrl.dreamer.logging import read_metrics
from lore_torchrl.dreamer.run import build_run, train


class Slow:
    """The embedded advisor, a while later; every fifth answer fails."""

    def __init__(self, seconds=0.02):
        self.planner = planner()
        self.seconds = seconds
        self.asked = 0

    async def advise(self, requests):
        self.asked += len(requests)
        fails = self.asked % 5 == 0
        await asyncio.sleep(self.seconds)
        if fails:
            raise ConnectionError("the line is dead")
        return await self.planner.advise(requests)


def lore(tmp_path, **calls):
    calls = {"mode": "async", "budget": 30, "store": str(tmp_path / "advice.sqlite")} | calls
    return LoReConfig(calls=CallsConfig(**calls))


def last(rows, name):
    return next(row[name] for row in reversed(rows) if name in row)


def test_a_run_ends_within_its_budget_and_late_answers_reach_replay(tmp_path):
    advisor = Slow()
    config = tiny_config(tmp_path / "run", lore=lore(tmp_path))
    run = build_run(config, advisor=advisor)
    try:
        run.trainer.train()
        stored = [run.replay_hook.replay[member][:]["next"] for member in range(2)]
    finally:
        run.close()
    rows = read_metrics(config.output_dir)
    assert 0 < advisor.asked == run.service.budget.spent <= 30
    stats = run.service.stats()
    assert stats["calls"] == stats["in_time"] + stats["late"] + stats["lost"]
    assert stats["late"] > 0 and stats["failed"] > 0
    assert last(rows, "advice/late_rows") > 0
    assert last(rows, "advice/error_ConnectionError") > 0
    assert last(rows, "advice/latency_p50_s") > 0
    # An answer for a terminal or a last observation is bought for no step.
    lines = read_advice(config.output_dir)
    assert 0.8 * stats["answered"] <= len(lines) <= stats["answered"]
    assert sum(line["late"] for line in lines) > 0
    for records in stored:
        late = (records["llm_advice_id"] > 0) & records["llm_mask"]
        assert late.any()
        best = records["llm_prior_logits"][late.squeeze(-1)]
        assert torch.equal(best.amax(-1), torch.full((len(best),), 3.0))


def test_a_resumed_run_keeps_paid_answers_and_the_ledger(tmp_path):
    config = tiny_config(tmp_path / "run", lore=lore(tmp_path), checkpoint_interval=64)
    first = Slow()
    train(config, advisor=first)
    second = Slow()
    longer = replace(config, total_steps=160, resume=str(tmp_path / "run"))
    run = build_run(longer, advisor=second)
    try:
        assert run.service.budget.spent == first.asked
        known = len(run.service.cache)
        assert known > 0
        run.trainer.train()
    finally:
        run.close()
    assert first.asked + second.asked == run.service.budget.spent <= 30
    assert len(run.service.cache) >= known


def test_answers_are_awaited_where_a_later_hook_ends_the_run(tmp_path, monkeypatch):
    flying = []

    def evaluate_and_stop(*_, **__):
        flying.append(run.service.stats()["in_flight"])
        run.trainer.request_stop("enough")
        return {"success": 0.0}

    monkeypatch.setattr("lore_torchrl.dreamer.run.evaluate", evaluate_and_stop)
    config = tiny_config(
        tmp_path / "run",
        lore=lore(tmp_path, drain_s=30.0, store=None),
        evaluation=EvaluationConfig(interval=16, episodes=1),
        checkpoint_interval=16,
    )
    run = build_run(config, advisor=Slow(seconds=0.5))
    try:
        run.trainer.train()
        stats = run.service.stats()
        known = len(run.service.cache)
    finally:
        run.close()
    assert run.trainer.collected_frames == 16 and flying[0] > 0
    # What is lost are the answers that fail by themselves.
    assert stats["in_flight"] == 0 and stats["lost"] == stats["failed"] and stats["late"] > 0
    # And they are in the checkpoint that this last round writes.
    again = build_run(replace(config, resume=config.output_dir), advisor=Slow())
    again.close()
    assert len(again.service.cache) == known > 0


def test_a_dead_advisor_is_no_reason_to_wait_or_stop(tmp_path):
    calls = {"timeout_s": 30.0, "drain_s": 0.1, "budget": 40, "max_in_flight": 4, "store": None}
    config = tiny_config(tmp_path / "run", lore=lore(tmp_path, **calls))
    advisor = Slow(seconds=1_000.0)
    summary = train(config, advisor=advisor)
    # The first answer is waited for before a second question.
    assert advisor.asked == 1
    assert summary["advice/calls"] == summary["advice/in_flight"] == 1
    assert json.loads((tmp_path / "run" / "config.json").read_text())["lore"]["calls"]


def test_all_triggers_and_limits_together(tmp_path):
    calls = {
        "always": False,
        "no_reward_steps": 10,
        "novelty": 0.6,
        "td_spike": 2.0,
        "cooldown": 2,
        "max_tokens": 1_000,
        "max_cost": 1.0,
        "ttl_steps": 100,
    }
    config = tiny_config(tmp_path / "run", lore=lore(tmp_path, **calls))
    advisor = Slow()
    summary = train(config, advisor=advisor)
    assert 0 < summary["advice/calls"] == advisor.asked <= 30
