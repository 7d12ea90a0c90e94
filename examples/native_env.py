"""A TorchRL environment of your own, all rows in tensors: python examples/native_env.py 3000."""

import sys

import torch
from torchrl.data import Binary, Composite, OneHot, Unbounded
from torchrl.envs import EnvBase

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.configs import EnvConfig, ScriptedAdvisorConfig, TrainConfig
from lore_torchrl.dreamer.run import train
from lore_torchrl.envs.adapter import MemorylessDescriber
from lore_torchrl.envs.batch import row_seed

SIZE, MOVES = 7, torch.tensor([[-1, 0], [1, 0], [0, -1], [0, 1]])


class Meadow(EnvBase):
    """All rows in one step: find the flower, which is worth 1, on a field of 7 x 7."""

    def __init__(self, num_envs, seed, max_steps):
        super().__init__(batch_size=[num_envs])
        self.max_steps = max_steps
        self.observation_spec = Composite(
            observation=Unbounded((num_envs, 4)),
            success=Binary(shape=(num_envs, 1), dtype=torch.bool),
            shape=[num_envs],
        )
        self.action_spec = OneHot(4, shape=(num_envs, 4))
        self.reward_spec = Unbounded((num_envs, 1))
        self.full_done_spec = Composite(
            {
                name: Binary(shape=(num_envs, 1), dtype=torch.bool)
                for name in ("done", "terminated", "truncated")
            },
            shape=[num_envs],
        )
        self.cells = torch.zeros(num_envs, 2, 2, dtype=torch.long)  # of agent and flower
        self.steps = torch.zeros(num_envs, 1, dtype=torch.long)
        self.set_seed(seed)

    def _set_seed(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def _reset(self, tensordict=None, **kwargs):
        begins = torch.ones_like(self.steps, dtype=torch.bool)
        if tensordict is not None:
            begins = tensordict.get("_reset", begins)  # a collector resets the rows that ended
        drawn = torch.randint(SIZE, self.cells.shape, generator=self.generator)
        self.cells = torch.where(begins.unsqueeze(-1), drawn, self.cells)
        self.steps = self.steps.masked_fill(begins, 0)
        return self._seen().set("done", torch.zeros_like(begins))

    def _step(self, tensordict):
        self.cells[:, 0] += MOVES[tensordict["action"].long().argmax(-1)]
        self.cells.clamp_(0, SIZE - 1)
        self.steps += 1
        found = (self.cells[:, 0] == self.cells[:, 1]).all(-1, keepdim=True)
        late = self.steps >= self.max_steps
        ends = {"terminated": found, "truncated": late, "done": found | late}
        return self._seen().update({"reward": found.float(), **ends, "success": found})

    def _seen(self):
        seen = self.observation_spec.zero()
        return seen.set("observation", self.cells.flatten(1) / (SIZE - 1))


class MeadowDescriber(MemorylessDescriber):
    in_keys = ("observation",)
    actions = ("up", "down", "left", "right")

    def cache_key(self, row, observation):
        return ",".join(str(round(value * (SIZE - 1))) for value in observation["observation"])

    abstract_state = cache_key

    def request(self, row, observation):
        key = self.cache_key(row, observation)
        here, flower = key[:3], key[4:]
        text = f"You are in row, column {here} of a field, the flower is in {flower}."
        return AdviceRequest(text, self.actions, key, facts={"cells": key})


class MeadowAdapter:
    def __init__(self, env_id, *, max_steps=None):
        self.max_steps = 30 if max_steps is None else max_steps

    def make_env(self, *, num_envs, seed, evaluation=False, parallel=False, pixels=False):
        # One generator draws for all rows; evaluation has a seed that training never has.
        return Meadow(num_envs, row_seed(seed, 0, evaluation=evaluation), self.max_steps)

    def make_describer(self, *, memory=False, image=False):
        return MeadowDescriber()

    def make_planner(self):
        return nearer


def nearer(request):
    """One value an action: how much nearer it brings the flower."""
    row, column, to_row, to_column = map(int, request.facts["cells"].split(","))
    way = torch.tensor([row - to_row, to_row - row, column - to_column, to_column - column])
    return way.sign().float()


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    env = EnvConfig(adapter="native_env.MeadowAdapter", id="Meadow")
    advisor = ScriptedAdvisorConfig()
    config = TrainConfig(env=env, advisor=advisor, total_steps=steps, output_dir="outputs/native")
    print(f"held-out success {train(config)['eval/success']:.2f}")
