"""Every benchmark that a page of the docs cites runs, at its smallest size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALLEST = {
    "attack.py": "--list",
    "bad_programs.py": "programs.jsonl",
    "bench_classes.py": "--rooms BabyAI-GoToLocal-v0 --steps 100 --calls 5",
    "bench_crafter.py": "--rounds 1 --steps 4",
    "bench_crafter_advice.py": "--episodes 1 --steps 10 --calls 3",
    "bench_latency.py": "--rounds 1 --batches 2 --latency 0.05 --blocking-calls 1",
    "bench_market.py": "--episodes 1",
    "bench_overhead.py": "--rounds 1 --updates 1 --steps 2",
    "bench_planner.py": "--rounds 1 --steps 1",
    "bench_sandbox.py": "--rounds 1 --batches 1",
    "distinct_starts.py": "--tasks BabyAI-GoToLocal-v0 --episodes 2",
    "imitation_bias.py": "--rounds 2 --episodes 5 --seeds 1",
    "kill_resume.py": "--kills 0 --total 64 --overrides total_steps=64 evaluation.episodes=2",
    "reference_scores.py": "--help",
}


def test_every_benchmark_is_run():
    imported = {"ratios.py"}
    names = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert names - imported == set(SMALLEST)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_runs(name, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(ROOT / "benchmarks" / name), *SMALLEST[name].split()]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    assert done.stdout.strip()
