"""Replay of real experience: stream records, one buffer a stream, latent write-back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.utils import unravel_key
from torchrl.data import (
    LazyTensorStorage,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

from lore_torchrl import keys
from lore_torchrl.configs import SamplingConfig
from lore_torchrl.replay import SequenceWeights

OBSERVED_KEYS = ("observation",)
_TRANSITION_KEYS = ("action", "is_init", "state", "belief")
_OUTCOME_KEYS = ("reward", "done", "terminated", "truncated")


def stream_records(
    batch: TensorDictBase, observed_keys: Sequence[NestedKey] = OBSERVED_KEYS
) -> TensorDict:
    """Turn a collector batch into the records that DreamerV3 learns from.

    A transition holds the action and the observation it led to, so the first observation
    of an episode stands in no transition's ``"next"``. It has a record of its own: a zero
    action, ``is_init`` set, zero reward, and that observation under ``"next"``. The
    transitions follow with ``is_init`` cleared.

    Args:
        batch: Collector output ``[E, T]`` with ``action``, ``is_init``, the policy's
            posterior ``state`` and ``belief``, the ``observed_keys`` at the root and under
            ``"next"``, and reward and end flags under ``"next"``; without ``truncated`` what is
            done and not terminated is truncated.
        observed_keys: Entries that describe an observation (advice belongs to them).

    Returns:
        Records ``[N]``, ordered by environment and time, with ``env_index``.
    """
    num_envs, num_steps = batch.batch_size
    following = batch.get("next")
    if following.get("truncated", None) is None:
        ends = following.get("done") & ~following.get("terminated")
        batch = batch.copy().set(("next", "truncated"), ends)
    next_keys = [unravel_key(("next", key)) for key in (*observed_keys, *_OUTCOME_KEYS)]
    transitions = batch.select(*_TRANSITION_KEYS, *next_keys)
    position = torch.arange(num_envs * num_steps, device=batch.device).reshape(batch.batch_size)
    transitions.set("env_index", position // num_steps)
    starts = transitions.get("is_init").reshape(batch.batch_size)

    resets = transitions[starts].apply(torch.zeros_like)
    resets.set("is_init", torch.ones_like(resets.get("is_init")))
    resets.set("env_index", transitions.get("env_index")[starts])
    for key in observed_keys:
        resets.set(unravel_key(("next", key)), batch.get(key)[starts])

    transitions = transitions.reshape(-1)
    transitions.set("is_init", torch.zeros_like(transitions.get("is_init")))
    # A reset record comes right before the transition that starts the episode.
    order = torch.cat((2 * position.reshape(-1) + 1, 2 * position[starts])).argsort()
    return torch.cat((transitions, resets))[order]


def build_replay(
    *,
    num_envs: int,
    buffer_size: int,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    sampling: SamplingConfig | None = None,
) -> ReplayBufferEnsemble:
    """Build one buffer for each environment's stream behind one sampler.

    Samples are ``batch_size`` sequences of ``seq_len + 1`` consecutive records of one stream, which
    may cross episode ends; the last record of each is there only to have its latent state
    refreshed. The ``buffer_size`` records are split evenly; the sampler has a random stream of
    its own. Without ``sampling`` all sequences are drawn as often.

    Raises:
        ValueError: If a stream's share cannot hold one sequence.
    """
    capacity = buffer_size // num_envs
    if capacity < seq_len + 1:
        raise ValueError(
            f"buffer_size={buffer_size} over {num_envs} streams leaves {capacity} records each, "
            f"fewer than one sequence of {seq_len + 1}."
        )
    weights = None
    if sampling is not None and sampling.kind != "uniform":
        weights = SequenceWeights(**vars(sampling))

    def sampler(storage: LazyTensorStorage) -> SliceSampler:
        make = SliceSampler if weights is None else partial(weights.sampler, storage)
        return make(
            slice_len=seq_len + 1,
            end_key=("next", "done"),
            # The stream is the trajectory: sequences span episodes, and the
            # rollout resets on the stored is_init. The sampler must add none.
            traj_key="env_index",
            init_key=None,
        )

    storages = [LazyTensorStorage(capacity) for _ in range(num_envs)]
    members = [
        TensorDictReplayBuffer(
            storage=storage,
            sampler=sampler(storage),
            writer=TensorDictRoundRobinWriter(track_generations=True),
        )
        for storage in storages
    ]
    return ReplayBufferEnsemble(
        *members,
        p="sampleable",
        num_buffer_sampled=batch_size,
        routing_key="env_index",
        batch_size=batch_size * (seq_len + 1),
        generator=torch.Generator().manual_seed(seed),
    )


class ReplayState:
    """What a checkpoint holds of replay: its records, and where the next one goes."""

    def __init__(self, replay: ReplayBufferEnsemble) -> None:
        self.replay = replay

    def state_dict(self) -> dict[str, Any]:
        """Return each stream's records, in the slots where they lie, and its writer's state."""
        members = [self.replay[stream] for stream in range(len(self.replay.writer))]
        return {
            str(stream): {
                "records": member.storage.get(slice(None)).to_dict() if len(member) else {},
                "writer": member.writer.state_dict(),
            }
            for stream, member in enumerate(members)
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned into buffers that are still empty."""
        for stream, state in state_dict.items():
            member = self.replay[int(stream)]
            member.writer.load_state_dict(state["writer"])
            if state["records"]:
                records = TensorDict(state["records"]).auto_batch_size_(1)
                # Whoever samples asks the writer where the stream's end lies.
                member.storage.set(slice(0, len(records)), records, set_cursor=False)
                member.storage._len = len(records)


def write_back_latents(
    replay: ReplayBufferEnsemble, sample: TensorDictBase, context: TensorDictBase
) -> None:
    """Store fresh posterior states as the starting points of later samples.

    The ``sample`` ``[B, T + 1]`` is as it was drawn, with ``index`` and ``index_generation``; the
    ``context`` holds posterior ``state`` and ``belief`` of its first ``T`` records: entry ``t``
    is where record ``t + 1`` starts. Where replay has a ``lore_imitation_weight``, that of the
    context goes with them.

    Raises:
        KeyError: If the sample is without the latent states that replay has.
    """
    if "state" not in sample:
        raise KeyError("Give the sample as replay drew it, with its states and weights.")
    index = sample.get("index")[:, 1:].reshape(-1)
    generation = sample.get("index_generation")[:, 1:].reshape(-1)
    weights = sample.get(keys.IMITATION_WEIGHT, None)
    if weights is None:  # replay has no place for them
        context = context.exclude(keys.IMITATION_WEIGHT)
    elif keys.IMITATION_WEIGHT in context:
        # Of the last posterior it is not known what was gained: the record keeps its own.
        weight = context.get(keys.IMITATION_WEIGHT)
        weight[:, -1] = weights[:, -1].to(weight.device)
    # Overlapping sequences name a record twice. Keep the later one, on every device.
    stride = int(index.get("index").max()) + 1
    slots = index.get("buffer_ids") * stride + index.get("index")
    last = torch.full((int(slots.max()) + 1,), -1, dtype=torch.long, device=slots.device)
    rows = torch.arange(slots.numel(), device=slots.device)
    last.scatter_reduce_(0, slots, rows, reduce="amax")
    keep = last[last >= 0]
    replay.update_if_present(
        index=index[keep],
        generation=generation[keep],
        patch={
            key: context.get(key).reshape(slots.numel(), -1)[keep.to(context.get(key).device)]
            for key in ("state", "belief", keys.IMITATION_WEIGHT)
            if key in context
        },
    )
