"""Training against a server that goes wrong in every way that servers do."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import planner, run_through, tiny_config

pytest.importorskip("httpx")

from fault_server import FAULTS, FaultServer

from lore_torchrl.advisors.chat import ChatAdvisor
from lore_torchrl.advisors.errors import NotJSONError
from lore_torchrl.configs import (
    CallsConfig,
    EvaluationConfig,
    LoggerConfig,
    LoReConfig,
    TrainConfig,
)
from lore_torchrl.dreamer.run import build_run, train

# What stalls and drips does so for the whole deadline: leave those to the long check.
QUICK = tuple(fault for fault in FAULTS if fault not in ("stall", "drip", "huge", "bomb"))


def chat(server: FaultServer, **kwargs) -> ChatAdvisor:
    settings = {
        "mode": "json",
        "deadline_s": 5.0,
        "retries": 1,
        "backoff_s": (0.001, 0.002),
    }
    return ChatAdvisor("m", base_url=server.url, server="vllm", **(settings | kwargs))


def weights(run) -> list[torch.Tensor]:
    parts = (run.agent.world_model, run.agent.actor, run.agent.value)
    return [value.clone() for part in parts for value in part.state_dict().values()]


def accounts(run) -> dict[str, float]:
    stats = run.service.stats()
    assert stats["calls"] == stats["answered"] + stats["lost"]
    assert stats["in_flight"] == 0
    assert sum(run.service.errors.values()) == stats["failed"]
    return stats


@pytest.mark.parametrize("mode", ["async", pytest.param("blocking", marks=pytest.mark.slow)])
def test_a_run_goes_on_through_a_mixture_of_faults(tmp_path, mode):
    lore = LoReConfig(calls=CallsConfig(budget=40, mode=mode, max_in_flight=4))
    with FaultServer(random_of=("fine",) * len(QUICK) + QUICK, seed=5) as server:
        run, _ = run_through(tiny_config(tmp_path / "run", lore=lore), chat(server))
    stats = accounts(run)
    assert run.trainer.collected_frames == 128
    assert 10 < stats["calls"] <= 40
    assert stats["failed"] > 5
    assert len(run.service.errors) >= 3


def test_the_log_names_model_and_prompt(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("lore_torchrl.dreamer.advice.torchrl_logger.info", told.append)
    with FaultServer() as server:
        advisor = chat(server)
        build_run(tiny_config(tmp_path / "run"), advisor=advisor).close()
    assert f"Advisor: ChatAdvisor, model m, prompt_hash {advisor.prompt_hash}" in told


class Mute:
    async def advise(self, requests):
        return [NotJSONError("nothing") for _ in requests]


def test_a_run_without_one_answer_and_without_one_update_says_so(tmp_path, caplog):
    config = tiny_config(tmp_path / "run", total_steps=32)
    with caplog.at_level("WARNING", logger="torchrl"):
        train(config, advisor=Mute())
    assert "Nothing will be learned in 32 steps" in caplog.text
    assert "No question got an answer (advice/error_not_json)" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING", logger="torchrl"):
        train(tiny_config(tmp_path / "good"), advisor=planner())
    assert "No question got" not in caplog.text and "Nothing will be" not in caplog.text


def test_a_run_on_answers_of_an_earlier_one_had_advice(tmp_path, caplog):
    def told(name, advisor):
        calls = CallsConfig(budget=9, store=str(tmp_path / "advice.sqlite"), ledger=name)
        return train(tiny_config(tmp_path / name, lore=LoReConfig(calls=calls)), advisor=advisor)

    told("first", planner())
    mute = Mute()
    mute.cache_prefix = planner().cache_prefix
    with caplog.at_level("WARNING", logger="torchrl"):
        summary = told("second", mute)
    assert summary["advice/answered"] == 0 and summary["advice/error_not_json"] > 0
    assert "No question got" not in caplog.text


@pytest.mark.slow
def test_faults_for_ever_leave_stock(tmp_path):
    with FaultServer(random_of=QUICK, seed=6) as server:
        lore = LoReConfig(calls=CallsConfig(budget=40))
        broken, _ = run_through(tiny_config(tmp_path / "broken", lore=lore), chat(server))
    stats = accounts(broken)
    assert stats["answered"] == 0
    # All the calls that the pauses of one outage leave in so short a run.
    assert stats["failed"] == stats["calls"] >= 5
    stock, _ = run_through(
        tiny_config(tmp_path / "stock", lore=LoReConfig(enabled=False)), planner()
    )
    for ours, theirs in zip(weights(broken), weights(stock), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_faulty_calls_in_a_run_of_the_demos_size(tmp_path):
    config = TrainConfig(
        output_dir=str(tmp_path / "run"),
        checkpoint_interval=None,
        logger=LoggerConfig(progress_bar=False, figures=False),
        evaluation=EvaluationConfig(interval=10_000, episodes=10),
        lore=replace(LoReConfig(), calls=CallsConfig(budget=2000, timeout_s=5.0)),
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with FaultServer(random_of=("fine",) * len(FAULTS) + FAULTS, seed=7) as server:
        run, _ = run_through(config, chat(server, deadline_s=0.2))
        did = dict(server.did)
    stats = accounts(run)
    assert run.trainer.collected_frames >= 10_000
    assert 300 < stats["calls"] <= 2000 and stats["failed"] > 100
    assert len(set(did) & set(FAULTS)) > len(FAULTS) / 2
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    # Replay alone holds 10,000 records of 2,066 numbers; 100 MB bodies came by the hundred.
    assert grown < 700, f"{grown:.0f} MiB"
    assert Path(config.output_dir, "metrics.jsonl").exists()
