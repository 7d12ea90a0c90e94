from __future__ import annotations

import asyncio
import logging
import pickle

import pytest

pytest.importorskip("httpx")

from chat_toy import ACTIONS, KEY, REQUEST, advisor, ask, content, good, top
from fault_server import FAULTS, FaultServer, chat_reply

from lore_torchrl.advisors.base import Advice, AdviceRequest, Advisor
from lore_torchrl.advisors.chat import ChatAdvisor


def test_it_is_an_advisor():
    assert isinstance(ChatAdvisor("m", base_url="http://x/v1"), Advisor)


# ---- auto ----


def without(*fields):
    """A good server that ignores these fields, with status 200."""

    def reply(path, body):
        return chat_reply(path, {k: v for k, v in body.items() if k not in fields})

    return reply


@pytest.mark.parametrize(
    ("reply", "mode", "requests"),
    [
        (chat_reply, "logprobs", 1),
        (without("logprobs"), "json", 2),
        (lambda path, body: top(("Sure", -0.1))(path, body), None, None),
    ],
)
def test_auto_takes_the_best_that_is_honoured(reply, mode, requests, caplog):
    caplog.set_level(logging.INFO)
    with FaultServer(reply=reply) as server:
        asked = advisor(server)
        assert asked.chosen_mode is None
        advice = good(asked)
        if mode is None:
            # It wrote a bare letter where JSON was asked for, which still names an action.
            mode, requests = "json", 2
        assert asked.chosen_mode == mode
        assert server.total == asked.requests_sent == requests
        assert f"in mode {mode}" in caplog.text
        good(asked)
        assert server.total == requests + 1
    assert advice.usage.tokens > 0


def test_a_server_that_ignores_all_fields_gets_votes(caplog):
    def reply(path, body):
        answer = "B" if "letter of the best action" in body["messages"][-1]["content"] else "Hm."
        return content(answer)(path, body)

    with FaultServer(reply=reply) as server:
        asked = advisor(server, votes=3)
        for _ in range(2):
            good(asked)
            assert asked.chosen_mode is None, "json may have failed by chance"
        advice = good(asked)
        assert asked.chosen_mode == "vote"
        assert "up to 3 requests a question" in caplog.text
    assert advice.confidence == 1.0
    # One each for logprobs and json, which came to nothing but cost; one for n, two singly.
    assert advice.usage.tokens == 10 * (1 + 1 + 1 + 2)


@pytest.mark.parametrize("fault", ["500", "garbage"])
def test_json_that_fails_once_is_asked_again(fault):
    good_reply, asked_for_json = content("Hm."), []

    def reply(path, body):
        if body.get("logprobs") or "response_format" not in body:
            return content("A")(path, body)
        asked_for_json.append(path)
        if len(asked_for_json) > 1:
            return chat_reply(path, body)
        return (500, {}) if fault == "500" else good_reply(path, body)

    with FaultServer(reply=reply) as server:
        asked = advisor(server, votes=3, retries=0)
        good(asked)
        assert asked.chosen_mode is None
        good(asked)
        assert asked.chosen_mode == "json"


def test_one_question_probes_while_the_others_wait():
    requests = [AdviceRequest(f"door {index}", ACTIONS, f"door{index}") for index in range(6)]
    with FaultServer() as server:
        answers = ask(advisor(server), *requests)
        assert all(isinstance(answer, Advice) for answer in answers)
        assert server.total == 6


def test_a_server_that_is_down_decides_nothing():
    with FaultServer(["drop"]) as server:
        asked = advisor(server, retries=0)
        assert ask(asked).kind == "connection"
        assert asked.chosen_mode is None
        good(asked)
        assert asked.chosen_mode == "logprobs"


def test_a_wrong_key_decides_nothing_and_costs_one_request():
    with FaultServer(after="401") as server:
        asked = advisor(server)
        assert ask(asked).kind == "authentication"
        assert server.total == 1
        assert asked.chosen_mode is None


@pytest.mark.parametrize(
    ("faults", "kind", "probe"),
    [
        # Where nothing is taken: logprobs, three formats, votes at once and singly.
        ({"after": "400"}, "status_400", 6),
        # Where the model talks nonsense.
        ({"reply": content("Hm.")}, "not_json", 3),
    ],
)
def test_a_server_that_answers_in_no_mode_is_probed_rarely(faults, kind, probe, caplog):
    async def ask_each(asked):
        totals = []
        for _ in range(200):
            answers = await asked.advise((REQUEST,))
            assert answers[0].kind == kind
            totals.append(server.total)
        await asked.aclose()
        return totals

    with FaultServer(**faults) as server:
        asked = advisor(server, votes=1 if "reply" in faults else 8)
        totals = asyncio.run(ask_each(asked))
    assert totals[0] == probe
    # Then one request a question.
    assert totals[1:9] == [probe + more for more in range(1, 9)]
    # Probes after 64 questions more, each time.
    assert totals[-1] <= 196 + 4 * probe
    assert asked.chosen_mode is None
    assert caplog.text.count("answers in no mode") == 4


def test_a_batch_on_a_server_that_refuses_everything_probes_once():
    requests = [AdviceRequest(f"door {index}", ACTIONS, f"door{index}") for index in range(9)]
    with FaultServer(after="400") as server:
        answers = ask(advisor(server), *requests)
        assert [answer.kind for answer in answers] == ["status_400"] * 9
        assert server.total == 6 + 8


def test_a_server_that_answers_again_is_probed_with_the_next_question():
    with FaultServer(["400"] * 7) as server:
        asked = advisor(server)
        assert [ask(asked).kind for _ in range(2)] == ["status_400"] * 2
        # Asked for text, as the plainest there is, the server names an action.
        assert good(asked).logits == (3.0, 0.0, 0.0)
        good(asked)
        assert asked.chosen_mode == "logprobs"


# ---- batches, costs, prompts ----


def test_a_batch_has_an_answer_or_an_error_for_each():
    with FaultServer(["fine", "nan", "400"]) as server:
        asked = advisor(server, mode="logprobs", max_concurrency=1)
        answers = ask(asked, *[REQUEST] * 4)
    kinds = sorted(getattr(answer, "kind", "advice") for answer in answers)
    assert kinds == ["advice", "advice", "not_finite", "status_400"]
    costs = {getattr(a, "kind", "advice"): a.usage.prompt_tokens for a in answers}
    assert costs == {"advice": 100, "not_finite": 11, "status_400": 0}


def test_tokens_and_prices_are_counted():
    with FaultServer() as server:
        asked = advisor(server, mode="json", prompt_price=2.0, completion_price=10.0)
        usage = good(asked).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (100, 10)
    assert usage.cost == pytest.approx((100 * 2 + 10 * 10) / 1e6)


def test_a_whole_number_with_a_point_is_a_count():
    def reply(path, body):
        return 200, chat_reply(path, body)[1] | {"usage": {"completion_tokens": 7.0}}

    with FaultServer(reply=reply) as server:
        assert good(advisor(server, mode="json")).usage.completion_tokens == 7


@pytest.mark.parametrize("usage", [None, [], {"prompt_tokens": "5"}, {"prompt_tokens": -5}, {}])
def test_a_wrong_count_costs_no_answer(usage):
    def reply(path, body):
        return 200, chat_reply(path, body)[1] | {"usage": usage}

    with FaultServer(reply=reply) as server:
        assert good(advisor(server, mode="json")).usage.tokens == 0


@pytest.mark.parametrize("mode", ["json", "logprobs", "vote"])
def test_an_image_is_sent_as_a_png_part(mode):
    with FaultServer() as server:
        good(advisor(server, mode=mode, send_image=True, votes=2))
        parts = server.requests[0][2]["messages"][1]["content"]
    assert [part["type"] for part in parts] == ["text", "image_url"]
    assert parts[1]["image_url"]["url"] == "data:image/png;base64,iVBORw=="


def test_extra_fields_are_sent_and_win():
    with FaultServer() as server:
        good(advisor(server, mode="json", extra_body={"seed": 3, "max_completion_tokens": 5}))
        body = server.requests[0][2]
    assert (body["seed"], body["max_completion_tokens"]) == (3, 5)


def test_the_prompt_names_everything_and_its_hash_tells_prompts_apart(tmp_path):
    with FaultServer() as server:
        one = advisor(server, mode="json")
        text = str(one.prompt(REQUEST))
        for part in ("get out", "A door, $5 to open.", "C: forward (go on)", "confidence"):
            assert part in text
        own = tmp_path / "own.txt"
        own.write_text("Be brief.\n---\n$situation\n$options\n$answer")
        others = [
            advisor(server, mode="logprobs"),
            advisor(server),
            advisor(server, mode="json", prompt=str(own)),
            advisor(server, mode="json", send_image=True),
            advisor(server, mode="json", temperature=0.3),
            advisor(server, mode="json", votes=3),
            advisor(server, mode="json", extra_body={"top_k": 1}),
        ]
        assert len({asked.cache_prefix for asked in (one, *others)}) == 8
        assert advisor(server, mode="json").prompt_hash == one.prompt_hash
        # Probing must not change the key under which earlier answers are kept.
        auto = others[1]
        before = auto.prompt_hash
        good(auto)
        assert auto.prompt_hash == before


@pytest.mark.parametrize("text", ["no field", "$situation $colour", "$situation costs $ 5"])
def test_a_prompt_that_cannot_be_filled_in_fails_at_construction(text, tmp_path):
    (tmp_path / "bad.txt").write_text(text)
    with pytest.raises(ValueError, match=r"bad\.txt"):
        ChatAdvisor("m", base_url="http://x/v1", prompt=str(tmp_path / "bad.txt"))


def test_dashes_in_a_description_stay_in_the_question():
    request = AdviceRequest("above\n---\nbelow", ACTIONS, "dashes")
    prompt = ChatAdvisor("m", base_url="http://x/v1", mode="json").prompt(request)
    assert "above\n---\nbelow" in prompt.user


# ---- construction, environment, secrets ----


@pytest.mark.parametrize(
    "keywords",
    [
        {"server": "gemini"},
        {"mode": "guess"},
        {"temperature": -1.0},
        {"max_tokens": 0},
        {"votes": 0},
        {"smoothing": 0.0},
        {"min_label_mass": 2.0},
        {"prompt_price": -1.0},
        {"completion_price": float("inf")},
        {"deadline_s": 0.0},
        {"prompt": "absent"},
    ],
)
def test_impossible_values_fail_at_construction_with_the_value(keywords):
    name, value = next(iter(keywords.items()))
    with pytest.raises(ValueError, match=str(value)):
        ChatAdvisor("m", base_url="http://x/v1", **{name: value})


def test_address_and_key_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1/")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    asked = ChatAdvisor("m")
    assert asked.client.base_url == "http://127.0.0.1:9/v1"
    assert asked.client.api_key.get_secret_value() == KEY
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.delenv("OPENAI_BASE_URL")
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        ChatAdvisor("m")


def test_it_pickles_before_and_after_it_was_used(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with FaultServer() as server:
        asked = advisor(server, api_key=None)
        good(asked)
        data = pickle.dumps(asked)
        assert KEY.encode() not in data
        copy = pickle.loads(data)
        assert copy.chosen_mode == "logprobs"
        good(copy)


@pytest.mark.parametrize("mode", [*FAULTS, "echo_key", "quota", "fine"])
def test_the_key_shows_nowhere(mode, caplog):
    caplog.set_level(logging.DEBUG)
    with FaultServer(after=mode, huge_bytes=2 << 20) as server:
        asked = advisor(server, deadline_s=2.0, retries=1)
        answer = ask(asked)
        assert server.requests[0][1]["authorization"] == f"Bearer {KEY}"
    for text in (caplog.text, repr(asked), repr(answer), str(answer), repr(answer.usage)):
        assert KEY not in text
    if isinstance(answer, Advice):
        assert KEY not in answer.raw


@pytest.mark.parametrize("key", ["1", "EMPTY", "ollama"])
def test_a_stand_in_for_a_key_is_not_cut_out_of_the_answer(key):
    with FaultServer() as server:
        assert good(advisor(server, mode="json", api_key=key)).logits == (4.0, 0.0, 0.0)


def test_a_server_that_echoes_the_key_in_its_answer_taints_no_recording():
    def reply(path, body):
        return content(f'{{"logits": [0, 0, 1], "note": "{KEY}"}}')(path, body)

    with FaultServer(reply=reply) as server:
        assert KEY not in good(advisor(server, mode="json")).raw


def test_lines_of_the_log_are_short_however_long_a_server_refuses(caplog):
    caplog.set_level("INFO")
    with FaultServer(after="message_megabyte") as server:
        assert ask(advisor(server, retries=0)).kind == "status_400"
    lines = [record.getMessage() for record in caplog.records]
    assert any("answers in no mode" in line for line in lines)
    assert max(map(len, lines)) < 600
