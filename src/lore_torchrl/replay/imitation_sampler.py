"""Draws steps with a positive gain from all of replay, for the imitation alone."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import ReplayBufferEnsemble

from lore_torchrl import keys

_ENTRIES = ("state", "belief", "action", keys.IMITATION_WEIGHT)


class ImitationSampler:
    r"""Draw steps with a positive imitation weight from all of replay, with their latent states.

    Replay holds the latent state that each record was acted in and, beside it, its weight
    :math:`f`, both refreshed whenever the record is trained on. Steps are drawn uniformly, with
    replacement, from those with :math:`f > 0`.

    Args:
        replay: Buffer ensemble from :func:`~lore_torchrl.dreamer.replay.build_replay`.

    Keyword Args:
        num_steps: Steps of a draw.
        seed: Seed of the random stream. Default: ``0``.

    Raises:
        ValueError: If ``num_steps`` is not positive.
    """

    def __init__(self, replay: ReplayBufferEnsemble, *, num_steps: int, seed: int = 0) -> None:
        if num_steps < 1:
            raise ValueError(f"num_steps must be positive, got {num_steps}.")
        self.replay = replay
        self.num_steps = num_steps
        self.generator = torch.Generator().manual_seed(seed)

    def sample(self) -> TensorDictBase:
        """Return state, belief, action and :math:`f` of steps ``[num_steps]``.

        Before any step has a positive weight they are arbitrary, of weight 0.
        """
        stored = [
            self.replay[stream].storage[:].select(*_ENTRIES)
            for stream in range(len(self.replay.writer))
            if len(self.replay[stream])
        ]
        weights = torch.cat([part.get(keys.IMITATION_WEIGHT).reshape(-1) for part in stored])
        pool = (weights > 0).nonzero().squeeze(-1)
        if not len(pool):
            pool = pool.new_zeros(1)
        drawn = torch.randint(len(pool), (self.num_steps,), generator=self.generator)
        places = pool[drawn].sort().values
        parts, first = [], 0
        for part in stored:
            inside = places[(places >= first) & (places < first + len(part))] - first
            parts.append(part[inside])
            first += len(part)
        return torch.cat(parts)

    def state_dict(self) -> dict[str, list[int]]:
        """Return where the random stream is."""
        return {"rng": self.generator.get_state().tolist()}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        """Go on with a saved random stream."""
        self.generator.set_state(torch.tensor(state["rng"], dtype=torch.uint8))


def empty_steps(records: TensorDictBase, num_steps: int) -> TensorDict:
    """Return steps of zeros in the shape that :meth:`ImitationSampler.sample` gives them."""
    zeros = records[:1].select(*_ENTRIES).apply(torch.zeros_like)
    return zeros.expand(num_steps).clone()
