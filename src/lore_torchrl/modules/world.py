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

    Keyword Args:
        gamma: Discount beyond the continuation, of :meth:`action_values`. Default: ``1.0``.

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
        *,
        gamma: float = 1.0,
    ):
        super().__init__()
        self.dynamics = imagination.world_model
        self.continuation = continuation
        self.value = value
        self.gamma = gamma

    def step(self, state: Tensor, belief: Tensor, action: Tensor) -> tuple[Tensor, ...]:
        """Draw the next latent state from the dynamics, with torch's global generator.

        Args:
            state: Stochastic states ``[*B, S]``.
            belief: Deterministic states ``[*B, H]``.
            action: Actions ``[*B, A]``, one-hot where they are discrete.

        Returns:
            Next state and belief, and the reward of the step, the probability that the episode
            goes on after it and the value of the next state, each ``[*B, 1]``.
        """
        latent = {"state": state, "belief": belief, "action": action.to(belief.dtype)}
        out = self.value(self.continuation(self.dynamics(TensorDict(latent, state.shape[:-1]))))
        return tuple(
            out.get(key) for key in ("state", "belief", "reward", "continuation", "state_value")
        )

    @torch.no_grad()
    def action_values(self, state: Tensor, belief: Tensor, num_actions: int) -> Tensor:
        r"""Return what one drawn step of each discrete action is worth, ``[*B, A]``.

        .. math::
            \hat Q(s, a) = \hat r(s') + \gamma\, \hat c(s')\, V(s'), \qquad s' \sim p(\cdot|s, a)

        All actions are stepped at once, as a further batch dimension.
        """
        every = torch.eye(num_actions, dtype=belief.dtype, device=belief.device)
        every = every.expand(*belief.shape[:-1], -1, -1)
        state, belief = (
            latent.unsqueeze(-2).expand(*latent.shape[:-1], num_actions, -1)
            for latent in (state, belief)
        )
        _, _, reward, continuation, value = self.step(state, belief, every)
        return (reward + self.gamma * continuation * value).squeeze(-1)
