"""The transform that writes an advisor's prior beside each observation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data.tensor_specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)
from torchrl.envs.transforms import (
    Compose,
    InitTracker,
    RewardSum,
    TensorDictPrimer,
    Transform,
)

from lore_torchrl import keys
from lore_torchrl.advisors.base import Advice, AdviceRequest, Describer, question_of
from lore_torchrl.advisors.errors import AdviceError
from lore_torchrl.service import AdviceService, Query, Reply, StepSignals, TDErrorSpike
from lore_torchrl.transforms.plans import PlanFollower
from lore_torchrl.transforms.rows import (
    RowTransform,
    action_indices,
    any_true,
    entry,
    flat_rows,
    observations_of,
    put_rows,
    scalars,
)

# Transforms of TorchRL that may follow: they write entries of their own and end no episode.
_HARMLESS = (InitTracker, RewardSum, TensorDictPrimer)


class AdviceTransform(RowTransform):
    """Writes the advisor's logits, confidence and mask for the observation in the same tensordict.

    At a reset that is the observation at the root, at a step the one under ``"next"``. A row
    has advice if its situation is cached, or if the service's call policy chose to ask and
    the answer came. Every other row, and every terminal observation, has mask ``False``, zero
    logits and zero confidence.

    With a service in async mode no step waits: ``llm_advice_id`` numbers the question whose
    answer will belong to the row, 0 for none. Where other advice serves meanwhile, such as
    that of the abstract state, the mask is ``True`` and ``llm_fallback`` is set.
    :class:`~lore_torchrl.replay.LateAdvice` writes the answer into the rows in replay.

    A step whose tensordict holds ``require_key`` arms the transform. A step without it, and a
    reset of the whole environment from outside, disarm it: it then gives advice from the
    cache, and no counter moves. So ``check_env_specs``, building a collector and random
    rollouts cost nothing.

    Append it to the outermost, batched environment, after all transforms that may end
    episodes. ``InitTracker``, ``RewardSum``, ``TensorDictPrimer``, :class:`SubgoalBonus` and
    transforms that only map entries one by one may follow. Its :attr:`service` saves progress.

    It writes ``llm_prior_logits`` ``[*B, A]`` float32, ``llm_confidence`` ``[*B, 1]`` float32,
    ``llm_mask`` ``[*B, 1]`` bool, ``llm_advice_id`` ``[*B, 1]`` int64 and ``llm_fallback``
    ``[*B, 1]`` bool.

    Args:
        service: Whom to ask, how often, and what is already known.
        describer: Turns rows into questions. Its ``in_keys`` name tensors or text; it must
            copy the arrays that it keeps. With ``anchors`` actions are continuous.

    Keyword Args:
        require_key: Entry that the policy writes if it can use advice; ``None`` for
            always armed. Default: ``"lore_beta"``.
        beta_key: Acquisition score at the step acted on, one number per row, used for the
            next observation, whose score is not known yet; 1 where the policy writes none.
            Default: ``"lore_beta"``.
        beta_max: Acquisition score of an episode's first observation. Default: ``1.0``.
        success_key: Entry of the next tensordict that is true where a row has succeeded.
            Default: none; then a success is an episode that ends with a reward above 0.
        value_key: Value that the policy gives the observation it acts on, one number per row,
            for the call policy's :class:`TDErrorSpike`. Default: none.
        discount: Discount of the TD errors, from 0 to 1. Default: ``1.0``.
        abstract_states: Whether situations of the same abstract state,
            ``describer.abstract_state(row, observation)``, share advice, where the describer
            has that method. Default: ``True``.
        plan_horizon: Steps of a plan, ``llm_plan`` ``[*B, H]`` int64 with -1 beyond its end; while
            the world goes as it expects, its next step serves where the situation has no answer
            of its own (:class:`~lore_torchrl.transforms.plans.PlanFollower`; what is in view is
            ``describer.things(row, observation)``, where it has that method). Default: ``0``, none.
        action_mask: Whether to write ``llm_action_mask`` ``[*B, A]`` bool, the actions that the
            advisor calls valid, all where it says nothing. Default: ``False``.
        subgoals: Whether to write ``llm_subgoal`` ``[*B, G]`` float32, one-hot over
            ``describer.subgoals``: what the advice for this observation names, zeros where it
            names none, or none of them. Default: ``False``.
        noop_filter: Whether to filter no-ops: advice no longer serves a situation in which its
            action was taken, gained no reward and left ``cache_key`` as it was. For
            describers whose key tells all that an action may change. Default: ``True``.

    Raises:
        TypeError: If ``service`` is no :class:`~lore_torchrl.service.AdviceService`, or the
            describer returns keys that are no ``str`` or a request of another type.
        ValueError: If the describer contradicts itself or the environment's actions,
            ``discount`` is out of range, or something is on whose key is not given.
        RuntimeError: If it is inside a worker of a batched environment, or before a transform
            that may end episodes.
    """

    def __init__(
        self,
        service: AdviceService,
        describer: Describer,
        *,
        require_key: NestedKey | None = keys.BETA,
        beta_key: NestedKey = keys.BETA,
        beta_max: float = 1.0,
        success_key: NestedKey | None = None,
        value_key: NestedKey | None = None,
        discount: float = 1.0,
        abstract_states: bool = True,
        noop_filter: bool = True,
        plan_horizon: int = 0,
        action_mask: bool = False,
        subgoals: bool = False,
    ) -> None:
        if not isinstance(service, AdviceService):
            raise TypeError(f"AdviceTransform needs an AdviceService, got {service!r}.")
        if not describer.actions or not describer.in_keys:
            has = f"actions={describer.actions!r}, in_keys={describer.in_keys!r}"
            raise ValueError(f"The describer has {has}.")
        if not 0.0 <= discount <= 1.0:
            raise ValueError(f"discount must lie in [0, 1], got {discount}.")
        for method in ("observe", "cache_key", "request"):
            if not callable(getattr(describer, method, None)):
                raise TypeError(
                    f"{type(describer).__name__} has no {method}(). A describer that remembers "
                    "nothing inherits from lore_torchrl.envs.adapter.MemorylessDescriber."
                )
        if subgoals and not getattr(describer, "subgoals", ()):
            raise ValueError("subgoals=True needs a describer that names its subgoals.")
        spikes = any(isinstance(trigger, TDErrorSpike) for trigger in service.policy.triggers)
        if spikes and value_key is None:
            raise ValueError("A TDErrorSpike needs values, but value_key=None: name the entry.")
        out_keys = [*keys.ADVICE_KEYS, keys.ADVICE_ID, keys.FALLBACK]
        out_keys += [keys.PLAN] * bool(plan_horizon) + [keys.ACTION_MASK] * action_mask
        out_keys += [keys.SUBGOAL] * subgoals
        super().__init__(describer, out_keys)
        self.service = service
        self.require_key = require_key
        self.beta_key = beta_key
        self.beta_max = beta_max
        self.success_key = success_key
        self.value_key = value_key
        self.discount = discount
        self.abstract_states = abstract_states and hasattr(describer, "abstract_state")
        self.noop_filter = noop_filter
        self.plan_horizon = plan_horizon
        self.subgoals = tuple(describer.subgoals) if subgoals else ()
        self._n_actions = len(describer.actions)
        service.cache.expect(self._n_actions)
        self._begin(0)

    def _begin(self, rows: int) -> None:
        self._armed = self.require_key is None
        self._rows = _Rows(rows, self._specs((rows,)), self.subgoals)

    # ---- placement and specs ----

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare the entries."""
        specs = () if self.parent is None else self.parent.full_action_spec.items(True, True)
        for key, spec in specs:
            if isinstance(spec, (MultiCategorical, MultiOneHot)):
                raise ValueError(
                    f"The environment's {key!r} is several choices at once. Make one action of "
                    "each combination that is of use."
                )
            if isinstance(spec, (Categorical, OneHot)) and spec.space.n != self._n_actions:
                raise ValueError(
                    f"The describer names {self._n_actions} actions, the environment's {key!r} "
                    f"has {spec.space.n}."
                )
        return super().transform_observation_spec(observation_spec)

    def _specs(self, batch: Sequence[int]) -> dict[str, TensorSpec]:
        one, actions = (*batch, 1), (*batch, self._n_actions)
        plan, names = (*batch, self.plan_horizon), (*batch, len(self.subgoals))
        specs = {
            keys.PRIOR_LOGITS: Unbounded(actions, dtype=torch.float32),
            keys.CONFIDENCE: Bounded(0.0, 1.0, one, dtype=torch.float32),
            keys.MASK: Binary(shape=one, dtype=torch.bool),
            keys.ADVICE_ID: Unbounded(one, dtype=torch.int64),
            keys.FALLBACK: Binary(shape=one, dtype=torch.bool),
            keys.PLAN: Bounded(-1, self._n_actions - 1, plan, dtype=torch.int64),
            keys.ACTION_MASK: Binary(shape=actions, dtype=torch.bool),
            keys.SUBGOAL: Bounded(0.0, 1.0, names, dtype=torch.float32),
        }
        return {key: specs[key] for key in self.out_keys}

    def _check_batched_worker_compat(self) -> None:
        raise RuntimeError(
            "AdviceTransform must not be inside a worker of a SerialEnv or ParallelEnv: each "
            "worker would have its own budget. Use "
            "TransformedEnv(ParallelEnv(n, make_env), AdviceTransform(...))."
        )

    def _check_order(self) -> None:
        """Refuse a later transform that may end an episode after this one has asked."""
        if self.container is None:
            return
        parts = self.container.transform.modules()
        flat = [t for t in parts if isinstance(t, Transform) and not isinstance(t, Compose)]
        place = next((n for n, transform in enumerate(flat) if transform is self), len(flat))
        for later in flat[place + 1 :]:
            kind = type(later)
            maps_entries = kind._step is Transform._step and kind._call is Transform._call
            ends = set(later.out_keys or ()) & set(self.parent.done_keys)
            harmless = kind in _HARMLESS or getattr(kind, "follows_advice", False)
            if not harmless and (ends or not maps_entries):
                raise RuntimeError(
                    f"AdviceTransform stands before {kind.__name__}, which may end episodes: "
                    "advice would be asked for terminal observations. Append AdviceTransform last."
                )

    # ---- TorchRL's hooks ----

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        rows = tensordict_reset.numel()
        reset = self._reset_rows(tensordict, rows, len(self._rows))
        if reset is None:
            reset = np.ones(rows, dtype=bool)
            self._check_order()
            self._armed = self.require_key is None  # what acts next is not known
        self._rows.untold_resets |= reset
        self._rows.ended &= ~reset
        self._rows.succeeded &= ~reset
        self._rows.value[reset] = np.nan
        signals = StepSignals([self.beta_max] * rows, self._rows.untold_resets.tolist())
        self._advise(tensordict_reset, np.flatnonzero(reset).tolist(), signals)
        return tensordict_reset

    _reset_on_native_autoreset = _reset

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rows = next_tensordict.numel()
        if rows != len(self._rows):
            raise RuntimeError(f"Reset with {len(self._rows)} rows, stepped with {rows}.")
        self._armed = self.require_key is None or tensordict.get(self.require_key, None) is not None
        parent = self.parent
        learned = entry(next_tensordict, parent.reward_key)
        reward = flat_rows(next_tensordict.get(keys.RAW_REWARD, learned), rows).sum(1)
        done = any_true(next_tensordict, parent.done_keys, rows)
        if self.success_key is None:
            success = done & (reward > 0)
        else:
            success = flat_rows(entry(next_tensordict, self.success_key), rows).any(1)
        beta = tensordict.get(self.beta_key, None)
        td_errors = None
        if self._armed and self.value_key is not None:
            values = scalars(entry(tensordict, self.value_key), rows, self.value_key)
            # The critic's values are of the reward that it learns from.
            paid = flat_rows(learned, rows).sum(1)
            td_errors = self._rows.td_errors(values, paid, self.discount)
        stepped = ~self._rows.ended  # the others had ended before
        self._rows.ended |= done
        # An adapter's success stays true to the end of its episode.
        success &= stepped & ~self._rows.succeeded
        if self._armed:
            self._rows.succeeded |= success
        signals = StepSignals(
            [1.0] * rows if beta is None else scalars(beta, rows, self.beta_key),
            self._rows.untold_resets.tolist(),
            np.where(stepped, reward, 0.0).tolist(),
            success.tolist(),
            td_errors,
            int(stepped.sum()),
        )
        running = np.flatnonzero(~self._rows.ended).tolist()
        actions = action_indices(tensordict, parent.action_key, self.describer)
        self._advise(next_tensordict, running, signals, actions)
        return next_tensordict

    # ---- one vector step ----

    def _advise(
        self,
        tensordict: TensorDictBase,
        rows: list[int],
        signals: StepSignals,
        actions: list[int] | None = None,
    ) -> None:
        """Get advice for ``rows``, and write all rows into ``tensordict``.

        At a reset (``actions`` is ``None``) the rows that go on keep their advice.
        """
        preferred = self._rows.preferred()
        self._rows.clear(rows if actions is None else slice(None))
        observations = observations_of(tensordict, self.in_keys)
        queries = []
        for row in rows:
            if actions is not None and self._rows.blind[row]:
                continue
            action = None if actions is None else actions[row]
            useless = (
                self.noop_filter
                and self._armed
                and actions is not None
                and action == preferred[row]
                and signals.rewards[row] <= 0.0
            )
            try:
                with self._describing("a step"):
                    queries.append(self._query(row, observations[row], action, useless=useless))
            except AdviceError as error:
                self.service.count_error(error)
                self._rows.forget(row)
        replies = self.service.step(queries, signals if self._armed else None)
        for query, reply in zip(queries, replies, strict=True):
            self._rows.put(query.row, reply)
            if self.plan_horizon:
                self._rows.plans[query.row].follow(reply.advice)
        if self._armed:
            self._rows.untold_resets[:] = False
        for key in self.out_keys:
            put_rows(tensordict, key, self._rows.entries[key])

    def _query(
        self, row: int, observation: Mapping[str, Any], action: int | None, *, useless: bool
    ) -> Query:
        """Describe an observation; ``useless``: the action is no-op if nothing has changed."""
        self._rows.blind[row] = True
        self.describer.observe(row, observation, action, reset=action is None)
        self._rows.blind[row] = False
        key = self._key("cache_key", row, observation)
        state = self._key("abstract_state", row, observation) if self.abstract_states else None
        before, self._rows.situations[row] = self._rows.situations[row], key
        planned = None
        if self.plan_horizon:
            planned = self._planned(row, observation, action, changed=key != before)
        no_op = action if useless and key == before else None
        return Query(key, partial(self._request, row, observation), row, state, no_op, planned)

    def _planned(
        self, row: int, observation: Mapping[str, Any], action: int | None, *, changed: bool
    ) -> Advice | None:
        plan, things = self._rows.plans[row], ()
        if hasattr(self.describer, "things"):
            things = self.describer.things(row, observation)
        if action is None:
            return plan.reset(things)
        return plan.step(action, changed=changed, things=things)

    def _key(self, method: str, row: int, observation: Mapping[str, Any]) -> str:
        key = getattr(self.describer, method)(row, observation)
        if not isinstance(key, str):
            name = type(self.describer).__name__
            raise TypeError(f"{name}.{method}() must return a str, got {key!r}.")
        return key

    def _request(self, row: int, observation: Mapping[str, Any]) -> AdviceRequest:
        with self._describing("a question"):
            return question_of(self.describer, row, observation)


class _Rows:
    """Advice for the observation of each row, and the state of its episode."""

    def __init__(
        self, rows: int, specs: Mapping[str, TensorSpec], subgoals: tuple[str, ...]
    ) -> None:
        # What is written, [rows, ...] each.
        self.entries = {key: spec.zero().numpy() for key, spec in specs.items()}
        self.clear(slice(None))
        self.subgoals = subgoals
        horizon = specs[keys.PLAN].shape[-1] if keys.PLAN in specs else 0
        self.plans = [PlanFollower(horizon) for _ in range(rows if horizon else 0)]
        # Rows that ended and were not reset yet: what a batch steps beyond is no episode.
        self.ended = np.ones(rows, dtype=bool)
        self.succeeded = np.zeros(rows, dtype=bool)
        # Resets that the call policy was not told of, since the transform was not armed.
        self.untold_resets = np.zeros(rows, dtype=bool)
        self.situations: list[str | None] = [None] * rows
        # Rows whose describer failed to observe: what it remembers is wrong until their reset.
        self.blind = np.zeros(rows, dtype=bool)
        # Of the step before, for the TD error.
        self.value = np.full(rows, np.nan)
        self.reward = np.zeros(rows)

    def __len__(self) -> int:
        return len(self.ended)

    def clear(self, rows: list[int] | slice) -> None:
        """Write that there is no advice."""
        for key, values in self.entries.items():
            values[rows] = -1 if key == keys.PLAN else key == keys.ACTION_MASK

    def forget(self, row: int) -> None:
        """Let the next observation of a row be compared with nothing before it."""
        self.situations[row] = None
        if self.plans:
            self.plans[row].reset(())

    def preferred(self) -> list[int | None]:
        """Return the action that the advice of each row prefers, ``None`` without advice."""
        best = self.entries[keys.PRIOR_LOGITS].argmax(1).tolist()
        given = self.entries[keys.MASK][:, 0]
        return [a if advised else None for a, advised in zip(best, given, strict=True)]

    def td_errors(
        self, values: Sequence[float], reward: np.ndarray, discount: float
    ) -> list[float | None]:
        """Return the TD error of the step before, ``None`` in the first of an episode."""
        now = np.asarray(values, dtype=np.float64)
        errors = self.reward + discount * now - self.value
        self.value, self.reward = now, reward.astype(np.float64)
        return [float(error) if np.isfinite(error) else None for error in errors]

    def put(self, row: int, reply: Reply) -> None:
        """Write a reply."""
        entries, advice = self.entries, reply.advice
        entries[keys.ADVICE_ID][row], entries[keys.FALLBACK][row] = reply.advice_id, reply.fallback
        if advice is None:
            return
        entries[keys.PRIOR_LOGITS][row] = advice.logits
        entries[keys.CONFIDENCE][row] = advice.confidence
        entries[keys.MASK][row] = True
        if keys.PLAN in entries:
            steps = advice.plan[: entries[keys.PLAN].shape[1]]
            entries[keys.PLAN][row, : len(steps)] = steps
        if keys.ACTION_MASK in entries and advice.valid:
            entries[keys.ACTION_MASK][row] = advice.valid
        if advice.subgoal in self.subgoals:
            entries[keys.SUBGOAL][row, self.subgoals.index(advice.subgoal)] = 1.0
