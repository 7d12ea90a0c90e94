"""What uniformly random actions and the embedded planner reach on the held-out episodes.

    python benchmarks/reference_scores.py --output docs/data/references.csv

They are the reference lines of a study's figures: ``references`` of ``examples/study.py``, and
``--references`` of ``examples/report.py``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from lore_torchrl.configs import TrainConfig, register_configs
from lore_torchrl.dreamer.acting import adapter_of
from lore_torchrl.dreamer.evaluation import play_episodes
from lore_torchrl.envs.adapter import EnvAdapter, anchors_of, planner_of, read_row
from lore_torchrl.envs.batch import close_env
from lore_torchrl.experiments.records import Record, write_csv

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
EXPERIMENTS = (
    "doorkey5x5",
    "doorkey6x6",
    "doorkey8x8",
    "doorkey8x8_llm",
    "empty5x5",
    "empty_random5x5",
    "keycorridor",
    "keycorridor_llm",
    "keycorridor_s4r3_llm",
    "multiroom",
    "multiroom_n4_llm",
    "unlockpickup",
    "babyai",
)


class Player(TensorDictModuleBase):
    """Takes the planner's best action where there is a planner and it has one, else any."""

    def __init__(self, config: TrainConfig, adapter: EnvAdapter, *, planned: bool) -> None:
        super().__init__()
        self.describer = adapter.make_describer(memory=config.env.memory)
        if anchors_of(self.describer) is not None:
            raise SystemExit(f"{config.env.id} has continuous actions.")
        self.planner = planner_of(adapter) if planned else None
        self.in_keys, self.out_keys = list(self.describer.in_keys), ["action"]
        self.last: torch.Tensor | None = None

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write an action for each row, one-hot."""
        count = len(self.describer.actions)
        chosen = torch.randint(count, tensordict.batch_size)
        for row in range(len(chosen) if self.planner is not None else 0):
            seen = read_row(tensordict, row, self.describer.in_keys)
            last = None if self.last is None else int(self.last[row])
            self.describer.observe(row, seen, last, reset=last is None)
            values = self.planner(self.describer.request(row, seen))
            if values is not None:
                chosen[row] = int(torch.as_tensor(values).argmax())
        self.last = chosen
        return tensordict.set("action", torch.nn.functional.one_hot(chosen, count))


def score(config: TrainConfig, *, planned: bool) -> dict[str, float]:
    """Play the held-out episodes of a run of a configuration."""
    adapter = adapter_of(config.env)
    episodes = config.evaluation.episodes
    env = adapter.make_env(num_envs=episodes, seed=config.seed, evaluation=True)
    torch.manual_seed(config.seed)
    try:
        return play_episodes(env, adapter, Player(config, adapter, planned=planned))
    finally:
        close_env(env)


def main() -> None:
    """Print a row for each experiment and player, and write them as a curve of one step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experiments", nargs="+", default=EXPERIMENTS)
    parser.add_argument("--output", type=Path)
    settings = parser.parse_args()
    register_configs()
    records = []
    print("| task | player | success | return | steps |\n| --- | --- | --- | --- | --- |")
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        for name in settings.experiments:
            config = OmegaConf.to_object(
                compose("config", [f"experiment={name}", "lore=off", "output_dir=."])
            )
            planned = planner_of(adapter_of(config.env)) is not None
            for player in ("random", "planner")[: 1 + planned]:
                found = score(config, planned=player == "planner")
                rows = [{"step": 0, **{f"eval/{key}": value for key, value in found.items()}}]
                records.append(Record(name, player, config.seed, rows))
                shown = (f"{found[key]:.2f}" for key in ("success", "return", "length"))
                print(f"| {name} | {player} | {' | '.join(shown)} |", flush=True)
    if settings.output:
        write_csv(settings.output, records)


if __name__ == "__main__":
    main()
