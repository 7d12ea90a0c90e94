from __future__ import annotations

import asyncio
import json
import math
import tracemalloc
from dataclasses import replace

import pytest

pytest.importorskip("httpx")

from chat_toy import REQUEST, advisor, ask, content, good, top
from fault_server import FaultServer

from lore_torchrl.advisors.chat import ChatAdvisor
from lore_torchrl.advisors.errors import AdviceError, MalformedError
from lore_torchrl.advisors.http import parse_object
from lore_torchrl.advisors.modes import MODES, ChatSettings
from lore_torchrl.advisors.prompt import PromptTemplate

# ---- logprobs ----


def test_logprobs_are_the_models_own_probabilities():
    reply = top(("B", math.log(0.5)), (" A", math.log(0.2)), ("A", math.log(0.1)), ("x", -2.0))
    with FaultServer(reply=reply) as server:
        advice = good(advisor(server, mode="logprobs"))
        body = server.requests[0][2]
    shares = [math.exp(value) for value in advice.logits]
    assert shares == pytest.approx([0.3 / 0.8, 0.5 / 0.8, 1e-4])
    assert advice.confidence == pytest.approx(0.8)
    assert json.loads(advice.raw) == {"A": 0.3, "B": 0.5, "C": 0.0}
    assert (body["logprobs"], body["top_logprobs"], body["max_completion_tokens"]) == (True, 20, 1)
    assert "A: left (turn left)" in body["messages"][1]["content"]


def test_llamacpp_is_held_to_the_letters_with_its_samplers_off():
    reply = top(("A", 0.75), ("B", 0.25), field="top_probs", value="prob")
    with FaultServer(reply=reply) as server:
        advice = good(advisor(server, mode="logprobs", server="llamacpp", temperature=0.2))
        body = server.requests[0][2]
    assert math.exp(advice.logits[0]) == pytest.approx(0.75)
    assert advice.confidence == 1.0
    assert body["grammar"] == 'root ::= "A" | "B" | "C"'
    # What fits the grammar by chance is not sampled under it: the bias leaves the letters alone.
    assert body["logit_bias"] == [["A", 100.0], ["B", 100.0], ["C", 100.0]]
    assert body["post_sampling_probs"] is True
    assert (body["temperature"], body["top_k"], body["top_p"], body["min_p"]) == (1.0, 0, 1.0, 0.0)
    assert body["max_tokens"] == 1


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (content("A"), "malformed"),
        (content("A", logprobs={"content": []}), "malformed"),
        (content("A", logprobs=[1]), "malformed"),
        (top(("Sure", -0.1)), "malformed"),
        (top(("A", float("nan"))), "not_finite"),
        (top(("A", float("inf"))), "not_finite"),
        (top(("A", None)), "malformed"),
        (top(("A", "high")), "malformed"),
        # More than certain, one by one or together, or less than impossible.
        (top(("A", 1e308)), "malformed"),
        (top(("A", 0.1)), "malformed"),
        (top(("A", -0.1), ("x", -0.1)), "malformed"),
        (top(("A", 1.5), field="top_probs", value="prob"), "malformed"),
        (top(("A", 0.7), ("B", 0.7), field="top_probs", value="prob"), "malformed"),
        (top(("A", 0.9), ("B", -0.1), field="top_probs", value="prob"), "malformed"),
        (top(("A", float("inf")), field="top_probs", value="prob"), "not_finite"),
    ],
)
def test_logprobs_that_cannot_be_read(reply, kind):
    with FaultServer(reply=reply) as server:
        error = ask(advisor(server, mode="logprobs"))
    assert error.kind == kind
    assert error.usage.tokens == 10


def test_a_token_that_is_impossible_has_no_probability():
    with FaultServer(reply=top(("A", -0.1), ("B", -9999.0), ("C", float("-inf")))) as server:
        assert good(advisor(server, mode="logprobs")).logits[1:] == (math.log(1e-4),) * 2


@pytest.mark.parametrize("logprob", [0.0, 1e-6, 4e-3])
def test_a_certain_token_may_be_rounded_up(logprob):
    with FaultServer(reply=top(("A", logprob), ("B", -9999.0))) as server:
        assert good(advisor(server, mode="logprobs")).confidence == 1.0


# ---- json ----


def test_json_asks_for_a_schema_that_fits_the_actions():
    with FaultServer() as server:
        advice = good(advisor(server, mode="json", max_tokens=77))
        body = server.requests[0][2]
    assert advice.logits == (4.0, 0.0, 0.0)
    assert advice.confidence == 0.8
    wanted = body["response_format"]
    assert wanted["type"] == "json_schema"
    logits = wanted["json_schema"]["schema"]["properties"]["action_prior"]["properties"]["logits"]
    assert logits["minItems"] == logits["maxItems"] == 3
    assert body["max_completion_tokens"] == 77
    assert "[0, 0, 0]" in body["messages"][1]["content"]


def test_json_asks_for_a_plan_valid_actions_and_a_subgoal_where_they_are_wanted():
    extras = {"plan": ["forward"], "valid_actions": ["left"], "subgoal": "eat"}
    answer = content(json.dumps({"logits": [0, 0, 1], "confidence": 0.5, **extras}))
    with FaultServer(reply=answer) as server:
        asked = advisor(server, mode="json", ask_for=list(extras))
        (advice,) = asyncio.run(asked.advise([replace(REQUEST, subgoals=("eat", "sleep"))]))
        body = server.requests[0][2]
    assert (advice.plan, advice.valid, advice.subgoal) == ((2,), (True, False, False), "eat")
    schema = body["response_format"]["json_schema"]["schema"]
    assert set(extras) < set(schema["required"])
    assert schema["properties"]["subgoal"]["enum"] == ["", "eat", "sleep"]
    prompt = body["messages"][1]["content"]
    assert '"plan"' in prompt and '"valid_actions"' in prompt and "- sleep" in prompt


def test_only_mode_json_can_be_asked_for_more():
    with pytest.raises(ValueError, match="ask_for needs mode="):
        ChatAdvisor("m", base_url="http://127.0.0.1:9/v1", mode="vote", ask_for=["plan"])


def test_a_refused_format_is_not_asked_for_again():
    def reply(path, body):
        wanted = body.get("response_format", {}).get("type")
        if wanted == "json_schema":
            return 400, {"error": {"message": "response_format json_schema is not supported"}}
        return content('{"logits": [0, 0, 1]}')(path, body)

    with FaultServer(reply=reply) as server:
        asked = advisor(server, mode="json")
        good(asked)
        good(asked)
        formats = [body["response_format"]["type"] for _, _, body in server.requests]
    assert formats == ["json_schema", "json_object", "json_object"]


@pytest.mark.parametrize(("mode", "forms"), [("json", 3), ("vote", 2), ("logprobs", 1)])
def test_a_lasting_refusal_is_its_error_and_soon_costs_one_request(mode, forms):
    with FaultServer(after="400") as server:
        asked = advisor(server, mode=mode)
        for question in range(9):
            assert ask(asked).kind == "status_400"
            assert server.total == forms + question


def test_refusals_after_an_answer_cost_one_request_for_each_form_that_is_left():
    with FaultServer(["fine"], after="400") as server:
        asked = advisor(server, mode="vote", votes=2)
        good(asked)
        totals = []
        for _ in range(9):
            assert ask(asked).kind == "status_400"
            totals.append(server.total)
    assert totals == [3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_refused_single_votes_are_asked_for_one_by_one():
    def reply(path, body):
        return (400, {}) if "n" in body else content("C")(path, body)

    with FaultServer(reply=reply) as server:
        asked = advisor(server, mode="vote", votes=8)
        good(asked)
        server.after = "400"
        for more in (8, 1, 1):
            before = server.total
            assert ask(asked).kind == "status_400"
            assert server.total == before + more
        server.after = "fine"
        assert good(asked).confidence == 1.0


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (content("Go right, I think."), "not_json"),
        (content('{"logits": [1, 2]}'), "malformed"),
        (content('{"logits": [NaN, 1, 1]}'), "not_finite"),
        (content(""), "empty"),
        (content(), "empty"),
        (lambda path, body: (200, {"choices": [{"message": {"content": None}}]}), "empty"),
        (lambda path, body: (200, {"choices": [{"message": {"refusal": "No."}}]}), "malformed"),
        (lambda path, body: (200, {"choices": [{"text": "left"}]}), "malformed"),
        (lambda path, body: (200, {"choices": "left"}), "malformed"),
        (lambda path, body: (200, {}), "malformed"),
    ],
)
def test_an_answer_that_cannot_be_read(reply, kind):
    with FaultServer(reply=reply) as server:
        error = ask(advisor(server, mode="json"))
    assert isinstance(error, AdviceError)
    assert error.kind == kind
    assert error.__traceback__ is None


def test_an_answer_cut_off_says_so():
    reply = content('{"logits": [1, 2', finish_reason="length")
    with FaultServer(reply=reply) as server:
        assert "raise max_tokens" in str(ask(advisor(server, mode="json")))


def test_halves_of_characters_do_not_reach_the_raw_answer():
    reply = content('{"logits": [0, 0, 1], "why": "\ud83d"}')
    with FaultServer(reply=reply) as server:
        assert good(advisor(server, mode="json")).raw == '{"logits": [0, 0, 1], "why": "?"}'


def test_what_the_server_says_of_the_end_is_quoted():
    reply = content("", finish_reason="\x1b[2J" + "stop " * 1000)
    with FaultServer(reply=reply) as server:
        message = str(ask(advisor(server, mode="json")))
    assert message.isprintable()
    assert len(message) < 200


@pytest.mark.parametrize("status", [201, 202, 206])
def test_any_status_of_success_brings_an_answer(status):
    def reply(path, body):
        return status, content('{"logits": [0, 0, 1]}')(path, body)[1]

    with FaultServer(reply=reply) as server:
        assert good(advisor(server, mode="json")).logits == (0.0, 0.0, 1.0)


# ---- vote ----


def test_votes_are_counted_and_unreadable_ones_weigh_on_the_confidence():
    reply = content("A", "left", '{"action": "left"}', "B", "no idea")
    with FaultServer(reply=reply) as server:
        advice = good(advisor(server, mode="vote", votes=5, smoothing=0.5))
        body = server.requests[0][2]
    shares = [math.exp(value) for value in advice.logits]
    assert shares == pytest.approx([3.5 / 5.5, 1.5 / 5.5, 0.5 / 5.5])
    assert advice.confidence == pytest.approx(3 / 5)
    assert (body["n"], body["temperature"]) == (5, 1.0)


@pytest.mark.parametrize("strict", [True, False])
def test_votes_that_do_not_come_at_once_come_singly(strict):
    def reply(path, body):
        if "n" in body and strict:
            return 400, {"error": {"message": "n must be 1"}}
        return content("C")(path, body)

    with FaultServer(reply=reply) as server:
        asked = advisor(server, mode="vote", votes=4)
        assert good(asked).confidence == 1.0
        first = server.total
        advice = good(asked)
        # Once learnt, it asks for no more than the votes.
        assert server.total - first == 4
        assert advice.usage.tokens == 40


def test_a_lost_vote_does_not_lose_the_others():
    with FaultServer(["400", "fine", "401"], reply=content("C")) as server:
        advice = good(advisor(server, mode="vote", votes=4))
    assert advice.confidence == pytest.approx(3 / 4)


# ---- bodies made to be expensive ----

VALUES = {
    "numbers": "0," * 30_000 + "0",
    "objects": "{}," * 14_000 + "{}",
    "messages": '{"message":{}},' * 10_000 + '{"message":{}}',
    "keys": "{" + ",".join(f'"{index}":"x"' for index in range(30_000)) + "}",
    "more than allowed": "0," * 500_000 + "0",
    "a long text": '"' + "{" * 30_000 + " " * 1_000_000 + '"',
}
BODIES = {
    "logprobs": (
        '{"choices":[{"message":{},"logprobs":{"content":[%s]}}]}',
        '{"choices":[{"message":{},"logprobs":{"content":[{"token":"A","top_logprobs":[%s]}]}}]}',
    ),
    "json": ('{"choices":[%s]}', '{"choices":%s}', '{"choices":[{"message":{"content":%s}}]}'),
    "vote": ('{"choices":[%s]}', '{"choices":[{"message":{"content":%s}}]}'),
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(
    ("mode", "body"), [(mode, body) for mode, bodies in BODIES.items() for body in bodies]
)
def test_a_body_that_cannot_be_read_takes_a_few_times_its_size(mode, body, values):
    text = body % VALUES[values]
    text = text[:-1] + ',"model":"' + "x" * (1_000_000 - len(text)) + '"}'

    async def post(path, body):
        return parse_object(text)

    asked = MODES[mode](ChatSettings("m", votes=2), PromptTemplate("default", mode))
    tracemalloc.start()
    try:
        with pytest.raises(MalformedError):
            asyncio.run(asked.ask(post, REQUEST))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(text)
