"""From configuration to the programs of a run, and the transforms that run them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensordict import NestedKey
from torchrl._utils import logger as torchrl_logger
from torchrl.envs import EnvBase

from lore_torchrl import keys
from lore_torchrl.advisors.base import Describer
from lore_torchrl.configs import ChatAdvisorConfig, EnvConfig, TrainConfig
from lore_torchrl.dreamer.advice import build_advisor
from lore_torchrl.envs.adapter import EnvAdapter, sample_views
from lore_torchrl.sandbox import (
    Limits,
    Program,
    ProgramError,
    ProgramSet,
    ProgramStore,
    Sandbox,
)
from lore_torchrl.sandbox.program import FUNCTIONS, Kind
from lore_torchrl.sandbox.show import program_once
from lore_torchrl.transforms import ProgramFeatures, ProgramSubgoals, ProgressShaping
from lore_torchrl.transforms.program import check_program_view
from lore_torchrl.transforms.subgoals import subgoal_names, subgoals_of


@dataclass
class Programs:
    """The programs of a run.

    Attributes:
        features: Programs of features, or ``None``.
        shaping: What shapes the reward of the environments that train, or ``None``.
        subgoals: Programs of subgoals, or ``None``.
        make_describer: Makes a describer; each transform has its own.
        gamma: Discount of the learner.
    """

    features: ProgramSet | None
    shaping: ProgressShaping | None
    subgoals: ProgramSet | None
    make_describer: Callable[[], Describer]
    gamma: float

    @property
    def observed_keys(self) -> tuple[NestedKey, ...]:
        """Entries that replay keeps with each observation, beside what the agent sees of it."""
        shaped = () if self.shaping is None else (keys.RAW_REWARD,)
        return shaped if self.features is None else (keys.CODE_ID, *shaped)

    def for_evaluation(self) -> Programs | None:
        """Return what evaluation runs: failures there neither count nor retire in training."""
        if self.features is None:
            return None
        return replace(self, features=self.features.for_evaluation(), shaping=None, subgoals=None)

    @property
    def failed(self) -> int:
        """Failures of all programs."""
        return sum(used.failed for programs in self._sets().values() for used in programs.used)

    def append_to(self, env: EnvBase, *, evaluation: bool) -> EnvBase:
        """Return ``env`` with features and, unless it is for ``evaluation``, with shaping."""
        if self.features is not None:
            describer = self.make_describer()
            env = env.append_transform(
                ProgramFeatures(self.features, describer, gamma=self.gamma, learning=not evaluation)
            )
        if self.shaping is not None and not evaluation:
            env = env.append_transform(self.shaping)
        return env

    def name_subgoals(self, describer: Describer) -> Describer:
        """Return ``describer`` with the subgoals of programs beside its own."""
        return describer if self.subgoals is None else ProgramSubgoals(describer, self.subgoals)

    def keep_in(self, path: str | Path) -> None:
        """Add the programs to a file that lacks them, which ``lore.KIND.path`` can name.

        A damaged file stays as it is, with a warning.
        """
        store = ProgramStore(path)
        try:
            known = {(p.kind, p.code_id) for p in store.read()} if store.path.exists() else set()
        except ValueError as error:
            torchrl_logger.warning(f"The programs of this run are not kept: {error}")
            return
        for programs in self._sets().values():
            for program in (used.program for used in programs.used):
                if (program.kind, program.code_id) not in known:
                    store.append(program)

    def stats(self) -> dict[str, float]:
        """Return numbers for the log, by name."""
        values = {}
        if self.features is not None:
            values |= {f"features/{name}": value for name, value in self.features.stats().items()}
        if self.shaping is not None:
            values |= {f"progress/{name}": value for name, value in self.shaping.stats().items()}
        if self.subgoals is not None:
            stats = self.subgoals.stats()
            values |= {f"subgoal/{name}": stats[name] for name in ("run", "failed", "retired")}
        return values

    def _sets(self) -> dict[str, ProgramSet]:
        shaping = None if self.shaping is None else self.shaping.programs
        sets = {"features": self.features, "progress": shaping, "subgoals": self.subgoals}
        return {name: programs for name, programs in sets.items() if programs is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return counts, retirements and bandits."""
        state = {name: programs.state_dict() for name, programs in self._sets().items()}
        if self.shaping is not None:
            state["shaping"] = [self.shaping.episodes, self.shaping.paid]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        for name, programs in self._sets().items():
            programs.load_state_dict(state_dict[name])
        if self.shaping is not None:
            self.shaping.episodes, self.shaping.paid = state_dict.get("shaping", (0, 0.0))


def build_programs(config: TrainConfig, adapter: EnvAdapter) -> Programs | None:
    """Return the programs that a configuration asks for, ``None`` where it asks for none.

    Raises:
        ValueError: If there is no program, or the describer has no ``program_view``.
        ImportError: If the ``sandbox`` extra is not installed.
    """
    c = config.lore
    subgoals = c.subgoal.enabled and c.subgoal.path is not None
    if not c.enabled or not (c.features.enabled or c.progress.enabled or subgoals):
        return None
    gamma = 1.0 - 1.0 / config.dreamer.continuation_horizon

    def make_describer() -> Describer:
        return adapter.make_describer(memory=config.env.memory)

    check_program_view(make_describer())
    features = shaping = None
    if c.features.enabled:
        features = _program_set(
            "features",
            config,
            adapter,
            columns=c.features.columns,
            off_share=c.features.off_share,
            block_episodes=c.features.block_episodes,
        )
    if c.progress.enabled:
        shaping = ProgressShaping(
            _program_set("progress", config, adapter),
            make_describer(),
            gamma=gamma,
            episode_budget=c.progress.episode_budget,
        )
    named = _program_set("subgoals", config, adapter) if subgoals else None
    return Programs(features, shaping, named, make_describer, gamma)


def subgoals_of_run(config: TrainConfig, adapter: EnvAdapter) -> tuple[str, ...]:
    """Return the names of a run's subgoals, of the describer and of programs."""
    path = config.lore.subgoal.path
    describer = adapter.make_describer()
    if path is None:
        return tuple(subgoals_of(describer))
    return subgoal_names(describer, ProgramStore(path).select("subgoals", config.env.id))


def _setting(kind: Kind) -> str:
    return "subgoal" if kind == "subgoals" else kind


def hand_written(kind: Kind, adapter: EnvAdapter, env: str) -> Program:
    """Return an adapter's own program, for the environment of that id.

    Raises:
        ValueError: If it has none of this kind.
    """
    code = getattr(adapter, "programs", {}).get(kind)
    if code is None:
        raise ValueError(
            f"{type(adapter).__name__} has no hand-written {kind} program: give it "
            f"programs[{kind!r}], or, for a run, name a file in lore.{_setting(kind)}.path."
        )
    return Program(kind, code, env=env)


def _tried(program: Program, config: TrainConfig, adapter: EnvAdapter) -> Program:
    """Run a hand-written program once, so that a run without it never begins."""
    [view], _ = sample_views(adapter, steps=1, seed=config.seed, memory=config.env.memory)
    try:
        # A busy machine is no fault of it, nor are too few columns.
        result = Sandbox(Limits(time_s=5.0, most_features=1000)).run(program, view)
    except ProgramError as error:
        raise ValueError(
            f"The hand-written {program.kind} program of {type(adapter).__name__} fails on a first "
            f"observation: {error}"
        ) from error
    return replace(program, checks={"names": list(result)} if isinstance(result, dict) else {})


def _program_set(
    kind: Kind, config: TrainConfig, adapter: EnvAdapter, **settings: Any
) -> ProgramSet:
    c = getattr(config.lore, _setting(kind))
    if c.path is None:
        programs = [_tried(hand_written(kind, adapter, config.env.id), config, adapter)]
    else:
        programs = ProgramStore(c.path).select(kind, config.env.id)
    for program in programs:
        torchrl_logger.info(f"{kind} program {program.code_id} by {program.model}.")
    if kind == "subgoals":
        settings["columns"] = sum(len(subgoal_names(None, [program])) for program in programs)
    most = settings.get("columns", 8)
    return ProgramSet(
        programs,
        limits=Limits(time_s=c.time_limit_s, most_features=most),
        max_failures=c.max_failures,
        seed=config.seed,
        **settings,
    )


def show_program(
    config: Any, env: EnvConfig, adapter: EnvAdapter, advisor: Any
) -> tuple[str, bool]:
    """Ask for a program, check and run it; return the report, and whether there is one.

    Args:
        config: Has ``program`` (its kind), ``save`` (a path or ``None``) and ``seed``.
        env: The environment's settings.
        adapter: Its adapter.
        advisor: Settings of a chat server; of another advisor, or where the server cannot be
            addressed, the report is of the adapter's hand-written program and says so.
    """
    check_program_view(adapter.make_describer())
    if config.program not in FUNCTIONS:
        raise ValueError(f"program={config.program} must be one of {', '.join(FUNCTIONS)}.")
    views, returns = sample_views(adapter, seed=config.seed, memory=env.memory)
    asked, own, reason = None, None, f"{type(advisor).__name__} writes no programs"
    if isinstance(advisor, ChatAdvisorConfig):
        try:
            asked = build_advisor(advisor, planner=None, seed=config.seed)
        except Exception as error:
            reason = f"{error.__cause__ or error}"
    if asked is None:
        try:
            own = hand_written(config.program, adapter, env.id)
        except ValueError as error:
            raise ValueError(f"{error} No model was asked: {reason.rstrip('.')}.") from None
    report, found = asyncio.run(
        program_once(
            config.program,
            views,
            returns,
            env=env.id,
            fields=adapter.make_describer(memory=env.memory).program_fields,
            advisor=asked,
            hand_written=own,
            store=None if config.save is None else ProgramStore(config.save),
        )
    )
    return (report if asked else f"{report}\n\nWhy no model: {reason}"), found
