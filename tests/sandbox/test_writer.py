"""A real server on this machine, whose model writes what the test says."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from lore_torchrl.configs import EnvConfig
from lore_torchrl.configs.advisors import ChatAdvisorConfig, ScriptedAdvisorConfig
from lore_torchrl.sandbox import ProgramError, ProgramStore
from lore_torchrl.sandbox.writer import ProgramWriter, code_of, program_prompt
from lore_torchrl.service import CallBudget
from lore_torchrl.service.budget import BudgetExceededError

pytest.importorskip("pydantic_monty")
chat = pytest.importorskip("lore_torchrl.advisors.chat")

VIEWS = [{"n": n, "mission": "count"} for n in range(12)]
ABOUT = {"env": "Counting", "mission": "count to 12", "fields": {"n": "int, the count"}}
GOOD = "Here:\n```python\ndef progress(obs):\n    return obs['n'] / 12\n```"
BROKEN = "```python\ndef progress(obs):\n    return obs['m'] / 12\n```"
CONSTANT = "def progress(obs):\n    return 0.5"


@pytest.fixture
def serve():
    """Start servers that answer in turn; return the address and the bodies they were sent."""
    servers = []

    def start(*answers: str):
        left, bodies = list(answers), []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                message = {"message": {"content": left.pop(0)}}
                usage = {"prompt_tokens": 10, "completion_tokens": 5}
                data = json.dumps({"choices": [message], "usage": usage}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = start.url = f"http://127.0.0.1:{server.server_port}/v1"
        return chat.ChatAdvisor("tiny", base_url=url, server="vllm"), bodies

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


async def write(writer: ProgramWriter):
    try:
        return await writer.write("progress", views=VIEWS, **ABOUT)
    finally:
        await writer.advisor.aclose()


def test_the_model_is_told_what_was_wrong_until_it_is_right(serve, tmp_path):
    advisor, bodies = serve(BROKEN, CONSTANT, GOOD)
    store, budget = ProgramStore(tmp_path / "programs.jsonl"), CallBudget(5)
    program = asyncio.run(write(ProgramWriter(advisor, store, budget=budget)))
    assert program.code == code_of(GOOD) and program.model == "tiny" and program.env == "Counting"
    assert len(program.errors) == 2 and "KeyError" in program.errors[0]
    first, second, third = (body["messages"][-1]["content"] for body in bodies)
    assert "- n: int, the count" in first and "count to 12" in first and "KeyError" not in first
    assert "obs['m'] / 12" in second and "KeyError" in second
    assert "the same on all 12" in third
    assert (budget.spent, budget.tokens) == (3, 45)
    kept = store.read()
    assert [one.accepted for one in kept] == [False, False, True]
    assert kept[-1] == program and kept[0].answer == BROKEN
    assert [one.checks["kind"] for one in kept[:2]] == ["error", "result"]
    assert kept[-1].prompt.endswith(third) and len(kept[-1].prompt_hash) == 64


def test_a_model_is_asked_also_where_the_adapter_has_no_program(serve, tmp_path):
    minigrid = pytest.importorskip("lore_torchrl.envs.minigrid")
    programs = pytest.importorskip("lore_torchrl.dreamer.programs")
    code = "def progress(obs):\n    return 0.0 if obs['front'] == 'empty' else 1.0"
    _, bodies = serve(f"```python\n{code}\n```")
    adapter = minigrid.MiniGrid("MiniGrid-DoorKey-5x5-v0")
    adapter.programs = {}
    config = SimpleNamespace(program="progress", save=str(tmp_path / "kept.jsonl"), seed=0)
    model = ChatAdvisorConfig(model="tiny", base_url=serve.url, server="vllm")
    report, found = programs.show_program(config, EnvConfig(), adapter, model)
    assert found and code in report and len(bodies) == 1
    (kept,) = ProgramStore(config.save).read()
    assert kept.code == code and kept.model == "tiny"
    with pytest.raises(ValueError, match="no hand-written progress program"):
        programs.show_program(config, EnvConfig(), adapter, ScriptedAdvisorConfig())


def test_after_the_last_attempt_the_fault_is_raised(serve):
    advisor, bodies = serve(BROKEN, BROKEN)
    with pytest.raises(ProgramError, match="KeyError"):
        asyncio.run(write(ProgramWriter(advisor, attempts=2)))
    assert len(bodies) == 2


def test_without_a_call_left_nothing_is_sent(serve):
    advisor, bodies = serve(BROKEN, GOOD)
    with pytest.raises(BudgetExceededError):
        asyncio.run(write(ProgramWriter(advisor, budget=CallBudget(1))))
    assert len(bodies) == 1


def test_an_error_of_the_server_is_paid_as_it_was():
    advisor = chat.ChatAdvisor("tiny", base_url="http://127.0.0.1:9/v1", retries=0)
    budget = CallBudget(3)
    with pytest.raises(ValueError, match="failed"):
        asyncio.run(write(ProgramWriter(advisor, budget=budget)))
    assert budget.spent == 0


@pytest.mark.parametrize("kind", ["features", "progress", "subgoals"])
def test_a_prompt_holds_dollars_and_braces_as_they_are(kind):
    view = {"n": 1, "mission": "pay $5 {now}"}
    prompt = program_prompt(kind, example=view, **(ABOUT | {"mission": "pay $5 {now}"}))
    assert "pay $5 {now}" in prompt.user and "$" not in prompt.user.replace("$5", "")
    assert prompt.system and "---" not in str(prompt)


def test_the_program_is_found_among_other_blocks():
    block = "```{}\ndef progress(obs):\n    return 0.5\n```\n"
    code = "def progress(obs):\n    return 0.5"
    data = '```json\n{"n": 1}\n```\n'
    for language in ("", "py", "python", "Python", "python3"):
        assert code_of(f"{data}So:\n{block.format(language)}") == code
    assert code_of(f"{block.format('python')}It gives:\n```\n0.5\n```") == code
    assert code_of(f"Here: ```python\n{code}```") == code, "fences within lines"
    assert code_of("```py\nx = 1\n```\n```py\nx = 2\n```") == "x = 2"
    assert code_of(f"{data}{code}").startswith("```json"), "no block of Python"


def test_one_view_is_too_few_to_ask():
    writer = ProgramWriter(None, budget=(budget := CallBudget(5)))
    with pytest.raises(ValueError, match="at least 2 views, got 1"):
        asyncio.run(writer.write("progress", views=VIEWS[:1], **ABOUT))
    assert budget.spent == 0


def test_half_a_surrogate_pair_in_a_program_is_written_as_a_question_mark():
    assert code_of("```python\nx = '\ud800'\n```") == "x = '?'"
