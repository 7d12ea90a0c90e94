"""Running a grid of methods, experiments and seeds."""

from __future__ import annotations

from pathlib import Path

from lore_torchrl.configs import StudyConfig
from lore_torchrl.experiments.records import read_folder
from lore_torchrl.experiments.report import command_line, write_report
from lore_torchrl.experiments.runs import make_jobs, run_jobs
from lore_torchrl.experiments.summary import Study


def run_study(config: StudyConfig, *, script: Path) -> tuple[list[str], Path | None]:
    """Run what is open, and report on what is finished.

    Finished runs are kept. With ``config.cell`` only that run is made, and there is no
    report: many processes may work at one study so.

    Args:
        config: Methods, experiments, seeds.

    Keyword Args:
        script: Training script that takes Hydra overrides.

    Returns:
        One line for each run that failed, now or before; and the report's page, ``None``
        where nothing is finished, or nothing has logged ``config.metric``.

    Raises:
        ValueError: If the folder keeps a run of this grid that had other overrides.
    """
    output = Path(config.output).resolve()
    jobs = make_jobs(
        output,
        config.experiments,
        config.methods,
        seeds=config.seeds,
        overrides=config.overrides,
    )
    if config.cell is not None:
        chosen = [jobs[config.cell]]
        return run_jobs(chosen, script=script, processes=1, retry=config.retry), None
    errors = run_jobs(jobs, script=script, processes=config.jobs, retry=config.retry)
    if not any(job.state == "done" for job in jobs):
        return errors, None
    # Of this grid alone: the folder may hold runs of a larger one.
    found = {
        (record.experiment, record.method, record.seed): record for record in read_folder(output)
    }
    keys = [(job.experiment, job.method, job.seed) for job in jobs]
    records = [found[key] for key in keys if key in found]
    baseline = config.baseline if config.baseline in {r.method for r in records} else None
    try:
        study = Study(records, baseline, metric=config.metric)
    except ValueError as error:
        # What failed is told as well.
        return [*errors, str(error)], None
    page = write_report(
        output / "report",
        study,
        title=f"Study: {config.name}",
        # Where it wrote to is of no use to others.
        command=[word for word in command_line() if not word.startswith("output=")],
    )
    return errors, page
