from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from forging import seal_again
from tiny_run import planner, tiny_config
from torchrl.checkpoint import CheckpointError, CheckpointRotation

from lore_torchrl.configs import TrainConfig
from lore_torchrl.dreamer.checkpoint import (
    RunCheckpoint,
    find_checkpoint,
    load_config,
    remove_leftovers,
    set_aside,
    verify,
)
from lore_torchrl.dreamer.run import build_run, train


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints of a small module, the later one first."""
    module = torch.nn.Linear(3, 3)
    rotation = CheckpointRotation(tmp_path / "checkpoints", keep_last=2)
    paths = [
        rotation.save(RunCheckpoint(module=module, facts={"a": 1}), step=step) for step in (1, 2, 3)
    ]
    assert not paths[0].exists(), "rotated away"
    return paths[2], paths[1]


def payload(path):
    return max((f for f in path.rglob("*") if f.is_file()), key=lambda f: "memmap" in f.name)


def test_a_whole_checkpoint_is_found_from_its_run_its_folder_and_itself(saved, tmp_path):
    latest, _ = saved
    for place in (tmp_path, tmp_path / "checkpoints", latest):
        assert find_checkpoint(str(place)) == latest


def cut_off(path):
    file = payload(path)
    file.write_bytes(file.read_bytes()[:-4])


def flip(path):
    file = payload(path)
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(bytes(data))


def write(name, text):
    def damage(path):
        (path / name).write_text(text)

    return damage


def sealed(damage):
    def forged(path):
        damage(path)
        seal_again(path)

    return forged


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, r"memmap has \d+ of \d+ bytes"),
        (flip, "memmap is not what was saved"),
        (lambda path: payload(path).unlink(), "memmap is missing"),
        (write("extra.json", "{}"), "extra.json is not in the checkpoint's seal.json"),
        (lambda path: (path / "seal.json").unlink(), "seal.json is missing"),
        (write("seal.json", "{"), "seal.json cannot be read"),
        (write("seal.json", "[" * 100_000), "seal.json cannot be read"),
        (write("seal.json", '{"format_version": 6, "files": {"a": 3}}'), "seal.json cannot be"),
        (write("seal.json", '{"format_version": 6, "files": []}'), "seal.json cannot be read"),
        (write("seal.json", '{"format_version": 6, "files": {}}'), "json is not in the"),
        (write("seal.json", '{"format_version": 99, "files": {}}'), "format 99, this one reads 6"),
        (write("seal.json", '{"format_version": 1, "files": {}}'), "format 1, this one reads 6"),
        (write("manifest.json", "{}"), "manifest.json has 2 of"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (sealed(write("manifest.json", "{}")), "manifest.json cannot be read"),
        (sealed(write("manifest.json", "{")), "manifest.json cannot be read"),
        (sealed(write("manifest.json", "[]")), "manifest.json cannot be read"),
        (sealed(write("manifest.json", "[" * 100_000)), "manifest.json cannot be read"),
        (sealed(lambda path: (path / "manifest.json").unlink()), "manifest.json cannot be read"),
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_is_offered(saved, damage, message):
    latest, before = saved
    damage(latest)
    for place in (latest, latest.parent, latest.parent.parent):
        with pytest.raises(CheckpointError, match=message) as error:
            find_checkpoint(str(place))
        assert str(latest) in str(error.value) and f"whole: {before}" in str(error.value)
    verify(before)
    # Out of the way of a run that goes on from the one before.
    assert [path.name for path in set_aside(latest.parent, after=2)] == [latest.name]
    assert find_checkpoint(str(latest.parent)) == before


@pytest.mark.parametrize("held", [{"module": torch.nn.Linear(2, 2)}, {"config": {"lr": 1}}])
def test_a_checkpoint_of_another_program_is_no_run(tmp_path, held):
    path = CheckpointRotation(tmp_path, keep_last=1).save(RunCheckpoint(**held), step=1)
    with pytest.raises(CheckpointError, match="no checkpoint of lore_torchrl"):
        load_config(path)


def test_a_configuration_that_is_refused_today_is_told_from_no_run(tmp_path):
    config = asdict(TrainConfig()) | {"total_steps": 0}
    path = CheckpointRotation(tmp_path, keep_last=1).save(RunCheckpoint(config=config), step=1)
    with pytest.raises(CheckpointError, match=r"version cannot use .* total_steps=0"):
        load_config(path)


def test_where_none_is_whole_it_says_so(saved):
    for path in saved:
        cut_off(path)
    with pytest.raises(CheckpointError, match="no whole one"):
        find_checkpoint(str(saved[0]))


def test_later_ones_are_set_aside_and_neither_found_nor_rotated_with(saved, tmp_path):
    folder = tmp_path / "checkpoints"
    rotation = CheckpointRotation(folder, keep_last=2)
    abandoned = tmp_path / "abandoned" / saved[0].name
    for _ in "ab":
        assert set_aside(folder, after=2) == [abandoned]
        assert find_checkpoint(str(tmp_path)) == saved[1]
        assert find_checkpoint(str(abandoned)) == abandoned, "it can still be chosen"
        again = rotation.save(RunCheckpoint(facts={"a": 2}), step=3)
    assert find_checkpoint(str(tmp_path)) == again
    assert len(set_aside(folder, after=-1)) == 2, "a run that starts over"
    assert rotation.save(RunCheckpoint(facts={"a": 3}), step=1).exists()
    assert set_aside(tmp_path / "nowhere", after=0) == []


def test_a_run_refuses_a_damaged_checkpoint_and_goes_on_from_the_offered_one(tmp_path):
    config = tiny_config(tmp_path / "run", checkpoint_interval=48)
    train(config, advisor=planner())
    folder = tmp_path / "run" / "checkpoints"
    latest = find_checkpoint(str(folder))
    assert json.loads((latest / "seal.json").read_text())["files"]
    cut_off(latest)
    with pytest.raises(CheckpointError, match="whole: ") as error:
        build_run(tiny_config(tmp_path / "run", resume=str(folder)), advisor=planner())
    offered = str(error.value).rsplit("whole: ", 1)[1]
    shutil.rmtree(latest)
    resumed = tiny_config(tmp_path / "run", resume=offered)
    assert train(resumed, advisor=planner())["eval/success"] >= 0.0


def files_of(folder):
    """Every file below a folder, by name."""
    found = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in found}


@pytest.mark.slow
def test_the_same_run_twice_leaves_the_same_files(tmp_path, monkeypatch):
    kept = []
    for name in "ab":
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        config = tiny_config(Path("run"), total_steps=64, checkpoint_interval=32)
        train(config, advisor=planner())
        kept.append(files_of(Path("run/checkpoints")))
    first, second = kept
    assert first.keys() == second.keys() and len(first) > 500
    differing = {name for name in first if first[name] != second[name]}
    clock = {name for name in first if re.search(r"trainer_module.metrics/state.json|seal", name)}
    assert differing <= clock, "only the seconds of training, and the seal over them"


class Dies:
    """A part of a checkpoint in whose saving the process is killed."""

    def state_dict(self):
        os._exit(9)

    def load_state_dict(self, state):
        raise AssertionError("it was never saved")


class DiesInPrune(CheckpointRotation):
    """A rotation in which the process is killed once the checkpoint has its name."""

    def prune(self):
        os._exit(9)


class DiesInRemoval(CheckpointRotation):
    """A rotation in which the process is killed while the oldest checkpoint is deleted."""

    def _remove_atomically(self, path):
        path.rename(path.with_name(f".{path.name}.delete-0123"))
        os._exit(9)


def killed(rotation, step, **parts):
    """Save in a process that dies of it."""
    checkpoint = RunCheckpoint(facts={"a": step}, module=torch.nn.Linear(3, 3), **parts)
    process = multiprocessing.get_context("fork").Process(
        target=rotation.save, args=(checkpoint,), kwargs={"step": step}
    )
    process.start()
    process.join(30)
    assert process.exitcode == 9


def test_a_save_killed_at_any_time_leaves_a_whole_checkpoint_and_nothing_for_ever(saved, tmp_path):
    latest, before = saved
    folder = latest.parent
    killed(CheckpointRotation(folder, keep_last=2), 4, zz=Dies())
    assert find_checkpoint(str(folder)) == latest
    killed(DiesInPrune(folder, keep_last=2), 5)
    assert find_checkpoint(str(folder)).name.endswith("5")
    killed(DiesInRemoval(folder, keep_last=2), 6)
    assert find_checkpoint(str(folder)).name.endswith("6")
    # Between the two moves that replace a checkpoint by one of the same step.
    replaced = folder / f".{before.name}.backup-0123"
    whole = shutil.copytree(latest, replaced)
    assert len(list(folder.glob(".*"))) == 3
    remove_leftovers(folder)
    assert not list(folder.glob(".*")) and not whole.exists()
    verify(folder / before.name)


def test_a_run_begins_by_removing_what_killed_saves_left(tmp_path):
    config = tiny_config(tmp_path / "run")
    stage = tmp_path / "run" / "checkpoints" / ".checkpoint-000000000064.stage-0123"
    stage.mkdir(parents=True)
    build_run(config, advisor=planner()).close()
    assert not stage.exists()
