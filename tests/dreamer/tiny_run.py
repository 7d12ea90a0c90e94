"""A training run small enough for a test: a hundred steps, a few thousand parameters."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from lore_torchrl.advisors.base import Advisor
from lore_torchrl.advisors.scripted import ScriptedAdvisor
from lore_torchrl.configs import (
    BanditConfig,
    CallsConfig,
    DreamerConfig,
    EnvConfig,
    EvaluationConfig,
    GateConfig,
    LoggerConfig,
    LoReConfig,
    LossConfig,
    TrainConfig,
)
from lore_torchrl.dreamer.logging import read_metrics
from lore_torchrl.dreamer.run import build_run
from lore_torchrl.envs.minigrid import MiniGridPlanner

DREAMER = DreamerConfig(
    hidden_dim=16,
    belief_dim=16,
    num_blocks=2,
    num_categoricals=4,
    num_classes=4,
    num_bins=41,
    batch_size=4,
    seq_len=8,
    imagination_horizon=4,
    replay_ratio=4.0,
    learning_starts=48,
    buffer_size=2_000,
    lr_warmup=0,
)
OFF = LoReConfig(
    calls=CallsConfig(budget=0),
    gate=GateConfig(beta_max=0.0),
    loss=LossConfig(imitation_weight=0.0, prior_weight=0.0, multiplier_lr=0.0),
    bandit=BanditConfig(enabled=False),
)

#: Entries of each line of ``advice.jsonl``, in their order.
COLUMNS = (
    *("step", "environment", "advice_id", "observation", "prompt", "prior", "confidence"),
    *("policy", "mix", "beta", "action", "late"),
)


def tiny_config(output: Path, **changes) -> TrainConfig:
    """A run of 128 steps into ``output``; ``changes`` replace fields of the root."""
    values = {
        "total_steps": 128,
        "steps_per_batch": 16,
        "checkpoint_interval": None,
        "output_dir": str(output),
        "env": EnvConfig(num_envs=2, max_steps=20),
        "lore": LoReConfig(),
        "dreamer": DREAMER,
        "logger": LoggerConfig(interval=32, progress_bar=False, figures=False),
        "evaluation": EvaluationConfig(interval=64, episodes=2),
    }
    return TrainConfig(**(values | changes))


def planner(seed: int = 0) -> ScriptedAdvisor:
    """The embedded advisor, without Hydra."""
    return ScriptedAdvisor(MiniGridPlanner(), seed=seed)


def run_through(config: TrainConfig, advisor: Advisor | None = None):
    """Train to the last step; return the run and its rows."""
    run = build_run(config, advisor=advisor or planner())
    try:
        run.trainer.train()
    finally:
        run.close()
    return run, read_metrics(config.output_dir)


def untimed(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Metric rows without what depends on the clock."""
    clock = ("time/elapsed_s", "time/steps_per_s", "advice/latency_p50_s", "advice/latency_p95_s")
    return [{name: value for name, value in row.items() if name not in clock} for row in rows]


__all__ = ["DREAMER", "OFF", "asdict", "planner", "run_through", "tiny_config", "untimed"]
