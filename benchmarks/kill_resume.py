"""Kill one training run again and again, resume it each time, and look at what is left.

Run from the project's root::

    python benchmarks/kill_resume.py --kills 10

The run of ``experiment=doorkey5x5`` is ended by SIGKILL at random moments, and goes on from its
last checkpoint; before the first checkpoint it starts again. Ledger and answers are in a store.
At the end: the run is complete, no call beyond the budget was made, metrics, evaluations, CSV
files and advice have neither gaps nor doubles, and every checkpoint is whole.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lore_torchrl.dreamer.advice_log import read_advice
from lore_torchrl.dreamer.checkpoint import verify
from lore_torchrl.dreamer.logging import read_metrics
from lore_torchrl.service import AdviceStore, CallBudget

ROOT = Path(__file__).resolve().parent.parent


def command(folder: Path, extra: list[str]) -> list[str]:
    """Return the command line of the run, resuming where there is a checkpoint."""
    words = [
        *(sys.executable, str(ROOT / "examples" / "train.py"), "experiment=doorkey5x5"),
        *(f"output_dir={folder}", f"hydra.run.dir={folder}/hydra", "checkpoint_interval=1000"),
        *(f"lore.calls.store={folder}/advice.sqlite", "logger.progress_bar=false", *extra),
    ]
    saved = folder / "checkpoints"
    if saved.is_dir() and any(path.name.startswith("checkpoint-") for path in saved.iterdir()):
        words.append(f"resume={folder}")
    return words


def check(folder: Path, *, budget: int, total: int) -> list[str]:
    """Return what is wrong with a finished run, nothing if all is well."""
    faults = []
    rows = read_metrics(folder)
    for name, interval in (("time/updates", 500), ("eval/success", 2_500)):
        steps = [int(row["step"]) for row in rows if name in row]
        if steps != sorted(set(steps)):
            faults.append(f"{name}: steps are not ascending, {steps}")
        if not steps or steps[-1] < total:
            faults.append(f"{name}: ends at {steps[-1:]} of {total} steps")
        gaps = [b - a for a, b in zip([0, *steps], steps, strict=False) if b - a > 1.5 * interval]
        if gaps:
            faults.append(f"{name}: gaps of {gaps} steps")
        print(f"{name}: {len(steps)} rows to step {steps[-1]:,}")
    logged = {name: [row["step"] for row in rows if name in row] for row in rows for name in row}
    files = list((folder / "csv").glob("*/scalars/**/*.csv"))
    for file in files:
        name = file.relative_to(next((folder / "csv").glob("*/scalars"))).with_suffix("")
        steps = [int(line.split(",")[0]) for line in file.read_text().splitlines()]
        if steps != logged[name.as_posix()]:
            faults.append(f"{file}: not the steps of metrics.jsonl, {steps}")
    if len(files) < len(logged) - 1:
        faults.append(f"csv: {len(files)} files for {len(logged) - 1} metrics")
    asked = [(line["step"], line["environment"]) for line in read_advice(folder)]
    if not asked or asked != sorted(set(asked)):
        faults.append(f"advice.jsonl: none, or not in ascending order, {asked}")
    spent = CallBudget(budget, store=AdviceStore(folder / "advice.sqlite")).spent
    if spent > budget:
        faults.append(f"budget: {spent} calls of {budget}")
    for path in (folder / "checkpoints").iterdir():
        if path.name.startswith("checkpoint-"):
            verify(path)
        else:
            faults.append(f"{path}: left by a killed save")
    print(f"{spent} of {budget} calls, {len(asked)} lines of advice, {len(files)} CSV files")
    return faults


def main() -> None:
    """Kill, resume, and check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shortest", type=float, default=5.0, help="seconds before a kill")
    parser.add_argument("--longest", type=float, default=60.0)
    parser.add_argument("--total", type=int, default=10_016, help="steps that the run ends at")
    parser.add_argument("--overrides", nargs="*", default=[], help="for the run, as Hydra's")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="kill_resume_"))
    print(f"run folder {folder}")
    for number in range(args.kills):
        with (folder / f"log{number}.txt").open("w") as log:
            process = subprocess.Popen(command(folder, args.overrides), stdout=log, stderr=log)
            time.sleep(chance.uniform(args.shortest, args.longest))
            if process.poll() is not None:
                raise SystemExit(f"it ended before kill {number + 1}: {log.name}")
            process.send_signal(signal.SIGKILL)
            process.wait()
        last = [row["step"] for row in read_metrics(folder)] if _has_metrics(folder) else []
        print(f"kill {number + 1}: at step {max(last, default=0):,}", flush=True)
    subprocess.run(command(folder, args.overrides), check=True, stdout=subprocess.DEVNULL)
    faults = check(folder, budget=98, total=args.total)
    if faults:
        raise SystemExit("\n".join(faults))
    print("complete: no gap, no double, no call beyond the budget, every checkpoint whole")


def _has_metrics(folder: Path) -> bool:
    path = folder / "metrics.jsonl"
    return path.exists() and bool(path.read_text().strip())


if __name__ == "__main__":
    main()
