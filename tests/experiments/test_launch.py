from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lore_torchrl.configs import StudyConfig
from lore_torchrl.experiments import make_jobs, read_runs, run_jobs, run_study


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_experiment_method_and_seed_runs_once(tmp_path, script):
    methods = {"good one": ["value=0.5"], "other": ["value=0.1"]}
    experiments = {"e": ["value=8"], "f": []}
    jobs = make_jobs(tmp_path / "out", experiments, methods, seeds=2, overrides=["value=9"])
    # The last one counts: the method's, before that the one of every run.
    assert jobs[0].overrides == ("experiment=e", "value=8", "value=9", "value=0.5", "seed=0")
    assert jobs[2].overrides == ("experiment=f", "value=9", "value=0.5", "seed=0")
    assert len(jobs) == 8 and {job.state for job in jobs} == {"open"}
    assert run_jobs(jobs, script=script, processes=2) == []
    assert run_jobs(jobs, script=script, processes=2) == []
    assert {job.state for job in jobs} == {"done"}
    for job in jobs:
        found = rows(job.folder)
        assert len(found) == 3, "a finished run is not repeated"
        value = {"good one": 0.5, "other": 0.1}[job.method]
        assert found[1]["eval/success"] == pytest.approx(value + job.seed / 10)
        assert found[2]["threads"] == 1


def test_a_run_knows_what_it_is(tmp_path, script):
    (job,) = make_jobs(tmp_path, {"e": []}, {"m -1": ["value=0.5"]}, seeds=1)
    run_jobs([job], script=script, processes=1)
    about = json.loads((job.folder / "run.json").read_text())
    assert (about["experiment"], about["method"], about["seed"]) == ("e", "m -1", 0)
    assert about["overrides"] == ["experiment=e", "value=0.5", "seed=0"]
    facts = json.loads((job.folder / "done").read_text())
    assert facts["seconds"] >= 0 and f"{os.cpu_count()} cores" in facts["machine"]


@pytest.mark.parametrize("method", ["with the critic's variance", "a\\'b", "a=[b], {c}", "ends \\"])
def test_hydra_reads_the_name_of_a_group_as_it_is(tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from hydra.core.override_parser.overrides_parser import OverridesParser\n"
        "found = [o for o in OverridesParser.create().parse_overrides(sys.argv[1:])\n"
        "         if o.key_or_group == 'logger.group']\n"
        "print(found[0].value())\n"
    )
    (job,) = make_jobs(tmp_path, {"e": []}, {method: []}, seeds=1)
    assert run_jobs([job], script=script, processes=1) == []
    assert job.log.read_text().splitlines()[-1] == f"e: {method}"


def test_a_failed_run_is_named_and_left_until_it_is_asked_for(tmp_path, script, monkeypatch):
    jobs = make_jobs(tmp_path / "out", {"e": []}, {"m": ["fail=1"]}, seeds=2)
    errors = run_jobs(jobs, script=script, processes=1)
    assert len(errors) == 1 and "e, m, seed 1" in errors[0] and "log.txt" in errors[0]
    assert "told to fail" in errors[0]
    assert [job.state for job in jobs] == ["done", "failed"]
    assert "told to fail" in (jobs[1].folder / "log.txt").read_text()
    monkeypatch.setenv("MENDED", "1")
    assert "retry=true" in run_jobs(jobs, script=script, processes=1)[0]
    assert run_jobs(jobs, script=script, processes=1, retry=True) == []
    assert [job.state for job in jobs] == ["done", "done"]


def test_a_run_with_other_settings_is_not_taken_for_one_of_these(tmp_path, script):
    def jobs(*overrides, fail="none", seeds=1):
        methods = {"m": ["tau=0.5", f"fail={fail}"]}
        return make_jobs(tmp_path, {"e": []}, methods, seeds=seeds, overrides=overrides)

    assert run_jobs(jobs("total=9"), script=script, processes=1) == []
    with pytest.raises(ValueError, match=r"seed0 holds a done run.*: total=9 there, total=8 asked"):
        run_jobs(jobs("total=8", seeds=2), script=script, processes=1)
    assert jobs("total=8", seeds=2)[1].state == "open", "nothing was begun"
    with pytest.raises(ValueError, match="nothing there, x=1 y=1 asked"):
        run_jobs(jobs("total=9", "x=1", "y=1"), script=script, processes=1)


def test_a_failed_run_may_be_run_again_with_other_settings(tmp_path, script):
    failed = make_jobs(tmp_path, {"e": []}, {"m": ["fail=0"]}, seeds=1)
    run_jobs(failed, script=script, processes=1)
    mended = make_jobs(tmp_path, {"e": []}, {"m": ["fail=none"]}, seeds=1)
    with pytest.raises(ValueError, match=r"fail=0 there, fail=none asked for.*or give retry=true"):
        run_jobs(mended, script=script, processes=1)
    assert run_jobs(mended, script=script, processes=1, retry=True) == []
    assert run_jobs(mended, script=script, processes=1) == []


def test_a_run_that_was_interrupted_starts_again(tmp_path, script):
    (job,) = make_jobs(tmp_path, {"e": []}, {"m": []}, seeds=1)
    job.folder.mkdir(parents=True)
    (job.folder / "run.json").write_text("{}")
    assert job.state == "open"
    assert run_jobs([job], script=script, processes=1) == [] and job.state == "done"


@pytest.mark.parametrize("cut", ["SIGINT", "at once"])
def test_a_run_that_a_signal_ends_is_named_and_starts_again(tmp_path, script, monkeypatch, cut):
    (job,) = make_jobs(tmp_path, {"e": []}, {"m": []}, seeds=1)
    monkeypatch.setenv("CUT", cut)
    (error,) = run_jobs([job], script=script, processes=1)
    assert "e, m, seed 0 was cut off" in error and job.state == "open"
    monkeypatch.delenv("CUT")
    assert run_jobs([job], script=script, processes=1) == [] and job.state == "done"


STUDY = """
import sys
from pathlib import Path
from lore_torchrl.experiments import make_jobs, run_jobs

out, script = map(Path, sys.argv[1:])
jobs = make_jobs(out, {"e": []}, {"m": []}, seeds=3)
sys.exit("; ".join(run_jobs(jobs, script=script, processes=1)) or 0)
"""


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"{path} does not come"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_what_a_study_began_ends_with_it_or_keeps_its_folder(tmp_path, script, signum):
    """Two processes must never write to one run's folder."""
    out = tmp_path / "out"
    first, second, _ = (job.folder for job in make_jobs(out, {"e": []}, {"m": []}, seeds=3))
    with subprocess.Popen(
        [sys.executable, "-c", STUDY, out, script], env={**os.environ, "SLEEP": "60"}
    ) as study:
        wait_for(first / "began")
        (job,) = make_jobs(out, {"e": []}, {"m": []}, seeds=1)
        assert "still made by another process" in run_jobs([job], script=script, processes=1)[0]
        study.send_signal(signum)
        code = study.wait(30)
    assert code == (-signum if signum == signal.SIGKILL else 128 + signum)
    assert not second.exists(), "nothing was begun after it"
    if signum == signal.SIGKILL:
        # The run goes on, alone.
        assert "still made by another process" in run_jobs([job], script=script, processes=1)[0]
        pid = (first / "pid").read_text()
        assert f"process {pid} on " in run_jobs([job], script=script, processes=1)[0]
        os.kill(int(pid), signal.SIGKILL)
        until = time.monotonic() + 60
        while found := run_jobs([job], script=script, processes=1):
            assert "still made" in found[0] and time.monotonic() < until
            time.sleep(0.05)
    else:
        assert run_jobs([job], script=script, processes=1) == []
    assert job.state == "done"


ONE_SIGNAL = """
import os, signal, sys, time
given = dict(word.split("=", 1) for word in sys.argv[1:])
folder = given["output_dir"].strip("'")
def note(signum, frame):
    with open(os.path.join(folder, "signals"), "a") as file:
        file.write(signal.Signals(signum).name + " ")
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, note)
open(os.path.join(folder, "began"), "w").close()
while not os.path.exists(os.path.join(folder, "signals")):
    time.sleep(0.02)
time.sleep(0.5)
sys.exit(130)
"""


def test_ctrl_c_in_a_terminal_reaches_a_run_once(tmp_path):
    """The second signal would end it before it has saved."""
    script = tmp_path / "script.py"
    script.write_text(ONE_SIGNAL)
    (job,) = make_jobs(tmp_path / "out", {"e": []}, {"m": []}, seeds=1)
    command = [sys.executable, "-c", STUDY, tmp_path / "out", script]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL) as study:
        wait_for(job.folder / "began")
        os.killpg(study.pid, signal.SIGINT)
        assert study.wait(30) != 0
    assert (job.folder / "signals").read_text().split() == ["SIGTERM"] and job.state == "open"


def test_a_second_attempt_does_not_go_on_where_the_failed_one_stood(tmp_path, script, monkeypatch):
    monkeypatch.setenv("SLEEP", "0")
    (failed,) = make_jobs(tmp_path, {"e": []}, {"m": ["fail=0"]}, seeds=1)
    run_jobs([failed], script=script, processes=1)
    (failed.folder / "checkpoints" / "checkpoint-000000000100").mkdir(parents=True)
    (job,) = make_jobs(tmp_path, {"e": []}, {"m": ["fail=none"]}, seeds=1)
    monkeypatch.setenv("CUT", "SIGINT")
    run_jobs([job], script=script, processes=1, retry=True)
    monkeypatch.delenv("CUT")
    assert run_jobs([job], script=script, processes=1) == []
    assert "resume=" not in (job.folder / "began").read_text()


def test_an_interrupted_run_resumes_from_its_checkpoint(tmp_path, script, monkeypatch):
    monkeypatch.setenv("SLEEP", "0")

    def cut_off(*overrides):
        (job,) = make_jobs(tmp_path, {"e": []}, {"m": []}, seeds=1, overrides=overrides)
        monkeypatch.setenv("CUT", "SIGINT")
        run_jobs([job], script=script, processes=1)
        monkeypatch.delenv("CUT")
        assert job.state == "open"
        return job

    def began(job):
        return (job.folder / "began").read_text().splitlines()[-1].split()

    job = cut_off("checkpoint_interval=100")
    words = began(job)
    # There are none unless the user says so, and the user's word counts.
    assert words.index("checkpoint_interval=null") < words.index("checkpoint_interval=100")
    assert not any(word.startswith("resume=") for word in words)
    (job.folder / "checkpoints" / "checkpoint-100").mkdir(parents=True)
    assert run_jobs([job], script=script, processes=1) == []
    assert f"resume='{job.folder}'" in began(job)
    assert json.loads((job.folder / "done").read_text())["seconds"] is None
    # With other settings it is another run, which must not replace what is kept.
    (job.folder / "done").unlink()
    with pytest.raises(ValueError, match=r"an interrupted run.*=100 there, \S+=200 asked for"):
        cut_off("checkpoint_interval=200")


def test_a_folder_may_have_any_name(tmp_path, script):
    parser = OverridesParser.create()
    (job,) = make_jobs(tmp_path / "β, (2) 'x'", {"e": []}, {"LoRe β": []}, seeds=1)
    script.write_text("import sys; print('\\n'.join(sys.argv[1:]))")
    assert run_jobs([job], script=script, processes=1) == []
    told = parser.parse_overrides(job.log.read_text().splitlines())
    values = {override.key_or_group: override.value() for override in told}
    assert values["output_dir"] == str(job.folder)
    assert values["hydra.run.dir"] == f"{job.folder}/hydra"


def test_a_run_that_its_health_ends_has_failed_with_the_reason(tmp_path, script, monkeypatch):
    (job,) = make_jobs(tmp_path, {"e": []}, {"m": []}, seeds=1)
    monkeypatch.setenv("CUT", "health.stop names kl_over_delta")
    (error,) = run_jobs([job], script=script, processes=1)
    assert "kl_over_delta, step 200" in error and job.state == "failed"
    facts = json.loads((job.folder / "failed").read_text())
    assert facts["reason"] == "health.stop names kl_over_delta" and facts["step"] == 200


def test_folders_of_different_methods_differ(tmp_path):
    names = ["competence 1", "competence -1", "competence 0.5", "adversarial, ablation B"]
    jobs = make_jobs(tmp_path, {"e": []}, dict.fromkeys(names, ()), seeds=1)
    assert len({job.folder for job in jobs}) == 4


def test_methods_that_would_share_a_folder_are_refused(tmp_path):
    with pytest.raises(ValueError, match="another name"):
        make_jobs(tmp_path, {"e": []}, {"a b": [], "a-b": []}, seeds=1)


def test_a_study_runs_reports_and_goes_on(tmp_path, script, monkeypatch):
    methods = {"ours": ["value=0.5"], "stock": ["value=0.1", "fail=1"]}
    config = StudyConfig(methods=methods, seeds=2, output=str(tmp_path / "out"))
    errors, page = run_study(config, script=script)
    assert len(errors) == 1 and "stock, seed 1" in errors[0]
    assert "| ours | 2 |" in (page.parent / "tables.md").read_text()
    monkeypatch.setenv("MENDED", "1")
    errors, page = run_study(replace(config, retry=True), script=script)
    assert not errors and "| stock | 2 |" in (page.parent / "tables.md").read_text()


def test_one_cell_is_one_run(tmp_path, script):
    out = tmp_path / "out"
    config = StudyConfig(methods={"a": [], "stock": []}, seeds=2, cell=3, output=str(out))
    assert run_study(config, script=script) == ([], None)
    assert [(r.method, r.seed) for r in read_runs(out)] == [("stock", 1)]


def test_references_that_are_not_there_are_said_before_any_run(tmp_path, script):
    out = tmp_path / "out"
    config = StudyConfig(
        methods={"stock": []}, output=str(out), references=str(tmp_path / "no.csv")
    )
    with pytest.raises(FileNotFoundError):
        run_study(config, script=script)
    assert not out.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"methods": {}}, "methods="),
        ({"experiments": []}, "experiments="),
        ({"experiments": ["e", "e"]}, "name each once"),
        ({"baseline": "A"}, "baseline='A'"),
        ({"seeds": 0}, "seeds=0"),
        ({"cell": 10}, "0 to 4"),
    ],
)
def test_impossible_studies_say_what_is_wrong(settings, message):
    with pytest.raises(ValueError, match="impossible") as error:
        StudyConfig(**{"methods": {"stock": []}} | settings)
    assert message in str(error.value)
