"""Environments side by side, each with its own seed, and what counts as success."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Composite
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv, Transform

MAX_ENVS = 1000
MAX_SEED = 1_000_000
#: Held-out seeds begin here: no training seed reaches as far.
EVAL_SEED_OFFSET = MAX_SEED * MAX_ENVS


def row_seed(seed: int, row: int, *, evaluation: bool = False) -> int:
    """Return the seed of one row of a batch: ``seed * 1000 + row``.

    Evaluation adds :data:`EVAL_SEED_OFFSET`, so that no two rows share a random stream. (In
    small levels two streams can still draw the same layout.)

    Raises:
        ValueError: If ``seed`` is not in 0 to 999,999, or ``row`` not in 0 to 999.
    """
    for name, value, end in (("seed", seed, MAX_SEED), ("row", row, MAX_ENVS)):
        if not 0 <= value < end:
            raise ValueError(f"{name} must lie in [0, {end}), got {value}.")
    return seed * MAX_ENVS + row + (EVAL_SEED_OFFSET if evaluation else 0)


def seed_all(seed: int) -> None:
    """Seed the global random streams of Python, NumPy and PyTorch, in ``[0, 2**32)``."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def batch_rows(
    make_row: Callable[[int], EnvBase],
    *,
    num_envs: int,
    seed: int,
    evaluation: bool = False,
    parallel: bool = False,
) -> EnvBase:
    """Make a batch of environments, seeded row by row.

    ``make_row`` makes one row of its seed, and must be picklable with ``parallel``; the rest is as
    of :meth:`lore_torchrl.envs.adapter.EnvAdapter.make_env`.

    Raises:
        ValueError: If there are more than 1000 rows, or ``seed`` is out of range.
    """
    seeds = [row_seed(seed, row, evaluation=evaluation) for row in range(num_envs)]
    makers = [partial(_make_seeded, make_row, row, os.getpid()) for row in seeds]
    return (ParallelEnv if parallel else SerialEnv)(num_envs, makers)


def _make_seeded(make_row: Callable[[int], EnvBase], seed: int, run_pid: int) -> EnvBase:
    # A worker's global streams are its own; those of the run's process are the run's.
    if os.getpid() != run_pid:
        seed_all(seed)
        # Ctrl-C in a terminal reaches every process: the run ends its workers, once it has saved.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return make_row(seed)


def close_env(env: EnvBase) -> None:
    """Close an environment, opened or not, and leave the number of threads as it was."""
    # TorchRL 0.14 raises it to that of the process's start.
    threads = torch.get_num_threads()
    env.close(raise_if_closed=False)
    torch.set_num_threads(threads)


class ObservationTransform(Transform):
    """Base of transforms whose ``_call`` reads every observation, that of a reset too."""

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._call(tensordict_reset)


class Success(Transform):
    """Write ``success``, bool ``[*B, 1]``, beside ``done``; false at a reset.

    ``rule`` returns whether the episode has succeeded, bool ``[*B, 1]``, of a step's output.
    """

    def __init__(self, rule: Callable[[TensorDictBase], Tensor]) -> None:
        super().__init__(out_keys=["success"])
        self.rule = rule

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set("success", self.rule(next_tensordict))

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return tensordict_reset.set("success", torch.zeros_like(tensordict_reset.get("done")))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare the entry."""
        shape, device = (*observation_spec.shape, 1), observation_spec.device
        observation_spec["success"] = Binary(shape=shape, dtype=torch.bool, device=device)
        return observation_spec
