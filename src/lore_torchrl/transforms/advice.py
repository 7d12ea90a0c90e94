"""The transform that writes an advisor's prior beside each observation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torchrl.data.tensor_specs import Binary, Bounded, Composite, Unbounded
from torchrl.envs.transforms import Transform

from lore_torchrl import keys
from lore_torchrl.advisors.base import Describer
from lore_torchrl.service import AdviceService, Near
from lore_torchrl.transforms.row_state import RowState
from lore_torchrl.transforms.rows import (
    check_action_count,
    declare,
    discrete_actions,
    ended,
    entry,
    flat_rows,
    nearest_anchors,
    row_values,
    scalars,
)


class _Situation(NamedTuple):
    key: str
    near: Near
    observation: dict[NestedKey, Any]


class AdviceTransform(Transform):
    """Writes the advisor's logits, confidence and mask for the observation in the same tensordict.

    At a reset that is the observation at the root, at a step the one under ``"next"``.
    A row has advice if its situation is cached, or if the service's call policy chose
    to ask and the answer came. Every other row, and every terminal observation, has
    mask ``False``, zero logits and zero confidence.

    With a service in async mode no step waits: the row goes on with mask ``False``, and
    ``llm_advice_id`` names the question whose answer will belong to it, 0 for none. Rows
    in a situation that is being asked about share that question. A row that has earlier
    advice, such as its class's, keeps it until its own answer comes: then the mask is
    ``True`` and the number has a minus sign.
    :class:`~lore_torchrl.replay.LateAdvice` brings the answer to the rows in replay.

    Nothing is spent until a policy acts that can use advice: a step whose tensordict
    holds ``require_key`` arms the transform and one without it disarms it, as does a
    reset of the whole environment from outside. So ``check_env_specs``, building a
    collector and random rollouts cost nothing; until a step has armed the transform
    there is advice from the cache only, and no counter moves.

    Append it last, to the outermost batched environment. Inside a worker it would not
    see the policy's keys, and each worker would have a budget of its own; a transform
    after it that ends episodes would have it ask about terminal observations.

    Its progress is that of its :attr:`service`, which is checkpointed by itself through
    ``service.state_dict()``. The transform's own ``state_dict`` is empty, so that those
    of environment and collector stay as they are.

    Args:
        service: Whom to ask, how often, and what is already known.
        describer: Turns rows of the output into questions. Its ``in_keys`` name tensors
            or text; it must not keep the arrays it is given without copying them.
        require_key: Entry that the policy writes if it can use advice; ``None`` for
            always armed. Default: ``"lore_beta"``.
        prior_logits_key: Entry for the logits, ``[*B, A]`` float32.
            Default: ``"llm_prior_logits"``.
        confidence_key: Entry for the confidence, ``[*B, 1]`` float32.
            Default: ``"llm_confidence"``.
        mask_key: Entry for the mask, ``[*B, 1]`` bool. Default: ``"llm_mask"``.
        advice_id_key: Entry for the number of the question that a row's advice comes or
            will come from, ``[*B, 1]`` int64, below 0 while other advice stands in.
            Default: ``"llm_advice_id"``.
        beta_key: Weight of the advice at the step acted on, one number a row. It stands
            for the weight at the next observation, which is not known yet; 1 where there
            is none. Default: ``"lore_beta"``.
        success_key: Entry of the next tensordict that is true where a row has succeeded.
            Default: none; then a success is an episode that ends with a reward above 0.
        reward_key: Reward of the next tensordict. Default: ``"reward"``.
        action_key: Action of the step: index or one-hot, or continuous where the describer
            has ``anchors``. Default: ``"action"``.
        latent_key: Vector beside the observation by whose distance the cache finds
            neighbours, if it has a radius. Default: none.
        value_key: Value that the policy gives the observation it acts on, one number a row;
            from it come the TD errors for the call policy's ``td_spike``. Default: none.
        discount: Discount of the TD errors, from 0 to 1. Default: ``1.0``.
        coarse: Whether situations with equal ``describer.coarse_key(row, observation)`` share
            advice where the exact one is unknown. Default: ``False``.
        refute: Whether advice ceases to serve a situation in which its action was taken,
            gained no reward and left ``cache_key`` as it was. For describers whose key
            tells all that an action may change. Default: ``False``.

    Raises:
        TypeError: If ``service`` is no :class:`~lore_torchrl.service.AdviceService`.
        ValueError: If the describer has no actions or keys, output keys coincide, the
            environment's action spec has another number of actions, ``discount`` is out of
            range, or something is switched on whose key is not given.
        RuntimeError: If it is placed inside a worker of a batched environment.

    Examples:
        >>> import torch
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl.testing.mocking_classes import CountingEnv
        >>> from lore_torchrl.advisors.base import Advice, AdviceRequest
        >>> from lore_torchrl.service import AdviceService, CallBudget
        >>> class Describe:
        ...     in_keys, actions = ("observation",), ("stay", "count")
        ...     def observe(self, row, observation, action, *, reset): ...
        ...     def cache_key(self, row, observation):
        ...         return str(observation["observation"].tolist())
        ...     def request(self, row, observation):
        ...         key = self.cache_key(row, observation)
        ...         return AdviceRequest(f"The count is {key}.", self.actions, key)
        >>> class Count:
        ...     async def advise(self, requests):
        ...         return [Advice(logits=(0.0, 3.0)) for _ in requests]
        >>> def count_up(td):
        ...     return td.set("action", torch.ones(1, dtype=torch.int8))
        >>> service = AdviceService(Count(), budget=CallBudget(2))
        >>> env = TransformedEnv(
        ...     CountingEnv(), AdviceTransform(service, Describe(), require_key=None)
        ... )
        >>> rollout = env.rollout(3, policy=count_up)
        >>> rollout["llm_mask"].flatten()
        tensor([ True,  True, False])
        >>> rollout["llm_prior_logits"][0]
        tensor([0., 3.])
        >>> service.close()
    """

    def __init__(
        self,
        service: AdviceService,
        describer: Describer,
        *,
        require_key: NestedKey | None = keys.BETA,
        prior_logits_key: NestedKey = keys.PRIOR_LOGITS,
        confidence_key: NestedKey = keys.CONFIDENCE,
        mask_key: NestedKey = keys.MASK,
        advice_id_key: NestedKey = keys.ADVICE_ID,
        beta_key: NestedKey = keys.BETA,
        success_key: NestedKey | None = None,
        reward_key: NestedKey = "reward",
        action_key: NestedKey = "action",
        latent_key: NestedKey | None = None,
        value_key: NestedKey | None = None,
        discount: float = 1.0,
        coarse: bool = False,
        refute: bool = False,
    ) -> None:
        if not isinstance(service, AdviceService):
            raise TypeError(
                f"AdviceTransform needs an AdviceService, got {type(service).__name__}. "
                "Wrap an advisor as AdviceService(advisor, budget=CallBudget(n))."
            )
        if not describer.actions or not describer.in_keys:
            raise ValueError(
                "The describer must name at least one action and one key, got "
                f"actions={describer.actions!r}, in_keys={describer.in_keys!r}."
            )
        out_keys = [
            unravel_key(key) for key in (prior_logits_key, confidence_key, mask_key, advice_id_key)
        ]
        if len(set(out_keys)) < 4:
            raise ValueError(f"The four output keys must differ, got {out_keys}.")
        if not 0.0 <= discount <= 1.0:
            raise ValueError(f"discount must lie in [0, 1], got {discount}.")
        if coarse and not hasattr(describer, "coarse_key"):
            raise ValueError(
                f"coarse=True needs a coarse_key(row, observation), which "
                f"{type(describer).__name__} does not have."
            )
        if service.policy.td_spike is not None and value_key is None:
            raise ValueError(
                "The call policy has td_spike, but value_key=None: name the value that the "
                "policy writes, such as 'state_value'."
            )
        super().__init__(in_keys=list(describer.in_keys), out_keys=out_keys)
        self.service = service
        self.describer = describer
        self.require_key = require_key
        self.beta_key = beta_key
        self.success_key = success_key
        self.reward_key = reward_key
        self.action_key = action_key
        self.latent_key = latent_key
        self.value_key = value_key
        self.discount = discount
        self._coarse_key = describer.coarse_key if coarse else None
        self.refute = refute
        self._n_actions = len(describer.actions)
        service.cache.expect(self._n_actions)
        anchors = getattr(describer, "anchors", None)
        self._anchors = None if anchors is None else np.asarray(anchors, dtype=np.float32)
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._armed = self.require_key is None
        self._rows = RowState(0, self._n_actions)

    def clone(self) -> AdviceTransform:
        """Return a copy without environment that shares the service but no rows."""
        clone = super().clone()
        clone._forget_rows()
        return clone

    # ---- specs ----

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare the four entries."""
        if self.parent is not None:
            spec = self.parent.full_action_spec.get(self.action_key, None)
            check_action_count(spec, self.action_key, self._n_actions)
        batch = observation_spec.shape
        device = observation_spec.device
        logits, confidence, mask, advice_id = self.out_keys
        declare(
            observation_spec,
            logits,
            Unbounded(shape=(*batch, self._n_actions), dtype=torch.float32, device=device),
        )
        declare(
            observation_spec,
            confidence,
            Bounded(0.0, 1.0, shape=(*batch, 1), dtype=torch.float32, device=device),
        )
        declare(
            observation_spec,
            mask,
            Binary(n=1, shape=(*batch, 1), dtype=torch.bool, device=device),
        )
        declare(
            observation_spec,
            advice_id,
            Unbounded(shape=(*batch, 1), dtype=torch.int64, device=device),
        )
        return observation_spec

    def _check_batched_worker_compat(self) -> None:
        raise RuntimeError(
            "AdviceTransform must not be inside a worker of a SerialEnv or ParallelEnv: each "
            "worker would have its own budget. Use "
            "TransformedEnv(ParallelEnv(n, make_env), AdviceTransform(...))."
        )

    # ---- TorchRL's hooks ----

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        rows = tensordict_reset.numel()
        reset_keys = ["_reset"] if self.parent is None else self.parent._filtered_reset_keys
        given = [key for key in reset_keys if tensordict.get(key, None) is not None]
        if given:
            reset = np.zeros(rows, dtype=bool)
            for key in given:
                reset |= flat_rows(tensordict.get(key), rows).any(1)
        else:
            # Asked for from outside rather than by the end of an episode: what acts next
            # is not known.
            reset = np.ones(rows, dtype=bool)
            self._armed = self.require_key is None
        if rows != len(self._rows):
            if not reset.all():
                raise RuntimeError(
                    f"A partial reset of {rows} rows after {len(self._rows)}: reset the whole "
                    "environment first."
                )
            self._rows = RowState(rows, self._n_actions)
        self._rows.reset(reset)
        self._advise(
            tensordict_reset,
            np.flatnonzero(reset).tolist(),
            betas=[1.0] * rows,
            actions=None,
        )
        return tensordict_reset

    def _reset_on_native_autoreset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._reset(tensordict, tensordict_reset)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rows = next_tensordict.numel()
        if rows != len(self._rows):
            raise RuntimeError(
                f"AdviceTransform was reset with {len(self._rows)} rows and stepped with {rows}. "
                "Reset the environment before stepping it, and keep its batch size."
            )
        self._armed = self.require_key is None or tensordict.get(self.require_key, None) is not None
        reward = flat_rows(entry(next_tensordict, self.reward_key), rows).sum(1)
        done_keys = ["done"] if self.parent is None else self.parent.done_keys
        done = ended(next_tensordict, done_keys, rows)
        if self.success_key is None:
            success = done & (reward > 0)
        else:
            success = flat_rows(entry(next_tensordict, self.success_key), rows).any(1)
        beta = tensordict.get(self.beta_key, None)
        td_errors = None
        if self._armed and self.value_key is not None:
            values = scalars(entry(tensordict, self.value_key), rows, self.value_key)
            td_errors = self._rows.td_errors(values, reward, self.discount)
        stepped = self._rows.step(done)
        self._advise(
            next_tensordict,
            np.flatnonzero(~self._rows.ended).tolist(),
            betas=[1.0] * rows if beta is None else scalars(beta, rows, self.beta_key),
            actions=self._actions(tensordict, rows),
            rewards=np.where(stepped, reward, 0.0).tolist(),
            successes=(success & stepped).tolist(),
            steps=int(stepped.sum()),
            td_errors=td_errors,
        )
        return next_tensordict

    def _actions(self, tensordict: TensorDictBase, rows: int) -> list[int]:
        if self._anchors is None:
            return discrete_actions(tensordict, self.action_key, rows, self._n_actions)
        return nearest_anchors(tensordict, self.action_key, rows, self._anchors)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Refuse: advice is about a live environment, not about stored data."""
        raise NotImplementedError(
            "AdviceTransform works on environments only; put it on the environment, not on "
            "the replay buffer."
        )

    # ---- one vector step ----

    def _advise(
        self,
        tensordict: TensorDictBase,
        rows: list[int],
        *,
        betas: list[float],
        actions: list[int] | None,
        rewards: list[float] | None = None,
        successes: list[bool] | None = None,
        steps: int = 0,
        td_errors: list[float | None] | None = None,
    ) -> None:
        """Look up or ask for ``rows``, and write all rows into ``tensordict``.

        At a step every row is written anew; at a reset (``actions`` is ``None``) the rows
        that go on keep the advice for the observation they already have.
        """
        is_reset = actions is None
        preferred = self._rows.preferred()
        self._rows.clear(rows if is_reset else slice(None))
        observations = {key: row_values(tensordict, key) for key in self.in_keys}
        latents = None if self.latent_key is None else row_values(tensordict, self.latent_key)
        self.service.cache.advance(steps if self._armed else 0)
        candidates: list[int] = []
        served: list[int] = []
        waiting: dict[int, _Situation] = {}
        situations: list[str | None] = [None] * len(betas)
        for row in rows:
            observation = {key: values[row] for key, values in observations.items()}
            self.describer.observe(
                row, observation, None if actions is None else actions[row], reset=is_reset
            )
            key = situations[row] = self.describer.cache_key(row, observation)
            before, self._rows.situations[row] = self._rows.situations[row], key
            stayed = self.refute and self._armed and not is_reset and key == before
            if stayed and actions[row] == preferred[row] and rewards[row] <= 0.0:
                self.service.refute(key, actions[row])
            near = Near(
                None if self._coarse_key is None else self._coarse_key(row, observation),
                None if latents is None else latents[row].reshape(-1),
            )
            reply = self.service.find(key, near, count=self._armed)
            known = self._rows.put(row, reply)
            if self.service.wants(key, near, known=known):
                candidates.append(row)
                waiting[row] = _Situation(key, near, observation)
            elif known:
                served.append(row)
        if self._armed:
            chosen = self.service.policy.choose(
                candidates if self.service.room else [],
                betas=betas,
                resets=self._rows.untold_resets.tolist(),
                rewards=rewards,
                successes=successes,
                cached=served,
                steps=steps,
                situations=situations,
                td_errors=td_errors,
            )
            self._rows.untold_resets[:] = False
            if chosen:
                self._ask(chosen, waiting)
        self._write(tensordict)

    def _ask(self, chosen: list[int], waiting: dict[int, _Situation]) -> None:
        requests = []
        coarse_key = getattr(self.describer, "coarse_key", None)
        for row in chosen:
            key, _, observation = waiting[row]
            request = self.describer.request(row, observation)
            if request.cache_key != key:
                raise ValueError(
                    f"The describer's request has key {request.cache_key!r}, its cache_key() "
                    f"gave {key!r}: the answer would never be found again. Make them equal."
                )
            if coarse_key is not None:
                request = replace(request, abstract_state=coarse_key(row, observation))
            requests.append(request)
        replies = self.service.consult(requests, [waiting[row].near for row in chosen])
        # Rows in the same situation share what is being bought.
        bought = {r.cache_key: reply for r, reply in zip(requests, replies, strict=True)}
        for row, situation in waiting.items():
            if situation.key in bought:
                self._rows.put(row, bought[situation.key])

    def _write(self, tensordict: TensorDictBase) -> None:
        for key, values in zip(self.out_keys, self._rows.values(), strict=True):
            # Collectors keep what they are given by reference: each step needs its own copy.
            tensor = torch.from_numpy(values.copy()).view(*tensordict.batch_size, -1)
            tensordict.set(key, tensor.to(tensordict.device) if tensordict.device else tensor)
