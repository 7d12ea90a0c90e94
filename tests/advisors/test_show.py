from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("hydra")
pytest.importorskip("minigrid")

from fault_server import FaultServer

from lore_torchrl.advisors.base import Advice, AdviceRequest
from lore_torchrl.advisors.errors import NotJSONError, Usage
from lore_torchrl.advisors.show import ask_once

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-very-secret-0123456789"
REQUEST = AdviceRequest("A door.", ("wait", "open"), "door")


class Says:
    def __init__(self, answer):
        self.answer = answer

    async def advise(self, requests):
        return [self.answer]


@pytest.mark.parametrize(
    ("answer", "advised", "shown"),
    [
        (Advice(logits=(0.0, 3.0), raw="open!", usage=Usage(5, 1, 0.25)), True, "95.3%"),
        (Advice(logits=(0.0, 3.0), raw="open!", usage=Usage(5, 1, 0.25)), True, "0.25"),
        (Advice((0.0, 3.0), plan=(1, 0)), True, "plan         open, wait"),
        (Advice((0.0, 3.0), subgoal="hold the key"), True, "subgoal      hold the key"),
        (Advice((0.0, 3.0), valid=(False, True)), True, "valid        open"),
        (NotJSONError("no JSON", usage=Usage(5, 1)), False, "not_json: no JSON"),
        (None, False, "nothing to say"),
    ],
)
def test_every_answer_is_shown(answer, advised, shown):
    report, was_advised = asyncio.run(ask_once(Says(answer), REQUEST))
    assert was_advised is advised
    assert shown in report
    assert "A door." in report


def test_the_prompt_is_the_one_that_was_answered():
    class Settles(Says):
        mode = "logprobs"

        async def advise(self, requests):
            self.mode = "json"
            return await super().advise(requests)

        def prompt(self, request):
            return f"{request.description} Answer as {self.mode}."

    report, _ = asyncio.run(ask_once(Settles(Advice((0.0, 3.0))), REQUEST))
    assert "Answer as json." in report and "logprobs" not in report


def run(*overrides: str, **variables: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENAI_")}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "advise.py"), *overrides],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**env, **variables, "PYTHONPATH": str(ROOT / "src")},
    )


@pytest.mark.slow
def test_the_example_asks_the_embedded_planner():
    result = run("env=doorkey5x5", "advisor=scripted", "steps=3")
    assert result.returncode == 0, result.stderr
    assert "Mission: use the key" in result.stdout
    assert "logit   3.00" in result.stdout


def test_the_example_asks_a_server():
    with FaultServer() as server:
        result = run("advisor=openai", OPENAI_BASE_URL=server.url, OPENAI_API_KEY=KEY)
    assert result.returncode == 0, result.stderr
    for part in ("Prompt", "Answer", "mode         logprobs", "100 read, 10 written", "0.000056"):
        assert part in result.stdout, result.stdout
    assert KEY not in result.stdout + result.stderr


@pytest.mark.slow
def test_the_example_shows_an_error_and_fails():
    with FaultServer(after="echo_key") as server:
        result = run("advisor=vllm", OPENAI_BASE_URL=server.url, OPENAI_API_KEY=KEY)
    assert result.returncode == 1
    assert "authentication: Status 401" in result.stdout
    assert KEY not in result.stdout + result.stderr


@pytest.mark.slow
def test_the_example_says_what_is_missing():
    result = run("advisor=openai")
    assert result.returncode == 1
    assert "OPENAI_API_KEY" in result.stderr
