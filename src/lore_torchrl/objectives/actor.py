"""The stock actor loss, plus what is learnt from advice on real states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import DreamerActorLoss, DreamerV3ActorLoss
from torchrl.objectives.common import LossModule
from torchrl.objectives.utils import ValueEstimators

from lore_torchrl import keys
from lore_torchrl.control.outcomes import Outcomes
from lore_torchrl.functional import clean_advice, linear_schedule, masked_mean, step_multiplier
from lore_torchrl.modules.disagreement import LatentDisagreement
from lore_torchrl.modules.gate import UncertaintyGate
from lore_torchrl.modules.gaussian_imagination import GaussianImaginationActor
from lore_torchrl.modules.gaussian_mixing import GaussianMixer
from lore_torchrl.modules.imagination import ImaginationActor
from lore_torchrl.modules.mixing import LogitMixer
from lore_torchrl.modules.prior_net import PriorNet, check_groups
from lore_torchrl.modules.value_ensemble import ValueEnsemble
from lore_torchrl.objectives.annealing import Annealing
from lore_torchrl.objectives.gate_inputs import check_not_negative, check_parts, gate_inputs


class LoReActorLoss(LossModule):
    r"""Wrap a Dreamer actor loss with gated KL terms and a Lagrange multiplier.

    The stock loss is computed first and returned untouched. On the real posterior
    states of the input that carry advice, with weight :math:`w = \mathrm{sg}(c\,m)`
    (confidence times mask), prior :math:`\rho = \mathrm{softmax}(\ell_{llm}/T)` and
    :math:`\langle\cdot\rangle` the mean over advised states, it adds

    .. math::
        \mathtt{loss\_lore\_prior} &= \lambda_\rho\,
            \langle w\,\mathrm{KL}(\rho \,\|\, \pi_{wm}) \rangle \\
        \mathtt{loss\_lore\_constraint} &= \lambda\,
            \mathrm{ReLU}(\langle\mathrm{KL}(
            \mathrm{sg}(\pi_{mix}) \,\|\, \pi_{wm})\rangle - \delta) \\
        \mathtt{loss\_lore\_bonus} &= -\beta_b\,
            \langle w\,\mathbb{E}_{a\sim\pi_{wm}}[\log\rho(a)] \rangle \\
        \mathtt{loss\_lore\_distillation} &= \lambda_d\,
            \langle\mathrm{KL}(\mathrm{sg}(\pi_{mix}) \,\|\, \pi_{wm})\rangle

    and, in training, :math:`\lambda \leftarrow \mathrm{clip}(\lambda + \eta(
    \langle\mathrm{KL}\rangle - \delta), 0, \lambda_{\max})`. The mixture is the target of
    the constraint, so its gradient moves the policy towards what it does with advice
    until the two lie within :math:`\delta`. The bonus takes the expectation over actions
    exactly instead of scoring one sample. Distillation is the constraint with
    :math:`\delta = 0` and a fixed weight: it brings the policy all the way to the mixture.
    Terms with weight zero are not computed, and a batch without advice leaves the loss, its
    gradients and the random stream as stock.

    With a ``prior_net`` its advice stands in where the adviser gave none, here and, with
    ``beta_imagine_max``, in imagination (:class:`~lore_torchrl.modules.ImaginationActor`);
    ``imagine_bonus_weight`` adds the bonus there. A ``bandit`` scales every term by its
    ``trust()``: advice teaches only once advised episodes have shown a higher return. With a
    ``calibrator`` a state's weight is scaled by its ``trust(confidence, group)``. With
    ``anneal_after`` all terms end, and most of what a gated ``bandit`` allows.

    With a :class:`~lore_torchrl.modules.GaussianMixer` the policy is Gaussian and so are
    :math:`\rho` and :math:`\pi_{mix}`; the terms are the same, and in imagination stands a
    :class:`~lore_torchrl.modules.GaussianImaginationActor`.

    Constrained policy updates: https://arxiv.org/abs/1502.05477. Imagination and the
    stock objective: https://arxiv.org/abs/2301.04104.

    Args:
        actor_loss: Stock :class:`~torchrl.objectives.DreamerV3ActorLoss` or
            :class:`~torchrl.objectives.DreamerActorLoss`. Its actor is categorical, or
            Gaussian as the mixer knows it.

    Keyword Args:
        gate: Gate of the acting policy, for :math:`\pi_{mix}`. Needed for the constraint.
        mixer: Mixer of the acting policy, for :math:`T`, :math:`\rho` and :math:`\pi_{mix}`.
            Needed for the constraint and for a Gaussian actor; without it :math:`T = 1`.
        prior_weight: :math:`\lambda_\rho`. Default: ``0.3``.
        prior_kl: Direction of the prior term: ``"prior_to_policy"`` is
            :math:`\mathrm{KL}(\rho\|\pi)`, which makes the policy cover the advice;
            ``"policy_to_prior"`` is :math:`\mathrm{KL}(\pi\|\rho)`.
            Default: ``"prior_to_policy"``.
        bonus_weight: :math:`\beta_b`. Default: ``0.0``.
        distillation_weight: :math:`\lambda_d`; needs ``gate`` and ``mixer``.
            Default: ``0.0``.
        beta_imagine_max: Largest weight of advice in imagination; needs ``prior_net`` and
            ``mixer``. Default: ``0.0``.
        imagine_bonus_weight: :math:`\beta_i`; needs ``prior_net``. Default: ``0.0``.
        gated: Whether :math:`w` is also scaled by the gate's :math:`\beta / \beta_{\max}` in
            the prior term and the bonus: where the agent is sure it is not taught. Needs
            ``gate``. Default: ``False``.
        multiplier_lr: :math:`\eta` for each update; ``0`` switches the constraint off.
            Default: ``1e-3``.
        multiplier_max: :math:`\lambda_{\max}`. Default: ``1.0``.
        multiplier_init: First :math:`\lambda`. Default: ``0.0``.
        delta: :math:`\delta` at the first update, nats. Default: ``0.1``.
        delta_end: :math:`\delta` after ``delta_steps`` updates; ``None`` keeps ``delta``.
            Default: ``None``.
        delta_steps: Length of the schedule from loose to tight, updates. Default: ``0``.
        anneal_after: Updates at full trust, then all terms shrink
            (:class:`~lore_torchrl.objectives.Annealing`). Default: ``None``, never.
        anneal_steps: Further such updates over which they fall to zero. Default: ``0``.
        prior_net: Network that has learnt the advice so far. Default: ``None``.
        bandit: :class:`~lore_torchrl.control.ShareBandit`. Default: ``None``.
        calibrator: :class:`~lore_torchrl.control.ConfidenceCalibrator`, shared with the
            acting policy. Default: ``None``.
        disagreement: Ensemble for the gate, where its ``disagreement_weight`` is
            positive. Default: ``None``, the entry is in the input.
        value_ensemble: Ensemble for a gate whose ``value_source`` is ``"ensemble"``.
            Default: ``None``, the critic.

    Raises:
        TypeError: If ``actor_loss`` is not a stock Dreamer actor loss.
        ValueError: If a weight is negative, a bound does not hold, ``prior_kl`` is unknown, a
            term lacks a part that it needs, or the mixer does not fit the actor.
        KeyError: In ``forward``, if a term is on and advice stands under ``"next"`` alone.

    The input needs the ``state`` and ``belief`` entries of the wrapped loss and, for the
    LoRe terms, ``llm_prior_logits`` ``[*B, A]``, ``llm_confidence`` ``[*B, 1]`` and
    ``llm_mask`` ``[*B, 1]`` for the observation that this posterior has seen. Rename
    entries with :meth:`set_keys`; what the wrapped loss knows is passed on to it.
    """

    @dataclass
    class _AcceptedKeys:
        """Configurable tensordict keys.

        Attributes:
            state (NestedKey): Stochastic latent state. Default: ``"state"``.
            belief (NestedKey): Deterministic latent state. Default: ``"belief"``.
            prior_logits (NestedKey): Raw advice. Default: ``"llm_prior_logits"``.
            confidence (NestedKey): Its confidence. Default: ``"llm_confidence"``.
            mask (NestedKey): Where there is advice. Default: ``"llm_mask"``.
        """

        state: NestedKey = "state"
        belief: NestedKey = "belief"
        prior_logits: NestedKey = keys.PRIOR_LOGITS
        confidence: NestedKey = keys.CONFIDENCE
        mask: NestedKey = keys.MASK

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    default_value_estimator = ValueEstimators.TDLambda
    _schedulable_buffers = frozenset({"delta", "delta_end", "multiplier_max"})

    multiplier: Tensor
    multiplier_max: Tensor
    delta: Tensor
    delta_end: Tensor
    updates: Tensor

    def __init__(
        self,
        actor_loss: DreamerV3ActorLoss | DreamerActorLoss,
        *,
        gate: UncertaintyGate | None = None,
        mixer: LogitMixer | GaussianMixer | None = None,
        prior_weight: float = 0.3,
        prior_kl: Literal["prior_to_policy", "policy_to_prior"] = "prior_to_policy",
        bonus_weight: float = 0.0,
        multiplier_lr: float = 1e-3,
        multiplier_max: float = 1.0,
        multiplier_init: float = 0.0,
        delta: float = 0.1,
        delta_end: float | None = None,
        delta_steps: int = 0,
        distillation_weight: float = 0.0,
        beta_imagine_max: float = 0.0,
        imagine_bonus_weight: float = 0.0,
        gated: bool = False,
        anneal_after: float | None = None,
        anneal_steps: float = 0,
        prior_net: PriorNet | None = None,
        bandit: nn.Module | None = None,
        calibrator: nn.Module | None = None,
        disagreement: LatentDisagreement | None = None,
        value_ensemble: ValueEnsemble | None = None,
    ):
        super().__init__()
        if not isinstance(actor_loss, DreamerV3ActorLoss | DreamerActorLoss):
            kind = type(actor_loss).__name__
            raise TypeError(f"actor_loss must be a DreamerV3 or Dreamer actor loss, got {kind}.")
        delta_end = delta if delta_end is None else delta_end
        check_not_negative(
            prior_weight=prior_weight,
            bonus_weight=bonus_weight,
            multiplier_lr=multiplier_lr,
            delta=delta,
            delta_end=delta_end,
            delta_steps=delta_steps,
            distillation_weight=distillation_weight,
            beta_imagine_max=beta_imagine_max,
            imagine_bonus_weight=imagine_bonus_weight,
        )
        if not 0 <= multiplier_init <= multiplier_max:
            raise ValueError(
                "The multiplier needs 0 <= multiplier_init <= multiplier_max, got "
                f"{multiplier_init} and {multiplier_max}."
            )
        if prior_kl not in ("prior_to_policy", "policy_to_prior"):
            raise ValueError(
                f"prior_kl must be 'prior_to_policy' or 'policy_to_prior', got {prior_kl!r}."
            )
        self.constrained = multiplier_lr > 0 or multiplier_init > 0
        check_parts(
            gate,
            mixer,
            prior_net,
            value_ensemble,
            constrained=self.constrained,
            distilled=distillation_weight > 0,
            gated=gated,
            imagined=beta_imagine_max > 0 or imagine_bonus_weight > 0,
        )
        check_groups(calibrator, prior_net)
        if beta_imagine_max and mixer is None:
            raise ValueError("beta_imagine_max needs the policy's mixer.")
        never = anneal_after is None
        self.annealing = None if never else Annealing(after=anneal_after, steps=anneal_steps)
        # Knows the kind of policy: how it is read, mixed and compared.
        self.__dict__["mixing"] = mixing = LogitMixer() if mixer is None else mixer
        mixing.check(actor_loss.actor_model, gate, disagreement)
        self.__dict__["_actor"] = actor_loss.actor_model
        self.__dict__["_imagination"] = None
        if beta_imagine_max or imagine_bonus_weight:
            gaussian = isinstance(mixing, GaussianMixer)
            kind = GaussianImaginationActor if gaussian else ImaginationActor
            self.__dict__["_imagination"] = kind(
                actor_loss.actor_model,
                prior_net,
                mixing,
                beta_max=beta_imagine_max,
                bandit=bandit,
                calibrator=calibrator,
                scored=getattr(actor_loss, "use_reinforce", False),
                share_policy=beta_imagine_max > 0 and imagine_bonus_weight > 0,
            )
        if beta_imagine_max:
            actor_loss.actor_model = self._imagination
        self.actor_loss = actor_loss
        self.gate = gate
        self.mixer = mixer
        self.prior_net = prior_net
        self.bandit = bandit
        self.calibrator = calibrator
        self.disagreement = disagreement
        self.value_ensemble = value_ensemble
        self.gated = gated
        self.distillation_weight = distillation_weight
        self.imagine_bonus_weight = imagine_bonus_weight
        self.prior_weight = prior_weight
        self.prior_kl = prior_kl
        self.bonus_weight = bonus_weight
        self.multiplier_lr = multiplier_lr
        self.delta_steps = delta_steps
        self.register_buffer("multiplier", torch.tensor(float(multiplier_init)))
        self.register_buffer("multiplier_max", torch.tensor(float(multiplier_max)))
        self.register_buffer("delta", torch.tensor(float(delta)))
        self.register_buffer("delta_end", torch.tensor(float(delta_end)))
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

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
    def model_based_env(self):
        """Imagination environment of the wrapped loss."""
        return self.actor_loss.model_based_env

    @property
    def value_estimator(self):
        """Value estimator of the wrapped loss."""
        return self.actor_loss.value_estimator

    @property
    def active(self) -> bool:
        """Whether there is anything to compute on advised states."""
        weights = (self.prior_weight, self.bonus_weight, self.distillation_weight, self.constrained)
        adapts = self.gated and self.gate.adapt_rate > 0
        return any(weights) or adapts or None not in (self.annealing, self._imagination)

    def make_value_estimator(self, value_type: ValueEstimators | None = None, **hyperparams: Any):
        """Build the wrapped loss's value estimator."""
        return self.actor_loss.make_value_estimator(value_type, **hyperparams)

    def set_keys(self, **kwargs: NestedKey | None) -> None:
        """Rename entries here and, where it knows them too, in the wrapped loss."""
        own = self._AcceptedKeys.__dataclass_fields__
        inner = self.actor_loss._AcceptedKeys.__dataclass_fields__
        unknown = [name for name in kwargs if name not in own and name not in inner]
        if unknown:
            raise ValueError(
                f"Unknown tensordict keys {unknown}. Accepted: {sorted({*own, *inner})}."
            )
        super().set_keys(**{name: key for name, key in kwargs.items() if name in own})
        self.actor_loss.set_keys(**{name: key for name, key in kwargs.items() if name in inner})

    def _forward_value_estimator_keys(self, **kwargs) -> None:
        # The wrapped loss owns the value estimator; set_keys above reaches it.
        return None

    def current_delta(self) -> Tensor:
        r"""Return :math:`\delta` at this point of its schedule."""
        return linear_schedule(self.updates, self.delta, self.delta_end, self.delta_steps)

    def forward(self, tensordict: TensorDictBase) -> tuple[TensorDict, TensorDictBase]:
        """Return the stock losses with LoRe's added, and the imagined trajectories."""
        share = 1.0 if self.annealing is None else self.annealing()
        if self.actor_loss.actor_model is self._imagination:
            self._imagination.refresh(share)
        losses, imagined = self.actor_loss(tensordict)
        if self.imagine_bonus_weight:
            key = getattr(self.actor_loss.tensor_keys, "discount_weight", None)
            bonus = self._imagination.bonus(imagined, None if key is None else imagined.get(key))
            losses["loss_lore_imagined_bonus"] = -self.imagine_bonus_weight * share * bonus
        if tensordict.get(self.tensor_keys.prior_logits, None) is not None:
            losses.update(self.advice_terms(tensordict))
        elif self.active and ("next", self.tensor_keys.prior_logits) in tensordict.keys(True):
            raise KeyError("Advice under 'next' alone: keep it at the root too, beside state.")
        return losses, imagined

    def complete(
        self, tensordict: TensorDictBase, own: tuple[Tensor, Tensor] | None = None
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return the advice of each state, PriorNet's where the adviser gave none.

        Args:
            tensordict: As in :meth:`advice_terms`.
            own: What :meth:`PriorNet.advise` returned for its states, if it is known already.

        Returns:
            Logits, confidence and mask, and where they are PriorNet's (``None`` without one).
        """
        tk = self.tensor_keys
        advice = [tensordict.get(key) for key in (tk.prior_logits, tk.confidence, tk.mask)]
        if self.prior_net is None:
            return advice, None
        if own is None:
            own = self.prior_net.advise(*(tensordict.get(key) for key in self.prior_net.in_keys))
        filled = self.prior_net.fill(own, *advice)
        return list(filled[:3]), filled.learnt

    def advice_terms(
        self,
        tensordict: TensorDictBase,
        outcomes: Outcomes | None = None,
        advice: tuple[list[Tensor], Tensor | None] | None = None,
    ) -> TensorDict:
        """Compute the LoRe terms alone, on states that may carry advice.

        Args:
            tensordict: ``state``, ``belief`` and the three advice entries, aligned, with
                any batch shape. Latent features are detached.
            outcomes: What was gained from these states on, by which a gate with
                ``adapt_rate`` weighs its parts. Default: ``None``.
            advice: What :meth:`complete` returned, if it is known already.

        Returns:
            The ``loss_lore_*`` entries and detached metrics ``lore_kl``,
            ``lore_multiplier``, ``lore_delta``, ``lore_temperature``, ``lore_advised`` and
            ``lore_learnt`` (shares of states with advice, and with PriorNet's), ``lore_trust``
            (the calibrator's, over them) and ``lore_taught`` (what annealing leaves). Empty if
            no term is on.
        """
        if not self.active:
            return TensorDict({}, [])
        features = tensordict.select(*self.actor_model.in_keys).detach()
        raw, learnt = self.complete(tensordict) if advice is None else advice
        terms = {} if learnt is None else {"lore_learnt": learnt.float().mean()}
        prior_logits, weight, valid = clean_advice(*raw)
        mixing = self.mixing
        policy = mixing.policy_of(self.actor_model.get_dist(features))
        aligner = mixing.temperature
        if aligner is not None and self.training:
            aligner.update(policy.detach(), prior_logits, valid)
        prior = mixing.prior(prior_logits, policy.detach())
        trust, valid = None, valid.squeeze(-1)
        if self.calibrator is not None:
            trust = self.calibrator.trust(raw[1], None if learnt is None else learnt.long())
            weight = weight * trust
            terms["lore_trust"] = masked_mean(trust.squeeze(-1), valid)
        weight = weight.squeeze(-1)
        scale = 1.0 if self.bandit is None else self.bandit.trust()
        if self.annealing is not None:
            share = terms["lore_taught"] = self.annealing()
            if self.training:
                self.annealing.count(scale * valid.any())
                if self.bandit is not None:
                    self.bandit.anneal(share)
            scale = scale * share

        terms["lore_advised"] = valid.float().mean()
        mixes = self.constrained or self.distillation_weight
        if mixes or self.gated:
            critic = self.value_model if self.value_ensemble is None else self.value_ensemble
            parts = {"critic": critic, "disagreement": self.disagreement}
            inputs = gate_inputs(self.gate, mixing, policy.detach(), tensordict, **parts)
            if outcomes is not None and self.training:
                self.gate.adapt(*inputs, outcomes.advantage, outcomes.valid)
            beta = self.gate.evaluate(*inputs).beta
        if self.gated:
            weight = weight * (beta / self.gate.beta_max.clamp_min(1e-9)).squeeze(-1)
        if self.prior_weight:
            pair = (prior, policy) if self.prior_kl == "prior_to_policy" else (policy, prior)
            apart = masked_mean(weight * mixing.divergence(*pair), valid)
            terms["loss_lore_prior"] = self.prior_weight * scale * apart
        if self.bonus_weight:
            expected = mixing.expected_log_prob(policy, prior)
            bonus = masked_mean(weight * expected, valid)
            terms["loss_lore_bonus"] = -self.bonus_weight * scale * bonus
        if mixes:
            beta = beta if trust is None else beta * trust
            mixture = mixing.mix(policy.detach(), *raw, beta)
            kl = masked_mean(mixing.divergence(mixture.policy, policy), valid)
            terms["lore_kl"] = kl
        if self.distillation_weight:
            terms["loss_lore_distillation"] = self.distillation_weight * scale * kl
        if self.constrained:
            delta = self.current_delta()
            excess = (kl - delta).clamp_min(0.0)
            terms["loss_lore_constraint"] = self.multiplier.clone() * scale * excess
            if self.training:
                violation = torch.where(valid.any(), kl.detach() - delta, torch.zeros_like(delta))
                rate_and_max = (self.multiplier_lr, self.multiplier_max)
                self.multiplier.copy_(step_multiplier(self.multiplier, violation, *rate_and_max))
            terms["lore_delta"] = delta
            terms["lore_multiplier"] = self.multiplier
        if aligner is not None:
            terms["lore_temperature"] = aligner.temperature
        if self.training:
            self.updates.add_(1)
        return TensorDict(
            {
                name: value if name.startswith("loss_") else value.detach().clone()
                for name, value in terms.items()
            },
            [],
        )
