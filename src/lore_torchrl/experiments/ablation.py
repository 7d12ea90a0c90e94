"""What ``examples/ablate.py`` reads and reports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lore_torchrl.dreamer.logging import read_metrics
from lore_torchrl.experiments.runs import run_folder
from lore_torchrl.experiments.statistics import (
    bootstrap_interval,
    format_score,
    interquartile_mean,
)


@dataclass(frozen=True)
class AblationArguments:
    """The command line of ``examples/ablate.py``.

    Args:
        ablations: Files of ``configs/ablation``, without their ending.
        seeds: Seeds of each, from 0 on.
        jobs: Runs side by side.
        output: Where runs and report go.
        overrides: Hydra overrides of every run.
    """

    ablations: tuple[str, ...] = ("a", "b", "c", "d", "e", "f")
    seeds: int = 3
    jobs: int = 2
    output: Path = Path("outputs/ablation")
    overrides: tuple[str, ...] = ()


def read_arguments(words: Sequence[str]) -> AblationArguments:
    """Read ``name=value`` words; what is not the study's own goes to every run.

    Args:
        words: The command line.

    Raises:
        ValueError: If a word is not of that form, or a number is not positive.

    Examples:
        >>> read_arguments(["ablations=[a,f]", "seeds=2", "env=empty8x8"]).ablations
        ('a', 'f')
    """
    own: dict[str, str] = {}
    overrides = []
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise ValueError(f"{word!r} is not of the form name=value.")
        if name in ("ablations", "seeds", "jobs", "output"):
            own[name] = value
        else:
            overrides.append(word)
    settings: dict = {"overrides": tuple(overrides)}
    if "ablations" in own:
        settings["ablations"] = tuple(re.findall(r"\w+", own["ablations"]))
    for name in ("seeds", "jobs"):
        if name in own:
            settings[name] = int(own[name])
            if settings[name] < 1:
                raise ValueError(f"{name} must be positive, got {own[name]}.")
    settings["output"] = Path(own.get("output", "outputs/ablation")).resolve()
    return AblationArguments(**settings)


def report(base: Path, methods: Sequence[str], seeds: int) -> str:
    """Write ``table.md`` and ``curves.png`` into ``base`` and return the table.

    Args:
        base: Folder of the study.
        methods: Ablations to compare.
        seeds: Seeds of each.
    """
    curves: dict[str, dict[int, np.ndarray]] = {}
    for name in methods:
        points: dict[int, list[float]] = {}
        for seed in range(seeds):
            for row in read_metrics(run_folder(base, name, seed)):
                if "eval/success" in row:
                    points.setdefault(int(row["step"]), []).append(row["eval/success"])
        curves[name] = {step: np.array(values) for step, values in sorted(points.items())}
    steps = list(next(iter(curves.values())))
    lines = [
        "| ablation | " + " | ".join(f"{step:,} steps" for step in steps) + " |",
        "|" + " --- |" * (len(steps) + 1),
    ]
    for name, points in curves.items():
        cells = " | ".join(format_score(values) for values in points.values())
        lines.append(f"| {name} | {cells} |")
    table = "\n".join(lines) + "\n"
    (base / "table.md").write_text(table)
    _draw(base / "curves.png", curves)
    return table


def _draw(path: Path, curves: dict[str, dict[int, np.ndarray]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in curves.items():
        steps = list(points)
        middle = [float(interquartile_mean(values)) for values in points.values()]
        bounds = np.array([bootstrap_interval(values) for values in points.values()])
        axes.plot(steps, middle, label=name)
        axes.fill_between(steps, bounds[:, 0], bounds[:, 1], alpha=0.2)
    axes.set(xlabel="environment steps", ylabel="held-out success, adviser off", ylim=(0, 1.02))
    axes.legend(title="ablation")
    figure.savefig(path, dpi=150, bbox_inches="tight")
