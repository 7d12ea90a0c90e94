"""Finished runs as data: from the folder of a study, from W&B, or from a CSV file."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lore_torchrl.advisors.redaction import shown
from lore_torchrl.dreamer.logging import read_metrics, read_object

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
    "bandit/coefficient",
    "bandit/probability",
    "learner/lore_imitated",
    "lore/kl",
    "lore/entropy_wm",
    "lore/beta_mean",
    "time/elapsed_s",
)


# The other columns of a CSV file.
_ABOUT = ("experiment", "method", "seed", "seconds", "step")


@dataclass(frozen=True)
class Record:
    """One run.

    Args:
        experiment: Name of the experiment.
        method: Name of the method.
        seed: Its seed.
        rows: Its metrics, each with ``step``, as in ``metrics.jsonl``.
        seconds: How long it took, ``None`` where that is not known.
        machine: What it ran on, in words, ``None`` where that is not known.
    """

    experiment: str
    method: str
    seed: int
    rows: list[dict[str, float]] = field(repr=False)
    seconds: float | None = None
    machine: str | None = None

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


@dataclass(frozen=True)
class _Run:
    """A run that is of no study: its configuration tells what it is."""

    where: str
    config: Mapping[str, Any]
    rows: list[dict[str, float]]

    @property
    def finished(self) -> bool:
        return bool(self.rows) and self.rows[-1]["step"] >= self.config["total_steps"]


# What the configuration of a run of this package has, whatever its version.
_OURS = {"seed", "total_steps", "env"}
# Settings that make no other method of a run.
_NO_METHOD = re.compile(
    r"(seed|total_steps|output_dir|resume|record|device|num_threads|checkpoint_\w+"
    r"|env\.(id|parallel)|(logger|health|evaluation)\..*)$"
)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return settings by their dotted names, as Hydra writes them."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if isinstance(value, str) else json.dumps(value)
    return flat


def _records_of(runs: Sequence[_Run], by: Sequence[str]) -> list[Record]:
    """Name runs by their environment and the settings in which they differ."""
    records: dict[tuple[str, str, int], tuple[Record, str]] = {}
    settings = [_flat(run.config) for run in runs]
    for run, own in zip(runs, settings, strict=True):
        advised, env = own.get("lore.enabled") != "false", own["env.id"]
        unknown = [name for name in by if name not in own]
        if unknown:
            raise ValueError(f"{run.where} has no setting {unknown[0]!r} to name its method by.")
        like = [
            other
            for other in settings
            if other["env.id"] == env and (other.get("lore.enabled") != "false") == advised
        ]
        differing = [
            name
            for name in sorted(own)
            if any(other.get(name) != own[name] for other in like) and not _NO_METHOD.match(name)
        ]
        # Without advice its settings make no difference.
        words = [
            f"{name}={own[name]}"
            for name in by or differing
            if advised or not name.startswith(("lore.", "advisor."))
        ]
        if not (advised and words):
            words.insert(0, "LoRe" if advised else "stock")
        method = ", ".join(words)
        key = env, method, int(run.config["seed"])
        if key in records:
            raise ValueError(
                f"{run.where} and {records[key][1]} are both {env}, {method}, seed {key[2]}: "
                "leave one of them out."
            )
        seconds = Record(*key, run.rows).last("time/elapsed_s")
        records[key] = Record(*key, run.rows, seconds), run.where
    return [record for record, _ in records.values()]


def _ordered(records: Iterable[Record]) -> list[Record]:
    return sorted(records, key=lambda record: (record.experiment, record.method, record.seed))


def read_folder(base: str | Path, *, by: Sequence[str] = ()) -> list[Record]:
    """Read the finished runs below a folder, in the order of experiment, method, seed.

    A run of a study knows what it is. Any other, of ``examples/train.py`` or a sweep, is named
    by its environment, and by the settings in which the runs there differ, or is ``LoRe`` or
    ``stock`` where they do not.

    Args:
        base: Folder of a study, of several, or of other runs.

    Keyword Args:
        by: Settings to name runs outside studies by, such as ``lore.gate.tau``.
            Default: those in which they differ.

    Raises:
        FileNotFoundError: If there is no finished run below it.
        ValueError: If two runs have one name and seed, one lacks a setting of ``by``, or a file is
            damaged, which the message names.
    """
    records, others = [], []
    for path in sorted(Path(base).glob("**/run.json")):
        done = path.parent / "done"
        if done.exists():
            about = read_object(path)
            facts = read_object(done) if done.stat().st_size else {}
            named = {"experiment", "method"} <= set(about) and type(about.get("seed")) is int
            if not (named and isinstance(facts.get("seconds") or 0, (int, float))):
                raise ValueError(
                    f"{path} and {done.name} do not say which run it was: leave its folder out."
                )
            records.append(
                Record(
                    str(about["experiment"]),
                    str(about["method"]),
                    about["seed"],
                    read_metrics(path.parent),
                    facts.get("seconds"),
                    facts.get("machine"),
                )
            )
    for path in sorted(Path(base).glob("**/config.json")):
        folder = path.parent
        if (folder / "metrics.jsonl").exists() and not (folder / "run.json").exists():
            config = read_object(path)
            if set(config) >= _OURS:
                run = _Run(str(folder), config, read_metrics(folder))
                others += [run] if run.finished else []
    records += _records_of(others, by)
    if not records:
        raise FileNotFoundError(
            f"No finished run below {base}: run examples/study.py or examples/train.py first, or "
            "name its output."
        )
    return _ordered(records)


def read_wandb(
    project: str,
    runs: Callable[[str], Iterable[Any]] | None = None,
    *,
    by: Sequence[str] = (),
) -> list[Record]:
    """Read the finished runs of a W&B project.

    The group of a study's run names experiment and method; others, such as a sweep's, are
    named as by :func:`read_folder`. A run that was stopped before its last step is finished
    for W&B, and left out here.

    Args:
        project: ``entity/project``.
        runs: Returns the runs of a project; ``None`` asks W&B. Default: ``None``.

    Keyword Args:
        by: As of :func:`read_folder`. Default: settings in which the runs differ.

    Raises:
        ImportError: If W&B is not installed.
        ValueError: If the project has no finished run, or two have one name and seed.
    """
    if runs is None:
        try:
            import wandb
        except ImportError as err:
            raise ImportError(
                "Reading W&B needs wandb: pip install 'lore-torchrl[wandb]'."
            ) from err
        runs = wandb.Api().runs
    records, others = [], []
    for run in runs(project):
        experiment, separator, method = str(run.group or "").partition(": ")
        if run.state == "finished" and set(run.config) >= _OURS:
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
            found = _Run(f"{project}, run {run.id}", run.config, ordered)
            if not found.finished:
                continue
            if not separator:
                others.append(found)
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
    records += _records_of(others, by)
    if not records:
        raise ValueError(
            f"{project} has no finished run of this package: run examples/study.py, or "
            "examples/train.py, with logger=wandb first."
        )
    return _ordered(records)


def write_csv(path: str | Path, records: Sequence[Record], *, also: Sequence[str] = ()) -> None:
    """Write the curves of some runs, one line a logged step.

    Args:
        path: The file.
        records: The runs.

    Keyword Args:
        also: Metrics to keep beside :data:`CURVES` and all of held-out episodes. Default: none.
    """
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        logged = {name for record in records for row in record.rows for name in row}
        held_out = {name for name in logged if name.startswith("eval/")}
        names = [*CURVES, *sorted({*held_out, *also} - {*CURVES})]
        writer.writerow([*_ABOUT, *names])
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

    Raises:
        ValueError: If it is no such file, or a line is damaged. The message names file and line.
    """
    runs: dict[tuple[str, str, int], tuple[list[dict[str, float]], float | None]] = {}
    with Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        try:
            for line in reader:
                key = line["experiment"], line["method"], int(line["seed"])
                seconds = float(line["seconds"]) if line["seconds"] else None
                rows, _ = runs.setdefault(key, ([], seconds))
                values = ((name, text) for name, text in line.items() if name not in _ABOUT)
                row = {name: float(text) for name, text in values if text}
                rows.append({"step": int(line["step"]), **row})
        # A column is missing, a line has too few or too many, or it is no text at all.
        except (KeyError, TypeError, ValueError, csv.Error) as error:
            raise ValueError(
                f"{path}, line {reader.line_num}, is no line of curves.csv as a report writes it "
                f"({type(error).__name__}: {shown(str(error), 60)}). Mend it, or name another file."
            ) from error
    return [Record(*key, rows, seconds) for key, (rows, seconds) in runs.items()]
