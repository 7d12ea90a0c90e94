"""DreamerV1 on Pendulum, from TorchRL's own classes, and the changes that add LoRe to it.

    python examples/dreamer_v1.py            # stock
    python examples/dreamer_v1.py --lore     # the same loop, with the lines marked 1, 2 and 3

Dream to Control: https://arxiv.org/abs/1912.01603. Small, and short on purpose.
"""

from __future__ import annotations

import argparse
from statistics import fmean

import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModuleBase,
)
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import (
    Composite,
    LazyTensorStorage,
    SliceSampler,
    TensorDictReplayBuffer,
    Unbounded,
)
from torchrl.envs import DreamerEnv, EnvBase, RewardScaling, RewardSum, TensorDictPrimer
from torchrl.envs.utils import ExplorationType
from torchrl.modules import (
    MLP,
    DreamerActor,
    RSSMPosterior,
    RSSMPrior,
    RSSMRollout,
    TanhNormal,
    WorldModelWrapper,
)
from torchrl.objectives import DreamerActorLoss, DreamerModelLoss, DreamerValueLoss
from torchrl.objectives.utils import ValueEstimators

from lore_torchrl import (
    AdviceService,
    AdviceTransform,
    CallBudget,
    GaussianPolicy,
    LogitMixer,
    LoReActor,
    LoReActorLoss,
    UncertaintyGate,
    keys,
)
from lore_torchrl.advisors.scripted import ScriptedAdvisor
from lore_torchrl.configs import LossConfig
from lore_torchrl.envs.pendulum import Pendulum

STATE, BELIEF, WIDTH = 16, 64, 64  # sizes
BATCH, TIME, HORIZON = 16, 16, 12  # sequences in a batch, their steps, steps imagined
KEPT = ["state", "belief", "action", ("next", "observation"), ("next", "reward"), ("next", "done")]


def main(lore: bool, steps: int, *, updates: int = 4) -> dict[str, float]:
    """Train for some steps; return the last losses, the mean return and the calls spent."""
    torch.manual_seed(0)
    adapter = Pendulum()
    env = adapter.make_env(num_envs=1, seed=0)
    dreamer = Dreamer(env)
    env.append_transform(RewardSum())
    env.append_transform(RewardScaling(loc=0.0, scale=0.1))
    env.append_transform(TensorDictPrimer(belief=Unbounded((BELIEF,)), expand_specs=True))
    model_loss, actor_loss, value_loss = stock_losses(dreamer)
    actor, kept = dreamer.actor, KEPT

    advisor = ScriptedAdvisor(adapter.make_planner(), sharpness=6.0)
    service = AdviceService(advisor, budget=CallBudget(98))
    # [start:lore]
    if lore:
        # 1. The environment asks for advice: which of seven torques?
        describer = adapter.make_describer()
        env.append_transform(
            AdviceTransform(service, describer, abstract_states=False, noop_filter=False)
        )
        # 2. The acting policy mixes it in, as a Gaussian.
        gate = UncertaintyGate()
        policy = GaussianPolicy(describer.anchors, bounds=dreamer.bounds, scale_range=(0.1, 5.0))
        mixer = LogitMixer(policy, max_kl=3.0)
        actor = LoReActor(dreamer.actor, gate, mixer)
        # 3. The actor's loss learns from it, whatever it returned: replay holds no returns.
        actor_loss = LoReActorLoss(
            actor_loss,
            LossConfig(
                imitation_weight=0.0,
                prior_weight=0.3,
                prior_kl="policy_to_prior",
                multiplier_lr=1e-3,
            ),
            gate=gate,
            mixer=mixer,
        )
        kept = [*KEPT, *keys.ADVICE_KEYS]  # and replay keeps it
    # [end:lore]

    collector = Collector(
        env,
        dreamer.policy(actor),
        frames_per_batch=20,
        total_frames=steps,
        exploration_type=ExplorationType.RANDOM,
        auto_register_policy_transforms=False,
    )
    # The rollout knows no resets, so that each slice lies within one episode.
    replay = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100_000),
        sampler=SliceSampler(slice_len=TIME, end_key=("next", "done")),
        batch_size=BATCH * TIME,
    )
    networks = nn.ModuleList([dreamer.world_model, dreamer.actor, dreamer.value])
    optimizer = torch.optim.Adam(networks.parameters(), lr=6e-4)
    losses, returns = {}, []
    with service:
        for batch in collector:
            batch = batch.reshape(-1)
            returns += batch["next", "episode_reward"][batch["next", "done"]].tolist()
            replay.extend(batch.select(*kept))
            for _ in range(updates):
                terms, posterior = model_loss(replay.sample().reshape(BATCH, TIME))
                # The root of a step holds the posterior of its own observation, for which the
                # advice at the root was given: here nothing is read under "next".
                actor_terms, imagined = actor_loss(posterior.reshape(-1))
                terms.update(actor_terms).update(value_loss(imagined)[0])
                losses = {k: v.sum() for k, v in terms.items() if k.startswith("loss_")}
                optimizer.zero_grad()
                sum(losses.values()).backward()
                for network in networks:
                    nn.utils.clip_grad_norm_(network.parameters(), 100.0)
                optimizer.step()
    collector.shutdown()
    results = {name: value.item() for name, value in losses.items()}
    if returns:
        results["mean_return"] = fmean(returns)
    return results | {"calls": float(service.budget.spent)}


class Dreamer:
    """The networks of DreamerV1, for vector observations and bounded actions."""

    def __init__(self, env: EnvBase) -> None:
        size = env.observation_spec["observation"].shape[-1]
        action = env.action_spec_unbatched
        self.bounds = (action.space.low, action.space.high)
        latent, next_latent = ["state", "belief"], [("next", "state"), ("next", "belief")]
        image, mlp = (1, 1, size), {"num_cells": WIDTH, "activation_class": nn.ELU}

        prior = RSSMPrior(action, WIDTH, BELIEF, STATE, action_dim=action.shape[-1])
        posterior = RSSMPosterior(WIDTH, STATE, rnn_hidden_dim=BELIEF, obs_embed_dim=WIDTH)
        encoder = MLP(size, WIDTH, depth=1, **mlp)
        decoder = MLP(STATE + BELIEF, image, depth=2, **mlp)
        reward = MLP(STATE + BELIEF, 1, depth=2, **mlp)
        prior_out = [("next", "prior_mean"), ("next", "prior_std"), "_", ("next", "belief")]
        posterior_out = [("next", "posterior_mean"), ("next", "posterior_std"), ("next", "state")]

        self.world_model = WorldModelWrapper(
            Seq(
                Mod(encoder, [("next", "observation")], [("next", "embedded")]),
                RSSMRollout(
                    Mod(prior, [*latent, "action"], prior_out),
                    Mod(posterior, [("next", "belief"), ("next", "embedded")], posterior_out),
                ),
                # The stock loss sums over an image's three dimensions: a vector is one of 1 x 1.
                Mod(decoder, next_latent, [("next", "reco_pixels")]),
                Mod(nn.Unflatten(-1, image), [("next", "observation")], [("next", "pixels")]),
            ),
            Mod(reward, next_latent, [("next", "reward")]),
        )
        self.imagination = DreamerEnv(
            WorldModelWrapper(
                Mod(prior, [*latent, "action"], ["_", "_", "state", "belief"]),
                Mod(reward, latent, ["reward"]),
            ),
            prior_shape=(STATE,),
            belief_shape=(BELIEF,),
        )
        spec = Composite(state=Unbounded(STATE), belief=Unbounded(BELIEF))
        self.imagination.observation_spec, self.imagination.state_spec = spec, spec.clone()
        self.imagination.action_spec, self.imagination.reward_spec = action, Unbounded(1)

        self.actor = ProbabilisticTensorDictSequential(
            Mod(DreamerActor(action.shape[-1], 2, WIDTH), latent, ["loc", "scale"]),
            # What tanh_loc=True would do: here it is done before the advice is mixed in.
            Mod(lambda loc: 5.0 * torch.tanh(loc / 5.0), ["loc"], ["loc"]),
            ProbabilisticTensorDictModule(
                ["loc", "scale"],
                ["action"],
                distribution_class=TanhNormal,
                distribution_kwargs={"low": action.space.low, "high": action.space.high},
            ),
        )
        # DreamerActor learns the size of its input from the first that it gets.
        self.actor(TensorDict(state=torch.zeros(STATE), belief=torch.zeros(BELIEF)))
        self.value = Mod(MLP(STATE + BELIEF, 1, depth=2, **mlp), latent, ["state_value"])
        self._encode = Mod(encoder, ["observation"], ["embedded"])
        self._observe = Mod(posterior, ["belief", "embedded"], ["_", "_", "state"])
        self._carry = Mod(prior, [*latent, "action"], ["_", "_", "_", ("next", "belief")])

    def policy(self, actor: TensorDictModuleBase) -> Seq:
        """Build the acting policy: observation and belief in, action and next belief out."""
        return Seq(self._encode, self._observe, actor, self._carry)


def stock_losses(dreamer: Dreamer) -> tuple[DreamerModelLoss, DreamerActorLoss, DreamerValueLoss]:
    """Build TorchRL's three losses of DreamerV1."""
    actor_loss = DreamerActorLoss(
        dreamer.actor, dreamer.value, dreamer.imagination, imagination_horizon=HORIZON
    )
    actor_loss.make_value_estimator(ValueEstimators.TDLambda, gamma=0.99, lmbda=0.95)
    model_loss = DreamerModelLoss(dreamer.world_model, free_nats=1)
    return model_loss, actor_loss, DreamerValueLoss(dreamer.value, gamma=0.99)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lore", action="store_true")
    parser.add_argument("--steps", type=int, default=2_000)
    arguments = parser.parse_args()
    for name, value in main(arguments.lore, arguments.steps).items():
        print(f"{name:24s} {value:.4f}")
