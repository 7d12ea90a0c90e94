"""What programs in the sandbox cost a step of collection, at 4 environments.

Run from the project's root, on an otherwise idle machine::

    python benchmarks/bench_sandbox.py
    python benchmarks/bench_sandbox.py --cold

Each contestant collects the same environment with the acting policy of a run, without learning
and without calls: ``none`` without programs, ``features`` and ``progress`` with the adapter's
hand-written program of that kind, ``columns`` with the networks that read features, and a program
that was retired at once. They take turns in short segments, in random order. Each ratio is the
median over rounds of (seconds per vector step / those of the baseline within the round), with a
95% bootstrap interval over rounds: what the sandbox costs is ``progress`` over ``none`` and
``features`` over ``columns``, what the networks cost ``columns`` over ``none``.
With ``--cold`` no result is kept, as if no view came twice.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from lore_torchrl.configs import (
    CallsConfig,
    EnvConfig,
    FeaturesConfig,
    LoggerConfig,
    LoReConfig,
    ProgressConfig,
    TrainConfig,
)
from lore_torchrl.dreamer.run import Run, build_run
from lore_torchrl.sandbox import Program, ProgramStore, programs
from ratios import paired_ratios

TARGET = 1.10
PAIRS = (("columns", "none"), ("features", "columns"), ("progress", "none"))
FAILING = Program("features", "def compute_features(obs):\n    return {'a': 1 / 0}")
ENDLESS = 1_000_000_000


def build(folder: Path, name: str, *, env: str, num_envs: int) -> Run:
    """Build the acting half of a run with programs of the kind ``name``, or with ``none``."""
    features = FeaturesConfig(enabled=name in ("features", "columns"), off_share=0.0)
    if name == "columns":
        store = ProgramStore(folder / "failing.jsonl")
        store.append(FAILING)
        features.path, features.max_failures = str(store.path), 1
    lore = LoReConfig(
        calls=CallsConfig(budget=0),
        features=features,
        progress=ProgressConfig(enabled=name == "progress"),
    )
    config = TrainConfig(
        total_steps=ENDLESS,
        checkpoint_interval=None,
        output_dir=str(folder / name),
        env=EnvConfig(id=env, num_envs=num_envs),
        lore=lore,
        logger=LoggerConfig(backends=[], progress_bar=False, figures=False),
    )
    return build_run(config)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="MiniGrid-DoorKey-8x8-v0", help="any of MiniGrid")
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=10, help="32-step batches in a segment")
    parser.add_argument("--cold", action="store_true", help="keep no results")
    args = parser.parse_args()
    if args.cold:
        programs._KEPT = 0
    random.seed(0)
    names = ["none", "columns", "features", "progress"]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        runs = {n: build(Path(folder), n, env=args.env, num_envs=args.envs) for n in names}
        batches = {name: iter(run.collector) for name, run in runs.items()}
        for round_index in range(args.rounds + 1):
            for name in random.sample(names, len(names)):
                steps, start = 0, time.perf_counter()
                for _ in range(args.batches):
                    steps += next(batches[name]).shape[1]
                if round_index:  # the first round warms up
                    seconds[name].append((time.perf_counter() - start) / steps)
        for run in runs.values():
            run.close()
    print(f"{'':24s}{'ms a step':>10s}{'ratio':>8s}{'95% interval':>18s}")
    for name, baseline in PAIRS:
        r = paired_ratios(seconds, baseline)[name]
        verdict = "" if name == "columns" else "met" if r["ratio"] <= TARGET else "missed"
        print(
            f"{f'{name} / {baseline}':24s}{1e3 * r['median']:10.2f}{r['ratio']:8.3f}"
            f"{r['ratio_low']:10.3f}-{r['ratio_high']:.3f}  {verdict}"
        )


if __name__ == "__main__":
    main()
