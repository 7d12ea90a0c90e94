"""The study's script, started alone and by Hydra's launchers."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Start ``study.py`` with a study of which each cell fails; return the cells begun."""
    pytest.importorskip("hydra")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import study

    # Hydra's "disabled" silences every logger there is, for the tests that follow too.
    for logger in map(logging.getLogger, list(logging.root.manager.loggerDict)):
        monkeypatch.setattr(logger, "disabled", logger.disabled)

    def call(*words: str, interrupted: bool = False) -> list[int | None]:
        begun = []

        def run_study(config, *, script):
            begun.append(config.cell)
            if interrupted:
                raise KeyboardInterrupt
            return [f"cell {config.cell} failed"], None

        monkeypatch.setattr(study, "run_study", run_study)
        quiet = ("hydra/job_logging=disabled", "hydra/hydra_logging=disabled")
        folders = (f"hydra.sweep.dir={tmp_path}", f"hydra.run.dir={tmp_path}")
        monkeypatch.setattr(sys, "argv", ["study.py", *words, *quiet, *folders])
        with pytest.raises(SystemExit) as ended:
            study.main()
        assert ended.value.code not in (0, None)
        assert (ended.value.code == 130) == interrupted
        return begun

    return call


def test_a_cell_that_fails_does_not_end_the_sweep(start, capsys):
    assert start("-m", "study=method", "cell=0,1") == [0, 1]
    assert "cell 0 failed" in capsys.readouterr().err


def test_a_study_that_fails_does_not_end_a_sweep_over_studies(start):
    assert start("-m", "study=method,parts") == [None, None]


def test_a_study_that_fails_ends_with_what_failed(start):
    assert start("study=method") == [None]


@pytest.mark.parametrize(
    ("words", "cells"), [(["study=method"], [None]), (["-m", "study=method", "cell=0,1"], [0])]
)
def test_ctrl_c_ends_it_with_a_line_and_no_traceback(start, capsys, words, cells):
    assert start(*words, interrupted=True) == cells
    said = capsys.readouterr()
    assert "the same command goes on" in said.out and "Traceback" not in said.err


def test_an_unknown_experiment_is_refused_before_any_run(start):
    assert start("study=method", "experiments=[doorkey5x5,dorkey]") == []
    assert start("study=method", "+experiment_overrides.dorkey=['seed=1']") == []
    assert start("study=method", "+experiment_overrides.doorkey6x6=['seed=1']") == [None]
    # Where the user has configurations of their own.
    own = "overrides=['hydra.searchpath=[file://own]']"
    assert start("study=method", "experiments=[mine]", own) == [None]
