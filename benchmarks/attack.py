"""Runs against a server that goes wrong in every way, and against one that is away for a while.

Run from the project's root::

    python benchmarks/attack.py                 # every fault, blocking and async
    python benchmarks/attack.py --only zeros bomb --modes async
    python benchmarks/attack.py --outages       # away at the start, and in the middle

Each row is one run of ``experiment=doorkey5x5 advisor=openai`` in a fresh process: its own
environments, transform, service, advisor and trainer, with 98 calls and all of its defaults but
a shorter deadline, and without learner updates. The server is another process on loopback. It
counts calls by a number that the run writes into each question, so that retries and probing do
not count twice.

A row is right if the run ends with its last step; if counters, ledger and the server's count
agree and stay within the budget; if neither the key nor what a terminal would obey is in any of
its files, and no redirect was followed; if a good answer in an odd envelope is used; and if peak
memory and the longest step stay within bounds over clean runs, which go first. The exit code is
1 where anything is missed.
"""

from __future__ import annotations

import argparse
import base64
import json
import logging
import multiprocessing
import os
import re
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent
# Before torch is loaded, and for the processes that are started.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(ROOT / "tests" / "advisors"))

import numpy as np  # noqa: E402
from fault_server import ATTACKS, FaultServer  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

from lore_torchrl.advisors.base import Advice, AdviceRequest  # noqa: E402
from lore_torchrl.advisors.chat import ChatAdvisor  # noqa: E402
from lore_torchrl.advisors.errors import AdviceError  # noqa: E402
from lore_torchrl.configs import TrainConfig, register_configs  # noqa: E402

MODES = ("blocking", "async")
# "/", "+" and "s" are what servers write in other ways.
KEY = "sk-attack/0123456789+secrets"
BUDGET = 98
ENVS = 4
# Vector steps without calls, in which PyTorch gets warm: they are not timed.
WARM_UP = 16
STEPS = 120
# Total seconds of a question, and the service's limit, in the ratio of the defaults.
DEADLINE_S, TIMEOUT_S = 1.0, 1.5
# Seconds that a vector step of an async run takes at least: it must not be over before the
# first deadline is.
PERIOD_S = 0.03
# Seconds after which a run is killed.
LIMIT_S = 60.0

MOST_MEMORY_MIB = 100.0
MOST_ASYNC_S = 0.05
MOST_BLOCKING_S = 0.5
MOST_LOST = 5
MOST_STEPS_AWAY = 200
# Times that a row is run again where a bound on time or memory was missed.
AGAIN = 2

# The server does not read the question, or is not there: it cannot tell which call it was.
UNREAD = ("refused", "reset_unread", "answer_unread")
# Answers that are good, though the envelope is odd.
ANSWERED = ("201", "bom", "wrong_model", "usage_negative", "usage_huge", "usage_text")
TARGETS = ("survived", "counts", "budget", "shown", "answers", "memory", "step")
# What no terminal should get, and a line that only a server could have forged.
UNTOLD = ("\x1b[2J", "\x1b]0;", "\x9b", "\x07", "\u202e", "\n2026-01-01 [INFO]")
LONGEST_LINE = 1_000
# Kinds of errors that are no calls.
NO_CALLS = ("in_flight", "budget", "store")

OUTAGES = ("refused", "503", "stall")
WHEN = ("start", "middle")
# Environment steps a second of a run that learns, which an outage must be seen against.
RATE = 60.0
BEFORE_S = 3.0

CONTEXT = multiprocessing.get_context("forkserver")


# ---- a run, in its own process ----


@dataclass
class Order:
    """What a run is to do.

    Args:
        config: The run.
        url: Of the server.
        period_s: Seconds that a vector step takes at least.
    """

    config: TrainConfig
    url: str
    period_s: float

    @property
    def folder(self) -> Path:
        """Where it writes."""
        return Path(self.config.output_dir)

    @property
    def warm(self) -> Path:
        """File that is there once the run may ask."""
        return self.folder / "warm"


class NumberedAdvisor(ChatAdvisor):
    """Writes the number of the call into each question."""

    asked = 0

    async def advise(self, requests: Sequence[AdviceRequest]) -> list[Advice | AdviceError]:
        """Ask all questions at once."""
        numbered = []
        for request in requests:
            self.asked += 1
            text = f"[call {self.asked}] {request.description}"
            numbered.append(replace(request, description=text))
        return await super().advise(numbered)


class Clock:
    """Paces a run, and times it from the end of one vector step to the end of the next.

    The pause that it makes itself is taken off, so that what keeps the process from waking up
    in time counts as a stall.
    """

    def __init__(self, order: Order, run: Any) -> None:
        self.seconds: list[float] = []
        self.timeline: list[tuple[float, int, int, int]] = []
        self._order = order
        self._run = run
        self._steps = 0
        self._pause = 0.0
        self._last = time.monotonic()
        run.service.budget.total = 0
        run.trainer.register_op("batch_process", self.step_ends)
        run.trainer.register_op("post_steps", self.pause)

    def step_ends(self, _batch: Any) -> None:
        """Take the time."""
        now = time.monotonic()
        self._steps += 1
        if self._steps == WARM_UP:
            self._run.service.budget.total = BUDGET
            self._order.warm.touch()
        elif self._steps > WARM_UP:
            self.seconds.append(now - self._last - self._pause)
        service = self._run.service
        answered = service.counters.in_time + service.counters.late
        self.timeline.append((now, self._steps * ENVS, answered, service.budget.spent))
        self._last = now

    def pause(self) -> None:
        """Wait for the end of the period."""
        self._pause = max(0.0, self._order.period_s - (time.monotonic() - self._last))
        time.sleep(self._pause)


def play(order: Order) -> None:
    """Run, and leave ``result.json`` beside what the run writes."""
    from lore_torchrl.dreamer.run import build_run

    output = (order.folder / "output.txt").open("w")
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    # As Hydra sets it up for examples/train.py.
    handlers = [logging.StreamHandler(), logging.FileHandler(order.folder / "train.log")]
    logging.basicConfig(level=logging.INFO, handlers=handlers)
    os.environ["OPENAI_API_KEY"] = KEY
    settings = {n: v for n, v in asdict(order.config.advisor).items() if not n.startswith("_")}
    advisor = NumberedAdvisor(**settings | {"base_url": order.url})
    run = build_run(order.config, advisor=advisor)
    clock = Clock(order, run)
    try:
        run.trainer.train()
    finally:
        run.close()
    result = {
        "frames": run.trainer.collected_frames,
        "stats": run.service.stats(),
        "errors": dict(run.service.errors),
        "spent": run.service.budget.spent,
        "sent": advisor.requests_sent,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "seconds": clock.seconds,
        "timeline": clock.timeline,
    }
    (order.folder / "result.json").write_text(json.dumps(result))


# ---- the runs, from outside ----


def settings(folder: Path, mode: str, steps: int, *overrides: str) -> TrainConfig:
    """Return README's run with an OpenAI server, for so many vector steps and without learner."""
    words = [
        *("experiment=doorkey5x5", "advisor=openai", f"lore.calls.mode={mode}"),
        *(f"output_dir={folder}", f"total_steps={steps * ENVS}", f"steps_per_batch={ENVS}"),
        *("dreamer.learning_starts=1000000000", "checkpoint_interval=null"),
        *("evaluation.interval=1000000000", "evaluation.episodes=1"),
        *("logger.progress_bar=false", "logger.figures=false", *overrides),
    ]
    config = OmegaConf.to_object(compose("config", words))
    if config.lore.calls.budget != BUDGET or config.env.num_envs != ENVS:
        raise SystemExit("experiment=doorkey5x5 has other calls or environments than assumed.")
    return config


@dataclass
class Outcome:
    """What a run left behind; ``result`` is empty where it did not end by itself."""

    result: dict[str, Any]
    why: str = ""
    shown: list[str] = field(default_factory=list)

    @property
    def longest_s(self) -> float:
        """Longest step in seconds."""
        return max(self.result["seconds"])


def watch(
    config: TrainConfig,
    server: FaultServer,
    *,
    period_s: float,
    limit_s: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run against a server, call ``meanwhile`` once the run asks, and return what came of it."""
    folder = Path(config.output_dir)
    folder.mkdir(parents=True)
    order = Order(config, server.url, period_s)
    process = CONTEXT.Process(target=play, args=(order,), daemon=True)
    process.start()
    until = time.monotonic() + limit_s
    while process.is_alive() and not order.warm.exists() and time.monotonic() < until:
        time.sleep(0.02)
    if order.warm.exists():
        meanwhile()
    process.join(max(0.0, until - time.monotonic()))
    why = ""
    if process.is_alive():
        process.kill()
        process.join()
        why = f"killed after {limit_s:g} s"
    elif process.exitcode:
        lines = (folder / "output.txt").read_text(errors="replace").strip().splitlines()
        why = f"exit code {process.exitcode}: {lines[-1][:80] if lines else ''}"
    path = folder / "result.json"
    result = json.loads(path.read_text()) if not why else {}
    outcome = Outcome(result, why, shown(folder))
    shutil.rmtree(folder)
    return outcome


def shown(folder: Path) -> list[str]:
    """Return what a run's files show and should not."""
    found = set()
    needles = (KEY, quote(KEY, safe=""), base64.b64encode(KEY.encode()).decode())
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8", errors="replace")
        # As whoever reads it would: without escapes, and without the line ends in between.
        read = re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)
        read = re.sub(r"\\[nr]|[\\\s]", "", read)
        if any(needle in text or needle in read for needle in needles):
            found.add(f"key in {path.name}")
        if path.name in ("output.txt", "train.log"):
            if any(mark in text for mark in UNTOLD):
                found.add(f"controls in {path.name}")
            if any(len(line) > LONGEST_LINE for line in text.splitlines()):
                found.add(f"long line in {path.name}")
    return sorted(found)


def calls_seen(server: FaultServer) -> int:
    """Return how many calls a server got, retries and probing not counted twice."""
    found: set[str] = set()
    for _, _, body in server.requests:
        found.update(re.findall(r"\[call (\d+)\]", json.dumps(body)))
    return len(found)


@dataclass
class Row:
    """A fault in a mode, and what it did to a run."""

    fault: str
    mode: str
    outcome: Outcome
    requests: int
    seen: int
    followed: int
    tries: int = 1

    def disagreements(self) -> list[str]:
        """Return which counts differ."""
        result, stats = self.outcome.result, self.outcome.result["stats"]
        calls, spent = stats["calls"], result["spent"]
        failed = sum(n for kind, n in result["errors"].items() if kind not in NO_CALLS)
        wrong = []
        if calls != stats["answered"] + stats["lost"] or stats["in_flight"]:
            wrong.append(
                f"{calls:g} calls, {stats['answered']:g} answered, {stats['lost']:g} lost, "
                f"{stats['in_flight']:g} in flight"
            )
        if failed != stats["failed"]:
            wrong.append(f"{failed} errors, {stats['failed']:g} failed")
        if spent != calls:
            wrong.append(f"ledger {spent}, {calls:g} calls")
        if self.requests > result["sent"]:
            wrong.append(f"server {self.requests} requests, run {result['sent']}")
        if self.fault not in UNREAD and spent != self.seen:
            wrong.append(f"ledger {spent}, server {self.seen}")
        if self.fault in UNREAD and spent > max(self.requests, MOST_LOST):
            wrong.append(f"ledger {spent}, server {self.requests} requests")
        return wrong

    def misses(self, clean: Clean) -> dict[str, list[str]]:
        """Return what was missed of each target."""
        result = self.outcome.result
        if not result:
            return {"survived": [self.outcome.why], "shown": self.outcome.shown}
        frames = result["frames"]
        ended = frames == (WARM_UP + STEPS) * ENVS
        within = max(self.seen, result["spent"]) <= BUDGET
        answered = self.fault not in ANSWERED or result["stats"]["answered"]
        return {
            "survived": [] if ended else [f"ended at step {frames}"],
            "counts": self.disagreements(),
            "budget": [] if within else [f"{self.seen} calls, ledger {result['spent']}"],
            "shown": self.outcome.shown + (["redirect followed"] if self.followed else []),
            "answers": [] if answered else ["none, though they are good"],
            **self.out_of_bounds(clean),
        }

    def out_of_bounds(self, clean: Clean) -> dict[str, list[str]]:
        """Return what was missed of memory and time, which a busy machine may do."""
        result = self.outcome.result
        if not result:
            return {}
        more, longest_s = result["peak_mib"] - clean.peak_mib, self.outcome.longest_s
        return {
            "memory": [f"{more:+.0f} MiB"] if more > MOST_MEMORY_MIB else [],
            "step": [f"{longest_s * 1e3:.0f} ms"] if longest_s > clean.most_s else [],
        }

    def line(self, clean: Clean) -> str:
        """Return the table's line."""
        result = self.outcome.result
        missed = [f"{name}: {', '.join(what)}" for name, what in self.misses(clean).items() if what]
        if result:
            stats = result["stats"]
            agree = "no" if self.disagreements() else "yes"
            counts = f"{self.seen} / {result['spent']} / {stats['calls']:g}"
            memory = f"{result['peak_mib'] - clean.peak_mib:+.0f}"
            p99 = np.percentile(result["seconds"], 99) * 1e3
            times = f"{self.outcome.longest_s * 1e3:.0f} ({p99:.0f}) | {clean.most_s * 1e3:.0f}"
            cells = [f"{stats['answered']:g}", counts, agree, memory, times]
        else:
            cells = ["", f"{self.seen} / ? / ?", "?", "?", f"? | {clean.most_s * 1e3:.0f}"]
        survived = "yes" if result else "no"
        cells = [self.fault, self.mode, survived, str(self.requests), *cells, str(self.tries)]
        return "| " + " | ".join([*cells, "; ".join(missed) or "nothing"]) + " |"


@dataclass
class Clean:
    """What runs in one mode are like while the server answers well; medians over runs."""

    mode: str
    outcomes: list[Outcome]

    def __post_init__(self) -> None:
        if broken := [o.why for o in self.outcomes if not o.result]:
            raise SystemExit(f"A clean {self.mode} run did not end: {broken[0]}.")

    @property
    def peak_mib(self) -> float:
        """Peak memory."""
        return statistics.median(outcome.result["peak_mib"] for outcome in self.outcomes)

    @property
    def most_s(self) -> float:
        """Longest step that a row may have."""
        if self.mode == "blocking":
            return DEADLINE_S + MOST_BLOCKING_S
        return statistics.median(o.longest_s for o in self.outcomes) + MOST_ASYNC_S

    def __str__(self) -> str:
        longest = sorted(outcome.longest_s * 1e3 for outcome in self.outcomes)
        peaks = sorted(outcome.result["peak_mib"] for outcome in self.outcomes)
        every = np.concatenate([outcome.result["seconds"] for outcome in self.outcomes]) * 1e3
        p50, p99 = np.percentile(every, (50, 99))
        answered = [f"{outcome.result['stats']['answered']:g}" for outcome in self.outcomes]
        return (
            f"Clean {self.mode}, {len(self.outcomes)} runs: step {p50:.0f} ms (median), "
            f"{p99:.0f} ms (99th percentile); longest {longest[0]:.0f}, "
            f"{statistics.median(longest):.0f}, {longest[-1]:.0f} ms (least, median, greatest); "
            f"peak {peaks[0]:.0f}, {statistics.median(peaks):.0f}, {peaks[-1]:.0f} MiB; "
            f"answers {', '.join(answered)}."
        )


def run_once(folder: Path, fault: str, mode: str, limit_s: float) -> Row:
    """Run against one fault."""
    config = replace(CONFIGS[mode], output_dir=tempfile.mkdtemp(dir=folder) + "/run")
    period_s = PERIOD_S if mode == "async" else 0.0
    with FaultServer(after=fault) as server:
        outcome = watch(config, server, period_s=period_s, limit_s=limit_s)
        return Row(fault, mode, outcome, server.total, calls_seen(server), server.followed)


def run_row(folder: Path, fault: str, clean: Clean, limit_s: float) -> Row:
    """Run against one fault, again where time or memory is out of bounds, and keep the least."""
    row = run_once(folder, fault, clean.mode, limit_s)
    while any(row.out_of_bounds(clean).values()) and row.tries <= AGAIN:
        other = run_once(folder, fault, clean.mode, limit_s)
        # The counts of one run, with the least of each bound: a run that fails stays.
        other.tries = row.tries + 1
        if other.outcome.result:
            for name, least in (("peak_mib", min), ("seconds", lambda a, b: min(a, b, key=max))):
                values = row.outcome.result[name], other.outcome.result[name]
                other.outcome.result[name] = least(*values)
        row = other
    return row


# Composed once: Hydra's composition is global to a process and not for several threads.
CONFIGS: dict[str, TrainConfig] = {}


def attack(args: argparse.Namespace, folder: Path) -> int:
    """Run all rows, print the table and return how many miss a target."""
    for mode in args.modes:
        times = (f"advisor.deadline_s={DEADLINE_S}", f"lore.calls.timeout_s={TIMEOUT_S}")
        CONFIGS[mode] = settings(folder, mode, WARM_UP + STEPS, *times)
    with ThreadPoolExecutor(args.jobs) as pool:

        def every(order: Iterable[tuple]) -> Iterable[Any]:
            return pool.map(lambda task: task[0](folder, *task[1:], args.limit), order)

        clean = {}
        for mode in args.modes:
            rows = every((run_once, "fine", mode) for _ in range(args.clean))
            clean[mode] = Clean(mode, [row.outcome for row in rows])
            print(clean[mode], flush=True)
        print(
            f"\n{BUDGET} calls, deadline {DEADLINE_S:g} s, {STEPS} timed vector steps, {args.jobs} "
            "runs at a time. Targets: survived, counts agree, within the budget, nothing shown, "
            f"memory at most {MOST_MEMORY_MIB:g} MiB over the clean median; longest step in async "
            f"at most {MOST_ASYNC_S * 1e3:g} ms over the clean median of longest steps, in "
            f"blocking at most the deadline and {MOST_BLOCKING_S:g} s. A row that misses on time "
            f"or memory is run again up to {AGAIN} times, and the least counts.\n"
        )
        print(
            "| fault | mode | survived | requests | answers | calls: server / ledger / run | agree "
            "| MiB over clean | longest step (99th percentile), ms | at most, ms | runs | missed |"
        )
        print("| --- " * 12 + "|", flush=True)
        rows, missed = 0, Counter()
        tasks = ((run_row, fault, clean[mode]) for fault in args.only for mode in args.modes)
        for row in every(tasks):
            print(row.line(clean[row.mode]), flush=True)
            rows += 1
            misses = [name for name, what in row.misses(clean[row.mode]).items() if what]
            missed.update([*misses, *(["any"] if misses else [])])
    by_target = ", ".join(f"{name} {missed[name]}" for name in TARGETS)
    print(
        f"\n{len(args.only)} faults, {rows} rows: {rows - missed['any']} met, {missed['any']} "
        f"missed (by target: {by_target})."
    )
    return missed["any"]


# ---- outages ----


def run_outage(folder: Path, kind: str, when: str, mode: str, away_s: float) -> tuple[str, bool]:
    """Take the server away for a while; return the table's line, and whether it is right."""
    before_s = 0.0 if when == "start" else BEFORE_S
    # The run goes on long enough for advice to return in time.
    wall_s = before_s + away_s + 1.5 * MOST_STEPS_AWAY / RATE
    steps = WARM_UP + round(wall_s * RATE / ENVS)
    config = replace(
        CONFIGS[f"{kind} {mode}"],
        output_dir=tempfile.mkdtemp(dir=folder) + "/run",
        total_steps=steps * ENVS,
    )
    moments = []

    def go(server: FaultServer) -> None:
        if kind == "refused":
            server.away()
        server.after = kind

    def come(server: FaultServer) -> None:
        server.after = "fine"
        if kind == "refused":
            server.back()

    def meanwhile() -> None:
        if when == "middle":
            time.sleep(before_s)
            go(server)
        moments.append(time.monotonic())
        time.sleep(away_s)
        come(server)
        moments.append(time.monotonic())

    with FaultServer(after=kind if when == "start" else "fine") as server:
        outcome = watch(
            config,
            server,
            period_s=ENVS / RATE,
            limit_s=60.0 + 3.0 * wall_s,
            meanwhile=meanwhile,
        )
    label = f"| {kind} | {when} | {mode} | {away_s:g} "
    if not outcome.result:
        return f"{label}| ? | ? | ? | never | {outcome.why} |", False
    timeline = outcome.result["timeline"]
    left, back = moments

    def at(moment: float) -> tuple[float, int, int, int]:
        return [entry for entry in timeline if entry[0] <= moment][-1]

    lost = outcome.result["spent"] - int(outcome.result["stats"]["answered"])
    returned = [entry for entry in timeline if entry[0] > back and entry[2] > at(back)[2]]
    after = returned[0][1] - at(back)[1] if returned else None
    missed = [] if lost <= MOST_LOST else [f"{lost} calls lost"]
    if after is None or after > MOST_STEPS_AWAY:
        told = "never" if after is None else f"after {after} steps"
        missed.append(f"advice returns {told}")
    cells = [
        *(str(at(back)[1] - at(left)[1]), str(at(back)[3] - at(left)[3]), str(lost)),
        *("never" if after is None else str(after), "; ".join(missed) or "nothing"),
    ]
    return f"{label}| " + " | ".join(cells) + " |", not missed


def outages(args: argparse.Namespace, folder: Path) -> int:
    """Run all outages, print the table and return how many miss a target."""
    rows = [(kind, when, mode) for kind in args.kinds for when in WHEN for mode in args.modes]
    for kind, _, mode in rows:
        # A blocking run would make no step in an outage of one deadline.
        short = kind == "stall"
        times = ("advisor.deadline_s=2", "lore.calls.timeout_s=3") if short else ()
        CONFIGS[f"{kind} {mode}"] = settings(folder, mode, 1, *times)
    print(
        f"The server is away for {args.away:g} s of a run of {RATE:g} environment steps a second, "
        f"from the first question on or {BEFORE_S:g} s later. Targets: at most {MOST_LOST} calls "
        f"spent without an answer, and advice within {MOST_STEPS_AWAY} environment steps of the "
        "server's return. Settings are the defaults; where the server is silent (stall) the "
        "deadline is 2 s.\n"
    )
    print(
        "| outage | when | mode | away, s | steps meanwhile | calls spent meanwhile | calls lost "
        "| steps to advice after return | missed |"
    )
    print("| --- " * 9 + "|", flush=True)
    missed = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for line, right in pool.map(lambda row: run_outage(folder, *row, args.away), rows):
            print(line, flush=True)
            missed += not right
    print(f"\n{len(rows)} outages: {len(rows) - missed} met, {missed} missed.")
    return missed


def main() -> None:
    """Attack, print tables, and fail where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=ATTACKS, default=ATTACKS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--clean", type=int, default=5, help="clean runs of each mode")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds before a kill")
    parser.add_argument("--outages", action="store_true", help="the outages, and no faults")
    parser.add_argument("--kinds", nargs="+", choices=OUTAGES, default=OUTAGES)
    parser.add_argument("--away", type=float, default=20.0, help="seconds of an outage")
    parser.add_argument("--list", action="store_true", help="print the names of the faults")
    args = parser.parse_args()
    if args.list:
        print("\n".join(ATTACKS))
        return
    CONTEXT.set_forkserver_preload(["lore_torchrl.dreamer.run", "lore_torchrl.advisors.chat"])
    register_configs()
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="attack_"))
    try:
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            missed = (outages if args.outages else attack)(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{(time.monotonic() - started) / 60:.1f} minutes.")
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
