from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from lore_torchrl.experiments import (
    Record,
    merge,
    read_csv,
    read_runs,
    read_wandb,
    write_csv,
)


def test_all_that_held_out_episodes_said_survives_the_csv(tmp_path):
    runs = [Record("e", "m", 0, [{"step": 100, "eval/crafter/score": 3.5, "loss/actor": 1.0}])]
    write_csv(tmp_path / "curves.csv", runs)
    assert read_csv(tmp_path / "curves.csv")[0].rows == [{"step": 100, "eval/crafter/score": 3.5}]


def test_a_folder_without_finished_runs_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"study\.py"):
        read_runs(tmp_path)


def settings(seed, *, total_steps=200, env="Empty", lore=True, tau=0.5, beta_max=1.0, **more):
    return {
        "seed": seed,
        "total_steps": total_steps,
        "output_dir": f"runs/{tau}-{seed}",
        "env": {"id": env, "num_envs": 4},
        "lore": {
            "enabled": lore,
            "gate": {"tau": tau, "kappa": 4.0, "beta_max": beta_max},
            "calls": {"ledger": f"run{seed}"},
            **more,
        },
        "logger": {"group": None},
    }


def wandb_run(group, seed, state="finished", total_steps=200, **kwargs):
    # As TorchRL's logger writes it, once with one scalar a row, as runs of old did.
    history = [
        {"_step": 0, "eval/success": 0.5, "eval/step": 100, "_timestamp": 1.0},
        {"_step": 1, "advice/calls": 3, "advice/step": 100, "_runtime": 1.0},
        {"_step": 2, "eval/success": 0.75, "eval/step": 200, "note": "text", "advice/calls": None},
        {"_step": 3, "advice/calls": 4, "advice/step": 200, "lore/kl": 0.5, "lore/step": 200},
        {"_step": 4, "figures/curves": {"_type": "image-file"}},
    ]
    return SimpleNamespace(
        group=group,
        state=state,
        id=f"id{seed}",
        config=settings(seed, total_steps=total_steps, **kwargs),
        summary={"_runtime": 60.0},
        scan_history=lambda: iter(history),
    )


def test_runs_come_from_wandb_by_their_group():
    found = [
        wandb_run("doorkey5x5: LoRe", 1),
        wandb_run("doorkey5x5: LoRe", 0),
        wandb_run("doorkey5x5: LoRe", 2, state="crashed"),
        # Stopped by a signal: W&B calls that finished.
        wandb_run("doorkey5x5: LoRe", 4, total_steps=300),
    ]
    other = wandb_run(None, 3)
    other.config = {"seed": 3}
    found.append(other)
    records = read_wandb("someone/project", lambda project: found)
    assert [(r.experiment, r.method, r.seed) for r in records] == [
        ("doorkey5x5", "LoRe", 0),
        ("doorkey5x5", "LoRe", 1),
    ]
    assert records[0].rows == [
        {"step": 100, "eval/success": 0.5, "advice/calls": 3},
        {"step": 200, "eval/success": 0.75, "advice/calls": 4, "lore/kl": 0.5},
    ]
    with pytest.raises(ValueError, match="no finished run of this package"):
        read_wandb("someone/project", lambda project: [other])


def test_runs_of_a_sweep_come_from_wandb_by_what_differs():
    found = [wandb_run(None, seed, tau=tau) for tau in (0.5, 0.7) for seed in range(2)]
    found.append(wandb_run("a sweep", 0, lore=False))
    records = read_wandb("someone/project", lambda project: found)
    assert [(r.experiment, r.method, r.seed) for r in records] == [
        ("Empty", "lore.gate.tau=0.5", 0),
        ("Empty", "lore.gate.tau=0.5", 1),
        ("Empty", "lore.gate.tau=0.7", 0),
        ("Empty", "lore.gate.tau=0.7", 1),
        ("Empty", "stock", 0),
    ]
    by = read_wandb("someone/project", lambda project: found[:2], by=["lore.gate.kappa"])
    assert {record.method for record in by} == {"lore.gate.kappa=4.0"}
    # Also by what makes no method of its own accord.
    by = read_wandb("someone/project", lambda project: found[:1] + found[-1:], by=["total_steps"])
    assert [record.method for record in by] == ["stock, total_steps=200", "total_steps=200"]
    with pytest.raises(ValueError, match=r"id0 has no setting 'tau'"):
        read_wandb("someone/project", lambda project: found, by=["tau"])


def plain_run(folder, last, **kwargs):
    """A run of no study, up to step ``last``."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings(**kwargs)))
    rows = [{"step": 100, "eval/success": 0.5}, {"step": last, "time/elapsed_s": 9.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_outside_studies_come_from_their_folders(tmp_path):
    plain_run(tmp_path / "one", 224, seed=0)
    plain_run(tmp_path / "two", 200, seed=1)
    plain_run(tmp_path / "other environment", 200, seed=0, env="DoorKey", tau=0.7)
    plain_run(tmp_path / "stock", 200, seed=0, lore=False, tau=0.9)
    plain_run(tmp_path / "interrupted", 192, seed=2)
    records = read_runs(tmp_path)
    assert [(r.experiment, r.method, r.seed, r.seconds) for r in records] == [
        ("DoorKey", "LoRe", 0, 9.0),
        ("Empty", "LoRe", 0, 9.0),
        ("Empty", "LoRe", 1, 9.0),
        ("Empty", "stock", 0, 9.0),
    ]
    plain_run(tmp_path / "third", 200, seed=0, tau=0.6)
    methods = [r.method for r in read_runs(tmp_path) if r.experiment == "Empty"]
    assert methods == ["lore.gate.tau=0.5"] * 2 + ["lore.gate.tau=0.6", "stock"]


def test_stock_runs_that_sample_replay_otherwise_are_another_method(tmp_path):
    sampling = ({"kind": "uniform"}, {"kind": "success"})
    for seed, way in enumerate(sampling):
        plain_run(tmp_path / way["kind"], 200, seed=seed, lore=False, sampling=way)
    methods = {record.method for record in read_runs(tmp_path)}
    assert methods == {"stock, lore.sampling.kind=uniform", "stock, lore.sampling.kind=success"}


def test_a_setting_of_another_version_makes_no_method(tmp_path):
    plain_run(tmp_path / "earlier", 200, seed=0, gone={"setting": 1.0})
    plain_run(tmp_path / "now", 200, seed=1)
    assert [record.method for record in read_runs(tmp_path)] == ["LoRe", "LoRe"]


def test_self_imitation_alone_is_not_called_lore(tmp_path):
    plain_run(tmp_path / "stock", 200, seed=0, lore=False)
    plain_run(tmp_path / "imitation", 200, seed=0, beta_max=0.0)
    assert {record.method for record in read_runs(tmp_path)} == {"stock", "LoRe without advice"}


def about(seed: int) -> str:
    return json.dumps({"experiment": "e", "method": "m", "seed": seed})


def study_run(folder: Path, **files: str) -> Path:
    """A finished run of a study; ``files`` replace what its files hold."""
    written = {"run.json": about(0), "done": "{}", "metrics.jsonl": '{"step": 1}\n'}
    folder.mkdir(parents=True)
    for name, text in (written | {name.replace("_", "."): t for name, t in files.items()}).items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"run_json": '{"exp'}, "run.json"),
        ({"run_json": "[]"}, "run.json"),
        ({"run_json": "{}"}, "run.json"),
        ({"done": "\0\0"}, "done"),
        ({"metrics_jsonl": '{"step": 1}\n[\n{"step": 3}\n'}, "metrics.jsonl is damaged: line 2"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(tmp_path, files, named):
    study_run(tmp_path / "good")
    assert len(read_runs(tmp_path)) == 1
    folder = study_run(tmp_path / "bad", **files)
    with pytest.raises(ValueError, match=re.escape(f"{folder}/{named}")):
        read_runs(tmp_path)


def test_a_study_run_without_metrics_is_named(tmp_path):
    (study_run(tmp_path / "bad") / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"bad has no metrics\.jsonl"):
        read_runs(tmp_path)


@pytest.mark.parametrize("wrong", [{"seed": "0"}, {"total_steps": None}, {"env": "Empty"}])
def test_a_configuration_with_values_of_another_type_is_named(tmp_path, wrong):
    plain_run(tmp_path / "one", 200, seed=0)
    path = tmp_path / "one" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    with pytest.raises(ValueError, match=re.escape(f"{path} is damaged")):
        read_runs(tmp_path)


@pytest.mark.parametrize(
    "text", ["a,b\n1,2\n", "experiment,method,seed,seconds,step\ne,m,0,1\n", "\0\n1\n"]
)
def test_a_table_of_curves_that_is_none_is_named(tmp_path, text):
    path = tmp_path / "curves.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 2, is no line of curves.csv")):
        read_csv(path)


def run(seed, values, *, source="here", **more):
    rows = [
        {"step": 100 * (n + 1), "eval/success": v, "time/elapsed_s": seed + n, **more}
        for n, v in enumerate(values)
    ]
    return Record("e", "m", seed, rows, source=source)


def test_a_study_is_continued_from_a_csv_of_its_earlier_runs(tmp_path):
    first = [run(0, (1 / 3, 1.0)), run(1, (0.0, 0.5))]
    write_csv(tmp_path / "curves.csv", first)
    folder = study_run(tmp_path / "seed2", run_json=about(2))
    records = read_runs(tmp_path / "curves.csv", folder)
    assert [(r.method, r.seed) for r in records] == [("m", 0), ("m", 1), ("m", 2)]


def test_a_run_in_two_sources_counts_once(tmp_path):
    whole = run(0, (1 / 3, 1.0), **{"loss/actor": 2.0})
    write_csv(tmp_path / "curves.csv", [whole])
    copy = read_csv(tmp_path / "curves.csv")
    # The CSV has six digits, and not every metric.
    assert merge([*copy, whole]) == merge([whole, *copy]) == [whole]
    # Another machine takes another time.
    later = run(0, (1 / 3, 1.0), **{"loss/actor": 2.0})
    later.rows[0]["time/elapsed_s"] = 9.0
    assert len(merge([whole, later])) == 1


def test_a_run_with_different_curves_in_two_sources_is_named(tmp_path):
    write_csv(tmp_path / "curves.csv", [run(0, (0.5, 1.0))])
    rows = '{"step": 100, "eval/success": 0.25}\n'
    folder = study_run(tmp_path / "seed0", run_json=about(0), metrics_jsonl=rows)
    message = f"{tmp_path}/curves.csv and {folder} have different curves of e, m, seed 0"
    with pytest.raises(ValueError, match=re.escape(message)):
        read_runs(tmp_path / "curves.csv", folder)
    with pytest.raises(ValueError, match="here and there have different curves"):
        merge([run(0, (0.5, 1.0)), run(0, (0.5,), source="there")])


def test_runs_outside_studies_are_named_over_all_folders(tmp_path):
    for name, tau in (("one", 0.5), ("two", 0.7)):
        plain_run(tmp_path / name, 200, seed=0, tau=tau)
    records = read_runs(tmp_path / "one", tmp_path / "two")
    assert [r.method for r in records] == ["lore.gate.tau=0.5", "lore.gate.tau=0.7"]
