"""Adding advice to a policy within a KL bound."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from lore_torchrl import keys
from lore_torchrl.configs.lore import MixerConfig
from lore_torchrl.modules.advice import AdviceBatch
from lore_torchrl.modules.temperature import TemperatureAligner
from lore_torchrl.policies import CategoricalPolicy, PolicyKind


class Mixture(NamedTuple):
    r"""What :meth:`LogitMixer.mix` returns.

    The mixed policy, and :math:`\mathrm{KL}(\pi_{mix} \| \pi_{wm})` ``[*B, 1]``.
    """

    policy: Any
    kl: Tensor


class LogitMixer(nn.Module):
    r"""Mix advice into a policy, never further than a KL bound.

    With :math:`\tilde\ell = \mathrm{sg}(\mathrm{center}(\ell_{llm})) / T`, mask :math:`m`,
    confidence :math:`c` and :math:`\rho = \mathrm{softmax}(\tilde\ell)`,

    .. math::
        \log \pi_{mix} = \log \pi_{wm} + w \log \rho + \mathrm{const}, \qquad w \le \beta\, m\, c,

    where :math:`w` is lowered so that
    :math:`\mathrm{KL}(\pi_{mix} \| \pi_{wm}) \le \epsilon =` ``max_kl`` whatever the policy is, as
    its kind says: :class:`~lore_torchrl.policies.CategoricalPolicy`, which also knows
    ``mode="probability"``, or :class:`~lore_torchrl.policies.GaussianPolicy`. Rows without
    usable advice pass the policy through unchanged, bitwise. All is computed in float32 or better.

    The bound is the trust region of `TRPO <https://arxiv.org/abs/1502.05477>`_ put
    on the mixture instead of on the update.

    Args:
        policy: Kind of the policy. Default: ``None``, a ``CategoricalPolicy()``.

    Keyword Args:
        max_kl: Bound :math:`\epsilon` in nats; ``math.inf`` for none.
            Default: ``1.0``.
        mode: ``"logit"`` or ``"probability"``. Default: ``"logit"``.
        temperature: Shared :class:`TemperatureAligner`; ``None`` uses :math:`T = 1`. For a Gaussian
            policy its ``rate`` must be 0.
        action_mask: Whether the entry ``llm_action_mask`` is read, which makes the advice on
            actions that the advisor calls invalid :math:`\rho = 0`. Default: ``False``.

    Raises:
        ValueError: If ``max_kl`` is negative or NaN, ``mode`` is unknown, or the kind of policy
            has no such mixture.

    Examples:
        >>> mixer = LogitMixer(max_kl=0.2)
        >>> policy = torch.full((2, 3), 1 / 3).log()
        >>> advice = AdviceBatch.clean(
        ...     torch.tensor([[9.0, 0.0, 0.0], [9.0, 0.0, 0.0]]),
        ...     torch.ones(2, 1),
        ...     torch.tensor([[True], [False]]),
        ... )
        >>> mixture = mixer.mix(policy, advice, beta=torch.ones(2, 1))
        >>> bool(mixture.kl.max() <= 0.2), torch.equal(mixture.policy[1], policy[1])
        (True, True)
    """

    def __init__(
        self,
        policy: PolicyKind | None = None,
        *,
        max_kl: float = 1.0,
        mode: Literal["logit", "probability"] = "logit",
        temperature: TemperatureAligner | None = None,
        action_mask: bool = False,
    ):
        super().__init__()
        MixerConfig(max_kl=max_kl, mode=mode)
        self.policy = CategoricalPolicy() if policy is None else policy
        self.policy.check_mixing(mode, aligned=temperature is not None and temperature.rate > 0)
        self.max_kl = float(max_kl)
        self.mode = mode
        self.temperature = temperature
        self.action_mask = action_mask
        self.out_keys = (*self.policy.mix_keys, keys.KL)

    def temper(self, prior_logits: Tensor) -> Tensor:
        """Divide centered advice by the aligner's temperature, if there is an aligner."""
        return prior_logits if self.temperature is None else self.temperature(prior_logits)

    def untemper(self, logits: Tensor) -> Tensor:
        """Return what :meth:`temper` makes into ``logits``."""
        return logits if self.temperature is None else logits * self.temperature.temperature

    def check_advice(self, policy: Any, prior_logits: Tensor) -> None:
        """Raise a ``ValueError`` if advice ``[*B, K]`` names other actions than a policy has."""
        wanted = self.policy.num_actions(policy)
        if prior_logits.shape[-1] != wanted:
            raise ValueError(
                f"The advice has {prior_logits.shape[-1]} logits a state, the policy {wanted} "
                "named actions."
            )

    def combine(
        self, policy: Any, tempered: Tensor, weight: Tensor, excluded: Tensor | None = None
    ) -> Any:
        """Mix within the bound; see :meth:`~lore_torchrl.policies.PolicyKind.combine`."""
        bound = {"max_kl": self.max_kl, "mode": self.mode}
        return self.policy.combine(policy, tempered, weight, **bound, excluded=excluded)

    @torch.no_grad()
    def mix(self, policy: Any, advice: AdviceBatch, beta: Tensor) -> Mixture:
        """Mix a policy with advice on it, of the weight ``beta``, ``[*B, 1]``, and measure."""
        weight = beta * advice.weight
        mixed = self.combine(policy, self.temper(advice.prior_logits), weight, advice.excluded)
        kl = self.policy.divergence(mixed, self.policy.precise(policy)).unsqueeze(-1)
        return Mixture(mixed, kl.clamp_min(0.0))

    def write(self, tensordict: TensorDictBase, mixture: Mixture) -> None:
        """Write the entries of a mixture, and its divergence as ``lore_kl``."""
        values = (*self.policy.entries(mixture.policy), mixture.kl)
        for key, value in zip(self.out_keys, values, strict=True):
            tensordict.set(key, value)
