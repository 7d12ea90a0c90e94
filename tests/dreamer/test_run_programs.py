"""Programs in a run: what replay keeps, what the learner reads, what is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from tiny_run import planner, tiny_config, untimed
from torchrl.checkpoint import CheckpointError

from lore_torchrl import keys
from lore_torchrl.advisors.base import Advice
from lore_torchrl.configs import (
    EnvConfig,
    FeaturesConfig,
    LoReConfig,
    ProgressConfig,
    ScriptedAdvisorConfig,
    SubgoalConfig,
)
from lore_torchrl.control import AdviceBandit
from lore_torchrl.control.observer import AdviceObserver
from lore_torchrl.dreamer.acting import adapter_of, build_acting_env
from lore_torchrl.dreamer.evaluation import evaluate
from lore_torchrl.dreamer.hooks import MetricsHook
from lore_torchrl.dreamer.logging import read_metrics
from lore_torchrl.dreamer.programs import (
    build_programs,
    hand_written,
    show_program,
    subgoals_of_run,
)
from lore_torchrl.dreamer.run import build_run, train
from lore_torchrl.envs.adapter import program_sources, sample_views
from lore_torchrl.envs.batch import close_env
from lore_torchrl.envs.crafter import Crafter
from lore_torchrl.envs.finance import FinancialRegimes
from lore_torchrl.envs.frozen_lake import FrozenLake
from lore_torchrl.envs.minigrid import MiniGrid
from lore_torchrl.envs.pendulum import Pendulum
from lore_torchrl.envs.snake import Snake
from lore_torchrl.sandbox import Program, ProgramStore, Sandbox, check_program, judged

pytest.importorskip("pydantic_monty")

RECORDING = Path(__file__).parents[2] / "recordings" / "programs_llm.jsonl"
BOTH = LoReConfig(
    features=FeaturesConfig(enabled=True, block_episodes=1),
    progress=ProgressConfig(enabled=True),
)


def collected(tmp_path, lore: LoReConfig):
    run = build_run(tiny_config(tmp_path, lore=lore), advisor=planner())
    batch = next(iter(run.collector)).clone()
    run.replay_hook.extend(batch)
    records = run.replay_hook.replay[0].storage[:]
    run.close()
    return batch, records


def test_off_by_default_nothing_of_it_is_there(tmp_path):
    assert build_programs(tiny_config(tmp_path), MiniGrid("MiniGrid-DoorKey-5x5-v0")) is None
    batch, records = collected(tmp_path, LoReConfig())
    names = {*batch["next"].keys(), *records["next"].keys()}
    assert not names & {*keys.FEATURE_KEYS, keys.RAW_REWARD}


def test_replay_keeps_the_features_and_the_shaped_reward(tmp_path):
    batch, records = collected(tmp_path, BOTH)
    shaping = batch["next", "reward"] - batch["next", keys.RAW_REWARD]
    assert shaping.abs().sum() > 0
    stored = records["next"]
    assert stored[keys.FEATURES].shape[1:] == (8,) and stored[keys.FEATURES_MASK].any()
    # The first record is that of the reset.
    torch.testing.assert_close(stored["reward"][1:9], batch["next", "reward"][0, :8])
    torch.testing.assert_close(stored[keys.FEATURES][0], batch[keys.FEATURES][0, 0])


def test_a_run_logs_raw_returns_and_is_repeated_bitwise(tmp_path):
    rows = []
    for name in ("first", "second"):
        config = tiny_config(tmp_path / name, lore=BOTH)
        train(config, advisor=planner())
        rows.append(read_metrics(tmp_path / name))
    clock = ("time/", "advice/latency")
    plain = [
        [{k: v for k, v in row.items() if not k.startswith(clock)} for row in one] for one in rows
    ]
    assert plain[0] == plain[1]
    last = rows[0][-2] | rows[0][-1]
    assert last["features/run"] > 0 and last["progress/shaping_paid"] > 0
    # MiniGrid's own reward lies in [0, 1]: a shaped one would be below.
    returns = [row["train/return"] for row in rows[0] if "train/return" in row]
    assert returns and all(0 <= value <= 1 for value in returns)


def test_failures_in_evaluation_are_counted_and_retire_nothing_in_training(tmp_path):
    path = tmp_path / "programs.jsonl"
    code = "def compute_features(obs):\n    return {'x': 1 // 0}\n"
    ProgramStore(path).append(Program("features", code, env="MiniGrid-DoorKey-5x5-v0"))
    lore = LoReConfig(features=FeaturesConfig(enabled=True, path=str(path), max_failures=3))
    config = tiny_config(tmp_path / "run", lore=lore)
    adapter = adapter_of(config.env)
    run = build_run(config, advisor=planner())
    try:
        programs = build_programs(config, adapter)
        before = programs.state_dict()
        for _ in range(2):
            outcome = evaluate(config, adapter, run.agent, programs=programs)
            assert outcome["program_failures"] == 3
        assert programs.state_dict() == before
    finally:
        run.close()


def test_a_resumed_run_has_its_programs_in_their_order_and_further_ones_after_them(tmp_path):
    three, two, one = sorted(  # not in the order of their names
        (
            Program("features", f"def compute_features(obs):\n    return {{'x': {number}.0}}\n")
            for number in (1, 2, 3)
        ),
        key=lambda program: program.code_id,
    )
    path = tmp_path / "programs.jsonl"

    def write(*programs):
        path.unlink(missing_ok=True)
        for program in programs:
            ProgramStore(path).append(replace(program, checks={"names": ["x"]}))

    lore = LoReConfig(features=FeaturesConfig(enabled=True, path=str(path)))
    config = tiny_config(tmp_path / "run", lore=lore, total_steps=32, checkpoint_interval=32)
    write(one, two)
    train(config, advisor=planner())
    resumed = replace(config, total_steps=64, resume=config.output_dir)
    write(two, one)
    with pytest.raises(CheckpointError, match="Keep those of the file and their order"):
        build_run(resumed, advisor=planner())
    write(one, two, three)
    train(resumed, advisor=planner())
    assert read_metrics(config.output_dir)[-1]["step"] == 64
    kept = ProgramStore(tmp_path / "run" / "programs.jsonl").read()
    assert [program.code_id for program in kept] == [p.code_id for p in (one, two, three)]


def test_a_resumed_run_begins_without_what_was_retired(tmp_path):
    path = tmp_path / "programs.jsonl"
    for body in ("1 / 0", "obs['row'] / 10"):
        ProgramStore(path).append(Program("progress", f"def progress(obs):\n    return {body}\n"))
    lore = LoReConfig(progress=ProgressConfig(enabled=True, path=str(path), max_failures=3))
    config = tiny_config(tmp_path / "run", lore=lore, total_steps=32, checkpoint_interval=32)
    train(config, advisor=planner())
    run = build_run(replace(config, total_steps=64, resume=config.output_dir), advisor=planner())
    batch = next(iter(run.collector)).clone()
    run.close()
    assert (batch["next", "reward"] != batch["next", keys.RAW_REWARD]).any()


def test_a_resumed_run_takes_no_further_subgoals(tmp_path):
    path = tmp_path / "programs.jsonl"
    lore = LoReConfig(subgoal=SubgoalConfig(enabled=True, path=str(path)))
    config = tiny_config(tmp_path / "run", lore=lore, total_steps=32, checkpoint_interval=32)
    for name in ("face a wall", "face a door"):
        code = f"def reached(obs):\n    return {{{name!r}: obs['front'] == {name.split()[-1]!r}}}\n"
        ProgramStore(path).append(Program("subgoals", code, checks={"names": [name]}))
        if name == "face a wall":
            train(config, advisor=planner())
    with pytest.raises(CheckpointError, match="add none, or start a new run"):
        build_run(replace(config, total_steps=64, resume=config.output_dir), advisor=planner())


def test_a_file_that_lacks_its_last_end_of_line_takes_further_programs(tmp_path):
    store = ProgramStore(tmp_path / "programs.jsonl")
    first, second = (
        Program("progress", f"def progress(obs):\n    return {n} / 4\n") for n in (1, 2)
    )
    store.append(first)
    store.path.write_text(store.path.read_text().rstrip("\n"))
    for program in (second, first):
        store.append(program)
    assert store.read() == [first, second, first]
    assert store.select("progress", "any") == [first, second], "in their order"


def test_a_run_can_be_repeated_from_the_programs_in_its_folder(tmp_path):
    rows = []
    for name, path in (("first", None), ("again", str(tmp_path / "first" / "programs.jsonl"))):
        lore = LoReConfig(
            features=replace(BOTH.features, path=path), progress=replace(BOTH.progress, path=path)
        )
        config = tiny_config(tmp_path / name, lore=lore, total_steps=64)
        train(config, advisor=planner())
        rows.append(untimed(read_metrics(config.output_dir)))
    assert rows[0] == rows[1]
    files = [(tmp_path / name / "programs.jsonl").read_text() for name in ("first", "again")]
    assert files[0] == files[1] and files[0].count("\n") == 2


def test_a_resumed_run_goes_on_where_its_file_of_programs_is_damaged(tmp_path, caplog):
    path = tmp_path / "programs.jsonl"
    path.write_text('{"kind": "progress", "co')
    programs = build_programs(tiny_config(tmp_path, lore=BOTH), MiniGrid("MiniGrid-DoorKey-5x5-v0"))
    with caplog.at_level("WARNING", logger="torchrl"):
        programs.keep_in(path)
    assert "not kept" in caplog.text and "line 1 holds no program" in caplog.text
    assert path.read_text() == '{"kind": "progress", "co'


def test_a_run_that_replaces_another_keeps_none_of_its_programs(tmp_path):
    kept, own = tmp_path / "run" / "programs.jsonl", tmp_path / "own.jsonl"
    programs = [
        Program("progress", f"def progress(obs):\n    return {n} / 4\n", checks={"names": ["x"]})
        for n in (1, 2)
    ]
    for path, first in ((own, programs[0]), (kept, programs[1])):
        ProgramStore(path).append(first)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 32}\n')
    for path, found in ((kept, programs[1:]), (own, programs[:1])):
        lore = LoReConfig(progress=replace(BOTH.progress, path=str(path)))
        build_run(tiny_config(tmp_path / "run", lore=lore), advisor=planner()).close()
        assert ProgramStore(kept).read() == found
    # The second start, which has nothing to keep, loses nothing.
    assert (tmp_path / "run" / "metrics.replaced.jsonl").read_text() == '{"step": 32}\n'


def test_a_resumed_run_goes_on_counting_what_was_paid_for_progress(tmp_path):
    config, adapter = tiny_config(tmp_path, lore=BOTH), MiniGrid("MiniGrid-DoorKey-5x5-v0")
    first, second = (build_programs(config, adapter) for _ in range(2))
    first.shaping.episodes, first.shaping.paid = 4, 2.0
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.stats()["progress/shaping_paid"] == 0.5


def test_what_measures_an_agent_reads_the_raw_reward():
    steps = {"reward": -torch.ones(1, 2, 1), keys.RAW_REWARD: torch.ones(1, 2, 1)}
    steps |= {"done": torch.tensor([[[False], [True]]]), "success": torch.zeros(1, 2, 1).bool()}
    steps["step_count"] = torch.tensor([[[1], [2]]])
    batch = TensorDict({"next": TensorDict(steps, [1, 2])}, [1, 2])
    batch[keys.KL], batch[keys.COEFFICIENT] = torch.zeros(1, 2, 1), torch.zeros(1, 2, 1)
    hook = MetricsHook(None, interval=1, num_envs=1, updates=lambda: 0)
    hook.collected(batch)
    assert hook._window["train/return"] == [2.0]
    bandit = AdviceBandit()
    AdviceObserver(bandit)(batch)
    assert bandit.high == 2.0 and bandit.low == 0.0
    assert keys.raw_reward(batch["next"].exclude(keys.RAW_REWARD)).sum() == -2


@pytest.mark.parametrize("kind", ["features", "progress", "subgoals"])
def test_hand_written_programs_pass_their_checks(kind):
    for adapter, steps in (
        (MiniGrid("MiniGrid-DoorKey-6x6-v0"), 150),
        (Crafter(area=(16, 16)), 60),
        (FrozenLake(), 100),
        (Snake(), 100),
        (Snake(poison=True), 100),
        (Pendulum(), 100),
        (FinancialRegimes(), 100),
    ):
        views, returns = sample_views(adapter, steps=steps)
        program = hand_written(kind, adapter, "one")
        assert program.model == "hand-written" and program.env == "one"
        assert check_program(program, views, returns=returns)["views"] == len(views)
    setting = {"subgoals": "subgoal"}.get(kind, kind)
    with pytest.raises(ValueError, match=rf"no hand-written {kind}.* lore\.{setting}\.path"):
        hand_written(kind, object(), "")


@pytest.mark.parametrize(
    ("kind", "function", "message"),
    [
        ("progress", "def progress(obs):\n    return math.pi / 4", "name 'math' is not defined"),
        ("progress", "def advance(obs):\n    return 0.5", "name 'progress' is not defined"),
        ("features", "def compute_features(obs):\n    return {}", "at least 1"),
    ],
)
def test_a_hand_written_program_that_fails_at_once_begins_no_run(tmp_path, kind, function, message):
    adapter = MiniGrid("MiniGrid-DoorKey-5x5-v0")
    adapter.programs = adapter.programs | {kind: function}
    with pytest.raises(
        ValueError, match=rf"(?s)hand-written {kind} program of MiniGrid.*{message}"
    ):
        build_programs(tiny_config(tmp_path, lore=BOTH), adapter)


def test_where_no_program_can_be_had_the_reason_is_told():
    adapter = MiniGrid("MiniGrid-DoorKey-5x5-v0")
    adapter.programs = {}
    settings = SimpleNamespace(program="progress", save=None, seed=0)
    message = (
        "no hand-written progress.* No model was asked: ScriptedAdvisorConfig writes no programs"
    )
    with pytest.raises(ValueError, match=message):
        show_program(settings, EnvConfig(), adapter, ScriptedAdvisorConfig())


def test_hand_written_features_need_their_columns(tmp_path):
    lore = LoReConfig(features=FeaturesConfig(enabled=True, columns=4))
    config = tiny_config(tmp_path, lore=lore)
    with pytest.raises(ValueError, match=r"needs 8 of 4 free columns: raise lore\.features\.col"):
        build_programs(config, adapter_of(config.env))


def test_functions_inside_others_are_programs():
    def progress(obs):
        return 0.25

    source = program_sources(progress=progress)["progress"]
    assert Sandbox().run(Program("progress", source), {}) == 0.25


@pytest.mark.parametrize(
    "program", ProgramStore(RECORDING).read(), ids=lambda p: f"{p.env}-{p.kind}"
)
def test_recorded_programs_run_as_recorded(program):
    adapter = MiniGrid(program.env)
    views, _ = sample_views(adapter, steps=60, memory="DoorKey" not in program.env)
    again, failure = judged(program, views)
    assert (failure is None) == program.accepted
    assert again.checks.get("names") == program.checks.get("names")


def test_a_run_has_the_subgoals_of_a_program_too(tmp_path):
    code = "def reached(obs):\n    return {'face a wall': obs['front'] == 'wall'}"
    adapter = MiniGrid("MiniGrid-DoorKey-5x5-v0")
    program, failure = judged(Program("subgoals", code), sample_views(adapter, steps=60)[0])
    assert failure is None
    path = tmp_path / "mine.jsonl"
    ProgramStore(path).append(program)
    lore = LoReConfig(subgoal=SubgoalConfig(enabled=True, condition=True, path=str(path)))
    run = build_run(tiny_config(tmp_path / "run", lore=lore), advisor=_Named("face a wall"))
    batch = next(iter(run.collector)).clone()
    names = subgoals_of_run(run.config, adapter)
    # An evaluation is of this agent, whatever is written into the file meanwhile.
    ProgramStore(path).append(replace(program, code=code.replace("a wall", "a wall now")))
    env = build_acting_env(run.config, adapter, run.agent, num_envs=1, evaluation=True)
    assert env.rollout(2, run.agent.policy())[keys.SUBGOAL].shape[-1] == len(names)
    close_env(env)
    run.close()
    known = adapter.make_describer().subgoals
    assert names == (*known, "face a wall")
    at = batch[keys.SUBGOAL][..., -1], batch["next", keys.REACHED][..., -1]
    assert at[0].any() and at[1].any() and not batch[keys.SUBGOAL][..., :-1].any()
    paid = batch["next", "reward"] - batch["next", keys.RAW_REWARD]
    assert (paid > 0).any() and not paid[~(at[1] > 0)].any()
    assert batch[keys.SUBGOAL].shape[-1] == len(names)


class _Named:
    """Names one subgoal in every answer, if the question allows it."""

    def __init__(self, name):
        self.name = name

    async def advise(self, requests):
        assert all(self.name in request.subgoals for request in requests)
        return [Advice((0.0,) * len(r.actions), subgoal=self.name) for r in requests]


def test_a_run_takes_its_programs_from_a_recording(tmp_path):
    config = tiny_config(
        tmp_path,
        env=EnvConfig(id="MiniGrid-DoorKey-8x8-v0"),
        lore=LoReConfig(progress=ProgressConfig(enabled=True, path=str(RECORDING))),
    )
    programs = build_programs(config, adapter_of(config.env))
    [used] = programs.shaping.programs.used
    assert used.program.model == "general-purpose language model" and programs.features is None
    rows = [json.loads(line) for line in RECORDING.read_text().splitlines()]
    assert used.program.code_id in {row["code_id"] for row in rows}
    config.env.id = "MiniGrid-DoorKey-5x5-v0"
    with pytest.raises(ValueError, match="holds no accepted progress program"):
        build_programs(config, adapter_of(config.env))


def test_a_run_from_recorded_programs_is_the_run_with_the_programs(tmp_path):
    first, _ = collected(tmp_path / "first", BOTH)
    adapter, path = MiniGrid("MiniGrid-DoorKey-5x5-v0"), str(tmp_path / "recorded.jsonl")
    views, _ = sample_views(adapter, steps=60)
    for kind in ("features", "progress"):
        program, failure = judged(hand_written(kind, adapter, ""), views)  # without a score yet
        assert failure is None
        ProgramStore(path).append(program)
    recorded = LoReConfig(
        features=replace(BOTH.features, path=path), progress=replace(BOTH.progress, path=path)
    )
    again, _ = collected(tmp_path / "again", recorded)
    for key in ("reward", *keys.FEATURE_KEYS):
        assert torch.equal(first["next", key], again["next", key])
    assert first["next", keys.FEATURES].any()
