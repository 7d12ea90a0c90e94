"""Settings of the inspector."""

from __future__ import annotations

from dataclasses import dataclass, field

from lore_torchrl.configs.check import check


@dataclass
class InspectConfig:
    """The root of ``examples/inspect_run.py``. Documented in ``configs/inspect.yaml``."""

    checkpoint: str = "???"
    episodes: int = 3
    calls: int = 0
    coefficient: float | None = None
    seed: int | None = None
    deterministic: bool = False
    max_steps: int | None = None
    trust: list[str] = field(default_factory=list)
    video: str | None = "gif"
    steps_per_s: float = 3.0
    output: str = "outputs/inspect"

    def __post_init__(self) -> None:
        check(self.episodes >= 1, "episodes", self.episodes, "it must be positive")
        check(self.calls >= 0, "calls", self.calls, "it must not be negative")
        rule = "it must be positive, or null for whole episodes"
        check(self.max_steps is None or self.max_steps >= 1, "max_steps", self.max_steps, rule)
        check(self.video in (None, "gif", "mp4"), "video", self.video, "gif, mp4 or null for none")
        check(self.steps_per_s > 0, "steps_per_s", self.steps_per_s, "it must be positive")
