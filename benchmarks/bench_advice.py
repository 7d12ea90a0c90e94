"""Success with cached advice and an untrained policy, by how answers are shared.

Run from the project's root::

    python benchmarks/bench_advice.py --competence 0.5

An agent whose policy is untrained, and so nearly uniform, follows the advice of a planner
that is right in a share of its answers. Gate, mixer, cache and budget are those of a training
run; bandit and PriorNet are off, and nothing is learned. The first half of the steps spends
the calls. In the second half: episodes that succeed, steps that have advice, and the share of
those where its first choice is the planner's. Means over seeds with a 95% bootstrap interval.
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np

from lore_torchrl import keys
from lore_torchrl.advisors.scripted import ScriptedAdvisor
from lore_torchrl.configs import (
    BanditConfig,
    CallsConfig,
    EnvConfig,
    LoggerConfig,
    LoReConfig,
    TrainConfig,
)
from lore_torchrl.dreamer.run import build_run
from lore_torchrl.envs.minigrid import MiniGridDescriber, MiniGridPlanner
from lore_torchrl.experiments import bootstrap

VARIANTS = {
    "exact situations only": {
        "abstract_states": False,
        "answers_averaged": None,
        "noop_filter": False,
    },
    "latest answer of the abstract state": {"answers_averaged": None, "noop_filter": False},
    "averaged": {"noop_filter": False},
    "averaged, no-ops filtered": {},
}


class Judge:
    """Knows the planner's choice for each observation."""

    def __init__(self) -> None:
        self._describer = MiniGridDescriber()
        self._planner = MiniGridPlanner()
        self._choices: dict[str, int | None] = {}

    def choice(self, observation: dict) -> int | None:
        """Return the planner's first choice, ``None`` where it has none."""
        key = self._describer.cache_key(0, observation)
        if key not in self._choices:
            values = self._planner(self._describer.request(0, observation))
            self._choices[key] = None if values is None else int(np.argmax(values))
        return self._choices[key]


def measure(args: argparse.Namespace, settings: dict, seed: int, judge: Judge) -> list[float]:
    """Return success, share of advised steps, and share of those that are right."""
    config = TrainConfig(
        seed=seed,
        total_steps=args.steps,
        checkpoint_interval=None,
        output_dir=tempfile.mkdtemp(),
        env=EnvConfig(id=args.env),
        lore=LoReConfig(
            calls=CallsConfig(budget=args.calls, **settings),
            bandit=BanditConfig(enabled=False),
        ),
        logger=LoggerConfig(backends=[], progress_bar=False, figures=False),
    )
    advisor = ScriptedAdvisor(MiniGridPlanner(), competence=args.competence, seed=seed)
    run = build_run(config, advisor=advisor)
    won = ended = advised = right = steps = seen = 0
    for batch in run.collector:
        seen += batch.numel()
        if seen > args.steps // 2:
            done = batch["next", "done"]
            won += int(batch["next", "success"][done].sum())
            ended += int(done.sum())
            steps += batch.numel()
            for row in batch.reshape(-1).unbind(0):
                if row[keys.MASK].item():
                    observation = {name: row[name] for name in ("image", "direction", "mission")}
                    advised += 1
                    best = int(row[keys.PRIOR_LOGITS].argmax())
                    right += best == judge.choice(observation)
        if seen >= args.steps:
            break
    run.close()
    return [won / max(1, ended), advised / steps, right / max(1, advised)]


def cell(values: np.ndarray) -> str:
    """Return mean and interval."""
    mean, low, high = bootstrap(lambda x: x.mean(-1), values)
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="MiniGrid-DoorKey-5x5-v0")
    parser.add_argument("--competence", type=float, default=0.5)
    parser.add_argument("--calls", type=int, default=98)
    parser.add_argument("--steps", type=int, default=6_000)
    parser.add_argument("--seeds", type=int, default=8)
    args = parser.parse_args()
    judge = Judge()
    print(f"{args.env}, competence {args.competence}, {args.calls} calls\n")
    print("| answers | episodes that succeed | steps with advice | of those right |")
    print("| --- | --- | --- | --- |")
    for name, settings in VARIANTS.items():
        rows = np.array([measure(args, settings, seed, judge) for seed in range(args.seeds)])
        print(f"| {name} | " + " | ".join(cell(column) for column in rows.T) + " |", flush=True)


if __name__ == "__main__":
    main()
