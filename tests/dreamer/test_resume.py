"""A run that was cut goes on from its last checkpoint, whatever cut it."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
from tiny_run import planner, tiny_config, untimed

from lore_torchrl.advisors.errors import FatalAdviceError
from lore_torchrl.configs import EvaluationConfig, LoggerConfig
from lore_torchrl.dreamer.checkpoint import find_checkpoint
from lore_torchrl.dreamer.logging import RunLogger, read_metrics
from lore_torchrl.dreamer.run import build_run, train
from lore_torchrl.envs.minigrid import MiniGridObservation

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
        if len(calls) > 60:
            raise Broken
        return step(self, *args)

    monkeypatch.setattr(MiniGridObservation, "_step", fail_later)
    return planner()


def break_logger(monkeypatch):
    log = RunLogger.log

    def fail_later(self, step, values):
        log(self, step, values)
        if step > 100:
            raise Broken

    monkeypatch.setattr(RunLogger, "log", fail_later)
    return planner()


def break_adviser(monkeypatch):
    class Failing:
        def __init__(self):
            self.calls = 0

        async def advise(self, requests):
            self.calls += len(requests)
            if self.calls > 24:
                raise FatalAdviceError("the account is closed")
            return await planner().advise(requests)

    return Failing()


@pytest.mark.parametrize("fault", [break_environment, break_logger, break_adviser])
def test_a_run_that_a_fault_has_cut_goes_on(tmp_path, fault):
    config = tiny_config(tmp_path / "run", total_steps=160, checkpoint_interval=16, **RARELY)
    config.lore.calls.budget = 30
    with pytest.MonkeyPatch.context() as patch:
        advisor = fault(patch)
        with pytest.raises((Broken, FatalAdviceError, RuntimeError)):
            train(config, advisor=advisor)
    stopped = int(find_checkpoint(config.output_dir).name.split("-")[1])
    assert 0 < stopped < 160
    train(replace(config, resume=config.output_dir), advisor=planner())
    rows = [row for row in read_metrics(config.output_dir) if "time/updates" in row]
    assert [row["step"] for row in rows] == [32, 64, 96, 128, 160], "no gaps and no doubles"
    assert rows[-1]["advice/calls"] <= 30


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that has ended, still open, and its folder."""
    folder = tmp_path_factory.mktemp("resume") / "run"
    run = build_run(
        tiny_config(folder, total_steps=160, checkpoint_interval=64, **RARELY), advisor=planner()
    )
    run.trainer.train()
    state = torch.get_rng_state()
    yield run, state
    run.close()


def replay_rows(run):
    return [buffer[:] for buffer in run.replay_hook.replay._rbs]


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
        for one, other in zip(replay_rows(run), replay_rows(resumed), strict=True):
            assert ("next", "llm_prior_logits") in one.keys(True, True)
            for key in one.keys(True, True):
                # The streams end where they were cut.
                if "truncated" not in key and "done" not in key:
                    assert torch.equal(other[key], one[key]), key
    finally:
        resumed.close()


def test_two_resumes_of_one_checkpoint_are_equal_to_the_bit(finished, tmp_path):
    outcomes = []
    for name in "ab":
        folder = tmp_path / name
        shutil.copytree(finished[0].config.output_dir, folder)
        config = replace(
            finished[0].config, total_steps=224, output_dir=str(folder), resume=str(folder)
        )
        run = build_run(config, advisor=planner())
        try:
            run.trainer.train()
        finally:
            run.close()
        state = copy.deepcopy(run.learner.loss.state_dict())
        outcomes.append((untimed(read_metrics(folder)), state))
    (rows, weights), (other_rows, other_weights) = outcomes
    assert rows == other_rows and rows[-1]["step"] == 224
    for name, value in weights.items():
        assert torch.equal(torch.as_tensor(other_weights[name]), torch.as_tensor(value)), name


def test_a_checkpoint_of_format_0_is_read(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0].config.output_dir, folder)
    latest = find_checkpoint(str(folder))
    # Before format 1 there was no seal, no such buffer, and fewer settings.
    (latest / "seal.json").unlink()
    changed = 0
    for file in latest.glob("components/*/state.json"):
        text = file.read_text()
        if "drawn_from" in text:
            file.write_text(json.dumps(_without(json.loads(text), "drawn_from")))
            changed += 1
    assert changed >= 2, "the collector's policy and the loss hold it"
    settings = next(
        file for file in latest.rglob("*.json") if '"imagine_bonus_weight"' in file.read_text()
    )
    kept = _without(_without(json.loads(settings.read_text()), "health"), "vote_visits")
    settings.write_text(json.dumps(kept))
    config = replace(
        finished[0].config, total_steps=192, output_dir=str(folder), resume=str(folder)
    )
    run = build_run(config, advisor=planner())
    try:
        bandit = run.learner.loss.actor_loss.bandit
        assert torch.equal(bandit.drawn_from, bandit.probs()), "computed from what was saved"
        run.trainer.train()
        assert run.trainer.collected_frames == 192
    finally:
        run.close()


@pytest.mark.parametrize(
    ("part", "setting", "value", "named"),
    [
        ("bandit", "enabled", False, "lore.bandit"),
        ("bandit", "arms", [0.0, 1.0], "lore.bandit"),
        ("prior_net", "num_cells", 7, "lore.prior_net"),
        ("calibration", "enabled", False, "lore.calibration"),
        ("gate", "disagreement_weight", 0.3, "lore.gate.disagreement_weight"),
    ],
)
def test_parts_that_could_not_be_restored_are_named(finished, part, setting, value, named):
    config = replace(finished[0].config, resume=finished[0].config.output_dir)
    config.lore = copy.deepcopy(config.lore)
    setattr(getattr(config.lore, part), setting, value)
    with pytest.raises(ValueError, match=f"resume: {named}.* differ"):
        build_run(config, advisor=planner())


def _without(state, name):
    """Drop every entry of that name from nested JSON, pairs of a list included."""
    if isinstance(state, dict):
        return {k: _without(v, name) for k, v in state.items() if not k.endswith(name)}
    if isinstance(state, list):
        return [_without(v, name) for v in state if not _names(v, name)]
    return state


def _names(pair, name):
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[0], dict)
        and str(pair[0].get("value", "")).endswith(name)
    )
