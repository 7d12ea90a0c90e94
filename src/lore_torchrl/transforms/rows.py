"""From entries of a tensordict to plain values, one for each row of its flattened batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data.tensor_specs import (
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
)


def entry(tensordict: TensorDictBase, key: NestedKey) -> Any:
    """Return an entry that must be there.

    Raises:
        KeyError: If it is not; the message names what there is.
    """
    value = tensordict.get(key, None)
    if value is None:
        raise KeyError(
            f"AdviceTransform needs {key!r}, the environment gives "
            f"{sorted(map(str, tensordict.keys(True, True)))}. "
            "Name the right key in the describer's in_keys or in the transform."
        )
    return value


def row_values(tensordict: TensorDictBase, key: NestedKey) -> Sequence[Any]:
    """Return the value of each row: arrays for a tensor, ``str`` for text.

    Tensors are brought to the host once for all rows, not row by row.
    """
    value = entry(tensordict, key)
    rows = tensordict.numel()
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value.reshape(rows, *value.shape[tensordict.ndim :]).cpu().numpy()
    texts = list(_texts(value.tolist() if hasattr(value, "tolist") else value))
    if len(texts) == 1:
        texts *= rows
    if len(texts) != rows:
        raise ValueError(f"{key!r} holds {len(texts)} texts for {rows} rows.")
    return texts


def flat_rows(value: torch.Tensor, rows: int) -> np.ndarray:
    """Return a tensor as an array of shape ``[rows, features]``."""
    return value.detach().reshape(rows, -1).cpu().numpy()


def scalars(value: torch.Tensor, rows: int, key: NestedKey) -> list[float]:
    """Return one number for each row.

    Raises:
        ValueError: If ``value`` does not hold exactly one number a row.
    """
    if value.numel() != rows:
        raise ValueError(f"{key!r} must hold one number a row, got shape {tuple(value.shape)}.")
    return value.detach().reshape(rows).cpu().tolist()


def ended(tensordict: TensorDictBase, done_keys: Sequence[NestedKey], rows: int) -> np.ndarray:
    """Return which rows are done by any of the keys, those that are missing aside.

    A step counter may truncate without updating ``"done"``, so all keys count.
    """
    done = np.zeros(rows, dtype=bool)
    for key in done_keys:
        value = tensordict.get(key, None)
        if value is not None:
            done |= flat_rows(value, rows).any(1)
    return done


def discrete_actions(
    tensordict: TensorDictBase, key: NestedKey, rows: int, n_actions: int
) -> list[int]:
    """Return the action of each row as an index.

    Raises:
        ValueError: If the entry holds neither an index nor a one-hot.
    """
    action = flat_rows(entry(tensordict, key), rows)
    if action.shape[1] == 1 and action.dtype.kind in "iu":
        return action[:, 0].tolist()
    if action.shape[1] == n_actions:
        return action.argmax(1).tolist()
    raise ValueError(
        f"{key!r} holds {action.shape[1]} numbers of {action.dtype} a row; "
        f"advice needs an index or a one-hot of {n_actions} actions."
    )


def nearest_anchors(
    tensordict: TensorDictBase, key: NestedKey, rows: int, anchors: np.ndarray
) -> list[int]:
    """Return the index of the named action that each row's continuous one is nearest to.

    Raises:
        ValueError: If the entry has another number of dimensions than ``anchors``, ``[K, A]``.
    """
    action = flat_rows(entry(tensordict, key), rows)
    if action.shape[1] != anchors.shape[1]:
        raise ValueError(
            f"{key!r} holds {action.shape[1]} numbers a row, the describer's anchors have "
            f"{anchors.shape[1]} dimensions."
        )
    distance = np.square(action[:, None] - anchors[None]).sum(2)
    return distance.argmin(1).tolist()


def check_action_count(specs: Composite, n_actions: int) -> None:
    """Check that a discrete action has as many values as the describer names.

    Raises:
        ValueError: If it has another number, or is several choices at once.
    """
    for key, spec in specs.items(True, True):
        if isinstance(spec, (MultiCategorical, MultiOneHot)):
            raise ValueError(
                f"The environment's {key!r} is several choices at once, {type(spec).__name__}: "
                "advice is about one. Make one action of each combination that is of use."
            )
        if isinstance(spec, (Categorical, OneHot)) and spec.space.n != n_actions:
            raise ValueError(
                f"The describer names {n_actions} actions, the environment's {key!r} has "
                f"{spec.space.n}. Name each of them, in their order."
            )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part)
    else:
        yield str(value)
