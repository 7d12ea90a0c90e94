from __future__ import annotations

import torch
from replays import make_replay
from tensordict import TensorDict

from lore_torchrl import keys
from lore_torchrl.advisors.base import Advice
from lore_torchrl.replay import LateAdvice

N_ACTIONS = 3


def rows(ids, members=None, mask=None, fallback=None):
    """Records that wait for the questions ``ids``; 0 waits for none."""
    count = len(ids)
    advice = {
        keys.PRIOR_LOGITS: torch.zeros(count, N_ACTIONS),
        keys.CONFIDENCE: torch.zeros(count, 1),
        keys.MASK: torch.tensor(mask or [False] * count).reshape(-1, 1),
        keys.FALLBACK: torch.tensor(fallback or [False] * count).reshape(-1, 1),
        keys.ADVICE_ID: torch.tensor(ids).reshape(-1, 1),
    }
    env_index = torch.tensor(members or [0] * count)
    return TensorDict({"env_index": env_index, "next": advice}, [count])


def advice(number, confidence=0.5):
    return Advice(logits=(0.0, float(number), -1.0), confidence=confidence)


def answered(answers):
    """Answer those questions, as the service does."""
    return lambda ids: {number: answers[number] for number in ids if number in answers}


def store(late, replay, *args, **kwargs):
    records = rows(*args, **kwargs)
    late.note(records, replay.extend(records))


def stored(replay, member):
    found = replay[member][:]["next"]
    return found[keys.PRIOR_LOGITS][:, 1].tolist(), found[keys.MASK].flatten().tolist()


def test_answers_reach_their_rows_and_no_others():
    replay, late = make_replay(6), LateAdvice()
    store(late, replay, [0, 5, 7, 5], members=[0, 0, 0, 1])
    assert late.waiting == 3
    assert late.apply(replay, answered({5: advice(2), 9: advice(9)})) == 2
    assert stored(replay, 0) == ([0, 2, 0], [False, True, False])
    assert stored(replay, 1) == ([2], [True])
    assert replay[0][:]["next", keys.CONFIDENCE].flatten().tolist() == [0, 0.5, 0]
    assert late.apply(replay, answered({7: advice(3, confidence=1.0)})) == 1
    assert stored(replay, 0) == ([0, 2, 3], [False, True, True])
    assert late.stats() == {"late_rows": 3, "late_rows_missed": 0, "late_rows_waiting": 0}


def test_rows_with_advice_wait_for_none():
    replay, late = make_replay(6), LateAdvice()
    store(late, replay, [4, 4], mask=[True, False])
    assert late.waiting == 1


def test_an_answer_replaces_the_fallback_for_it():
    replay, late = make_replay(6), LateAdvice()
    store(late, replay, [4, 4, 5], mask=[True] * 3, fallback=[True, False, True])
    assert late.waiting == 2
    assert late.apply(replay, answered({4: advice(2), 5: None})) == 1
    assert stored(replay, 0) == ([2, 0, 0], [True, True, True])
    assert replay[0][:]["next", keys.ADVICE_ID].flatten().tolist() == [4, 4, 5]
    assert replay[0][:]["next", keys.FALLBACK].flatten().tolist() == [False, False, True]
    assert late.stats() == {"late_rows": 1, "late_rows_missed": 1, "late_rows_waiting": 0}


def test_a_slot_written_anew_is_left_alone():
    replay, late = make_replay(capacity=3, members=1), LateAdvice()
    store(late, replay, [5, 5, 0])
    store(late, replay, [6])  # takes the slot of the first
    assert late.apply(replay, answered({5: advice(2)})) == 1
    assert stored(replay, 0) == ([0, 2, 0], [False, True, False])
    assert late.apply(replay, answered({6: advice(4)})) == 1
    assert stored(replay, 0) == ([4, 2, 0], [True, True, False])
    assert late.stats()["late_rows_missed"] == 1


def test_a_lost_question_frees_its_rows():
    replay, late = make_replay(6), LateAdvice()
    store(late, replay, [5, 5])
    assert late.apply(replay, answered({5: None})) == 0
    assert late.stats() == {"late_rows": 0, "late_rows_missed": 2, "late_rows_waiting": 0}


def test_the_largest_number_that_advice_may_hold_is_kept():
    replay, late = make_replay(6), LateAdvice()
    store(late, replay, [5])
    late.apply(replay, answered({5: advice(1e30)}))
    numbers, masks = stored(replay, 0)
    assert masks == [True] and numbers == [torch.tensor(1e30).item()]


def test_counters_are_restored_and_nothing_waits():
    replay, late = make_replay(6), LateAdvice()
    store(late, replay, [5, 6])
    late.apply(replay, answered({5: advice(1)}))
    resumed = LateAdvice()
    resumed.load_state_dict(late.state_dict())
    assert resumed.stats() == {"late_rows": 1, "late_rows_missed": 1, "late_rows_waiting": 0}


def test_a_whole_number_as_confidence_is_one_like_any_other():
    late, replay = LateAdvice(), make_replay(6)
    store(late, replay, [7])
    late.apply(replay, answered({7: advice(2, confidence=1)}))
    assert late.written == 1


def test_valid_actions_come_late_too_and_all_count_where_nothing_is_said():
    replay, late = make_replay(6), LateAdvice()
    records = rows([4, 5, 6])
    records["next", keys.ACTION_MASK] = torch.ones(3, N_ACTIONS, dtype=torch.bool)
    late.note(records, replay.extend(records))
    said = Advice((0.0, 1.0, 2.0), valid=(True, False, True))
    assert late.apply(replay, answered({4: said, 5: advice(2)})) == 2
    found = replay[0][:]["next", keys.ACTION_MASK].tolist()
    assert found == [[True, False, True], [True] * 3, [True] * 3]
