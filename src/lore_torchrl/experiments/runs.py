"""Training runs in processes of their own, some at a time, finished ones kept."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

#: Exit codes of a run that a signal ended: in the midst of things, or after its round.
_CUT = {code for s in (signal.SIGINT, signal.SIGTERM) for code in (-s, 128 + s)}


@dataclass(frozen=True)
class Job:
    """One training run: a method on an experiment with a seed.

    Its folder holds ``run.json``, which says what it is, the run's own files and log, and at
    the end ``done`` or ``failed``.

    Args:
        folder: Where it writes.
        experiment: Name of the experiment.
        method: Name of the method.
        seed: Its seed.
        overrides: Hydra overrides for the training script.
    """

    folder: Path
    experiment: str
    method: str
    seed: int
    overrides: tuple[str, ...]

    @property
    def state(self) -> str:
        """``done``, ``failed``, or ``open``: not begun, or cut off."""
        for state in ("done", "failed"):
            if (self.folder / state).exists():
                return state
        return "open"


def run_folder(base: Path, experiment: str, method: str, seed: int) -> Path:
    """Return the folder of one run.

    Args:
        base: Folder of the study.
        experiment: Name of the experiment, any text.
        method: Name of the method, any text.
        seed: Seed of the run.
    """
    parts = [re.sub(r"[^\w.+-]+", "-", name).strip("-") for name in (experiment, method)]
    return base.joinpath(*parts, f"seed{seed}")


def make_jobs(
    base: Path,
    experiments: Sequence[str],
    methods: Mapping[str, Sequence[str]],
    *,
    seeds: int,
    overrides: Sequence[str] = (),
) -> list[Job]:
    """Return one job for each seed, experiment and method, in this order.

    Args:
        base: Folder of the study.
        experiments: Files of ``configs/experiment``.
        methods: Overrides of each method by its name.

    Keyword Args:
        seeds: Seeds from 0 on.
        overrides: Overrides of every run, which go before those of the method. Default: none.

    Raises:
        ValueError: If two methods would share a folder.
    """
    jobs = [
        Job(
            run_folder(base, experiment, method, seed),
            experiment,
            method,
            seed,
            (f"experiment={experiment}", *overrides, *own, f"seed={seed}"),
        )
        for seed in range(seeds)
        for experiment in experiments
        for method, own in methods.items()
    ]
    taken: dict[Path, Job] = {}
    for job in jobs:
        other = taken.setdefault(job.folder, job)
        if other is not job:
            raise ValueError(
                f"Methods {other.method!r} and {job.method!r} have the same folder, "
                f"{job.folder}: give one another name."
            )
    return jobs


def run_jobs(
    jobs: Sequence[Job], *, script: Path, processes: int, retry: bool = False
) -> list[str]:
    """Run what is open, each run with one CPU thread.

    A run that was cut off, by Ctrl-C or SIGTERM, is named and begins anew the next time. What
    has failed before is named and left, unless ``retry``.

    Args:
        jobs: The runs.

    Keyword Args:
        script: Training script that takes Hydra overrides.
        processes: Runs side by side.
        retry: Whether to run once more what has failed. Default: ``False``.

    Returns:
        One line for each run that failed, now or before, or was cut off, with the place of
        its log.

    Raises:
        ValueError: If what is kept in a folder was run with other overrides than asked for.
    """
    for job in jobs:
        if job.state == "done" or (job.state == "failed" and not retry):
            _check_same(job)
    with ThreadPoolExecutor(processes) as pool:
        errors = pool.map(lambda job: _run(job, script, retry), jobs)
        return [error for error in errors if error]


def _check_same(job: Job) -> None:
    about = json.loads((job.folder / "run.json").read_text())
    before, now = about["overrides"], list(job.overrides)
    if before != now:
        gone = [word for word in before if word not in now]
        new = [word for word in now if word not in before]
        if not gone and not new:
            # The same words in another order: of two for one setting the last one counts.
            gone, new = before, now
        retry = ", or give retry=true" if job.state == "failed" else ""
        raise ValueError(
            f"{job.folder} holds a {job.state} run with other settings: "
            f"{' '.join(gone) or 'nothing'} there, {' '.join(new) or 'nothing'} asked for. "
            f"Name another output=, or remove that folder{retry}."
        )


def _run(job: Job, script: Path, retry: bool) -> str | None:
    name = f"{job.experiment}, {job.method}, seed {job.seed}"
    failed = f"{name} failed: {job.folder / 'log.txt'}"
    if job.state == "done":
        return None
    if job.state == "failed":
        if not retry:
            return f"{failed} (retry=true runs it again)"
        (job.folder / "failed").unlink()
    job.folder.mkdir(parents=True, exist_ok=True)
    # Left by the run, if it ended before its last step.
    stopped = job.folder / "stopped.json"
    stopped.unlink(missing_ok=True)
    about = {name: getattr(job, name) for name in ("experiment", "method", "seed", "overrides")}
    (job.folder / "run.json").write_text(json.dumps(about, indent=2))
    command = [
        *(sys.executable, str(script), *job.overrides),
        *(f"output_dir={job.folder}", f"hydra.run.dir={job.folder}/hydra"),
        *("logger.progress_bar=false", "checkpoint_interval=null"),
        f"logger.group='{job.experiment}: {job.method}'",
    ]
    began = time.time()
    with (job.folder / "log.txt").open("w") as log:
        code = subprocess.run(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        ).returncode
    if code in _CUT:
        return f"{name} was cut off: {job.folder / 'log.txt'} (the same command begins it anew)"
    facts = {"code": code, "seconds": round(time.time() - began, 1)}
    if stopped.exists():
        facts |= json.loads(stopped.read_text())
        failed += f" ({facts['reason']}, step {facts['step']:,})"
    (job.folder / ("failed" if code else "done")).write_text(json.dumps(facts))
    return failed if code else None
