"""Report on finished runs: tables, figures as PNG and PDF, a page, and the curves as CSV.

Examples::

    python examples/report.py outputs/study/method --baseline stock
    python examples/report.py outputs/study/method docs/data/method.csv --baseline stock
    python examples/report.py entity/project --wandb --baseline stock
    python examples/report.py docs/data/competence.csv --baseline stock --every 2
    python examples/report.py outputs/study/method --baseline stock --metric eval/return
    python examples/report.py outputs/sweep --by lore.gate.tau lore.gate.kappa
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from lore_torchrl.experiments import (
    Study,
    command_line,
    merge,
    read_csv,
    read_runs,
    read_wandb,
    write_report,
)

# Random actions and the planner, by benchmarks/reference_scores.py.
REFERENCES = Path(__file__).resolve().parent.parent / "docs" / "data" / "references.csv"


def main() -> None:
    """Report, and print tables and place."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="source",
        help="folder of runs, curves.csv, or with --wandb a project; several make one report",
    )
    parser.add_argument("--wandb", action="store_true", help="each source is entity/project")
    parser.add_argument("--baseline", help="method that the others are compared with")
    parser.add_argument(
        "--metric", default="eval/success", help="what they are compared by (default: %(default)s)"
    )
    parser.add_argument(
        "--by",
        nargs="+",
        default=(),
        metavar="SETTING",
        help="name runs outside studies by these (default: by the settings in which they differ)",
    )
    parser.add_argument(
        "--references",
        default=REFERENCES,
        help="CSV of reference scores, lines in the figures (default: %(default)s)",
    )
    parser.add_argument("--title")
    parser.add_argument("--every", type=positive, default=1, help="show every n-th evaluation")
    parser.add_argument(
        "--output",
        type=Path,
        help="default: report_<metric>, inside the first folder or beside the first file",
    )
    args = parser.parse_args()
    try:
        page = report(args)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"Cannot report: {error}")
    print((page.parent / "tables.md").read_text())
    print(f"report {page}")


def positive(text: str) -> int:
    """Return a whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"it must be a whole number above 0, got {text}")
    return int(text)


def report(args: argparse.Namespace) -> Path:
    """Read the runs, write the report, and return its page."""
    first = Path(args.sources[0])
    # A study's own report is in report.
    folder = "report_" + re.sub(r"\W+", "_", args.metric)
    if args.wandb:
        records = merge(run for name in args.sources for run in read_wandb(name, by=args.by))
        beside = Path("outputs")
    else:
        records = read_runs(*args.sources, by=args.by)
        beside = first.parent if first.suffix == ".csv" else first
    return write_report(
        args.output or beside / folder,
        Study(records, args.baseline, metric=args.metric, references=read_csv(args.references)),
        title=args.title or f"Report on {', '.join(args.sources)}",
        command=command_line(),
        every=args.every,
    )


if __name__ == "__main__":
    main()
