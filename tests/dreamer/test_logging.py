"""What the loggers are given, and what can be read back from it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lore_torchrl.configs import LoggerConfig
from lore_torchrl.dreamer.logging import RunLogger, read_metrics
from lore_torchrl.experiments import read_wandb


def test_wandb_reads_back_as_the_rows_of_the_folder(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = RunLogger(LoggerConfig(backends=["wandb"], mode="disabled"), tmp_path)
    history = []
    experiment = logger.backends[0].experiment
    # W&B counts the rows; it is told no step of its own.
    monkeypatch.setattr(
        experiment, "log", lambda row, **_: history.append({"_step": len(history), **row})
    )
    logger.log(500, {"train/success": 0.5, "advice/calls": 3.0})
    logger.log(500, {"eval/success": 0.25})
    logger.log(1000, {"train/success": 0.75, "advice/calls": 4.0})
    logger.close()
    assert len(history) == 3, "one row of W&B for each row of metrics.jsonl"
    run = SimpleNamespace(
        group="doorkey5x5: LoRe",
        state="finished",
        config={"seed": 0, "total_steps": 1000},
        summary={},
        scan_history=lambda: iter(history),
    )
    (record,) = read_wandb("someone/project", lambda project: [run])
    first, second, last = read_metrics(tmp_path)
    assert record.rows == [first | second, last]
