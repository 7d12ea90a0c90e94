"""LoRe inside TorchRL's composed DreamerV3 objective."""

from __future__ import annotations

from dataclasses import dataclass

from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.utils import unravel_key
from torch import Tensor
from torchrl.objectives import DreamerV3Loss, DreamerV3ModelLoss, DreamerV3ValueLoss

from lore_torchrl import keys
from lore_torchrl.control.outcomes import AdviceOutcomes, Outcomes
from lore_torchrl.objectives.actor import LoReActorLoss
from lore_torchrl.objectives.disagreement import LatentDisagreementLoss
from lore_torchrl.objectives.distillation import PriorNetLoss
from lore_torchrl.objectives.value_ensemble import ValueEnsembleLoss

# Dynamo reads a property neither through super() nor through its fget: the stepper's first
# line would break the graph.
_stock_in_keys = DreamerV3Loss.in_keys.fget


class LoReDreamerV3Loss(DreamerV3Loss):
    r"""DreamerV3's composed objective with LoRe's terms on the posterior states.

    :class:`~torchrl.objectives.DreamerV3Loss` hands only latent features to its actor
    loss, so advice would be lost on the way. This class reads it under ``"next"``: the
    posterior at index :math:`t` has seen ``observation`` :math:`t+1`, and
    ``("next", "llm_prior_logits")`` is the advice for that observation. The stock
    objective is computed by ``super().forward`` and is not changed.

    Goes through :class:`~torchrl.trainers.algorithms.DreamerV3OptimizationStepper`,
    compiled or captured, like the stock class.

    Args:
        model_loss: Stock world-model objective.
        actor_loss: :class:`LoReActorLoss` around the stock imagination objective.
        value_loss: Stock critic objective.

    Keyword Args:
        replay_value_loss_weight: As in the stock class. Default: ``0.3``.
        continuation_horizon: As in the stock class. Default: ``333.0``.
        lmbda: As in the stock class. Default: ``0.95``.
        prior_net_loss: Distils the advice on the posterior states. Default: ``None``.
        disagreement_loss: Trains the gate's ensemble on them. Default: ``None``.
        value_ensemble_loss: Trains the gate's value ensemble on their lambda returns;
            needs ``outcomes``. Default: ``None``.
        outcomes: Measures what following the advice led to. Needed where ``actor_loss`` has a
            calibrator, which must be its own too, or a gate that adapts its weights.
            Default: ``None``.

    Each of these costs nothing where it is ``None``, and none of them gives the world
    model, the critic or the actor a gradient.

    Raises:
        TypeError: If ``actor_loss`` is not a :class:`LoReActorLoss`.
        ValueError: If something that learns from ``outcomes`` is there without them, or their
            calibrator is not that of ``actor_loss``.
        KeyError: In ``forward``, if a LoRe term is on and the sample lacks the advice
            entries, which usually means that a ``SelectTransform`` dropped them.
    """

    @dataclass
    class _AcceptedKeys(DreamerV3Loss._AcceptedKeys):
        """Stock keys, and the advice entries read under ``"next"``.

        Attributes:
            prior_logits (NestedKey): Default: ``"llm_prior_logits"``.
            confidence (NestedKey): Default: ``"llm_confidence"``.
            mask (NestedKey): Default: ``"llm_mask"``.
        """

        prior_logits: NestedKey = keys.PRIOR_LOGITS
        confidence: NestedKey = keys.CONFIDENCE
        mask: NestedKey = keys.MASK

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys

    def __init__(
        self,
        model_loss: DreamerV3ModelLoss,
        actor_loss: LoReActorLoss,
        value_loss: DreamerV3ValueLoss,
        *,
        replay_value_loss_weight: float = 0.3,
        continuation_horizon: float = 333.0,
        lmbda: float = 0.95,
        prior_net_loss: PriorNetLoss | None = None,
        disagreement_loss: LatentDisagreementLoss | None = None,
        value_ensemble_loss: ValueEnsembleLoss | None = None,
        outcomes: AdviceOutcomes | None = None,
    ):
        if not isinstance(actor_loss, LoReActorLoss):
            raise TypeError(
                f"actor_loss must be a LoReActorLoss, got {type(actor_loss).__name__}: wrap the "
                "stock actor loss in LoReActorLoss(...) first."
            )
        calibrator, gate = actor_loss.calibrator, actor_loss.gate
        for name, there in (
            ("value_ensemble_loss", value_ensemble_loss is not None),
            ("The calibrator of actor_loss", calibrator is not None),
            ("The gate of actor_loss, with adapt_rate,", gate is not None and gate.adapt_rate),
        ):
            if there and outcomes is None:
                raise ValueError(
                    f"{name} learns from the returns of real steps: pass "
                    "outcomes=AdviceOutcomes(calibrator, value_model), with the calibrator of "
                    "actor_loss or None."
                )
        if outcomes is not None and outcomes.calibrator is not calibrator:
            raise ValueError(
                "outcomes and actor_loss have different calibrators, so that one would never "
                "learn and the other never be asked: give both the same, or none."
            )
        super().__init__(
            model_loss,
            actor_loss,
            value_loss,
            replay_value_loss_weight=replay_value_loss_weight,
            continuation_horizon=continuation_horizon,
            lmbda=lmbda,
        )
        self.prior_net_loss = prior_net_loss
        self.disagreement_loss = disagreement_loss
        self.value_ensemble_loss = value_ensemble_loss
        self.outcomes = outcomes

    def _advice_keys(self) -> dict[str, NestedKey]:
        return {
            name: unravel_key(("next", getattr(self.tensor_keys, name)))
            for name in ("prior_logits", "confidence", "mask")
        }

    @property
    def in_keys(self) -> list[NestedKey]:
        """The stock inputs and, under ``"next"``, the advice entries."""
        return [*_stock_in_keys(self), *self._advice_keys().values()]

    def forward(self, sample: TensorDictBase) -> TensorDictBase:
        """Compute the stock objectives and LoRe's terms.

        Args:
            sample: Real transition sequences ``[batch, time]`` with advice under
                ``"next"``.

        Returns:
            What the stock class returns, with ``loss_lore_*`` and LoRe's metrics.
        """
        result = super().forward(sample)
        context = result.get(self.tensor_keys.replay_context)
        if self.disagreement_loss is not None:
            result.update(
                self.disagreement_loss.terms(
                    context.get(self.tensor_keys.state),
                    context.get(self.tensor_keys.belief),
                    self._action(sample),
                    sample.get(self.tensor_keys.is_init),
                )
            )
        if not (self.actor_loss.active or self.prior_net_loss or self.outcomes):
            return result
        advised = self._advised(context, sample)
        own = outcomes = None
        if self.prior_net_loss is not None:
            terms, own = self._distil(advised)
            result.update(terms)
        given, learnt = self.actor_loss.complete(advised, own)
        # Where an episode has ended nothing is to be done: there is nothing to teach either.
        done = sample.get(("next", self.value_loss.tensor_keys.done))
        goes_on = ~done.reshape(given[2].shape)
        given[2] = given[2] & goes_on
        advice = given, None if learnt is None else learnt & goes_on
        if self.outcomes is not None:
            names = self.value_loss.tensor_keys
            outcomes = self.outcomes.evaluate(
                advised,
                sample,
                is_init_key=self.tensor_keys.is_init,
                reward_key=names.reward,
                done_key=names.done,
                terminated_key=names.terminated,
            )
            result.update(self._judge(outcomes, advice, advised, sample))
        return result.update(self.actor_loss.advice_terms(advised, outcomes, advice))

    def _action(self, sample: TensorDictBase) -> Tensor:
        """Return the recorded actions; the first Dreamer's actor loss has no name for them."""
        return sample.get(getattr(self.actor_loss.actor_loss.tensor_keys, "action", "action"))

    def _advised(self, context: TensorDictBase, sample: TensorDictBase) -> TensorDictBase:
        """Put the posterior states and the advice that belongs to them into one tensordict."""
        actor_keys = self.actor_loss.tensor_keys
        advised = context.select(self.tensor_keys.state, self.tensor_keys.belief)
        advised = advised.rename_key_(self.tensor_keys.state, actor_keys.state)
        advised = advised.rename_key_(self.tensor_keys.belief, actor_keys.belief)
        for name, key in self._advice_keys().items():
            value = sample.get(key, None)
            if value is None:
                raise KeyError(
                    f"The sample has no {key!r}. Keep the advice entries in replay: add them to "
                    "the collector's SelectTransform and to the warm-up sample."
                )
            if name == "mask":
                value = value.reshape(*sample.batch_size, 1)
            advised.set(getattr(actor_keys, name), value)
        return advised

    def _distil(self, advised: TensorDictBase) -> tuple[TensorDict, tuple[Tensor, Tensor] | None]:
        """Teach PriorNet the advice; return also what it says itself, if it is the actor's."""
        tk, net = self.actor_loss.tensor_keys, self.prior_net_loss.prior_net
        logits, raw = net.predict(advised.get(tk.state), advised.get(tk.belief))
        names = (tk.prior_logits, tk.confidence, tk.mask)
        terms = self.prior_net_loss.terms((logits, raw), *(advised.get(key) for key in names))
        if net is not self.actor_loss.prior_net:
            return terms, None
        return terms, (logits.detach(), raw.detach().sigmoid())

    def _judge(
        self,
        outcomes: Outcomes,
        advice: tuple[list[Tensor], Tensor | None],
        advised: TensorDictBase,
        sample: TensorDictBase,
    ) -> TensorDict:
        """Compare what followed the advice with what did not, and learn the values."""
        result = TensorDict({}, [])
        if self.training and self.outcomes.calibrator is not None:
            given, learnt = advice
            chosen = self.actor_loss.mixing.nearest(self._action(sample))
            result.update(self.outcomes.judge(outcomes, chosen, *given, learnt))
        if self.value_ensemble_loss is not None:
            result.update(self.value_ensemble_loss.terms(advised, outcomes.returns, outcomes.valid))
        return result
