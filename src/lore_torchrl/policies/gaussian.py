"""Gaussian policies: advice on named anchor actions becomes a Gaussian, and is multiplied in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.modules import IndependentNormal, TanhNormal

from lore_torchrl import keys
from lore_torchrl.policies.base import PolicyKind, head_of

# Draws by which the probabilities of the anchors are measured.
_NUM_DRAWS = 4096
# How near to a bound, as a fraction of half the range, an anchor of a bounded policy may lie:
# at the bound itself, before the tanh, it would be infinitely far away.
_MARGIN = 0.01


def anchor_moments(probs: Tensor, anchors: Tensor, min_scale: float) -> tuple[Tensor, Tensor]:
    r"""Match a Gaussian to a distribution over anchor actions, by its first two moments.

    .. math::
        \mu = \sum_k p_k\, a_k, \qquad
        \sigma^2 = \sum_k p_k\, (a_k - \mu)^2 + \sigma_{\min}^2

    Args:
        probs: Probabilities of the anchors, shape ``[*B, K]``.
        anchors: The anchors' actions, shape ``[K, A]``.
        min_scale: :math:`\sigma_{\min}`, what remains when all weight is on one anchor.

    Returns:
        Location and scale, each ``[*B, A]``.
    """
    with torch.autocast(probs.device.type, enabled=False):
        loc = probs @ anchors
    # Around the mean, not as a difference of moments, which rounding may turn negative.
    offsets = anchors - loc.unsqueeze(-2)
    variance = (probs.unsqueeze(-1) * offsets.square()).sum(-2)
    return loc, (variance + min_scale**2).sqrt()


def gaussian_kl(loc: Tensor, scale: Tensor, other_loc: Tensor, other_scale: Tensor) -> Tensor:
    r"""Return :math:`\mathrm{KL}(\mathcal N \| \mathcal N')` of diagonal Gaussians in nats.

    .. math::
        \sum_i \ln\frac{\sigma'_i}{\sigma_i}
            + \frac{\sigma_i^2 + (\mu_i - \mu'_i)^2}{2 \sigma_i'^2} - \frac12

    From ``[*B, A]`` to ``[*B]``. A bijection of the action, such as the tanh of a bounded
    policy, leaves it as it is.
    """
    ratio = scale / other_scale
    distance = (loc - other_loc) / other_scale
    return (0.5 * (ratio.square() + distance.square() - 1.0) - ratio.log()).sum(-1)


def mix_gaussians(
    loc: Tensor, scale: Tensor, prior_loc: Tensor, prior_scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Return the precision-weighted product :math:`\mathcal N \cdot \mathcal N_\rho^w`.

    .. math::
        \sigma_{mix}^{-2} = \sigma^{-2} + w\, \sigma_\rho^{-2}, \qquad
        \mu_{mix} = \sigma_{mix}^2\,(\sigma^{-2} \mu + w\, \sigma_\rho^{-2} \mu_\rho)

    Locations and scales are ``[*B, A]``, the weight :math:`w \ge 0` is ``[*B, 1]``; zero gives the
    policy, bitwise.
    """
    # In units of the policy's precision, so that a narrow policy does not overflow.
    added = weight * (scale / prior_scale).square()
    pull = added / (1.0 + added)
    mixed = loc + pull * (prior_loc - loc), scale * torch.rsqrt(1.0 + added)
    return torch.where(weight > 0, mixed[0], loc), torch.where(weight > 0, mixed[1], scale)


def bounded_gaussian_weight(
    loc: Tensor,
    scale: Tensor,
    prior_loc: Tensor,
    prior_scale: Tensor,
    weight: Tensor,
    max_kl: float | Tensor,
) -> Tensor:
    r"""Return a weight whose :func:`mix_gaussians` keeps a KL bound.

    With :math:`r_i = \sigma_i^2 / \sigma_{\rho,i}^2`,
    :math:`d_i^2 = (\mu_{\rho,i} - \mu_i)^2 / \sigma_i^2` and :math:`c_i = \frac12 + d_i^2`,

    .. math::
        w' &= \min\Bigl(w,\; \min_i \frac{\max(x_i, y_i)}{r_i}\Bigr), \qquad
        \epsilon_i = \epsilon\, \frac{c_i r_i^2}{\sum_j c_j r_j^2} \\
        x_i &= \frac{\epsilon_i + \sqrt{\epsilon_i^2 + 2 \epsilon_i c_i}}{c_i}, \qquad
        y_i = \exp\bigl(2 \epsilon_i - \max(0, d_i^2 - 1)\bigr) - 1

    Each dimension gets the part :math:`\epsilon_i` of the bound that it would use up for a
    small weight, and keeps to it: for :math:`x = w r_i` and :math:`s = x / (1 + x)` its
    divergence :math:`D_i` from the policy obeys

    .. math::
        2 D_i = \ln(1 + x) - s + d_i^2 s^2 \le
        \min\Bigl(\frac{c_i x^2}{1 + x},\; \ln(1 + x) + \max(0, d_i^2 - 1)\Bigr)

    since :math:`\ln(1 + x) - s = \sum_{n \ge 2} s^n / n \le s^2 / (2 - 2 s)`, and
    :math:`d_i^2 s^2 - s` is convex in :math:`s`.

    Shapes are those of :func:`mix_gaussians`; ``max_kl`` is :math:`\epsilon`, finite, in nats.
    """
    distance = ((prior_loc - loc) / scale).square()
    # A larger ratio only makes the weight smaller.
    ratio = (scale / prior_scale).square().clamp_min(1e-12)
    curve = 0.5 + distance
    used = curve * ratio.square()
    share = max_kl * used / used.sum(-1, keepdim=True)
    near = (share + (share * (share + 2.0 * curve)).sqrt()) / curve
    far = (2.0 * share - (distance - 1.0).clamp_min(0.0)).expm1()
    largest = (torch.maximum(near, far) / ratio).amin(-1, keepdim=True)
    # A few ulps inside, since the mixture rounds.
    return torch.minimum(weight, largest * (1.0 - 1e-5))


def gaussian_entropy(scale: Tensor) -> Tensor:
    r"""Return :math:`\sum_i \ln \sigma_i + \frac12 \ln 2 \pi e`, nats ``[*B]`` of ``[*B, A]``."""
    return (scale.log() + 0.5 * math.log(2.0 * math.pi * math.e)).sum(-1)


def scale_entropy(scale: Tensor, low: float, high: float) -> Tensor:
    r"""Entropy of a Gaussian on a scale from 0, at its least, to 1, at its greatest.

    .. math::
        \hat H = \frac1A \sum_i \mathrm{clip}\Bigl(
            \frac{\ln \sigma_i - \ln \sigma_{\min}}
                 {\ln \sigma_{\max} - \ln \sigma_{\min}}, 0, 1\Bigr)

    From ``[*B, A]`` to ``[*B, 1]``.
    """
    place = (scale.log() - math.log(low)) / (math.log(high) - math.log(low))
    return place.clamp(0.0, 1.0).mean(-1, keepdim=True)


class Gaussian(NamedTuple):
    """Location and scale of a diagonal Gaussian, each ``[*B, A]``."""

    loc: Tensor
    scale: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the location."""
        return self.loc.dtype

    def detach(self) -> Gaussian:
        """Return the same without gradient."""
        return Gaussian(self.loc.detach(), self.scale.detach())

    def to(self, dtype: torch.dtype) -> Gaussian:
        """Return the same in another dtype."""
        return Gaussian(self.loc.to(dtype), self.scale.to(dtype))


class GaussianPolicy(PolicyKind):
    r"""Diagonal Gaussian policies, advised on :math:`K` anchor actions :math:`a_k`.

    The advisor chooses among named anchors ("strong left", ...). Its probabilities
    :math:`\mathrm{softmax}(\tilde\ell)` become a Gaussian by their moments
    (:func:`anchor_moments`), and the mixture is its product with the policy
    (:func:`mix_gaussians`), with :math:`w` lowered where the divergence might exceed the bound
    (:func:`bounded_gaussian_weight`). Product of experts:
    https://doi.org/10.1162/089976602760128018.

    Two distributions are known: :class:`~torchrl.modules.IndependentNormal`, and
    :class:`~torchrl.modules.TanhNormal`, with ``bounds``. The latter is mixed before its
    tanh; its anchors are brought there by

    .. math::
        \tilde a = \mathrm{artanh}\bigl(\mathrm{clip}(
            (2a - h - l) / (h - l), -0.99, 0.99)\bigr)

    A policy is a :class:`Gaussian`, before the tanh. One set of normal draws serves both policies.

    Args:
        anchors: The named actions, in the order of the advice, ``[K, A]``.

    Keyword Args:
        bounds: Lowest and highest action of a ``TanhNormal`` policy, each a number or one
            for each dimension; ``None`` for an ``IndependentNormal``. Default: ``None``.
        scale_range: Least and greatest scale of the policy, for :meth:`entropy`.
        min_scale: :math:`\sigma_{\min}`, of the prior when all weight is on one anchor, in
            units of the action, or of what goes into the tanh. Default: ``0.3``.

    Raises:
        ValueError: If there are fewer than two anchors, they lie outside ``bounds`` or are
            not finite, or another value is out of range.
    """

    mix_keys = (keys.MIX_LOC, keys.MIX_SCALE)
    anchors: Tensor
    actions: Tensor
    low: Tensor
    high: Tensor

    def __init__(
        self,
        anchors: Tensor | Sequence[Sequence[float]],
        *,
        bounds: tuple[Tensor | float, Tensor | float] | None = None,
        scale_range: tuple[float, float],
        min_scale: float = 0.3,
    ):
        super().__init__()
        actions = torch.as_tensor(anchors, dtype=torch.float32)
        if actions.ndim != 2 or len(actions) < 2 or not actions.isfinite().all():
            raise ValueError(
                "anchors must be finite, [K, A] with at least 2 named actions, got "
                f"{actions.tolist()}."
            )
        if not 0 < scale_range[0] < scale_range[1]:
            raise ValueError(f"scale_range needs 0 < low < high, got {scale_range}.")
        if not min_scale > 0:
            raise ValueError(f"min_scale must be positive, got {min_scale}.")
        self.bounded = bounds is not None
        limits = bounds if self.bounded else (-math.inf, math.inf)
        for name, bound in zip(("low", "high"), limits, strict=True):
            # The describer's anchors and the agent's bounds may come from two devices.
            bound = torch.as_tensor(bound).to(actions)
            if bound.shape not in ((), actions[0].shape):
                raise ValueError(
                    f"bounds must be numbers or [A], for anchors of {len(actions[0])} dimensions, "
                    f"got {name} {list(bound.shape)}."
                )
            bound = bound.expand_as(actions[0]).clone()
            self.register_buffer(name, bound)
        if not ((self.low < self.high) & (actions >= self.low) & (actions <= self.high)).all():
            raise ValueError(
                f"anchors must lie within bounds, low below high: got {actions.tolist()} for "
                f"{self.low.tolist()} to {self.high.tolist()}."
            )
        self.register_buffer("actions", actions)
        self.register_buffer("anchors", self._inside(actions).clone())
        self.scale_range = tuple(scale_range)
        self.min_scale = float(min_scale)

    def _inside(self, actions: Tensor) -> Tensor:
        """Return what goes into the tanh for actions within the bounds."""
        if not self.bounded:
            return actions
        place = (2.0 * actions - self.high - self.low) / (self.high - self.low)
        return place.clamp(_MARGIN - 1.0, 1.0 - _MARGIN).atanh()

    def squash(self, value: Tensor) -> Tensor:
        r"""Return :math:`\frac{h + l}{2} + \frac{h - l}{2} \tanh(x)`; without bounds :math:`x`."""
        if not self.bounded:
            return value
        return (self.high + self.low) / 2 + (self.high - self.low) / 2 * value.tanh()

    def check(self, actor: TensorDictModuleBase) -> None:
        """Refuse an actor with another distribution, or with other bounds."""
        head = head_of(actor)
        kind = getattr(head, "distribution_class", None)
        kwargs = getattr(head, "distribution_kwargs", None) or {}
        wanted = TanhNormal if self.bounded else IndependentNormal
        if kind is not wanted or tuple(head.dist_keys) != ("loc", "scale"):
            raise ValueError(
                f"This policy is the loc and scale of a {wanted.__name__}, the actor ends in "
                f"{getattr(kind, '__name__', kind)} over {list(head.in_keys)}. Supported are "
                "TanhNormal, with bounds=(low, high), and IndependentNormal, with bounds=None."
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
                    f"The actor acts within {acts[0].tolist()} to {acts[1].tolist()}, the policy's "
                    f"bounds are {own[0].tolist()} to {own[1].tolist()}."
                )

    def check_mixing(self, mode: str, *, aligned: bool) -> None:
        """Refuse ``mode="probability"`` and an aligner that moves."""
        if mode != "logit":
            raise ValueError(
                "Actions are continuous: set lore.mixer.mode=logit (two Gaussians added up are "
                f"none: the mixture has no KL in closed form), got {mode!r}. method=cloning needs "
                "that mode, and discrete actions."
            )
        if aligned:
            raise ValueError(
                "Actions are continuous: set lore.temperature.rate=0 (a Gaussian policy has no "
                "probabilities of the anchors to align the advice with)."
            )

    def num_actions(self, policy: Gaussian) -> int:
        """Return the number of anchors :math:`K`."""
        return len(self.actions)

    def of(self, distribution: Distribution) -> Gaussian:
        """Return location and scale before the tanh."""
        while hasattr(distribution, "base_dist"):
            distribution = distribution.base_dist
        return Gaussian(distribution.loc.float(), distribution.scale.float())

    def read(self, loc: Tensor, scale: Tensor) -> Gaussian:
        """Return location and scale as they are."""
        if loc.shape[-1] != self.actions.shape[-1]:
            raise ValueError(
                f"The policy has {loc.shape[-1]} dimensions, the anchors {self.actions.shape[-1]}."
            )
        return Gaussian(loc, scale)

    def entries(self, policy: Gaussian) -> tuple[Tensor, Tensor]:
        """Return location and scale."""
        return tuple(policy)

    def precise(self, policy: Gaussian) -> Gaussian:
        """Return location and scale in float32 or better."""
        return policy.to(torch.promote_types(policy.dtype, torch.float32))

    def entropy(self, policy: Gaussian) -> Tensor:
        """Return :func:`scale_entropy`, the entropy before the tanh between its extremes."""
        return scale_entropy(self.precise(policy).scale, *self.scale_range)

    def as_policy(self, tempered: Tensor, policy: Gaussian) -> Gaussian:
        """Return the Gaussian with the moments of the anchors; see :func:`anchor_moments`."""
        probs = torch.softmax(tempered, -1)
        return Gaussian(*anchor_moments(probs, self.anchors, self.min_scale))

    def combine(
        self,
        policy: Gaussian,
        tempered: Tensor,
        weight: Tensor,
        *,
        max_kl: float,
        mode: str,
        excluded: Tensor | None = None,
    ) -> Gaussian:
        """Multiply the policy with the advice, raised to the weight."""
        policy = self.precise(policy)
        with torch.no_grad():
            prior = self.as_policy(tempered, policy)
            if math.isfinite(max_kl):
                weight = bounded_gaussian_weight(*policy, *prior, weight, max_kl)
        return Gaussian(*mix_gaussians(*policy, *prior, weight))

    def draw(self, mixture: Gaussian, policy: Gaussian, random: bool) -> tuple[Tensor, Tensor]:
        """Return the value before the tanh, and where another anchor is nearest to its action."""
        picks = [mixture.loc, policy.loc]
        if random:
            noise = torch.empty_like(policy.loc).normal_()
            picks = [loc + noise * scale for loc, scale in (mixture, policy)]
        nearest, stock = (self.nearest(self.squash(pick)) for pick in picks)
        return picks[0], nearest != stock

    def act(self, head: nn.Module, mixture: Gaussian, choice: Tensor) -> tuple[Tensor, Tensor]:
        """Return the action of a value before the tanh."""
        distribution = head.distribution_class(*mixture, **head.distribution_kwargs)
        action = choice
        for transform in getattr(distribution, "transforms", ()):
            action = transform(action)
        return action, distribution.log_prob(action)

    def divergence(self, first: Gaussian, second: Gaussian) -> Tensor:
        """Return :func:`gaussian_kl`."""
        return gaussian_kl(*first, *second)

    def log_prob(self, policy: Gaussian, action: Tensor) -> Tensor:
        """Return the log-density of actions, before the tanh."""
        apart = (self._inside(action) - policy.loc) / policy.scale
        log_prob = -0.5 * apart.square() - policy.scale.log() - 0.5 * math.log(2 * math.pi)
        return log_prob.sum(-1)

    def expected_log_prob(self, policy: Gaussian, prior: Gaussian) -> Tensor:
        """Return the expectation in closed form."""
        return -gaussian_kl(*policy, *prior) - gaussian_entropy(policy.scale)

    def nearest(self, actions: Tensor) -> Tensor:
        """Return the index of the anchor nearest to each action."""
        return torch.cdist(actions.float().unsqueeze(-2), self.actions.float()).argmin(-1)

    @torch.no_grad()
    def choices(self, policy: Gaussian) -> Tensor:
        """Return the measure on 4,096 quasi-random draws, always the same; for showing."""
        engine = torch.quasirandom.SobolEngine(policy.loc.shape[-1], scramble=True, seed=0)
        draws = torch.special.ndtri(engine.draw(_NUM_DRAWS).to(policy.loc))
        actions = self.squash(policy.loc.unsqueeze(-2) + draws * policy.scale.unsqueeze(-2))
        named = nn.functional.one_hot(self.nearest(actions).squeeze(-1), len(self.actions))
        return named.float().mean(-2)

    def as_advice(self, policy: Gaussian) -> Tensor:
        """Return the log-density at the anchors, of the policy widened by ``min_scale``."""
        apart = (self.anchors - policy.loc.unsqueeze(-2)).square()
        variance = policy.scale.square() + self.min_scale**2
        return -0.5 * (apart / variance.unsqueeze(-2)).sum(-1)

    def sample(self, policy: Gaussian, number: int) -> Tensor:
        """Return actions, after the tanh."""
        noise = torch.randn(
            (number, *policy.loc.shape), dtype=policy.dtype, device=policy.loc.device
        )
        return self.squash(policy.loc + noise * policy.scale)

    def fit(self, actions: Tensor, weight: Tensor) -> Gaussian:
        """Return weighted mean and deviation before the tanh, at least the policy's least scale."""
        value = self._inside(actions)
        loc = (weight * value).sum(0)
        scale = (weight * (value - loc).square()).sum(0).sqrt()
        return Gaussian(loc, scale.clamp_min(self.scale_range[0]))

    def blend(self, first: Gaussian, second: Gaussian, weight: Tensor | float) -> Gaussian:
        """Return the Gaussian with the moments of the mixture of both."""
        loc = weight * first.loc + (1.0 - weight) * second.loc
        parts = ((weight, first), (1.0 - weight, second))
        variance = sum(w * (part.scale.square() + (part.loc - loc).square()) for w, part in parts)
        return Gaussian(loc, variance.sqrt())

    def disagreement(
        self, ensemble: nn.Module, state: Tensor, belief: Tensor, policy: Gaussian
    ) -> Tensor:
        """Return that about the action which the environment would get for the location."""
        return ensemble.at(state, belief, self.squash(policy.loc.float()))
