"""Finished runs as data: from the folder of a study, from W&B, or from a CSV file."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lore_torchrl.dreamer.logging import read_metrics

#: What a CSV file keeps of a run, where it was logged, beside all that held-out episodes said.
CURVES = (
    "eval/success",
    "eval/return",
    "train/success",
    "advice/calls",
    "advice/cost",
    "advice/cache_hits",
    "advice/cache_near_hits",
    "advice/cache_misses",
    "prior_net/served",
    "bandit/share",
    "lore/kl",
    "lore/entropy_wm",
    "lore/beta_mean",
    "time/elapsed_s",
)


@dataclass(frozen=True)
class Record:
    """One run.

    Args:
        experiment: Name of the experiment.
        method: Name of the method.
        seed: Its seed.
        rows: Its metrics, each with ``step``, as in ``metrics.jsonl``.
        seconds: How long it took, ``None`` where that is not known.
    """

    experiment: str
    method: str
    seed: int
    rows: list[dict[str, float]] = field(repr=False)
    seconds: float | None = None

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and finite values of a metric, both ``[T]``, empty if there are none."""
        points = [
            (row["step"], row[metric])
            for row in self.rows
            if math.isfinite(row.get(metric, math.nan))
        ]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return np.array(steps, dtype=float), np.array(values, dtype=float)

    def last(self, metric: str) -> float | None:
        """Return the latest value of a metric, ``None`` if it was not logged."""
        values = self.curve(metric)[1]
        return float(values[-1]) if len(values) else None


def read_folder(base: str | Path) -> list[Record]:
    """Read the finished runs below a folder, in the order of experiment, method, seed.

    Args:
        base: Folder of a study, or of several.

    Raises:
        FileNotFoundError: If there is no finished run below it.
    """
    records = []
    for path in sorted(Path(base).glob("**/run.json")):
        done = path.parent / "done"
        if done.exists():
            about = json.loads(path.read_text())
            seconds = json.loads(done.read_text() or "{}").get("seconds")
            records.append(
                Record(
                    about["experiment"],
                    about["method"],
                    int(about["seed"]),
                    read_metrics(path.parent),
                    seconds,
                )
            )
    if not records:
        raise FileNotFoundError(
            f"No finished run below {base}: run examples/study.py first, or name its output."
        )
    return sorted(records, key=lambda record: (record.experiment, record.method, record.seed))


def read_wandb(project: str, runs: Callable[[str], Iterable[Any]] | None = None) -> list[Record]:
    """Read the finished runs of a W&B project, whose group names experiment and method.

    A run that was stopped before its last step is finished for W&B, and left out here.

    Args:
        project: ``entity/project``.
        runs: Returns the runs of a project; ``None`` asks W&B. Default: ``None``.

    Raises:
        ImportError: If W&B is not installed.
        ValueError: If the project has no finished run of a study.
    """
    if runs is None:
        try:
            import wandb
        except ImportError as err:
            raise ImportError(
                "Reading W&B needs wandb: pip install 'lore-torchrl[wandb]'."
            ) from err
        runs = wandb.Api().runs
    records = []
    for run in runs(project):
        experiment, separator, method = str(run.group or "").partition(": ")
        if run.state == "finished" and separator:
            rows: dict[int, dict[str, float]] = {}
            for found in run.scan_history():
                values = {
                    name: value
                    for name, value in found.items()
                    if isinstance(value, int | float) and not name.startswith("_")
                }
                # W&B's own `_step` counts its rows. TorchRL writes the environment's beside
                # the values, once for each group of names; figures and tables have none.
                names = {name for name in values if name.split("/")[-1] == "step"}
                if names:
                    step = int(max(values[name] for name in names))
                    rows.setdefault(step, {"step": step}).update(
                        {name: value for name, value in values.items() if name not in names}
                    )
            ordered = [rows[step] for step in sorted(rows)]
            if not ordered or ordered[-1]["step"] < run.config["total_steps"]:
                continue
            records.append(
                Record(
                    experiment,
                    method,
                    int(run.config["seed"]),
                    ordered,
                    run.summary.get("_runtime"),
                )
            )
    if not records:
        raise ValueError(
            f"{project} has no finished run whose group reads 'experiment: method', as "
            "examples/study.py names it."
        )
    return sorted(records, key=lambda record: (record.experiment, record.method, record.seed))


def write_csv(path: str | Path, records: Sequence[Record]) -> None:
    """Write the curves of some runs, one line a logged step.

    Args:
        path: The file.
        records: The runs.
    """
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        logged = {name for record in records for row in record.rows for name in row}
        held_out = {name for name in logged if name.startswith("eval/")}
        names = [*CURVES, *sorted(held_out - {*CURVES})]
        writer.writerow(["experiment", "method", "seed", "seconds", "step", *names])
        for record in records:
            for row in record.rows:
                values = ["" if name not in row else f"{row[name]:.6g}" for name in names]
                if any(values):
                    about = [record.experiment, record.method, record.seed, record.seconds]
                    writer.writerow([*about, int(row["step"]), *values])


def read_csv(path: str | Path) -> list[Record]:
    """Read what :func:`write_csv` wrote.

    Args:
        path: The file.
    """
    runs: dict[tuple[str, str, int], tuple[list[dict[str, float]], str]] = {}
    with Path(path).open(newline="") as file:
        for line in csv.DictReader(file):
            key = line["experiment"], line["method"], int(line["seed"])
            rows, _ = runs.setdefault(key, ([], line["seconds"]))
            row = {
                name: float(text)
                for name, text in line.items()
                if text and (name in CURVES or name.startswith("eval/"))
            }
            rows.append({"step": int(line["step"]), **row})
    return [
        Record(*key, rows, float(seconds) if seconds else None)
        for key, (rows, seconds) in runs.items()
    ]
