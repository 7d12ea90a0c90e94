"""How far a planner's answers are shared by classes of situations, in MiniGrid.

Run from the project's root::

    python benchmarks/bench_classes.py

A player that remembers what it has seen follows the planner but for half of its steps, which
are random, and asks about every situation: of its steps, in order, the share whose exact key
or whose class (``abstract_state``) one of at most ``--calls`` answers before has served, and how
many of the answers that a class served are what the planner says of the situation itself.
"""

from __future__ import annotations

import argparse
import json

import gymnasium as gym
import numpy as np

from lore_torchrl.envs.batch import row_seed
from lore_torchrl.envs.minigrid import MiniGrid

ROOMS = (
    "MiniGrid-DoorKey-5x5-v0",
    "MiniGrid-DoorKey-8x8-v0",
    "MiniGrid-KeyCorridorS3R1-v0",
    "MiniGrid-MultiRoom-N2-S4-v0",
    "MiniGrid-ObstructedMaze-1Dl-v0",
    "MiniGrid-UnlockPickup-v0",
    "BabyAI-GoToLocal-v0",
)


def play(room: str, steps: int) -> list[tuple[str, str, int]]:
    """Return key, class and advice of each step."""
    adapter = MiniGrid(room)
    describer, planner = adapter.make_describer(memory=True), adapter.make_planner()
    generator = np.random.default_rng(0)
    env = gym.make(room)
    seen = _seen(env.reset(seed=row_seed(0, 0, evaluation=True))[0])
    last, asked = None, []
    for _ in range(steps):
        describer.observe(0, seen, last, reset=last is None)
        request = describer.request(0, seen)
        values = planner(request)
        drawn = int(generator.integers(len(request.actions)))
        if values is not None:
            best = int(np.argmax(values))
            asked.append((request.cache_key, describer.abstract_state(0, seen), best))
            last = drawn if generator.random() < 0.5 else best
        else:
            last = drawn
        observation, _, terminated, truncated, _ = env.step(last)
        if terminated or truncated:
            observation, last = env.reset()[0], None
        seen = _seen(observation)
    return asked


def _seen(observation: dict) -> dict:
    return observation | {"direction": np.array([observation["direction"]])}


def sharing(asked: list[tuple[str, str, int]], calls: int) -> dict[str, float]:
    """Return what a cache of keys and classes serves, its answers bought in order."""
    exact: dict[str, int] = {}
    classes: dict[str, int] = {}
    hits = near = right = 0
    for key, name, best in asked:
        if key in exact:
            hits += 1
        elif name in classes:
            near += 1
            right += classes[name] == best
        elif len(exact) < calls:
            exact[key] = classes[name] = best
    return {
        "steps": len(asked),
        "calls": len(exact),
        "exact": round(hits / len(asked), 3),
        "class": round(near / len(asked), 3),
        "class_right": round(right / max(near, 1), 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rooms", nargs="+", default=ROOMS)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--calls", type=int, default=300)
    arguments = parser.parse_args()
    for room in arguments.rooms:
        row = sharing(play(room, arguments.steps), arguments.calls)
        print(json.dumps({"room": room, **row}), flush=True)


if __name__ == "__main__":
    main()
