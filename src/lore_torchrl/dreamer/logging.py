"""One row of numbers to JSONL and to any of TorchRL's loggers, under the same names."""

from __future__ import annotations

import json
import netrc
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torchrl._utils import logger as torchrl_logger
from torchrl.record.loggers import Logger, get_logger

from lore_torchrl.advisors.redaction import shown
from lore_torchrl.configs import LoggerConfig

_WANDB_ID = "wandb_id.txt"


def _wandb_mode(directory: Path) -> str:
    """Return what ``WANDB_MODE`` says, else ``online`` where W&B's host has an account here."""
    asked = os.environ.get("WANDB_MODE")
    if asked:
        # W&B's former names.
        return {"dryrun": "offline", "run": "online"}.get(asked, asked)
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    if os.environ.get("WANDB_API_KEY") or _in_netrc(host):
        return "online"
    torchrl_logger.info(
        "No W&B account found for %s: logging offline. `wandb sync %s` uploads it later; "
        "logger.mode=online asks W&B nevertheless.",
        host,
        directory / "wandb",
    )
    return "offline"


def _in_netrc(host: str) -> bool:
    """Return whether there is a password for a host where ``wandb login`` writes it."""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        found = netrc.netrc(path).authenticators(host)
        return bool(found and found[2])
    except FileNotFoundError:
        return False
    except (netrc.NetrcParseError, OSError) as error:
        # Not the message: it may quote a password.
        problem = type(error).__name__
        torchrl_logger.warning("%s gives W&B no account, it cannot be read: %s", path, problem)
        return False


def _build_backend(
    name: str, config: LoggerConfig, directory: Path, run: dict, wandb_id: str | None
) -> Logger:
    kwargs: dict[str, Any] = {}
    if name == "wandb":
        kwargs["wandb_kwargs"] = {
            "project": config.project,
            "group": config.group,
            "mode": config.mode or _wandb_mode(directory),
            "config": run,
            "dir": str(directory),
            # None is a new run.
            "id": wandb_id,
            "resume": "allow",
        }
    try:
        return get_logger(
            name, logger_name=str(directory / name), experiment_name=directory.name, **kwargs
        )
    except ImportError as err:
        raise ImportError(
            f"logger.backends names {name!r}: pip install 'lore-torchrl[{name}]'."
        ) from err


class RunLogger:
    """Write rows of scalars to ``metrics.jsonl`` and to the chosen backends.

    Args:
        config: Which backends.
        directory: Run folder; created if it does not exist.

    Keyword Args:
        run_config: Plain form of the run's configuration, for backends that store it.
        resume_step: Go on after this step, with neither gaps nor doubles: later rows of
            ``metrics.jsonl`` are dropped, the CSV files are written again from it, TensorBoard
            is told to drop them, and W&B goes on with the folder's run, whose later points
            stay. Default: ``None``, which starts over.
        resume_from: Folder of the run that is resumed. If it is another one and has rows,
            everything starts over here, and its rows up to ``resume_step`` are logged first.
            Default: ``None``, which is ``directory``.
    """

    def __init__(
        self,
        config: LoggerConfig,
        directory: str | Path,
        *,
        run_config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
        resume_from: Path | None = None,
    ):
        self.directory = Path(directory).resolve()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.path = self.directory / "metrics.jsonl"
        rows: list[dict[str, float]] = []
        source = earlier_file(self.path, resume_from)
        if resume_step is not None and source.exists():
            rows = [row for row in read_metrics(source) if row["step"] <= resume_step]
        goes_on = resume_step is not None and source == self.path
        rewrite(self.path, [json.dumps(row) for row in rows])
        if "csv" in config.backends:
            shutil.rmtree(self.directory / "csv", ignore_errors=True)
        id_file = self.directory / _WANDB_ID
        wandb_id = id_file.read_text() if goes_on and id_file.exists() else None
        run = dict(run_config or {})
        self.backends = [
            _build_backend(name, config, self.directory, run, wandb_id) for name in config.backends
        ]
        for backend in self.backends:
            if _is_wandb(backend):
                id_file.write_text(backend.experiment.id)
            if type(backend).__name__ == "TensorboardLogger":
                _purge_tensorboard(backend, resume_step + 1 if goes_on else 0)
        # W&B and TensorBoard have them where the run goes on.
        behind = [b for b in self.backends if not goes_on or type(b).__name__ == "CSVLogger"]
        for row in rows:
            step = row.pop("step")
            for backend in behind:
                backend.log_metrics(row, step=step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row: scalars by name, after so many environment steps."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for backend in self.backends:
            backend.log_metrics(dict(values), step=step)

    def publish(
        self,
        summary: Mapping[str, float],
        *,
        figures: Sequence[Path] = (),
        advice: Sequence[Mapping[str, Any]] = (),
        checkpoint: Path | None = None,
    ) -> None:
        """Give W&B what there is at the end: the last value of each metric, and PNG files.

        ``advice`` is for a table; the last ``checkpoint``, a folder, becomes an artifact of type
        ``model``.
        """
        for backend in filter(_is_wandb, self.backends):
            import wandb

            run = backend.experiment
            run.summary.update(dict(summary))
            for path in figures:
                run.log({f"figures/{path.stem}": wandb.Image(str(path))})
            if advice:
                columns = list(advice[0])
                # A column holds one type: distributions go as text.
                rows = [
                    [json.dumps(x) if isinstance(x, Mapping) else x for x in map(line.get, columns)]
                    for line in advice
                ]
                run.log({"advice": wandb.Table(columns=columns, data=rows)})
            if checkpoint is not None:
                artifact = wandb.Artifact(f"checkpoint-{run.id}", type="model")
                artifact.add_dir(str(checkpoint))
                run.log_artifact(artifact)

    def close(self, *, failed: bool = False) -> None:
        """Flush and close every backend; W&B says of a run whether it has ``failed``."""
        for backend in self.backends:
            if failed and _is_wandb(backend):
                backend.experiment.finish(exit_code=1)
            else:
                backend.close()


def earlier_file(path: Path, resume_from: Path | None) -> Path:
    """Return the file to take earlier lines from: the resumed run's, or else the run's own."""
    other = None if resume_from is None else Path(resume_from).resolve() / path.name
    return path if other is None or not other.exists() else other


def rewrite(path: Path, lines: Sequence[str]) -> None:
    """Replace a file's lines in one move: a kill leaves the old file or the new one."""
    staged = path.with_suffix(".tmp")
    staged.write_text("".join(f"{line}\n" for line in lines))
    staged.replace(path)


def _is_wandb(backend: Logger) -> bool:
    # By its name: the class cannot be imported without W&B.
    return type(backend).__name__ == "WandbLogger"


def _purge_tensorboard(backend: Logger, step: int) -> None:
    """Mark a restart, at which TensorBoard drops earlier files' events from a step on."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    start = Event(step=step, session_log=SessionLog(status=SessionLog.START))
    backend.experiment.file_writer.add_event(start)


def curve(rows: Iterable[Mapping[str, float]], metric: str) -> list[tuple[float, float]]:
    """Return step and value of each row that has a metric.

    ``calls_per_1000`` is the growth of ``advice/calls`` for each 1,000 steps.
    """
    if metric != "calls_per_1000":
        return [(row["step"], row[metric]) for row in rows if metric in row]
    calls = [(0, 0.0), *curve(rows, "advice/calls")]
    return [
        (step, 1000 * (now - before) / (step - start))
        for (start, before), (step, now) in pairwise(calls)
        if step > start
    ]


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Read the rows of a run's ``metrics.jsonl``, or of the run folder that holds it.

    Raises:
        ValueError: If a line is damaged: see :func:`read_rows`.
    """
    path = Path(path)
    if path.is_dir():
        path /= "metrics.jsonl"
    rows = read_rows(path)
    for number, row in rows.items():
        # An integer of thousands of digits is none to NumPy.
        if not all(
            isinstance(x, float) or (isinstance(x, int) and abs(x) < 1 << 63) for x in row.values()
        ):
            raise _damaged(path, number, "values other than numbers", json.dumps(row))
    return list(rows.values())


def read_rows(path: Path) -> dict[int, dict[str, Any]]:
    """Read the JSON objects of a file by the number of their line, which each hold their ``step``.

    Without a line end the last line is left out: a kill may leave half of it.

    Raises:
        ValueError: If another line is damaged. The message names file and line.
    """
    rows = {}
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        if not line:
            continue
        try:
            row = json.loads(line.decode())
        # RecursionError: brackets nested by the thousand.
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise _damaged(
                path, number, "no JSON object with a step", line.decode(errors="replace")
            )
        rows[number] = row
    return rows


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object that a file holds.

    Raises:
        ValueError: If it holds none. The message names the file.
    """
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(
            f"{path} is damaged: it holds no JSON object. Restore it, or leave its folder out."
        )
    return value


def _damaged(path: Path, number: int, found: str, line: str) -> ValueError:
    return ValueError(
        f"{path} is damaged: line {number} holds {found}: '{shown(line, 60)}'. Remove that line, "
        "or restore the file."
    )
