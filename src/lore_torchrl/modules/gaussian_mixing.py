"""Adding advice to a Gaussian policy within a KL bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.modules import IndependentNormal, TanhNormal

from lore_torchrl import keys
from lore_torchrl.functional import clean_advice
from lore_torchrl.functional_gaussian import (
    anchor_moments,
    bounded_gaussian_weight,
    gaussian_entropy,
    gaussian_kl,
    mix_gaussians,
    squash,
)
from lore_torchrl.modules.disagreement import LatentDisagreement
from lore_torchrl.modules.gate import UncertaintyGate
from lore_torchrl.modules.gaussian_disagreement import GaussianDisagreement
from lore_torchrl.modules.temperature import TemperatureAligner

# Draws by which the probabilities of the anchors are measured.
_NUM_DRAWS = 4096
# How near to a bound, as a share of half the range, an anchor of a bounded policy may lie:
# at the bound itself, before the tanh, it would be infinitely far away.
_MARGIN = 0.01


class Gaussian(NamedTuple):
    """Location and scale of a diagonal Gaussian, each ``[*B, A]``."""

    loc: Tensor
    scale: Tensor

    def detach(self) -> Gaussian:
        """Return the same without gradient."""
        return Gaussian(self.loc.detach(), self.scale.detach())


class MixedGaussian(NamedTuple):
    r"""What :meth:`GaussianMixer.mix` returns.

    The mixed policy and :math:`\mathrm{KL}(\pi_{mix} \| \pi_{wm})` ``[*B, 1]``.
    """

    policy: Gaussian
    kl: Tensor


class GaussianMixer(TensorDictModuleBase):
    r"""Mix advice on named anchor actions into a Gaussian policy, within a KL bound.

    The advisor is asked about :math:`K` named actions :math:`a_k` ("strong left", ...). Its
    probabilities :math:`p = \mathrm{softmax}(\ell_{llm} / T)` become a Gaussian by their
    moments, and the mixture is the precision-weighted product with the policy:

    .. math::
        \mu_\rho &= \sum_k p_k a_k, \qquad
        \sigma_\rho^2 = \sum_k p_k (a_k - \mu_\rho)^2 + \sigma_{\min}^2 \\
        \sigma_{mix}^{-2} &= \sigma_{wm}^{-2} + w\, \sigma_\rho^{-2}, \qquad
        \mu_{mix} = \sigma_{mix}^2
            (\sigma_{wm}^{-2} \mu_{wm} + w\, \sigma_\rho^{-2} \mu_\rho)

    with :math:`w \le \beta m c` for mask :math:`m` and confidence :math:`c`, lowered by a formula
    where :math:`\mathrm{KL}(\pi_{mix} \| \pi_{wm})` might exceed ``max_kl``
    (:func:`~lore_torchrl.functional_gaussian.bounded_gaussian_weight`). Rows without usable advice
    pass the policy through unchanged, to the bit. Product of experts:
    https://doi.org/10.1162/089976602760128018.

    Two kinds of policy are known: :class:`~torchrl.modules.IndependentNormal`, and
    :class:`~torchrl.modules.TanhNormal`, with ``bounds``. The latter is mixed before its
    tanh, which the divergence does not feel; its anchors are brought there by

    .. math::
        \tilde a = \mathrm{artanh}\bigl(\mathrm{clip}(
            (2a - h - l) / (h - l), -0.99, 0.99)\bigr)

    A *policy* is here a :class:`Gaussian`, before the tanh.

    Args:
        anchors: The named actions, in the order of the advice, ``[K, A]``.

    Keyword Args:
        bounds: Lowest and highest action of a ``TanhNormal`` policy, each a number or one
            for each dimension; ``None`` for an ``IndependentNormal``. Default: ``None``.
        min_scale: :math:`\sigma_{\min}`, of the prior when all weight is on one anchor, in
            units of the action, or of what goes into the tanh. Default: ``0.3``.
        max_kl: Bound in nats; ``math.inf`` for none. Default: ``1.0``.
        temperature: :class:`TemperatureAligner` that divides the advice; its ``rate`` must
            be 0, since the policy has no probabilities of the anchors to align with.
            ``None`` uses :math:`T = 1`. Default: ``None``.
        loc_key: Location of the policy, ``[*B, A]``. Default: ``"loc"``.
        scale_key: Its scale, ``[*B, A]``. Default: ``"scale"``.
        prior_logits_key: ``[*B, K]``. Default: ``"llm_prior_logits"``.
        confidence_key: Default: ``"llm_confidence"``.
        mask_key: Default: ``"llm_mask"``.
        beta_key: Weight that the gate asks for, ``[*B, 1]``; left as it is.
            Default: ``"lore_beta"``.
        mix_loc_key: Mixed location to write. Default: ``"lore_loc"``.
        mix_scale_key: Mixed scale to write. Default: ``"lore_scale"``.
        kl_key: :math:`\mathrm{KL}(\pi_{mix} \| \pi_{wm})` to write. Default: ``"lore_kl"``.

    Raises:
        ValueError: If there are fewer than two anchors, they lie outside ``bounds`` or are
            not finite, or another value is out of range.

    Examples:
        >>> from tensordict import TensorDict
        >>> mixer = GaussianMixer([[-1.0], [0.0], [1.0]], max_kl=0.2)
        >>> td = TensorDict(
        ...     loc=torch.zeros(2, 1),
        ...     scale=torch.ones(2, 1),
        ...     llm_prior_logits=torch.tensor([[0.0, 0.0, 9.0], [0.0, 0.0, 9.0]]),
        ...     llm_confidence=torch.ones(2, 1),
        ...     llm_mask=torch.tensor([[True], [False]]),
        ...     lore_beta=torch.ones(2, 1),
        ...     batch_size=[2],
        ... )
        >>> out = mixer(td)
        >>> bool(out["lore_loc"][0] > 0), bool(out["lore_kl"].max() <= 0.2)
        (True, True)
        >>> out["lore_loc"][1].item(), out["lore_kl"][1].item()
        (0.0, 0.0)
    """

    anchors: Tensor
    actions: Tensor
    low: Tensor
    high: Tensor

    def __init__(
        self,
        anchors: Tensor | Sequence[Sequence[float]],
        *,
        bounds: tuple[Tensor | float, Tensor | float] | None = None,
        min_scale: float = 0.3,
        max_kl: float = 1.0,
        temperature: TemperatureAligner | None = None,
        loc_key: NestedKey = "loc",
        scale_key: NestedKey = "scale",
        prior_logits_key: NestedKey = keys.PRIOR_LOGITS,
        confidence_key: NestedKey = keys.CONFIDENCE,
        mask_key: NestedKey = keys.MASK,
        beta_key: NestedKey = keys.BETA,
        mix_loc_key: NestedKey = keys.MIX_LOC,
        mix_scale_key: NestedKey = keys.MIX_SCALE,
        kl_key: NestedKey = keys.KL,
    ):
        super().__init__()
        actions = torch.as_tensor(anchors, dtype=torch.float32)
        if actions.ndim != 2 or len(actions) < 2 or not actions.isfinite().all():
            raise ValueError(
                "anchors must be finite, [K, A] with at least 2 named actions, got "
                f"{actions.tolist()}."
            )
        if not min_scale > 0:
            raise ValueError(f"min_scale must be positive, got {min_scale}.")
        if not max_kl >= 0:
            raise ValueError(f"max_kl must not be negative, got {max_kl}.")
        if temperature is not None and temperature.rate:
            raise ValueError(
                "A Gaussian policy has no probabilities of the anchors to align the advice with: "
                f"set lore.temperature.rate=0, got {temperature.rate}."
            )
        self.bounded = bounds is not None
        low, high = bounds if self.bounded else (-math.inf, math.inf)
        for name, bound in (("low", low), ("high", high)):
            # The describer's anchors and the agent's bounds may come from two devices.
            bound = torch.as_tensor(bound).to(actions).expand_as(actions[0]).clone()
            self.register_buffer(name, bound)
        if not ((self.low < self.high) & (actions >= self.low) & (actions <= self.high)).all():
            raise ValueError(
                f"anchors must lie within bounds, low below high: got {actions.tolist()} for "
                f"{self.low.tolist()} to {self.high.tolist()}."
            )
        self.register_buffer("actions", actions)
        self.register_buffer("anchors", self._inside(actions) if self.bounded else actions.clone())
        self.min_scale = float(min_scale)
        self.max_kl = float(max_kl)
        self.temperature = temperature
        advice_keys = [prior_logits_key, confidence_key, mask_key]
        self.policy_keys = [loc_key, scale_key]
        self.in_keys = [*self.policy_keys, *advice_keys, beta_key]
        self.out_keys = [mix_loc_key, mix_scale_key, kl_key]

    def _inside(self, actions: Tensor) -> Tensor:
        """Return what goes into the tanh for actions within the bounds."""
        place = (2.0 * actions - self.high - self.low) / (self.high - self.low)
        return place.clamp(_MARGIN - 1.0, 1.0 - _MARGIN).atanh()

    def check(
        self,
        actor: TensorDictModuleBase,
        gate: UncertaintyGate | None = None,
        disagreement: LatentDisagreement | None = None,
    ) -> None:
        """Check that an actor's policy is one that this mixer can mix, and its gate can weigh.

        Args:
            actor: Ends in a probabilistic module over location and scale.
            gate: Its gate, if it has one.
            disagreement: The gate's ensemble, if it has one.

        Raises:
            ValueError: If one of them is of another kind, or has other bounds.
        """
        if gate is not None and gate.scale_range is None:
            raise ValueError(
                "The gate of a Gaussian policy needs the least and the greatest scale to measure "
                "its entropy by: UncertaintyGate(A, scale_range=(low, high))."
            )
        if disagreement is not None:
            self._check_ensemble(disagreement)
        head = actor[-1]
        kind = getattr(head, "distribution_class", None)
        kwargs = dict(getattr(head, "distribution_kwargs", None) or {})
        wanted = TanhNormal if self.bounded else IndependentNormal
        if kind is not wanted or tuple(head.dist_keys) != ("loc", "scale"):
            raise ValueError(
                f"This mixer mixes the loc and scale of a {wanted.__name__}, the actor ends in "
                f"{getattr(kind, '__name__', kind)} over {list(getattr(head, 'dist_keys', []))}. "
                "Supported are TanhNormal, with bounds=(low, high), and IndependentNormal, with "
                "bounds=None."
            )
        if kwargs.get("tanh_loc"):
            raise ValueError(
                "tanh_loc=True moves the location after it was mixed: set it False, and let the "
                "actor's network return upscale * tanh(loc / upscale)."
            )
        if kwargs.get("event_dims", kwargs.get("event_dim", 1)) != 1:
            raise ValueError(f"The action must be the last dimension alone, got {kwargs}.")
        if self.bounded:
            given = [kwargs.get("low", -1.0), kwargs.get("high", 1.0)]
            own = torch.stack((self.low, self.high)).cpu()
            acts = [torch.as_tensor(bound).float().cpu().expand_as(own[0]) for bound in given]
            if not torch.allclose(torch.stack(acts), own):
                raise ValueError(
                    f"The actor acts within {acts[0].tolist()} to {acts[1].tolist()}, the mixer's "
                    f"bounds are {own[0].tolist()} to {own[1].tolist()}."
                )

    def _check_ensemble(self, ensemble: LatentDisagreement) -> None:
        if not isinstance(ensemble, GaussianDisagreement):
            raise ValueError(
                "The ensemble of a Gaussian policy is a GaussianDisagreement, got a "
                f"{type(ensemble).__name__}."
            )
        own, its = ([part.low.tolist(), part.high.tolist()] for part in (self, ensemble))
        if own != its:
            raise ValueError(
                f"The ensemble's bounds are {its[0]} to {its[1]}, the mixer's {own[0]} to {own[1]}."
            )

    @staticmethod
    def policy_of(distribution: Distribution) -> Gaussian:
        """Return the policy of an actor's distribution; the gradient passes."""
        while hasattr(distribution, "base_dist"):
            distribution = distribution.base_dist
        return Gaussian(distribution.loc.float(), distribution.scale.float())

    @staticmethod
    def policy_from(loc: Tensor, scale: Tensor) -> Gaussian:
        """Return the policy of what an actor or this mixer has written, each ``[*B, A]``."""
        return Gaussian(loc, scale)

    @torch.no_grad()
    def choices(self, policy: Gaussian) -> Tensor:
        """Return how likely an action is to lie nearest to each anchor, ``[*B, K]``.

        For showing: measured on 4,096 quasi-random draws, always the same.
        """
        engine = torch.quasirandom.SobolEngine(policy.loc.shape[-1], scramble=True, seed=0)
        draws = torch.special.ndtri(engine.draw(_NUM_DRAWS).to(policy.loc))
        actions = self.squash(policy.loc.unsqueeze(-2) + draws * policy.scale.unsqueeze(-2))
        named = nn.functional.one_hot(self.nearest(actions).squeeze(-1), len(self.actions))
        return named.float().mean(-2)

    def squash(self, value: Tensor) -> Tensor:
        """Return the action of a value before the tanh; without bounds that is the value."""
        if not self.bounded:
            return value
        return squash(value, self.low, self.high)

    def nearest(self, actions: Tensor) -> Tensor:
        """Return the index of the anchor nearest to each action ``[*B, A]``, ``[*B, 1]``."""
        return torch.cdist(actions.unsqueeze(-2), self.actions).argmin(-1)

    def temper(self, prior_logits: Tensor) -> Tensor:
        """Divide centred advice by the temperature, if there is one."""
        return prior_logits if self.temperature is None else self.temperature(prior_logits)

    def prior(self, prior_logits: Tensor, policy: Gaussian | None = None) -> Gaussian:
        """Return centred advice ``[*B, K]`` as a policy; ``policy`` rules no action out."""
        return self.as_policy(self.temper(prior_logits), policy)

    def as_policy(self, tempered: Tensor, policy: Gaussian | None = None) -> Gaussian:
        """Return tempered advice ``[*B, K]`` as a policy; ``policy`` rules no action out."""
        probs = torch.softmax(tempered, -1)
        return Gaussian(*anchor_moments(probs, self.anchors, self.min_scale))

    def log_prob(self, policy: Gaussian, action: Tensor) -> Tensor:
        """Return the log-density of actions ``[*B, A]`` before the tanh, ``[*B]``."""
        value = self._inside(action) if self.bounded else action
        apart = (value - policy.loc) / policy.scale
        log_prob = -0.5 * apart.square() - policy.scale.log() - 0.5 * math.log(2 * math.pi)
        return log_prob.sum(-1)

    @staticmethod
    def divergence(first: Gaussian, second: Gaussian) -> Tensor:
        """Return KL(first, second) of two policies, nats, ``[*B]``."""
        return gaussian_kl(*first, *second)

    @staticmethod
    def expected_log_prob(policy: Gaussian, prior: Gaussian) -> Tensor:
        """Return the prior's log-density of an action, expected under the policy, ``[*B]``."""
        return -gaussian_kl(*policy, *prior) - gaussian_entropy(policy.scale)

    @staticmethod
    def gate_input(policy: Gaussian) -> Tensor:
        """Return what the gate takes the policy's entropy from."""
        return policy.scale

    @torch.no_grad()
    def mix(
        self,
        policy: Gaussian,
        prior_logits: Tensor,
        confidence: Tensor,
        mask: Tensor,
        beta: Tensor,
    ) -> MixedGaussian:
        """Mix and measure; see the class for the formulas.

        Args:
            policy: Location and scale, each ``[*B, A]``.
            prior_logits: Raw advice on the anchors, shape ``[*B, K]``.
            confidence: Shape ``[*B, 1]``.
            mask: Boolean, shape ``[*B, 1]``.
            beta: Weight asked for, shape ``[*B, 1]``.
        """
        prior_logits, weight, _ = clean_advice(prior_logits, confidence, mask)
        mixed = self.combine(policy, self.temper(prior_logits), beta * weight)
        kl = gaussian_kl(*mixed, *policy).clamp_min(0.0).unsqueeze(-1)
        return MixedGaussian(mixed, kl)

    def combine(self, policy: Gaussian, tempered: Tensor, weight: Tensor) -> Gaussian:
        """Mix in advice that is sure to be finite, within the bound.

        The gradient passes through the policy's location and scale; advice and weight are
        constants.

        Args:
            policy: Location and scale, each ``[*B, A]``.
            tempered: Finite advice on the anchors, as :meth:`temper` returns it, ``[*B, K]``.
            weight: Weight asked for, confidence included, shape ``[*B, 1]``.
        """
        with torch.no_grad():
            prior = self.as_policy(tempered)
            if math.isfinite(self.max_kl):
                weight = bounded_gaussian_weight(*policy, *prior, weight, self.max_kl)
        return Gaussian(*mix_gaussians(*policy, *prior, weight))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the mixed location and scale and the divergence."""
        loc, scale, prior_logits, confidence, mask, beta = (
            tensordict.get(key) for key in self.in_keys
        )
        mixture = self.mix(Gaussian(loc, scale), prior_logits, confidence, mask, beta)
        return self.write(tensordict, mixture)

    def write(self, tensordict: TensorDictBase, mixture: MixedGaussian) -> TensorDictBase:
        """Write a mixture's location, scale and divergence under the output keys."""
        values = (*mixture.policy, mixture.kl)
        for key, value in zip(self.out_keys, values, strict=True):
            tensordict.set(key, value)
        return tensordict
