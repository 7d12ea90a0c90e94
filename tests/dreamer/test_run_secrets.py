"""What a run, its scripts and a hostile server may leave behind of a key: nothing."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import planner, tiny_config

pytest.importorskip("httpx")

from fault_server import FaultServer
from spellings import KEY, SPELLINGS, hostile_replies, leaks

from lore_torchrl.advisors.chat import ChatAdvisor
from lore_torchrl.configs import CallsConfig, LoggerConfig, LoReConfig
from lore_torchrl.dreamer.run import build_run, train
from lore_torchrl.dreamer.secrets import hide_secrets

EXAMPLES = Path(__file__).parents[2] / "examples"
PASSWORD = "Hunter-12-password"


def files_of(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes().decode("utf-8", "replace")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_no_file_and_no_output_of_a_run_holds_what_a_hostile_server_sends_back(
    tmp_path, capfd, caplog
):
    caplog.set_level("DEBUG")
    replies = itertools.cycle(hostile_replies())
    with FaultServer(reply=lambda *_: next(replies)) as server:
        advisor = ChatAdvisor(
            "m",
            base_url=server.url,
            api_key=KEY,
            server="vllm",
            mode="json",
            retries=0,
            extra_body={"user": KEY},
        )
        config = tiny_config(
            tmp_path,
            record=str(tmp_path / "recording.sqlite"),
            checkpoint_interval=64,
            lore=LoReConfig(calls=CallsConfig(budget=200, cooldown=0)),
            logger=LoggerConfig(interval=32, progress_bar=True, figures=False, backends=["csv"]),
            advisor={"api_key": PASSWORD, "extra_body": {"user": f"me-{KEY}"}},
        )
        train(config, advisor=advisor)
        assert server.total > 20
    told = capfd.readouterr()
    files = files_of(tmp_path)
    assert {"config.json", "metrics.jsonl", "advice.jsonl", "recording.sqlite"} <= set(files)
    files |= {"stdout": told.out, "stderr": told.err, "log": caplog.text}
    assert {name: found for name, text in files.items() if (found := leaks(text))} == {}
    assert [name for name, text in files.items() if PASSWORD in text] == []
    assert "[redacted]" in files["recording.sqlite"] and "[redacted]" in files["config.json"]
    assert "LoRe goes on without some advice" in caplog.text


def test_wandb_is_given_neither_settings_nor_a_command_line_with_a_key(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    omegaconf = pytest.importorskip("omegaconf")
    monkeypatch.setenv("WANDB_SILENT", "true")
    advisor = {"api_key": PASSWORD, "base_url": f"http://me:{KEY}@host/v1"}
    words = [f"advisor.api_key={PASSWORD}", f"advisor.base_url=http://me:{KEY}@host/v1", "seed=0"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    hide_secrets(omegaconf.OmegaConf.create({"advisor": advisor}))
    assert sys.argv[3] == "seed=0" and not leaks(str(sys.argv)) and PASSWORD not in str(sys.argv)
    config = tiny_config(
        tmp_path, advisor=advisor, logger=LoggerConfig(backends=["wandb"], mode="disabled")
    )
    run = build_run(config, advisor=planner())
    given = str(dict(run.logger.backends[0].experiment.config))
    run.close()
    assert "[redacted]" in given and not leaks(given) and PASSWORD not in given


def run_script(name: str, *words: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        cwd=EXAMPLES.parent,
    )


@pytest.mark.slow
def test_a_refused_password_is_in_no_file_and_no_output_of_a_sweep(tmp_path):
    ended = run_script(
        "train.py",
        *("-m", "experiment=doorkey5x5", "seed=0,1", "advisor=vllm", "advisor.model=m"),
        *(f"advisor.base_url=http://me:{PASSWORD}@127.0.0.1:9/v1", "hydra.output_subdir=.hydra"),
        f"hydra.sweep.dir={tmp_path}",
        HYDRA_FULL_ERROR="1",
    )
    assert ended.returncode == 1 and "must not hold credentials" in ended.stderr
    files = files_of(tmp_path)
    assert {"multirun.yaml", "0/.hydra/overrides.yaml", "0/.hydra/config.yaml"} <= set(files)
    files |= {"stdout": ended.stdout, "stderr": ended.stderr}
    assert [name for name, text in files.items() if PASSWORD in text] == []
    assert "http://[redacted]@127.0.0.1:9/v1" in files["multirun.yaml"]


@pytest.mark.slow
def test_asking_once_shows_the_answer_without_the_key():
    said = " ".join(SPELLINGS.values()) + "\x1b[2J A"
    answer = {"choices": [{"message": {"content": '{"action": 0, "why": "' + said + '"}'}}]}
    with FaultServer(reply=lambda *_: (200, answer)) as server:
        ended = run_script(
            "advise.py",
            *("env=frozenlake", "advisor=vllm", f"advisor.model=m-{KEY}", "advisor.mode=json"),
            f"advisor.base_url={server.url}",
            OPENAI_API_KEY=KEY,
        )
        assert server.requests[0][1]["authorization"] == f"Bearer {KEY}"
    told = ended.stdout + ended.stderr
    assert leaks(told) == [] and "[redacted]" in told and "\x1b" not in told
