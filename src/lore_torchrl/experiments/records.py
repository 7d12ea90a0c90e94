"""Finished runs as data: read from folders, from W&B or from CSV files, and written as CSV."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lore_torchrl.advisors.redaction import shown
from lore_torchrl.dreamer.logging import curve, read_metrics, read_object

#: What a CSV file keeps of a run, where it was logged, beside all that held-out episodes said.
CURVES = (
    "eval/success",
    "eval/return",
    "train/success",
    "advice/calls",
    "advice/cost",
    "advice/cache_hits",
    "advice/cache_shared_hits",
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
# What the configuration of a run of this package has, whatever its version.
_OURS = {"seed", "total_steps", "env"}
# Settings in which runs of one method may differ.
_NO_METHOD = re.compile(
    r"(seed|total_steps|output_dir|resume|record|device|num_threads|checkpoint_\w+"
    r"|env\.(id|parallel)|lore\.calls\.(store|ledger)|(logger|health|evaluation)\..*)$"
)


@dataclass(frozen=True)
class Record:
    """One finished run of a method on an experiment with a seed.

    Its ``rows`` are its metrics, each with ``step``, as in ``metrics.jsonl``. Where they are known,
    ``seconds`` is how long it took and ``machine`` what it ran on; ``source`` is where it was read
    from, for messages.
    """

    experiment: str
    method: str
    seed: int
    rows: list[dict[str, float]] = field(repr=False)
    seconds: float | None = None
    machine: str | None = None
    source: str = ""

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and finite values of a metric, both ``[T]``, empty if there are none."""
        found = np.array(curve(self.rows, metric), dtype=float).reshape(-1, 2)
        found = found[np.isfinite(found[:, 1])]
        return found[:, 0], found[:, 1]

    def last(self, metric: str) -> float | None:
        """Return the latest value of a metric, ``None`` if it was not logged."""
        values = self.curve(metric)[1]
        return float(values[-1]) if len(values) else None


def merge(records: Iterable[Record]) -> list[Record]:
    """Return each run once, in the order of its first appearance.

    Of a run that comes from several sources the most complete copy is kept.

    Raises:
        ValueError: If a run has different curves in two sources. They are compared as a CSV file
            keeps them, to six digits, except for times.
    """
    merged: dict[tuple[str, str, int], Record] = {}
    for record in records:
        key = run_key(record)
        known = merged.setdefault(key, record)
        if known is not record:
            one, other = _curves(known), _curves(record)
            shared = one.keys() & other.keys()
            if not shared or any(one[name] != other[name] for name in shared):
                # Runs outside of a study are named by all settings in which they differ.
                method = key[1] if len(key[1]) <= 60 else "with the same settings"
                raise ValueError(
                    f"{known.source} and {record.source} have different curves of {key[0]}, "
                    f"{method}, seed {key[2]}: leave one of them out, such as a run that the other "
                    "resumes, or name the settings in which they differ (`--by` of "
                    "examples/report.py)."
                )
            merged[key] = max(known, record, key=lambda copy: sum(map(len, copy.rows)))
    return list(merged.values())


def run_key(record: Any) -> tuple[str, str, int]:
    """Return what tells a run, or a job, from others."""
    return record.experiment, record.method, record.seed


def _curves(record: Record) -> dict[str, list[tuple[float, str]]]:
    curves: dict[str, list[tuple[float, str]]] = {}
    for row in record.rows:
        for name in row:
            if name.startswith("eval/") or (name in CURVES and not name.startswith("time/")):
                curves.setdefault(name, []).append((row["step"], f"{row[name]:.6g}"))
    return curves


def read_runs(*sources: str | Path, by: Sequence[str] = ()) -> list[Record]:
    """Read the finished runs of folders and CSV files together, each run once.

    Those of folders are in the order of experiment, method, seed. A run of a study knows what it
    is. Any other, of ``examples/train.py`` or a sweep, is named by its environment and the
    settings in which the runs there differ, or by those of ``by``, such as ``lore.gate.tau``; or
    ``LoRe``, ``LoRe without advice`` or ``stock`` where they do not differ.

    Raises:
        FileNotFoundError: If there is no finished run below a folder.
        ValueError: If a run has different curves in two places, one lacks a setting of ``by``,
            or a file is damaged, which the message names.
    """
    files = [source for source in sources if Path(source).suffix == ".csv"]
    records, unnamed = [], []
    for folder in (source for source in sources if source not in files):
        found = len(records) + len(unnamed)
        for path in sorted(Path(folder).glob("**/run.json")):
            if (path.parent / "done").exists():
                records.append(_read_job(path.parent))
        for path in sorted(Path(folder).glob("**/config.json")):
            run = path.parent
            if (run / "metrics.jsonl").exists() and not (run / "run.json").exists():
                config = read_object(path)
                if not set(config) >= _OURS:
                    continue
                rows = read_metrics(run)
                if _is_finished(str(path), config, rows):
                    unnamed.append((_unnamed(config, rows, str(run)), config))
        if len(records) + len(unnamed) == found:
            raise FileNotFoundError(
                f"No finished run below {folder}: run examples/study.py or examples/train.py "
                "first, or name its output."
            )
    in_files = [record for path in files for record in read_csv(path)]
    return merge([*in_files, *sorted([*records, *_name(unnamed, by)], key=run_key)])


def _read_job(folder: Path) -> Record:
    """Read a run of a study."""
    about, done = read_object(folder / "run.json"), folder / "done"
    facts = read_object(done) if done.stat().st_size else {}
    named = {"experiment", "method"} <= set(about) and type(about.get("seed")) is int
    seconds = facts.get("seconds")
    if not (folder / "metrics.jsonl").exists():
        raise ValueError(f"{folder} has no metrics.jsonl: restore it, or leave its folder out.")
    if not (named and isinstance(seconds or 0, (int, float))):
        raise ValueError(
            f"{folder / 'run.json'} and {done.name} do not say which run it was: leave its "
            "folder out."
        )
    experiment, method, rows = str(about["experiment"]), str(about["method"]), read_metrics(folder)
    machine = facts.get("machine")
    return Record(experiment, method, about["seed"], rows, seconds, machine, str(folder))


def _is_finished(
    source: str, config: Mapping[str, Any], rows: Sequence[Mapping[str, float]]
) -> bool:
    env = config["env"]
    if not (
        type(config["seed"]) is type(config["total_steps"]) is int
        and isinstance(env, Mapping)
        and isinstance(env.get("id"), str)
    ):
        raise ValueError(
            f"{source} is damaged: seed, total_steps or env.id is no number or name. Restore it, "
            "or leave its run out."
        )
    return bool(rows) and rows[-1]["step"] >= config["total_steps"]


def _unnamed(config: Mapping[str, Any], rows: list[dict[str, float]], source: str) -> Record:
    """Return a run whose method is not known yet."""
    record = Record(config["env"]["id"], "", int(config["seed"]), rows, source=source)
    return replace(record, seconds=record.last("time/elapsed_s"))


def _name(runs: Sequence[tuple[Record, Mapping[str, Any]]], by: Sequence[str]) -> list[Record]:
    """Name runs, each with its configuration, by the settings in which they differ."""

    def group(record: Record, settings: Mapping[str, str]) -> tuple[str, bool]:
        return record.experiment, settings.get("lore.enabled") != "false"

    flat = [(record, _flat(config)) for record, config in runs]
    records = []
    for record, own in flat:
        unknown = [name for name in by if name not in own]
        if unknown:
            raise ValueError(
                f"{record.source} has no setting {unknown[0]!r} to name its method by."
            )
        like = [other for r, other in flat if group(r, other) == group(record, own)]
        differing = [
            name
            for name in sorted(own)
            # A setting that is not there is of another version.
            if any(other.get(name, own[name]) != own[name] for other in like)
            and not _NO_METHOD.match(name)
        ]
        _, advised = group(record, own)
        names = by or differing
        if not advised:
            # Without advice its settings make no difference, but for how replay is sampled.
            names = [n for n in names if not re.match(r"advisor\.|lore\.(?!sampling\.)", n)]
        words = [f"{name}={own[name]}" for name in names]
        if not (advised and words):
            # Self-imitation alone is neither.
            silent = own.get("lore.gate.beta_max") in ("0", "0.0")
            lore = "LoRe without advice" if silent else "LoRe"
            words.insert(0, lore if advised else "stock")
        records.append(replace(record, method=", ".join(words)))
    return records


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return settings by their dotted names, as Hydra writes them."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if isinstance(value, str) else json.dumps(value)
    return flat


def read_wandb(
    project: str,
    runs: Callable[[str], Iterable[Any]] | None = None,
    *,
    by: Sequence[str] = (),
) -> list[Record]:
    """Read the finished runs of a W&B project, ``entity/project``.

    The group of a study's run names experiment and method; others, such as a sweep's, are
    named as by :func:`read_runs`. A run that was stopped before its last step is finished
    for W&B, and left out here. ``runs`` returns the runs of a project; by default W&B is asked.

    Raises:
        ImportError: If W&B is not installed.
        ValueError: If nobody is logged in, the project has no finished run, or two have one
            name and seed but different curves.
    """
    if runs is None:
        try:
            import wandb
        except ImportError as err:
            raise ImportError(
                "Reading W&B needs wandb: pip install 'lore-torchrl[wandb]'."
            ) from err
        try:
            runs = wandb.Api().runs
        except wandb.Error as err:
            raise ValueError(f"W&B cannot be asked, log in by `wandb login` first: {err}") from err
    records, unnamed = [], []
    for run in runs(project):
        if run.state != "finished" or not set(run.config) >= _OURS:
            continue
        rows = _wandb_rows(run.scan_history())
        source = f"{project}, run {run.id}"
        if not _is_finished(source, run.config, rows):
            continue
        record = _unnamed(run.config, rows, source)
        experiment, separator, method = str(run.group or "").partition(": ")
        if separator:
            seconds = run.summary.get("_runtime")
            named = replace(record, experiment=experiment, method=method, seconds=seconds)
            records.append(named)
        else:
            unnamed.append((record, run.config))
    records += _name(unnamed, by)
    if not records:
        raise ValueError(
            f"{project} has no finished run of this package: run examples/study.py, or "
            "examples/train.py, with logger=wandb first."
        )
    return sorted(merge(records), key=run_key)


def _wandb_rows(history: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    rows: dict[int, dict[str, float]] = {}
    for found in history:
        values = {
            name: value
            for name, value in found.items()
            if isinstance(value, int | float) and not name.startswith("_")
        }
        # W&B's own `_step` counts its rows. TorchRL writes the environment's beside the values,
        # once for each group of names; figures and tables have none.
        steps = {name: values.pop(name) for name in [*values] if name.split("/")[-1] == "step"}
        if steps:
            step = int(max(steps.values()))
            rows.setdefault(step, {"step": step}).update(values)
    return [rows[step] for step in sorted(rows)]


def write_csv(path: str | Path, records: Sequence[Record], *, also: Sequence[str] = ()) -> None:
    """Write the curves of some runs, one line a logged step.

    Kept are :data:`CURVES`, all of held-out episodes, and ``also``.
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
    return [Record(*k, rows, seconds, source=str(path)) for k, (rows, seconds) in runs.items()]
