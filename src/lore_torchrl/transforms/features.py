"""The transform that writes features which programs compute beside each observation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data.tensor_specs import Binary, Bounded, TensorSpec, Unbounded

from lore_torchrl import keys
from lore_torchrl.sandbox import UsedProgram, stable_number
from lore_torchrl.sandbox.sandbox import LARGEST
from lore_torchrl.transforms.program import ProgramTransform
from lore_torchrl.transforms.rows import put_rows


class ProgramFeatures(ProgramTransform):
    """Writes the features of the observation in the same tensordict.

    At a reset that is the observation at the root, at a step the one under ``"next"``. Each
    program writes the columns that are its own; where it fails or is left out they are 0, and
    where all do the mask is ``False``.

    It writes ``llm_features`` ``[*B, K]`` float32, ``llm_features_mask`` ``[*B, 1]`` bool and
    ``llm_code_id`` ``[*B, 1]`` int64: a number of the versions whose features a row holds, the
    same in every process, 0 for none.

    Args:
        programs: Programs of kind ``features``; their ``columns`` are K.
        describer: As of :class:`~lore_torchrl.transforms.program.ProgramTransform`.

    Keyword Args:
        gamma: Discount of the returns that features are scored by. Default: ``1 - 1/333``.
        learning: As there. Default: ``True``.
    """

    kind = "features"
    writes = keys.FEATURE_KEYS

    def _begin(self, rows: int) -> None:
        super()._begin(rows)
        self._features = np.zeros((rows, self.programs.columns), dtype=np.float32)
        self._mask = np.zeros((rows, 1), dtype=bool)
        self._code_id = np.zeros((rows, 1), dtype=np.int64)

    def _write(
        self,
        tensordict: TensorDictBase,
        found: dict[int, dict[UsedProgram, np.ndarray]],
        before: TensorDictBase | None,
    ) -> None:
        for row, values in found.items():
            self._features[row] = 0.0
            for used, columns in values.items():
                first = used.columns.start
                self._features[row, first : first + len(columns)] = columns
            self._mask[row] = bool(values)
            self._code_id[row] = stable_number(*sorted(u.program.code_id for u in values))
        for key, values in zip(
            self.out_keys, (self._features, self._mask, self._code_id), strict=True
        ):
            put_rows(tensordict, key, values)

    def _specs(self, batch: Sequence[int]) -> dict[str, TensorSpec]:
        size, one = (*batch, self.programs.columns), (*batch, 1)
        return {
            keys.FEATURES: Bounded(-LARGEST, LARGEST, size, dtype=torch.float32),
            keys.FEATURES_MASK: Binary(shape=one, dtype=torch.bool),
            keys.CODE_ID: Unbounded(one, dtype=torch.int64),
        }
