"""Running a network without its tensordict wrapper, where that costs more than the network."""

from __future__ import annotations

from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor


def run_module(module: TensorDictModuleBase, tensordict: TensorDictBase, key: NestedKey) -> Tensor:
    """Return what ``module`` writes under ``key``.

    A plain one-output module is called without its tensordict wrapper, whose write looks
    for optional packages on disk each time (tensordict 0.14): twice the network's cost.
    """
    if type(module) is TensorDictModule and list(module.out_keys) == [key]:
        return module.module(*(tensordict.get(in_key) for in_key in module.in_keys))
    return module(tensordict).get(key)
