"""The actor in imagination, leaning on learnt advice."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor, nn

from lore_torchrl import keys
from lore_torchrl.modules.mixing import LogitMixer
from lore_torchrl.modules.prior_net import PriorNet

# Candidates of the projection: thousands of imagined states want it coarse rather than slow.
_NUM_POINTS = 6


class ImaginationActor(TensorDictModuleBase):
    r"""Act in imagination with PriorNet's advice mixed in.

    .. math::
        \pi_{imag} = \mathrm{softmax}(\ell_{wm} + \beta'\, c_\phi\, \tilde\ell_\phi), \qquad
        \beta' \le \beta_{imagine}\cdot\mathrm{trust}

    where :math:`c_\phi` passes the network's threshold, projected by the mixer. It takes
    the actor's place in a Dreamer actor loss: the imagined actions are drawn from
    :math:`\pi_{imag}` and scored by it, so the policy gradient is that of
    :math:`\pi_{imag}`, whose advice is constant.

    Args:
        actor: Stock categorical actor over ``state`` and ``belief``.
        prior_net: The only adviser that imagined states have.
        mixer: Mixes and projects.

    Keyword Args:
        beta_max: Largest weight, a buffer that may be scheduled.
        bandit: Its ``trust()``, from 0 to 1, scales the weight; read by :meth:`refresh`,
            which :class:`~lore_torchrl.objectives.LoReActorLoss` calls before each rollout.
            Default: ``None``, one.
        calibrator: Its ``trust(confidence, group)`` with group 1 scales the weight of a
            state. Default: ``None``, one.

    Raises:
        ValueError: If ``beta_max`` is negative.
    """

    beta_max: Tensor
    trust: Tensor

    def __init__(
        self,
        actor: ProbabilisticTensorDictSequential,
        prior_net: PriorNet,
        mixer: LogitMixer,
        *,
        beta_max: float,
        bandit: nn.Module | None = None,
        calibrator: nn.Module | None = None,
    ):
        super().__init__()
        if not beta_max >= 0:
            raise ValueError(f"beta_max must not be negative, got {beta_max}.")
        self.actor = actor
        self.prior_net = prior_net
        self.mixer = mixer
        self.bandit = bandit
        self.calibrator = calibrator
        self.register_buffer("beta_max", torch.tensor(float(beta_max)))
        self.register_buffer("trust", torch.ones(()), persistent=False)
        self.in_keys = [*actor.in_keys, "lore_imagined_shift"]
        self.out_keys = [*actor.out_keys, self.in_keys[-1]]

    def refresh(self) -> None:
        """Read the bandit's trust, once for a whole imagined rollout."""
        if self.bandit is not None:
            self.trust.copy_(self.bandit.trust())

    def get_dist(self, tensordict: TensorDictBase) -> torch.distributions.Distribution:
        """Return the mixed distribution; the gradient reaches the actor alone.

        The advice is constant, so what :meth:`forward` has written is not computed again.
        """
        distribution = self.actor.get_dist(tensordict)
        log_p = torch.log_softmax(distribution.logits.float(), -1)
        shift = tensordict.get(self.in_keys[-1], None)
        if shift is None:
            shift = self._shift(tensordict, log_p.detach())
        return type(distribution)(logits=log_p + shift)

    @torch.no_grad()
    def _shift(self, tensordict: TensorDictBase, log_p: Tensor) -> Tensor:
        """Return what the advice adds to the policy's log-probabilities."""
        latent = (tensordict.get(key) for key in self.prior_net.in_keys)
        advice = self.prior_net.stand_in(*latent)
        beta = (self.beta_max * self.trust).expand_as(advice.confidence)
        if self.calibrator is not None:
            group = torch.full_like(advice.learnt, keys.PRIOR_NET_GROUP, dtype=torch.long)
            beta = beta * self.calibrator.trust(advice.confidence, group)
        mixture = self.mixer.mix(log_p, *advice[:3], beta, num_points=_NUM_POINTS)
        return mixture.log_probs - log_p

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write an action, its log-probability, the mixed logits and the advice's part in them."""
        distribution = self.actor.get_dist(tensordict)
        log_p = torch.log_softmax(distribution.logits.float(), -1)
        shift = self._shift(tensordict, log_p.detach())
        distribution = type(distribution)(logits=log_p + shift)
        action = distribution.rsample() if distribution.has_rsample else distribution.sample()
        head = self.actor[-1]
        tensordict.set(self.in_keys[-1], shift)
        tensordict.set(head.in_keys[0], distribution.logits)
        tensordict.set(head.out_keys[0], action)
        return tensordict.set(head.log_prob_key, distribution.log_prob(action))
