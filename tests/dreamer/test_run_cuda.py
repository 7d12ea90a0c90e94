"""Whole runs on a GPU, where the update is compiled and captured by default."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny_run import DREAMER, OFF, planner, run_through, tiny_config

from lore_torchrl.configs import LoReConfig
from lore_torchrl.dreamer.logging import read_metrics
from lore_torchrl.dreamer.run import build_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
TWICE = replace(DREAMER, replay_ratio=2 * DREAMER.replay_ratio)
EAGER = replace(TWICE, compile_train_step=False, cudagraph=False)


def parameters(run) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in run.learner.loss.named_parameters()}


def test_lore_with_nothing_switched_on_is_stock_to_the_bit(tmp_path):
    stock, _ = run_through(
        tiny_config(
            tmp_path / "stock", device="cuda", dreamer=EAGER, lore=LoReConfig(enabled=False)
        )
    )
    lore, _ = run_through(tiny_config(tmp_path / "lore", device="cuda", dreamer=EAGER, lore=OFF))
    assert stock.replay_hook.updates > 20
    expected = parameters(stock)
    ours = {
        name.replace("actor_loss.actor_loss", "actor_loss"): value
        for name, value in parameters(lore).items()
    }
    assert set(expected) <= set(ours)
    for name, value in expected.items():
        assert value.is_cuda and torch.equal(value, ours[name]), name


def test_train_and_resume_with_the_captured_update(tmp_path):
    config = tiny_config(tmp_path / "run", device="cuda", dreamer=TWICE, checkpoint_interval=128)
    first, _ = run_through(config)
    assert first.replay_hook.updates > 20
    longer = replace(config, total_steps=192, resume=str(tmp_path / "run"))
    resumed = build_run(longer, advisor=planner())
    expected = parameters(first)
    for name, value in parameters(resumed).items():
        assert torch.equal(value, expected[name]), name
    try:
        resumed.trainer.train()
    finally:
        resumed.close()
    rows = read_metrics(config.output_dir)
    losses = [value for row in rows for name, value in row.items() if name.startswith("loss/")]
    assert losses and all(map(math.isfinite, losses))
    assert max(row.get("advice/calls", 0) for row in rows) > 0
    assert any(row.get("loss/lore_imitation") for row in rows)
    assert [row["step"] for row in rows if "eval/success" in row] == [64, 128, 192]


def test_the_captured_update_corrects_the_returns_of_followed_advice(tmp_path):
    run, _ = run_through(tiny_config(tmp_path / "run", device="cuda"))
    sample = run.replay_hook.replay.sample().reshape(DREAMER.batch_size, DREAMER.seq_len + 1)
    sample = run.replay_hook.stored.extend(sample[:, :-1].exclude("index", "index_generation"))
    sample = run.learner.stepper._prepare_sample(sample.to("cuda"))
    # Every step was the advice's first choice and returned more than any critic expects.
    action = sample["action"].roll(-1, dims=1).float()
    sample["next", "llm_prior_logits"] = 5.0 * action
    sample["next", "llm_mask"] = torch.ones_like(sample["next", "llm_mask"])
    sample["next", "llm_confidence"] = torch.ones_like(sample["next", "llm_confidence"])
    sample["next", "lore_return"] = torch.full_like(sample["next", "lore_return"], 1e3)
    bandit, shares = run.learner.loss.actor_loss._bandit, []
    for log_odds in (-2.0, 2.0):
        bandit.log_odds.fill_(log_odds)
        shares.append(run.learner.stepper._train_step(sample)["lore_imitated"].item())
    assert shares[1] > max(0.5, shares[0])
