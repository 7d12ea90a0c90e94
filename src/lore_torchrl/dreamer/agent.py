"""Stock DreamerV3: vector and image observations, discrete and continuous actions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torchrl.data import Bounded, Composite, OneHot, Unbounded
from torchrl.envs.model_based.dreamer import DreamerEnv
from torchrl.modules import (
    DreamerV3DiscreteActor,
    DreamerV3ImageDecoder,
    DreamerV3ImageEncoder,
    DreamerV3MLP,
    RSSMPosteriorV3,
    RSSMPriorV3,
    RSSMRolloutV3,
    RSSMStateEstimatorV3,
    SymExpTwoHot,
    WorldModelWrapper,
)
from torchrl.objectives import symexp, symlog

from lore_torchrl import keys
from lore_torchrl.configs import DreamerConfig
from lore_torchrl.modules import DreamerV3ContinuousActor, WorldModel

#: Where the world model writes what it makes of each thing seen.
RECONSTRUCTED = {
    "observation": "reco",
    "frame": "reco_frame",
    keys.FEATURES: "reco_features",
    keys.SUBGOAL: "reco_subgoal",
}


def _float(value: Tensor) -> Tensor:
    """Leave autocast: losses and distributions are computed in float32."""
    return value.float()


def _carry(*values: Tensor) -> tuple[Tensor, ...]:
    """Hand the latent state and the action to the next step, in float32."""
    return tuple(map(_float, values))


def _float_symexp(value: Tensor) -> Tensor:
    return symexp(value.float())


def _join(*parts: Tensor) -> Tensor:
    return torch.cat(parts, -1)


def _known(mask: Tensor, predicted: Tensor, features: Tensor) -> Tensor:
    """Predict what is masked as it is, at no loss."""
    return torch.where(mask, predicted, features)


@dataclass(frozen=True)
class DreamerAgent:
    """The modules of one DreamerV3 agent; all share parameters where DreamerV3 shares them.

    Args:
        world_model: Encoder, RSSM rollout, decoder, reward and continuation heads.
        imagination: Model-based environment over the shared dynamics and reward head.
        continuation: Imagined continuation probability from the shared head.
        actor: One-hot categorical actor over state and belief, or with ``action_bounds`` a
            Gaussian one.
        value: Two-hot critic; writes ``state_value_logits`` and ``state_value``.
        world: What an action leads to and what that is worth: imagination, continuation, value.
        filter: Encoder and state estimator of the acting policy: observation in, posterior
            ``state`` and ``belief`` out.
        state_dim: Size of the flattened stochastic state.
        belief_dim: Size of the deterministic state.
        num_actions: Number of actions, or of dimensions of a continuous one.
        observed: What the agent sees of an observation: ``observation``, ``frame``, or both, and
            ``llm_features`` with their mask, ``llm_subgoal``.
        action_bounds: Lowest and highest continuous action, each ``[A]``. Default: ``None``.
        num_subgoals: Subgoals that the agent sees. Default: ``None``, it sees none.
    """

    world_model: TensorDictSequential
    imagination: DreamerEnv
    continuation: TensorDictSequential
    actor: ProbabilisticTensorDictSequential
    value: TensorDictSequential
    world: WorldModel
    filter: TensorDictSequential
    state_dim: int
    belief_dim: int
    num_actions: int
    observed: tuple[str, ...]
    action_bounds: tuple[Tensor, Tensor] | None = None
    num_subgoals: int | None = None

    def policy(
        self, actor: TensorDictModuleBase | None = None, *after: TensorDictModuleBase
    ) -> TensorDictSequential:
        """Build the acting policy.

        It reads what is :attr:`observed`, ``is_init`` and the primed ``state``, ``belief``,
        ``previous_action``, and writes ``action`` and their successors.

        Args:
            actor: What picks the action. Default: the stock actor.
            *after: Modules between the action and its hand-over to the next step.
        """
        return TensorDictSequential(
            *self.filter,
            self.actor if actor is None else actor,
            *after,
            TensorDictModule(
                _carry,
                in_keys=["state", "belief", "action"],
                out_keys=[("next", "state"), ("next", "belief"), ("next", "previous_action")],
            ),
        )

    def primers(self) -> dict[str, Unbounded]:
        """Specs of what a :class:`~torchrl.envs.TensorDictPrimer` must carry for the policy."""
        return {
            "state": Unbounded((self.state_dim,)),
            "belief": Unbounded((self.belief_dim,)),
            "previous_action": Unbounded((self.num_actions,)),
        }


def build_agent(
    config: DreamerConfig,
    *,
    observation_dim: int | None = None,
    frame_shape: tuple[int, int, int] | None = None,
    num_actions: int,
    action_bounds: tuple[Tensor, Tensor] | None = None,
    features_dim: int | None = None,
    num_subgoals: int | None = None,
    features_hidden: int = 32,
    device: torch.device | str = "cpu",
) -> DreamerAgent:
    """Build the networks of stock DreamerV3 from TorchRL's public modules.

    Paper: https://arxiv.org/abs/2301.04104.

    Args:
        config: Sizes.

    Keyword Args:
        observation_dim: Size of the flat ``observation``. Default: ``None``, there is none.
        frame_shape: Channels, rows and columns of the image ``frame``. Default: ``None``, there
            is none.
        num_actions: Number of discrete actions, or of dimensions of a continuous one.
        action_bounds: Lowest and highest continuous action, each ``[A]``. Default: ``None``,
            the actions are discrete.
        features_dim: Size of ``llm_features``, which have an encoder and a decoder of one hidden
            layer and are embedded beside the rest (late fusion). Where ``llm_features_mask`` is
            false they are not reconstructed. Default: ``None``, there are none.
        num_subgoals: Size of ``llm_subgoal``, which is embedded and reconstructed likewise, so that
            the latent state, and with it actor and critic, tells the goal. Default: ``None``, the
            agent does not see it.
        features_hidden: Width of these encoders and decoders. Default: ``32``.
        device: Where the parameters live. Default: ``"cpu"``.

    Raises:
        ValueError: If there is nothing to see.
    """
    if observation_dim is None and frame_shape is None:
        raise ValueError("An agent needs something to see: give observation_dim or frame_shape.")
    c = config
    state_dim = c.num_categoricals * c.num_classes
    features = state_dim + c.belief_dim
    with torch.device(device):
        cells = {"num_cells": c.hidden_dim, "norm_eps": c.norm_eps}
        encoders, decoders, embed_dim = {}, {}, 0
        if observation_dim is not None:
            encoders["observation"] = DreamerV3MLP(observation_dim, None, c.encoder_layers, **cells)
            embed_dim += c.hidden_dim
        if frame_shape is not None:
            image = {"depth": c.image_depth, "mults": tuple(c.image_mults), "norm_eps": c.norm_eps}
            encoders["frame"] = DreamerV3ImageEncoder(frame_shape[0], **image)
            embed_dim += encoders["frame"].output_features(frame_shape)
        narrow = {"num_cells": features_hidden, "norm_eps": c.norm_eps}
        optional = {keys.FEATURES: features_dim, keys.SUBGOAL: num_subgoals}
        optional = {name: size for name, size in optional.items() if size is not None}
        for name, size in optional.items():
            encoders[name] = DreamerV3MLP(size, None, 1, **narrow)
            embed_dim += features_hidden
        latent = {
            "hidden_dim": c.hidden_dim,
            "rnn_hidden_dim": c.belief_dim,
            "num_categoricals": c.num_categoricals,
            "num_classes": c.num_classes,
            "norm_eps": c.norm_eps,
            "unimix": c.unimix,
        }
        prior_net = RSSMPriorV3(
            action_shape=(num_actions,),
            action_dim=num_actions,
            recurrent_model="block_gru",
            num_blocks=c.num_blocks,
            num_layers=c.dynamics_layers,
            prior_num_layers=c.prior_layers,
            **latent,
        )
        posterior_net = RSSMPosteriorV3(
            obs_embed_dim=embed_dim, use_rms_norm=True, num_layers=c.posterior_layers, **latent
        )
        if observation_dim is not None:
            decoders["observation"] = DreamerV3MLP(
                features, observation_dim, c.decoder_layers, **cells
            )
        if frame_shape is not None:
            decoders["frame"] = DreamerV3ImageDecoder(
                features, frame_shape, num_blocks=c.num_blocks, **image
            )
        for name, size in optional.items():
            decoders[name] = DreamerV3MLP(features, size, 1, **narrow)
        reward_net = DreamerV3MLP(features, c.num_bins, c.head_layers, outscale=0.0, **cells)
        continue_net = DreamerV3MLP(features, 1, c.head_layers, **cells)
        two_hot = SymExpTwoHot(c.num_bins)
        policy = {"depth": c.actor_layers, **cells}
        if action_bounds is None:
            actor = DreamerV3DiscreteActor(features, num_actions, unimix=c.unimix, **policy)
        else:
            action_bounds = tuple(bound.float().to(device) for bound in action_bounds)
            actor = DreamerV3ContinuousActor(features, *action_bounds, **policy)
        value_net = DreamerV3MLP(features, c.num_bins, c.value_layers, outscale=0.0, **cells)
        value_two_hot = SymExpTwoHot(c.num_bins)

    def encoder(prefix: tuple[str, ...]) -> list[TensorDictModule]:
        modules, parts, out = [], [], (*prefix, "encoded_latents")
        for name, net in encoders.items():
            source = (*prefix, name)
            if name != "frame" and c.symlog:
                modules.append(TensorDictModule(symlog, [source], [(*prefix, f"symlog_{name}")]))
                source = (*prefix, f"symlog_{name}")
            parts.append((*prefix, f"encoded_{name}") if len(encoders) > 1 else out)
            modules.append(TensorDictModule(net, [source], [parts[-1]]))
        if len(parts) > 1:
            modules.append(TensorDictModule(_join, parts, [out]))
        return modules

    def head(net: nn.Module, prefix: tuple[str, ...], name: str) -> list[TensorDictModule]:
        """Write ``name`` of the latent state, in float32."""
        latents, out = [(*prefix, "belief"), (*prefix, "state")], [(*prefix, name)]
        return [TensorDictModule(net, latents, out), TensorDictModule(_float, out, out)]

    def decoder() -> list[TensorDictModule]:
        modules = []
        for name, net in decoders.items():
            out = [("next", RECONSTRUCTED[name])]
            scale = _float_symexp if name != "frame" and c.symlog else _float
            modules += [
                TensorDictModule(net, [("next", "state"), ("next", "belief")], out),
                TensorDictModule(scale, out, out),
            ]
            if name == keys.FEATURES:
                known = [("next", keys.FEATURES_MASK), *out, ("next", name)]
                modules.append(TensorDictModule(_known, known, out))
        return modules

    def reward_head(*prefix: str) -> list[TensorDictModule]:
        read = TensorDictModule(two_hot, [(*prefix, "reward_logits")], [(*prefix, "reward")])
        return [*head(reward_net, prefix, "reward_logits"), read]

    transition = ["state", "belief", "action"]
    rollout = RSSMRolloutV3(
        TensorDictModule(
            prior_net,
            in_keys=transition,
            out_keys=[("next", "prior_logits"), ("next", "state"), ("next", "belief")],
        ),
        TensorDictModule(
            posterior_net,
            in_keys=[("next", "belief"), ("next", "encoded_latents")],
            out_keys=[("next", "posterior_logits"), ("next", "state")],
        ),
        reset_key="is_init",
    )
    world_model = TensorDictSequential(
        *encoder(("next",)),
        rollout,
        *decoder(),
        *reward_head("next"),
        *head(continue_net, ("next",), "continue_pred"),
    )
    imagination = DreamerEnv(
        WorldModelWrapper(
            TensorDictModule(prior_net, transition, ["_", "state", "belief"]),
            TensorDictSequential(*reward_head()),
        ),
        prior_shape=(state_dim,),
        belief_shape=(c.belief_dim,),
        device=device,
    )
    imagination.observation_spec = Composite(
        state=Unbounded(state_dim), belief=Unbounded(c.belief_dim)
    ).to(device)
    imagination.state_spec = imagination.observation_spec.clone()
    if action_bounds is None:
        imagination.action_spec = OneHot(num_actions).to(device)
    else:
        imagination.action_spec = Bounded(*action_bounds, dtype=torch.float32, device=device)
    imagination.reward_spec = Unbounded((1,)).to(device)

    continuation = TensorDictSequential(
        *head(continue_net, (), "continue_logits"),
        TensorDictModule(torch.sigmoid, ["continue_logits"], ["continuation"]),
    )
    value = TensorDictSequential(
        *head(value_net, (), "state_value_logits"),
        TensorDictModule(value_two_hot, ["state_value_logits"], ["state_value"]),
    )
    acting = TensorDictSequential(*encoder(()), RSSMStateEstimatorV3(prior_net, posterior_net))
    return DreamerAgent(
        world_model=world_model,
        imagination=imagination,
        continuation=continuation,
        actor=actor,
        value=value,
        world=WorldModel(imagination, continuation, value),
        filter=acting,
        state_dim=state_dim,
        belief_dim=c.belief_dim,
        num_actions=num_actions,
        observed=(*encoders, *([keys.FEATURES_MASK] if features_dim is not None else ())),
        action_bounds=action_bounds,
        num_subgoals=num_subgoals,
    )
