import json
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from lore_torchrl.dreamer.hooks import EvaluationHook, MetricsHook


def batch(rewards, ends):
    """A collector batch of one environment."""
    shape = (1, len(rewards), 1)
    following = {
        "reward": torch.tensor(rewards).reshape(shape),
        "done": torch.tensor(ends).reshape(shape),
        "success": torch.tensor(rewards).reshape(shape) > 0,
    }
    return TensorDict({"next": TensorDict(following, shape[:2])}, shape[:2])


def test_a_row_averages_over_cases_where_they_are_told_and_over_batches_else():
    rows = []
    hook = MetricsHook(
        SimpleNamespace(log=lambda step, row: rows.append((step, row))),
        interval=6,
        num_envs=1,
        updates=lambda: 0,
        batch_metrics=[
            lambda batch: {
                "over_cases": batch["next", "reward"][batch["next", "done"]].tolist(),
                "in_a_tensor": batch["next", "success"].float().flatten(),
                "over_batches": batch["next", "reward"].max().item(),
                "no_case": [],
            }
        ],
    )
    hook._trainer = SimpleNamespace(collected_frames=6, total_frames=100)
    hook.collected(batch([1.0, 1.0, 0.0, 1.0], [True, True, True, True]))
    hook.collected(batch([0.0, 0.0], [False, True]))
    hook.write()
    ((step, row),) = rows
    # Three of five episodes, not the mean of 3/4 and 0.
    assert step == 6 and row["over_cases"] == pytest.approx(0.6) == row["train/success"]
    assert row["over_batches"] == 0.5 and "no_case" not in row
    assert row["in_a_tensor"] == pytest.approx(3 / 6)
    assert row["train/episodes"] == 5.0
    assert row["train/episode_length"] == pytest.approx(6 / 5)


def test_a_row_that_a_checkpoint_has_cut_in_two_is_whole():
    """Its means and counts are those of the run that was not cut."""

    def hook(rows):
        found = MetricsHook(
            SimpleNamespace(log=lambda step, row: rows.append(row)),
            interval=6,
            num_envs=1,
            updates=lambda: 0,
        )
        found._trainer = SimpleNamespace(collected_frames=6, total_frames=100)
        return found

    whole, parts = [], []
    one, first, second = hook(whole), hook(parts), hook(parts)
    before = batch([1.0, 1.0, 0.0, 1.0], [True, True, True, True])
    losses = [TensorDict({"loss_actor": torch.tensor(value)}, []) for value in (1.0, 4.0, 7.0)]
    for part in (one, first):
        part.collected(before)
        part.learned(losses[0])
        part.learned(losses[1])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for part in (one, second):
        part.collected(batch([0.0], [True]))
        part.learned(losses[2])
        part.write()
    names = ("train/episodes", "train/success", "train/episode_length", "loss/actor")
    for name in names:
        assert parts[0][name] == pytest.approx(whole[0][name])
    assert whole[0]["train/episodes"] == 5.0 and whole[0]["loss/actor"] == pytest.approx(4.0)


# From step 140 to 144: a shorter interval counts at once, a longer one after what was due.
@pytest.mark.parametrize(
    ("before", "now", "due"),
    [(100, 100, [200]), (100, 20, [148, 160, 180, 200]), (20, 100, [160, 200])],
)
def test_a_resumed_run_has_the_intervals_of_now(before, now, due):
    def make(interval, step):
        trainer = SimpleNamespace(collected_frames=step, total_frames=1_000)
        logger = SimpleNamespace(log=lambda step, row: made.append(step))
        rows = MetricsHook(logger, interval=interval, num_envs=1, updates=lambda: 0)
        evaluation = EvaluationHook(lambda: {"success": 1.0}, logger, interval=interval)
        rows._trainer = evaluation._trainer = trainer
        return rows, evaluation, trainer

    made = []
    rows, evaluation, trainer = make(before, 140)
    rows.write(), evaluation()
    made.clear()
    again, evaluated, trainer = make(now, 144)
    again.load_state_dict(rows.state_dict()), evaluated.load_state_dict(evaluation.state_dict())
    for step in range(148, 204, 4):
        trainer.collected_frames = step
        again.write(), evaluated()
    assert made == [step for step in due for _ in (rows, evaluation)]


def test_an_evaluation_that_was_broken_off_is_due_in_the_resumed_run():
    hook = EvaluationHook(lambda: None, None, interval=100)
    hook._trainer = SimpleNamespace(collected_frames=104, total_frames=1_000)
    hook()
    again = EvaluationHook(lambda: None, None, interval=30)
    again._trainer = hook._trainer
    again.load_state_dict(hook.state_dict())
    assert again.due
