"""LoRe inside TorchRL's composed DreamerV3 objective."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.objectives import DreamerV3Loss, DreamerV3ModelLoss, DreamerV3ValueLoss

from lore_torchrl import keys
from lore_torchrl.modules.advice import AdviceBatch, read_advice
from lore_torchrl.objectives.actor import LoReActorLoss
from lore_torchrl.objectives.imitation import replay_returns

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

    Args:
        model_loss: Stock world-model objective.
        actor_loss: :class:`LoReActorLoss` around the stock imagination objective.
        value_loss: Stock critic objective.

    Keyword Args:
        **settings: As in the stock class; its ``continuation_horizon`` and ``lmbda`` are those of
            the returns that are imitated too.

    What the actor loss holds beside the actor learns here too, on the posterior states:
    ``prior_net`` the advice, ``disagreement`` what comes next, ``value_ensemble`` the returns,
    ``subgoal_head`` which subgoals are true.
    None of them gives the world model, the critic or the actor a gradient.

    Raises:
        TypeError: If ``actor_loss`` is not a :class:`LoReActorLoss`.
        KeyError: In ``forward``, if a term on advice is on and the sample lacks the advice
            entries, which usually means that a ``SelectTransform`` dropped them.
    """

    def __init__(
        self,
        model_loss: DreamerV3ModelLoss,
        actor_loss: LoReActorLoss,
        value_loss: DreamerV3ValueLoss,
        **settings: Any,
    ):
        if not isinstance(actor_loss, LoReActorLoss):
            raise TypeError(
                f"actor_loss must be a LoReActorLoss, got {type(actor_loss).__name__}: wrap the "
                "stock actor loss in LoReActorLoss(...) first."
            )
        super().__init__(model_loss, actor_loss, value_loss, **settings)
        actor_loss.composed = True
        self.discount = 1.0 - 1.0 / self.continuation_horizon

    @property
    def in_keys(self) -> list[NestedKey]:
        """The stock inputs and, under ``"next"``, the advice entries and the return."""
        own = [("next", key) for key in self._advice_keys]
        if self._needs_returns:
            own.append(("next", keys.RETURN))
        if self.actor_loss.config.imitation_weight:
            own.append(keys.IMITATION)
        if self.actor_loss.subgoal_head is not None:
            own += [("next", keys.SUBGOAL), ("next", keys.REACHED)]
        return [*_stock_in_keys(self), *own]

    def forward(self, sample: TensorDictBase) -> TensorDictBase:
        """Return what the stock class does, with ``loss_lore_*`` and LoRe's metrics.

        The sample holds sequences ``[batch, time]`` with advice under ``"next"``.

        Raises:
            ValueError: If its batch size is another.
        """
        if sample.ndim != 2:
            raise ValueError(
                f"The sample must have batch size [batch, time], got {list(sample.shape)}."
            )
        actor_loss, head = self.actor_loss, self.actor_loss.subgoal_head
        if head is not None:
            # Nothing is to be reached from a state that ends an episode.
            open_ = ~sample.get(("next", self.value_loss.tensor_keys.done)).reshape(
                *sample.shape, 1
            )
            actor_loss.subgoal = (self._kept(sample, keys.SUBGOAL) * open_).flatten(0, 1)
        result = super().forward(sample)
        context = result.get(self.tensor_keys.replay_context)
        if head is not None:
            latent = (context.get(key) for key in (self.tensor_keys.state, self.tensor_keys.belief))
            result.update(head.loss(*latent, self._kept(sample, keys.REACHED)))
        if actor_loss.disagreement is not None:
            latent = (context.get(key) for key in (self.tensor_keys.state, self.tensor_keys.belief))
            is_init = sample.get(self.tensor_keys.is_init)
            result.update(actor_loss.disagreement.loss(*latent, self._action(sample), is_init))
        net, ensemble = actor_loss.prior_net, actor_loss.value_ensemble
        if not (actor_loss.active or net or ensemble):
            return result
        advised = self._advised(context, sample)
        tk = actor_loss.tensor_keys
        latent = [advised.get(key) for key in (tk.state, tk.belief)]
        done = sample.get(("next", self.value_loss.tensor_keys.done))
        advice = None
        if actor_loss.advised or net is not None:
            advice = AdviceBatch.clean(*read_advice(advised, actor_loss.mixer.action_mask))
            if net is not None:
                logits, raw_confidence = net.predict(*latent)
                result.update(net.loss((logits, raw_confidence), advice))
                own = logits.detach(), raw_confidence.detach().sigmoid()
                advice = advice.completed(net.usable(own))
            # At an episode's end there is nothing to advise.
            advice = advice.only(~done.reshape(advice.valid.shape))
        if self._needs_returns:
            self._add_returns(advised, sample)
        if ensemble is not None:
            result.update(ensemble.loss(*latent, advised.get(keys.LAMBDA_RETURN)))
        imagined = result.pop(keys.IMAGINED, None)
        if imagined is not None:
            value = advised.get(actor_loss.actor_loss.tensor_keys.value)
            real = advised.get(keys.RETURN).masked_fill(done.reshape(value.shape), torch.nan)
            starts = (entry.reshape(-1, 1) for entry in (value, real))
            result.update(actor_loss.imagined_terms(imagined, *starts))
        terms, gains = actor_loss.weigh(advised, advice, sample.get(keys.IMITATION, None))
        if gains is not None:
            context.set(keys.IMITATION_WEIGHT, gains.unsqueeze(-1))
        return result.update(terms)

    @property
    def _advice_keys(self) -> tuple[str, ...]:
        masked = (keys.ACTION_MASK,) if self.actor_loss.mixer.action_mask else ()
        return (*keys.ADVICE_KEYS, *masked)

    @property
    def _needs_returns(self) -> bool:
        loss = self.actor_loss
        return loss.config.imitation_weight > 0 or loss.value_ensemble is not None

    @torch.no_grad()
    def _add_returns(self, advised: TensorDictBase, sample: TensorDictBase) -> None:
        """Write the critic's value, the action executed in each state and what it returned."""
        names = self.value_loss.tensor_keys
        critic = self.actor_loss.value_model
        # The gate wants the critic's logits for the same states.
        advised.update(critic(advised.select(*critic.in_keys)))
        value = advised.get(self.actor_loss.actor_loss.tensor_keys.value)
        reward, done, terminated, known = (
            sample.get(("next", key), None)
            for key in (names.reward, names.done, names.terminated, keys.RETURN)
        )
        returns = replay_returns(
            self.actor_loss.bounded(value),
            reward.reshape(value.shape),
            done.reshape(value.shape),
            terminated.reshape(value.shape),
            sample.get(self.tensor_keys.is_init).reshape(value.shape),
            gamma=self.discount,
            lmbda=self.lmbda,
        )
        advised.set(keys.LAMBDA_RETURN, returns)
        advised.set(keys.RETURN, returns if known is None else known.reshape(value.shape))
        # What is done at posterior t is in record t + 1.
        advised.set("action", self._action(sample).roll(-1, dims=1))

    def _action(self, sample: TensorDictBase) -> Tensor:
        """Return the recorded actions; DreamerV1's actor loss has no name for them."""
        return sample.get(getattr(self.actor_loss.actor_loss.tensor_keys, "action", "action"))

    def _kept(self, sample: TensorDictBase, key: str) -> Tensor:
        """Return an entry that the transforms of LoRe write and replay has to keep."""
        value = sample.get(("next", key), None)
        if value is None:
            raise KeyError(
                f"The sample has no {('next', key)!r}. Is the advice transform on the "
                "environment that collects (env = lore.advise(env))? Then keep "
                "lore.observed_keys in replay: pass them to stream_records, a SelectTransform and "
                "the warm-up sample, as far as there are any."
            )
        return value

    def _advised(self, context: TensorDictBase, sample: TensorDictBase) -> TensorDictBase:
        """Put the posterior states and the advice that belongs to them into one tensordict."""
        actor_keys = self.actor_loss.tensor_keys
        advised = context.select(self.tensor_keys.state, self.tensor_keys.belief)
        advised = advised.rename_key_(self.tensor_keys.state, actor_keys.state)
        advised = advised.rename_key_(self.tensor_keys.belief, actor_keys.belief)
        loss = self.actor_loss
        needed = loss.advised or loss.corrects or loss.prior_net is not None
        for key in self._advice_keys:
            if sample.get(("next", key), None) is None and not needed:
                continue  # imitation needs no advice
            value = self._kept(sample, key)
            if key == keys.MASK:
                value = value.reshape(*sample.batch_size, 1)
            advised.set(key, value)
        return advised
