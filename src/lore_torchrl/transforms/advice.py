"""The transform that writes an adviser's prior beside each observation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torchrl.data.tensor_specs import Binary, Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.envs.transforms import Transform

from lore_torchrl import keys
from lore_torchrl.advisors.base import Advice, Describer
from lore_torchrl.service import AdviceService
from lore_torchrl.transforms.rows import declare, entry, flat_rows, row_values, scalars


class AdviceTransform(Transform):
    """Writes the adviser's logits, confidence and mask for the observation in the same tensordict.

    At a reset that is the observation at the root, at a step the one under ``"next"``.
    A row has advice if its situation is cached, or if the service's call policy chose
    to ask and the answer came. Every other row, and every terminal observation, has
    mask ``False``, zero logits and zero confidence.

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
        beta_key: Weight of the advice at the step acted on, one number a row. It stands
            for the weight at the next observation, which is not known yet; 1 where there
            is none. Default: ``"lore_beta"``.
        success_key: Entry of the next tensordict that is true where a row has succeeded.
            Default: none; then a success is an episode that ends with a reward above 0.
        reward_key: Reward of the next tensordict. Default: ``"reward"``.
        action_key: Discrete action of the step, index or one-hot. Default: ``"action"``.

    Raises:
        TypeError: If ``service`` is no :class:`~lore_torchrl.service.AdviceService`.
        ValueError: If the describer has no actions or keys, output keys coincide, or
            the environment's action spec has another number of actions.
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
        beta_key: NestedKey = keys.BETA,
        success_key: NestedKey | None = None,
        reward_key: NestedKey = "reward",
        action_key: NestedKey = "action",
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
        out_keys = [unravel_key(key) for key in (prior_logits_key, confidence_key, mask_key)]
        if len(set(out_keys)) < 3:
            raise ValueError(f"The three output keys must differ, got {out_keys}.")
        super().__init__(in_keys=list(describer.in_keys), out_keys=out_keys)
        self.service = service
        self.describer = describer
        self.require_key = require_key
        self.beta_key = beta_key
        self.success_key = success_key
        self.reward_key = reward_key
        self.action_key = action_key
        self._n_actions = len(describer.actions)
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._armed = self.require_key is None
        self._allocate(0)

    def _allocate(self, rows: int) -> None:
        self._logits = np.zeros((rows, self._n_actions), dtype=np.float32)
        self._confidence = np.zeros((rows, 1), dtype=np.float32)
        self._mask = np.zeros((rows, 1), dtype=bool)
        # Rows that ended and were not reset yet: what a batch steps beyond is no episode.
        self._ended = np.ones(rows, dtype=bool)
        # Resets that the call policy was not told of, since the transform was not armed.
        self._untold_resets = np.zeros(rows, dtype=bool)

    def clone(self) -> AdviceTransform:
        """Return a copy without environment that shares the service but no rows."""
        clone = super().clone()
        clone._forget_rows()
        return clone

    # ---- specs ----

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare the three entries."""
        self._check_actions()
        batch = observation_spec.shape
        device = observation_spec.device
        logits, confidence, mask = self.out_keys
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
        return observation_spec

    def _check_actions(self) -> None:
        if self.parent is None:
            return
        spec = self.parent.full_action_spec.get(self.action_key, None)
        if isinstance(spec, (Categorical, OneHot)) and spec.space.n != self._n_actions:
            raise ValueError(
                f"The describer names {self._n_actions} actions, the environment's "
                f"{self.action_key!r} has {spec.space.n}. Name each of them, in their order."
            )

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
        if rows != len(self._mask):
            if not reset.all():
                raise RuntimeError(
                    f"A partial reset of {rows} rows after {len(self._mask)}: reset the whole "
                    "environment first."
                )
            self._allocate(rows)
        self._untold_resets |= reset
        self._ended &= ~reset
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
        if rows != len(self._mask):
            raise RuntimeError(
                f"AdviceTransform was reset with {len(self._mask)} rows and stepped with {rows}. "
                "Reset the environment before stepping it, and keep its batch size."
            )
        self._armed = self.require_key is None or tensordict.get(self.require_key, None) is not None
        stepped = ~self._ended
        reward = flat_rows(entry(next_tensordict, self.reward_key), rows).sum(1)
        done = self._done(next_tensordict, rows)
        if self.success_key is None:
            success = done & (reward > 0)
        else:
            success = flat_rows(entry(next_tensordict, self.success_key), rows).any(1)
        beta = tensordict.get(self.beta_key, None)
        self._ended |= done
        self._advise(
            next_tensordict,
            np.flatnonzero(~self._ended).tolist(),
            betas=[1.0] * rows if beta is None else scalars(beta, rows, self.beta_key),
            actions=self._actions(tensordict, rows),
            rewards=np.where(stepped, reward, 0.0).tolist(),
            successes=(success & stepped).tolist(),
            steps=int(stepped.sum()),
        )
        return next_tensordict

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
    ) -> None:
        """Look up or ask for ``rows``, and write all rows into ``tensordict``.

        At a step every row is written anew; at a reset (``actions`` is ``None``) the rows
        that go on keep the advice for the observation they already have.
        """
        is_reset = actions is None
        self._clear(rows if is_reset else slice(None))
        observations = {key: row_values(tensordict, key) for key in self.in_keys}
        candidates: list[int] = []
        cached: list[int] = []
        waiting: dict[int, tuple[str, dict[NestedKey, Any]]] = {}
        lookup = self.service.lookup if self._armed else self.service.cache.peek
        for row in rows:
            observation = {key: values[row] for key, values in observations.items()}
            self.describer.observe(
                row, observation, None if actions is None else actions[row], reset=is_reset
            )
            key = self.describer.cache_key(row, observation)
            if self._put(row, lookup(key)):
                cached.append(row)
            else:
                candidates.append(row)
                waiting[row] = (key, observation)
        if self._armed:
            chosen = self.service.policy.choose(
                candidates,
                betas=betas,
                resets=self._untold_resets.tolist(),
                rewards=rewards,
                successes=successes,
                cached=cached,
                steps=steps,
            )
            self._untold_resets[:] = False
            if chosen:
                self._ask(chosen, waiting)
        self._write(tensordict)

    def _ask(self, chosen: list[int], waiting: dict[int, tuple[str, dict[NestedKey, Any]]]) -> None:
        requests = []
        for row in chosen:
            key, observation = waiting[row]
            request = self.describer.request(row, observation)
            if request.cache_key != key:
                raise ValueError(
                    f"The describer's request has key {request.cache_key!r}, its cache_key() "
                    f"gave {key!r}: the answer would never be found again. Make them equal."
                )
            requests.append(request)
        for row, advice in zip(chosen, self.service.ask(requests), strict=True):
            self._put(row, advice)
        # Rows in the same situation share what has just been bought.
        bought = {request.cache_key for request in requests}
        for row, (key, _) in waiting.items():
            if key in bought and row not in chosen:
                self._put(row, self.service.cache.peek(key))

    def _clear(self, rows: list[int] | slice) -> None:
        self._logits[rows] = 0.0
        self._confidence[rows] = 0.0
        self._mask[rows] = False

    def _put(self, row: int, advice: Advice | None) -> bool:
        # A cache restored from another action set is no reason to stop the run.
        if advice is None or len(advice.logits) != self._n_actions:
            return False
        self._logits[row] = advice.logits
        # An adviser's number may be finite and yet beyond float32.
        if not np.isfinite(self._logits[row]).all():
            self._logits[row] = 0.0
            return False
        self._confidence[row] = advice.confidence
        self._mask[row] = True
        return True

    def _write(self, tensordict: TensorDictBase) -> None:
        for key, values in zip(
            self.out_keys, (self._logits, self._confidence, self._mask), strict=True
        ):
            # Collectors keep what they are given by reference: each step needs its own copy.
            tensor = torch.from_numpy(values.copy()).view(*tensordict.batch_size, -1)
            tensordict.set(key, tensor.to(tensordict.device) if tensordict.device else tensor)

    def _done(self, next_tensordict: TensorDictBase, rows: int) -> np.ndarray:
        # All of them: a step counter may truncate without updating "done".
        done_keys = ["done"] if self.parent is None else self.parent.done_keys
        done = np.zeros(rows, dtype=bool)
        for key in done_keys:
            value = next_tensordict.get(key, None)
            if value is not None:
                done |= flat_rows(value, rows).any(1)
        return done

    def _actions(self, tensordict: TensorDictBase, rows: int) -> list[int]:
        action = flat_rows(entry(tensordict, self.action_key), rows)
        if action.shape[1] == 1 and action.dtype.kind in "iu":
            return action[:, 0].tolist()
        if action.shape[1] == self._n_actions:
            return action.argmax(1).tolist()
        raise ValueError(
            f"{self.action_key!r} holds {action.shape[1]} numbers of {action.dtype} a row; "
            f"advice needs an index or a one-hot of {self._n_actions} actions. "
            "Name the discrete action with action_key."
        )
