"""The stock actor loss, plus what is learned from executed steps and advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.objectives import DreamerActorLoss, DreamerV3ActorLoss
from torchrl.objectives.common import LossModule
from torchrl.objectives.utils import ValueEstimators

from lore_torchrl import keys
from lore_torchrl.configs.lore import LossConfig
from lore_torchrl.control.bandit import AdviceBandit
from lore_torchrl.functional import masked_mean
from lore_torchrl.modules.advice import AdviceBatch, read_advice
from lore_torchrl.modules.ensembles import LatentDisagreement, ValueEnsemble
from lore_torchrl.modules.gate import UncertaintyGate
from lore_torchrl.modules.imagination import ImaginationActor
from lore_torchrl.modules.mixing import LogitMixer
from lore_torchrl.modules.prior_net import PriorNet
from lore_torchrl.modules.subgoals import SubgoalHead
from lore_torchrl.objectives.imitation import imitation_weight
from lore_torchrl.policies import CategoricalPolicy

# Sums of weights below this are divided by as much, so that one small gain in a batch does not
# weigh as much as a batch of good steps.
_LEAST_WEIGHT = 1.0
# What is imitated of an imagined trajectory.
_FIRST_STEPS = ("state", "belief", "action", "lambda_target")


class LoReActorLoss(LossModule):
    r"""Wrap a Dreamer actor loss with self-imitation, gated KL terms and a Lagrange multiplier.

    The stock loss is computed first and returned, times ``actor_weight``. On real posterior
    states :math:`s_t`, with the executed action :math:`a_t`, whoever chose it, it adds

    .. math::
        \mathtt{loss\_lore\_imitation} = -\lambda_f
            \frac{\sum_t f_t \min(\log \pi_{wm}(a_t | s_t), \log p_{max})}{\max(1, \sum_t f_t)}

    with :math:`p_{max} = 1` unless :class:`~lore_torchrl.replay.ImitationSampler` gives another,
    :math:`f_t` of :func:`~lore_torchrl.objectives.imitation_weight`, its scale the wrapped
    loss's span of returns, and :math:`V` clipped to the range of real returns so far, 0 included,
    so that a critic's noise makes no gains. Where the step was the advice's first choice, the
    lambda return :math:`G_t` is corrected towards a real return :math:`R_t` above it, with the
    bandit's probability :math:`p` that advice helps (:meth:`set_bandit`):

    .. math::
        G_t \leftarrow G_t + \max(0, 2 p - 1) \max(0, R_t - G_t)

    On states that carry advice, with weight
    :math:`w = \mathrm{sg}(c\,m\,\beta / \beta_{\max})`, prior
    :math:`\rho = \mathrm{softmax}(\ell_{llm}/T)` and :math:`\langle\cdot\rangle` the mean over
    advised states, weighted by :math:`f` on steps that took the advice's first choice and by 0
    on others (so what gained nothing is not learned), it adds

    .. math::
        \mathtt{loss\_lore\_prior} &= \lambda_\rho\, \max(0, 1 - k / K)\,
            \langle w\,\mathrm{KL}(\rho \,\|\, \pi_{wm}) \rangle \\
        \mathtt{loss\_lore\_constraint} &= \lambda\,
            \mathrm{ReLU}(\langle\mathrm{KL}(
            \mathrm{sg}(\pi_{mix}) \,\|\, \pi_{wm})\rangle - \delta) \\
        \mathtt{loss\_lore\_bonus} &= -\beta_b\,
            \langle w\,\mathbb{E}_{a\sim\pi_{wm}}[\log\rho(a)] \rangle

    with :math:`k` the updates so far and :math:`K` ``prior_steps``, without which that factor is 1,
    and, in training, :math:`\lambda \leftarrow \mathrm{clip}(\lambda + \eta(
    \langle\mathrm{KL}\rangle - \delta), 0, \lambda_{\max})`; a fixed :math:`\lambda` with
    :math:`\delta = 0` distills the mixture into the policy. With ``imitation_weight=0``
    every advised state counts alike, whatever followed.
    Terms with weight zero are not computed, and a batch without advice and without a step to
    imitate leaves the loss, its gradients and the random stream as stock.

    With a ``prior_net`` its advice is used where the advisor gave none, here and, with
    ``beta_imagine_max``, in imagination (:class:`~lore_torchrl.modules.ImaginationActor`).

    Constrained policy updates: https://arxiv.org/abs/1502.05477.

    Args:
        actor_loss: Stock :class:`~torchrl.objectives.DreamerV3ActorLoss` or
            :class:`~torchrl.objectives.DreamerActorLoss`, with a stock actor of the mixer's kind of
            policy.
        config: Weights :math:`\lambda_f, \lambda_\rho, \beta_b`, threshold, multiplier
            and bound, each documented there. Default: ``LossConfig()``.

    Keyword Args:
        gate: Gate of the acting policy, for :math:`\pi_{mix}` and :math:`\beta`; without one the
            terms are not gated. Default: ``None``.
        mixer: Mixer of the acting policy, for :math:`T`, :math:`\rho` and :math:`\pi_{mix}`.
            Needed for the constraint and a Gaussian actor. Default: ``None``, a
            ``LogitMixer()``.
        prior_net: Network that has learned the advice so far. Default: ``None``.
        disagreement: Ensemble for a gate that weighs it. Default: ``None``.
        value_ensemble: Ensemble for a gate whose ``value_source`` is ``"ensemble"``.
            Default: ``None``, the critic.
        dyna_weight: Weight :math:`\lambda_y` of :meth:`imagined_terms`, which
            :class:`~lore_torchrl.objectives.LoReDreamerV3Loss` adds. Default: ``0.0``.
        subgoal_head: Pays imagined rollouts that reach the subgoal of the state that they begin
            in, ``loss_lore_subgoal``; in the composed loss alone, which knows that subgoal.
            Default: ``None``.

    Raises:
        TypeError: If ``actor_loss`` or its actor is not a stock one, or ``config`` no LossConfig.
        ValueError: If a term lacks a part that it needs, or the mixer is for another kind of
            policy. In ``forward``, if the advice names another number of actions.
        KeyError: In ``forward``, if a term is on and there is no advice, or not what belongs to
            it. :class:`~lore_torchrl.objectives.LoReDreamerV3Loss`, which hands advice over
            itself, sets ``composed`` to say so; the stock ``DreamerV3Loss`` would drop it.

    The input needs the ``state`` and ``belief`` entries of the wrapped loss and, of the same
    states, for the imitation ``action`` ``[*B, A]``, what was executed there, and
    ``lore_return`` ``[*B, 1]``, what followed, NaN where it is not known; for the other terms
    ``llm_prior_logits`` ``[*B, A]``, ``llm_confidence`` ``[*B, 1]`` and ``llm_mask`` ``[*B, 1]``.
    ``lore_lambda_return`` is taken for :math:`G` where it is there. :meth:`set_keys` renames
    the latent entries, and what the wrapped loss knows.
    """

    @dataclass
    class _AcceptedKeys:
        """The latent entries, by the names of the wrapped loss."""

        state: NestedKey = "state"
        belief: NestedKey = "belief"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    default_value_estimator = ValueEstimators.TDLambda

    multiplier: Tensor
    updates: Tensor
    least_return: Tensor
    greatest_return: Tensor

    def __init__(
        self,
        actor_loss: DreamerV3ActorLoss | DreamerActorLoss,
        config: LossConfig | None = None,
        *,
        gate: UncertaintyGate | None = None,
        mixer: LogitMixer | None = None,
        prior_net: PriorNet | None = None,
        disagreement: LatentDisagreement | None = None,
        value_ensemble: ValueEnsemble | None = None,
        dyna_weight: float = 0.0,
        subgoal_head: SubgoalHead | None = None,
    ):
        super().__init__()
        if not isinstance(actor_loss, DreamerV3ActorLoss | DreamerActorLoss):
            kind = type(actor_loss).__name__
            raise TypeError(f"actor_loss must be a DreamerV3 or Dreamer actor loss, got {kind}.")
        self.config = c = LossConfig() if config is None else config
        if not isinstance(c, LossConfig):
            raise TypeError(f"config must be a LossConfig, got {type(c).__name__}.")
        for part, kind in ((gate, UncertaintyGate), (mixer, LogitMixer)):
            if not isinstance(part, kind | None):
                raise TypeError(f"gate and mixer must be the policy's own, got {part!r}.")
        if c.constrained and (gate is None or mixer is None):
            raise ValueError(
                "The constraint compares the policy with the mixture that acts: pass the policy's "
                "gate and mixer, or set multiplier_lr=0 and multiplier_init=0."
            )
        weighs = c.prior_weight > 0 or c.bonus_weight > 0
        self.gated = weighs and c.gated and gate is not None
        if c.constrained or self.gated:
            if gate.value_weight and (gate.value_source == "ensemble") == (value_ensemble is None):
                raise ValueError(
                    f"The gate has value_source={gate.value_source!r}: pass the policy's ensemble "
                    "as value_ensemble with 'ensemble', and None with 'two_hot'."
                )
            if gate.disagreement_weight and disagreement is None:
                rule = f"disagreement_weight={gate.disagreement_weight}: pass disagreement."
                raise ValueError(f"The gate has {rule}")
        if c.beta_imagine_max and (prior_net is None or mixer is None):
            raise ValueError("beta_imagine_max needs prior_net and the policy's mixer.")
        if dyna_weight and not c.imitation_weight:
            raise ValueError(
                f"dyna_weight={dyna_weight} compares with real returns, which are known with "
                "imitation_weight > 0 alone: set that, or dyna_weight=0."
            )
        mixer = LogitMixer() if mixer is None else mixer
        mixer.policy.check(actor_loss.actor_model)
        self.__dict__["_actor"] = actor_loss.actor_model
        if c.beta_imagine_max:
            actor_loss.actor_model = ImaginationActor(
                actor_loss.actor_model, prior_net, mixer, beta_max=c.beta_imagine_max
            )
        self.actor_loss = actor_loss
        self.gate = gate
        self.mixer = mixer
        self.prior_net = prior_net
        self.disagreement = disagreement
        self.value_ensemble = value_ensemble
        self.dyna_weight = dyna_weight
        self.subgoal_head = subgoal_head
        self.__dict__["_bandit"] = None
        # Of the states that imagination begins in, [N, G]: set by the composed loss.
        self.subgoal: Tensor | None = None
        # Whether a composed loss hands over the advice, which the input then lacks.
        self.composed = False
        self.register_buffer("multiplier", torch.tensor(float(c.multiplier_init)))
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        for name in ("least_return", "greatest_return"):
            self.register_buffer(name, torch.zeros(()))

    def set_bandit(self, bandit: AdviceBandit | None) -> None:
        """Take the bandit that lets advice act: it corrects the returns of followed advice.

        It is no part of this module or of its state. ``None``, the default, corrects none.

        Raises:
            TypeError: If it is something else.
        """
        if not (bandit is None or isinstance(bandit, AdviceBandit)):
            raise TypeError(f"set_bandit() needs an AdviceBandit or None, got {bandit!r}.")
        self.__dict__["_bandit"] = bandit

    # What DreamerV3Loss and DreamerV3ValueLoss expect of an actor loss.
    @property
    def actor_model(self):
        """The stock actor of the wrapped loss."""
        return self._actor

    @property
    def value_model(self):
        """Critic of the wrapped loss."""
        return self.actor_loss.value_model

    @property
    def value_estimator(self):
        """Value estimator of the wrapped loss."""
        return self.actor_loss.value_estimator

    @property
    def advised(self) -> bool:
        """Whether there is anything to compute on states that carry advice."""
        c, aligner = self.config, self.mixer.temperature
        weighs = c.prior_weight > 0 or c.bonus_weight > 0 or c.constrained
        return weighs or (aligner is not None and aligner.rate > 0)

    @property
    def corrects(self) -> bool:
        """Whether returns of followed advice are corrected; that takes what was advised."""
        return self.config.imitation_weight > 0 and self._bandit is not None

    @property
    def active(self) -> bool:
        """Whether there is anything to compute on real states."""
        return self.config.imitation_weight > 0 or self.advised

    def make_value_estimator(self, value_type: ValueEstimators | None = None, **hyperparams: Any):
        """Build the wrapped loss's value estimator."""
        return self.actor_loss.make_value_estimator(value_type, **hyperparams)

    def set_keys(self, **kwargs: NestedKey | None) -> None:
        """Rename entries here and in the wrapped loss, wherever they are known."""
        own = self._AcceptedKeys.__dataclass_fields__
        inner = self.actor_loss._AcceptedKeys.__dataclass_fields__
        unknown = [name for name in kwargs if name not in own and name not in inner]
        if unknown:
            raise ValueError(
                f"Unknown tensordict keys {unknown}. Accepted: {sorted({*own, *inner})}."
            )
        super().set_keys(**{name: key for name, key in kwargs.items() if name in own})
        self.actor_loss.set_keys(**{name: key for name, key in kwargs.items() if name in inner})

    def current_delta(self) -> Tensor:
        r"""Return :math:`\delta` at this point of its schedule."""
        c = self.config
        end = c.delta if c.delta_end is None else c.delta_end
        if not c.delta_steps:
            return self.multiplier.new_full((), end)
        return c.delta + (end - c.delta) * (self.updates / c.delta_steps).clamp(max=1.0)

    def return_scale(self) -> Tensor | float:
        r"""Return :math:`S`, by which the wrapped loss divides its advantages, or 1."""
        if not getattr(self.actor_loss, "return_normalization", False):
            return 1.0
        return self.actor_loss.retnorm.scale().squeeze(-1)

    def forward(self, tensordict: TensorDictBase) -> tuple[TensorDict, TensorDictBase]:
        """Return the stock losses with LoRe's added, and the imagined trajectories."""
        advice = read_advice(tensordict)
        weighed = advice is not None or (self.active and not self.composed)
        if weighed:
            needed = ("action", keys.RETURN) if self.config.imitation_weight else ()
            needed += (keys.PRIOR_LOGITS,) if self.advised or self.corrects else ()
            missing = [key for key in needed if tensordict.get(key, None) is None]
            if missing:
                raise KeyError(
                    f"LoRe's terms need {missing} beside the latent state: for the imitation the "
                    "action executed there and what it returned, for the others the advice. In "
                    "DreamerV3 use LoReDreamerV3Loss in place of DreamerV3Loss; elsewhere keep "
                    "them in replay, at the root and not under 'next' alone, or set "
                    "imitation_weight and the other weights to 0."
                )
        losses, imagined = self.actor_loss(tensordict)
        if self.config.actor_weight != 1.0:
            losses["loss_actor"] = self.config.actor_weight * losses["loss_actor"]
        if self.dyna_weight and self.composed:
            # The composed loss knows what was returned from there, and takes them out again.
            losses[keys.IMAGINED] = imagined.select(*_FIRST_STEPS)[..., 0]
        if self.subgoal is not None:
            losses.set("loss_lore_subgoal", self._subgoal_term(imagined))
        if weighed:
            losses.update(self.advice_terms(tensordict))
        return losses, imagined

    def _subgoal_term(self, imagined: TensorDictBase) -> Tensor:
        """Return a policy-gradient loss of the bonuses that are ahead of each imagined step.

        Their baseline is the mean over the rollouts that have a subgoal.
        """
        names = self.tensor_keys
        reached = (imagined.get(("next", name)) for name in (names.state, names.belief))
        bonus = self.subgoal_head.bonus(*reached, self.subgoal)
        ahead = bonus.flip(-1).cumsum(-1).flip(-1)
        named = self.subgoal.sum(-1, keepdim=True)
        baseline = (named * ahead).sum(0) / named.sum().clamp_min(1.0)
        weight = imagined.get(self.actor_loss.tensor_keys.discount_weight).squeeze(-1)
        action = imagined.get("action").detach()
        log_prob = self.mixer.policy.log_prob(self._policy(imagined), action)
        advantage = named * (ahead - baseline) / self.return_scale()
        return -(weight * log_prob * advantage.detach()).mean()

    def advice_terms(self, tensordict: TensorDictBase) -> TensorDict:
        """Compute the LoRe terms alone, on real states; see :meth:`weigh`."""
        return self.weigh(tensordict)[0]

    def weigh(
        self,
        tensordict: TensorDictBase,
        advice: AdviceBatch | None = None,
        stored: TensorDictBase | None = None,
    ) -> tuple[TensorDict, Tensor | None]:
        """Compute the LoRe terms on real states, and how much each step is imitated.

        Args:
            tensordict: As of :meth:`forward`, with any batch shape. Latent features are detached.
            advice: The advice, if it has been read and completed already. Default: ``None``.
            stored: Steps that are imitated in place of those, with ``state``, ``belief``,
                action, ``lore_imitation_weight``, :math:`f`, and for a categorical policy
                ``lore_imitation_limit``, the probability above which a step is imitated no more,
                1 if it is missing. Default: ``None``, the same.

        Returns:
            The ``loss_lore_*`` entries and detached metrics ``lore_imitated`` (fraction of
            states whose step is imitated), ``lore_imitation_limit``, ``lore_kl``,
            ``lore_multiplier``, ``lore_delta``, ``lore_temperature``, ``lore_advised`` and
            ``lore_learned`` (fractions of states with advice, and with PriorNet's), empty if no
            term is on; and :math:`f` ``[*B]``, if steps are imitated.
        """
        if not self.active:
            return TensorDict({}, []), None
        kind, terms, gains = self.mixer.policy, {}, None
        policy = first = None
        if self.advised or stored is None:
            policy = self._policy(tensordict)
        acting = policy
        raw = read_advice(tensordict, self.mixer.action_mask)
        if advice is None and raw is not None:
            advice = AdviceBatch.clean(*raw)
            if self.advised and self.prior_net is not None:
                latent = (tensordict.get(key) for key in self.prior_net.in_keys)
                advice = advice.completed(self.prior_net.fallback(*latent))
        if self.config.imitation_weight:
            if advice is not None:
                taken = kind.nearest(tensordict.get("action"))
                first = taken == advice.prior_logits.argmax(-1, keepdim=True)
                first = (first & advice.valid).squeeze(-1)
            gains = self._gains(tensordict, first)
            steps, weight = tensordict, gains
            if stored is not None:
                steps, acting = stored, self._policy(stored)
                weight = stored.get(keys.IMITATION_WEIGHT).squeeze(-1)
            log_prob = kind.log_prob(acting, steps.get("action"))
            limit = steps.get(keys.IMITATION_LIMIT, None)
            if limit is not None and isinstance(kind, CategoricalPolicy):
                log_prob = log_prob.clamp_max(limit.log().squeeze(-1))
                terms["lore_imitation_limit"] = limit.mean()
            imitated = _weighted_mean(log_prob, weight)
            terms["loss_lore_imitation"] = -self.config.imitation_weight * imitated
            terms["lore_imitated"] = (gains > 0).float().mean()
        if raw is not None:
            self.mixer.check_advice(acting, raw[0])
        if self.advised:
            if advice.learned is not None:
                terms["lore_learned"] = advice.learned.float().mean()
            followed = None if first is None else gains * first
            terms |= self._advised_terms(tensordict, policy, advice, followed)
        if self.training:
            self.updates.add_(1)
        terms = {
            name: value if name.startswith("loss_") else value.detach().clone()
            for name, value in terms.items()
        }
        return TensorDict(terms, []), gains

    def imagined_terms(
        self, imagined: TensorDictBase, value: Tensor, real: Tensor
    ) -> dict[str, Tensor]:
        r"""Imitate first steps of imagined trajectories that are worth more than was expected.

        .. math::
            \mathtt{loss\_lore\_dyna} = -\lambda_y \frac{\sum_t f_t \log \pi_{wm}(\hat a_t | s_t)}
                {\max(1, \sum_t f_t)}

        with :math:`f_t` of :func:`~lore_torchrl.objectives.imitation_weight` of the imagined lambda
        return against the larger of :math:`V(s_t)` and the real return from :math:`s_t`, and 0
        where that is not known. Nothing enters replay, so that imagined steps never count as
        experience. Dyna: https://doi.org/10.1145/122344.122377.

        Args:
            imagined: Starts and first imagined actions, with their ``lambda_target``, ``[N]``.
            value: :math:`V(s_t)`, ``[N, 1]``.
            real: Real return from there, NaN while unknown, ``[N, 1]``.

        Returns:
            ``loss_lore_dyna`` and ``lore_dyna``, the fraction of starts whose step is imitated.
        """
        expected = torch.maximum(value, real)
        scale, threshold = self.return_scale(), self.config.imitation_threshold
        target = imagined.get("lambda_target")
        weight = imitation_weight(target, expected, scale=scale, threshold=threshold).squeeze(-1)
        log_prob = self.mixer.policy.log_prob(self._policy(imagined), imagined.get("action"))
        return {
            "loss_lore_dyna": -self.dyna_weight * _weighted_mean(log_prob, weight),
            "lore_dyna": (weight > 0).float().mean(),
        }

    def _policy(self, tensordict: TensorDictBase) -> Any:
        """Return the policy in states whose features get no gradient."""
        features = tensordict.select(*self.actor_model.in_keys).detach()
        return self.mixer.policy.of(self.actor_model.get_dist(features))

    @torch.no_grad()
    def _gains(self, tensordict: TensorDictBase, first: Tensor | None) -> Tensor:
        """Return :math:`f` of each state, ``[*B]``; ``first`` where the advice was followed."""
        critic = self.value_model
        key = self.actor_loss.tensor_keys.value
        value = tensordict.get(key, None)
        if value is None:
            value = critic(tensordict.select(*critic.in_keys)).get(key)
        real = tensordict.get(keys.RETURN).reshape(value.shape)
        returns = tensordict.get(keys.LAMBDA_RETURN, real).reshape(value.shape)
        if first is not None and self._bandit is not None:
            share = (2.0 * self._bandit.probability() - 1.0).clamp(min=0.0)
            more = (real - returns).clamp(min=0.0) * first.reshape(value.shape)
            returns = returns + share * more.nan_to_num()
        if self.training:
            least, greatest = torch.where(real.isfinite(), real, 0.0).aminmax()
            self.least_return.copy_(torch.minimum(self.least_return, least))
            self.greatest_return.copy_(torch.maximum(self.greatest_return, greatest))
        value = self.bounded(value)
        scale, threshold = self.return_scale(), self.config.imitation_threshold
        return imitation_weight(returns, value, real, scale=scale, threshold=threshold).squeeze(-1)

    def bounded(self, value: Tensor) -> Tensor:
        """Return values between the least and the greatest return so far, 0 included.

        For what is imitated alone. While nothing has been rewarded, an untrained critic below 0
        would make a gain of every step, and one above 0 where an episode is truncated a gain of
        the steps before.
        """
        if not self.config.imitation_weight:
            return value
        return torch.minimum(torch.maximum(value, self.least_return), self.greatest_return)

    @torch.no_grad()
    def _beta(self, tensordict: TensorDictBase, policy: Any) -> Tensor:
        """Return the gate's weight in each state, ``[*B, 1]``."""
        gate, kind = self.gate, self.mixer.policy
        value_logits = spread = None
        if gate.value_weight:
            value_logits = tensordict.get(gate.value_key, None)
            if value_logits is None:
                critic = self.value_model if self.value_ensemble is None else self.value_ensemble
                value_logits = critic(tensordict.select(*critic.in_keys)).get(gate.value_key)
        if gate.disagreement_weight:
            latent = (tensordict.get(key) for key in self.disagreement.in_keys)
            spread = kind.disagreement(self.disagreement, *latent, policy)
        return gate.evaluate(kind.entropy(policy), value_logits, spread).beta

    def _advised_terms(
        self,
        tensordict: TensorDictBase,
        policy: Any,
        advice: AdviceBatch,
        followed: Tensor | None,
    ) -> dict[str, Tensor]:
        """Compute the terms of states with advice; ``followed`` weighs them, ``[*B]``."""
        c, terms, mixer, kind = self.config, {}, self.mixer, self.mixer.policy
        fixed = policy.detach()
        valid, weight = advice.valid.squeeze(-1), advice.weight.squeeze(-1)
        terms["lore_advised"] = valid.float().mean()
        aligner = mixer.temperature
        if aligner is not None and self.training:
            aligner.update(fixed, advice.prior_logits, advice.valid)
        prior = kind.as_policy(mixer.temper(advice.prior_logits), fixed)
        counted = valid if followed is None else valid * followed

        def mean(value: Tensor) -> Tensor:
            return masked_mean(value, valid) if followed is None else _weighted_mean(value, counted)

        if c.constrained or self.gated:
            beta = self._beta(tensordict, fixed)
        if self.gated:
            weight = weight * (beta / max(self.gate.beta_max, 1e-9)).squeeze(-1)
        if c.prior_weight:
            pair = (prior, policy) if c.prior_kl == "prior_to_policy" else (policy, prior)
            prior_term = c.prior_weight * mean(weight * kind.divergence(*pair))
            if c.prior_steps is not None:
                prior_term = prior_term * (1.0 - self.updates / c.prior_steps).clamp_min(0.0)
            terms["loss_lore_prior"] = prior_term
        if c.bonus_weight:
            bonus = mean(weight * kind.expected_log_prob(policy, prior))
            terms["loss_lore_bonus"] = -c.bonus_weight * bonus
        if c.constrained:
            kl = mean(kind.divergence(mixer.mix(fixed, advice, beta).policy, policy))
            terms["lore_kl"] = kl
            delta = self.current_delta()
            terms["loss_lore_constraint"] = self.multiplier.clone() * (kl - delta).clamp_min(0.0)
            if self.training:
                violation = torch.where(counted.any(), kl.detach() - delta, 0.0)
                moved = self.multiplier + c.multiplier_lr * violation
                self.multiplier.copy_(moved.clamp(0.0, c.multiplier_max))
            terms["lore_delta"] = delta
            terms["lore_multiplier"] = self.multiplier
        if aligner is not None:
            terms["lore_temperature"] = aligner.temperature
        return terms


def _weighted_mean(value: Tensor, weight: Tensor) -> Tensor:
    """Return the mean of ``value``, of what weighs nothing not even a NaN."""
    total = torch.where(weight > 0, weight * value, 0.0).sum()
    return total / weight.sum().clamp_min(_LEAST_WEIGHT)
