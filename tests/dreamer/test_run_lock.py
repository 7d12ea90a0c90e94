"""A run has its folder to itself, for as long as its process lives."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import OFF, planner, tiny_config

from lore_torchrl.configs import LoggerConfig
from lore_torchrl.dreamer.run import train
from lore_torchrl.dreamer.run_lock import file_lock, sign

ROOT = Path(__file__).parents[2]
QUIET = LoggerConfig(backends=[], interval=64, progress_bar=False, figures=False)
# Holds the lock as a run does, and leaves a worker behind that outlives it.
HOLDER = """
import os, sys, time
from pathlib import Path
from lore_torchrl.dreamer.run_lock import file_lock, sign
with file_lock(Path(sys.argv[1])) as lock:
    sign(lock, os.getpid())
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
    print(worker, flush=True)
    time.sleep(60)
"""


def test_a_second_run_in_a_folder_is_refused_and_changes_nothing(tmp_path):
    config = tiny_config(tmp_path, total_steps=32, logger=QUIET, lore=OFF)
    train(config, advisor=planner())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with file_lock(tmp_path / "run.lock") as lock:
        sign(lock, os.getpid())
        with pytest.raises(RuntimeError, match=f"{tmp_path} belongs to a run.*{os.getpid()} on"):
            train(config, advisor=planner())
    before[tmp_path / "run.lock"] = (tmp_path / "run.lock").read_bytes()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    train(config, advisor=planner())


def test_a_killed_process_leaves_its_folder_free_even_where_a_worker_outlives_it(tmp_path):
    path = tmp_path / "run.lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        worker = int(holder.stdout.readline())
        try:
            with file_lock(path) as lock:
                assert lock is None
            assert path.read_text().startswith(f"{holder.pid} on ")
            holder.kill()
            holder.wait()
            os.kill(worker, 0)  # It lives.
            with file_lock(path) as lock:
                assert lock is not None
        finally:
            holder.kill()
            os.kill(worker, signal.SIGKILL)


def test_a_file_system_without_locks_keeps_no_run_from_training(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with file_lock(tmp_path / "run.lock") as lock:
        assert lock is not None


def test_what_a_run_logs_is_in_its_folder(tmp_path):
    train(tiny_config(tmp_path, total_steps=32), advisor=planner())
    assert "Advisor: ScriptedAdvisor" in (tmp_path / "run.log").read_text()


def test_folders_are_named_to_the_microsecond():
    pytest.importorskip("hydra")
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.utils import setup_globals
    from omegaconf import OmegaConf

    from lore_torchrl.configs import register_configs

    register_configs()
    setup_globals()
    GlobalHydra.instance().clear()
    names: list[str] = []
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        for _ in range(3):
            config = hydra.compose("config", return_hydra_config=True, overrides=["output_dir=x"])
            names += [config.hydra.run.dir, config.hydra.sweep.dir]
            time.sleep(0.001)
        sweep = hydra.compose("config", return_hydra_config=True, overrides=["sweep=gate"])
        folder = OmegaConf.to_container(sweep.hydra.sweep, resolve=False)["dir"]
        assert folder.endswith("%H-%M-%S-%f}")
    assert len(set(names)) == len(names)
