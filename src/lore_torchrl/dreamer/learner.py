"""Losses, optimiser and update step of stock DreamerV3, and LoRe's place in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.objectives import (
    DreamerV3ActorLoss,
    DreamerV3Loss,
    DreamerV3ModelLoss,
    DreamerV3ValueLoss,
    SoftUpdate,
)
from torchrl.objectives.utils import ValueEstimators
from torchrl.trainers.algorithms import DreamerV3OptimizationStepper, DreamerV3Optimizer

from lore_torchrl.configs import DreamerConfig, LoReConfig
from lore_torchrl.control import AdviceBandit
from lore_torchrl.dreamer.agent import RECONSTRUCTED, DreamerAgent
from lore_torchrl.modules import (
    LatentDisagreement,
    LogitMixer,
    LoReActor,
    PriorNet,
    TemperatureAligner,
    UncertaintyGate,
    ValueEnsemble,
)
from lore_torchrl.objectives import LoReActorLoss, LoReDreamerV3Loss
from lore_torchrl.policies import CategoricalPolicy, GaussianPolicy, PolicyKind


def _settings(config: object, *drop: str) -> dict[str, Any]:
    """Return the keywords that a configuration holds for its class."""
    return {name: value for name, value in vars(config).items() if name not in drop}


@dataclass(frozen=True)
class Learner:
    """What one update needs: the composed loss, the optimiser and the stepper."""

    loss: DreamerV3Loss
    optimizer: DreamerV3Optimizer
    target_updater: SoftUpdate
    stepper: DreamerV3OptimizationStepper


def build_lore_actor(
    config: LoReConfig,
    agent: DreamerAgent,
    *,
    anchors: torch.Tensor | Sequence[Sequence[float]] | None = None,
    device: torch.device | str = "cpu",
) -> LoReActor:
    """Build gate, aligner and mixer around the agent's actor.

    Args:
        config: LoRe's settings.
        agent: Agent whose actor and critic are used.

    Keyword Args:
        anchors: The describer's, ``[K, A]``, where actions are continuous. Default: ``None``.
        device: Where the buffers live. Default: ``"cpu"``.

    Raises:
        ValueError: If actions are continuous and there are no anchors, or a setting is on
            that needs discrete ones.
    """
    # What LoRe draws for its own networks must not move the agent's random stream.
    with torch.random.fork_rng():
        actor = _build_lore_actor(config, agent, anchors, device)
    return actor.compile_decision() if config.compile_decision else actor


def policy_kind(
    agent: DreamerAgent,
    anchors: torch.Tensor | Sequence[Sequence[float]] | None = None,
    **settings: float,
) -> PolicyKind:
    """Return the kind of an agent's policy.

    Args:
        agent: The agent.
        anchors: The describer's, ``[K, A]``, where actions are continuous. Default: ``None``.
        **settings: For :class:`~lore_torchrl.policies.GaussianPolicy`.

    Raises:
        ValueError: If actions are continuous and there are no anchors.
    """
    if agent.action_bounds is None:
        return CategoricalPolicy()
    if anchors is None:
        raise ValueError("Advice on continuous actions needs the describer's anchors.")
    bounds, scale_range = agent.action_bounds, agent.actor.scale_range
    return GaussianPolicy(anchors, bounds=bounds, scale_range=scale_range, **settings)


def _build_lore_actor(
    config: LoReConfig,
    agent: DreamerAgent,
    anchors: torch.Tensor | Sequence[Sequence[float]] | None,
    device: torch.device | str,
) -> LoReActor:
    gate_kwargs = _settings(config.gate)
    if gate_kwargs["hysteresis"] is not None:
        gate_kwargs["hysteresis"] = tuple(gate_kwargs["hysteresis"])
    kind = policy_kind(agent, anchors, min_scale=config.mixer.min_scale)
    aligner = TemperatureAligner(**vars(config.temperature))
    mixer = LogitMixer(kind, **_settings(config.mixer, "min_scale"), temperature=aligner)
    gate = UncertaintyGate(**gate_kwargs)
    # Of the critic only its logits are wanted here, not the decoded value.
    critic: TensorDictModuleBase = agent.value[0]
    sizes = (agent.state_dim, agent.belief_dim)
    if config.gate.value_source == "ensemble":
        critic = ValueEnsemble(*sizes, **vars(config.value_ensemble))
    disagreement = prior_net = None
    if config.gate.disagreement_weight:
        settings = vars(config.disagreement)
        disagreement = LatentDisagreement(*sizes, agent.num_actions, **settings)
    if config.prior_net.enabled:
        settings = _settings(config.prior_net, "enabled")
        num_choices = agent.num_actions if agent.action_bounds is None else len(anchors)
        prior_net = PriorNet(sum(sizes), num_choices, **settings)
    parts = {"disagreement": disagreement, "prior_net": prior_net}
    actor = LoReActor(agent.actor, gate, mixer, value_model=critic, **parts)
    for part in (gate, mixer, critic, *parts.values()):
        if part is not None:
            part.to(device)
    return actor


def build_bandit(
    config: LoReConfig, *, seed: int = 0, device: torch.device | str = "cpu"
) -> AdviceBandit | None:
    """Build the bandit that chooses where advice acts, if the configuration has one."""
    if not config.bandit.enabled:
        return None
    return AdviceBandit(**_settings(config.bandit, "enabled"), seed=seed).to(device)


def build_learner(
    config: DreamerConfig,
    agent: DreamerAgent,
    *,
    lore: LoReConfig | None = None,
    lore_actor: LoReActor | None = None,
    device: torch.device | str = "cpu",
) -> Learner:
    """Build the learner; without ``lore`` it is stock DreamerV3.

    Args:
        config: Rates and weights.
        agent: Networks to train.

    Keyword Args:
        lore: LoRe's settings, or ``None`` for the stock losses. Default: ``None``.
        lore_actor: The acting mixture whose gate and mixer the losses share. Needed with
            ``lore``.
        device: Where the loss buffers live. Default: ``"cpu"``.
    """
    c = config
    model_loss = DreamerV3ModelLoss(
        agent.world_model,
        num_reward_bins=c.num_bins,
        free_bits=c.free_nats,
        kl_mode="separate",
        lambda_dynamic=c.dynamic_weight,
        lambda_representation=c.representation_weight,
        unimix=c.unimix,
        lambda_continue=1.0,
        continue_target_scale=1 - 1 / c.continuation_horizon,
        reco_symlog=[c.symlog and name == "observation" for name in agent.observed],
        global_average=False,
        detach_output=False,
    )
    model_loss.set_keys(
        pixels=list(agent.observed), reco_pixels=[RECONSTRUCTED[name] for name in agent.observed]
    )
    actor_loss = DreamerV3ActorLoss(
        agent.actor,
        agent.value,
        agent.imagination,
        continuation_model=agent.continuation,
        imagination_horizon=c.imagination_horizon,
        entropy_bonus=c.entropy_bonus,
        # Through a continuous action the gradient of the imagined return itself passes.
        use_reinforce=agent.action_bounds is None,
        return_normalization_min_scale=c.return_min_scale,
    )
    actor_loss.make_value_estimator(ValueEstimators.TDLambda, gamma=c.gamma, lmbda=c.lmbda)
    value_loss = DreamerV3ValueLoss(
        agent.value,
        value_loss="two_hot",
        num_value_bins=c.num_bins,
        actor_loss=actor_loss,
        slow_critic_regularization=c.slow_critic_weight,
    )
    weights = {
        "replay_value_loss_weight": c.replay_value_weight,
        "continuation_horizon": c.continuation_horizon,
        "lmbda": c.lmbda,
    }
    parameters = [
        *agent.world_model.parameters(),
        *agent.actor.parameters(),
        *value_loss.parameters(),
    ]
    if lore is None:
        loss = DreamerV3Loss(model_loss, actor_loss, value_loss, **weights)
    else:
        lore_loss = LoReActorLoss(
            actor_loss,
            gate=lore_actor.gate,
            mixer=lore_actor.mixer,
            prior_net=lore_actor.prior_net,
            disagreement=lore_actor.disagreement,
            value_ensemble=_ensemble(lore_actor),
            **vars(lore.loss),
        )
        loss = LoReDreamerV3Loss(model_loss, lore_loss, value_loss, gamma=c.gamma, **weights)
        for part in (lore_actor.prior_net, lore_actor.disagreement, _ensemble(lore_actor)):
            parameters += [] if part is None else part.parameters()
    loss = loss.to(device)
    optimizer = DreamerV3Optimizer(
        [p for p in parameters if p.requires_grad],
        lr=c.lr,
        agc=c.adaptive_grad_clip,
        eps=c.optimizer_eps,
        warmup_steps=c.lr_warmup,
    )
    target_updater = SoftUpdate(value_loss, tau=c.slow_critic_tau)
    stepper = DreamerV3OptimizationStepper(
        loss,
        optimizer,
        target_updater,
        compile_train_step=c.compile_train_step,
        cudagraph=c.cudagraph,
        mixed_precision=c.mixed_precision,
    )
    return Learner(loss, optimizer, target_updater, stepper)


def _ensemble(lore_actor: LoReActor) -> ValueEnsemble | None:
    critic = lore_actor.value_model
    return critic if isinstance(critic, ValueEnsemble) else None
