"""A study as tables, figures, data and one page of HTML."""

from __future__ import annotations

import base64
import html
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lore_torchrl.advisors.redaction import redact
from lore_torchrl.experiments.figures import save_figures
from lore_torchrl.experiments.records import write_csv
from lore_torchrl.experiments.study import Study, Table, plain_markdown

_CAPTIONS = {
    "curves": "Interquartile mean over seeds, 95% interval.",
    "over_time": "The same, calls, divergence and entropy over time.",
    "calls": "Normalized AUC against advisor calls: one mark a run.",
    "frontier": "The last evaluation over calls: interquartile mean over seeds, 95% interval.",
    "profile": "Fraction of runs with a normalized AUC above τ, pointwise 95% interval.",
}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; }
table { border-collapse: collapse; font-size: 14px; margin: 0.5rem 0 1.5rem; }
th, td { border-bottom: 1px solid #ddd; padding: 0.3rem 0.7rem; text-align: left; }
th { border-bottom: 2px solid #888; }
caption { text-align: left; font-weight: 600; padding: 0.5rem 0; }
figure { margin: 1.5rem 0; }
img { max-width: 100%; }
figcaption, footer { color: #555; font-size: 14px; }
code { background: #f3f3f3; padding: 0.1rem 0.3rem; }
"""


def write_report(
    folder: str | Path, study: Study, *, title: str, command: Sequence[str] = (), every: int = 1
) -> Path:
    """Write ``report.html``, ``tables.md``, ``curves.csv`` and the figures as PNG and PDF.

    The page holds its figures, so it can be sent as one file; its path is returned.

    Args:
        folder: Where they go.
        study: The runs.

    Keyword Args:
        title: Heading.
        command: Command line by which the runs can be made again. Default: none.
        every: Show every n-th evaluation in the tables. Default: ``1``.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    folder = Path(folder)
    tables, figures, notes = study.tables(every), save_figures(folder, study), _notes(study)
    write_csv(folder / "curves.csv", study.records, also=(study.metric,))
    text = "\n".join(table.markdown() for table in tables)
    lines = [f"# {plain_markdown(title)}\n", text, *map(plain_markdown, notes)]
    if command:
        made_by = " ".join(redact(shlex.join(command)).split())
        # Longer than any run of backticks in it.
        fence = "`" * (1 + max(map(len, re.findall("`+", made_by)), default=0))
        space = " " * (len(fence) > 1)
        lines.append(f"Command: {fence}{space}{made_by}{space}{fence}")
        notes.append(f"Command: {made_by}")
    (folder / "tables.md").write_text("\n".join(lines) + "\n")
    page = folder / "report.html"
    page.write_text(_page(title, tables, figures, notes))
    return page


def command_line() -> list[str]:
    """Return how this process was started, as a user would type it."""
    return ["python", *sys.argv]


def _notes(study: Study) -> list[str]:
    seeds = {len(study.runs(e, m)) for e in study.experiments for m in study.methods} - {0}
    count = " to ".join(map(str, sorted({min(seeds), max(seeds)})))
    notes = [f"{len(study.records)} runs, {count} seeds of each method."]
    times = [record.seconds for record in study.records if record.seconds is not None]
    if times:
        whole = f" (known of {len(times)} runs)" if len(times) < len(study.records) else ""
        notes.append(f"{sum(times) / 3600:.1f} hours in total{whole}.")
    machines = sorted({record.machine for record in study.records if record.machine})
    if machines:
        notes.append(f"Run on {'; '.join(machines)}, one CPU thread each.")
    return notes


def _page(title: str, tables: list[Table], figures: dict[str, Path], notes: list[str]) -> str:
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for name, path in figures.items():
        data = base64.b64encode(path.read_bytes()).decode()
        caption = html.escape(_CAPTIONS[name])
        image = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
        parts.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
        if name == "curves":
            parts += [_html(table) for table in tables]
    lines = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    parts.append(f"<footer>{lines}</footer>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}'
        f"</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _html(table: Table) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line("td", row) for row in table.rows)
    caption = f"<caption>{html.escape(table.title)}</caption>"
    return f"<table>{caption}{line('th', table.header)}{body}</table>"
