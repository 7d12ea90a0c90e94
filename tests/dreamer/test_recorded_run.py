"""Runs that are recorded, and repeated from their recordings."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import pytest
import torch
from test_run import run_through, weights
from tiny_run import planner, tiny_config, untimed

from lore_torchrl.advisors.base import Advice
from lore_torchrl.advisors.errors import FatalAdviceError, StatusError
from lore_torchrl.advisors.recorded import RecordedAdvisor
from lore_torchrl.dreamer.logging import read_metrics
from lore_torchrl.dreamer.run import build_run, train


def assert_equal_runs(first, second):
    (first_run, first_rows), (second_run, second_rows) = first, second
    expected = weights(first_run)
    for name, value in weights(second_run).items():
        assert torch.equal(value, expected[name]), name
    clock = "advice/latency"
    rows = [
        [{k: v for k, v in row.items() if not k.startswith(clock)} for row in untimed(rows)]
        for rows in (first_rows, second_rows)
    ]
    assert rows[0] == rows[1]


class Flaky:
    """The planner, every third batch failing in one of two ways."""

    def __init__(self):
        self.planner, self.turn = planner(), 0

    async def advise(self, requests):
        self.turn += 1
        if self.turn % 6 == 0:
            raise ConnectionError("the server is down")
        if self.turn % 3 == 0:
            return [StatusError(500, "oops") for _ in requests]
        return await self.planner.advise(requests)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run with the planner, its rows, and its recording."""
    folder = tmp_path_factory.mktemp("recorded")
    path = folder / "advice.sqlite"
    return run_through(tiny_config(folder / "run", record=str(path))), path


def repeats(original, path, folder):
    """The run of a recording equals the one that made it."""
    assert original[0].service.stats()["calls"] > 10
    assert_equal_runs(original, run_through(tiny_config(folder), RecordedAdvisor(path)))


def test_a_run_repeated_from_its_recording_is_equal_to_the_bit(tmp_path, recorded):
    repeats(*recorded, tmp_path)


@pytest.mark.slow
def test_the_faults_of_a_run_are_repeated_too(tmp_path):
    path = tmp_path / "advice.sqlite"
    original = run_through(tiny_config(tmp_path / "a", record=str(path)), Flaky())
    assert original[0].service.stats()["failed"] > 0
    repeats(original, path, tmp_path / "b")


def test_recording_changes_nothing(tmp_path, recorded):
    assert_equal_runs(run_through(tiny_config(tmp_path)), recorded[0])


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_its_recording(tmp_path):
    path = tmp_path / "advice.sqlite"
    config = tiny_config(tmp_path / "run", record=str(path), total_steps=64, checkpoint_interval=64)
    train(config, advisor=planner())
    with pytest.raises(FileExistsError, match="resume that run"):
        build_run(config, advisor=planner())
    train(
        replace(config, total_steps=128, resume=str(tmp_path / "run")),
        advisor=planner(),
    )
    with sqlite3.connect(path) as database:
        (count,) = database.execute("SELECT COUNT(*) FROM answers").fetchone()
    calls = [
        row["advice/calls"] for row in read_metrics(config.output_dir) if "advice/calls" in row
    ]
    assert count == calls[-1]


def test_a_run_that_leaves_its_recording_stops(tmp_path, recorded):
    path = recorded[1]
    with pytest.raises(FatalAdviceError, match="no answer"):
        run_through(tiny_config(tmp_path / "b", seed=1), RecordedAdvisor(path))
    masked, rows = run_through(
        tiny_config(tmp_path / "c", seed=1), RecordedAdvisor(path, missing="mask")
    )
    assert masked.service.errors["not_recorded"] > 0
    assert any("advice/error_not_recorded" in row for row in rows)


@pytest.mark.slow
def test_a_bought_answer_is_advice_of_the_repeated_run(tmp_path):
    class Always:
        async def advise(self, requests):
            return [Advice((0.0,) * 6 + (2.0,), 0.5) for _ in requests]

    path = tmp_path / "advice.sqlite"
    original = run_through(tiny_config(tmp_path / "a", record=str(path)), Always())
    assert_equal_runs(original, run_through(tiny_config(tmp_path / "b"), RecordedAdvisor(path)))
