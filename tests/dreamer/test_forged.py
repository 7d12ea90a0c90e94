"""A checkpoint is data: whoever wrote it, to resume or to inspect it runs none of its code."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from forging import FORGERIES, forge_config, put_other_pickle, seal_again
from tensordict import TensorDict
from tiny_run import planner, tiny_config
from torchrl.checkpoint import Checkpoint, CheckpointError

from lore_torchrl.configs import InspectConfig
from lore_torchrl.dreamer.checkpoint import RunCheckpoint, find_checkpoint, load_config, verify
from lore_torchrl.dreamer.run import build_run, train
from lore_torchrl.inspection import inspect_checkpoint, play


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The configuration of a run of 64 steps, which leaves one checkpoint."""
    folder = tmp_path_factory.mktemp("forged") / "run"
    config = tiny_config(folder, total_steps=64, checkpoint_interval=64)
    config.lore.calls.budget = 8
    train(config, advisor=planner())
    return config


@pytest.fixture
def copied(run, tmp_path):
    """A checkpoint to forge, and the configuration that resumes it."""
    shutil.copytree(run.output_dir, tmp_path / "run")
    config = replace(run, output_dir=str(tmp_path / "run"), resume=str(tmp_path / "run"))
    return find_checkpoint(config.resume), config


def components(path: Path) -> dict[str, Path]:
    """Return the folder of every component that has a state."""
    records = Checkpoint.manifest(path)["components"]
    return {name: path / about["path"] for name, about in records.items() if name != "config"}


def test_a_checkpoint_holds_tensors_and_json_alone(copied):
    path, _ = copied
    assert {file.suffix for file in path.rglob("*") if file.is_file()} == {".json", ".memmap"}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_pickle_in_any_part_is_refused_by_name_and_never_loaded(copied, tmp_path, name):
    path, config = copied
    marker = tmp_path / "marker"
    assert len(components(path)) > 8, "the learner, the replay, the random streams and the rest"
    for part, folder in components(path).items():
        before = tmp_path / "before"
        shutil.copytree(folder, before)
        FORGERIES[name](folder, marker)
        seal_again(path)
        for use in (lambda: build_run(config, advisor=planner()), lambda: play(path)):
            with pytest.raises(CheckpointError, match=rf"{re.escape(str(folder))}.*{name}.*JSON"):
                use()
        # Nor without the look at the names of the files.
        with pytest.raises(CheckpointError, match=re.escape(str(folder))):
            RunCheckpoint(**{part: planner()}).load(path)
        assert not marker.exists()
        for used in (folder, tmp_path / "elsewhere"):
            shutil.rmtree(used, ignore_errors=True)
        before.rename(folder)
    seal_again(path)
    verify(path)


def test_the_forgery_is_a_real_one(tmp_path):
    put_other_pickle(tmp_path / "part", tmp_path / "marker")
    TensorDict.load_memmap(tmp_path / "part" / "state", allow_pickle=True)
    assert (tmp_path / "marker").exists()


def set_family(path):
    return lambda config: config["env"].update(adapter=path)


def set_advisor(settings):
    return lambda config: config.update(advisor=settings)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (set_family("torch.hub.load"), "torch.hub.load"),
        # Of this package, and yet code of another.
        (set_family("lore_torchrl.envs.adapter.import_module"), "import_module"),
        (set_family("lore_torchrl.dreamer.run.train"), "lore_torchrl.dreamer.run.train"),
        (set_advisor({"_target_": "logging.FileHandler", "filename": "marker"}), "FileHandler"),
        (
            set_advisor({"_target_": "lore_torchrl.advisors.redaction.os.mkdir"}),
            "redaction.os.mkdir",
        ),
        (
            set_advisor(
                {
                    "_target_": "lore_torchrl.advisors.scripted.ScriptedAdvisor",
                    "planner": [{"_target_": "os.mkdir", "path": "marker"}],
                }
            ),
            "os.mkdir",
        ),
        (set_advisor({"x": {"_target_": ["os.mkdir"]}}), "os.mkdir"),
        (
            set_advisor(
                {
                    "_target_": "lore_torchrl.advisors.recorded.RecordingAdvisor",
                    "advisor": {"_target_": "lore_torchrl.advisors.scripted.ScriptedAdvisor"},
                    "path": "marker",
                }
            ),
            "RecordingAdvisor",
        ),
        (lambda config: config["env"]["options"].update(x={"_target_": "os.mkdir"}), "os.mkdir"),
        # Gymnasium imports the module before the colon.
        (lambda config: config["env"].update(id="antigravity:Door-v0"), "antigravity:Door-v0"),
    ],
)
@pytest.mark.parametrize("calls", [0, 4])
def test_the_inspector_imports_only_what_its_user_names(copied, change, named, calls):
    path, _ = copied
    forge_config(path, change)
    with pytest.raises(CheckpointError, match=rf"trust=\[.*{re.escape(named)}\]") as refusal:
        play(path, calls=calls)
    named = re.search(r"trust=\[(.*)\]", str(refusal.value))[1]
    assert load_config(path, trust=[named]).total_steps == 64


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("base_url", "https://elsewhere.example/v1"),
        ("base_url", "http://127.0.0.1.elsewhere.example/v1"),
        ("base_url", "http://localhost@elsewhere.example/v1"),
        ("api_key_env", "AWS_SECRET_ACCESS_KEY"),
        ("model", "someone/else"),
        ("tokenizer", "someone/else"),
        ("prompt", "/home/me/notes.txt"),
    ],
)
def test_questions_and_keys_go_where_the_user_says(copied, setting, value):
    path, _ = copied
    local = setting in ("model", "tokenizer")
    kind = "local.LocalAdvisor" if local else "chat.ChatAdvisor"
    about = {"_target_": f"lore_torchrl.advisors.{kind}", "model": "m", setting: value}
    forge_config(path, set_advisor(about))
    with pytest.raises(CheckpointError, match=rf"advisor.{setting}=.*trust=\[{re.escape(value)}\]"):
        play(path, calls=1, trust=["m"])
    assert load_config(path, trust=["m", value], asks=True).advisor[setting] == value
    # Without calls nobody is asked.
    assert load_config(path).advisor[setting] == value


@pytest.mark.parametrize("word", ["_args_", "_partial_", "_recursive_"])
def test_words_of_hydra_that_hide_a_call_are_refused(copied, word):
    path, _ = copied
    about = {"_target_": "lore_torchrl.advisors.local.LocalAdvisor", word: ["someone/else"]}
    forge_config(path, set_advisor(about))
    with pytest.raises(CheckpointError, match=rf"advisor.{word}.*hides a call"):
        play(path, calls=1, trust=["someone/else"])


def test_the_inspector_resolves_nothing_that_a_checkpoint_writes(copied):
    path, _ = copied
    told = '${oc.create:"{_target_: os.mkdir, path: marker}"}'
    target = "lore_torchrl.advisors.scripted.ScriptedAdvisor"
    forge_config(path, set_advisor({"_target_": target, "planner": told}))
    with pytest.raises(CheckpointError, match=r"advisor.planner=.*resolved"):
        play(path, calls=4)


def test_what_the_user_names_is_imported(copied, tmp_path, monkeypatch):
    (tmp_path / "own_rooms.py").write_text(
        "from lore_torchrl.envs.minigrid import MiniGrid\nclass Rooms(MiniGrid): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path, _ = copied
    forge_config(path, set_family("own_rooms.Rooms"))
    settings = InspectConfig(
        checkpoint=str(path), episodes=1, max_steps=2, video=None, output=str(tmp_path / "page")
    )
    with pytest.raises(CheckpointError, match=r"trust=\[own_rooms.Rooms\]"):
        inspect_checkpoint(settings)
    recording, _ = inspect_checkpoint(replace(settings, trust=["own_rooms.Rooms"]))
    assert len(recording.episodes[0].moments) == 2


def test_a_resume_is_built_from_the_users_own_configuration(copied, tmp_path, monkeypatch):
    path, config = copied
    monkeypatch.chdir(tmp_path)
    forge_config(path, set_advisor({"_target_": "os.mkdir", "path": "marker"}))
    build_run(config).close()
    assert not (tmp_path / "marker").exists()
    forge_config(path, set_family("torch.hub.load"))
    with pytest.raises(ValueError, match=r"resume: .*env\.adapter .* there, .* here"):
        build_run(config)


def test_a_manifest_that_does_not_tell_the_step_is_named(copied):
    path, config = copied
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "metadata": {}}))
    seal_again(path)
    for use in (lambda: build_run(config, advisor=planner()), lambda: play(path)):
        with pytest.raises(CheckpointError, match=r"manifest.json does not tell collected_frames"):
            use()
