"""Running a network without its tensordict wrapper, where that costs more than the network."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor


def run_module(
    module: TensorDictModuleBase, tensordict: TensorDictBase, out_keys: Sequence[NestedKey]
) -> tuple[Tensor, ...]:
    """Return what ``module`` writes under ``out_keys``.

    A plain module that writes nothing else is called without its tensordict wrapper, whose write
    looks for optional packages on disk each time (tensordict 0.14): twice the network's cost.
    """
    if type(module) is TensorDictModule and list(module.out_keys) == list(out_keys):
        output = module.module(*(tensordict.get(key) for key in module.in_keys))
        return output if isinstance(output, tuple) else (output,)
    output = module(tensordict)
    return tuple(output.get(key) for key in out_keys)
