"""The stock actor, with advice mixed in where it acts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, exploration_type

from lore_torchrl import keys
from lore_torchrl.functional import log_floor
from lore_torchrl.modules.disagreement import LatentDisagreement
from lore_torchrl.modules.gate import GateOutput, UncertaintyGate
from lore_torchrl.modules.gaussian_mixing import (
    Gaussian,
    GaussianMixer,
    MixedGaussian,
)
from lore_torchrl.modules.mixing import LogitMixer, Mixture
from lore_torchrl.modules.prior_net import PriorNet
from lore_torchrl.modules.running import run_module


class Explanation(NamedTuple):
    """What :meth:`LoReActor.explain` returns, for each row of a batch.

    What each part adds to the uncertainty, by name, ``[*B, 1]``; and the advice that was
    mixed in, the advisor's or PriorNet's: tempered logits ``[*B, A]``, confidence ``[*B, 1]``.
    """

    uncertainty: dict[str, Tensor]
    prior_logits: Tensor
    confidence: Tensor


class _Decision(NamedTuple):
    weighed: GateOutput
    mixture: Mixture | MixedGaussian
    # Index of the action, or the action itself before its tanh.
    choice: Tensor
    changed: Tensor
    need: Tensor | None
    origin: Tensor | None


class LoReActor(TensorDictModuleBase):
    r"""Act with a stock categorical actor, leaning on advice where the gate opens.

    Runs the actor, the critic if the gate wants its variance, the
    :class:`~lore_torchrl.modules.UncertaintyGate` and the
    :class:`~lore_torchrl.modules.LogitMixer`, then draws the action from the mixture.
    Use it to collect; the losses keep the stock actor. Where the advice entries are
    missing from the input (evaluation with the advisor off), it is the stock actor.

    One set of random numbers serves both policies: with exponential draws
    :math:`E_a`, the action is :math:`\arg\max_a \pi_{mix}(a)/E_a` and the action that
    would have been taken without advice is :math:`\arg\max_a \pi_{wm}(a)/E_a`.
    ``lore_source`` is 1 exactly where these differ. This is how
    :func:`torch.multinomial` draws one sample, so with the gate shut both the actions
    and the random stream equal the stock actor's.

    The weight that reaches the mixer is the gate's :math:`\beta`, times the mixing
    coefficient ``lore_coefficient`` of an :class:`~lore_torchrl.control.AdviceBandit`, where
    that entry is there. ``lore_beta`` stays the gate's own. With a ``prior_net`` its advice
    is used where the advisor gave none; ``lore_origin`` tells whose was at hand, be its weight
    zero, and ``lore_need`` what a call would add: :math:`\beta \cdot (1 - c_\phi)`, with 0 for a
    :math:`c_\phi` that is not a number.

    Args:
        actor: Actor with a one-hot categorical distribution, such as
            :class:`~torchrl.modules.DreamerV3DiscreteActor`.
        gate: Decides the weight of the advice.
        mixer: Mixes and projects.

    Keyword Args:
        value_model: Critic that writes the gate's value logits. Needed only where the
            gate's ``value_weight`` is positive. Default: ``None``.
        disagreement: Ensemble for the gate's third part. Needed only where the gate's
            ``disagreement_weight`` is positive; without it the entry must be in the
            input. Default: ``None``.
        prior_net: Network that has learnt the advice so far. Default: ``None``.
        coefficient_key: Mixing coefficient, ``[*B, 1]``. Default: ``"lore_coefficient"``.
        action_key: Default: ``"action"``.
        log_prob_key: Log-probability of the action under the mixture.
            Default: ``"action_log_prob"``.
        source_key: Default: ``"lore_source"``.

    Raises:
        TypeError: If the mixer is for the other kind of actions.
        ValueError: If the mixer does not fit the actor, the gate weighs the critic's
            variance and there is no critic that tells it, or ``prior_net`` has another number
            of actions than the advice.

    For continuous actions see :class:`~lore_torchrl.modules.GaussianLoReActor`.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.modules import DreamerV3DiscreteActor
        >>> actor = DreamerV3DiscreteActor(6, 3, depth=1, num_cells=8)
        >>> lore = LoReActor(actor, UncertaintyGate(3, value_weight=0.0), LogitMixer())
        >>> td = TensorDict(state=torch.zeros(2, 4), belief=torch.zeros(2, 2), batch_size=[2])
        >>> sorted(lore(td).keys())[:3]
        ['action', 'action_log_prob', 'belief']
    """

    _mixer_class: type[TensorDictModuleBase] = LogitMixer

    def __init__(
        self,
        actor: ProbabilisticTensorDictSequential,
        gate: UncertaintyGate,
        mixer: LogitMixer | GaussianMixer,
        *,
        value_model: TensorDictModuleBase | None = None,
        disagreement: LatentDisagreement | None = None,
        prior_net: PriorNet | None = None,
        coefficient_key: NestedKey = keys.COEFFICIENT,
        action_key: NestedKey = "action",
        log_prob_key: NestedKey = "action_log_prob",
        source_key: NestedKey = keys.SOURCE,
    ):
        super().__init__()
        if not isinstance(mixer, self._mixer_class):
            raise TypeError(
                f"{type(self).__name__} needs a {self._mixer_class.__name__}, got "
                f"{type(mixer).__name__}."
            )
        mixer.check(actor, gate, disagreement)
        if gate.value_weight and gate.value_logits_key not in getattr(value_model, "out_keys", ()):
            raise ValueError(
                f"The gate has value_weight={gate.value_weight}: pass a value_model that writes "
                f"{gate.value_logits_key!r}, or build the gate with value_weight=0, as for a "
                "critic without bins."
            )
        self.actor = actor
        # The actor without its head; slicing it at every step would cost a module each.
        self.__dict__["_backbone"] = tuple(actor.module)[:-1]
        self.__dict__.update(_compile_kwargs=None, _compiled=None)
        self.gate = gate
        self.mixer = mixer
        self.value_model = value_model if gate.value_weight else None
        self.disagreement = disagreement if gate.disagreement_weight else None
        self.prior_net = prior_net
        choices = len(mixer.anchors) if isinstance(mixer, GaussianMixer) else gate.num_actions
        if prior_net is not None and prior_net.num_actions != choices:
            raise ValueError(
                f"prior_net has num_actions={prior_net.num_actions}, but advice names {choices}: "
                f"build it with num_actions={choices}."
            )
        self.coefficient_key = coefficient_key
        self.action_key = action_key
        self.log_prob_key = log_prob_key
        self.source_key = source_key
        # Logits, or location and scale.
        self.policy_keys = list(actor[-1].in_keys)
        self.logits_key = self.policy_keys[0]
        self.advice_keys = mixer.in_keys[-4:-1]
        self.in_keys = [*actor.in_keys, *self.advice_keys]
        if gate.hysteresis is not None:
            self.in_keys.append(gate.gate_key)
        self.out_keys = [
            *self.policy_keys,
            *gate.out_keys[:2],
            *mixer.out_keys,
            source_key,
            action_key,
            log_prob_key,
            *gate.out_keys[2:],
        ]
        if prior_net is not None:
            self.out_keys += [*prior_net.out_keys, keys.ORIGIN, keys.NEED]

    def compile_decision(self, **kwargs: Any) -> LoReActor:
        """Compile gate, projection and draw into one kernel with :func:`torch.compile`.

        Worth it where a policy step is short beside its Python: see
        ``docs/benchmarks.md``. The first step then takes some 15 seconds. Random draws
        inside the compiled region differ from the eager ones for the same seed.

        Args:
            **kwargs: Passed on to :func:`torch.compile`.
        """
        self.__dict__["_compile_kwargs"] = {"dynamic": False, **kwargs}
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A compiled function belongs to this object: copies compile their own.
        return {**self.__dict__, "_compiled": None}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action and everything that the gate and the mixer write."""
        advice = [tensordict.get(key, None) for key in self.advice_keys]
        if advice[0] is None:
            return self.actor(tensordict)
        # Not get_dist: building, sampling and scoring a distribution object costs more
        # than the gate and the mixer together.
        *body, last = self._backbone
        for module in body:
            module(tensordict)
        policy = self._compute_policy(last, tensordict)
        value_logits, disagreement, was_active = self._observed(tensordict, policy)
        own = None
        if self.prior_net is not None:
            own = self.prior_net.advise(*(tensordict.get(key) for key in self.prior_net.in_keys))
            for key, value in zip(self.prior_net.out_keys, own, strict=True):
                tensordict.set(key, value)
        coefficient = tensordict.get(self.coefficient_key, None)
        random = exploration_type() in (ExplorationType.RANDOM, None)
        decide = self._decide
        if self._compile_kwargs is not None:
            if self._compiled is None:
                self.__dict__["_compiled"] = torch.compile(decide, **self._compile_kwargs)
            decide = self._compiled
        decision = decide(
            policy,
            value_logits,
            disagreement,
            was_active,
            *advice,
            own=own,
            coefficient=coefficient,
            random=random,
        )
        self.gate.write(tensordict, decision.weighed)
        self.mixer.write(tensordict, decision.mixture)
        self._write_action(tensordict, decision.mixture, decision.choice)
        tensordict.set(self.source_key, decision.changed.long() * keys.SOURCE_ADVICE)
        if decision.origin is not None:
            tensordict.set(keys.NEED, decision.need)
            tensordict.set(keys.ORIGIN, decision.origin)
        return tensordict

    def _compute_policy(self, last: TensorDictModuleBase, tensordict: TensorDictBase) -> Tensor:
        """Run the actor's last network, write the policy and return it."""
        logits = run_module(last, tensordict, self.logits_key)
        log_p = log_floor(logits - logits.logsumexp(-1, keepdim=True))
        tensordict.set(self.logits_key, log_p)
        return log_p

    def _draw(self, mixture: Mixture, log_p: Tensor, random: bool) -> tuple[Tensor, Tensor]:
        """Return what the mixture picks, and where the policy would have picked otherwise."""
        both = torch.stack((mixture.log_probs, log_p))
        if random:
            # In place of torch.multinomial, which does just this, for two rows at once.
            both = torch.softmax(both, -1) / torch.empty_like(log_p).exponential_()
        index, stock_index = both.argmax(-1, keepdim=True)
        return index, index != stock_index

    def _write_action(self, tensordict: TensorDictBase, mixture: Mixture, index: Tensor) -> None:
        """Write the action that was drawn, and its log-probability under the mixture."""
        log_probs = mixture.log_probs
        action = torch.zeros_like(log_probs, dtype=torch.long).scatter_(-1, index, 1)
        tensordict.set(self.action_key, action)
        tensordict.set(self.log_prob_key, log_probs.gather(-1, index).squeeze(-1))

    def _observed(
        self, tensordict: TensorDictBase, policy: Tensor | Gaussian
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return what the gate looks at beside the policy: critic, ensemble, hysteresis."""
        value_logits = None
        if self.value_model is not None:
            value_logits = run_module(self.value_model, tensordict, self.gate.value_logits_key)
        disagreement, was_active = self.gate.carried(tensordict)
        if self.disagreement is not None:
            latent = (tensordict.get(key) for key in self.disagreement.in_keys[:2])
            disagreement = self.disagreement.disagreement(*latent, policy)
        return value_logits, disagreement, was_active

    @torch.no_grad()
    def explain(self, tensordict: TensorDictBase) -> Explanation:
        """Tell why a tensordict was acted on as it was. For showing; nothing changes.

        Args:
            tensordict: What :meth:`forward` returned for it, with advice.
        """
        policy = self.mixer.policy_from(*(tensordict.get(key) for key in self.policy_keys))
        seen = self._observed(tensordict, policy)[:2]
        shares = self.gate.shares(self.mixer.gate_input(policy), *seen)
        prior_logits, confidence, mask = (tensordict.get(key) for key in self.advice_keys)
        if self.prior_net is not None:
            own = tuple(tensordict.get(key) for key in self.prior_net.out_keys)
            prior_logits, confidence = self.prior_net.fill(own, prior_logits, confidence, mask)[:2]
        return Explanation(shares, self.mixer.temper(prior_logits), confidence)

    def _decide(
        self,
        policy: Tensor | Gaussian,
        value_logits: Tensor | None,
        disagreement: Tensor | None,
        was_active: Tensor | None,
        prior_logits: Tensor,
        confidence: Tensor,
        mask: Tensor,
        *,
        own: tuple[Tensor, Tensor] | None,
        coefficient: Tensor | None,
        random: bool,
    ) -> _Decision:
        """Weigh, mix and pick, on tensors alone: what ``torch.compile`` can fuse."""
        seen = self.mixer.gate_input(policy)
        weighed = self.gate.step(seen, value_logits, disagreement, was_active)
        beta = weighed.beta if coefficient is None else weighed.beta * coefficient
        need = origin = None
        if own is not None:
            filled = self.prior_net.fill(own, prior_logits, confidence, mask)
            need = weighed.beta * (1.0 - torch.nan_to_num(filled.sure, nan=0.0))
            origin = mask * keys.ORIGIN_ADVISOR + filled.learnt * keys.ORIGIN_PRIOR_NET
            prior_logits, confidence, mask = filled[:3]
        mixture = self.mixer.mix(policy, prior_logits, confidence, mask, beta)
        choice, changed = self._draw(mixture, policy, random)
        return _Decision(weighed, mixture, choice, changed, need, origin)
