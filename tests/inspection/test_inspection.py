from __future__ import annotations

import base64
import json
import re
import shutil
from dataclasses import replace
from html import unescape
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import planner, tiny_config
from torchrl.checkpoint import CheckpointError

from lore_torchrl.configs import FeaturesConfig, InspectConfig, LoReConfig
from lore_torchrl.control import AdviceBandit
from lore_torchrl.dreamer.run import train
from lore_torchrl.envs.minigrid import MiniGrid
from lore_torchrl.inspection import (
    SOURCES,
    draw,
    inspect_checkpoint,
    play,
    to_png,
    write_page,
)
from lore_torchrl.sandbox import Program, ProgramStore


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 64 steps that leaves a checkpoint."""
    folder = tmp_path_factory.mktemp("inspected") / "run"
    config = tiny_config(folder, total_steps=64, checkpoint_interval=32)
    config.lore.calls.budget = 20
    config.lore.gate.value_weight = 0.3
    train(config, advisor=planner())
    return folder


@pytest.fixture(scope="module")
def recording(run):
    return play(run, episodes=2, advisor=planner())


def test_every_step_is_described_in_full(recording):
    assert recording.step == 64 and len(recording.episodes) == 2
    for episode in recording.episodes:
        assert 1 <= len(episode.moments) <= 20
        for moment in episode.moments:
            assert moment.frame.dtype == np.uint8 and moment.frame.ndim == 3 and moment.frame.any()
            assert len(moment.text.split()) > 10
            for probs in (moment.policy, moment.mix, moment.prior or moment.mix):
                assert len(probs) == 7 and sum(probs) == pytest.approx(1.0, abs=1e-5)
            assert (moment.prior is None) == (moment.source == "none")
            assert set(moment.uncertainty) == {"entropy", "value"}
            assert moment.source in SOURCES and moment.kl >= 0.0


def test_the_parts_add_up_to_what_the_gate_weighed(recording, run):
    saved = json.loads((run / "config.json").read_text())["lore"]["gate"]
    for moment in recording.episodes[0].moments:
        u = sum(moment.uncertainty.values())
        beta = saved["beta_max"] / (1 + np.exp(-saved["kappa"] * (u - saved["tau"])))
        assert moment.beta == pytest.approx(beta, abs=1e-4) or saved["warmup_steps"]


def test_without_calls_nothing_is_asked(run):
    class Loud:
        cache_prefix = planner().cache_prefix

        async def advise(self, requests):
            raise AssertionError("was asked")

    moments = [m for e in play(run, episodes=3, advisor=Loud()).episodes for m in e.moments]
    assert {m.source for m in moments} <= {"none", "cache", "abstract state", "PriorNet"}
    assert {"cache", "abstract state"} & {m.source for m in moments}, "what was bought is shown"


def test_new_questions_are_bounded(run):
    asked = []

    class Other:
        async def advise(self, requests):
            asked.extend(requests)
            return await planner().advise(requests)

    recording = play(run, episodes=3, calls=2, seed=7, advisor=Other())
    bought = [m for e in recording.episodes for m in e.moments if m.source == "call"]
    assert len(asked) == 2 and 1 <= len(bought) <= 2
    assert bought[0].prior is not None


def test_the_runs_advisor_need_not_be_there(run):
    class Gone:
        cache_prefix = "another model:"

        async def advise(self, requests):
            return [None] * len(requests)

    shown = {m.source for e in play(run, episodes=4, seed=3).episodes for m in e.moments}
    assert "abstract state" in shown and "call" not in shown
    asked = play(run, episodes=4, seed=3, calls=20, advisor=planner())
    sources = {m.source for e in asked.episodes for m in e.moments}
    assert {"call", "cache", "abstract state"} <= sources, "own and lent answers are told apart"
    strange = {m.source for e in play(run, episodes=2, advisor=Gone()).episodes for m in e.moments}
    assert not strange & {"cache", "abstract state"}, "answers of another model are not shared"


def test_a_store_of_the_run_is_left_alone(tmp_path):
    config = tiny_config(tmp_path / "run", total_steps=64, checkpoint_interval=64)
    config.lore.calls.budget, config.lore.calls.store = 8, str(tmp_path / "answers.sqlite")
    train(config, advisor=planner())
    (tmp_path / "answers.sqlite").unlink()
    play(tmp_path / "run", calls=3, max_steps=5, advisor=planner())
    assert not (tmp_path / "answers.sqlite").exists()


def test_the_same_play_twice_is_the_same(recording, run):
    again = play(run, episodes=2, advisor=planner())
    for one, other in zip(recording.episodes, again.episodes, strict=True):
        assert [m.action for m in one.moments] == [m.action for m in other.moments]
        assert [m.mix for m in one.moments] == [m.mix for m in other.moments]


def test_a_coefficient_is_held_and_zero_acts_alone(run):
    alone = play(run, coefficient=0.0, advisor=planner()).episodes[0]
    assert all(m.coefficient == 0.0 and m.kl == 0.0 for m in alone.moments)
    torch.testing.assert_close(
        torch.tensor([m.mix for m in alone.moments]),
        torch.tensor([m.policy for m in alone.moments]),
    )
    half = play(run, coefficient=0.5, advisor=planner()).episodes[0]
    assert {m.coefficient for m in half.moments} == {0.5}
    with pytest.raises(ValueError, match=r"coefficient must lie in \[0, 1\], got 1.5"):
        play(run, coefficient=1.5, advisor=planner())


def test_where_advice_acts_is_drawn_by_the_bandit_of_the_run(tmp_path, monkeypatch):
    """One that has learned that advice does not help, in segments of 2 steps."""
    config = tiny_config(tmp_path / "run", total_steps=64, checkpoint_interval=64)
    config.lore.bandit.segment_steps, config.lore.bandit.floor = 2, 0.01
    monkeypatch.setattr(AdviceBandit, "observe", lambda self, *_: self.log_odds.copy_(-self.bound))
    train(config, advisor=planner())
    episodes = play(tmp_path / "run", episodes=3, advisor=planner()).episodes
    coefficients = [m.coefficient for episode in episodes for m in episode.moments]
    assert set(coefficients) <= {0.0, 1.0} and len(coefficients) >= 30
    assert sum(coefficients) / len(coefficients) < 0.2


def test_training_draws_and_random_stream_are_left_alone(run):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    play(run, max_steps=3, advisor=planner())
    assert torch.equal(before, torch.random.get_rng_state())


def test_stock_is_shown_without_advice(tmp_path):
    config = tiny_config(
        tmp_path / "run", total_steps=64, checkpoint_interval=64, lore=LoReConfig(enabled=False)
    )
    train(config)
    recording = play(tmp_path / "run", max_steps=4)
    for moment in recording.episodes[0].moments:
        assert moment.prior is None and moment.source == "none" and moment.mix == moment.policy
    assert draw(recording, 0, 0).shape == (360, 720, 3)
    with pytest.raises(ValueError, match="no bandit"):
        play(tmp_path / "run", coefficient=0.5)


def test_a_program_that_the_run_retired_stays_retired(tmp_path, caplog):
    programs = tmp_path / "programs.jsonl"
    code = "def compute_features(obs):\n    return {'one': 1 / 0}"
    ProgramStore(programs).append(Program("features", code, checks={"names": ["one"]}))
    config = tiny_config(tmp_path / "run", total_steps=64, checkpoint_interval=64)
    config.lore.features = FeaturesConfig(enabled=True, path=str(programs), max_failures=1)
    with caplog.at_level("WARNING"):
        train(config, advisor=planner())
        assert "is retired: 1 failures" in caplog.text
        caplog.clear()
        play(tmp_path / "run", max_steps=4, advisor=planner())
    assert "is retired" not in caplog.text


@pytest.mark.parametrize("kind", ["gif", "mp4"])
def test_files_for_people(run, tmp_path, kind):
    config = InspectConfig(
        checkpoint=str(run), episodes=1, max_steps=3, video=kind, output=str(tmp_path / "out")
    )
    (tmp_path / "out").mkdir()
    for name in ("episode4.gif", "episode4_timeline.png", "episode4_notes.md"):
        (tmp_path / "out" / name).touch()
    recording, page = inspect_checkpoint(config)
    steps = len(recording.episodes[0].moments)
    found = {path.name for path in (tmp_path / "out").glob("episode4*")}
    assert found == {"episode4_notes.md"}, "what an earlier inspection drew is gone"
    text = page.read_text()
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', text, re.S).group(1))
    assert len(data) == 1 and len(data[0]["steps"]) == steps
    assert data[0]["steps"][0]["text"] == recording.episodes[0].moments[0].text
    image = base64.b64decode(data[0]["steps"][0]["picture"].split(",", 1)[1])
    assert image[:4] == b"\x89PNG"
    beside = re.sub(r"data:image/png;base64,[\w+/=]*", "", unescape(text))
    assert not re.search(r"https?://|<link|src=\"(?!\")", beside), "it needs nothing beside itself"
    video = tmp_path / "out" / f"episode0.{kind}"
    if kind == "gif":
        assert Image.open(video).n_frames == steps
    else:
        assert video.read_bytes()[4:8] == b"ftyp"
    assert (tmp_path / "out" / "episode0_timeline.png").exists()


def test_bad_input(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no checkpoint"):
        play(tmp_path / "nowhere")
    for name, value in (("episodes", 0), ("calls", -1), ("max_steps", 0), ("video", "avi")):
        with pytest.raises(ValueError, match=f"{name}.*{value}"):
            replace(InspectConfig(checkpoint="x"), **{name: value})


def test_an_environment_without_pictures_is_named(run, monkeypatch):
    make_env = MiniGrid.make_env
    monkeypatch.setattr(
        MiniGrid, "make_env", lambda *args, **kwargs: make_env(*args, **kwargs | {"pixels": False})
    )
    with pytest.raises(ValueError, match=r"MiniGrid.make_env\(pixels=True\) writes no `pixels`"):
        play(run, episodes=1, advisor=planner())


def test_a_damaged_checkpoint_is_refused(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    folders = sorted((copy / "checkpoints").iterdir())
    largest = max(
        (f for f in folders[-1].rglob("*") if f.is_file()), key=lambda f: f.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"bytes.*one before"):
        play(copy)


def test_any_text_stands_in_the_page_as_data(recording, tmp_path):
    odd = "<!-- <script </script> ]]> & \u2028 \ud800 \\u003c"
    moment = replace(recording.episodes[0].moments[0], text=odd)
    episode = SimpleNamespace(moments=[moment], outcome=odd)
    picture = to_png(moment.frame)
    (tmp_path / "line.png").write_bytes(picture)
    page = write_page(
        tmp_path / "page.html",
        replace(recording, episodes=[episode], env_id="<script>"),
        [[picture]],
        [tmp_path / "line.png"],
    ).read_text()
    # As a browser reads it: within a script "<!--" and "<script" change where it ends.
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 2 == page.count("<script") and "<!--" not in page
    (data,) = json.loads(scripts[0])
    assert (data["outcome"], data["steps"][0]["text"]) == (odd, odd)
