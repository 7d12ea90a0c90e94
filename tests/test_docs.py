"""The documentation builds without a warning, and its scripts run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from lore_torchrl.experiments import Study, read_csv

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
# The log also tells of what is gone.
PRESENT = [page for page in PAGES if page.stem != "log"]


def test_the_site_builds_strictly(tmp_path):
    # Not quietly: what is not told is not counted as a warning either.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    reference = (tmp_path / "reference" / "modules" / "index.html").read_text()
    assert 'id="lore_torchrl.modules.UncertaintyGate"' in reference
    pages = "".join(page.read_text() for page in (tmp_path / "reference").glob("*/index.html"))
    assert "arithmatex" in pages and not re.search(r":[a-z]+:(`|<code>)|\.\. [a-z-]+::", pages)
    for formula in re.findall(r"\\\[(.*?)\\\]", pages, re.DOTALL):
        assert "&amp;" not in formula or "\\begin{" in formula, formula
    pipeline = (tmp_path / "pipeline" / "index.html").read_text()
    assert "LoReDreamerV3Loss" in pipeline, "the scripts are included"
    dreamer_v1 = (tmp_path / "dreamer_v1" / "index.html").read_text()
    assert "DreamerModelLoss" in dreamer_v1, "the scripts are included"
    tutorial = (tmp_path / "tutorial" / "index.html").read_text()
    assert "advice/calls" in tutorial, "cells and outputs are included"


def test_the_page_of_signatures_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "reference"))
    import signatures

    written = (ROOT / "docs" / "reference" / "README.md").read_text()
    assert written == signatures.page(), signatures.__doc__


@pytest.mark.parametrize("lore", [False, True])
def test_the_pipeline_runs_before_and_after(lore, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import pipeline

    losses = pipeline.main(lore, 160)
    assert ("loss_lore_imitation" in losses) == lore
    assert (losses["calls"] > 0) == lore
    assert all(abs(value) < float("inf") for value in losses.values())


@pytest.mark.parametrize("steps", [192, pytest.param(None, marks=pytest.mark.slow)])
def test_the_tutorial_runs_from_its_first_cell_to_its_last(steps, capsys):
    cells = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    if steps is not None:
        code[0], changed = re.subn(r"STEPS = \d+", f"STEPS = {steps}", code[0])
        assert changed == 1
        code = [re.sub(r"interval=\d+", "interval=96", cell) for cell in code]
        code = [cell.replace("episodes=50", "episodes=4") for cell in code]
    names: dict[str, object] = {}
    for cell in code:
        exec(compile(cell, "tutorial.ipynb", "exec"), names)
    assert "| LoRe | 1 |" in capsys.readouterr().out
    assert names["page"].is_file()
    assert names["summary"]["advice/calls"] > 0
    if steps is None:
        success = {record.method: record.last("eval/success") for record in names["records"]}
        assert success["LoRe"] > success["stock"]


@pytest.mark.parametrize(
    "page", ["results.md", "ablations.md", "bad_advice.md", "channel_results.md"]
)
def test_the_tables_of_results_are_those_of_their_curves(page):
    text = (ROOT / "docs" / page).read_text()
    command = (
        r'examples/report\.py ((?:\S+\.csv )+)--baseline (?:"([^"]+)"|(\S+))'
        r"(?: --metric (\S+))?(?: --every (\d+))?"
    )
    reports = set(re.findall(command, text))
    assert reports
    for paths, quoted, word, metric, every in reports:
        settings = {"metric": metric} if metric else {}
        records = [record for path in paths.split() for record in read_csv(ROOT / path)]
        study = Study(records, quoted or word, **settings)
        # One of each experiment; what compares all, and where advice came from, need not be there.
        for table in study.tables(int(every or 1))[: len(study.experiments)]:
            lines = f"**{table.title}**\n{table.markdown()}".splitlines()
            missing = [line for line in lines if line not in text]
            assert not missing, f"{paths}gives other lines than {page} has: {missing}"


def test_commands_on_the_pages_name_files_that_exist():
    scripts, choices = set(), set()
    for page in [ROOT / "README.md", *PRESENT]:
        text = page.read_text()
        scripts |= set(re.findall(r"python ((?:examples|benchmarks)/\w+\.py)", text))
        choices |= set(
            re.findall(
                r"(?<!\()\b(experiment|method|advisor|ablation|study|sweep|env|channel)=([a-z]\w+)\b(?!,)",
                text,
            )
        )
    assert len(scripts) > 6
    for script in scripts:
        assert (ROOT / script).exists(), script
    for group, name in choices - {("study", "mine"), ("advisor", "mine")}:  # a reader's own
        assert (ROOT / "configs" / group / f"{name}.yaml").exists(), f"{group}={name}"


def test_tests_on_the_pages_exist():
    named = set()
    for page in PRESENT:
        named |= set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()))
    assert len(named) > 30
    for path, test in named:
        text = (ROOT / path).read_text()
        assert not test or f"def {test}(" in text, f"{path}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_on_the_pages_compiles(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_that_a_page_shows_of_a_script_is_the_scripts(page):
    """``<!-- examples/x.py -->`` names a script, ``:lore`` the lines between two marks in it."""
    shown = r"<!-- (examples/\w+\.py)(?::(\w+))? -->\n```python\n(.*?)```"
    for path, part, block in re.findall(shown, page.read_text(), re.DOTALL):
        code = (ROOT / path).read_text()
        if part:
            code = code.split(f"# [start:{part}]\n")[1].split(f"# [end:{part}]")[0]
            code = dedent(code).rstrip() + "\n"
        assert block == code, path


def test_every_page_stands_in_the_navigation():
    listed = set(re.findall(r": ([\w/]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES}
    assert pages | {"tutorial.md"} == listed  # made by docs/hooks/notebook.py
