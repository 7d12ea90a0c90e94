"""docs/metrics.md gives every metric that a run logs one line, and none that no run can log."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import torchrl
from tensordict import TensorDict

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "dreamer"))

from tiny_run import planner, tiny_config  # noqa: E402

from lore_torchrl.configs import (  # noqa: E402
    CallsConfig,
    EvaluationConfig,
    FeaturesConfig,
    GateConfig,
    LoggerConfig,
    LoReConfig,
    LossConfig,
    MixerConfig,
    PlannerConfig,
    PriorNetConfig,
    ProgressConfig,
    SubgoalConfig,
)
from lore_torchrl.dreamer.run import train  # noqa: E402
from lore_torchrl.envs.crafter import Crafter  # noqa: E402
from lore_torchrl.envs.crafter.rules import ACHIEVEMENTS  # noqa: E402
from lore_torchrl.sandbox import Program, ProgramStore  # noqa: E402


def documented() -> list[tuple[list[str], str, str]]:
    """Names, unit and place of each line of the page's table."""
    lines = []
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            assert len(cells) == 4, f"four columns, please: {line}"
            lines.append((re.findall(r"`([^`]+)`", cells[0]), cells[1], cells[3]))
    return lines


def pattern(name: str) -> str:
    return re.sub(
        r"\\\*|<\w+>", r"[\\w.]+", re.escape(name).replace(r"\<", "<").replace(r"\>", ">")
    )


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> set[str]:
    """What a run logs with every part that logs something of its own."""
    folder = tmp_path_factory.mktemp("run")
    code = "def reached(obs):\n    return {'face a wall': obs['front'] == 'wall'}"
    program = Program("subgoals", code, checks={"names": ["face a wall"]})
    ProgramStore(folder / "programs.jsonl").append(program)
    lore = LoReConfig(
        calls=CallsConfig(
            mode="async",
            budget=200,
            cooldown=1,
        ),
        gate=GateConfig(disagreement_weight=0.3, value_weight=0.3, value_source="ensemble"),
        mixer=MixerConfig(action_mask=True),
        prior_net=PriorNetConfig(enabled=True),
        planner=PlannerConfig(
            enabled=True, horizon=1, samples=2, elites=1, iterations=1, dyna_weight=0.1
        ),
        loss=LossConfig(
            prior_weight=0.3,
            multiplier_lr=1e-3,
            bonus_weight=0.1,
            beta_imagine_max=0.25,
        ),
        subgoal=SubgoalConfig(enabled=True, imagine=True, path=str(folder / "programs.jsonl")),
        features=FeaturesConfig(enabled=True),
        progress=ProgressConfig(enabled=True),
    )
    quiet = LoggerConfig(interval=32, progress_bar=False, figures=False, backends=["csv"])
    both = EvaluationConfig(interval=64, episodes=4, actor="both")
    config = tiny_config(folder / "run", lore=lore, logger=quiet, evaluation=both)
    return set(train(config, advisor=planner())) - {"step"}


def test_every_metric_that_a_run_logs_stands_on_the_page(logged):
    known = [pattern(name) for names, _, _ in documented() for name in names]
    unknown = [name for name in sorted(logged) if not any(re.fullmatch(p, name) for p in known)]
    assert len(logged) > 60 and not unknown


def test_a_metric_stands_on_one_line_only(logged):
    lines = [[pattern(name) for name in names] for names, _, _ in documented()]
    for name in logged:
        exact = [names for names, _, _ in documented() if name in names]
        found = [line for line in lines if any(re.fullmatch(p, name) for p in line)]
        assert len(exact) <= 1 and (len(found) == 1 or len(exact) == 1), name


def test_the_page_promises_nothing_that_is_never_logged(logged):
    missing = [
        name
        for names, _, _ in documented()
        for name in names
        if not any(re.fullmatch(pattern(name), found) for found in logged)
    ]
    # These need a failing advisor, another environment, or a part that excludes one of this run.
    rare = {"advice/error_<kind>"}
    elsewhere = ("lore/value_span", "skill/distance", "crafter/", "eval/crafter/")
    assert {name for name in missing if not name.startswith(elsewhere)} <= rare


def test_what_crafter_adds_stands_on_the_page():
    last = TensorDict({"achievements": torch.ones(2, len(ACHIEVEMENTS))}, [2])
    added = {f"eval/{name}" for name in Crafter().summarize_episodes(last)}
    for name in added | {name.removeprefix("eval/") for name in added if "score" not in name}:
        lines = [
            names
            for names, _, _ in documented()
            if any(re.fullmatch(pattern(known), name) for known in names)
        ]
        assert len(lines) == 1, name


def test_each_term_and_scalar_of_the_learner_has_a_line_and_a_unit_of_its_own():
    lines = [line for line in documented() if line[0][0].startswith(("loss/", "learner/", "gate/"))]
    assert len(lines) > 30
    for names, unit, _ in lines:
        assert len(names) == 1 and not re.search(r"[*<]", names[0]), names
        dimensionless = {"learner/lore_multiplier", "learner/lore_temperature"}
        assert unit != "–" or names[0] in dimensionless, names


def test_every_line_names_a_file_that_holds_what_it_names():
    for names, unit, place in documented():
        paths = re.findall(r"`([\w./]+)`", place)
        assert unit and paths, names
        root = ROOT / "src" / "lore_torchrl"
        if place.startswith("TorchRL"):
            root = Path(torchrl.__file__).parent
        texts = [(root / path).read_text() for path in paths]
        for name in names:
            # The part before what stands for many; a group is put before it elsewhere.
            known = re.split(r"[*<]", name)[0]
            tail = known.split("/")[-1] or known
            whole = rf"(?<![A-Za-z]){re.escape(tail)}" + r"(?![A-Za-z])" * (known == name)
            assert any(re.search(whole, text) for text in texts), (name, paths)
