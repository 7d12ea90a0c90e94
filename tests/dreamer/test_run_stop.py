"""A run that ends before its last step says so, to whoever started it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tiny_run import OFF, tiny_config

from lore_torchrl.configs import HealthConfig, LoggerConfig
from lore_torchrl.dreamer.run import read_stop, train

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def start(monkeypatch):
    """The training script without Hydra's command line."""
    pytest.importorskip("hydra")
    from omegaconf import OmegaConf

    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train as script

    return lambda config: script.main.__wrapped__(OmegaConf.structured(config))


def kill_after_the_first_row(folder: Path, signum: int) -> None:
    def interrupt():
        path = folder / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (path.exists() and path.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signum)

    threading.Thread(target=interrupt, daemon=True).start()


QUIET = LoggerConfig(backends=[], interval=32, progress_bar=False, figures=False)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_script_exits_as_the_signal_asks(tmp_path, start, signum, code):
    kill_after_the_first_row(tmp_path, signum)
    with pytest.raises(SystemExit) as stopped:
        start(tiny_config(tmp_path, total_steps=100_000, logger=QUIET, lore=OFF))
    assert stopped.value.code == code
    about = read_stop(tmp_path)
    assert about["reason"] == signum.name and about["step"] < about["total_steps"] == 100_000


def test_the_script_fails_where_health_ends_the_run(tmp_path, start):
    health = HealthConfig(no_reward_steps=32, stop=["no_reward"])
    config = tiny_config(tmp_path, total_steps=20_000, logger=QUIET, lore=OFF, health=health)
    with pytest.raises(RuntimeError, match=r"of 20,000: health\.stop names no_reward"):
        start(config)


def test_a_run_that_goes_through_leaves_no_word_of_a_stop(tmp_path):
    (tmp_path / "stopped.json").write_text("{}")
    train(tiny_config(tmp_path, total_steps=32, logger=QUIET, lore=OFF))
    assert read_stop(tmp_path) is None
