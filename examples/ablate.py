"""Run ablations over seeds and compare their learning curves.

    python examples/ablate.py experiment=doorkey5x5
    python examples/ablate.py experiment=doorkey5x5 ablations=[a,f,no_bandit] seeds=3 jobs=2

Each ablation is a file in ``configs/ablation``. Finished runs are kept and not repeated.
Other arguments go to every run as they are. Writes ``table.md`` and ``curves.png``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lore_torchrl.experiments import run_jobs
from lore_torchrl.experiments.ablation import read_arguments, report
from lore_torchrl.experiments.runs import make_jobs

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Run what is missing, then report."""
    arguments = read_arguments(sys.argv[1:])
    methods = {name: [f"ablation={name}"] for name in arguments.ablations}
    jobs = make_jobs(arguments.output, methods, seeds=arguments.seeds, extra=arguments.overrides)
    errors = run_jobs(jobs, script=ROOT / "examples" / "train.py", processes=arguments.jobs)
    if errors:
        sys.exit("\n".join(errors))
    sys.stdout.write(report(arguments.output, list(methods), arguments.seeds))


if __name__ == "__main__":
    main()
