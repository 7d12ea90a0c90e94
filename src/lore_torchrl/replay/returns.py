"""Writes what an episode has returned into its replay rows once it has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBufferEnsemble

from lore_torchrl import keys


class EpisodeReturns:
    r"""Write the discounted return-to-go of every step into replay when its episode ends.

    The posterior of record :math:`t` has seen the observation under ``"next"``, so what is
    gained from it on begins with the reward of record :math:`t + 1`:

    .. math::
        G_t = r_{t+1} + \gamma G_{t+1}, \qquad G_T = 0

    where the episode terminates at :math:`T`. Where it is truncated the return goes on
    behind the limit, so :math:`G_{T-1} = V(s_{T-1})`, the last state that was acted in.
    Until an episode ends its rows hold NaN; so do rows whose episode was cut off by a
    resumed run. A row overwritten in the meantime is left alone.

    Args:
        value: From records ``[N]`` to the critic's value of the state acted in, ``[N, 1]``.

    Keyword Args:
        gamma: :math:`\gamma`, the discount that the critic has learned.

    Raises:
        ValueError: If ``gamma`` is outside ``[0, 1]``.
    """

    def __init__(self, value: Callable[[TensorDictBase], Tensor], *, gamma: float) -> None:
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must lie in [0, 1], got {gamma}.")
        self.value = value
        self.gamma = gamma
        # Of each stream's episode under way: reward and place of its rows.
        self._open: dict[int, deque[tuple[float, int, int]]] = {}

    def prepare(self, records: TensorDictBase) -> TensorDictBase:
        """Add the return, as yet unknown, and an imitation weight of 0 to records ``[N]``."""
        reward = records.get(("next", "reward")).reshape(len(records), 1).float()
        records.set(keys.IMITATION_WEIGHT, torch.zeros_like(reward))
        return records.set(("next", keys.RETURN), torch.full_like(reward, torch.nan))

    def write(
        self, replay: ReplayBufferEnsemble, records: TensorDictBase, where: TensorDictBase
    ) -> None:
        """Note records stored ``where``, and write the returns of the episodes that they end.

        They are ``[N]``, ordered by stream and time.
        """
        streams = records.get("env_index").tolist()
        places = [where.get(name).tolist() for name in ("index", "index_generation")]
        starts = records.get("is_init").reshape(-1).tolist()
        reward, done, terminated = (
            records.get(("next", key)).reshape(-1).tolist()
            for key in ("reward", "done", "terminated")
        )
        rows: list[tuple[int, int, int, float]] = []
        for row, (stream, start) in enumerate(zip(streams, starts, strict=True)):
            if start:  # an episode before it that a resumed run cut off has no end
                self._open.pop(stream, None)
            if stream not in self._open:
                # Of a longer episode replay has lost the first rows.
                self._open[stream] = deque(maxlen=replay[stream].storage.max_size)
            episode = self._open[stream]
            episode.append((reward[row], places[0][row], places[1][row]))
            if done[row]:
                cut = None if terminated[row] else float(self.value(records[row : row + 1]))
                returns = self._returns([reward for reward, _, _ in episode], cut)
                for (_, slot, version), value in zip(episode, returns, strict=True):
                    rows.append((stream, slot, version, value))
                episode.clear()
        if not rows:
            return
        buffer_ids, index, generation, value = map(torch.tensor, zip(*rows, strict=True))
        replay.update_if_present(
            index=TensorDict({"buffer_ids": buffer_ids, "index": index}, [len(rows)]),
            generation=generation,
            patch={("next", keys.RETURN): value.float().unsqueeze(-1)},
        )

    def _returns(self, rewards: list[float], cut: float | None) -> list[float]:
        """Return what follows each row of an episode; ``cut`` is :math:`V(s_{T-1})` or ``None``."""
        returns = [0.0] * len(rewards)
        for row in range(len(rewards) - 2, -1, -1):
            returns[row] = rewards[row + 1] + self.gamma * returns[row + 1]
            if cut is not None:
                returns[row], cut = cut, None
        return returns
