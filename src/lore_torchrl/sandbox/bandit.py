"""Finds out whether a program pays: blocks of episodes with it, and blocks without."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from lore_torchrl.advisors.scripted import restore_stream, stream_state

_LEAST_BLOCKS, _STANDARD_ERRORS = 8, 3.0


class ProgramBandit:
    r"""Leaves a program out of some blocks of episodes and compares the raw returns.

    Whether a block has the program is drawn anew for each. With :math:`\bar G` the mean over
    blocks of a block's mean raw return and :math:`s^2` its variance over :math:`n` blocks, the
    program does not pay where

    .. math::
        \bar G_\text{off} - \bar G_\text{on} > 3 \sqrt{s^2_\text{on} / n_\text{on}
            + s^2_\text{off} / n_\text{off}}

    with at least 8 blocks of each kind (`Welch's test <https://doi.org/10.1093/biomet/34.1-2.28>`_).
    Blocks of both kinds are spread over the run, so that the agent's own progress counts in both.

    Keyword Args:
        off_share: Share of blocks without the program, in ``[0, 1)``; 0 never judges.
        block_episodes: Episodes of a block, at least 1.
        seed: Seed of its own random stream. Default: ``0``.
    """

    def __init__(self, *, off_share: float, block_episodes: int, seed: int = 0) -> None:
        self.off_share, self.block_episodes = off_share, block_episodes
        self._random = random.Random(seed)
        self.block, self.on = 0, self._draw()
        self._returns: list[float] = []
        # Number, sum and sum of squares of the block means without and with it.
        self._sums = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]

    def _draw(self) -> bool:
        return self._random.random() >= self.off_share

    def observe(self, block: int, episode_return: float) -> None:
        """Take note of an episode that began in ``block``; those of earlier blocks do not count."""
        if block != self.block:
            return
        self._returns.append(episode_return)
        if len(self._returns) < self.block_episodes:
            return
        mean = sum(self._returns) / len(self._returns)
        sums = self._sums[self.on]
        for index, value in enumerate((1.0, mean, mean * mean)):
            sums[index] += value
        self._returns.clear()
        self.block, self.on = self.block + 1, self._draw()

    @property
    def gain(self) -> float | None:
        """Mean return with the program minus that without, ``None`` while one is unknown."""
        (n_off, off, _), (n_on, on, _) = self._sums
        return on / n_on - off / n_off if n_on and n_off else None

    @property
    def pays(self) -> bool:
        """Whether it has not been shown that the program costs return."""
        if min(n for n, _, _ in self._sums) < _LEAST_BLOCKS:
            return True
        error = sum(max(0.0, sq - s * s / n) / (n - 1) / n for n, s, sq in self._sums)
        # Equal returns differ in their means by no more than their sums are rounded.
        rounding = 1e-9 * max(abs(s / n) for n, s, _ in self._sums)
        return -self.gain <= _STANDARD_ERRORS * math.sqrt(error) + rounding

    def state_dict(self) -> dict[str, Any]:
        """Return progress and random stream in types that JSON holds."""
        return {
            "random": stream_state(self._random),
            "block": self.block,
            "on": self.on,
            "returns": list(self._returns),
            "sums": [list(sums) for sums in self._sums],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        restore_stream(self._random, state_dict["random"])
        self.block, self.on = state_dict["block"], state_dict["on"]
        self._returns = list(state_dict["returns"])
        self._sums = [list(sums) for sums in state_dict["sums"]]
