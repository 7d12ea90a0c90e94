"""Ratios to a baseline of what is measured in rounds, as the benchmarks of speed print them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lore_torchrl.experiments import bootstrap


def paired_ratios(
    measured: Mapping[str, Sequence[float]], baseline: str
) -> dict[str, dict[str, float]]:
    """Return each benchmark's median and its median ratio to a baseline, round by round.

    Args:
        measured: One number a round for each contestant, the same rounds for all.
        baseline: The contestant that the others are divided by.

    Returns:
        ``median``, ``ratio``, ``ratio_low`` and ``ratio_high`` by contestant; the interval
        is a 95% bootstrap over rounds.

    Examples:
        >>> paired_ratios({"a": [2.0, 4.0], "b": [3.0, 6.0]}, "a")["b"]["ratio"]
        1.5
    """
    results = {}
    for name, values in measured.items():
        ratios = np.array(values) / np.array(measured[baseline])
        names = ("ratio", "ratio_low", "ratio_high")
        interval = bootstrap(lambda x: np.median(x, axis=-1), ratios)
        results[name] = {"median": float(np.median(values))}
        results[name] |= {key: float(v) for key, v in zip(names, interval, strict=True)}
    return results
