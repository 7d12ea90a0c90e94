from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from tiny_run import COLUMNS
from torchrl import logger as torchrl_logger

from lore_torchrl import keys
from lore_torchrl.advisors.base import Advice, AdviceRequest
from lore_torchrl.configs import DreamerConfig
from lore_torchrl.dreamer.advice_log import AdviceLog, read_advice
from lore_torchrl.dreamer.hooks import DreamerReplayHook
from lore_torchrl.dreamer.replay import build_replay
from lore_torchrl.replay import LateAdvice

ACTIONS = ("left", "right", "forward")


class Service:
    """Knows every question, and the answers that it is given."""

    advisor = None

    def __init__(self):
        self.known = {}

    def question(self, number):
        return AdviceRequest(f"room {number}", ACTIONS, str(number))

    def answers(self, numbers):
        return {number: self.known[number] for number in numbers if number in self.known}


def make_log(path, **settings) -> AdviceLog:
    return AdviceLog(path, Service(), ACTIONS, **settings)


def write_late(log: AdviceLog, answers) -> None:
    log.service.known |= answers
    log.write_late()


def batch(ids, mask, fallback=False) -> TensorDict:
    """Steps ``[E, T]`` with the numbers of their questions; the action tells the time."""
    ids, mask = torch.tensor(ids).unsqueeze(-1), torch.tensor(mask).unsqueeze(-1)
    fallback = torch.tensor(fallback).expand(mask.shape[:2]).unsqueeze(-1)
    logits = torch.zeros(*ids.shape[:2], len(ACTIONS))
    action = torch.eye(len(ACTIONS)).expand(ids.shape[0], -1, -1)
    advice = {keys.ADVICE_ID: ids, keys.MASK: mask, keys.FALLBACK: fallback}
    numbers = {keys.PRIOR_LOGITS: logits, keys.CONFIDENCE: mask.float(), keys.BETA: mask.float()}
    policy = {"logits": logits, keys.MIX_LOGITS: logits, "action": action}
    return TensorDict({**advice, **numbers, **policy}, ids.shape[:2])


def test_a_late_answer_has_a_line_about_the_step_that_asked(tmp_path):
    log = make_log(tmp_path / "advice.jsonl")
    # Question 2 is asked in both environments, 1 came in time, 3 has a fallback.
    fallback = [[False] * 3, [False, False, True]]
    log(batch([[1, 2, 0], [0, 2, 3]], [[True, False, True], [False, False, True]], fallback))
    assert [line["advice_id"] for line in read_advice(tmp_path)] == [1]
    write_late(log, {3: Advice(logits=(0.0, 0.0, 9.0), confidence=0.5)})
    log(batch([[2, 4, 0], [5, 0, 0]], [[False] * 3, [False] * 3]))
    write_late(log, {2: Advice(logits=(0.0, 9.0, 0.0)), 4: None, 5: None})
    log.write_late()
    lines = read_advice(tmp_path)
    seen = [(line["advice_id"], line["step"], line["environment"]) for line in lines]
    assert seen == [(1, 1, 0), (3, 6, 1), (2, 3, 0)]
    assert [line["late"] for line in lines] == [False, True, True]
    assert [line["action"] for line in lines] == ["left", "forward", "right"]
    assert lines[1]["prior"]["forward"] > 0.99 and lines[1]["confidence"] == 0.5
    assert lines[2]["prior"]["right"] > 0.99 and lines[2]["observation"] == "room 2"
    assert all(tuple(line) == COLUMNS for line in lines)


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_late_lines_count_towards_the_limit(tmp_path, limit):
    log = make_log(tmp_path / "advice.jsonl", limit=limit)
    log(batch([[1, 2, 3]], [[False] * 3]))
    write_late(log, dict.fromkeys((1, 2, 3), Advice(logits=(0.0, 0.0, 1.0))))
    assert len(read_advice(tmp_path)) == limit


def test_the_replay_hook_calls_its_listeners(tmp_path):
    log = make_log(tmp_path / "advice.jsonl")
    lore = SimpleNamespace(
        late=LateAdvice(),
        service=log.service,
        returns=lambda: None,
        imitation_sampler=lambda _replay, **_: None,
    )
    hook = DreamerReplayHook(
        build_replay(num_envs=1, buffer_size=20, batch_size=2, seq_len=4),
        DreamerConfig(batch_size=2, seq_len=4),
        lore=lore,
    )
    hook.listeners.append(log.write_late)
    log.service.known[1] = Advice(logits=(0.0, 0.0, 1.0))
    hook.write_late()
    log(batch([[1, 0, 0]], [[False] * 3]))
    hook.write_late()
    assert [line["advice_id"] for line in read_advice(tmp_path)] == [1]


def test_what_cannot_be_written_ends_the_log_and_not_the_run(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(torchrl_logger, "warning", warnings.append)
    log = make_log(tmp_path / "advice.jsonl")
    log.path.unlink()
    log.path.mkdir()
    for _ in range(3):
        log(batch([[1, 0, 0]], [[True] * 3]))
    assert len(warnings) == 1 and "advice.jsonl ends here" in warnings[0]


def test_a_prompt_that_fails_is_named_in_its_line(tmp_path):
    log = make_log(tmp_path / "advice.jsonl")
    log.service.advisor = SimpleNamespace(prompt=lambda request: {}["room"])
    log(batch([[1, 0, 0]], [[True] * 3]))
    (line,) = read_advice(tmp_path)
    assert line["prompt"] == "KeyError: 'room'"
