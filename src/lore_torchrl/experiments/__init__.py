"""Many runs: starting them, and what they say together."""

from __future__ import annotations

from lore_torchrl.experiments.runs import Job, run_jobs
from lore_torchrl.experiments.statistics import (
    area_under_curve,
    bootstrap_interval,
    format_score,
    interquartile_mean,
    ratio_interval,
)

__all__ = [
    "Job",
    "area_under_curve",
    "bootstrap_interval",
    "format_score",
    "interquartile_mean",
    "ratio_interval",
    "run_jobs",
]
