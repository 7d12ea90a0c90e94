"""Many runs: starting them, reading them, and comparing them."""

from __future__ import annotations

from lore_torchrl.experiments.launch import Job, make_jobs, run_jobs, run_study
from lore_torchrl.experiments.records import (
    Record,
    merge,
    read_csv,
    read_runs,
    read_wandb,
    write_csv,
)
from lore_torchrl.experiments.report import command_line, write_report
from lore_torchrl.experiments.statistics import (
    bootstrap,
    interquartile_mean,
    normalized_auc,
    performance_profile,
    probability_of_improvement,
)
from lore_torchrl.experiments.study import Study, Table, advice_sources

__all__ = [
    "Job",
    "Record",
    "Study",
    "Table",
    "advice_sources",
    "bootstrap",
    "command_line",
    "interquartile_mean",
    "make_jobs",
    "merge",
    "normalized_auc",
    "performance_profile",
    "probability_of_improvement",
    "read_csv",
    "read_runs",
    "read_wandb",
    "run_jobs",
    "run_study",
    "write_csv",
    "write_report",
]
