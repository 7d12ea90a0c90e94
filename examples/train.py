"""Train LoRe, or stock DreamerV3, from a Hydra configuration.

Examples::

    python examples/train.py experiment=doorkey5x5
    python examples/train.py experiment=doorkey5x5 lore=off
    python examples/train.py experiment=doorkey5x5 logger=wandb seed=1
    python examples/train.py experiment=doorkey5x5 resume=outputs/2026-01-01/12-00-00
"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig, OmegaConf

from lore_torchrl.configs import register_configs
from lore_torchrl.dreamer.run import train

register_configs()


@hydra.main(version_base="1.3", config_path="../configs", config_name="config")
def main(config: DictConfig) -> float:
    """Train once; the held-out success is what a sweeper maximises."""
    summary = train(OmegaConf.to_object(config))
    for name in ("eval/success", "train/success", "advice/calls", "time/steps_per_s"):
        if name in summary:
            print(f"{name:18s} {summary[name]:.3f}")
    print(f"run folder         {config.output_dir}")
    # A run that was stopped before its first evaluation has none.
    return summary.get("eval/success", float("nan"))


if __name__ == "__main__":
    main()
