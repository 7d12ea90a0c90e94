"""A chain of states with a goal at its end, as an environment and as a describer."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, SerialEnv, StepCounter, TransformedEnv

from lore_torchrl.envs.adapter import MemorylessDescriber
from lore_torchrl.sandbox import Program, ProgramSet

STATES = 6
LEFT, STAY, RIGHT = range(3)


class Chain(EnvBase):
    """States 0 to 5; right of the last but one ends the episode with a reward of 1.

    The first state is 1; left of it lies a pit, which ends the episode with nothing.
    """

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(
            observation=Bounded(0, STATES - 1, (1,), dtype=torch.int64)
        )
        self.action_spec, self.reward_spec = Categorical(3), Unbounded((1,))
        self.state = 1

    def _reset(self, tensordict=None, **kwargs):
        self.state = 1
        return TensorDict({"observation": torch.tensor([self.state])})

    def _step(self, tensordict):
        self.state += int(tensordict["action"]) - 1
        ended = torch.tensor([self.state in (0, STATES - 1)])
        return TensorDict(
            {
                "observation": torch.tensor([self.state]),
                "reward": torch.tensor([float(self.state == STATES - 1)]),
                "done": ended,
                "terminated": ended,
            }
        )

    def _set_seed(self, seed):
        pass


class ChainDescriber(MemorylessDescriber):
    in_keys = ("observation",)
    actions = ("left", "stay", "right")
    program_fields = {"n": "int, the state"}  # noqa: RUF012

    def program_view(self, row, observation):
        return {"n": int(observation["observation"][0])}


def chain_env(*transforms, rows: int = 1, max_steps: int = 8) -> TransformedEnv:
    env = TransformedEnv(SerialEnv(rows, Chain), StepCounter(max_steps))
    for transform in transforms:
        env.append_transform(transform)
    return env


def progress_set(body: str, **settings) -> ProgramSet:
    program = Program("progress", f"def progress(obs):\n    n = obs['n']\n    {body}")
    return ProgramSet([program], **settings)


def play(env, *actions: int):
    """Step with the same actions in each row; return what was stepped, and the root after it."""
    steps, td = [], env.reset()
    for action in actions:
        td["action"] = torch.full(env.batch_size, action)
        stepped, td = env.step_and_maybe_reset(td)
        steps.append(stepped)
    return torch.stack(steps, 1), td
