"""The stock actor, with advice mixed in where it acts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
)
from torch import Tensor
from torchrl.envs.utils import ExplorationType, exploration_type

from lore_torchrl import keys
from lore_torchrl.modules.advice import AdviceBatch, read_advice
from lore_torchrl.modules.ensembles import LatentDisagreement
from lore_torchrl.modules.gate import GateOutput, UncertaintyGate
from lore_torchrl.modules.mixing import LogitMixer, Mixture
from lore_torchrl.modules.planner import LatentPlanner
from lore_torchrl.modules.prior_net import PriorNet
from lore_torchrl.modules.subgoals import SubgoalHead
from lore_torchrl.modules.world import WorldModel
from lore_torchrl.policies import CategoricalPolicy


class _Decision(NamedTuple):
    weighed: GateOutput
    mixture: Mixture
    acting: Any  # the mixed policy, in the dtype of the actor's
    choice: Tensor
    changed: Tensor
    score: Tensor | None
    origin: Tensor | None


def _run(
    module: TensorDictModuleBase, tensordict: TensorDictBase, out_keys: list[NestedKey]
) -> tuple[Tensor, ...]:
    """Return what ``module`` writes under ``out_keys``.

    A plain module that writes nothing else is called without its tensordict wrapper, whose write
    looks for optional packages on disk each time (tensordict 0.14): twice the network's cost.
    """
    if _is_plain(module) and list(module.out_keys) == out_keys:
        output = module.module(*(tensordict.get(key) for key in module.in_keys))
        return output if isinstance(output, tuple) else (output,)
    output = module(tensordict)
    return tuple(output.get(key) for key in out_keys)


def _is_plain(module: TensorDictModuleBase) -> bool:
    """Whether a module is called with its inputs in their order, and nothing else happens."""
    return type(module) is TensorDictModule and not (
        module.method
        or module.method_kwargs
        or module._get_kwargs
        or module._kwargs is not None  # inputs by name
        or module._forward_hooks
        or module._forward_pre_hooks
    )


class LoReActor(TensorDictModuleBase):
    r"""Act with a stock actor, leaning on advice where the gate opens.

    Runs the actor, the critic if the gate wants its variance, the
    :class:`~lore_torchrl.modules.UncertaintyGate` and the
    :class:`~lore_torchrl.modules.LogitMixer`, then draws the action from the mixture.
    Use it to collect; the losses keep the stock actor. Where the input has no advice
    (evaluation with the advisor off), it is the stock actor.

    One set of random numbers serves both policies, so with the gate shut both the actions and
    the random stream equal the stock actor's. ``lore_source`` is 1 exactly where the mixture's
    named action is not the one that the policy would have taken with the same numbers.

    The weight that reaches the mixer is the gate's :math:`\beta`, times the ``lore_coefficient``
    of an :class:`~lore_torchrl.control.AdviceBandit`, where that entry is there. With a
    ``prior_net`` its advice is used where the advisor gave none; ``lore_origin`` tells whose was
    at hand, and ``lore_acquisition`` is the acquisition score of a call,
    :math:`\beta \cdot (1 - c_\phi)`, with 0 for a :math:`c_\phi` that is not a number. With a
    ``planner`` what is mixed in is its advice, in every row where its score is a number.

    With a ``world`` the advice is :math:`\rho(a)\, \mathrm{softmax}(\hat Q(s, a) / \tau)` in the
    place of :math:`\rho`, before its temperature, of the ``lore_action_values`` :math:`\hat Q`
    (:meth:`WorldModel.action_values <lore_torchrl.modules.WorldModel.action_values>`), as in
    `SayCan <https://arxiv.org/abs/2204.01691>`_: what is useful times what can be done from here.
    It draws from torch's global generator first.

    Args:
        actor: Stock actor, such as :class:`~torchrl.modules.DreamerV3DiscreteActor` or
            :class:`~lore_torchrl.modules.DreamerV3ContinuousActor`.
        gate: Decides the weight of the advice.
        mixer: Mixes within its bound; its kind of policy is the actor's.

    Keyword Args:
        value_model: Critic that writes the gate's ``value_key``, for a gate with a positive
            ``value_weight``. Default: ``None``.
        disagreement: Ensemble for a gate with a positive ``disagreement_weight``. Default:
            ``None``.
        prior_net: Network that has learned the advice so far. Default: ``None``.
        planner: Plans in the latent space, from the advice in the input or without. Default:
            ``None``.
        world: What each action leads to, for discrete ones. Default: ``None``.
        value_temperature: :math:`\tau`, in units of the return. Default: ``1.0``.
        subgoal_head: Head for the losses, which take their parts from here. Default: ``None``.

    Raises:
        TypeError: If ``actor`` is not a stock one. In ``forward``, if the mask is not boolean.
        ValueError: If the mixer is for another kind of policy, the gate weighs what there is no
            critic or ensemble for, or there is a ``world`` and actions are continuous. In
            ``forward``, if the advice or ``prior_net`` names another number of actions.
        KeyError: In ``forward``, if there are logits of advice, but no mask or confidence.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.modules import DreamerV3DiscreteActor
        >>> actor = DreamerV3DiscreteActor(6, 3, depth=1, num_cells=8)
        >>> lore = LoReActor(actor, UncertaintyGate(), LogitMixer())
        >>> td = TensorDict(
        ...     state=torch.zeros(1, 4),
        ...     belief=torch.zeros(1, 2),
        ...     llm_prior_logits=torch.tensor([[0.0, 0.0, 9.0]]),
        ...     llm_confidence=torch.ones(1, 1),
        ...     llm_mask=torch.ones(1, 1, dtype=torch.bool),
        ...     batch_size=[1],
        ... )
        >>> out = lore(td)
        >>> out["lore_logits"].argmax().item(), out["action"].shape
        (2, torch.Size([1, 3]))
    """

    def __init__(
        self,
        actor: ProbabilisticTensorDictSequential,
        gate: UncertaintyGate,
        mixer: LogitMixer,
        *,
        value_model: TensorDictModuleBase | None = None,
        disagreement: LatentDisagreement | None = None,
        prior_net: PriorNet | None = None,
        planner: LatentPlanner | None = None,
        world: WorldModel | None = None,
        value_temperature: float = 1.0,
        subgoal_head: SubgoalHead | None = None,
    ):
        super().__init__()
        mixer.policy.check(actor)
        if gate.value_weight and gate.value_key not in getattr(value_model, "out_keys", ()):
            raise ValueError(
                f"The gate has value_weight={gate.value_weight}: pass a value_model that writes "
                f"{gate.value_key!r}, or set value_weight=0, as for a critic without bins."
            )
        if gate.disagreement_weight and disagreement is None:
            raise ValueError(
                f"The gate has disagreement_weight={gate.disagreement_weight}: pass disagreement."
            )
        if world is not None and not isinstance(mixer.policy, CategoricalPolicy):
            raise ValueError(
                "The value gate compares all actions, of which continuous ones have no end: set "
                "lore.mixer.value_temperature=null."
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
        self.planner = planner
        self.world = world
        self.value_temperature = value_temperature
        self.subgoal_head = subgoal_head
        # Logits, or location and scale.
        self.policy_keys = list(actor[-1].in_keys)
        self.in_keys = [*actor.in_keys, *keys.ADVICE_KEYS]
        if mixer.action_mask:
            self.in_keys.append(keys.ACTION_MASK)
        if gate.hysteresis is not None:
            self.in_keys.append(keys.GATE)
        self.out_keys = [
            *self.policy_keys,
            *gate.out_keys,
            *mixer.out_keys,
            keys.SOURCE,
            "action",
            "action_log_prob",
        ]
        if prior_net is not None:
            self.out_keys += [*prior_net.out_keys, keys.ORIGIN, keys.ACQUISITION]
        if planner is not None:
            self.out_keys += planner.out_keys
        if world is not None:
            self.out_keys.append(keys.ACTION_VALUES)

    def compile_decision(self, **kwargs: Any) -> LoReActor:
        """Compile gate, projection and draw with :func:`torch.compile`, which gets ``kwargs``.

        The first step then takes some 15 seconds. Random draws inside the compiled region differ
        from the eager ones for the same seed.
        """
        self.__dict__["_compile_kwargs"] = {"dynamic": False, **kwargs}
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A compiled function belongs to this object: copies compile their own.
        return {**self.__dict__, "_compiled": None}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action and everything that the gate and the mixer write."""
        raw = read_advice(tensordict, self.mixer.action_mask)
        if raw is None:
            return self.actor(tensordict)
        kind = self.mixer.policy
        # Not get_dist: a distribution object costs more than the gate and the mixer together.
        *body, last = self._backbone
        for module in body:
            module(tensordict)
        policy = kind.read(*_run(last, tensordict, self.policy_keys))
        for key, value in zip(self.policy_keys, kind.entries(policy), strict=True):
            tensordict.set(key, value)
        self.mixer.check_advice(policy, raw[0])
        own = None
        if self.prior_net is not None:
            own = self.prior_net.advise(*(tensordict.get(key) for key in self.prior_net.in_keys))
            for key, value in zip(self.prior_net.out_keys, own, strict=True):
                tensordict.set(key, value)
        if self.planner is not None:
            self.planner(tensordict)
        if self.world is not None:
            latent = tensordict.get("state"), tensordict.get("belief")
            values = self.world.action_values(*latent, kind.num_actions(policy))
            tensordict.set(keys.ACTION_VALUES, values)
        if self._compile_kwargs is not None and self._compiled is None:
            self.__dict__["_compiled"] = torch.compile(self._decide, **self._compile_kwargs)
        decision = (self._compiled or self._decide)(
            policy,
            self._observed(tensordict, policy),
            self.gate.carried(tensordict),
            raw,
            own,
            tensordict.get(keys.ACTION_VALUES) if self.world is not None else None,
            self._planned(tensordict),
            coefficient=tensordict.get(keys.COEFFICIENT, None),
            random=(exploration_type() or self.actor[-1].default_interaction_type)
            in (ExplorationType.RANDOM, None),
        )
        self.gate.write(tensordict, decision.weighed)
        self.mixer.write(tensordict, decision.mixture)
        action, log_prob = kind.act(self.actor[-1], decision.acting, decision.choice)
        tensordict.set("action", action)
        tensordict.set("action_log_prob", log_prob)
        tensordict.set(keys.SOURCE, decision.changed.long() * keys.SOURCE_ADVICE)
        if decision.origin is not None:
            tensordict.set(keys.ACQUISITION, decision.score)
            tensordict.set(keys.ORIGIN, decision.origin)
        return tensordict

    def _observed(self, tensordict: TensorDictBase, policy: Any) -> tuple[Tensor | None, ...]:
        """Return what the gate takes from critic and ensemble."""
        value_logits = disagreement = None
        if self.value_model is not None:
            (value_logits,) = _run(self.value_model, tensordict, [self.gate.value_key])
        if self.disagreement is not None:
            latent = (tensordict.get(key) for key in self.disagreement.in_keys)
            disagreement = self.mixer.policy.disagreement(self.disagreement, *latent, policy)
        return value_logits, disagreement

    def _complete(
        self,
        raw: tuple[Tensor | None, ...],
        own: tuple[Tensor, ...] | None,
        values: Tensor | None,
    ) -> AdviceBatch:
        """Return the advisor's advice, PriorNet's where there is none, times the values."""
        advice = AdviceBatch.clean(*raw)
        if own is not None:
            advice = advice.completed(self.prior_net.usable(own))
        if values is None:
            return advice
        return advice.times(torch.log_softmax(values / self.value_temperature, -1))

    def _planned(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor] | None:
        """Return what the planner has written, if there is one."""
        if self.planner is None:
            return None
        return tensordict.get(keys.PLANNER_LOGITS), tensordict.get(keys.PLANNER_SCORE)

    def _mixed_in(self, advice: AdviceBatch, planned: tuple[Tensor, Tensor] | None) -> AdviceBatch:
        """Return the planner's advice, and what is given else where it has none."""
        if planned is None:
            return advice
        own = self.planner.usable(planned)
        # What the mixer divides by is for the advisor's logits; these are log-probabilities.
        own = own._replace(prior_logits=self.mixer.untemper(own.prior_logits))
        mixed = own.completed(advice)
        return mixed._replace(excluded=advice.excluded)

    @torch.no_grad()
    def explain(self, tensordict: TensorDictBase) -> tuple[dict[str, Tensor], AdviceBatch]:
        """Tell why a tensordict, with advice, was acted on as :meth:`forward` did.

        Returns:
            What each part adds to the uncertainty, by name, ``[*B, 1]``, and the advice that was
            mixed in, the planner's, the advisor's or PriorNet's, tempered.
        """
        kind = self.mixer.policy
        policy = kind.read(*(tensordict.get(key) for key in self.policy_keys))
        parts = self.gate.contributions(kind.entropy(policy), *self._observed(tensordict, policy))
        own = None
        if self.prior_net is not None:
            own = tuple(tensordict.get(key) for key in self.prior_net.out_keys)
        values = None if self.world is None else tensordict.get(keys.ACTION_VALUES)
        raw = read_advice(tensordict, self.mixer.action_mask)
        advice = self._complete(raw, own, values)
        advice = self._mixed_in(advice, self._planned(tensordict))
        return parts, advice._replace(prior_logits=self.mixer.temper(advice.prior_logits))

    def _decide(
        self,
        policy: Any,
        observed: tuple[Tensor | None, ...],
        was_active: Tensor | None,
        raw: tuple[Tensor | None, ...],
        own: tuple[Tensor, ...] | None,
        values: Tensor | None,
        planned: tuple[Tensor, Tensor] | None,
        *,
        coefficient: Tensor | None,
        random: bool,
    ) -> _Decision:
        """Weigh, mix and pick, on tensors alone: what ``torch.compile`` can fuse."""
        kind = self.mixer.policy
        weighed = self.gate.step(kind.entropy(policy), *observed, was_active)
        beta = weighed.beta if coefficient is None else weighed.beta * coefficient
        advice = self._complete(raw, own, values)
        score = origin = None
        if own is not None:
            score = weighed.beta * (1.0 - torch.nan_to_num(own[1], nan=0.0))
            given = advice.valid & ~advice.learned
            origin = given * keys.ORIGIN_ADVISOR + advice.learned * keys.ORIGIN_PRIOR_NET
        mixture = self.mixer.mix(policy, self._mixed_in(advice, planned), beta)
        acting = mixture.policy.to(policy.dtype)
        choice, changed = kind.draw(acting, policy, random)
        return _Decision(weighed, mixture, acting, choice, changed, score, origin)
