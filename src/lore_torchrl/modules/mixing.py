"""Adding advice to a policy within a KL bound."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution

from lore_torchrl import keys
from lore_torchrl.functional import (
    bounded_weight,
    categorical_kl,
    clean_advice,
    is_ruled_out,
    log_floor,
)
from lore_torchrl.modules.disagreement import LatentDisagreement
from lore_torchrl.modules.gate import UncertaintyGate
from lore_torchrl.modules.gaussian_disagreement import GaussianDisagreement
from lore_torchrl.modules.temperature import TemperatureAligner


class Mixture(NamedTuple):
    r"""What :meth:`LogitMixer.mix` returns.

    Normalised logits ``[*B, A]`` and :math:`\mathrm{KL}(\pi_{mix} \| \pi_{wm})`
    ``[*B, 1]``.
    """

    log_probs: Tensor
    kl: Tensor

    @property
    def policy(self) -> Tensor:
        """The mixed policy, as the mixer's other methods take one."""
        return self.log_probs


class LogitMixer(TensorDictModuleBase):
    r"""Mix advice into a categorical policy, never further than a KL bound.

    With :math:`\tilde\ell = \mathrm{sg}(\mathrm{centre}(\ell_{llm})) / T`, mask :math:`m`,
    confidence :math:`c` and :math:`w = \beta\, m\, c`, ``mode="logit"`` gives

    .. math::
        \pi_{mix} = \mathrm{softmax}(\ell_{wm} + w' \tilde\ell), \qquad
        w' = \min\Bigl(w,\;
            \frac{\sqrt{8\,\epsilon}}{\max_a \tilde\ell_a - \min_a \tilde\ell_a}\Bigr),

    and ``mode="probability"`` gives

    .. math::
        \pi_{mix} = (1 - g)\,\pi_{wm} + g\,\rho, \qquad
        g = \min\Bigl(w,\; 1,\; \frac{\epsilon}{\mathrm{KL}(\rho \| \pi_{wm})}\Bigr), \qquad
        \rho = \mathrm{softmax}(\tilde\ell).

    Both keep :math:`\mathrm{KL}(\pi_{mix} \| \pi_{wm}) \le \epsilon =` ``max_kl`` whatever the
    policy is (:func:`~lore_torchrl.functional.bounded_weight`; the divergence is convex in
    :math:`g`). Where the policy is near uniform most of the bound can be used; where it is
    sure of another action, less. Rows without usable advice pass the policy through unchanged,
    bitwise.

    The bound is the trust region of `TRPO <https://arxiv.org/abs/1502.05477>`_ put
    on the mixture instead of on the update.

    A *policy* is here its normalised log-probabilities ``[*B, A]``. Actor and losses ask
    the mixer for all that depends on the kind of policy; for continuous actions that is
    :class:`~lore_torchrl.modules.GaussianMixer`.

    Keyword Args:
        max_kl: Bound :math:`\epsilon` in nats; ``math.inf`` for none.
            Default: ``1.0``.
        mode: ``"logit"`` or ``"probability"``. Default: ``"logit"``.
        temperature: Shared :class:`TemperatureAligner`; ``None`` uses :math:`T = 1`.
        logits_key: Policy logits to read, ``[*B, A]``. Default: ``"logits"``.
        prior_logits_key: Default: ``"llm_prior_logits"``.
        confidence_key: Default: ``"llm_confidence"``.
        mask_key: Default: ``"llm_mask"``.
        beta_key: Weight that the gate asks for, ``[*B, 1]``. It is left as it is: callers
            read from it how much advice would be worth, also where there was none.
            Default: ``"lore_beta"``.
        mix_key: Normalised mixed logits to write. Default: ``"lore_logits"``.
        kl_key: :math:`\mathrm{KL}(\pi_{mix} \| \pi_{wm})` to write. Default: ``"lore_kl"``.

    Raises:
        ValueError: If ``max_kl`` is negative or NaN, or ``mode`` is unknown.

    Examples:
        >>> from tensordict import TensorDict
        >>> mixer = LogitMixer(max_kl=0.2)
        >>> td = TensorDict(
        ...     logits=torch.zeros(2, 3),
        ...     llm_prior_logits=torch.tensor([[9.0, 0.0, 0.0], [9.0, 0.0, 0.0]]),
        ...     llm_confidence=torch.ones(2, 1),
        ...     llm_mask=torch.tensor([[True], [False]]),
        ...     lore_beta=torch.ones(2, 1),
        ...     batch_size=[2],
        ... )
        >>> out = mixer(td)
        >>> bool(out["lore_kl"].max() <= 0.2), out["lore_kl"][1].item()
        (True, 0.0)
    """

    def __init__(
        self,
        *,
        max_kl: float = 1.0,
        mode: Literal["logit", "probability"] = "logit",
        temperature: TemperatureAligner | None = None,
        logits_key: NestedKey = "logits",
        prior_logits_key: NestedKey = keys.PRIOR_LOGITS,
        confidence_key: NestedKey = keys.CONFIDENCE,
        mask_key: NestedKey = keys.MASK,
        beta_key: NestedKey = keys.BETA,
        mix_key: NestedKey = keys.MIX_LOGITS,
        kl_key: NestedKey = keys.KL,
    ):
        super().__init__()
        if not max_kl >= 0:
            raise ValueError(f"max_kl must not be negative, got {max_kl}.")
        if mode not in ("logit", "probability"):
            raise ValueError(f"mode must be 'logit' or 'probability', got {mode!r}.")
        self.max_kl = float(max_kl)
        self.mode = mode
        self.temperature = temperature
        self.in_keys = [logits_key, prior_logits_key, confidence_key, mask_key, beta_key]
        self.out_keys = [mix_key, kl_key]

    def temper(self, prior_logits: Tensor) -> Tensor:
        """Divide centred advice by the aligner's temperature, if there is an aligner."""
        return prior_logits if self.temperature is None else self.temperature(prior_logits)

    @staticmethod
    def check(
        actor: TensorDictModuleBase,
        gate: UncertaintyGate | None = None,
        disagreement: LatentDisagreement | None = None,
    ) -> None:
        """Check that an actor's policy is one that this mixer can mix, and its gate can weigh.

        Args:
            actor: Ends in a probabilistic module over logits.
            gate: Its gate, if it has one.
            disagreement: The gate's ensemble, if it has one.

        Raises:
            ValueError: If one of them is of another kind.
        """
        head = actor[-1]
        head_keys = getattr(head, "dist_keys", None)
        if head_keys is None or tuple(head_keys) != ("logits",) or len(head.in_keys) != 1:
            raise ValueError(
                "actor must end in a categorical distribution over one logits entry, as "
                f"DreamerV3DiscreteActor does; got {type(head).__name__} with in_keys="
                f"{getattr(head, 'in_keys', None)}. A Gaussian actor needs a GaussianMixer."
            )
        if gate is not None and gate.scale_range is not None:
            raise ValueError(
                f"The gate has scale_range={gate.scale_range}, which is for a Gaussian policy: "
                "leave it None for a categorical one."
            )
        if isinstance(disagreement, GaussianDisagreement):
            raise ValueError(
                "The ensemble of a categorical policy is a LatentDisagreement, got a "
                "GaussianDisagreement."
            )

    @staticmethod
    def policy_of(distribution: Distribution) -> Tensor:
        """Return the policy of an actor's distribution; the gradient passes."""
        return log_floor(torch.log_softmax(distribution.logits.float(), -1))

    @staticmethod
    def policy_from(logits: Tensor) -> Tensor:
        """Return the policy of what an actor or this mixer has written, ``[*B, A]``."""
        return log_floor(torch.log_softmax(logits, -1))

    @staticmethod
    def choices(policy: Tensor) -> Tensor:
        """Return the probability of each action, ``[*B, A]``."""
        return policy.exp()

    @staticmethod
    def nearest(actions: Tensor) -> Tensor:
        """Return the index of each one-hot action ``[*B, A]``, ``[*B, 1]``."""
        return actions.argmax(-1, keepdim=True)

    def prior(self, prior_logits: Tensor, policy: Tensor) -> Tensor:
        """Return centred advice as a policy over the actions that ``policy`` does not rule out."""
        return self.as_policy(self.temper(prior_logits), policy)

    @staticmethod
    def as_policy(tempered: Tensor, policy: Tensor) -> Tensor:
        """Return tempered advice as a policy over the actions that ``policy`` does not rule out."""
        possible = tempered.masked_fill(is_ruled_out(policy), -math.inf)
        return log_floor(torch.log_softmax(possible, -1))

    @staticmethod
    def log_prob(policy: Tensor, action: Tensor) -> Tensor:
        """Return the log-probability of one-hot actions ``[*B, A]``, ``[*B]``."""
        return (policy * action).sum(-1)

    @staticmethod
    def divergence(first: Tensor, second: Tensor) -> Tensor:
        """Return KL(first, second) of two policies, nats, ``[*B]``."""
        return categorical_kl(first, second)

    @staticmethod
    def expected_log_prob(policy: Tensor, prior: Tensor) -> Tensor:
        """Return the prior's log-probability of an action, expected under the policy, ``[*B]``."""
        return (policy.exp() * prior).sum(-1)

    @staticmethod
    def gate_input(policy: Tensor) -> Tensor:
        """Return what the gate takes the policy's entropy from."""
        return policy

    @torch.no_grad()
    def mix(
        self,
        log_p: Tensor,
        prior_logits: Tensor,
        confidence: Tensor,
        mask: Tensor,
        beta: Tensor,
    ) -> Mixture:
        """Mix and measure; see the class for the formulas.

        Args:
            log_p: Normalised policy log-probabilities, shape ``[*B, A]``.
            prior_logits: Raw advice, shape ``[*B, A]``.
            confidence: Shape ``[*B, 1]``.
            mask: Boolean, shape ``[*B, 1]``.
            beta: Weight asked for, shape ``[*B, 1]``.
        """
        prior_logits, weight, _ = clean_advice(prior_logits, confidence, mask)
        weight = beta * weight
        mixed = self.combine(log_p, self.temper(prior_logits), weight)[0].log_softmax(-1)
        log_probs = torch.where(weight > 0, mixed, log_p)
        return Mixture(log_probs, categorical_kl(log_probs, log_p).unsqueeze(-1))

    def combine(self, log_p: Tensor, tempered: Tensor, weight: Tensor) -> tuple[Tensor]:
        """Add advice that is sure to be finite, within the bound.

        The gradient passes through the policy; what is added to it is constant.

        Args:
            log_p: Normalised policy log-probabilities, shape ``[*B, A]``.
            tempered: Finite advice, as :meth:`temper` returns it, shape ``[*B, A]``.
            weight: Weight asked for, confidence included, shape ``[*B, 1]``.

        Returns:
            Logits ``[*B, A]``, up to a constant in each row, as the only entry of a policy.
        """
        if self.mode == "logit":
            return (log_p + bounded_weight(tempered, weight, self.max_kl) * tempered,)
        fixed = log_p.detach()
        log_prior = self.as_policy(tempered, fixed)
        apart = categorical_kl(log_prior, fixed).unsqueeze(-1)
        weight = torch.minimum(weight.clamp(max=1.0), self.max_kl / apart.clamp_min(1e-9))
        mixed = (1.0 - weight) * fixed.exp() + weight * log_prior.exp()
        return (log_p + mixed.clamp_min(torch.finfo(mixed.dtype).tiny).log() - fixed,)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the mixed logits and the divergence."""
        logits, prior_logits, confidence, mask, beta = (tensordict.get(k) for k in self.in_keys)
        mixture = self.mix(self.policy_from(logits), prior_logits, confidence, mask, beta)
        return self.write(tensordict, mixture)

    def write(self, tensordict: TensorDictBase, mixture: Mixture) -> TensorDictBase:
        """Write a mixture's logits and divergence under the output keys."""
        mix_key, kl_key = self.out_keys
        tensordict.set(mix_key, mixture.log_probs)
        return tensordict.set(kl_key, mixture.kl)
