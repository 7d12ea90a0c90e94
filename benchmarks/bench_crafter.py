"""Crafter's speed: ours against the raw environment, in one process.

Run from the project's root::

    python benchmarks/bench_crafter.py

``raw`` is ``crafter.Env`` as it comes, which draws its picture at every step. The others are
:class:`~lore_torchrl.envs.crafter.CrafterEnv` with the symbolic view, with pixels and with both,
and the batch that a run collects from (two rows, one after the other in this process). All play
the same random actions; making new worlds is not counted, but timed (last line). They take turns
in short segments, in random order; each ratio is the median over rounds of (steps per second /
those of ``raw`` within the round), with a 95% bootstrap interval over rounds. Target: 0.8.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

import numpy as np
import torch
from torchrl.envs import EnvBase

from lore_torchrl.envs.batch import close_env
from lore_torchrl.envs.crafter import Crafter, CrafterEnv
from lore_torchrl.envs.crafter.rules import ACTIONS, crafter
from ratios import paired_ratios

TARGET = 0.8
Segment = Callable[[np.ndarray], float]


def raw() -> Segment:
    """Play Crafter as it comes."""
    env = crafter.Env(seed=0)
    env.reset()

    def segment(actions: np.ndarray) -> float:
        spent = 0.0
        for action in actions:
            start = time.perf_counter()
            done = env.step(int(action))[2]
            spent += time.perf_counter() - start
            if done:
                env.reset()
        return len(actions) / spent

    return segment


def ours(observe: str) -> Segment:
    """Play our Gymnasium environment."""
    env = CrafterEnv(observe=observe)
    env.reset(seed=0)

    def segment(actions: np.ndarray) -> float:
        spent = 0.0
        for action in actions:
            start = time.perf_counter()
            _, _, terminated, truncated, _ = env.step(int(action))
            spent += time.perf_counter() - start
            if terminated or truncated:
                env.reset()
        return len(actions) / spent

    return segment


def batch(observe: str) -> tuple[Segment, EnvBase]:
    """Play the batch that a run collects from, without its policy."""
    env = Crafter(observe=observe).make_env(num_envs=2, seed=0)
    held = {"tensordict": env.reset()}
    one_hot = torch.eye(len(ACTIONS), dtype=torch.long)

    def segment(actions: np.ndarray) -> float:
        spent, tensordict = 0.0, held["tensordict"]
        for pair in torch.as_tensor(actions).reshape(-1, 2):
            tensordict["action"] = one_hot[pair]
            start = time.perf_counter()
            tensordict = env.step(tensordict)["next"]
            spent += time.perf_counter() - start
            if tensordict["done"].any():
                tensordict = env.reset()
        held["tensordict"] = tensordict
        return len(actions) / spent

    return segment, env


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=200, help="of each in a round; even")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator, envs = np.random.default_rng(0), []
    players = {"raw": raw()}
    for observe in ("symbolic", "pixels", "both"):
        players[observe] = ours(observe)
    for observe in ("symbolic", "pixels"):
        players[f"{observe}, batch"], env = batch(observe)
        envs.append(env)
    speeds: dict[str, list[float]] = {name: [] for name in players}
    for number in range(arguments.rounds + 1):
        actions = generator.integers(len(ACTIONS), size=arguments.steps)
        for name in random.Random(number).sample(list(players), len(players)):
            speed = players[name](actions)
            if number:  # the first round warms up
                speeds[name].append(speed)
    for env in envs:
        close_env(env)
    for name, row in paired_ratios(speeds, "raw").items():
        print(json.dumps({"env": name, **row, "met": row["ratio"] >= TARGET}))
    worlds = []
    for seed in range(8):
        start = time.perf_counter()
        crafter.Env(seed=seed).reset()
        worlds.append(time.perf_counter() - start)
    print(json.dumps({"new raw world, s": round(float(np.median(worlds)), 2)}))


if __name__ == "__main__":
    main()
