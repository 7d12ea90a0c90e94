"""Draws recorded steps that paid, for the imitation alone."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import ReplayBufferEnsemble

from lore_torchrl import keys

_ENTRIES = ("state", "belief", "action", keys.WEIGHT)


class PaidSteps:
    r"""Draw steps that paid from all of replay, with the latent states that it holds.

    The world model runs on a few hundred records an update, of which perhaps a tenth paid: too
    few for a steady gradient of the imitation. Replay also holds the latent state that each
    record was acted in and, beside it, how much the step is imitated, :math:`f`, both refreshed
    whenever the record is trained on. Steps are drawn evenly, with replacement, from those with
    :math:`f > 0`; imitating them costs the actor alone, a small network.

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

        Where no step has paid yet they are any steps, of weight 0.
        """
        stored = [
            self.replay[stream].storage[:].select(*_ENTRIES)
            for stream in range(len(self.replay.writer))
            if len(self.replay[stream])
        ]
        weights = torch.cat([part.get(keys.WEIGHT).reshape(-1) for part in stored])
        paid = (weights > 0).nonzero().squeeze(-1)
        pool = paid if len(paid) else torch.zeros(1, dtype=torch.long)
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


def no_steps(records: TensorDictBase, num_steps: int) -> TensorDict:
    """Return steps of zeros in the shape that :meth:`PaidSteps.sample` gives them."""
    zeros = records[:1].select(*_ENTRIES).apply(torch.zeros_like)
    return zeros.expand(num_steps).clone()
