"""From entries of a tensordict to plain values, one for each row of its flattened batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data.tensor_specs import Composite, TensorSpec


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


def declare(specs: Composite, key: NestedKey, spec: TensorSpec) -> None:
    """Set a spec at a key that may be nested, making the nodes on its way."""
    *path, leaf = (key,) if isinstance(key, str) else key
    for name in path:
        if name not in set(specs.keys()):
            specs[name] = Composite(shape=specs.shape, device=specs.device)
        specs = specs[name]
    specs[leaf] = spec


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part)
    else:
        yield str(value)
