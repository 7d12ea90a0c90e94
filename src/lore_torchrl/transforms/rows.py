"""Rows of a batch of environments as the transforms read them: arrays, text, flags, actions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data.tensor_specs import Composite, TensorSpec
from torchrl.envs.transforms import Transform

from lore_torchrl.advisors.base import Describer
from lore_torchrl.advisors.errors import AdviceError, error_of_kind


class RowTransform(Transform):
    """Base of the transforms that follow each row of a batch of live environments.

    Args:
        describer: What they ask of the rows' observations; they read its ``in_keys``.
        out_keys: What they write.
    """

    def __init__(self, describer: Describer, out_keys: Sequence[NestedKey]) -> None:
        in_keys = describer.in_keys
        in_keys = [in_keys] if isinstance(in_keys, str) else list(in_keys)
        super().__init__(in_keys=in_keys, out_keys=list(out_keys))
        self.describer = describer
        # What the describer has done without a fault.
        self._described: set[str] = set()

    @abstractmethod
    def _begin(self, rows: int) -> None:
        """Start with so many rows, none of which has been reset."""

    @abstractmethod
    def _specs(self, batch: Sequence[int]) -> dict[str, TensorSpec]:
        """Return the spec of each entry, ``[*B, ...]``."""

    def _reset_rows(self, tensordict: TensorDictBase, rows: int, known: int) -> np.ndarray | None:
        """Return which of the ``rows`` are reset at the end of an episode, ``None`` for all.

        All are where the reset was asked for from outside. ``known`` is how many rows there were;
        if that changes, :meth:`_begin` starts anew.
        """
        keys = self.parent._filtered_reset_keys
        reset = None
        if any(tensordict.get(key, None) is not None for key in keys):
            reset = any_true(tensordict, keys, rows)
        if rows != known:
            if reset is not None and not reset.all():
                raise RuntimeError("A partial reset came first: reset the whole environment.")
            self._begin(rows)
        return reset

    @contextmanager
    def _describing(self, what: str) -> Iterator[None]:
        """Let a describer that fails on its first use end the run, later cost what it is for."""
        try:
            yield
        except Exception as error:
            name = f"{type(self.describer).__name__} failed to describe {what}"
            message = f"{name}: {type(error).__name__}: {error}"
            if what not in self._described:
                if isinstance(error, AdviceError):  # which would cost the advice alone
                    raise RuntimeError(message) from error
                error.add_note(f"{name}.")
                raise
            raise error_of_kind("describer", message) from error
        self._described.add(what)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare the entries."""
        specs = self._specs(observation_spec.shape)
        observation_spec.update({k: s.to(observation_spec.device) for k, s in specs.items()})
        return observation_spec

    def clone(self) -> RowTransform:
        """Return a copy without environment that shares what it is made of, but no rows."""
        clone = super().clone()
        clone._begin(0)
        return clone

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Refuse: it follows a live environment, not stored data."""
        name = type(self).__name__
        raise NotImplementedError(f"Put {name} on the environment, not on the replay buffer.")


def entry(tensordict: TensorDictBase, key: NestedKey) -> Any:
    """Return an entry; a ``KeyError`` names those that there are."""
    value = tensordict.get(key, None)
    if value is None:
        raise KeyError(
            f"{key!r} is missing, the environment gives "
            f"{sorted(map(str, tensordict.keys(True, True)))}. "
            "Name another one in the describer's in_keys or in the transform."
        )
    return value


def row_values(tensordict: TensorDictBase, key: NestedKey) -> Sequence[Any]:
    """Return the value of each row: arrays for a tensor, ``str`` for text."""
    value = entry(tensordict, key)
    rows = tensordict.numel()
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value.reshape(rows, *value.shape[tensordict.ndim :]).cpu().numpy()
    value = value.tolist() if hasattr(value, "tolist") else value
    texts = [str(text) for text in np.array(value, dtype=object).ravel()]
    if len(texts) == 1:
        texts *= rows
    if len(texts) != rows:
        raise ValueError(f"{key!r} holds {len(texts)} texts for {rows} rows.")
    return texts


def observations_of(
    tensordict: TensorDictBase, in_keys: Sequence[NestedKey]
) -> list[dict[NestedKey, Any]]:
    """Return what each row observes, by key."""
    columns = {key: row_values(tensordict, key) for key in in_keys}
    rows = range(tensordict.numel())
    return [{key: values[row] for key, values in columns.items()} for row in rows]


def put_rows(tensordict: TensorDictBase, key: NestedKey, values: np.ndarray) -> None:
    """Write an array ``[rows, ...]`` as an entry."""
    # Collectors keep what they are given by reference: each step needs its own copy.
    tensor = torch.from_numpy(values.copy()).view(*tensordict.batch_size, -1)
    tensordict.set(key, tensor.to(tensordict.device) if tensordict.device else tensor)


def flat_rows(value: torch.Tensor, rows: int) -> np.ndarray:
    """Return a tensor as an array of shape ``[rows, features]``."""
    return value.detach().reshape(rows, -1).cpu().numpy()


def scalars(value: torch.Tensor, rows: int, key: NestedKey) -> list[float]:
    """Return one number for each row."""
    if value.numel() != rows:
        raise ValueError(f"{key!r} must hold one number a row, got shape {tuple(value.shape)}.")
    return value.detach().reshape(rows).cpu().tolist()


def any_true(tensordict: TensorDictBase, flags: Sequence[NestedKey], rows: int) -> np.ndarray:
    """Return which rows are true by any of the keys, those that are missing aside."""
    found = np.zeros(rows, dtype=bool)
    for key in flags:
        value = tensordict.get(key, None)
        if value is not None:
            found |= flat_rows(value, rows).any(1)
    return found


def action_indices(tensordict: TensorDictBase, key: NestedKey, describer: Describer) -> list[int]:
    """Return each row's action as an index: of an index, a one-hot, or the nearest anchor."""
    action, number = flat_rows(entry(tensordict, key), tensordict.numel()), len(describer.actions)
    size, wanted = action.shape[1], f"advice needs an index or a one-hot of {number}"
    anchors = getattr(describer, "anchors", None)
    if anchors is not None:
        anchors = np.asarray(anchors, dtype=np.float32)
        wanted = f"the describer's anchors have {anchors.shape[1]} dimensions"
        if size == anchors.shape[1]:
            return np.square(action[:, None] - anchors[None]).sum(2).argmin(1).tolist()
    elif size == 1 and action.dtype.kind in "iu":
        return action[:, 0].tolist()
    elif size == number:
        return action.argmax(1).tolist()
    raise ValueError(f"{key!r} holds {size} numbers of {action.dtype} a row; {wanted}.")
