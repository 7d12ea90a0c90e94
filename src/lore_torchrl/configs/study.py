"""Settings of a study: many runs and what is told about them."""

from __future__ import annotations

from dataclasses import dataclass, field

from lore_torchrl.configs.check import check


@dataclass
class StudyConfig:
    """The root of ``examples/study.py``. Documented in ``configs/study.yaml``."""

    name: str = "study"
    experiments: list[str] = field(default_factory=lambda: ["doorkey5x5"])
    # Hydra overrides of each method by its name.
    methods: dict[str, list[str]] = field(default_factory=dict)
    # The method that the others are compared with.
    baseline: str = "stock"
    # What they are compared by.
    metric: str = "eval/success"
    seeds: int = 5
    overrides: list[str] = field(default_factory=list)
    jobs: int = 2
    retry: bool = False
    cell: int | None = None
    output: str = "outputs/study"

    def __post_init__(self) -> None:
        check(len(self.experiments) > 0, "experiments", self.experiments, "name at least one")
        check(len(self.methods) > 0, "methods", self.methods, "name at least one")
        rule = f"it must be one of the methods, {list(self.methods)}"
        check(self.baseline in self.methods, "baseline", self.baseline, rule)
        for name in ("seeds", "jobs"):
            value = getattr(self, name)
            check(value >= 1, name, value, "it must be positive")
        cells = len(self.experiments) * len(self.methods) * self.seeds
        rule = f"this study has the cells 0 to {cells - 1}, or null for all"
        check(self.cell is None or 0 <= self.cell < cells, "cell", self.cell, rule)
