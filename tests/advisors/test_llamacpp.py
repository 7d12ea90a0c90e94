"""The protocol of a real llama.cpp server; the answers of its random model are noise."""

from __future__ import annotations

import asyncio
import logging
import math

import pytest

for module in ("httpx", "gguf", "tokenizers"):
    pytest.importorskip(module)
xllamacpp = pytest.importorskip("xllamacpp")

# These imports need what may be missing.
# ruff: noqa: E402
from tiny_gguf import write_tiny_gguf

from lore_torchrl.advisors.base import Advice, AdviceRequest
from lore_torchrl.advisors.chat import ChatAdvisor
from lore_torchrl.advisors.errors import MalformedError

KEY = "sk-llamacpp-0123456789"
ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")


def request(index: int = 0) -> AdviceRequest:
    return AdviceRequest(f"A door, {index} steps ahead.", ACTIONS, f"door{index}")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [KEY]
    params.n_parallel = 2
    params.n_ctx = 8192
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    yield f"{server.listening_address}/v1"
    # The server ends with its object.
    del server


def advisor(url: str, **keywords) -> ChatAdvisor:
    settings = {"base_url": url, "api_key": KEY, "server": "llamacpp", "retries": 0}
    return ChatAdvisor("tiny", **(settings | keywords))


def ask(asked: ChatAdvisor, count: int = 1):
    async def once():
        try:
            return await asked.advise([request(index) for index in range(count)])
        finally:
            await asked.aclose()

    return asyncio.run(once())


def test_logprobs_are_a_distribution_over_all_actions(url):
    answers = ask(advisor(url, mode="logprobs"), 4)
    for advice in answers:
        assert isinstance(advice, Advice), repr(advice)
        shares = [math.exp(value) for value in advice.logits]
        assert sum(shares) == pytest.approx(1.0, abs=1e-3)
        # The samplers are off: none of the seven was cut away.
        assert min(shares) > 1e-4
        assert advice.confidence == pytest.approx(1.0, abs=1e-3)
        assert advice.usage.prompt_tokens > 50
        assert advice.usage.completion_tokens == 1
    assert len({advice.logits for advice in answers}) > 1


def test_logprobs_are_the_same_when_asked_again(url):
    first, again = (ask(advisor(url, mode="logprobs"))[0] for _ in range(2))
    assert first.logits == pytest.approx(again.logits, abs=1e-2)


def test_json_is_held_to_the_schema(url):
    for advice in ask(advisor(url, mode="json", extra_body={"seed": 1}), 4):
        assert isinstance(advice, Advice), repr(advice)
        assert len(advice.logits) == len(ACTIONS)
        assert all(value == int(value) and abs(value) <= 10 for value in advice.logits)
        assert 0.0 <= advice.confidence <= 1.0


def test_votes_of_noise_are_unreadable_or_counted(url):
    answer = ask(advisor(url, mode="vote", votes=3, max_tokens=4))[0]
    assert isinstance(answer, (Advice, MalformedError))


def test_auto_takes_logprobs(url, caplog):
    caplog.set_level(logging.INFO)
    asked = advisor(url, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert isinstance(ask(asked)[0], Advice)
    assert asked.chosen_mode == "logprobs"
    assert asked.requests_sent == 1
    assert KEY not in caplog.text


def test_a_wrong_key_is_told_apart(url):
    error = ask(advisor(url, mode="logprobs", api_key="sk-wrong-key"))[0]
    assert error.kind == "authentication"
    assert "sk-wrong-key" not in str(error)
