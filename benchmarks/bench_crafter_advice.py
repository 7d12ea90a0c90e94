"""What Crafter's planner unlocks, and how far its answers are shared by classes of situations.

Run from the project's root::

    python benchmarks/bench_crafter_advice.py

Held-out worlds, one episode each of ``--steps`` steps. ``planner`` and ``random`` act by
themselves: mean number of achievements of 22, with a 95% bootstrap interval over episodes.
``mixed`` follows the planner but for 40% random steps, and asks about every situation: of its
steps, in order, the share whose exact key or whose class (``abstract_state``) one of at most
``--calls`` answers before has served, and how many of the answers that a class served are what
the planner says of the situation itself.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from bench_classes import sharing
from lore_torchrl.envs.batch import row_seed
from lore_torchrl.envs.crafter import Crafter
from lore_torchrl.envs.crafter.rules import ACTIONS
from lore_torchrl.experiments import bootstrap


def play(episodes: int, steps: int, chance: float) -> tuple[list[int], list[tuple[str, str, int]]]:
    """Play, and return what each episode unlocked, and key, class and advice of each step."""
    adapter = Crafter(max_steps=steps)
    describer, planner = adapter.make_describer(), adapter.make_planner()
    generator = np.random.default_rng(0)
    unlocked, asked = [], []
    for row in range(episodes):
        env = adapter.make_gym()
        observation, _ = env.reset(seed=row_seed(0, row, evaluation=True))
        over = False
        while not over:
            request = describer.request(0, observation)
            best = int(np.argmax(planner(request)))
            asked.append((request.cache_key, describer.abstract_state(0, observation), best))
            drawn = int(generator.integers(len(ACTIONS)))
            action = drawn if generator.random() < chance else best
            observation, _, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
        unlocked.append(int(observation["achievements"].sum()))
    return unlocked, asked


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--calls", type=int, default=500)
    arguments = parser.parse_args()
    for name, chance in (("planner", 0.0), ("random", 1.0)):
        unlocked, _ = play(arguments.episodes, arguments.steps, chance)
        mean, *interval = map(float, bootstrap(lambda x: x.mean(-1), np.array(unlocked)))
        row = {"mean": mean, "interval": interval, "episodes": unlocked}
        print(json.dumps({"player": name, **row}), flush=True)
    _, asked = play(arguments.episodes, arguments.steps, 0.4)
    print(json.dumps({"player": "mixed", **sharing(asked, arguments.calls)}))


if __name__ == "__main__":
    main()
