"""Categorical policies: advice is added to log-probabilities."""

from __future__ import annotations

import math

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.distributions import Distribution

from lore_torchrl import keys
from lore_torchrl.functional import categorical_kl, is_ruled_out, log_floor
from lore_torchrl.policies.base import PolicyKind, head_of

# Nats; a logit moves by at most the square root of eight times the bound, far less than 1e4.
_LARGE_BOUND = 1e4
_LARGE_EXPONENT = 80.0  # e to its power is a float32


def bounded_weight(direction: Tensor, weight: Tensor, max_kl: float | Tensor) -> Tensor:
    r"""Return a weight with which advice added to any policy keeps a KL bound.

    For :math:`\mathrm{softmax}(\log p + \beta' d)`, whatever :math:`p` is:

    .. math::
        \beta' = \min\Bigl(\beta,\; \frac{\sqrt{8\,\epsilon}}{\max_a d_a - \min_a d_a}\Bigr)

    since along :math:`p_b \propto p\,e^{b d}` the divergence from
    :math:`p` is :math:`\int_0^\beta b\,\mathrm{Var}_{p_b}[d]\,db`, and a variance is at most
    a quarter of the squared range (Popoviciu).

    Args:
        direction: Advice, shape ``[*B, A]``.
        weight: Wanted weight :math:`\beta`, shape ``[*B, 1]``, not negative.
        max_kl: Radius :math:`\epsilon` in nats, broadcastable to ``[*B, 1]``.
    """
    low, high = direction.aminmax(dim=-1, keepdim=True)
    # An ulp inside, since the mixture rounds.
    largest = (8.0 * max_kl) ** 0.5 * (1.0 - 1e-6) / (high - low).clamp_min(1e-9)
    return torch.minimum(weight, largest)


def exclude(
    log_p: Tensor, excluded: Tensor, weight: Tensor, max_kl: float
) -> tuple[Tensor, Tensor]:
    r"""Return what to add to a policy's logits to exclude actions, and the KL that is left.

    With the probability :math:`m = 1 - q` of the excluded actions, they lose the factor
    :math:`1 - g`,

    .. math::
        g = \min\Bigl(\beta,\; 1,\; (e^{\epsilon / 2} - 1)\, \frac{q}{m}\Bigr), \qquad
        c = \log\Bigl(1 + g\, \frac{m}{q}\Bigr) \le \frac{\epsilon}{2}.

    No probability grows by more than :math:`e^c`, so whatever then is mixed within
    :math:`\epsilon - c` keeps :math:`\epsilon`.

    Args:
        log_p: The policy, ``[*B, A]``.
        excluded: Actions, boolean ``[*B, A]``; a row without any is left as it is.
        weight: Wanted weight :math:`\beta`, ``[*B, 1]``, not negative.
        max_kl: Radius :math:`\epsilon` in nats.
    """
    tiny = torch.finfo(log_p.dtype).tiny
    probs = log_p.exp()
    out = torch.where(excluded, probs, 0.0).sum(-1, keepdim=True)
    left = torch.where(excluded, 0.0, probs).sum(-1, keepdim=True)
    largest = math.expm1(min(max_kl / 2.0, _LARGE_EXPONENT)) * (left / out.clamp_min(tiny))
    share = torch.minimum(weight.clamp(max=1.0), largest)
    spent = torch.log1p(share * (out / left.clamp_min(tiny)))
    return torch.where(excluded, torch.log1p(-share), 0.0), max_kl - spent


class CategoricalPolicy(PolicyKind):
    r"""Policies over :math:`A` one-hot actions, each of them a named one.

    A policy is its normalized log-probabilities ``[*B, A]``, at least -1e4
    (:func:`~lore_torchrl.functional.log_floor`). With advice :math:`\tilde\ell`,
    ``mode="logit"`` gives

    .. math::
        \pi_{mix} = \mathrm{softmax}(\log \pi + w' \tilde\ell)

    with :math:`w'` of :func:`bounded_weight`, and ``mode="probability"``, with
    :math:`\rho = \mathrm{softmax}(\tilde\ell)` over what the policy does not rule out,

    .. math::
        \pi_{mix} = (1 - g)\,\pi + g\,\rho, \qquad
        g = \min\Bigl(w,\; 1,\; \frac{\epsilon}{\mathrm{KL}(\rho \| \pi)}\Bigr).

    Both keep the bound :math:`\epsilon` whatever the policy is: the divergence is convex in
    :math:`g`. Excluded actions would use up the range of logits that the bound leaves to the
    others; with ``"logit"`` they are taken out before, by :func:`exclude`.

    One set of exponential draws :math:`E_a` serves both policies: the action is
    :math:`\arg\max_a \pi(a)/E_a`, which is how :func:`torch.multinomial` draws one sample.
    """

    mix_keys = (keys.MIX_LOGITS,)

    def check(self, actor: TensorDictModuleBase) -> None:
        """Refuse an actor that does not end in a distribution over one logits entry."""
        head = head_of(actor)
        if tuple(head.dist_keys) != ("logits",) or len(head.in_keys) != 1:
            raise ValueError(
                "actor must end in a categorical distribution over one logits entry, as "
                f"DreamerV3DiscreteActor does; got in_keys={head.in_keys}. A Gaussian actor needs "
                "LogitMixer(GaussianPolicy(...))."
            )
        kind = head.distribution_class
        # torch's and TorchRL's all have it in their names, and no common base.
        if not any("OneHot" in base.__name__ for base in getattr(kind, "__mro__", ())):
            raise ValueError(
                f"The actor's actions must be one-hot, as OneHotCategorical draws them, got {kind}."
            )

    def num_actions(self, policy: Tensor) -> int:
        """Return the number of actions :math:`A`."""
        return policy.shape[-1]

    def of(self, distribution: Distribution) -> Tensor:
        """Return log-probabilities."""
        return log_floor(torch.log_softmax(distribution.logits.float(), -1))

    def read(self, logits: Tensor) -> Tensor:
        """Return log-probabilities, normalized as torch's own distributions do it."""
        return log_floor(logits - logits.logsumexp(-1, keepdim=True))

    def entries(self, policy: Tensor) -> tuple[Tensor]:
        """Return the log-probabilities."""
        return (policy,)

    def precise(self, policy: Tensor) -> Tensor:
        """Return log-probabilities in float32, renormalized."""
        if policy.dtype in (torch.float32, torch.float64):
            return policy
        possible = policy.float().masked_fill(is_ruled_out(policy), -math.inf)
        return log_floor(torch.log_softmax(possible, -1))

    def entropy(self, policy: Tensor) -> Tensor:
        r"""Return :math:`H[\pi] / \log A`."""
        log_p = self.precise(policy)
        return -(log_p.exp() * log_p).sum(-1, keepdim=True) / math.log(max(log_p.shape[-1], 2))

    def as_policy(self, tempered: Tensor, policy: Tensor) -> Tensor:
        r"""Return :math:`\mathrm{softmax}(\tilde\ell)` over what the policy does not rule out."""
        possible = tempered.masked_fill(is_ruled_out(policy), -math.inf)
        return log_floor(torch.log_softmax(possible, -1))

    def combine(
        self,
        policy: Tensor,
        tempered: Tensor,
        weight: Tensor,
        *,
        max_kl: float,
        mode: str,
        excluded: Tensor | None = None,
    ) -> Tensor:
        """Add advice to the log-probabilities, or to the probabilities."""
        log_p = self.precise(policy)
        fixed = log_p.detach()
        if mode == "logit":
            mixed, left = log_p, max_kl
            if excluded is not None:
                moved, left = exclude(fixed, excluded, weight, max_kl)
                mixed = log_p + moved
                lowest = tempered.masked_fill(excluded, math.inf).amin(-1, keepdim=True)
                tempered = torch.where(excluded, 0.0, tempered - lowest)
            mixed = mixed + bounded_weight(tempered, weight, left) * tempered
        else:
            if excluded is not None:
                # Where nothing would be left, the advice keeps to what the policy can do.
                nothing = (excluded | is_ruled_out(fixed)).all(-1, keepdim=True)
                tempered = tempered.masked_fill(excluded & ~nothing, -math.inf)
            log_prior = self.as_policy(tempered, fixed)
            apart = categorical_kl(log_prior, fixed).unsqueeze(-1)
            share = torch.minimum(weight.clamp(max=1.0), max_kl / apart.clamp_min(1e-9))
            probs = (1.0 - share) * fixed.exp() + share * log_prior.exp()
            mixed = log_p + probs.clamp_min(torch.finfo(probs.dtype).tiny).log() - fixed
        if mode == "probability" or max_kl > _LARGE_BOUND:
            # Within a smaller bound no logit moves far enough to bring back what is ruled out.
            mixed = mixed.masked_fill(is_ruled_out(fixed), -math.inf)
        return torch.where(weight > 0, log_floor(torch.log_softmax(mixed, -1)), policy)

    def draw(self, mixture: Tensor, policy: Tensor, random: bool) -> tuple[Tensor, Tensor]:
        """Return the index ``[*B, 1]`` that the mixture picks, and where the policy's differs."""
        both = torch.stack((mixture, policy))
        if random:
            # In place of torch.multinomial, which does just this, for two rows at once.
            both = torch.softmax(both, -1) / torch.empty_like(policy).exponential_()
        index, stock_index = both.argmax(-1, keepdim=True)
        return index, index != stock_index

    def act(self, head: nn.Module, mixture: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
        """Return the one-hot action of an index."""
        action = torch.zeros_like(mixture, dtype=torch.long).scatter_(-1, choice, 1)
        return action, mixture.gather(-1, choice).squeeze(-1)

    def divergence(self, first: Tensor, second: Tensor) -> Tensor:
        """Return KL(first, second)."""
        return categorical_kl(first, second)

    def log_prob(self, policy: Tensor, action: Tensor) -> Tensor:
        """Return the log-probability of one-hot actions."""
        return (policy * action).sum(-1)

    def expected_log_prob(self, policy: Tensor, prior: Tensor) -> Tensor:
        """Return the expectation over all actions."""
        return (policy.exp() * prior).sum(-1)

    def nearest(self, actions: Tensor) -> Tensor:
        """Return the index of one-hot actions."""
        return actions.argmax(-1, keepdim=True)

    def choices(self, policy: Tensor) -> Tensor:
        """Return the probabilities."""
        return policy.exp()

    def as_advice(self, policy: Tensor) -> Tensor:
        """Return the log-probabilities."""
        return policy

    def sample(self, policy: Tensor, number: int) -> Tensor:
        """Return one-hot actions."""
        shape = (number, *policy.shape)
        index = (policy.exp() / policy.new_empty(shape).exponential_()).argmax(-1, keepdim=True)
        return policy.new_zeros(shape).scatter_(-1, index, 1.0)

    def fit(self, actions: Tensor, weight: Tensor) -> Tensor:
        """Return the logarithm of the weighted frequencies."""
        return log_floor((weight * actions).sum(0).log())

    def blend(self, first: Tensor, second: Tensor, weight: Tensor | float) -> Tensor:
        """Return the logarithm of the mean of both probabilities."""
        return log_floor((weight * first.exp() + (1.0 - weight) * second.exp()).log())

    def disagreement(
        self, ensemble: nn.Module, state: Tensor, belief: Tensor, policy: Tensor
    ) -> Tensor:
        """Return what the policy has to expect over all actions."""
        return ensemble.expected(state, belief, policy)
