"""Collection speed with a slow advisor: async, none and blocking, in one process.

Run from the project's root, on an otherwise idle machine::

    python benchmarks/bench_latency.py

Each collects DoorKey-5x5 with the acting policy of a run, without learning: ``none`` with
a budget of 0, ``async`` with an advisor that takes 1 s, ``blocking`` with the same advisor
and few calls. They take turns in short segments, in random order, so that all see the
same machine. Each ratio is the median over rounds of (steps per second / those of ``none``
within the round), with a 95% bootstrap interval over rounds. In async mode the advisor is
asked all the time: calls without end, one at most for each vector step, and a cache of one
answer, so that new questions never run out; blocking is slower the more calls a segment
has, so its calls in a segment are fixed and printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lore_torchrl.advisors.base import Advice, AdviceRequest
from lore_torchrl.configs import (
    CallsConfig,
    EnvConfig,
    GateConfig,
    LoggerConfig,
    LoReConfig,
    TrainConfig,
)
from lore_torchrl.dreamer.run import Run, build_run
from ratios import paired_ratios

TARGET = 0.95
ENDLESS = 1_000_000_000


class Slow:
    """Answers after a fixed time, as a server on the network would.

    Args:
        latency_s: Seconds that each answer takes.
    """

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s

    async def advise(self, requests: Sequence[AdviceRequest]) -> list[Advice]:
        """Prefer the first action, later."""
        await asyncio.sleep(self.latency_s)
        return [Advice(logits=(3.0, *(0.0 for _ in request.actions[1:]))) for request in requests]


@dataclass
class Contestant:
    """One way to collect, and the batches that it collects."""

    run: Run
    batches: Iterator

    def segment(self, batches: int, calls: int | None) -> float:
        """Collect some batches and return environment steps per second."""
        service = self.run.service
        if calls is not None:
            service.budget.total = service.budget.spent + calls
        steps, start = 0, time.perf_counter()
        for _ in range(batches):
            steps += next(self.batches).numel()
            if service.mode == "async":
                service.answers(())  # as the replay hook does
        return steps / (time.perf_counter() - start)


def build(folder: Path, name: str, *, latency_s: float, envs: int, in_flight: int) -> Contestant:
    """Build the acting half of a run.

    Args:
        folder: Where its log goes.
        name: ``none``, ``async`` or ``blocking``.

    Keyword Args:
        latency_s: Seconds that an answer takes.
        envs: Environments.
        in_flight: Most questions in flight.
    """
    calls = CallsConfig(
        mode="async" if name == "async" else "blocking",
        budget=ENDLESS if name == "async" else 0,
        max_in_flight=in_flight,
        min_beta=0.0,
        cache_size=1,
        drain_s=0.0,
    )
    config = TrainConfig(
        total_steps=ENDLESS,
        checkpoint_interval=None,
        output_dir=str(folder / name),
        env=EnvConfig(num_envs=envs),
        lore=LoReConfig(calls=calls, gate=GateConfig()),
        logger=LoggerConfig(backends=[], progress_bar=False, figures=False),
    )
    run = build_run(config, advisor=Slow(latency_s))
    return Contestant(run, iter(run.collector))


def main() -> None:
    """Measure, print a table and, with ``--json``, one line for machines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latency", type=float, default=1.0, help="seconds that an answer takes")
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--in-flight", type=int, default=16, help="most questions in flight")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batches", type=int, default=40, help="32-step batches in a segment")
    parser.add_argument("--blocking-calls", type=int, default=2, help="calls in a segment")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    random.seed(0)
    names = ["none", "async", "blocking"]
    speeds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        contestants = {
            name: build(
                Path(folder),
                name,
                latency_s=args.latency,
                envs=args.envs,
                in_flight=args.in_flight,
            )
            for name in names
        }
        calls = {"none": None, "async": None, "blocking": args.blocking_calls}
        for round_index in range(args.rounds + 1):
            for name in random.sample(names, len(names)):
                speed = contestants[name].segment(args.batches, calls[name])
                if round_index:  # the first round warms up
                    speeds[name].append(speed)
        made = {name: c.run.service.stats() for name, c in contestants.items()}
        for contestant in contestants.values():
            contestant.run.close()
    results = paired_ratios(speeds, "none")
    print(f"{'':10s}{'steps/s':>9s}{'ratio':>8s}{'95% interval':>18s}{'calls':>8s}{'late':>7s}")
    for name, r in results.items():
        verdict = ""
        if name == "async":
            verdict = f"  >= {TARGET:.2f} {'met' if r['ratio'] >= TARGET else 'missed'}"
        print(
            f"{name:10s}{r['median']:9.0f}{r['ratio']:8.3f}"
            f"{r['ratio_low']:10.3f}-{r['ratio_high']:.3f}"
            f"{made[name]['calls']:9.0f}{made[name]['late']:7.0f}{verdict}"
        )
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
