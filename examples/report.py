"""Report on finished runs: tables, figures as PNG and PDF, a page, and the curves as CSV.

Examples::

    python examples/report.py outputs/study/method --baseline stock
    python examples/report.py entity/project --wandb --baseline stock
    python examples/report.py docs/data/competence.csv --baseline stock --every 2
    python examples/report.py outputs/study/method --baseline stock --metric eval/return
    python examples/report.py outputs/sweep --by lore.gate.tau lore.gate.kappa
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lore_torchrl.experiments.records import read_csv, read_folder, read_wandb
from lore_torchrl.experiments.report import command_line, write_report
from lore_torchrl.experiments.summary import Study


def main() -> None:
    """Report, and print tables and place."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="folder of runs, curves.csv, or with --wandb a project")
    parser.add_argument("--wandb", action="store_true", help="source is entity/project")
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
    parser.add_argument("--title")
    parser.add_argument("--every", type=int, default=1, help="show every n-th evaluation")
    parser.add_argument("--output", type=Path, help="default: report, beside the source")
    args = parser.parse_args()
    try:
        page = report(args)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"Cannot report: {error}")
    print((page.parent / "tables.md").read_text())
    print(f"report {page}")


def report(args: argparse.Namespace) -> Path:
    """Read the runs, write the report, and return its page."""
    source = Path(args.source)
    if args.wandb:
        records, beside = read_wandb(args.source, by=args.by), Path("outputs")
    elif source.suffix == ".csv":
        records, beside = read_csv(source), source.parent
    else:
        records, beside = read_folder(source, by=args.by), source
    return write_report(
        args.output or beside / "report",
        Study(records, args.baseline, metric=args.metric),
        title=args.title or f"Report on {args.source}",
        command=command_line(),
        every=args.every,
    )


if __name__ == "__main__":
    main()
