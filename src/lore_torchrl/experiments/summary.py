"""A study's runs, sorted, and its tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lore_torchrl.experiments.records import Record
from lore_torchrl.experiments.statistics import (
    area_under_curve,
    difference_interval,
    format_score,
    probability_of_improvement,
    ratio_interval,
    stratified_interval,
)


@dataclass(frozen=True)
class Table:
    """A table: what it says, its columns and its cells, all text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return the table in Markdown, its title in bold above it."""
        lines = [f"**{plain_markdown(self.title)}**", "", _row(self.header)]
        lines.append("|" + " --- |" * len(self.header))
        lines += map(_row, self.rows)
        return "\n".join(lines) + "\n"


def plain_markdown(text: str) -> str:
    r"""Return text on one line that stands in Markdown for itself: no table, HTML, code or link.

    Examples:
        >>> print(plain_markdown("a|b <c>"), plain_markdown("0.5 [0.4, 0.6]"))
        a\|b &lt;c> 0.5 [0.4, 0.6]
    """
    text = re.sub(r"([\\`*|]|\](?=[(\[:]))", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(plain_markdown, cells))} |"


class Study:
    """Runs by experiment and method.

    Args:
        records: The runs.
        baseline: The method that others are compared with, ``None`` for none.
            Default: ``None``.

    Keyword Args:
        metric: What methods are compared by, higher is better, by its name in the log.
            Default: ``"eval/success"``.

    Raises:
        ValueError: If there is no run, none of the baseline, or none that logged the metric.
    """

    def __init__(
        self,
        records: Sequence[Record],
        baseline: str | None = None,
        *,
        metric: str = "eval/success",
    ) -> None:
        if not records:
            raise ValueError("A study needs at least one finished run.")
        self.records = list(records)
        self.experiments = list(dict.fromkeys(record.experiment for record in records))
        self.methods = list(dict.fromkeys(record.method for record in records))
        if baseline is not None and baseline not in self.methods:
            raise ValueError(
                f"There is no finished run of the baseline {baseline!r}; there are "
                f"{self.methods}. Name one of them."
            )
        self.baseline = baseline
        logged = {name for record in records for row in record.rows for name in row} - {"step"}
        if metric not in logged:
            raise ValueError(f"No run logged {metric!r}; logged are {sorted(logged)}.")
        self.metric = metric

    @property
    def label(self) -> str:
        """Return what the metric is, for titles: ``eval/return`` is the held-out return."""
        if not self.metric.startswith("eval/"):
            return self.metric
        return f"held-out {self.metric.split('/')[-1].replace('_', ' ')}, advisor off"

    @property
    def is_share(self) -> bool:
        """Return whether the metric is success, on one scale from 0 to 1 in all experiments."""
        return self.metric.endswith("/success")

    def runs(self, experiment: str, method: str) -> list[Record]:
        """Return the runs of one method on one experiment."""
        return [r for r in self.records if (r.experiment, r.method) == (experiment, method)]

    def curves(self, experiment: str, method: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps that all seeds logged, ``[T]``, and their values, ``[N, T]``.

        ``calls_per_1000`` is the growth of ``advice/calls`` for each 1,000 steps.
        """
        calls = metric == "calls_per_1000"
        name = "advice/calls" if calls else metric
        seeds = []
        for record in self.runs(experiment, method):
            steps, values = record.curve(name)
            if calls and len(steps):
                values = 1000 * np.diff(values, prepend=0.0) / np.diff(steps, prepend=0.0)
            seeds.append(dict(zip(steps.tolist(), values.tolist(), strict=True)))
        shared = sorted(set.intersection(*(set(seed) for seed in seeds))) if seeds else []
        return np.array(shared), np.array([[seed[step] for step in shared] for seed in seeds])

    def heights(self, experiment: str, method: str) -> np.ndarray:
        """Return the mean height of each seed's curve of the metric, ``[N]``."""
        steps, values = self.curves(experiment, method, self.metric)
        return area_under_curve(steps, values) if len(steps) else np.zeros(0)

    def tables(self, every: int = 1) -> list[Table]:
        """Return the metric by step, mean heights, comparisons over all experiments, sources.

        Args:
            every: Show every n-th evaluation, counted from the last. Default: ``1``.
        """
        tables = []
        for experiment in self.experiments:
            tables += [self._by_step(experiment, every), self._heights(experiment)]
        if len(self.experiments) > 1 and (self.is_share or self.baseline is not None):
            tables.append(self._together())
        sources = self._sources()
        return [*tables, sources] if sources.rows else tables

    def _by_step(self, experiment: str, every: int) -> Table:
        steps = sorted(
            {
                int(step)
                for method in self.methods
                for step in self.curves(experiment, method, self.metric)[0]
            }
        )
        shown = steps[::-1][::every][::-1]
        rows = []
        for method in self.methods:
            runs = self.runs(experiment, method)
            if runs:
                found, values = self.curves(experiment, method, self.metric)
                columns = dict(zip(found.tolist(), values.T, strict=True))
                cells = [format_score(columns[s]) if s in columns else "-" for s in shown]
                calls = sorted(int(run.last("advice/calls") or 0) for run in runs)
                spent = str(calls[0]) if calls[0] == calls[-1] else f"{calls[0]}-{calls[-1]}"
                rows.append((method, str(len(runs)), *cells, spent))
        header = ("method", "seeds", *(f"{step:,} steps" for step in shown), "calls")
        title = f"{experiment}: {self.label}, IQM over seeds [95% interval]"
        return Table(title, header, tuple(rows))

    def _heights(self, experiment: str) -> Table:
        reference = None if self.baseline is None else self.heights(experiment, self.baseline)
        header = ["method", "mean height", "by seed"]
        found = {method: self.heights(experiment, method) for method in self.methods}
        # Of what may be negative no ratio says anything.
        signed = any((heights < 0).any() for heights in found.values())
        if reference is not None and len(reference):
            compared = "minus" if signed else "over"
            header += [f"{compared} {self.baseline}", f"P(above {self.baseline})"]
        rows = []
        for method, heights in found.items():
            if len(heights):
                cells = [method, f"{heights.mean():.2f}"]
                cells.append(", ".join(f"{height:.2f}" for height in heights))
                if reference is not None and len(reference):
                    compare = difference_interval if signed else ratio_interval
                    # Nothing is a multiple of nothing.
                    known = compare(heights, reference) if signed or reference.any() else None
                    cells.append("-" if known is None else _interval(*known))
                    cells.append(_interval(*probability_of_improvement([heights], [reference])))
                rows.append(tuple(cells))
        name = self.label.removesuffix(", advisor off")
        title = f"{experiment}: mean height of the curve of {name} [95% interval]"
        return Table(title, tuple(header), tuple(rows))

    def _together(self) -> Table:
        header = ["method"]
        if self.is_share:
            header.append("IQM of mean heights")
        if self.baseline is not None:
            header.append(f"P(above {self.baseline})")
        rows = []
        for method in self.methods:
            # Only where both have a curve: an experiment that one lacks compares nothing.
            names = [
                name
                for name in self.experiments
                if len(self.heights(name, method))
                and (self.baseline is None or len(self.heights(name, self.baseline)))
            ]
            if names:
                heights = [self.heights(name, method) for name in names]
                cells = [method]
                if self.is_share:
                    cells.append(_interval(*stratified_interval(heights)))
                if self.baseline is not None:
                    reference = [self.heights(name, self.baseline) for name in names]
                    cells.append(_interval(*probability_of_improvement(heights, reference)))
                rows.append(tuple(cells))
        title = "All experiments together, stratified over seeds [95% interval]"
        return Table(title, tuple(header), tuple(rows))

    def _sources(self) -> Table:
        rows = []
        for experiment in self.experiments:
            for method in self.methods:
                shares = [
                    share
                    for record in self.runs(experiment, method)
                    if (share := sources(record)) is not None
                ]
                if shares:
                    mean = np.mean(shares, axis=0)
                    rows.append((experiment, method, *(f"{share:.1%}" for share in mean)))
        header = ("experiment", "method", "own answer cached", "class", "PriorNet", "call", "none")
        return Table("Where the advice came from, shares of all steps", header, tuple(rows))


def sources(record: Record) -> np.ndarray | None:
    """Return from where a run's advice came, as shares of the steps that looked for it.

    Returns:
        Shares ``[5]``: own cached answer, answers of the class, PriorNet, fresh calls, none;
        ``None`` if the run had no advisor.
    """
    names = ("advice/cache_hits", "advice/cache_near_hits", "advice/cache_misses", "advice/calls")
    counts = [record.last(name) for name in names]
    if None in counts:
        return None
    exact, near, misses, calls = counts
    looked = exact + near + misses
    if not looked:
        return None
    learnt = record.last("prior_net/served") or 0.0
    # A question about a situation that its class serves already is counted as fresh. At least
    # so many of the calls were such, since PriorNet's steps are misses too.
    known = max(0.0, calls + learnt - misses)
    exact = max(0.0, exact - max(0.0, known - near))
    near = max(0.0, near - known)
    none = max(0.0, looked - exact - near - learnt - calls)
    return np.array([exact, near, learnt, calls, none]) / looked


def _interval(value: float, low: float, high: float) -> str:
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"
