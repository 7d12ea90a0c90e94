"""The roots of the scripts that are not a training run."""

from __future__ import annotations

from dataclasses import dataclass

from lore_torchrl.configs.setting import Settings, setting


@dataclass
class StudyConfig(Settings):
    """The root of ``examples/study.py``: methods x experiments x seeds."""

    name: str = setting("study", "Name of the study.")
    experiments: list[str] = setting(lambda: ["doorkey5x5"], "Files of configs/experiment.")
    methods: dict[str, list[str]] = setting(dict, "Hydra overrides of each method by its name.")
    baseline: str = setting("stock", "The method that the others are compared with.")
    metric: str = setting(
        "eval/success", "What methods are compared by, higher is better, such as eval/return."
    )
    references: str | None = setting(
        None,
        "CSV of reference scores for the figures, as benchmarks/reference_scores.py writes it.",
    )
    seeds: int = setting(5, "Seeds 0 to seeds - 1 of every method on every experiment.", ge=1)
    overrides: list[str] = setting(list, "Hydra overrides for every run.")
    experiment_overrides: dict[str, list[str]] = setting(
        dict, "Hydra overrides for the runs of an experiment by its name, before `overrides`."
    )
    jobs: int = setting(2, "Runs side by side on this machine, one CPU thread each.", ge=1)
    retry: bool = setting(False, "Whether what has failed before is run once more.")
    cell: int | None = setting(None, "Number of one cell, without report: for Hydra's launchers.")
    output: str = setting("outputs/study", "Where runs and report go; what is finished is kept.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("experiments", "methods"):
            self.require(len(getattr(self, name)) > 0, name, "name at least one")
        once = len(set(self.experiments)) == len(self.experiments)
        self.require(once, "experiments", "name each once")
        rule = f"it must be one of the methods, {list(self.methods)}"
        self.require(self.baseline in self.methods, "baseline", rule)
        cells = len(self.experiments) * len(self.methods) * self.seeds
        rule = f"this study has the cells 0 to {cells - 1}, or null for all"
        self.require(self.cell is None or 0 <= self.cell < cells, "cell", rule)


@dataclass
class InspectConfig(Settings):
    """The root of the inspector: episodes of a checkpoint, step by step."""

    checkpoint: str = setting("???", "Run folder, its checkpoints folder, or one checkpoint.")
    episodes: int = setting(3, "Held-out episodes to play.", ge=1)
    calls: int = setting(0, "New questions to the run's advisor, at most.", ge=0)
    coefficient: float | None = setting(
        None, "Mixing coefficient, 0 to 1; null lets the bandit draw, as in training."
    )
    seed: int | None = setting(None, "Seed of environments and draws; null is the run's own.")
    deterministic: bool = setting(False, "`true` takes the likeliest action, `false` samples.")
    max_steps: int | None = setting(None, "Longest episode, in steps; null for any.", ge=1)
    trust: list[str] = setting(
        list,
        "What the checkpoint may name besides this package's environments and advisors: import "
        "paths, which run code, and with calls the server, the key's variable, the local model and "
        "its tokenizer.",
    )
    video: str | None = setting(
        "gif", "Or null for none; mp4 needs lore-torchrl[video].", among=("gif", "mp4")
    )
    steps_per_s: float = setting(3.0, "Steps shown in a second of it.", gt=0)
    output: str = setting("outputs/inspect", "Where the video, the timeline and the page go.")
