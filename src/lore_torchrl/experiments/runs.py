"""Training runs in processes of their own, some at a time, finished ones kept."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """One training run.

    Args:
        folder: Where it writes; a file ``done`` in it marks a finished run.
        overrides: Hydra overrides for the training script.
    """

    folder: Path
    overrides: tuple[str, ...]


def run_folder(base: Path, method: str, seed: int) -> Path:
    """Return the folder of one method's run with one seed.

    Args:
        base: Folder of the study.
        method: Name of the method, any text.
        seed: Seed of the run.
    """
    return base / re.sub(r"[^\w.+-]+", "-", method).strip("-") / f"seed{seed}"


def make_jobs(
    base: Path,
    methods: Mapping[str, Sequence[str]],
    *,
    seeds: int,
    common: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> list[Job]:
    """Return one job for each method and seed, all methods of a seed before the next seed.

    Args:
        base: Folder of the study.
        methods: Overrides of each method by its name.

    Keyword Args:
        seeds: Seeds from 0 on.
        common: Overrides that come before those of the method. Default: none.
        extra: Overrides that come after them. Default: none.
    """
    return [
        Job(run_folder(base, name, seed), (*common, *overrides, *extra, f"seed={seed}"))
        for seed in range(seeds)
        for name, overrides in methods.items()
    ]


def run_jobs(jobs: Sequence[Job], *, script: Path, processes: int) -> list[str]:
    """Run what is not finished yet, each run with one CPU thread.

    Args:
        jobs: The runs.

    Keyword Args:
        script: Training script that takes Hydra overrides.
        processes: Runs side by side.

    Returns:
        One line for each run that failed, with the place of its log.
    """
    with ThreadPoolExecutor(processes) as pool:
        errors = pool.map(lambda job: _run(job, script), jobs)
        return [error for error in errors if error]


def _run(job: Job, script: Path) -> str | None:
    if (job.folder / "done").exists():
        return None
    job.folder.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, str(script), *job.overrides),
        *(f"output_dir={job.folder}", f"hydra.run.dir={job.folder}/hydra"),
        *("logger.progress_bar=false", "checkpoint_interval=null"),
    ]
    with (job.folder / "log.txt").open("w") as log:
        code = subprocess.run(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        ).returncode
    if code:
        return f"{job.folder} ended with code {code}: see {job.folder / 'log.txt'}"
    (job.folder / "done").touch()
    return None
