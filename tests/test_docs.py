"""The documentation builds without a warning, and its scripts run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("**/*.md"))


def test_the_site_builds_strictly(tmp_path):
    # Not quietly: what is not told is not counted as a warning either.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    reference = (tmp_path / "reference" / "modules" / "index.html").read_text()
    assert 'id="lore_torchrl.modules.UncertaintyGate"' in reference
    pipeline = (tmp_path / "pipeline" / "index.html").read_text()
    for name in ("LoReDreamerV3Loss", "DreamerModelLoss"):
        assert name in pipeline, "the scripts are included"


@pytest.mark.parametrize("lore", [False, True])
def test_the_pipeline_runs_before_and_after(lore, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import pipeline

    losses = pipeline.main(lore, 160)
    assert ("loss_lore_prior" in losses) == lore
    assert (losses["calls"] > 0) == lore
    assert all(abs(value) < float("inf") for value in losses.values())


def test_commands_on_the_pages_name_files_that_exist():
    scripts, choices = set(), set()
    for page in [ROOT / "README.md", *PAGES]:
        text = page.read_text()
        scripts |= set(re.findall(r"python ((?:examples|benchmarks)/\w+\.py)", text))
        choices |= set(
            re.findall(r"\b(experiment|advisor|ablation|study|sweep|env)=([a-z]\w+)\b", text)
        )
    assert len(scripts) > 6
    for script in scripts:
        assert (ROOT / script).exists(), script
    for group, name in choices:
        assert (ROOT / "configs" / group / f"{name}.yaml").exists(), f"{group}={name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_on_the_pages_compiles(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        if "--8<--" not in block:
            compile(block, str(page), "exec")


def test_every_page_stands_in_the_navigation():
    listed = set(re.findall(r": ([\w/]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert {str(page.relative_to(ROOT / "docs")) for page in PAGES} == listed
