"""The actor in imagination, leaning on learned advice."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase

from lore_torchrl.modules.mixing import LogitMixer
from lore_torchrl.modules.prior_net import PriorNet


class ImaginationActor(TensorDictModuleBase):
    r"""Act in imagination with PriorNet's advice mixed in.

    .. math::
        \pi_{imag} = \mathrm{mix}(\pi_{wm}, \rho_\phi, \beta'), \qquad
        \beta' \le \beta_{imagine}\, c_\phi

    where :math:`c_\phi` passes the network's threshold, within the mixer's KL bound. It takes
    the actor's place in a Dreamer actor loss: the imagined actions are drawn from
    :math:`\pi_{imag}` by the actor's own head and scored by it, so that the gradient reaches the
    actor alone.

    Args:
        actor: Stock actor over ``state`` and ``belief``, of the mixer's kind of policy.
        prior_net: The only advisor that imagined states have.
        mixer: Mixes within its bound.

    Keyword Args:
        beta_max: Largest weight, not negative.
    """

    def __init__(
        self,
        actor: ProbabilisticTensorDictSequential,
        prior_net: PriorNet,
        mixer: LogitMixer,
        *,
        beta_max: float,
    ):
        super().__init__()
        self.actor = actor
        self.prior_net = prior_net
        self.mixer = mixer
        self.beta_max = beta_max
        self.in_keys, self.out_keys = list(actor.in_keys), list(actor.out_keys)

    def _mixed(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Run the actor's network, and put the mixture in the place of its policy."""
        with torch.no_grad():
            own = self.prior_net.fallback(*(tensordict.get(key) for key in self.prior_net.in_keys))
            tempered, weight = self.mixer.temper(own.prior_logits), self.beta_max * own.weight
        tensordict = self.actor.det_part(tensordict)
        policy_keys, kind = self.actor[-1].in_keys, self.mixer.policy
        policy = kind.read(*(tensordict.get(key) for key in policy_keys))
        mixed = kind.entries(self.mixer.combine(policy, tempered, weight))
        for key, value in zip(policy_keys, mixed, strict=True):
            tensordict.set(key, value)
        return tensordict

    def get_dist(self, tensordict: TensorDictBase) -> torch.distributions.Distribution:
        """Return the mixed distribution; the gradient reaches the actor alone."""
        return self.actor[-1].get_dist(self._mixed(tensordict))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write an action, its log-probability and the mixed policy."""
        return self.actor[-1](self._mixed(tensordict))
