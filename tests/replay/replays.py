"""A small replay of several streams."""

from __future__ import annotations

from torchrl.data import (
    LazyTensorStorage,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)


def make_replay(capacity, members=2):
    return ReplayBufferEnsemble(
        *[
            TensorDictReplayBuffer(
                storage=LazyTensorStorage(capacity),
                writer=TensorDictRoundRobinWriter(track_generations=True),
            )
            for _ in range(members)
        ],
        routing_key="env_index",
    )
