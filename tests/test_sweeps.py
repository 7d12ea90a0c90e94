"""The grids of configs/sweep, in Hydra and as W&B sweeps."""

from __future__ import annotations

import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lore_torchrl.configs import TrainConfig, register_configs

ROOT = Path(__file__).resolve().parent.parent
NAMES = sorted(path.stem for path in (ROOT / "configs" / "sweep").glob("*.yaml"))
NAMES.remove("grid")


@pytest.fixture
def sweep_config(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from wandb_sweep import sweep_config

    return sweep_config


def compose_run(*words: str, **kwargs):
    register_configs()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose("config", ["experiment=doorkey5x5", *words], **kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_hydra_runs_the_grid_in_a_folder_of_its_own(name):
    hydra = compose_run(f"sweep={name}", return_hydra_config=True).hydra
    assert hydra.mode.name == "MULTIRUN" and hydra.sweeper.params
    # Hydra resolves it before there is a HydraConfig that ${hydra:...} could read.
    assert hydra.sweep.dir.startswith(f"outputs/sweep/{name}/2")


@pytest.mark.parametrize("name", NAMES)
def test_every_value_composes(name, sweep_config):
    parameters = sweep_config(name, [], 3)["parameters"]
    assert parameters["seed"] == {"values": [0, 1, 2]} and len(parameters) > 1
    columns = [[f"{k}={v}" for v in part["values"]] for k, part in parameters.items()]
    # Each value once.
    for words in zip_longest(*columns):
        config = compose_run("logger=wandb", *filter(None, words))
        config.output_dir = "out"
        assert isinstance(OmegaConf.to_object(config), TrainConfig)


def test_wandb_gets_the_grid_and_a_command_that_starts_a_run(sweep_config):
    config = sweep_config("gate", ["experiment=doorkey6x6"], 2)
    assert config["method"] == "grid"
    assert config["parameters"] == {
        "lore.gate.tau": {"values": [0.3, 0.5, 0.7]},
        "lore.gate.kappa": {"values": [5.0, 10.0, 20.0]},
        "seed": {"values": [0, 1]},
    }
    assert config["metric"] == {"name": "eval/success", "goal": "maximize"}
    assert (ROOT / config["program"]).exists()
    # The agent puts in name=value, as Hydra reads it.
    assert config["command"] == [
        *("${env}", "python", "${program}", "experiment=doorkey6x6", "logger=wandb"),
        "${args_no_hyphens}",
    ]


@pytest.mark.slow
def test_the_hydra_sweep_runs(tmp_path):
    command = [sys.executable, "examples/train.py", "sweep=beta_max", "lore.gate.beta_max=0.5,1"]
    small = ["total_steps=256", "evaluation.episodes=2", "checkpoint_interval=null"]
    subprocess.run(
        [*command, *small, f"hydra.sweep.dir={tmp_path}"], cwd=ROOT, check=True, timeout=300
    )
    assert {path.parent.name for path in tmp_path.glob("*/metrics.jsonl")} == {"0", "1"}
