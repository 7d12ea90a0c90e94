"""Training runs in processes of their own, some at a time, finished ones kept."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from lore_torchrl.advisors.redaction import redact_all
from lore_torchrl.dreamer.logging import read_object, rewrite
from lore_torchrl.dreamer.run_lock import file_lock, sign
from lore_torchrl.experiments.machine import describe_machine

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
    def name(self) -> str:
        """What messages call it."""
        return f"{self.experiment}, {self.method}, seed {self.seed}"

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

    A run that was cut off, by Ctrl-C or SIGTERM, is named; the next time it goes on from its
    last checkpoint, if its overrides set ``checkpoint_interval``, or else begins anew. Ctrl-C
    and SIGTERM end the runs under way too. What has failed before is named and left, unless
    ``retry``. A run that another process is still making, here or elsewhere, is named and left.

    Args:
        jobs: The runs.

    Keyword Args:
        script: Training script that takes Hydra overrides.
        processes: Runs side by side.
        retry: Whether to run once more what has failed. Default: ``False``.

    Returns:
        One line for each run that failed, now or before, was cut off, or is made elsewhere,
        with the place of its log.

    Raises:
        ValueError: If what is kept in a folder was run with other overrides than asked for.
    """
    for job in jobs:
        if job.state == "done" or (job.state == "failed" and not retry):
            _check_same(job)
    crew = _Crew()
    with _ending(crew), ThreadPoolExecutor(processes) as pool:
        errors = pool.map(lambda job: _run(job, script, retry, crew), jobs)
        return [error for error in errors if error]


@dataclass
class _Crew:
    """The runs under way, and whether there are to be no more."""

    running: set[subprocess.Popen] = field(default_factory=set)
    dismissed: bool = False

    def wait_for(self, process: subprocess.Popen) -> int:
        """Return the exit code of a run that has just begun."""
        self.running.add(process)
        if self.dismissed:
            process.terminate()
        code = process.wait()
        self.running.discard(process)
        return code


@contextmanager
def _ending(crew: _Crew) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end the runs under way, which nobody would wait for."""

    def stop(signum: int, _frame: object) -> None:
        crew.dismissed = True
        for process in list(crew.running):
            process.terminate()
        raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)

    # Only the main thread may set one; elsewhere whoever has it decides.
    chosen = (signal.SIGINT, signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    previous = {s: signal.signal(s, stop) for s in chosen} if main else {}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _check_same(job: Job) -> None:
    about = read_object(job.folder / "run.json")
    before, now = about.get("overrides", []), redact_all(job.overrides)
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


def _can_go_on(job: Job) -> bool:
    """Whether what was cut off had the same settings, and has left a checkpoint."""
    about = job.folder / "run.json"
    if not about.exists() or not any((job.folder / "checkpoints").glob("checkpoint-*")):
        return False
    return read_object(about).get("overrides") == redact_all(job.overrides)


def _run(job: Job, script: Path, retry: bool, crew: _Crew) -> str | None:
    if crew.dismissed:
        return None
    job.folder.mkdir(parents=True, exist_ok=True)
    # The run inherits it: should it outlive this process, the folder stays its own.
    with file_lock(job.folder / "lock") as lock:
        if lock is None:
            return (
                f"{job.name} is still made by another process: {job.folder / 'log.txt'} (wait "
                f"for process {(job.folder / 'lock').read_text() or 'now beginning'}, or end it)"
            )
        return _run_claimed(job, script, retry, crew, lock)


def _run_claimed(job: Job, script: Path, retry: bool, crew: _Crew, lock: IO[str]) -> str | None:
    failed = f"{job.name} failed: {job.folder / 'log.txt'}"
    if job.state == "done":
        return None
    if job.state == "failed":
        if not retry:
            return f"{failed} (retry=true runs it again)"
        (job.folder / "failed").unlink()
        resumed = []
    else:
        resumed = [f"resume={job.folder}"] if _can_go_on(job) else []
    # Left by the run, if it ended before its last step.
    stopped = job.folder / "stopped.json"
    stopped.unlink(missing_ok=True)
    about = {name: getattr(job, name) for name in ("experiment", "method", "seed", "overrides")}
    rewrite(job.folder / "run.json", [json.dumps(redact_all(about), indent=2)])
    command = [
        *(sys.executable, str(script), "checkpoint_interval=null", *job.overrides, *resumed),
        *(f"output_dir={job.folder}", f"hydra.run.dir={job.folder}/hydra"),
        "logger.progress_bar=false",
        f"logger.group='{job.experiment}: {job.method}'",
    ]
    began = time.time()
    with (job.folder / "log.txt").open("a" if resumed else "w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            pass_fds=[lock.fileno()],
        )
        sign(lock, process.pid)
        code = crew.wait_for(process)
    if code in _CUT:
        return (
            f"{job.name} was cut off: {job.folder / 'log.txt'} (the same command takes it up again)"
        )
    # Of a run in parts nobody knows how long it took.
    seconds = None if resumed else round(time.time() - began, 1)
    facts = {"code": code, "seconds": seconds, "machine": describe_machine()}
    if stopped.exists():
        facts |= read_object(stopped)
        failed += f" ({facts['reason']}, step {facts['step']:,})"
    rewrite(job.folder / ("failed" if code else "done"), [json.dumps(facts)])
    return failed if code else None
