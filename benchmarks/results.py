"""Held-out success of LoRe and stock DreamerV3 over seeds, side by side.

Run from the project's root::

    python benchmarks/results.py doorkey5x5 --seeds 5
    python benchmarks/results.py doorkey5x5 --study competence --seeds 5
    python benchmarks/results.py empty8x8 --study regret --seeds 3
    python benchmarks/results.py doorkey5x5 --recording ../shared/recordings/doorkey5x5_llm.jsonl

Each run is ``examples/train.py experiment=NAME seed=S [overrides of the method]`` in a
process of one thread, ``--jobs`` at a time. Finished runs are kept and not repeated. The
tables give the interquartile mean over seeds with a 95% bootstrap interval, adviser off;
the mean height of each learning curve, and its ratio to stock's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from lore_torchrl.dreamer.logging import read_metrics
from lore_torchrl.experiments import (
    area_under_curve,
    format_score,
    ratio_interval,
    run_jobs,
)
from lore_torchrl.experiments.runs import make_jobs, run_folder

ROOT = Path(__file__).resolve().parent.parent
STOCK = ["lore=off"]
# Advice that never stops, whatever it costs.
ALWAYS = ["lore.calls.budget=1000000", "lore.calls.min_beta=0"]
STUDIES = {
    "method": {"LoRe": [], "stock": STOCK},
    "competence": {
        "stock": STOCK,
        **{f"competence {c}": [f"advisor.competence={c}"] for c in (1, 0.5, 0.25, 0, -1)},
    },
    "regret": {
        "stock": STOCK,
        "adversarial": ["advisor=adversarial", *ALWAYS],
        "random": ["advisor=random", *ALWAYS],
        "stale": ["advisor=stale", *ALWAYS],
        "truncated": ["advisor=truncated", *ALWAYS],
        "overconfident": ["advisor=overconfident", *ALWAYS],
        "adversarial, ablation B": ["advisor=adversarial", "ablation=b"],
    },
}


def read(base: Path, methods: list[str], seeds: int) -> dict[str, list[list[dict[str, float]]]]:
    """Return the metric rows of every run by method, one list a seed."""
    return {
        name: [read_metrics(run_folder(base, name, seed)) for seed in range(seeds)]
        for name in methods
    }


def curve(rows: list[dict[str, float]]) -> dict[int, float]:
    """Return held-out success by step."""
    return {int(row["step"]): row["eval/success"] for row in rows if "eval/success" in row}


def print_success(runs: dict[str, list[list[dict[str, float]]]], every: int) -> None:
    """Print held-out success at every ``every``-th evaluation, and calls."""
    steps = sorted(curve(next(iter(runs.values()))[0]))
    shown = steps[::-1][::every][::-1]
    print("| | " + " | ".join(f"{step:,} steps" for step in shown) + " | calls |")
    print("|" + " --- |" * (len(shown) + 2))
    for name, seeds in runs.items():
        curves = [curve(rows) for rows in seeds]
        cells = [format_score(np.array([each[step] for each in curves])) for step in shown]
        calls = [max(row.get("advice/calls", 0.0) for row in rows) for rows in seeds]
        spent = f"{min(calls):.0f}-{max(calls):.0f}" if max(calls) else "0"
        print(f"| {name} | " + " | ".join(cells) + f" | {spent} |")
    print()
    for name, seeds in runs.items():
        final = [curve(rows)[steps[-1]] for rows in seeds]
        print(f"{name}, {steps[-1]:,} steps, by seed: {final}")


def print_areas(runs: dict[str, list[list[dict[str, float]]]]) -> None:
    """Print the mean height of the curves beside stock's."""
    areas = {}
    for name, seeds in runs.items():
        curves = [curve(rows) for rows in seeds]
        steps = sorted(curves[0])
        areas[name] = area_under_curve(
            np.array(steps), np.array([[each[step] for step in steps] for each in curves])
        )
    print("\n| | mean height of the curve | over stock's | share of beta allowed, last quarter |")
    print("| --- | --- | --- | --- |")
    for name, values in areas.items():
        ratio, low, high = ratio_interval(values, areas["stock"])
        shares = []
        for rows in runs[name]:
            found = [row["bandit/share"] for row in rows if "bandit/share" in row]
            shares += found[-max(1, len(found) // 4) :]
        share = f"{np.mean(shares):.2f}" if shares else "-"
        height = f"{values.mean():.2f} ({', '.join(f'{value:.2f}' for value in values)})"
        print(f"| {name} | {height} | {ratio:.2f} [{low:.2f}, {high:.2f}] | {share} |")


def print_sources(runs: dict[str, list[list[dict[str, float]]]]) -> None:
    """Print from where the advice came, as shares of all steps."""
    print("\n| | own answer cached | answers of the class | PriorNet | fresh calls | none |")
    print("|" + " --- |" * 6)
    for name, seeds in runs.items():
        shares = []
        for rows in seeds:
            merged: dict[str, float] = {}
            for row in rows:
                merged |= row
            if "advice/cache_hits" not in merged:
                continue
            exact, near = merged["advice/cache_hits"], merged["advice/cache_near_hits"]
            looked = exact + near + merged["advice/cache_misses"]
            learnt, calls = merged.get("prior_net/served", 0.0), merged["advice/calls"]
            # A question about a situation that its class serves already is counted as fresh.
            near = max(0.0, near - max(0.0, calls - merged["advice/cache_misses"]))
            none = max(0.0, looked - exact - near - learnt - calls)
            shares.append(np.array([exact, near, learnt, calls, none]) / looked)
        if shares:
            print(f"| {name} | " + " | ".join(f"{s:.1%}" for s in np.mean(shares, 0)) + " |")


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment")
    parser.add_argument("--study", choices=STUDIES, default="method")
    parser.add_argument("--methods", nargs="*", help="only these methods of the study")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="show every n-th evaluation")
    parser.add_argument(
        "--recording", type=Path, help="answers of a language model: a third method beside these"
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/results"))
    parser.add_argument("--overrides", nargs="*", default=[], help="for every run, as Hydra's")
    args = parser.parse_args()
    base = args.output.resolve() / args.experiment
    methods = dict(STUDIES[args.study])
    if args.recording is not None:
        recording = args.recording.resolve()
        methods["LoRe, recorded LLM"] = ["advisor=recorded", f"advisor.path={recording}"]
    if args.methods:
        methods = {name: methods[name] for name in args.methods}
    jobs = make_jobs(
        base,
        methods,
        seeds=args.seeds,
        common=[f"experiment={args.experiment}"],
        extra=args.overrides,
    )
    errors = run_jobs(jobs, script=ROOT / "examples" / "train.py", processes=args.jobs)
    for error in errors:
        print(error)
    if errors:
        sys.exit(1)
    runs = read(base, list(methods), args.seeds)
    print(f"{args.experiment}, {args.seeds} seeds: held-out success, IQM [95% interval]\n")
    print_success(runs, args.every)
    if "stock" in runs:
        print_areas(runs)
    print_sources(runs)


if __name__ == "__main__":
    main()
