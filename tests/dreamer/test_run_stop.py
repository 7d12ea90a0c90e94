"""A run that ends before its last step says so, to whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tiny_run import OFF, tiny_config

from lore_torchrl.configs import HealthConfig, LoggerConfig, LoReConfig
from lore_torchrl.dreamer.checkpoint import find_checkpoint
from lore_torchrl.dreamer.logging import RunLogger
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


def test_a_run_whose_end_cannot_be_uploaded_is_complete(tmp_path, monkeypatch, caplog):
    def publish(*_args, **_settings):
        raise ConnectionError("no route to the server")

    monkeypatch.setattr(RunLogger, "publish", publish)
    closed = []
    monkeypatch.setattr(RunLogger, "close", lambda _self, *, failed=False: closed.append(failed))
    with caplog.at_level("WARNING", logger="torchrl"):
        summary = train(tiny_config(tmp_path, total_steps=32, logger=QUIET, lore=OFF))
    assert summary["step"] == 32 and closed == [False]
    assert "not uploaded" in caplog.text and "no route to the server" in caplog.text


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_leaves_the_workers_to_the_run(tmp_path):
    """It reaches every process of the group, and a worker that died would end the run."""
    pytest.importorskip("minigrid")
    words = ["env.parallel=true", "env.num_envs=2", "total_steps=100000", "logger.interval=32"]
    words += [f"output_dir={tmp_path}", f"hydra.run.dir={tmp_path}/hydra", "lore=off"]
    command = [sys.executable, EXAMPLES / "train.py", "experiment=doorkey5x5", *words]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(60) == 130, (tmp_path / "log").read_text()[-2000:]
    finally:
        run.kill()
    assert read_stop(tmp_path)["reason"] == "SIGINT"
    assert list((tmp_path / "checkpoints").glob("checkpoint-*"))


def test_a_run_that_replaces_another_keeps_none_of_its_advice(tmp_path):
    train(tiny_config(tmp_path, total_steps=32, logger=QUIET))
    assert (tmp_path / "advice.jsonl").read_text()
    stock = LoReConfig(enabled=False)
    train(tiny_config(tmp_path, total_steps=32, logger=QUIET, lore=stock))
    assert not (tmp_path / "advice.jsonl").exists()


SILENT = """
import sys
from pathlib import Path
from tiny_run import tiny_config
from lore_torchrl.advisors.chat import ChatAdvisor
from lore_torchrl.configs import CallsConfig, LoggerConfig, LoReConfig
from lore_torchrl.dreamer.run import train

folder, url, mode = sys.argv[1:]
lore = LoReConfig(calls=CallsConfig(mode=mode))
config = tiny_config(
    Path(folder),
    total_steps=100_000,
    checkpoint_interval=50_000,
    lore=lore,
    logger=LoggerConfig(progress_bar=False),
)
train(config, advisor=ChatAdvisor("m", base_url=url, server="vllm", mode="json"))
"""


@pytest.fixture
def silent_run(tmp_path):
    """Starts a run that waits, or has asked and goes on, beside a server that never answers."""
    pytest.importorskip("httpx")
    from fault_server import FaultServer

    started = []

    def start(mode: str) -> subprocess.Popen:
        command = [sys.executable, "-c", SILENT, str(tmp_path), server.url, mode]
        paths = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})
        started.append(process)
        deadline = time.monotonic() + 60
        while not server.total and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.total, "it has asked"
        return process

    with FaultServer(random_of=("stall",)) as server:
        yield start
        for process in started:
            process.kill()
            process.wait(10)


@pytest.mark.parametrize("mode", ["async", pytest.param("blocking", marks=pytest.mark.slow)])
def test_a_silent_server_does_not_hold_up_the_stop(tmp_path, silent_run, mode):
    process = silent_run(mode)
    began = time.monotonic()
    process.terminate()
    assert process.wait(20) == 0
    # 5 seconds on a free machine.
    assert time.monotonic() - began < 10
    assert read_stop(tmp_path)["reason"] == "SIGTERM"
    assert find_checkpoint(tmp_path).is_dir()


def test_a_second_signal_ends_it_at_once(silent_run):
    process = silent_run("blocking")
    process.terminate()
    time.sleep(0.05)
    began = time.monotonic()
    process.terminate()
    process.wait(5)
    assert time.monotonic() - began < 2


RESOLVING = """
import asyncio, socket, time
from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.service import AdviceService, CallBudget

socket.getaddrinfo = lambda *args, **kwargs: time.sleep(60)

class Resolving:
    async def advise(self, requests):
        await asyncio.get_running_loop().getaddrinfo("host.invalid", 80)

service = AdviceService(Resolving(), budget=CallBudget(1), timeout_s=0.1)
service.ask([AdviceRequest("a door", ("wait", "open"), "door")])
service.close()
"""


def test_a_slow_name_server_does_not_hold_up_the_exit():
    subprocess.run([sys.executable, "-c", RESOLVING], check=True, timeout=30)
