"""Both kinds of policy, with random policies and advice, for tests that hold for each."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torchrl.modules import IndependentNormal, OneHotCategorical, TanhNormal

from lore_torchrl.modules import AdviceBatch
from lore_torchrl.policies import CategoricalPolicy, Gaussian, GaussianPolicy

A = 4
LOW, HIGH = torch.tensor([-2.0, -1.0]), torch.tensor([2.0, 3.0])
ANCHORS = [[-2.0, 1.0], [0.0, 3.0], [0.0, -1.0], [2.0, 1.0]]
KINDS = ("categorical", "normal", "tanh_normal")
EACH = pytest.mark.parametrize("name", KINDS)


def kind_of(name: str):
    if name == "categorical":
        return CategoricalPolicy()
    bounds = (LOW, HIGH) if name == "tanh_normal" else None
    return GaussianPolicy(ANCHORS, bounds=bounds, scale_range=(0.1, 1.2))


def policy_of(name: str, n: int = 6, *, spread: float = 1.0):
    """Draw policies, very different ones with a large ``spread``."""
    if name == "categorical":
        return torch.log_softmax(spread * torch.randn(n, A), -1)
    return Gaussian(spread * torch.randn(n, 2), torch.rand(n, 2) + 0.1 / spread)


def raw_advice(n: int = 6, *, confidence: float = 1.0, scale: float = 3.0):
    mask = torch.ones(n, 1, dtype=torch.bool)
    return scale * torch.randn(n, A), torch.full((n, 1), confidence), mask


def advice(n: int = 6, **kwargs) -> AdviceBatch:
    return AdviceBatch.clean(*raw_advice(n, **kwargs))


def actor_of(name: str) -> ProbabilisticTensorDictSequential:
    """An actor over ``state`` ``[*B, 3]``, with opinions."""
    if name == "categorical":
        net = TensorDictModule(nn.Linear(3, A), ["state"], ["logits"])
        settings = {"in_keys": ["logits"], "distribution_class": OneHotCategorical}
    else:
        bounded = name == "tanh_normal"

        def split(x):
            loc, scale = x.chunk(2, -1)
            return loc, scale.exp()

        net = TensorDictModule(
            nn.Sequential(nn.Linear(3, 4), Apply(split)), ["state"], ["loc", "scale"]
        )
        settings = {
            "in_keys": ["loc", "scale"],
            "distribution_class": TanhNormal if bounded else IndependentNormal,
            "distribution_kwargs": {"low": LOW, "high": HIGH} if bounded else {},
        }
    head = ProbabilisticTensorDictModule(
        out_keys=["action"],
        default_interaction_type=InteractionType.RANDOM,
        return_log_prob=True,
        log_prob_key="action_log_prob",
        **settings,
    )
    return ProbabilisticTensorDictSequential(net, head)


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)
