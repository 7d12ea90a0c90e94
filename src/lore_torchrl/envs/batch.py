"""Rows of environments side by side, each with its own seed, and what counts as success."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from tensordict import TensorDictBase
from torchrl.data import Binary, Composite
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv, Transform

from lore_torchrl.envs.family import MAX_ENVS, row_seed, seed_all


def batch_rows(
    make_row: Callable[[int], EnvBase],
    *,
    num_envs: int,
    seed: int,
    evaluation: bool = False,
    parallel: bool = False,
) -> EnvBase:
    """Make a batch of environments, seeded row by row.

    Args:
        make_row: Makes one row of its seed. With ``parallel`` it must be picklable.

    Keyword Args:
        num_envs: Number of rows, up to 1000.
        seed: Seed of the run: see :func:`~lore_torchrl.envs.family.row_seed`.
        evaluation: Whether to draw from the held-out seeds. Default: ``False``.
        parallel: Whether each row gets its own process. Default: ``False``.

    Raises:
        ValueError: If ``num_envs`` is out of range.
    """
    if not 1 <= num_envs <= MAX_ENVS:
        raise ValueError(f"num_envs must lie in [1, {MAX_ENVS}], got {num_envs}.")
    seeds = [row_seed(seed, row, evaluation=evaluation) for row in range(num_envs)]
    makers = [partial(_make_seeded, make_row, row, os.getpid()) for row in seeds]
    return (ParallelEnv if parallel else SerialEnv)(num_envs, makers)


def _make_seeded(make_row: Callable[[int], EnvBase], seed: int, run_pid: int) -> EnvBase:
    # A worker's global streams are its own; those of the run's process are the run's.
    if os.getpid() != run_pid:
        seed_all(seed)
    return make_row(seed)


class Success(Transform):
    """Write ``success``: whether the episode terminated with this step and a reward above 0.

    Bool ``[*B, 1]``, beside ``done``; false at a reset. Put it on the outermost batch.
    """

    def __init__(self) -> None:
        super().__init__(out_keys=["success"])

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rewarded = next_tensordict.get("reward") > 0
        return next_tensordict.set("success", next_tensordict.get("terminated") & rewarded)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        never = torch.zeros_like(tensordict_reset.get("done"))
        return tensordict_reset.set("success", never)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare the entry."""
        shape = (*observation_spec.shape, 1)
        observation_spec["success"] = Binary(
            1, shape=shape, dtype=torch.bool, device=observation_spec.device
        )
        return observation_spec
