from __future__ import annotations

import json
from pathlib import Path

import pytest

from lore_torchrl.experiments import run_jobs
from lore_torchrl.experiments.ablation import read_arguments, report
from lore_torchrl.experiments.runs import make_jobs, run_folder

# Takes the place of the training script: writes what it was told, or fails if told so.
SCRIPT = """
import json, os, sys
given = dict(word.split("=", 1) for word in sys.argv[1:])
if given.get("fail") == given["seed"]:
    sys.exit("told to fail")
os.makedirs(given["output_dir"], exist_ok=True)
with open(os.path.join(given["output_dir"], "metrics.jsonl"), "a") as file:
    value = float(given.get("value", 0)) + int(given["seed"]) / 10
    for step in (100, 200):
        file.write(json.dumps({"step": step, "eval/success": value * step / 200}) + "\\n")
    file.write(json.dumps({"step": 200, "threads": os.environ["OMP_NUM_THREADS"]}) + "\\n")
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_method_and_seed_runs_once(tmp_path, script):
    methods = {"good one": ["value=0.5"], "other": ["value=0.1"]}
    jobs = make_jobs(tmp_path / "out", methods, seeds=2, common=["value=9"])
    assert run_jobs(jobs, script=script, processes=2) == []
    assert run_jobs(jobs, script=script, processes=2) == []
    for name, value in (("good one", 0.5), ("other", 0.1)):
        for seed in range(2):
            found = rows(run_folder(tmp_path / "out", name, seed))
            assert len(found) == 3, "a finished run is not repeated"
            assert found[1]["eval/success"] == pytest.approx(value + seed / 10)
            assert found[2]["threads"] == "1"


def test_a_failed_run_is_named_and_tried_again(tmp_path, script):
    jobs = make_jobs(tmp_path / "out", {"m": ["fail=1"]}, seeds=2)
    errors = run_jobs(jobs, script=script, processes=1)
    assert len(errors) == 1 and "seed1" in errors[0] and "log.txt" in errors[0]
    assert "told to fail" in (run_folder(tmp_path / "out", "m", 1) / "log.txt").read_text()
    again = make_jobs(tmp_path / "out", {"m": ["fail=none"]}, seeds=2)
    assert run_jobs(again, script=script, processes=1) == []


def test_folders_of_different_methods_differ(tmp_path):
    names = ["competence 1", "competence -1", "competence 0.5", "adversarial, ablation B"]
    assert len({run_folder(tmp_path, name, 0) for name in names}) == 4


def test_the_report_of_an_ablation(tmp_path, script):
    methods = {"a": ["value=0.2"], "f": ["value=0.8"]}
    run_jobs(make_jobs(tmp_path, methods, seeds=2), script=script, processes=2)
    table = report(tmp_path, ["a", "f"], 2)
    assert "| f | 0.42 [0.40, 0.45] | 0.85 [0.80, 0.90] |" in table.replace("0.43", "0.42")
    assert (tmp_path / "table.md").read_text() == table
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_the_command_line():
    found = read_arguments(["experiment=empty8x8", "ablations=[a,no_bandit]", "seeds=5", "jobs=1"])
    assert found.ablations == ("a", "no_bandit") and (found.seeds, found.jobs) == (5, 1)
    assert found.overrides == ("experiment=empty8x8",)
    assert read_arguments([]).ablations == ("a", "b", "c", "d", "e", "f")


@pytest.mark.parametrize(("words", "message"), [(["seeds=0"], "seeds"), (["--help"], "name=value")])
def test_impossible_command_lines(words, message):
    with pytest.raises(ValueError, match=message):
        read_arguments(words)
