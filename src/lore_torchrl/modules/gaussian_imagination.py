"""The continuous actor in imagination, leaning on learnt advice."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from tensordict import TensorDictBase
from torch import Tensor

from lore_torchrl.modules.imagination import ImaginationActor


class GaussianImaginationActor(ImaginationActor):
    r"""Act in imagination with PriorNet's advice on the anchors mixed into a Gaussian.

    .. math::
        \sigma_{imag}^{-2} = \sigma^{-2} + w\, \sigma_\phi^{-2}, \qquad
        \mu_{imag} = \sigma_{imag}^2
            (\sigma^{-2} \mu + w\, \sigma_\phi^{-2} \mu_\phi), \qquad
        w \le \beta_{imagine} \cdot \mathrm{trust} \cdot c_\phi

    with the moments :math:`\mu_\phi, \sigma_\phi` of the advice, within the bound of a
    :class:`~lore_torchrl.modules.GaussianMixer` (its method ``lean``). The arguments are those
    of :class:`~lore_torchrl.modules.ImaginationActor`, for an actor that the mixer knows.

    The actor's own head draws from the mixture, so an imagined action is reparameterised as
    the stock one is: where a loss differentiates the imagined return, the gradient passes
    through :math:`\mu` and :math:`\sigma`. Advice and weight are constants; no gradient reaches
    PriorNet, nor the latent state through it. With a weight of zero actions, log-probabilities,
    gradients and random stream are stock, to the bit.

    :meth:`bonus` takes :math:`\mathbb{E}_{a\sim\pi_{wm}}[\log\rho_\phi(a)]` in closed form,
    before the tanh of a bounded policy, whose Jacobian does not depend on the advice.
    """

    def get_dist(self, tensordict: TensorDictBase) -> torch.distributions.Distribution:
        """Return the mixed distribution; the gradient reaches the actor alone."""
        return self.actor[-1].get_dist(self._lean(tensordict, self._advice_of(tensordict)))

    def _lean(self, tensordict: TensorDictBase, advice: tuple[Tensor, Tensor]) -> TensorDictBase:
        """Run the actor's network, and put the mixture in the place of its policy."""
        tensordict = self.actor.det_part(tensordict)
        policy_keys = self.actor[-1].in_keys
        policy = self.mixer.policy_from(*(tensordict.get(key) for key in policy_keys))
        prior, weight = advice
        mixed = self.mixer.lean(policy, prior, self.beta_max * self.trust * weight)
        for key, value in zip(policy_keys, mixed, strict=True):
            tensordict.set(key, value)
        return tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write an action, its log-probability, the mixed policy and the advice in it."""
        with torch.no_grad() if self.scored else nullcontext():
            advice = self.advice(tensordict)
            for key, value in zip(self.in_keys[-2:], advice, strict=True):
                tensordict.set(key, value)
            return self.actor[-1](self._lean(tensordict, advice))
