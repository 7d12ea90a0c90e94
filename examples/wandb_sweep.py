"""Create a W&B sweep over a grid of ``configs/sweep``, for agents on any number of machines.

Examples::

    python examples/wandb_sweep.py gate
    python examples/wandb_sweep.py gate experiment=doorkey6x6 --seeds 5
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

GRIDS = Path(__file__).resolve().parent.parent / "configs" / "sweep"


def sweep_config(name: str, overrides: list[str], seeds: int) -> dict[str, Any]:
    """Return the W&B configuration of a grid, one run for each cell and seed."""
    params = yaml.safe_load((GRIDS / f"{name}.yaml").read_text())["hydra"]["sweeper"]["params"]
    grid = {key: yaml.safe_load(f"[{values}]") for key, values in params.items()}
    return {
        "name": name,
        "program": "examples/train.py",
        "method": "grid",
        "metric": {"name": "eval/success", "goal": "maximize"},
        "parameters": {k: {"values": v} for k, v in {**grid, "seed": list(range(seeds))}.items()},
        "command": [
            *("${env}", "python", "${program}", *overrides, "logger=wandb"),
            "${args_no_hyphens}",
        ],
    }


def main() -> None:
    """Create the sweep; W&B prints how to start an agent."""
    names = sorted(path.stem for path in GRIDS.glob("*.yaml") if path.stem != "grid")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("grid", choices=names)
    parser.add_argument("overrides", nargs="*", help="of each run (experiment=doorkey5x5)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--project", default="lore_torchrl", help="(default: %(default)s)")
    args = parser.parse_args()
    import wandb

    overrides = args.overrides or ["experiment=doorkey5x5"]
    try:
        wandb.sweep(sweep_config(args.grid, overrides, args.seeds), project=args.project)
    except wandb.errors.UsageError as error:
        raise SystemExit(f"W&B refused the sweep: {error}") from None


if __name__ == "__main__":
    main()
