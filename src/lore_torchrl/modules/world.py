"""The world model as one object: what an action leads to, and what that is worth."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.envs.model_based.dreamer import DreamerEnv


class WorldModel(nn.Module):
    r"""Step from latent state to latent state, with reward, continuation and value.

    It shares the networks that it is given, and passes their gradients.

    Args:
        imagination: Model-based environment over the dynamics and the reward head.
        continuation: Writes ``continuation``, the probability that the episode goes on.
        value: Critic; writes ``state_value``.

    Examples:
        >>> from lore_torchrl.configs import DreamerConfig
        >>> from lore_torchrl.dreamer.agent import build_agent
        >>> agent = build_agent(DreamerConfig(), observation_dim=5, num_actions=3)
        >>> world = WorldModel(agent.imagination, agent.continuation, agent.value)
        >>> world.action_values(torch.zeros(2, 64), torch.zeros(2, 128), 3).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        imagination: DreamerEnv,
        continuation: TensorDictModuleBase,
        value: TensorDictModuleBase,
    ):
        super().__init__()
        self.dynamics = imagination.world_model
        self.continuation = continuation
        self.value = value

    @torch.no_grad()
    def action_values(self, state: Tensor, belief: Tensor, num_actions: int) -> Tensor:
        r"""Return what one drawn step of each discrete action is worth, ``[*B, A]``.

        .. math::
            \hat Q(s, a) = \hat r(s') + \hat c(s')\, V(s'), \qquad s' \sim p(\cdot|s, a)

        All actions are stepped at once, as a further batch dimension.
        """
        every = torch.eye(num_actions, dtype=belief.dtype, device=belief.device)
        every = every.expand(*belief.shape[:-1], -1, -1)
        state, belief = (
            latent.unsqueeze(-2).expand(*latent.shape[:-1], num_actions, -1)
            for latent in (state, belief)
        )
        latent = {"state": state, "belief": belief, "action": every}
        out = self.dynamics(TensorDict(latent, state.shape[:-1]))
        out = self.value(self.continuation(out))
        reward, continuation, value = map(out.get, ("reward", "continuation", "state_value"))
        return (reward + continuation * value).squeeze(-1)
