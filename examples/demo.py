"""Train LoRe and stock DreamerV3 side by side on DoorKey-5x5 and compare them.

Two processes of one thread each; some three minutes on two cores. The advisor is the
embedded planner, limited to 98 calls. Usage::

    python examples/demo.py [--steps 5000] [--seed 0] [--output outputs/demo]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from tqdm import tqdm

from lore_torchrl.dreamer.figures import save_figures
from lore_torchrl.dreamer.logging import read_metrics
from lore_torchrl.dreamer.run_lock import file_lock, handled_signals
from lore_torchrl.experiments.launch import ENVIRONMENT

TRAIN = Path(__file__).resolve().parent / "train.py"
RUNS = {"LoRe": [], "stock DreamerV3": ["lore=off"]}


def start(
    folder: Path, overrides: list[str], args: argparse.Namespace, lock: IO[str]
) -> subprocess.Popen:
    """Start one training run as a user would."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [
        *(sys.executable, str(TRAIN), "experiment=doorkey5x5"),
        *(f"seed={args.seed}", f"total_steps={args.steps}", f"output_dir={folder}"),
        *("logger.progress_bar=false", "logger.interval=250"),
        *(f"evaluation.interval={args.eval_interval}", f"hydra.run.dir={folder}/hydra"),
        *overrides,
    ]
    with (folder / "log.txt").open("w") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            # Should it outlive this process, the folder stays its own.
            pass_fds=[lock.fileno()],
        )


def follow(processes: dict[str, subprocess.Popen], folders: dict[str, Path], steps: int) -> None:
    """Show a bar for each run until all have ended."""
    bars = {
        name: tqdm(total=steps, desc=f"{name:16s}", position=position, unit="step")
        for position, name in enumerate(processes)
    }
    try:
        while True:
            running = any(process.poll() is None for process in processes.values())
            for name, bar in bars.items():
                path = folders[name] / "metrics.jsonl"
                row = {}
                for line in read_metrics(path) if path.exists() else ():
                    row |= line
                if row:
                    bar.n = min(row["step"], steps)
                    shown = {"success": f"{row.get('train/success', 0.0):.2f}"}
                    if "advice/calls" in row:
                        shown |= {
                            "calls": int(row["advice/calls"]),
                            "KL": f"{row.get('lore/kl', 0):.2f}",
                        }
                    if "eval/success" in row:
                        shown["held-out"] = f"{row['eval/success']:.2f}"
                    bar.set_postfix(shown)
            if not running:
                break
            time.sleep(1)
    finally:
        for bar in bars.values():
            bar.close()
        for process in processes.values():
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=60)


def report(folders: dict[str, Path]) -> None:
    """Print held-out success at each evaluation, calls and speed."""
    rows = {name: read_metrics(folder) for name, folder in folders.items()}
    steps = sorted({r["step"] for run in rows.values() for r in run if "eval/success" in r})
    print("\nHeld-out success, advisor off (100 episodes on seeds never trained on)\n")
    print(f"{'':18s}" + "".join(f"{step:>9,d}" for step in steps) + f"{'calls':>9s}{'steps/s':>9s}")
    for name, run in rows.items():
        success = {r["step"]: r["eval/success"] for r in run if "eval/success" in r}
        calls = max((r.get("advice/calls", 0.0) for r in run), default=0.0)
        last = [r for r in run if "time/elapsed_s" in r][-1]
        cells = "".join(
            f"{success[step]:9.2f}" if step in success else f"{'':9s}" for step in steps
        )
        print(f"{name:18s}{cells}{calls:9.0f}{last['step'] / last['time/elapsed_s']:9.1f}")


def main() -> None:
    """Read the command line, and run alone in the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--eval-interval", type=int, default=1_250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"))
    args = parser.parse_args()
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    with file_lock(output / "demo.lock") as lock:
        if lock is None:
            sys.exit(f"Another demo writes to {output}: wait for it, or give another --output.")
        with handled_signals(end):
            demo(output, args, lock)


def end(signum: int, _frame: object) -> None:
    """Leave, and end both runs on the way."""
    sys.exit(128 + signum)


def demo(output: Path, args: argparse.Namespace, lock: IO[str]) -> None:
    """Run both, then report."""
    folders = {"LoRe": output / "lore", "stock DreamerV3": output / "stock"}
    started = time.perf_counter()
    processes = {name: start(folders[name], RUNS[name], args, lock) for name in RUNS}
    follow(processes, folders, args.steps)
    failed = [name for name, process in processes.items() if process.returncode]
    for name in failed:
        print(f"{name} failed; the end of {folders[name] / 'log.txt'}:")
        print("\n".join((folders[name] / "log.txt").read_text().splitlines()[-20:]))
    if failed:
        sys.exit(1)
    report(folders)
    print("\nFigures:")
    for path in save_figures(output, folders):
        print(f"  {path}")
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
