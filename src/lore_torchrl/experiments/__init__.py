"""Many runs: starting them, and what they say together."""

from __future__ import annotations

from lore_torchrl.experiments.records import Record, read_csv, read_folder, read_wandb, write_csv
from lore_torchrl.experiments.report import write_report
from lore_torchrl.experiments.runs import Job, make_jobs, run_jobs
from lore_torchrl.experiments.statistics import (
    area_under_curve,
    bootstrap_interval,
    difference_interval,
    format_score,
    interquartile_mean,
    paired_ratios,
    performance_profile,
    probability_of_improvement,
    ratio_interval,
    stratified_interval,
)
from lore_torchrl.experiments.study import run_study
from lore_torchrl.experiments.summary import Study, Table

__all__ = [
    "Job",
    "Record",
    "Study",
    "Table",
    "area_under_curve",
    "bootstrap_interval",
    "difference_interval",
    "format_score",
    "interquartile_mean",
    "make_jobs",
    "paired_ratios",
    "performance_profile",
    "probability_of_improvement",
    "ratio_interval",
    "read_csv",
    "read_folder",
    "read_wandb",
    "run_jobs",
    "run_study",
    "stratified_interval",
    "write_csv",
    "write_report",
]
