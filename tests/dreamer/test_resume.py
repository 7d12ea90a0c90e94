"""A run that was cut goes on from its last checkpoint, whatever cut it."""

from __future__ import annotations

import copy
import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from tiny_run import planner, tiny_config, untimed

from lore_torchrl.advisors.errors import FatalAdviceError
from lore_torchrl.configs import (
    EpsilonConfig,
    EvaluationConfig,
    FeaturesConfig,
    LoggerConfig,
    LoReConfig,
    LossConfig,
    TemperatureConfig,
)
from lore_torchrl.control import AdviceBandit
from lore_torchrl.dreamer.advice_log import AdviceLog, read_advice
from lore_torchrl.dreamer.checkpoint import find_checkpoint, load_config
from lore_torchrl.dreamer.logging import RunLogger, read_metrics
from lore_torchrl.dreamer.run import _structure, build_run, train
from lore_torchrl.envs.minigrid import MiniGridObservation
from lore_torchrl.keys import COEFFICIENT, RETURN
from lore_torchrl.lore import build_bandit
from lore_torchrl.modules import TemperatureAligner, ValidEGreedyModule

RARELY = {
    "evaluation": EvaluationConfig(interval=1_000, episodes=2),
    "logger": LoggerConfig(interval=32, progress_bar=False, figures=False),
}


class Broken(Exception):
    """The fault that is put in."""


def break_environment(monkeypatch):
    step, calls = MiniGridObservation._step, []

    def fail_later(self, *args):
        calls.append(1)
        if len(calls) > 40:
            raise Broken
        return step(self, *args)

    monkeypatch.setattr(MiniGridObservation, "_step", fail_later)
    return planner()


def break_logger(monkeypatch):
    log = RunLogger.log

    def fail_later(self, step, values):
        log(self, step, values)
        if step > 60:
            raise Broken

    monkeypatch.setattr(RunLogger, "log", fail_later)
    return planner()


def break_advisor(monkeypatch):
    class Failing:
        def __init__(self):
            self.calls = 0

        async def advise(self, requests):
            self.calls += len(requests)
            if self.calls > 12:
                raise FatalAdviceError("the account is closed")
            return await planner().advise(requests)

    return Failing()


@pytest.mark.parametrize(
    "fault",
    [
        break_environment,
        *(pytest.param(f, marks=pytest.mark.slow) for f in (break_logger, break_advisor)),
    ],
)
def test_a_run_that_a_fault_has_cut_goes_on(tmp_path, fault):
    config = tiny_config(tmp_path / "run", total_steps=96, checkpoint_interval=16, **RARELY)
    config.lore.calls.budget = 30
    ends = []
    with pytest.MonkeyPatch.context() as patch:
        close = RunLogger.close
        patch.setattr(
            RunLogger, "close", lambda self, *, failed: ends.append(failed) or close(self)
        )
        advisor = fault(patch)
        with pytest.raises((Broken, FatalAdviceError, RuntimeError)):
            train(config, advisor=advisor)
    assert ends == [True]
    stopped = int(find_checkpoint(config.output_dir).name.split("-")[1])
    assert 0 < stopped < 96
    train(replace(config, resume=config.output_dir), advisor=planner())
    rows = [row for row in read_metrics(config.output_dir) if "time/updates" in row]
    assert [row["step"] for row in rows] == [32, 64, 96], "no gaps and no doubles"
    assert rows[-1]["advice/calls"] <= 30


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that has ended, still open, and its folder."""
    folder = tmp_path_factory.mktemp("resume") / "run"
    run = build_run(
        tiny_config(folder, total_steps=96, checkpoint_interval=64, **RARELY), advisor=planner()
    )
    run.trainer.train()
    state = torch.get_rng_state()
    yield run, state
    run.close()


def replay_rows(run):
    return [buffer[:] for buffer in run.replay_hook.replay._rbs]


def bandit_of(run):
    (bandit,) = (m for m in run.collector.policy.modules() if isinstance(m, AdviceBandit))
    return bandit


def test_replay_holds_what_followed_each_record(finished):
    """Recomputed from the stored rewards; the resumed runs below have the same rows."""
    run, _ = finished
    gamma, known = run.learner.loss.discount, 0
    assert gamma == pytest.approx(1 - 1 / 333)
    for rows in replay_rows(run):
        found, reward, done, terminated = (
            rows["next", name].flatten().tolist()
            for name in (RETURN, "reward", "done", "terminated")
        )
        last = max(row for row, end in enumerate(done) if end)
        assert all(math.isnan(value) for value in found[last + 1 :])
        for row in range(last):
            if terminated[row]:
                assert found[row] == 0
            elif not done[row] and not (done[row + 1] and not terminated[row + 1]):
                known += 1
                expected = reward[row + 1] + gamma * found[row + 1]
                assert found[row] == pytest.approx(expected, abs=1e-6)
    assert known > 60


def test_what_is_restored_is_what_was_saved(finished):
    run, random_state = finished
    config = replace(run.config, resume=run.config.output_dir)
    resumed = build_run(config, advisor=planner())
    try:
        assert torch.equal(torch.get_rng_state(), random_state)
        saved, found = run.learner.loss.state_dict(), resumed.learner.loss.state_dict()
        assert saved.keys() == found.keys()
        for name, value in saved.items():
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name
        before, after = (r.learner.optimizer.state_dict() for r in (run, resumed))
        torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
        assert resumed.service.state_dict() == run.service.state_dict()
        bandit, again = build_bandit(config.lore, seed=99), bandit_of(resumed)
        bandit.load_state_dict(bandit_of(run).state_dict())
        assert bandit.advised_segments >= 4
        for name, value in bandit.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), name
        starts = resumed.env.reset()[:1].expand(200).clone()
        drawn, same = (b(starts.clone())[COEFFICIENT] for b in (bandit, again))
        assert torch.equal(drawn, same) and 0 < drawn.mean() < 1
        for one, other in zip(replay_rows(run), replay_rows(resumed), strict=True):
            assert ("next", "llm_prior_logits") in one.keys(True, True)
            for key in one.keys(True, True):
                # The streams end where they were cut, which is no end of an episode.
                if "done" not in key:
                    torch.testing.assert_close(
                        other[key], one[key], rtol=0, atol=0, equal_nan=True, msg=str(key)
                    )
    finally:
        resumed.close()


def test_two_resumes_of_one_checkpoint_are_equal_to_the_bit(finished, tmp_path):
    outcomes = []
    for name in "ab":
        folder = tmp_path / name
        shutil.copytree(finished[0].config.output_dir, folder)
        config = replace(
            finished[0].config, total_steps=144, output_dir=str(folder), resume=str(folder)
        )
        run = build_run(config, advisor=planner())
        try:
            run.trainer.train()
        finally:
            run.close()
        assert load_config(find_checkpoint(str(folder))).total_steps == 144, "its own"
        state = copy.deepcopy(run.learner.loss.state_dict())
        outcomes.append((untimed(read_metrics(folder)), state))
    (rows, weights), (other_rows, other_weights) = outcomes
    assert rows == other_rows and rows[-1]["step"] == 144
    for name, value in weights.items():
        assert torch.equal(torch.as_tensor(other_weights[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize(
    ("part", "setting", "value", "named"),
    [
        ("bandit", "enabled", False, "lore.bandit"),
        ("loss", "imitation_weight", 0.0, "lore.loss.imitation_weight"),
        ("prior_net", "enabled", True, "lore.prior_net"),
        ("gate", "disagreement_weight", 0.3, "lore.gate.disagreement_weight"),
        ("gate", "value_weight", 0.3, "lore.gate.value_weight"),
        ("epsilon", "eps_init", 0.3, "lore.epsilon"),
        ("calls", "td_spike", 2.0, "lore.calls.td_spike"),
        ("subgoal", "path", "recordings/programs_llm.jsonl", "lore.subgoal.path"),
    ],
)
def test_parts_that_could_not_be_restored_are_named(finished, part, setting, value, named):
    config = replace(finished[0].config, resume=finished[0].config.output_dir)
    config.lore = copy.deepcopy(config.lore)
    setattr(getattr(config.lore, part), setting, value)
    with pytest.raises(ValueError, match=f"resume: .*{named} .* there, .* here"):
        build_run(config, advisor=planner())


def test_limits_of_programs_may_change(tmp_path):
    config = tiny_config(tmp_path, total_steps=32, checkpoint_interval=32)
    config.lore.features = FeaturesConfig(enabled=True, max_failures=5)
    before = _structure(config)
    config.lore.features = FeaturesConfig(enabled=True, max_failures=9, time_limit_s=0.2)
    assert _structure(config) == before
    config.lore.features = FeaturesConfig(enabled=True, columns=9)
    assert _structure(config) != before


def test_random_steps_go_on_as_configured_and_not_as_saved(tmp_path):
    first = EpsilonConfig(eps_init=0.5, eps_end=0.5, annealing_num_steps=100)
    config = tiny_config(
        tmp_path, lore=LoReConfig(epsilon=first), total_steps=32, checkpoint_interval=32, **RARELY
    )
    train(config, advisor=planner())
    other = EpsilonConfig(eps_init=0.4, eps_end=0.2, annealing_num_steps=64)
    resumed = replace(
        config, lore=LoReConfig(epsilon=other), total_steps=64, resume=config.output_dir
    )
    run = build_run(resumed, advisor=planner())
    try:
        (random,) = (m for m in run.collector.policy.modules() if isinstance(m, ValidEGreedyModule))
        assert random.eps.item() == pytest.approx(0.4 - 0.2 * 32 / 64)
        run.trainer.train()
        assert random.eps.item() == pytest.approx(0.2)
    finally:
        run.close()


def test_a_held_temperature_and_multiplier_are_the_configured_ones(tmp_path, caplog):
    first = TemperatureConfig(init=2.0)
    config = tiny_config(
        tmp_path,
        lore=LoReConfig(temperature=first, loss=LossConfig(multiplier_init=0.05)),
        total_steps=32,
        checkpoint_interval=32,
        **RARELY,
    )
    train(config, advisor=planner())
    for rate, expected, multiplier in ((0.0, 1.5, 0.02), (0.1, 2.0, 0.05)):
        other = LoReConfig(
            temperature=TemperatureConfig(init=1.5, rate=rate),
            loss=LossConfig(multiplier_init=0.02, multiplier_lr=rate),
        )
        caplog.clear()
        with caplog.at_level("WARNING", logger="torchrl"):
            run = build_run(
                replace(config, lore=other, total_steps=64, resume=config.output_dir),
                advisor=planner(),
            )
        told = next(line for line in caplog.messages if "other settings" in line)
        assert "lore.temperature.init 2.0 there, 1.5 here" in told
        assert ("lore.temperature.rate" in told) == (rate > 0)
        assert "total_steps" not in told and "resume " not in told
        try:
            (aligner,) = (
                m for m in run.collector.policy.modules() if isinstance(m, TemperatureAligner)
            )
            assert aligner.temperature.item() == expected
            held = run.learner.loss.actor_loss.multiplier.item()
            assert held == pytest.approx(multiplier)
        finally:
            run.close()


def logger_config(*backends):
    return LoggerConfig(backends=list(backends), progress_bar=False, figures=False)


def log_steps(folder, steps, *backends, **resume):
    logger = RunLogger(logger_config(*backends), folder, **resume)
    for step in steps:
        logger.log(step, {"train/reward": float(step), "eval/success": 0.5})
    logger.close()


def csv_rows(folder):
    (file,) = folder.glob("csv/*/scalars/train/reward.csv")
    return [tuple(map(float, line.split(","))) for line in file.read_text().splitlines()]


def tensorboard_steps(folder):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator
    (place,) = {str(path.parent) for path in folder.rglob("events*")}
    return [event.step for event in accumulator(place).Reload().Scalars("train/reward")]


def carries(folder, steps):
    assert [row["step"] for row in read_metrics(folder)] == steps
    assert csv_rows(folder) == [(step, step) for step in steps]
    assert tensorboard_steps(folder) == steps


def test_every_log_goes_on_without_gaps_or_doubles(tmp_path):
    folder, backends = tmp_path / "run", ("csv", "tensorboard")
    log_steps(folder, [500, 1000, 1500], *backends)
    with next(folder.rglob("reward.csv")).open("a") as file:
        file.write("20")  # Half a line that a kill left.
    log_steps(folder, [1000, 1500, 2000], *backends, resume_step=500, resume_from=folder)
    carries(folder, [500, 1000, 1500, 2000])
    log_steps(folder, [200], *backends)
    carries(folder, [200])


def test_another_folder_gets_the_rows_before_the_checkpoint(tmp_path):
    backends = ("csv", "tensorboard")
    log_steps(tmp_path / "first", [500, 1000, 1500], "csv")
    log_steps(tmp_path / "second", [300, 900], *backends)
    resume = {"resume_step": 1000, "resume_from": tmp_path / "first"}
    log_steps(tmp_path / "second", [1200], *backends, **resume)
    carries(tmp_path / "second", [500, 1000, 1200])
    assert len(csv_rows(tmp_path / "first")) == 3, "left as it was"
    # A checkpoint that was copied somewhere else brings no rows.
    resume["resume_from"] = tmp_path / "nothing"
    log_steps(tmp_path / "second", [], *backends, **resume)
    carries(tmp_path / "second", [500, 1000])


def test_another_folder_gets_the_advice_before_the_checkpoint(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    lines = [{"step": step, "advice_id": step} for step in (1, 5, 9)]
    (first / "advice.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    resume = {"resume_step": 5, "resume_from": first}
    log = AdviceLog(second / "advice.jsonl", None, ["left"], limit=3, **resume)
    assert read_advice(second) == lines[:2] and log._left == 1
    AdviceLog(first / "advice.jsonl", None, ["left"], **resume)
    assert read_advice(first) == lines[:2]


def test_a_run_in_another_folder_begins_with_what_came_before(finished, tmp_path):
    config = finished[0].config
    config = replace(config, resume=config.output_dir, output_dir=str(tmp_path / "other"))
    build_run(config, advisor=planner()).close()
    rows, lines = read_metrics(config.resume), read_advice(config.resume)
    assert lines and read_metrics(config.output_dir) == rows
    assert read_advice(config.output_dir) == lines


def test_wandb_goes_on_with_the_folders_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = replace(logger_config("wandb"), mode="offline")
    ids = []
    first, second = tmp_path / "first", tmp_path / "second"
    for step, (folder, resume) in enumerate(
        [(first, {}), (first, {"resume_step": 0}), (second, {"resume_step": 1})]
    ):
        logger = RunLogger(config, folder, resume_from=first, **resume)
        ids.append(logger.backends[0].experiment.id)
        logger.log(step, {"train/reward": 1.0})
        logger.close()
    assert ids[0] == ids[1] != ids[2]
