"""Checks a program on recorded observations before it is used."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lore_torchrl.sandbox.program import Program
from lore_torchrl.sandbox.ranking import score
from lore_torchrl.sandbox.sandbox import ProgramError, Sandbox


def check_program(
    program: Program,
    views: Sequence[Mapping[str, Any]],
    *,
    returns: Sequence[float] | None = None,
    sandbox: Sandbox | None = None,
    slowest_s: float = 0.005,
) -> dict[str, Any]:
    """Run a program on recorded observations, twice, in two processes.

    It has to return finite numbers on all of them, the same names on each, not the
    same values everywhere, the same ones in both processes, and fast enough.

    Args:
        program: What to check.
        views: What ``program_view()`` returned, at least 2.

    Keyword Args:
        returns: Real return from each of them on, for the score. Default: ``None``.
        sandbox: Where to run it. Default: one with the default limits.
        slowest_s: Seconds that half of the runs may take, with the way to the worker.
            Default: ``0.005``.

    Returns:
        ``views`` (how many), ``run_s`` (median), ``names`` of what it returns, and ``score``
        (:func:`~lore_torchrl.sandbox.ranking.score`) where there are returns that vary.

    Raises:
        ProgramError: With what is wrong, for its author to read.
        ValueError: If there are fewer than 2 views.
    """
    if len(views) < 2:
        raise ValueError(f"check_program needs at least 2 views, got {len(views)}.")
    sandbox = sandbox or Sandbox()
    results, times = [], []
    for view in views:
        started = time.perf_counter()
        results.append(sandbox.run(program, view))
        times.append(time.perf_counter() - started)
    found: dict[str, Any] = {"views": len(views), "run_s": round(statistics.median(times), 6)}
    if program.kind != "progress":
        found["names"] = list(results[0])
        if any(list(result) != found["names"] for result in results):
            raise ProgramError("result", "The names differ from one observation to another.")
        values = np.array([list(result.values()) for result in results])
    else:
        values = np.array(results)
    if (values == values[0]).all():
        raise ProgramError(
            "result", f"The result is the same on all {len(views)} observations: {results[0]}."
        )
    with sandbox.elsewhere() as run:
        if [run(program, view) for view in views] != results:
            raise ProgramError(
                "result", "A second run gave other results: it must depend on obs alone."
            )
    if found["run_s"] > slowest_s:
        raise ProgramError(
            "timeout",
            f"A run takes {found['run_s']:.4f} s, and {slowest_s:g} s at most are left for it.",
        )
    if returns is not None and (told := score(values, np.asarray(returns))) is not None:
        found["score"] = round(told, 4)
    return found


def judged(
    program: Program, views: Sequence[Mapping[str, Any]], **settings: Any
) -> tuple[Program, ProgramError | None]:
    """Return a program with the outcome of its check, and what was wrong, ``None`` for nothing.

    ``settings`` are those of :func:`check_program`.
    """
    try:
        return replace(program, checks=check_program(program, views, **settings)), None
    except ProgramError as error:
        found = {"kind": error.kind, "problem": str(error)}
        return replace(program, accepted=False, checks=found), error
