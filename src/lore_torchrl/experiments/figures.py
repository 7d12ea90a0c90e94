"""Figures over many runs: curves with intervals, profiles, calls against success."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lore_torchrl.dreamer.figures import literal
from lore_torchrl.experiments.statistics import (
    bootstrap_interval,
    interquartile_mean,
    performance_profile,
)
from lore_torchrl.experiments.summary import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OVER_TIME = (
    ("calls_per_1000", "advisor calls per 1,000 steps"),
    ("lore/kl", "KL(mix ‖ policy), nats"),
    ("lore/entropy_wm", "policy entropy, nats"),
)


def save_figures(folder: str | Path, study: Study) -> dict[str, Path]:
    """Draw a study's figures, each as PNG and PDF.

    ``curves``: the study's metric. ``over_time``: the metric, density of calls, KL and entropy.
    ``calls``: calls and, where advice had a price, its cost, against the curve's mean height.
    ``profile``: share of runs whose curve is higher than a threshold on average; not of a
    metric whose scale is another in each experiment.

    Args:
        folder: Where they go.
        study: The runs.

    Returns:
        The PNG of each figure by its name.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as err:
        raise ImportError("Figures need matplotlib: pip install 'lore-torchrl[train]'.") from err
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drawings: dict[str, Callable[[Figure, Study], None]] = {
        "curves": _curves,
        "over_time": _over_time,
        "calls": _calls,
    }
    if study.is_share or len(study.experiments) == 1:
        drawings["profile"] = _profile
    paths = {}
    for name, draw in drawings.items():
        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure, study)
        paths[name] = folder / f"{name}.png"
        for suffix in ("png", "pdf"):
            # Without the date a figure of the same runs is the same file.
            metadata = {"CreationDate": None} if suffix == "pdf" else None
            figure.savefig(folder / f"{name}.{suffix}", dpi=130, metadata=metadata)
    return paths


def _color(number: int) -> tuple[float, ...]:
    """Return the colour of a method: ten of matplotlib's own, then ten others."""
    from matplotlib import colormaps

    colors = [*colormaps["tab10"].colors, *colormaps["tab20b"].colors[::2]]
    return colors[number % len(colors)]


def _band(axes: Axes, study: Study, experiment: str, metric: str) -> None:
    """Draw the interquartile mean over seeds of each method, with its interval."""
    for number, method in enumerate(study.methods):
        steps, values = study.curves(experiment, method, metric)
        if len(steps):
            middle = interquartile_mean(values.T)
            bounds = np.array([bootstrap_interval(column, draws=2_000) for column in values.T])
            axes.plot(
                steps,
                middle,
                color=_color(number),
                label=literal(method),
                marker="o",
                markersize=2.5,
            )
            axes.fill_between(steps, *bounds.T, color=_color(number), alpha=0.18, linewidth=0)
    axes.set_xlabel("environment steps")
    axes.grid(alpha=0.3)


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Name what is drawn below the axes, in as many columns as the figure is wide enough for."""
    labels: dict[str, object] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    for columns in range(min(6, len(labels)), 0, -1):
        legend = figure.legend(
            labels.values(), labels, loc="outside lower center", ncols=columns, fontsize=9
        )
        width = legend.get_window_extent().width
        if width <= 0.98 * figure.bbox.width or columns == 1:
            # Below the axes there must be room for its rows.
            height = legend.get_window_extent().height / figure.dpi
            figure.set_size_inches(figure.get_figwidth(), figure.get_figheight() + height)
            return
        legend.remove()


def _limits(study: Study) -> tuple[float, float] | None:
    """Return the axis of a share; others fit what is drawn."""
    return (-0.03, 1.03) if study.is_share else None


def _curves(figure: Figure, study: Study) -> None:
    figure.set_size_inches(4.6 * len(study.experiments), 3.6)
    axes = figure.subplots(1, len(study.experiments), squeeze=False)[0]
    for each, experiment in zip(axes, study.experiments, strict=True):
        _band(each, study, experiment, study.metric)
        each.set(title=literal(experiment), ylim=_limits(study))
    axes[0].set_ylabel(literal(study.label))
    _legend(figure, axes)


def _over_time(figure: Figure, study: Study) -> None:
    shown = ((study.metric, study.label), *_OVER_TIME)
    figure.set_size_inches(4.0 * len(shown), 3.2 * len(study.experiments))
    grid = figure.subplots(len(study.experiments), len(shown), squeeze=False)
    for line, experiment in zip(grid, study.experiments, strict=True):
        for axes, (metric, title) in zip(line, shown, strict=True):
            _band(axes, study, experiment, metric)
            axes.set_title(literal(f"{experiment}: {title}"), fontsize=9)
    _legend(figure, grid.flatten())


def _calls(figure: Figure, study: Study) -> None:
    priced = any((record.last("advice/cost") or 0.0) > 0 for record in study.records)
    columns = ["advice/calls", "advice/cost"] if priced else ["advice/calls"]
    figure.set_size_inches(5.0 * len(columns), 3.6)
    axes = figure.subplots(1, len(columns), squeeze=False)[0]
    markers = "osD^vP*X"
    for each, metric in zip(axes, columns, strict=True):
        for number, method in enumerate(study.methods):
            for kind, experiment in enumerate(study.experiments):
                runs = study.runs(experiment, method)
                heights = study.heights(experiment, method)
                if not len(heights):
                    continue
                each.scatter(
                    [record.last(metric) or 0.0 for record in runs],
                    heights,
                    color=_color(number),
                    marker=markers[kind % len(markers)],
                    alpha=0.8,
                    clip_on=False,
                )
        unit = "advisor calls in all" if metric == "advice/calls" else "cost of the advice in all"
        each.set(xlabel=unit, ylabel="mean height of the curve", ylim=_limits(study))
        each.set_xscale("symlog")
        # The linear part of the axis ends at 1: no tick below 0.
        most = max((record.last(metric) or 0.0 for record in study.records), default=0.0)
        each.set_xlim(-0.5, 2.0 * max(1.0, most))
        each.grid(alpha=0.3)
    for number, method in enumerate(study.methods):
        axes[0].scatter([], [], color=_color(number), label=literal(method))
    if len(study.experiments) > 1:
        for kind, experiment in enumerate(study.experiments):
            axes[0].scatter(
                [], [], color="grey", marker=markers[kind % len(markers)], label=literal(experiment)
            )
    _legend(figure, axes)


def _profile(figure: Figure, study: Study) -> None:
    figure.set_size_inches(5.0, 3.6)
    axes = figure.subplots()
    scores = [study.heights(name, method) for name in study.experiments for method in study.methods]
    known = np.concatenate(scores)
    share = study.is_share or not len(known)
    least, most = (0.0, 1.0) if share else (known.min(), known.max())
    thresholds = np.linspace(least, most, 101)
    for number, method in enumerate(study.methods):
        scores = [study.heights(name, method) for name in study.experiments]
        scores = [task for task in scores if len(task)]
        if scores:
            share, low, high = performance_profile(scores, thresholds)
            axes.step(thresholds, share, where="post", color=_color(number), label=literal(method))
            axes.fill_between(
                thresholds, low, high, step="post", color=_color(number), alpha=0.18, linewidth=0
            )
    axes.set(
        xlabel="mean height of the curve, τ", ylabel="share of runs above τ", ylim=(-0.03, 1.03)
    )
    axes.grid(alpha=0.3)
    _legend(figure, [axes])
