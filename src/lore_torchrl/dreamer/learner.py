"""Losses, optimiser and update step of stock DreamerV3, and LoRe's place in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrl.objectives import (
    DreamerV3ActorLoss,
    DreamerV3Loss,
    DreamerV3ModelLoss,
    DreamerV3ValueLoss,
    SoftUpdate,
)
from torchrl.objectives.utils import ValueEstimators
from torchrl.trainers.algorithms import DreamerV3OptimizationStepper, DreamerV3Optimizer

from lore_torchrl.configs import DreamerConfig
from lore_torchrl.dreamer.agent import RECONSTRUCTED, DreamerAgent
from lore_torchrl.lore import LoRe


@dataclass(frozen=True)
class Learner:
    """What one update needs: the composed loss, the optimizer and the stepper."""

    loss: DreamerV3Loss
    optimizer: DreamerV3Optimizer
    stepper: DreamerV3OptimizationStepper


def build_learner(
    config: DreamerConfig,
    agent: DreamerAgent,
    *,
    lore: LoRe | None = None,
    device: torch.device | str = "cpu",
) -> Learner:
    """Build the learner; without ``lore`` it is stock DreamerV3.

    Args:
        config: Rates and weights.
        agent: Networks to train.

    Keyword Args:
        lore: Advice around the agent's actor. Default: ``None``, for the stock losses.
        device: Where the loss buffers live. Default: ``"cpu"``.
    """
    c, seen = config, [name for name in agent.observed if name in RECONSTRUCTED]
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
        reco_symlog=[c.symlog and name != "frame" for name in seen],
        global_average=False,
        detach_output=False,
    )
    model_loss.set_keys(pixels=seen, reco_pixels=[RECONSTRUCTED[name] for name in seen])
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
    # The discount is the continuation's.
    actor_loss.make_value_estimator(ValueEstimators.TDLambda, gamma=1.0, lmbda=c.lmbda)
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
    trained = [agent.world_model, agent.actor, value_loss]
    parameters = [parameter for part in trained for parameter in part.parameters()]
    if lore is None:
        loss = DreamerV3Loss(model_loss, actor_loss, value_loss, **weights)
    else:
        loss = lore.loss(model_loss, actor_loss, value_loss, **weights)
        parameters += lore.parameters()
    loss = loss.to(device)
    optimizer = DreamerV3Optimizer(
        [p for p in parameters if p.requires_grad],
        lr=c.lr,
        agc=c.adaptive_grad_clip,
        eps=c.optimizer_eps,
        warmup_steps=c.lr_warmup,
    )
    stepper = DreamerV3OptimizationStepper(
        loss,
        optimizer,
        SoftUpdate(value_loss, tau=c.slow_critic_tau),
        compile_train_step=c.compile_train_step,
        cudagraph=c.cudagraph,
        mixed_precision=c.mixed_precision,
    )
    return Learner(loss, optimizer, stepper)
