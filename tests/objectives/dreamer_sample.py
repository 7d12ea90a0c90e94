"""A tiny DreamerV3 agent, its learner and random replay samples, for the tests of the losses."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import torch
from tensordict import TensorDict
from torch import nn

from lore_torchrl.configs import (
    BanditConfig,
    DreamerConfig,
    GateConfig,
    LoReConfig,
    LossConfig,
    TemperatureConfig,
)
from lore_torchrl.dreamer.agent import DreamerAgent, build_agent
from lore_torchrl.dreamer.learner import Learner, build_learner
from lore_torchrl.lore import LoRe
from lore_torchrl.objectives import LoReActorLoss

OBSERVATION, ACTIONS, BATCH, TIME = 6, 4, 3, 4
STATE, BELIEF = 8, 16


def tiny_config(**kwargs) -> DreamerConfig:
    sizes = {
        "hidden_dim": 8,
        "belief_dim": BELIEF,
        "num_blocks": 2,
        "num_categoricals": 2,
        "num_classes": 4,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "actor_layers": 1,
        "value_layers": 1,
        "num_bins": 15,
        "imagination_horizon": 3,
        "lr_warmup": 0,
        "lr": 1e-3,
        "compile_train_step": False,
        "cudagraph": False,
    }
    return DreamerConfig(**{**sizes, **kwargs})


def tiny_agent(config: DreamerConfig | None = None, *, seed: int = 0, device="cpu") -> DreamerAgent:
    torch.manual_seed(seed)
    agent = build_agent(
        config or tiny_config(), observation_dim=OBSERVATION, num_actions=ACTIONS, device=device
    )
    # Stock heads start at or near zero; give every gradient something to work on.
    with torch.no_grad():
        for module in (agent.actor, agent.value):
            for parameter in module.parameters():
                if parameter.ndim == 2 and parameter.shape[0] in (ACTIONS, 15):
                    nn.init.normal_(parameter)
    return agent


def sober(agent: DreamerAgent) -> DreamerAgent:
    """Keep the critic's values, else in the millions, between -17 and 17."""
    with torch.no_grad():
        bias = agent.value[0].module.model[-1].bias
        bias.fill_(-30.0)[6:9] = 0.0
    return agent


# The terms of the paper: advice is learned whatever followed it.
PAPER = {
    "imitation_weight": 0.0,
    "prior_weight": 0.3,
    "multiplier_lr": 1e-3,
    "multiplier_max": 1.0,
}


def wrap(actor_loss, **settings) -> LoReActorLoss:
    """LoRe's loss around a stock one: settings of the loss and parts, by keyword."""
    names = {part.name for part in fields(LossConfig)}
    config = LossConfig(**{name: value for name, value in settings.items() if name in names})
    parts = {name: value for name, value in settings.items() if name not in names}
    return unbounded(LoReActorLoss(actor_loss, config, **parts))


def unbounded(loss: LoReActorLoss) -> LoReActorLoss:
    """Let a random critic's values count as they are, as after episodes of all kinds."""
    loss.least_return.fill_(-torch.inf)
    loss.greatest_return.fill_(torch.inf)
    return loss


def lore_config(*, gate=None, temperature=None, **loss) -> LoReConfig:
    """LoRe with a gate that lets advice through, in the paper's form unless imitation is on."""
    return LoReConfig(
        bandit=BanditConfig(enabled=False),
        gate=GateConfig(**{"tau": 0.1, "kappa": 20.0, **(gate or {})}),
        temperature=TemperatureConfig(**(temperature or {})),
        loss=LossConfig(**{**PAPER, "gated": False, **loss}),
    )


class SilentAdvisor:
    """Has no answer to any question."""

    async def advise(self, requests):
        return [None] * len(requests)


def lore_around(config: LoReConfig, agent: DreamerAgent, **describer) -> LoRe:
    """LoRe around an agent, advised by nobody; ``describer`` is what its describer has."""
    anchors = describer.get("anchors")
    number = agent.num_actions if anchors is None else len(anchors)
    names = [f"action {i}" for i in range(number)]
    return LoRe(
        config,
        actor=agent.actor,
        value=agent.value,
        advisor=SilentAdvisor(),
        describer=SimpleNamespace(actions=names, **describer),
        latent_sizes=(agent.state_dim, agent.belief_dim),
        world=agent.world,
    )


def tiny_learner(
    lore: LoReConfig | None = None,
    *,
    config: DreamerConfig | None = None,
    seed: int = 0,
    device="cpu",
) -> Learner:
    """Build a learner; the same seed gives the same networks, with or without LoRe."""
    config = config or tiny_config()
    agent = tiny_agent(config, seed=seed, device=device)
    around = None if lore is None else lore_around(lore, agent)
    learner = build_learner(config, agent, lore=around, device=device)
    if lore is not None:
        unbounded(learner.loss.actor_loss)
    return learner


def advice(*batch: int, mask=True) -> dict[str, torch.Tensor]:
    return {
        "llm_prior_logits": 3 * torch.randn(*batch, ACTIONS),
        "llm_confidence": torch.rand(*batch, 1),
        "llm_mask": torch.full((*batch, 1), mask),
    }


def tiny_sample(*, seed: int = 1, mask: bool | None = True, time: int = TIME) -> TensorDict:
    """Draw a replay sample; ``mask=None`` leaves the advice entries out."""
    torch.manual_seed(seed)
    shape = (BATCH, time)
    is_init = torch.zeros(*shape, 1, dtype=torch.bool)
    is_init[0, 3] = is_init[1, 1] = True
    sample = TensorDict(
        {
            "state": torch.randn(*shape, STATE),
            "belief": torch.randn(*shape, BELIEF),
            "action": nn.functional.one_hot(torch.randint(ACTIONS, shape), ACTIONS).float(),
            "is_init": is_init,
            "next": {
                "observation": torch.randn(*shape, OBSERVATION),
                "reward": torch.randn(*shape, 1),
                "done": torch.zeros(*shape, 1, dtype=torch.bool),
                "terminated": torch.zeros(*shape, 1, dtype=torch.bool),
            },
        },
        shape,
    )
    # One episode terminates, another is truncated; a reset follows.
    sample["next", "done"][0, 2] = sample["next", "done"][1, 0] = True
    sample["next", "terminated"][0, 2] = True
    if mask is not None:
        for key, value in advice(*shape, mask=mask).items():
            sample["next", key] = value
    return sample


def latents(n: int = 10, *, seed: int = 2, mask=True) -> TensorDict:
    """Draw posterior states with the advice for them, what was done and what it returned."""
    torch.manual_seed(seed)
    return TensorDict(
        {
            "state": torch.randn(n, STATE),
            "belief": torch.randn(n, BELIEF),
            **advice(n, mask=mask),
            "action": nn.functional.one_hot(torch.randint(ACTIONS, (n,)), ACTIONS).float(),
            "lore_return": 5 * torch.randn(n, 1),
        },
        [n],
    )


def _stock_name(name: str) -> str:
    """Name that a parameter or buffer has in the loss without LoRe's wrapper."""
    return name.replace("actor_loss.actor_loss.", "actor_loss.")


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        _stock_name(name): p.grad.clone()
        for name, p in module.named_parameters()
        if p.grad is not None
    }


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {_stock_name(name): value.clone() for name, value in module.state_dict().items()}


def update(learner: Learner, sample: TensorDict, *, seed: int = 3):
    """Make one update; return the metrics, the gradients and the random state after it."""
    torch.manual_seed(seed)
    metrics = learner.stepper.step(None, sample)
    return metrics, gradients(learner.loss), torch.get_rng_state()


def assert_only_the_actor_learns(agent: DreamerAgent, expected: dict[str, torch.Tensor]) -> None:
    """The actor has these gradients, world model and critic have none."""
    found = gradients(agent.actor)
    assert set(found) == set(expected) and any(grad.any() for grad in found.values())
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad)
    assert not gradients(agent.value) and not gradients(agent.world_model)
