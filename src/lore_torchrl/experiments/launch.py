"""Training runs in processes of their own: single ones, and the grid of a study."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from torchrl._utils import logger as torchrl_logger

from lore_torchrl.advisors.redaction import redact_all
from lore_torchrl.configs import StudyConfig
from lore_torchrl.dreamer.checkpoint import set_aside
from lore_torchrl.dreamer.logging import read_object, rewrite
from lore_torchrl.dreamer.run_lock import SIGNALS, file_lock, handled_signals, sign
from lore_torchrl.experiments.records import read_csv, read_runs, run_key
from lore_torchrl.experiments.report import command_line, write_report
from lore_torchrl.experiments.study import Study

# One thread a run. And large tensors stay in the process: by default glibc hands each back to the
# kernel, which costs an update on a CPU a seventh of its time in page faults.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}
#: Exit codes of a run that a signal ended: at once, or after its round.
_INTERRUPTED = {code for s in SIGNALS for code in (-s, 128 + s)}


def run_study(config: StudyConfig, *, script: Path) -> tuple[list[str], Path | None]:
    """Run every open cell of a study's grid by a training script, and report on what is finished.

    Finished runs are kept. With ``config.cell`` only that run is made, and there is no
    report, so that many processes can work on one study.

    Returns:
        One line for each run that is not finished, as of :func:`run_jobs`; and the report's page,
        ``None`` where nothing is finished, or nothing has logged ``config.metric``.

    Raises:
        OSError: If ``config.references`` cannot be read.
        ValueError: If the folder keeps a run of this grid that had other overrides.
    """
    c, output = config, Path(config.output).resolve()
    references = read_csv(c.references) if c.references and c.cell is None else []
    experiments = {name: c.experiment_overrides.get(name, ()) for name in c.experiments}
    jobs = make_jobs(output, experiments, c.methods, seeds=c.seeds, overrides=c.overrides)
    if c.cell is not None:
        job = jobs[c.cell]
        torchrl_logger.info(f"Cell {c.cell} of {len(jobs)}: {job.name}, in {job.folder}")
        return run_jobs([job], script=script, processes=1, retry=c.retry), None
    errors = run_jobs(jobs, script=script, processes=c.jobs, retry=c.retry)
    if not any(job.state == "done" for job in jobs):
        return errors, None
    # Of this grid alone: the folder may hold runs of a larger one.
    found = {run_key(record): record for record in read_runs(output)}
    records = [found[run_key(job)] for job in jobs if run_key(job) in found]
    baseline = c.baseline if c.baseline in {r.method for r in records} else None
    try:
        study = Study(records, baseline, metric=c.metric, references=references)
    except ValueError as error:
        # The failed runs are reported as well.
        return [*errors, str(error)], None
    # Where it was written is of no use to others.
    command = [word for word in command_line() if not word.startswith("output=")]
    page = write_report(output / "report", study, title=f"Study: {c.name}", command=command)
    return errors, page


@dataclass(frozen=True)
class Job:
    """One training run to be made: a method on an experiment with a seed.

    Its folder holds ``run.json``, which says what it is, the run's own files and log, and at
    the end ``done`` or ``failed``. The ``overrides`` are Hydra's, for the training script.
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
    def log(self) -> Path:
        """What the run has printed."""
        return self.folder / "log.txt"

    @property
    def state(self) -> str:
        """``done``, ``failed``, or ``open``: not begun, or interrupted."""
        names = ("done", "failed")
        return next((name for name in names if (self.folder / name).exists()), "open")


def make_jobs(
    base: Path,
    experiments: Mapping[str, Sequence[str]],
    methods: Mapping[str, Sequence[str]],
    *,
    seeds: int,
    overrides: Sequence[str] = (),
) -> list[Job]:
    """Return one job for each seed, from 0 on, experiment and method, in this order.

    ``experiments``, files of ``configs/experiment``, and ``methods`` have overrides by their
    names. Those of the experiment go first, then ``overrides``, those of every run, then the
    method's.

    Raises:
        ValueError: If two methods would share a folder.
    """
    jobs: dict[Path, Job] = {}
    for seed in range(seeds):
        for experiment, first in experiments.items():
            for method, own in methods.items():
                names = [re.sub(r"[^\w.+-]+", "-", n).strip("-") for n in (experiment, method)]
                folder = base.joinpath(*names, f"seed{seed}")
                if folder in jobs:
                    raise ValueError(
                        f"Methods {jobs[folder].method!r} and {method!r} have the same folder, "
                        f"{folder}: give one another name."
                    )
                words = (f"experiment={experiment}", *first, *overrides, *own, f"seed={seed}")
                jobs[folder] = Job(folder, experiment, method, seed, words)
    return list(jobs.values())


def run_jobs(
    jobs: Sequence[Job], *, script: Path, processes: int, retry: bool = False
) -> list[str]:
    """Run what is open, so many ``processes`` side by side, each run with one CPU thread.

    A run that Ctrl-C or SIGTERM has interrupted is named; the next call resumes it from its last
    checkpoint, if its overrides set ``checkpoint_interval``, or else starts it again. Ctrl-C and
    SIGTERM of this process end its runs too. A run that has failed before is named and left,
    unless ``retry``; so is one that another process is still making, here or elsewhere.

    Returns:
        One line for each run that failed, now or before, was interrupted, or is made elsewhere,
        with the place of its log.

    Raises:
        ValueError: If what is kept in a folder was run with other overrides than asked for.
    """
    for job in jobs:
        cut = job.state == "open" and _has_checkpoint(job)
        if cut or job.state == "done" or (job.state == "failed" and not retry):
            _check_same_overrides(job)
    workers = _Workers()
    with handled_signals(workers.end), ThreadPoolExecutor(processes) as pool:
        errors = pool.map(lambda job: _run(job, script, retry, workers), jobs)
        return [error for error in errors if error]


@dataclass
class _Workers:
    """The processes of the runs under way, and whether to start no more."""

    running: set[subprocess.Popen] = field(default_factory=set)
    stopped: bool = False

    def wait_for(self, process: subprocess.Popen) -> int:
        """Return the exit code of a process that has just been started."""
        self.running.add(process)
        if self.stopped:
            process.terminate()
        code = process.wait()
        self.running.discard(process)
        return code

    def end(self, signum: int, _frame: object) -> None:
        """End what runs, which would outlive this process, and this process."""
        self.stopped = True
        for process in list(self.running):
            process.terminate()
        raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)


def _check_same_overrides(job: Job) -> None:
    before, now = _kept_overrides(job), redact_all(job.overrides)
    if before != now:
        gone = [word for word in before if word not in now]
        new = [word for word in now if word not in before]
        if not gone and not new:
            # The same words in another order: of two for one setting the last one counts.
            gone, new = before, now
        retry = ", or give retry=true" if job.state == "failed" else ""
        state = "an interrupted" if job.state == "open" else f"a {job.state}"
        raise ValueError(
            f"{job.folder} holds {state} run with other settings: "
            f"{' '.join(gone) or 'nothing'} there, {' '.join(new) or 'nothing'} asked for. "
            f"Name another output=, or remove that folder{retry}."
        )


def _kept_overrides(job: Job) -> list[str]:
    return read_object(job.folder / "run.json").get("overrides", [])


def _has_checkpoint(job: Job) -> bool:
    """Whether what was interrupted has left a checkpoint."""
    saved = any((job.folder / "checkpoints").glob("checkpoint-*"))
    return saved and (job.folder / "run.json").exists()


def _run(job: Job, script: Path, retry: bool, workers: _Workers) -> str | None:
    """Make a run if it is open and free; return what there is to say of it."""
    if workers.stopped:
        return None
    job.folder.mkdir(parents=True, exist_ok=True)
    # The run inherits the lock: should it outlive this process, the folder stays its own.
    with file_lock(job.folder / "lock") as lock:
        if lock is None:
            owner = (job.folder / "lock").read_text() or "now beginning"
            return (
                f"{job.name} is still made by another process: {job.log} (wait for process "
                f"{owner}, or end it)"
            )
        if job.state == "done":
            return None
        if job.state == "failed" and not retry:
            return f"{job.name} failed: {job.log} (retry=true runs it again)"
        return _run_locked(job, script, workers, lock)


def _quoted(text: str) -> str:
    """Return text as Hydra's override grammar reads it back, whatever is in it."""
    # A backslash escapes before a quote alone, and is doubled only there.
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + m[2].replace("'", "\\'"), text) + "'"


def _run_locked(job: Job, script: Path, workers: _Workers, lock: IO[str]) -> str | None:
    resumed = []
    if job.state == "open" and _has_checkpoint(job):
        resumed = [f"resume={_quoted(str(job.folder))}"]
    if job.state == "failed":
        # Cut off early, the new attempt would be taken up from where the failed one stood.
        set_aside(job.folder / "checkpoints", after=-1)
    # Left by the run, if it ended before its last step.
    stopped = job.folder / "stopped.json"
    for path in (job.folder / "failed", stopped):
        path.unlink(missing_ok=True)
    about = {name: getattr(job, name) for name in ("experiment", "method", "seed", "overrides")}
    rewrite(job.folder / "run.json", [json.dumps(redact_all(about), indent=2)])
    command = [
        *(sys.executable, str(script), "checkpoint_interval=null", *job.overrides, *resumed),
        f"output_dir={_quoted(str(job.folder))}",
        f"hydra.run.dir={_quoted(f'{job.folder}/hydra')}",
        *(
            "logger.progress_bar=false",
            f"logger.group={_quoted(f'{job.experiment}: {job.method}')}",
        ),
    ]
    torchrl_logger.info(f"{job.name}: {'resumed' if resumed else 'started'}, see {job.log}")
    start = time.time()
    with job.log.open("a" if resumed else "w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            pass_fds=[lock.fileno()],
            # Ctrl-C in a terminal reaches this process alone, which ends its runs: a run that got
            # both signals would take the second as a wish to end at once.
            process_group=0,
            stdin=subprocess.DEVNULL,
        )
        sign(lock, process.pid)
        code = workers.wait_for(process)
    if code in _INTERRUPTED:
        return f"{job.name} was cut off: {job.log} (the same command takes it up again)"
    # How long the parts before it took is not known.
    seconds = None if resumed else round(time.time() - start, 1)
    facts = {"code": code, "seconds": seconds, "machine": _describe_machine()}
    why = ""
    if stopped.exists():
        facts |= read_object(stopped)
        why = f" ({facts['reason']}, step {facts['step']:,})"
    rewrite(job.folder / ("failed" if code else "done"), [json.dumps(facts)])
    torchrl_logger.info(f"{job.name}: {'failed' if code else 'done'}")
    return f"{job.name} failed: {job.log}{why or _last_error(job.log)}" if code else None


def _last_error(log: Path) -> str:
    """Return the line of a log that says why a process ended, or nothing."""
    lines = log.read_text(errors="replace")[-10_000:].splitlines()
    # Details are indented; Hydra's hint comes after the error.
    said = [line for line in lines if line[:1].strip() and "HYDRA_FULL_ERROR" not in line]
    return f" ({said[-1][:300]})" if said else ""


def _describe_machine() -> str:
    """Return cores, processor, system and Python of this machine."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    model = found[1] if found else platform.machine()
    python = platform.python_version()
    return f"{os.cpu_count()} cores of {model}, {platform.system()}, Python {python}"
