"""What the loggers are given, and what can be read back from it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lore_torchrl.configs import LoggerConfig
from lore_torchrl.dreamer import logging
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
        id="a",
        group="doorkey5x5: LoRe",
        state="finished",
        config={"seed": 0, "total_steps": 1000, "env": {"id": "e"}},
        summary={},
        scan_history=lambda: iter(history),
    )
    (record,) = read_wandb("someone/project", lambda project: [run])
    first, second, last = read_metrics(tmp_path)
    assert record.rows == [first | second, last]


@pytest.mark.parametrize("failed", [False, True])
def test_wandb_is_told_how_a_run_ended(tmp_path, monkeypatch, failed):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = RunLogger(LoggerConfig(backends=["wandb"], mode="disabled"), tmp_path)
    codes = []
    experiment = logger.backends[0].experiment
    monkeypatch.setattr(experiment, "finish", lambda exit_code=None: codes.append(exit_code))
    logger.close(failed=failed)
    assert codes == [1 if failed else None]


@pytest.fixture
def mode(tmp_path, monkeypatch):
    """Return the mode that W&B is started with, on a machine where nothing is set."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    given = []

    def get_logger(_name, *, wandb_kwargs, **_):
        given.append(wandb_kwargs["mode"])
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(logging, "get_logger", get_logger)

    def call(asked: str | None = None) -> str:
        RunLogger(LoggerConfig(backends=["wandb"], mode=asked), tmp_path / "run").close()
        return given.pop()

    return call


@pytest.mark.parametrize(
    ("machine", "url", "expected"),
    [
        ("github.com", None, "offline"),
        ("api.wandb.ai", None, "online"),
        ("wandb.example.org", None, "offline"),
        ("wandb.example.org", "https://wandb.example.org/", "online"),
    ],
)
def test_an_account_is_one_on_the_host_of_wandb(
    tmp_path, monkeypatch, mode, machine, url, expected
):
    assert mode() == "offline"
    (tmp_path / ".netrc").write_text(f"machine {machine} login user password secret\n")
    if url is not None:
        monkeypatch.setenv("WANDB_BASE_URL", url)
    assert mode() == expected


def test_a_damaged_netrc_is_no_account_and_stays_secret(tmp_path, mode, caplog):
    (tmp_path / ".netrc").write_text("api.wandb.ai secret\n")
    with caplog.at_level("INFO", logger="torchrl"):
        assert mode() == "offline"
    assert "NetrcParseError" in caplog.text and "secret" not in caplog.text


@pytest.mark.parametrize("asked", ["offline", "dryrun", "disabled"])
def test_what_the_environment_asks_for_counts_more_than_a_key(monkeypatch, mode, asked):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert mode() == "online"
    monkeypatch.setenv("WANDB_MODE", asked)
    assert mode() == ("disabled" if asked == "disabled" else "offline")
    assert mode("online") == "online", "the configuration has the last word"
