"""Figures of a study: curves with intervals, calls against success, performance profiles."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lore_torchrl.dreamer.figures import figure_class, literal
from lore_torchrl.experiments.statistics import (
    bootstrap,
    interquartile_mean,
    performance_profile,
)
from lore_torchrl.experiments.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OVER_TIME = (
    ("calls_per_1000", "advisor calls per 1,000 steps"),
    ("lore/kl", "KL(mix ‖ policy), nats"),
    ("lore/entropy_wm", "policy entropy, nats"),
)
_CALLS = {
    "advice/calls": "advisor calls in all",
    "advice/cost": "cost of the advice in all",
}
_MARKERS = "osD^vP*X"
_DASHES = ("--", ":")
# Axis of what lies between 0 and 1.
_UNIT = (-0.03, 1.03)


def save_figures(folder: str | Path, study: Study) -> dict[str, Path]:
    """Draw a study's figures, each as PNG and PDF, and return the PNG of each by its name.

    ``curves``: the study's metric. ``over_time``: the metric, density of calls, KL and entropy.
    ``calls``: calls and, where advice had a price, its cost, against the normalized AUC.
    ``frontier``: the last evaluation, of success the return's too, against the calls, where
    methods whose names differ in a number at the end alone, such as LoRe 10 and LoRe 25, have
    made different numbers of them; methods without calls are lines across.
    ``profile``: fraction of runs with a normalized AUC above a threshold, except where the scale
    of the metric differs between experiments.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    make = figure_class()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drawings: dict[str, Callable[[Figure, Study], None]] = {
        "curves": _curves,
        "over_time": _over_time,
        "calls": _calls,
    }
    if any(_budgets(study, experiment) for experiment in study.experiments):
        drawings["frontier"] = _frontier
    if study.is_success or len(study.experiments) == 1:
        drawings["profile"] = _profile
    for name, draw in drawings.items():
        figure = make(layout="constrained")
        draw(figure, study)
        figure.savefig(folder / f"{name}.png", dpi=130)
        # Without the date a figure of the same runs is the same file.
        figure.savefig(folder / f"{name}.pdf", metadata={"CreationDate": None})
    return {name: folder / f"{name}.png" for name in drawings}


def method_color(number: int) -> tuple[float, ...]:
    """Return the RGB color of the n-th method: matplotlib's own without its gray, then twenty.

    Reference scores are gray.
    """
    from matplotlib import colormaps

    others = colormaps["tab20b"].colors
    own = [color for color in colormaps["tab10"].colors if len(set(color)) > 1]
    colors = [*own, *others[::2], *others[1::2]]
    return colors[number % len(colors)]


def _band(axes: Axes, study: Study, experiment: str, metric: str) -> None:
    """Draw the interquartile mean over seeds of each method, with its interval.

    Reference scores are dashed and dotted lines across.
    """
    for number, method in enumerate(study.methods):
        steps, values = study.curves(experiment, method, metric)
        if len(steps):
            bands = [bootstrap(interquartile_mean, seeds, draws=2_000) for seeds in values.T]
            middle, low, high = np.array(bands).T
            color, label = method_color(number), literal(method)
            axes.plot(steps, middle, color=color, label=label, marker="o", markersize=2.5)
            axes.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
    _reference_lines(axes, study, experiment, metric)
    axes.set_xlabel("environment steps")
    axes.grid(alpha=0.3)


def _reference_lines(axes: Axes, study: Study, experiment: str, metric: str) -> None:
    players = list(dict.fromkeys(record.method for record in study.references))
    for record in study.references:
        score = record.last(metric) if record.experiment == experiment else None
        if score is not None:
            dashes = _DASHES[players.index(record.method) % len(_DASHES)]
            style = {"color": "grey", "linestyle": dashes, "linewidth": 1}
            axes.axhline(score, label=literal(record.method), **style)


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Put one legend below the axes, in as many columns as the figure is wide enough for."""
    labels: dict[str, object] = {}
    for each in axes:
        handles, names = each.get_legend_handles_labels()
        labels = dict(zip(names, handles, strict=True)) | labels
    for columns in range(min(6, len(labels)), 0, -1):
        legend = figure.legend(
            labels.values(), labels, loc="outside lower center", ncols=columns, fontsize=9
        )
        box = legend.get_window_extent()
        if box.width <= 0.98 * figure.bbox.width or columns == 1:
            width, height = figure.get_size_inches()
            figure.set_size_inches(width, height + box.height / figure.dpi)
            return
        legend.remove()


def _curves(figure: Figure, study: Study) -> None:
    figure.set_size_inches(4.6 * len(study.experiments), 3.6)
    axes = figure.subplots(1, len(study.experiments), squeeze=False)[0]
    for each, experiment in zip(axes, study.experiments, strict=True):
        _band(each, study, experiment, study.metric)
        each.set(title=literal(experiment), ylim=_UNIT if study.is_success else None)
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
    def spent(runs: Sequence, metric: str) -> list[float]:
        return [run.last(metric) or 0.0 for run in runs]

    shown = [name for name in _CALLS if name == "advice/calls" or any(spent(study.records, name))]
    markers = {name: _MARKERS[n % len(_MARKERS)] for n, name in enumerate(study.experiments)}
    figure.set_size_inches(5.0 * len(shown), 3.6)
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for each, metric in zip(axes, shown, strict=True):
        for number, method in enumerate(study.methods):
            for experiment, marker in markers.items():
                scores = study.auc(experiment, method)
                if len(scores):
                    x = spent(study.runs(experiment, method), metric)
                    style = {"color": method_color(number), "marker": marker, "alpha": 0.8}
                    each.scatter(x, scores, clip_on=False, **style)
        limits = _UNIT if study.is_success else None
        each.set(xlabel=_CALLS[metric], ylabel="normalized AUC", ylim=limits)
        each.set_xscale("symlog")
        # The linear part of the axis ends at 1: no tick below 0.
        each.set_xlim(-0.5, 2.0 * max(1.0, *spent(study.records, metric)))
        each.grid(alpha=0.3)
    for number, method in enumerate(study.methods):
        axes[0].scatter([], [], color=method_color(number), label=literal(method))
    if len(markers) > 1:
        for experiment, marker in markers.items():
            axes[0].scatter([], [], color="grey", marker=marker, label=literal(experiment))
    _legend(figure, axes)


def _budgets(study: Study, experiment: str) -> dict[str, dict[float, str]]:
    """Return methods by name and mean calls, of names that differ in a number at the end alone."""
    found: dict[str, dict[float, str]] = {}
    for method in study.methods:
        calls = [run.last("advice/calls") or 0.0 for run in study.runs(experiment, method)]
        shared, _ = study.curves(experiment, method, study.metric)
        if any(calls) and len(shared) and (match := re.fullmatch(r"(.+) \d+", method)):
            found.setdefault(match[1], {})[float(np.mean(calls))] = method
    return {name: dict(sorted(m.items())) for name, m in found.items() if len(m) > 1}


def _frontier(figure: Figure, study: Study) -> None:
    """Draw the metric, and beside success the return, of each experiment over the calls."""
    metrics = {study.metric: study.label}
    returned = study.metric.replace("success", "return")
    if study.is_success and all(r.last(returned) is not None for r in study.records):
        metrics[returned] = study.label.replace("success", "return")
    figure.set_size_inches(4.6 * len(metrics), 3.4 * len(study.experiments))
    rows = figure.subplots(len(study.experiments), len(metrics), squeeze=False)
    for axes, experiment in zip(rows, study.experiments, strict=True):
        found = _budgets(study, experiment)
        for each, (metric, label) in zip(axes, metrics.items(), strict=True):
            calls = set()
            for number, (name, methods) in enumerate(found.items()):
                ends = [study.curves(experiment, m, metric)[1][:, -1] for m in methods.values()]
                bands = [bootstrap(interquartile_mean, seeds, draws=2_000) for seeds in ends]
                middle, low, high = np.array(bands).T
                spread = np.stack((middle - low, high - middle)).clip(0.0)
                style = {"color": method_color(number), "marker": "o", "capsize": 3}
                # Side by side, where methods have made as many calls.
                x = np.array(list(methods)) * 1.02**number
                each.errorbar(x, middle, spread, label=literal(name), **style)
                calls |= {round(number) for number in methods}
            for number, method in enumerate(study.methods, len(found)):
                shared, values = study.curves(experiment, method, metric)
                called = any(r.last("advice/calls") for r in study.runs(experiment, method))
                if len(shared) and not called:
                    style = {"color": method_color(number), "label": literal(method)}
                    each.axhline(interquartile_mean(values[:, -1]), **style)
            _reference_lines(each, study, experiment, metric)
            each.set(title=literal(experiment), ylim=_UNIT if "success" in metric else None)
            each.set(xlabel=_CALLS["advice/calls"], xscale="log")
            each.set_ylabel(literal(f"{label}, last evaluation"))
            each.set_xticks([], minor=True)
            # Without those whose labels would overlap.
            ticks = [n for n in sorted(calls) if not any(n < more <= 1.3 * n for more in calls)]
            each.set_xticks(ticks, map(str, ticks))
            each.grid(alpha=0.3)
    _legend(figure, rows.flat)


def _profile(figure: Figure, study: Study) -> None:
    figure.set_size_inches(5.0, 3.6)
    axes = figure.subplots()
    scores = {
        method: [x for name in study.experiments if len(x := study.auc(name, method))]
        for method in study.methods
    }
    known = [x for tasks in scores.values() for task in tasks for x in task]
    if study.is_success or not known:
        known = [0.0, 1.0]
    thresholds = np.linspace(min(known), max(known), 101)
    for number, (method, tasks) in enumerate(scores.items()):
        if tasks:
            profile = partial(performance_profile, thresholds)
            fraction, low, high = bootstrap(profile, *tasks, draws=2_000)
            color = method_color(number)
            axes.step(thresholds, fraction, where="post", color=color, label=literal(method))
            style = {"color": color, "alpha": 0.18, "linewidth": 0}
            axes.fill_between(thresholds, low, high, step="post", **style)
    axes.set(xlabel="normalized AUC, τ", ylabel="fraction of runs above τ", ylim=_UNIT)
    axes.grid(alpha=0.3)
    _legend(figure, [axes])
