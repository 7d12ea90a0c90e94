"""The checks on a run's health, in whole runs."""

from __future__ import annotations

import logging

import pytest
import tiny_run
import torch
from tiny_run import tiny_config

from lore_torchrl.configs import HealthConfig, LoReConfig
from lore_torchrl.dreamer.run import build_run, train

STOCK = LoReConfig(enabled=False)


def run_through(config):
    run, rows = tiny_run.run_through(config)
    return run, [row for row in rows if "time/updates" in row]


def test_every_row_says_how_the_run_is(tmp_path):
    run, rows = run_through(tiny_config(tmp_path))
    assert run.trainer.collected_frames == run.trainer.total_frames
    assert all(row["health/nonfinite_parameters"] == 0 for row in rows)
    assert all(row["health/nonfinite"] == 0 for row in rows)
    assert {"health/model_error", "health/beta_saturated", "health/budget_burn"} <= rows[-1].keys()


def test_switched_off_there_is_nothing_to_see(tmp_path):
    _, rows = run_through(tiny_config(tmp_path, health=HealthConfig(enabled=False)))
    assert not [name for row in rows for name in row if name.startswith("health/")]


def test_a_check_that_may_ends_the_run_with_a_checkpoint_and_a_reason(tmp_path, caplog):
    health = HealthConfig(no_reward_steps=32, stop=["no_reward"])
    config = tiny_config(
        tmp_path, total_steps=20_000, checkpoint_interval=10_000, lore=STOCK, health=health
    )
    with caplog.at_level(logging.WARNING, logger="torchrl"):
        run, rows = run_through(config)
    assert run.trainer.collected_frames < 2_000
    assert rows[-1]["health/no_reward"] == 1.0
    assert "no_reward" in caplog.text and "dreamer.entropy_bonus" in caplog.text
    assert "lore.calls.budget" not in caplog.text and "bandit/" not in caplog.text
    assert list((tmp_path / "checkpoints").iterdir())


def test_a_check_that_may_not_warns_and_goes_on(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="torchrl"):
        run, _ = run_through(
            tiny_config(tmp_path, lore=STOCK, health=HealthConfig(no_reward_steps=32))
        )
    assert run.trainer.collected_frames == run.trainer.total_frames
    assert caplog.text.count("no_reward:") == 1


@pytest.mark.parametrize("when", ["post_steps", "post_optim"])
def test_a_learner_that_is_not_finite_ends_with_the_reason(tmp_path, monkeypatch, when):
    def build_and_spoil(*args, **kwargs):
        run = build_run(*args, **kwargs)

        def spoil(*_):
            if run.trainer.collected_frames == 96:
                with torch.no_grad():
                    next(run.agent.actor.parameters())[0] = float("nan")

        # After a round of updates, or between two of them.
        run.trainer.register_op(when, spoil)
        return run

    monkeypatch.setattr("lore_torchrl.dreamer.run.build_run", build_and_spoil)
    config = tiny_config(tmp_path, total_steps=20_000, checkpoint_interval=64, lore=STOCK)
    with pytest.raises(FloatingPointError, match=r"start over with a lower dreamer\.lr"):
        train(config)
    assert [path.name[-3:] for path in (tmp_path / "checkpoints").iterdir()] == ["080"]
