"""Draws sequences by how their episodes ended: successes, or large advantages, more often."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torchrl.data import SliceSampler, Storage

from lore_torchrl import keys
from lore_torchrl.keys import raw_reward

_ENDS = (("next", "terminated"), ("next", "truncated"))
_READ = ("is_init", ("next", "reward"), ("next", keys.RAW_REWARD), *_ENDS)


def record_weights(
    reward: Tensor,
    is_init: Tensor,
    done: Tensor,
    first: Tensor,
    *,
    kind: Literal["success", "advantage"],
    temperature: float = 1.0,
    ratio: float = 8.0,
) -> Tensor:
    r"""Return how often records are to be drawn by the return of their episode, ``[N]``.

    With the return :math:`G`, the sum of an episode's rewards, the absolute advantage
    :math:`|A| = |G - \bar G|` by the mean over episodes, and the number of records :math:`n`,

    .. math::
        w_{success} = \begin{cases} \mathtt{ratio} & G > 0 \\ 1 & \text{else} \end{cases}
        \qquad
        w_{advantage} = \frac1n\, \mathrm{softmax}(|A| / T)

    so that with ``"advantage"`` all records of an episode together are drawn with the probability
    :math:`\mathrm{softmax}(|A| / T)` of absolute-advantage-weighted episode sampling
    (MS-GRPO). Records of an episode that is not known from its first record to its end have the
    mean weight of the others. A reward that is not finite counts as 0.

    Args:
        reward: Rewards of the records, ordered in time within each stream, ``[N]``.
        is_init: Which are the first of an episode, boolean, ``[N]``.
        done: Which are its last, boolean, ``[N]``.
        first: Where a stream or an episode begins, boolean, ``[N]``; true at the first.

    Keyword Args:
        kind: Which of the two.
        temperature: :math:`T`.
        ratio: Weight of a success over that of a failure.

    Examples:
        >>> reward = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
        >>> start = torch.tensor([True, False, True, False, True])
        >>> end = torch.tensor([False, True, False, True, False])
        >>> record_weights(reward, start, end, start, kind="success", ratio=3.0)
        tensor([3., 3., 1., 1., 2.])
    """
    episode = first.cumsum(0) - 1
    zeros = reward.new_zeros(int(episode[-1]) + 1)
    returns = zeros.index_add(0, episode, reward.nan_to_num(0.0, 0.0, 0.0))
    known = zeros.index_add(0, episode, is_init.to(reward) + done.to(reward)) == 2
    if not known.any():
        return torch.ones_like(reward)
    if kind == "success":
        weight = torch.where(returns > 0, ratio, 1.0)
    else:
        advantage = (returns - returns[known].mean()).abs().where(known, -torch.inf)
        length = zeros.index_add(0, episode, torch.ones_like(reward))
        weight = torch.softmax(advantage / temperature, 0) / length
    weight, known = weight.to(reward)[episode], known[episode]
    return weight.where(known, weight[known].mean())


class SequenceWeights:
    """Weights of the sequences of several streams: each the mean of its records' weights.

    They are read from replay itself (``is_init`` and, under ``"next"``, ``reward``, ``terminated``
    and ``truncated``), so that a resumed run goes on with the same ones. A sequence may cross
    episode ends. An episode that a resume cut off, ``done`` and neither of the two, has no end.

    Keyword Args:
        **settings: ``kind``, ``temperature`` and ``ratio`` of :func:`record_weights`.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.stale = True
        self._members: list[tuple[WeightedSliceSampler, Storage]] = []
        self._found: dict[WeightedSliceSampler, tuple[Tensor, Tensor]] = {}

    def sampler(self, storage: Storage, **settings: Any) -> WeightedSliceSampler:
        """Return the sampler of one stream; ``settings`` are a :class:`SliceSampler`'s."""
        sampler = WeightedSliceSampler(self, **settings)
        self._members.append((sampler, storage))
        return sampler

    def of(self, sampler: WeightedSliceSampler) -> tuple[Tensor, Tensor]:
        """Return the first slot of each sequence in a stream, and its weight, each ``[W]``."""
        if self.stale:
            self._refresh()
            self.stale = False
        return self._found[sampler]

    def _refresh(self) -> None:
        runs = []
        for sampler, storage in self._members:
            self._found[sampler] = (torch.zeros(0, dtype=torch.long), torch.zeros(0))
            if not len(storage):
                continue
            # Not the observations: a copy of all of them takes seconds.
            records = storage[:].select(*_READ, strict=False)
            begins, _, lengths = sampler._get_stop_and_length(storage)
            # Slots in the order of time: a stream wraps around, and a resumed run has cut it.
            for begin, length in zip(begins[:, 0].tolist(), lengths.tolist(), strict=True):
                slots = (begin + torch.arange(length)) % len(storage)
                runs.append((sampler, slots, records[slots]))
        if not runs:
            return
        samplers, slots, parts = zip(*runs, strict=True)
        lengths = [len(part) for part in parts]
        records = torch.cat(parts)
        reward = raw_reward(records.get("next")).reshape(-1)
        terminated, truncated = (records.get(end).reshape(-1) for end in _ENDS)
        done = terminated | truncated
        is_init = records.get("is_init").reshape(-1)
        first = is_init.clone()
        first[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
        weights = record_weights(reward, is_init, done, first, **self.settings).split(lengths)
        for sampler, run, weight in zip(samplers, slots, weights, strict=True):
            size = sampler.slice_len
            if len(run) >= size:
                new = run[: len(run) - size + 1], weight.unfold(0, size, 1).mean(-1)
                pairs = zip(self._found[sampler], new, strict=True)
                self._found[sampler] = tuple(map(torch.cat, pairs))


class WeightedSliceSampler(SliceSampler):
    """Draw each sequence of a stream with a probability in proportion to its weight.

    Behind a ``ReplayBufferEnsemble(p="sampleable")``, which draws a stream by the sum of its
    weights, the same holds of the sequences of all streams. Random numbers are the ensemble's.

    Args:
        weights: Shared by the samplers of all streams; see :meth:`SequenceWeights.sampler`.

    Keyword Args:
        **settings: As of :class:`~torchrl.data.SliceSampler`, with ``slice_len``.
    """

    def __init__(self, weights: SequenceWeights, **settings: Any) -> None:
        super().__init__(**settings)
        self.weights = weights

    def extend(self, index: Tensor) -> None:
        """Take note of records that were written."""
        super().extend(index)
        self.weights.stale = True

    def _sampleable_count(self, storage: Storage, batch_size: int) -> Tensor:
        return self.weights.of(self)[1].sum()

    def _sample_slices(
        self,
        lengths: Tensor,
        start_idx: Tensor,
        stop_idx: Tensor,
        seq_length: int,
        num_slices: int,
        **where: Any,
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        # Each sequence is handed on as a trajectory of just its length, of which one is drawn.
        starts, weight = self.weights.of(self)
        drawn = torch.multinomial(weight, num_slices, replacement=True, generator=self._rng)
        starts, lengths = starts.unsqueeze(-1), torch.full_like(starts, seq_length)
        return super()._sample_slices(
            lengths, starts, starts, seq_length, num_slices, traj_idx=drawn, **where
        )
