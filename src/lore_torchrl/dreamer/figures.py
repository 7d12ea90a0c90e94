"""Figures of one run, or of several side by side, from their ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lore_torchrl.dreamer.logging import curve, read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS: dict[str, tuple[tuple[str, str], ...]] = {
    "success": (
        ("eval/success", "held-out success"),
        ("train/success", "success in training"),
    ),
    "advice": (
        ("advice/calls", "advisor calls in all"),
        ("calls_per_1000", "calls per 1,000 steps"),
    ),
    "policy": (
        ("lore/beta_mean", "gate's weight β"),
        ("lore/kl", "KL(mix ‖ policy), nats"),
        ("lore/entropy_wm", "policy entropy, nats"),
    ),
}


def figure_class() -> type[Figure]:
    """Return matplotlib's figure, or raise ``ImportError`` where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as err:
        raise ImportError(
            "Figures need matplotlib: pip install 'lore-torchrl[train]', or set "
            "logger.figures=false."
        ) from err
    return Figure


def literal(text: str) -> str:
    r"""Return text as matplotlib draws it letter by letter, dollar signs too.

    Examples:
        >>> print(literal("a$b$"))
        a\$b\$
    """
    # A label that begins with an underscore would be left out of the legend.
    return ("\u200b" if text.startswith("_") else "") + text.replace("$", r"\$")


def save_figures(output: str | Path, runs: Mapping[str, str | Path] | None = None) -> list[Path]:
    """Draw success, calls and their density, β, KL and entropy over environment steps.

    Args:
        output: Folder; the figures go to its subfolder ``figures``.
        runs: Run folders by the name that the legend shows. Default: ``output`` itself.

    Returns:
        Paths of the figures; a figure none of whose metrics was logged is left out.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    make = figure_class()
    folder = Path(output) / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    runs = {Path(output).name: output} if runs is None else runs
    data = {name: read_metrics(path) for name, path in runs.items()}
    paths = []
    for figure_name, panels in _PANELS.items():
        figure = make(figsize=(5.0 * len(panels), 3.6), layout="constrained")
        drawn = False
        grid = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (metric, title) in zip(grid, panels, strict=True):
            for name, rows in data.items():
                if points := curve(rows, metric):
                    style = {"marker": "o", "markersize": 3, "label": literal(name)}
                    axes.plot(*zip(*points, strict=True), **style)
                    drawn = True
            axes.set(title=title, xlabel="environment steps")
            if "success" in metric:
                axes.set_ylim(-0.03, 1.03)
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend()
        if drawn:
            path = folder / f"{figure_name}.png"
            figure.savefig(path, dpi=120)
            paths.append(path)
    return paths
