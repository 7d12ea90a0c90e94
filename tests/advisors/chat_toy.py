"""A question, an advisor of a fault server and ready replies, for the tests of chat."""

from __future__ import annotations

import asyncio

from fault_server import FaultServer

from lore_torchrl.advisors.base import Advice, AdviceRequest
from lore_torchrl.advisors.chat import ChatAdvisor

KEY = "sk-very-secret-0123456789"
ACTIONS = ("left", "right", "forward")
REQUEST = AdviceRequest(
    "A door, $5 to open.",
    ACTIONS,
    "door",
    image=b"\x89PNG",
    action_meanings=("turn left", "turn right", "go on"),
    mission="get out",
)


def advisor(server: FaultServer, /, **keywords) -> ChatAdvisor:
    settings = {
        "base_url": server.url,
        "api_key": KEY,
        "deadline_s": 5.0,
        "backoff_s": (0.01, 0.02),
    }
    return ChatAdvisor("m", **(settings | keywords))


def ask(asked: ChatAdvisor, *requests: AdviceRequest):
    async def once():
        try:
            return await asked.advise(requests or (REQUEST,))
        finally:
            await asked.aclose()

    answers = asyncio.run(once())
    return answers if requests else answers[0]


def good(asked: ChatAdvisor) -> Advice:
    advice = ask(asked)
    assert isinstance(advice, Advice), repr(advice)
    assert len(advice.logits) == len(ACTIONS)
    return advice


def content(*texts: str, **fields):
    """A reply that says these things, whatever was asked for."""

    def reply(path, body):
        if not path.endswith("/chat/completions"):
            return 404, {}
        choices = [{"message": {"content": text}} | fields for text in texts]
        return 200, {"choices": choices, "usage": {"prompt_tokens": 7, "completion_tokens": 3}}

    return reply


def top(*pairs, field="top_logprobs", value="logprob"):
    entries = [{"token": token, value: number} for token, number in pairs]
    position = {"token": "A", "logprob": -1.0, field: entries}
    return content("A", logprobs={"content": [position]})
