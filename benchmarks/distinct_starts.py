"""How many of the held-out episodes begin where training has begun too.

    python benchmarks/distinct_starts.py

For each MiniGrid task: distinct initial states among the first episodes of a run's four training
environments and among its 100 held-out episodes, and how many of the held-out ones training saw.
A state is the whole grid, the agent's place and heading, and the mission.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import gymnasium as gym

from lore_torchrl.envs.batch import row_seed
from lore_torchrl.envs.minigrid import MiniGrid

TASKS = (
    "MiniGrid-Empty-5x5-v0",
    "MiniGrid-DoorKey-5x5-v0",
    "MiniGrid-DoorKey-8x8-v0",
    "MiniGrid-KeyCorridorS3R1-v0",
    "MiniGrid-KeyCorridorS4R3-v0",
    "MiniGrid-MultiRoom-N4-S5-v0",
    "MiniGrid-UnlockPickup-v0",
    "BabyAI-GoToLocal-v0",
)


def starts(env: gym.Env, seed: int, episodes: int) -> Iterator[int]:
    """Hash the initial states of the episodes that begin with one seed, as a run plays them."""
    for episode in range(episodes):
        env.reset(seed=seed if episode == 0 else None)
        world = env.unwrapped
        grid = world.grid.encode().tobytes()
        yield hash((grid, tuple(world.agent_pos), int(world.agent_dir), world.mission))


def main() -> None:
    """Print one row a task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--episodes", type=int, default=500, help="training episodes, of 4 rows")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run")
    settings = parser.parse_args()
    print(
        "| task | training episodes | distinct | held-out episodes | distinct | seen in training |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for task in settings.tasks:
        env = MiniGrid(task).make_gym()
        each = settings.episodes // 4
        train = [h for row in range(4) for h in starts(env, row_seed(settings.seed, row), each)]
        held_out = [
            h
            for row in range(100)
            for h in starts(env, row_seed(settings.seed, row, evaluation=True), 1)
        ]
        seen = sum(start in set(train) for start in held_out)
        counts = (len(train), len(set(train)), len(held_out), len(set(held_out)), seen)
        print(f"| {task} | " + " | ".join(map(str, counts)) + " |", flush=True)


if __name__ == "__main__":
    main()
