"""Your own environment, its describer and an advisor: python examples/custom_env.py 3000."""

import sys

import gymnasium as gym
import numpy as np

from lore_torchrl.advisors.base import Advice, AdviceRequest
from lore_torchrl.configs import EnvConfig, TrainConfig
from lore_torchrl.dreamer.run import train
from lore_torchrl.envs.adapter import MemorylessDescriber
from lore_torchrl.envs.gym_adapter import GymAdapter

SWITCHES = 6


class Lock(gym.Env):
    """A lock opens when its switches are pressed from left to right; a wrong one resets it."""

    def __init__(self, max_steps=60):
        self.max_steps, self.render_mode = max_steps, "rgb_array"
        box = gym.spaces.Box(0.0, 1.0, (SWITCHES + 1,), np.float32)
        self.observation_space = gym.spaces.Dict({"observation": box})
        self.action_space = gym.spaces.Discrete(SWITCHES)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.pressed = self.steps = 0
        return self._observe(), {}

    def step(self, action):
        self.pressed = self.pressed + 1 if action == self.pressed else 0
        self.steps += 1
        is_open = self.pressed == SWITCHES
        return self._observe(), float(is_open), is_open, self.steps >= self.max_steps, {}

    def _observe(self):
        return {"observation": np.eye(SWITCHES + 1, dtype=np.float32)[self.pressed]}

    def render(self):
        return np.full((32, 32, 3), 255 * self.pressed // SWITCHES, dtype=np.uint8)


class LockDescriber(MemorylessDescriber):
    in_keys = ("observation",)
    actions = tuple(f"switch {number}" for number in range(SWITCHES))

    def cache_key(self, row, observation):
        return str(observation["observation"].argmax())

    abstract_state = cache_key

    def request(self, row, observation):
        key = self.cache_key(row, observation)
        return AdviceRequest(f"{key} of {SWITCHES} switches are down.", self.actions, key)


class LockAdapter(GymAdapter):
    def __init__(self, env_id, *, max_steps=None):
        self.max_steps = 60 if max_steps is None else max_steps

    def make_gym(self, pixels=False):
        return Lock(self.max_steps)

    def make_describer(self, *, memory=False, image=False):
        return LockDescriber()


class NextSwitch:
    async def advise(self, requests):
        return [Advice(tuple(3.0 * np.eye(SWITCHES)[int(r.cache_key)])) for r in requests]


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    env = EnvConfig(adapter="custom_env.LockAdapter", id="Lock")
    config = TrainConfig(env=env, total_steps=steps, output_dir="outputs/custom_env")
    print(f"held-out success {train(config, advisor=NextSwitch())['eval/success']:.2f}")
