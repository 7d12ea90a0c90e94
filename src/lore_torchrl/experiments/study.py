"""The finished runs of several methods side by side, and the tables that compare them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lore_torchrl.experiments.records import Record
from lore_torchrl.experiments.statistics import (
    bootstrap,
    interquartile_mean,
    normalized_auc,
    probability_of_improvement,
)


@dataclass(frozen=True)
class Table:
    """A table: what it says, its columns and its cells, all text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return the table in Markdown, its title in bold above it."""
        lines = [f"| {' | '.join(map(plain_markdown, row))} |" for row in (self.header, *self.rows)]
        lines.insert(1, "|" + " --- |" * len(self.header))
        return "\n".join([f"**{plain_markdown(self.title)}**", "", *lines]) + "\n"


def plain_markdown(text: str) -> str:
    r"""Return text on one line, escaped so that Markdown shows it as it is.

    Examples:
        >>> print(plain_markdown("a|b <c>"), plain_markdown("0.5 [0.4, 0.6]"))
        a\|b &lt;c> 0.5 [0.4, 0.6]
    """
    text = re.sub(r"([\\`*|]|\](?=[(\[:]))", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;")


class Study:
    """Runs by experiment and method.

    Args:
        records: The runs.
        baseline: The method that others are compared with. Default: ``None``.

    Keyword Args:
        metric: What methods are compared by, higher is better, by its name in the log.
            Default: ``"eval/success"``.
        references: Reference scores, such as those of random actions, for the figures alone: the
            last value of the metric counts. Default: none.

    Raises:
        ValueError: If there is no run, none of the baseline, or none that logged the metric.
    """

    def __init__(
        self,
        records: Sequence[Record],
        baseline: str | None = None,
        *,
        metric: str = "eval/success",
        references: Sequence[Record] = (),
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
        logged = {name for record in records for row in record.rows for name in row} - {"step"}
        if metric not in logged:
            raise ValueError(f"No run logged {metric!r}; logged are {sorted(logged)}.")
        self.baseline, self.metric, self.references = baseline, metric, list(references)

    @property
    def label(self) -> str:
        """What the metric is, for titles: ``eval/return`` is the held-out return."""
        if not self.metric.startswith("eval/"):
            return self.metric
        advice = " with advice" if self.metric.startswith("eval/advised/") else ""
        return f"held-out {self.metric.split('/')[-1].replace('_', ' ')}{advice}"

    @property
    def is_success(self) -> bool:
        """Whether the metric is a success rate, 0 to 1 in every experiment."""
        return self.metric.endswith("/success")

    def runs(self, experiment: str, method: str) -> list[Record]:
        """Return the runs of one method on one experiment."""
        return [r for r in self.records if (r.experiment, r.method) == (experiment, method)]

    def curves(self, experiment: str, method: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps that all seeds logged, ``[T]``, and their values, ``[N, T]``."""
        seeds = []
        for record in self.runs(experiment, method):
            steps, values = record.curve(metric)
            seeds.append(dict(zip(steps.tolist(), values.tolist(), strict=True)))
        shared = sorted(set.intersection(*map(set, seeds))) if seeds else []
        return np.array(shared), np.array([[seed[step] for step in shared] for seed in seeds])

    def auc(self, experiment: str, method: str) -> np.ndarray:
        """Return the normalized AUC of each seed's curve of the metric, ``[N]``.

        See :func:`~lore_torchrl.experiments.normalized_auc`; empty if a seed logged nothing, or
        the seeds end at different steps.
        """
        if self._end(experiment, method) is None:
            return np.zeros(0)
        runs = self.runs(experiment, method)
        return np.array([normalized_auc(*record.curve(self.metric)) for record in runs])

    def steps_to(self, experiment: str, method: str, level: float = 0.9) -> np.ndarray:
        """Return the first step at which each seed's metric reaches ``level``, ``[N]``, or inf."""
        curves = [record.curve(self.metric) for record in self.runs(experiment, method)]
        return np.array([min(steps[y >= level], default=np.inf) for steps, y in curves])

    def _end(self, experiment: str, method: str) -> float | None:
        """Return the step of the last evaluation, ``None`` unless all seeds share it."""
        curves = [record.curve(self.metric)[0] for record in self.runs(experiment, method)]
        ends = {steps[-1] if len(steps) else None for steps in curves}
        return ends.pop() if len(ends) == 1 else None

    def _share_end(self, experiment: str, method: str) -> bool:
        """Whether a method's seeds end where the baseline's do: other areas do not compare."""
        end = self._end(experiment, method)
        return end is not None and end == self._end(experiment, self.baseline)

    def tables(self, every: int = 1) -> list[Table]:
        """Return a table for each experiment, one over all of them, and sources of advice.

        An experiment's table has the metric at every n-th evaluation, counted from the last (the
        interquartile mean over seeds), the mean of its normalized AUC, that over the baseline's,
        and advisor calls; there is no AUC of seeds, and no ratio of AUCs, that end at different
        steps. A method of which no run logged the metric is left out.
        """
        tables = [self._one_experiment(name, every) for name in self.experiments]
        if len(self.experiments) > 1 and (self.is_success or self.baseline is not None):
            tables.append(self._all_experiments())
        sources = self._advice_sources()
        return [*tables, sources] if sources.rows else tables

    def _one_experiment(self, experiment: str, every: int) -> Table:
        methods = [m for m in self.methods if self._is_logged(experiment, m)]
        columns = {}
        for method in methods:
            steps, values = self.curves(experiment, method, self.metric)
            columns[method] = dict(zip(steps.astype(int).tolist(), values.T, strict=True))
        shown = sorted(set().union(*columns.values()))[::-1][::every][::-1]
        scores = {method: self.auc(experiment, method) for method in methods}
        # A ratio of scores that may be negative says nothing.
        signed = any((auc < 0).any() for auc in scores.values())
        reference = scores.get(self.baseline, np.zeros(0))
        header = ["method", "seeds", *(f"{step:,} steps" for step in shown), "normalized AUC"]
        header += [f"{'minus' if signed else 'over'} {self.baseline}"] if len(reference) else []
        header += [*(["steps to 0.9 (seeds)"] if self.is_success else []), "calls"]
        rows = []
        for method, auc in scores.items():
            runs = self.runs(experiment, method)
            cells = [columns[method].get(step) for step in shown]
            cells = [_interval(interquartile_mean, x) if x is not None else "-" for x in cells]
            cells.append(_interval(_mean, auc) if len(auc) else "-")
            if len(reference):
                defined = self._share_end(experiment, method) and (signed or reference.any())
                compare = _difference if signed else _ratio
                cells.append(_interval(compare, auc, reference) if defined else "-")
            if self.is_success:
                reached = self.steps_to(experiment, method)
                step = np.median(reached)
                text = f"{step:,.0f}" if np.isfinite(step) else "-"
                cells.append(f"{text} ({np.isfinite(reached).sum()} of {len(runs)})")
            calls = sorted({int(run.last("advice/calls") or 0) for run in runs})
            cells.append("-".join(map(str, dict.fromkeys((calls[0], calls[-1])))))
            rows.append((method, str(len(runs)), *cells))
        title = f"{experiment}: {self.label} [95% interval]"
        return Table(title, tuple(header), tuple(rows))

    def _is_logged(self, experiment: str, method: str) -> bool:
        return any(len(run.curve(self.metric)[0]) for run in self.runs(experiment, method))

    def _all_experiments(self) -> Table:
        header = ["method"]
        header += ["IQM of normalized AUC"] if self.is_success else []
        header += [] if self.baseline is None else [f"P(above {self.baseline})"]
        rows = []
        for method in self.methods:
            names = [n for n in self.experiments if len(self.auc(n, method))]
            if self.baseline is not None:
                names = [name for name in names if self._share_end(name, method)]
            if names:
                scores = [self.auc(name, method) for name in names]
                cells = [method]
                if self.is_success:
                    cells.append(_interval(_pooled, *scores))
                if self.baseline is not None:
                    reference = [self.auc(name, self.baseline) for name in names]
                    cells.append(_improvement(scores, reference))
                rows.append(tuple(cells))
        title = "All experiments together, stratified over seeds [95% interval]"
        return Table(title, tuple(header), tuple(rows))

    def _advice_sources(self) -> Table:
        rows = []
        for experiment in self.experiments:
            for method in self.methods:
                found = [advice_sources(record) for record in self.runs(experiment, method)]
                found = [fractions for fractions in found if fractions is not None]
                if found:
                    mean = np.mean(found, axis=0)
                    rows.append((experiment, method, *(f"{part:.1%}" for part in mean)))
        sources = ("own answer cached", "abstract state", "no cached advice")
        header = ("experiment", "method", *sources)
        return Table("Where the advice came from, shares of all steps", header, tuple(rows))


def advice_sources(record: Record) -> np.ndarray | None:
    """Return what a run's look-ups found, as fractions ``[3]``: an own answer, one shared, none.

    ``None`` if the run had no advisor.
    """
    names = ("advice/cache_hits", "advice/cache_shared_hits", "advice/cache_misses")
    counts = [record.last(name) for name in names]
    return None if None in counts or not sum(counts) else np.array(counts) / sum(counts)


def _mean(scores: np.ndarray) -> np.ndarray:
    return scores.mean(-1)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return above.mean(-1) / np.maximum(below.mean(-1), 1e-12)


def _difference(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return above.mean(-1) - below.mean(-1)


def _pooled(*tasks: np.ndarray) -> np.ndarray:
    return interquartile_mean(np.concatenate(tasks, -1))


def _interval(
    statistic: Callable[..., np.ndarray], *samples: np.ndarray, draws: int = 10_000
) -> str:
    if min(sample.shape[-1] for sample in samples) == 1:
        # One seed has no spread.
        return _two_digits(statistic(*samples))
    value, low, high = map(_two_digits, bootstrap(statistic, *samples, draws=draws))
    return f"{value} [{low}, {high}]"


def _two_digits(value: float) -> str:
    # A ratio to a resampling in which every seed of the baseline scored 0, to which _ratio gives
    # the least of denominators.
    return "∞" if value > 1e9 else f"{value:.2f}"


def _improvement(above: Sequence[np.ndarray], below: Sequence[np.ndarray]) -> str:
    pairs = [scores for pair in zip(above, below, strict=True) for scores in pair]
    return _interval(probability_of_improvement, *pairs, draws=2_000)
