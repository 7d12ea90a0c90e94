"""Settings of the advisors that need no server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lore_torchrl.configs.check import check


@dataclass
class ScriptedAdvisorConfig:
    """The embedded planner as advisor. Documented in ``configs/advisor/scripted.yaml``."""

    _target_: str = "lore_torchrl.advisors.scripted.ScriptedAdvisor"
    competence: float = 1.0
    sharpness: float = 3.0
    confidence: float = 1.0

    def __post_init__(self) -> None:
        for name, possible, rule in (
            ("competence", -1 <= self.competence <= 1, "1 is best, 0 random, -1 worst action"),
            ("sharpness", self.sharpness > 0, "it must be positive"),
            ("confidence", 0 <= self.confidence <= 1, "it must lie in [0, 1]"),
        ):
            check(possible, f"advisor.{name}", getattr(self, name), rule)


@dataclass
class StaleAdvisorConfig:
    """Advice that comes late. Documented in ``configs/advisor/stale.yaml``."""

    _target_: str = "lore_torchrl.advisors.flawed.StaleAdvisor"
    lag: int = 1
    advisor: Any = field(default_factory=ScriptedAdvisorConfig)

    def __post_init__(self) -> None:
        check(self.lag >= 1, "advisor.lag", self.lag, "it must be at least 1")


@dataclass
class TruncatedAdvisorConfig:
    """Advice that leaves actions out. Documented in ``configs/advisor/truncated.yaml``."""

    _target_: str = "lore_torchrl.advisors.flawed.TruncatedAdvisor"
    keep: float = 0.5
    advisor: Any = field(default_factory=ScriptedAdvisorConfig)

    def __post_init__(self) -> None:
        check(0 <= self.keep <= 1, "advisor.keep", self.keep, "it must lie in [0, 1]")


@dataclass
class TurningAdvisorConfig:
    """A good advisor that turns. Documented in ``configs/advisor/turns.yaml``."""

    _target_: str = "lore_torchrl.advisors.flawed.TurningAdvisor"
    turn_after: int | None = None
    before: Any = field(default_factory=ScriptedAdvisorConfig)
    after: Any = field(default_factory=lambda: ScriptedAdvisorConfig(competence=-1.0))

    def __post_init__(self) -> None:
        possible = self.turn_after is None or self.turn_after >= 0
        check(possible, "advisor.turn_after", self.turn_after, "it must not be negative, or null")


@dataclass
class RecordedAdvisorConfig:
    """Answers from a file. Documented in ``configs/advisor/recorded.yaml``."""

    _target_: str = "lore_torchrl.advisors.recorded.RecordedAdvisor"
    path: str = "???"
    missing: str | None = None

    def __post_init__(self) -> None:
        check(
            self.missing in ("error", "mask", None),
            "advisor.missing",
            self.missing,
            "a question that is not in the recording stops the run (error) or goes without "
            "advice (mask); null chooses by the kind of recording",
        )


@dataclass
class LocalAdvisorConfig:
    """A language model in this process. Documented in ``configs/advisor/local.yaml``."""

    _target_: str = "lore_torchrl.advisors.local.LocalAdvisor"
    model: str = "???"
    tokenizer: str | None = None
    device: str | None = None
    dtype: str | None = None
    prompt: str | None = None
    chat: bool | None = None
    length_normalised: bool = False
    max_tokens: int | None = None
    truncate: bool = False
    max_sequences: int = 64

    def __post_init__(self) -> None:
        check(
            self.max_tokens is None or self.max_tokens >= 2,
            "advisor.max_tokens",
            self.max_tokens,
            "it must hold a prompt and an action, or be null for what the model reads",
        )
        check(
            self.max_sequences >= 1,
            "advisor.max_sequences",
            self.max_sequences,
            "it must be at least 1",
        )
