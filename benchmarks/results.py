"""Held-out success of LoRe and stock DreamerV3 over seeds, side by side.

Run from the project's root::

    python benchmarks/results.py doorkey5x5 --seeds 5
    python benchmarks/results.py doorkey6x6 --seeds 3
    python benchmarks/results.py doorkey5x5 --recording ../shared/recordings/doorkey5x5_llm.jsonl

Each run is ``examples/train.py experiment=NAME seed=S [lore=off]`` in a process of one
thread, ``--jobs`` at a time. Finished runs are kept and not repeated. The table gives the
interquartile mean over seeds with a 95% bootstrap interval, adviser off.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lore_torchrl.dreamer.logging import read_metrics

ROOT = Path(__file__).resolve().parent.parent
METHODS = {"LoRe": [], "stock": ["lore=off"]}


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Mean of the middle half along the last axis, with fractional weights at its edges."""
    values = np.sort(values, axis=-1)
    count = values.shape[-1]
    edges = np.arange(count + 1) / count
    weight = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0, None)
    return (values * weight).sum(-1) / weight.sum()


def interval(values: np.ndarray, draws: int = 10_000) -> tuple[float, float]:
    """Percentile-bootstrap interval of the interquartile mean, 95%."""
    generator = np.random.default_rng(0)
    resampled = generator.choice(values, (draws, len(values)))
    low, high = np.quantile(interquartile_mean(resampled), [0.025, 0.975])
    return float(low), float(high)


def run(folder: Path, experiment: str, seed: int, overrides: list[str]) -> str | None:
    """Train once; return what went wrong, if anything did."""
    if (folder / "done").exists():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, str(ROOT / "examples" / "train.py"), f"experiment={experiment}"),
        *(f"seed={seed}", f"output_dir={folder}", f"hydra.run.dir={folder}/hydra"),
        *("logger.progress_bar=false", "checkpoint_interval=null", *overrides),
    ]
    with (folder / "log.txt").open("w") as log:
        code = subprocess.run(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        ).returncode
    if code:
        return f"{folder} ended with code {code}: see {folder / 'log.txt'}"
    (folder / "done").touch()
    return None


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--recording", type=Path, help="answers of a language model: a third method beside these"
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/results"))
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for every run")
    args = parser.parse_args()
    base = args.output.resolve() / args.experiment
    methods = dict(METHODS)
    if args.recording is not None:
        recording = args.recording.resolve()
        methods["LoRe, recorded LLM"] = ["advisor=recorded", f"advisor.path={recording}"]

    def folder(name: str, seed: int) -> Path:
        return base / re.sub(r"\W+", "-", name) / f"seed{seed}"

    jobs = [
        (folder(name, seed), args.experiment, seed, [*extra, *args.overrides])
        for seed in range(args.seeds)
        for name, extra in methods.items()
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        errors = [error for error in pool.map(lambda job: run(*job), jobs) if error]
    for error in errors:
        print(error)
    if errors:
        sys.exit(1)

    table: dict[str, dict[int, list[float]]] = {}
    calls: dict[str, list[float]] = {}
    for name in methods:
        for seed in range(args.seeds):
            rows = read_metrics(folder(name, seed))
            for row in rows:
                if "eval/success" in row:
                    steps = table.setdefault(name, {})
                    steps.setdefault(row["step"], []).append(row["eval/success"])
            calls.setdefault(name, []).append(max(row.get("advice/calls", 0.0) for row in rows))
    steps = sorted(table["LoRe"])
    print(f"{args.experiment}, {args.seeds} seeds: held-out success, IQM [95% interval]\n")
    print("| | " + " | ".join(f"{step:,} steps" for step in steps) + " | calls |")
    print("|" + " --- |" * (len(steps) + 2))
    for name, by_step in table.items():
        cells = []
        for step in steps:
            values = np.array(by_step[step])
            low, high = interval(values)
            cells.append(f"{interquartile_mean(values):.2f} [{low:.2f}, {high:.2f}]")
        spent = f"{min(calls[name]):.0f}-{max(calls[name]):.0f}" if max(calls[name]) else "0"
        print(f"| {name} | " + " | ".join(cells) + f" | {spent} |")
    print()
    for name, by_step in table.items():
        print(f"{name}, {steps[-1]:,} steps, by seed: {by_step[steps[-1]]}")


if __name__ == "__main__":
    main()
