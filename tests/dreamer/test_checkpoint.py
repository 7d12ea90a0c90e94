from __future__ import annotations

import json
import shutil

import pytest
import torch
from tiny_run import planner, tiny_config
from torchrl.checkpoint import Checkpoint, CheckpointError

from lore_torchrl.dreamer.checkpoint import (
    SealedRotation,
    find_checkpoint,
    load_config,
    set_aside,
    verify,
)
from lore_torchrl.dreamer.run import build_run, train


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints of a small module, the later one first."""
    module = torch.nn.Linear(3, 3)
    rotation = SealedRotation(tmp_path / "checkpoints", keep_last=2)
    paths = [
        rotation.save(Checkpoint(module=module, facts={"a": 1}), step=step) for step in (1, 2, 3)
    ]
    assert not paths[0].exists(), "rotated away"
    return paths[2], paths[1]


def payload(path):
    return max((f for f in path.rglob("*") if f.is_file()), key=lambda f: "memmap" in f.name)


def test_a_whole_checkpoint_is_found_from_its_run_its_folder_and_itself(saved, tmp_path):
    latest, _ = saved
    for place in (tmp_path, tmp_path / "checkpoints", latest):
        assert find_checkpoint(str(place)) == latest


def test_one_without_a_seal_is_whole_too(saved):
    latest, _ = saved
    (latest / "seal.json").unlink()
    assert find_checkpoint(str(latest)) == latest


def cut_off(path):
    file = payload(path)
    file.write_bytes(file.read_bytes()[:-4])


def flip(path):
    file = payload(path)
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, "bytes"),
        (flip, "not what was saved"),
        (lambda path: payload(path).unlink(), "is missing"),
        (lambda path: (path / "seal.json").write_text("{"), "seal cannot be read"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest"),
        (lambda path: (path / "manifest.json").write_text("{}"), "TorchRL checkpoint"),
        (lambda path: (path / "manifest.json").write_text(""), "manifest"),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest is missing or cannot"),
        (lambda path: (path / "manifest.json").unlink(), "manifest is missing or cannot"),
        (
            lambda path: (path / "seal.json").write_text(
                '{"format_version": 1, "files": {"a": 3}}'
            ),
            "seal cannot be read",
        ),
        (
            lambda path: (path / "seal.json").write_text('{"format_version": 1, "files": []}'),
            "seal cannot be read",
        ),
        (
            lambda path: (path / "seal.json").write_text('{"format_version": 99, "files": {}}'),
            "newer lore_torchrl",
        ),
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_is_offered(saved, damage, message):
    latest, before = saved
    damage(latest)
    for place in (latest, latest.parent, latest.parent.parent):
        with pytest.raises(CheckpointError, match=message) as error:
            find_checkpoint(str(place))
        assert str(latest) in str(error.value) and f"resume={before}" in str(error.value)
    verify(before)
    # Out of the way of a run that goes on from the one before.
    assert [path.name for path in set_aside(latest.parent, after=2)] == [latest.name]
    assert find_checkpoint(str(latest.parent)) == before


@pytest.mark.parametrize("held", [{"module": torch.nn.Linear(2, 2)}, {"config": {"lr": 1}}])
def test_a_checkpoint_of_another_program_is_no_run(tmp_path, held):
    path = SealedRotation(tmp_path, keep_last=1).save(Checkpoint(**held), step=1)
    with pytest.raises(CheckpointError, match="no checkpoint of lore_torchrl"):
        load_config(path)


def test_where_none_is_whole_it_says_so(saved):
    for path in saved:
        cut_off(path)
    with pytest.raises(CheckpointError, match="no whole one"):
        find_checkpoint(str(saved[0]))


def test_later_ones_are_set_aside_and_neither_found_nor_rotated_with(saved, tmp_path):
    folder = tmp_path / "checkpoints"
    rotation = SealedRotation(folder, keep_last=2)
    abandoned = tmp_path / "abandoned" / saved[0].name
    for _ in "ab":
        assert set_aside(folder, after=2) == [abandoned]
        assert find_checkpoint(str(tmp_path)) == saved[1]
        assert find_checkpoint(str(abandoned)) == abandoned, "it can still be chosen"
        again = rotation.save(Checkpoint(facts={"a": 2}), step=3)
    assert find_checkpoint(str(tmp_path)) == again
    assert len(set_aside(folder, after=-1)) == 2, "a run that begins anew"
    assert rotation.save(Checkpoint(facts={"a": 3}), step=1).exists()
    assert set_aside(tmp_path / "nowhere", after=0) == []


def test_a_run_refuses_a_damaged_checkpoint_and_goes_on_from_the_offered_one(tmp_path):
    config = tiny_config(tmp_path / "run", total_steps=192, checkpoint_interval=64)
    train(config, advisor=planner())
    folder = tmp_path / "run" / "checkpoints"
    latest = find_checkpoint(str(folder))
    assert json.loads((latest / "seal.json").read_text())["files"]
    cut_off(latest)
    with pytest.raises(CheckpointError, match="resume=") as error:
        build_run(tiny_config(tmp_path / "run", resume=str(folder)), advisor=planner())
    offered = str(error.value).rsplit("resume=", 1)[1]
    shutil.rmtree(latest)
    resumed = tiny_config(tmp_path / "run", total_steps=192, resume=offered)
    assert train(resumed, advisor=planner())["eval/success"] >= 0.0
