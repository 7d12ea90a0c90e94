"""A tiny agent with continuous actions, advised on named anchors, for the tests of the losses."""

from __future__ import annotations

import torch
from dreamer_sample import BELIEF, OBSERVATION, STATE, tiny_config
from tensordict import TensorDict
from torch import nn

from lore_torchrl.dreamer.agent import DreamerAgent, build_agent

LOW, HIGH = torch.tensor([-2.0, -1.0]), torch.tensor([2.0, 3.0])
ANCHORS = [[-2.0, 1.0], [-1.0, 3.0], [0.0, 1.0], [1.0, -1.0], [2.0, 1.0]]


def continuous_agent(
    *, seed: int = 0, opinionated: bool = True, device: str = "cpu", **settings
) -> DreamerAgent:
    """Build the agent; heads that start at zero give gradients only if ``opinionated``."""
    torch.manual_seed(seed)
    agent = build_agent(
        tiny_config(**settings),
        observation_dim=OBSERVATION,
        num_actions=2,
        action_bounds=(LOW, HIGH),
        device=device,
    )
    modules = (agent.actor, agent.value, agent.imagination) if opinionated else ()
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                if parameter.ndim == 2 and parameter.shape[0] in (4, 15):
                    nn.init.normal_(parameter, std=0.3)
    return agent


def advised_latents(n: int = 12, *, seed: int = 2, mask: bool | None = None) -> TensorDict:
    """Draw posterior states with advice on the anchors, what was done and what it returned.

    By default two of three have advice. Actions lie within the bounds, some of them at one.
    """
    torch.manual_seed(seed)
    given = torch.arange(n).unsqueeze(-1) % 3 != 0
    return TensorDict(
        {
            "state": torch.randn(n, STATE),
            "belief": torch.randn(n, BELIEF),
            "llm_prior_logits": 3 * torch.randn(n, len(ANCHORS)),
            "llm_confidence": torch.rand(n, 1),
            "llm_mask": given if mask is None else torch.full((n, 1), mask),
            "action": (LOW + (HIGH - LOW) * (1.2 * torch.rand(n, 2) - 0.1)).clamp(LOW, HIGH),
            "lore_return": 5 * torch.randn(n, 1),
        },
        [n],
    )
