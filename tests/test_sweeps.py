"""The sweeps of configs/sweep (Hydra) and configs/sweeps (W&B) name the same grids."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
NAMES = sorted(path.stem for path in (ROOT / "configs" / "sweeps").glob("*.yaml"))


def read(folder: str, name: str) -> dict:
    return yaml.safe_load((ROOT / "configs" / folder / f"{name}.yaml").read_text())


def test_both_folders_hold_the_same_names():
    assert NAMES and sorted(p.stem for p in (ROOT / "configs" / "sweep").glob("*.yaml")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_grids_agree(name):
    wandb = {k: v["values"] for k, v in read("sweeps", name)["parameters"].items()}
    hydra = read("sweep", name)["hydra"]["sweeper"]["params"]
    grid = {key: [float(v) for v in str(values).split(",")] for key, values in hydra.items()}
    assert {k: [float(v) for v in values] for k, values in wandb.items() if k != "seed"} == grid


@pytest.mark.parametrize("name", NAMES)
def test_every_value_composes(name):
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from lore_torchrl.configs import TrainConfig, register_configs

    register_configs()
    parameters = read("sweeps", name)["parameters"]
    columns = {key: parameter["values"] for key, parameter in parameters.items()}
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        # Each value once, beside the first of the others where its own list is shorter.
        for row in range(max(map(len, columns.values()))):
            words = [
                f"{key}={values[row if row < len(values) else 0]}"
                for key, values in columns.items()
            ]
            config = compose("config", ["experiment=doorkey5x5", "logger=wandb", *words])
            config.output_dir = "out"
            assert isinstance(OmegaConf.to_object(config), TrainConfig)


@pytest.mark.parametrize("name", NAMES)
def test_the_agent_can_start_the_program(name):
    config = read("sweeps", name)
    assert (ROOT / config["program"]).exists()
    assert config["method"] == "grid"
    assert config["metric"] == {"name": "eval/success", "goal": "maximize"}
    # What the agent puts in: name=value, as Hydra reads it.
    assert config["command"][:3] == ["${env}", "python", "${program}"]
    assert config["command"][-1] == "${args_no_hyphens}"


@pytest.mark.slow
def test_the_hydra_sweep_runs(tmp_path):
    command = [sys.executable, "examples/train.py", "sweep=beta_max", "lore.gate.beta_max=0.5,1"]
    small = ["total_steps=256", "evaluation.episodes=2", "checkpoint_interval=null"]
    subprocess.run(
        [*command, *small, f"hydra.sweep.dir={tmp_path}"], cwd=ROOT, check=True, timeout=300
    )
    assert {path.parent.name for path in tmp_path.glob("*/metrics.jsonl")} == {"0", "1"}
