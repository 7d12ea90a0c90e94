"""The actor in imagination, leaning on learnt advice."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor, nn

from lore_torchrl import keys
from lore_torchrl.functional import log_floor, masked_mean
from lore_torchrl.modules.mixing import LogitMixer
from lore_torchrl.modules.prior_net import PriorNet
from lore_torchrl.modules.running import run_module


class ImaginationActor(TensorDictModuleBase):
    r"""Act in imagination with PriorNet's advice mixed in.

    .. math::
        \pi_{imag} = \mathrm{softmax}(\ell_{wm} + \beta'\, c_\phi\, \tilde\ell_\phi), \qquad
        \beta' \le \beta_{imagine}\cdot\mathrm{trust}

    where :math:`c_\phi` passes the network's threshold, within the mixer's KL bound
    (:meth:`LogitMixer.shift`). It takes the actor's place in a Dreamer actor loss: the
    imagined actions are drawn from :math:`\pi_{imag}` and scored by it, so the policy
    gradient is that of :math:`\pi_{imag}`, whose advice is constant. See :meth:`bonus` for
    the term that pulls the policy itself. For continuous actions see
    :class:`~lore_torchrl.modules.GaussianImaginationActor`.

    Args:
        actor: Stock categorical actor over ``state`` and ``belief``.
        prior_net: The only adviser that imagined states have.
        mixer: Mixes within its bound.

    Keyword Args:
        beta_max: Largest weight, a buffer that may be scheduled.
        bandit: Its ``trust()``, from 0 to 1, scales the weight; read by :meth:`refresh`,
            which :class:`~lore_torchrl.objectives.LoReActorLoss` calls before each rollout.
            Default: ``None``, one.
        calibrator: Its ``trust(confidence, group)`` with group 1 scales the weight of a
            state. Default: ``None``, one.
        scored: Whether the loss scores the imagined actions by :meth:`get_dist`, as
            REINFORCE does: acting itself then keeps no graph. Default: ``False``.
        share_policy: Whether the next :meth:`bonus` takes the actor's policy from
            :meth:`get_dist`, on the same states, instead of running the actor once more.
            Default: ``False``.

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
        scored: bool = False,
        share_policy: bool = False,
    ):
        super().__init__()
        if not beta_max >= 0:
            raise ValueError(f"beta_max must not be negative, got {beta_max}.")
        self.actor = actor
        self.__dict__["_backbone"] = tuple(actor.module)[:-1]
        self.prior_net = prior_net
        self.mixer = mixer
        self.bandit = bandit
        self.calibrator = calibrator
        self.scored = scored
        self.share_policy = share_policy
        self._shared_policy: Tensor | None = None
        self.register_buffer("beta_max", torch.tensor(float(beta_max)))
        self.register_buffer("trust", torch.ones(()), persistent=False)
        self.in_keys = [*actor.in_keys, keys.IMAGINED_PRIOR, keys.IMAGINED_WEIGHT]
        self.out_keys = [*actor.out_keys, *self.in_keys[-2:]]

    def refresh(self, share: Tensor | float = 1.0) -> None:
        """Read the bandit's trust, once for a whole imagined rollout; forget a shared policy.

        Args:
            share: Scales the weight of the advice in this rollout, from 0 to 1; not the bonus.
                Default: ``1.0``.
        """
        self._shared_policy = None
        trust = 1.0 if self.bandit is None else self.bandit.trust()
        self.trust.fill_(trust * share)

    @torch.no_grad()
    def advice(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return PriorNet's tempered logits and their weight, without gradient.

        Args:
            tensordict: Latent states ``[*B]``.

        Returns:
            Logits ``[*B, A]``, and confidence times the calibrator's trust ``[*B, 1]``, zero
            where the network is not sure enough.
        """
        latent = (tensordict.get(key) for key in self.prior_net.in_keys)
        logits, weight = self.prior_net.stand_in(*latent)
        if self.calibrator is not None:
            weight = weight * self.calibrator.trust(weight, keys.PRIOR_NET_GROUP)
        # A broken network costs its advice.
        prior = torch.nan_to_num(self.mixer.temper(logits), nan=0.0, posinf=0.0, neginf=0.0)
        return prior, weight

    def bonus(self, imagined: TensorDictBase, goes_on: Tensor | None = None) -> Tensor:
        r"""Return the expected log-prior of the policy's actions over imagined states.

        .. math::
            \mathrm{trust} \cdot \langle \gamma_t w\,
                \mathbb{E}_{a\sim\pi_{wm}}[\log\rho_\phi(a)] \rangle

        over the states where PriorNet's weight :math:`w`, its confidence times its trust,
        is positive. The gradient reaches the actor alone.

        Args:
            imagined: Imagined trajectories, any batch shape; those that :meth:`get_dist` was
                called with, where it shares its policy.
            goes_on: :math:`\gamma_t`, how much an imagined state counts, with one entry for
                each: DreamerV3's ``discount_weight``, small where the episode has most likely
                ended. Default: 1 everywhere.
        """
        policy, self._shared_policy = self._shared_policy, None
        if policy is None:
            actor = self.actor.get_dist(imagined.select(*self.actor.in_keys))
            policy = self.mixer.policy_of(actor)
        prior, weight = self._advice_of(imagined)
        expected = self.mixer.expected_log_prob(
            policy, self.mixer.as_policy(prior, policy.detach())
        )
        weight = weight.squeeze(-1)
        counted = weight > 0
        if goes_on is not None:
            weight = weight * goes_on.reshape(weight.shape)
        bonus = masked_mean(weight * expected, counted)
        return bonus if self.bandit is None else self.bandit.trust() * bonus

    def _advice_of(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return what :meth:`forward` has written, or else :meth:`advice`."""
        prior, weight = (tensordict.get(key, None) for key in self.in_keys[-2:])
        return self.advice(tensordict) if prior is None else (prior, weight)

    def get_dist(self, tensordict: TensorDictBase) -> torch.distributions.Distribution:
        """Return the mixed distribution; the gradient reaches the actor alone.

        The advice is constant, so what :meth:`forward` has written is not computed again.
        """
        distribution = self.actor.get_dist(tensordict)
        log_p = log_floor(distribution.logits.float())
        if self.share_policy:
            self._shared_policy = log_p
        mixed = self._mixed(log_p, self._advice_of(tensordict))
        return type(distribution)(logits=mixed)

    def _mixed(self, log_p: Tensor, advice: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mixed logits, which need not be normalised."""
        prior, weight = advice
        weight = self.beta_max * self.trust * weight
        return log_p + self.mixer.shift(log_p.detach(), prior, weight)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write an action, its log-probability, the mixed logits and the advice in them."""
        with torch.no_grad() if self.scored else nullcontext():
            advice = self.advice(tensordict)
            for key, value in zip(self.in_keys[-2:], advice, strict=True):
                tensordict.set(key, value)
            *body, last = self._backbone
            for module in body:
                module(tensordict)
            head = self.actor[-1]
            logits = run_module(last, tensordict, head.in_keys[0])
            log_p = log_floor(torch.log_softmax(logits.float(), -1))
            tensordict.set(head.in_keys[0], self._mixed(log_p, advice))
            return head(tensordict)
