"""A toy world for the transform's tests: corridors, and an advisor that knows them."""

from __future__ import annotations

from functools import partial

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torchrl.data import Categorical, Composite, NonTensor, OneHot, Unbounded
from torchrl.envs import (
    EnvBase,
    SerialEnv,
    TransformedEnv,
)

from lore_torchrl.advisors.base import Advice, AdviceRequest
from lore_torchrl.service import AdviceService, CallBudget, CallPolicy
from lore_torchrl.transforms import AdviceTransform

N_ACTIONS = 3


class Corridor(EnvBase):
    """Every step is one forward; the observation says which corridor and how far.

    ``length`` is where the episode ends, with a reward of 1. No two corridors and no
    two steps of an episode look alike.
    """

    def __init__(self, number=0, length=4, *, onehot=False, text=False):
        super().__init__()
        self.number, self.length, self.text = number, length, text
        self.position = 0
        self.observation_spec = Composite(observation=Unbounded((1,), dtype=torch.int64))
        if text:
            self.observation_spec["mission"] = NonTensor((), example_data="a mission")
        self.action_spec = OneHot(N_ACTIONS) if onehot else Categorical(N_ACTIONS)
        self.reward_spec = Unbounded((1,))

    def _output(self):
        out = TensorDict({"observation": torch.tensor([100 * self.number + self.position])})
        if self.text:
            out.set_non_tensor("mission", f"corridor {self.number} from {self.position}")
        return out

    def _reset(self, tensordict=None, **kwargs):
        self.position = 0
        return self._output()

    def _step(self, tensordict):
        self.position += 1
        out = self._output()
        end = self.position >= self.length
        out["reward"] = torch.tensor([float(end)])
        out["done"] = out["terminated"] = torch.tensor([end])
        return out

    def _set_seed(self, seed):
        pass


class Describe:
    """Keeps a diary, and takes the number in the observation for the key."""

    in_keys = ("observation",)
    actions = ("back", "stay", "forward")

    def __init__(self):
        self.diary = []

    def observe(self, row, observation, action, *, reset):
        self.diary.append((row, int(observation["observation"][0]), action, reset))

    def cache_key(self, row, observation):
        return str(int(observation["observation"][0]))

    def request(self, row, observation):
        key = self.cache_key(row, observation)
        return AdviceRequest(f"At {key}.", self.actions, key)


def logits_of(observation):
    """What the advisor says about an observation; no two are alike."""
    value = observation.float()
    return torch.cat([value, -value, value + 0.5], -1)


class Know:
    """Tells the number that it was asked about."""

    def __init__(self):
        self.asked = []

    async def advise(self, requests):
        numbers = [float(request.cache_key) for request in requests]
        self.asked += [int(number) for number in numbers]
        return [Advice(logits=(n, -n, n + 0.5), confidence=0.5) for n in numbers]


def make_service(advisor=None, total=1000, *, timeout_s=5.0, **config):
    budget = CallBudget(total)
    policy = CallPolicy(budget, **config)
    advisor = Know() if advisor is None else advisor
    return AdviceService(advisor, budget=budget, policy=policy, timeout_s=timeout_s)


def make_env(service, *, lengths=(4, 4), describer=None, batched=SerialEnv, worker=None, **config):
    base = batched(
        len(lengths),
        [partial(Corridor, n, length, **(worker or {})) for n, length in enumerate(lengths)],
    )
    return TransformedEnv(
        base, AdviceTransform(service, Describe() if describer is None else describer, **config)
    )


class Act(TensorDictModuleBase):
    """A policy that can use advice: writes forward and its betas."""

    in_keys = ("observation",)
    out_keys = ("action", "lore_beta")

    def __init__(self, betas=None):
        super().__init__()
        self.betas = betas

    def forward(self, td):
        shape = td.batch_size
        td["action"] = torch.full(shape, 2)
        if self.betas is None:
            td["lore_beta"] = torch.ones(*shape, 1)
        else:
            td["lore_beta"] = torch.tensor(self.betas).view(*shape, 1)
        return td


def assert_aligned(td):
    """Where there is advice, it is about the observation of the same tensordict."""
    mask = td["llm_mask"]
    expected = torch.where(mask, logits_of(td["observation"]), 0.0)
    torch.testing.assert_close(td["llm_prior_logits"], expected)
    torch.testing.assert_close(td["llm_confidence"], 0.5 * mask.float())
