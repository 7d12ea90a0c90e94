"""A DreamerV3 loop on TorchRL's own classes, and the three changes that add LoRe to it.

    python examples/pipeline.py            # stock
    python examples/pipeline.py --lore     # the same loop, with the lines marked 1, 2 and 3

Short on purpose: no evaluation, no logging, no checkpoints. examples/train.py has them.
"""

from __future__ import annotations

import argparse

import torch
from torchrl.collectors import Collector
from torchrl.envs import InitTracker, TensorDictPrimer
from torchrl.envs.utils import ExplorationType
from torchrl.objectives import (
    DreamerV3ActorLoss,
    DreamerV3Loss,
    DreamerV3ModelLoss,
    DreamerV3ValueLoss,
)
from torchrl.objectives.utils import SoftUpdate, ValueEstimators

from lore_torchrl import LoRe, LoReConfig
from lore_torchrl.advisors.scripted import ScriptedAdvisor
from lore_torchrl.configs import CallsConfig, DreamerConfig
from lore_torchrl.dreamer.agent import build_agent
from lore_torchrl.dreamer.replay import (
    OBSERVED_KEYS,
    build_replay,
    stream_records,
    write_back_latents,
)
from lore_torchrl.envs.minigrid import MiniGrid, MiniGridDescriber, MiniGridPlanner


def main(with_lore: bool, steps: int, *, updates: int = 1) -> dict[str, float]:
    """Train for some steps and return the last losses."""
    torch.manual_seed(0)
    # [start:setup]
    env = MiniGrid("MiniGrid-DoorKey-5x5-v0").make_env(num_envs=4, seed=0)
    sizes = DreamerConfig()
    agent = build_agent(  # your networks
        sizes,
        observation_dim=env.observation_spec["observation"].shape[-1],
        num_actions=env.action_spec.shape[-1],
    )
    env.append_transform(InitTracker())
    env.append_transform(TensorDictPrimer(agent.primers(), expand_specs=True))
    model_loss, actor_loss, value_loss = stock_losses(agent, sizes)
    # [end:setup]
    # [start:lore]
    if with_lore:
        advisor, describer = ScriptedAdvisor(MiniGridPlanner()), MiniGridDescriber()
        settings = LoReConfig(calls=CallsConfig(budget=98))
        lore = LoRe(
            settings, actor=agent.actor, value=agent.value, advisor=advisor, describer=describer
        )
        env = lore.advise(env)  # 1. The environment asks for advice.
        acting = lore.policy()  # 2. The acting policy mixes it in.
        loss = lore.loss(model_loss, actor_loss, value_loss)  # 3. The loss learns from it.
        observed = (*OBSERVED_KEYS, *lore.observed_keys)  # And replay keeps it.
    # [end:lore]
    else:
        lore, acting, observed = None, agent.actor, OBSERVED_KEYS
        loss = DreamerV3Loss(model_loss, actor_loss, value_loss)

    # [start:collector]
    collector = Collector(
        env,
        agent.policy(acting),
        frames_per_batch=32,
        total_frames=steps,
        exploration_type=ExplorationType.RANDOM,
        auto_register_policy_transforms=False,
    )
    replay = build_replay(num_envs=4, buffer_size=10_000, batch_size=8, seq_len=16)
    optimizer = torch.optim.Adam([p for p in loss.parameters() if p.requires_grad], lr=4e-4)
    target = SoftUpdate(value_loss, tau=0.02)
    losses: dict[str, float] = {}
    if with_lore:
        returns = lore.returns()  # Of finished episodes: they decide what is imitated.
        imitated = lore.imitation_sampler(replay, batch_size=8 * 16)  # Steps of all of replay.
    # [end:collector]
    # [start:loop]
    for batch in collector:
        records = stream_records(batch, observed)
        if with_lore:
            lore.observe(batch)  # Once a batch: the bandit learns which segments gained.
            records = returns.prepare(records)
        where = replay.extend(records)
        if with_lore:
            returns.write(replay, records, where)
        if not replay.can_sample():
            continue
        for _ in range(updates):
            drawn = replay.sample().reshape(8, 17)
            sample = drawn[:, :-1].exclude("index", "index_generation")
            terms = loss(imitated.extend(sample) if with_lore else sample)
            total = sum(value for name, value in terms.items() if name.startswith("loss_"))
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            target.step()
            write_back_latents(replay, drawn, terms["replay_context"])
            losses = {k: v.item() for k, v in terms.items() if k.startswith("loss_")}
    # [end:loop]
    collector.shutdown()
    losses["calls"] = float(lore.service.budget.spent) if with_lore else 0.0
    if with_lore:
        lore.close()
    return losses


def stock_losses(agent, sizes: DreamerConfig):
    """Build TorchRL's three DreamerV3 losses."""
    model_loss = DreamerV3ModelLoss(
        agent.world_model,
        num_reward_bins=sizes.num_bins,
        lambda_continue=1.0,
        continue_target_scale=1 - 1 / sizes.continuation_horizon,
        global_average=False,
        detach_output=False,
    )
    model_loss.set_keys(pixels="observation", reco_pixels="reco")
    actor_loss = DreamerV3ActorLoss(
        agent.actor,
        agent.value,
        agent.imagination,
        continuation_model=agent.continuation,
        imagination_horizon=sizes.imagination_horizon,
    )
    actor_loss.make_value_estimator(ValueEstimators.TDLambda, gamma=1.0, lmbda=sizes.lmbda)
    value_loss = DreamerV3ValueLoss(
        agent.value,
        value_loss="two_hot",
        num_value_bins=sizes.num_bins,
        actor_loss=actor_loss,
        slow_critic_regularization=1.0,
    )
    return model_loss, actor_loss, value_loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lore", action="store_true")
    parser.add_argument("--steps", type=int, default=2_000)
    arguments = parser.parse_args()
    for name, value in main(arguments.lore, arguments.steps).items():
        print(f"{name:24s} {value:.4f}")
