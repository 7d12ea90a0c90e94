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
    replacement, from those with :math:`f > 0`. Beside each stands the probability up to which its
    action is to be imitated,

    .. math::
        p_{max} = \frac{n}{n + k},

    where the pool's steps are of :math:`n` episodes and :math:`k` is ``pseudocount``: learned by
    heart, a few lucky episodes would leave a policy that explores no more. A stream that has
    begun to overwrite its oldest records may be counted as one episode more or less.

    Args:
        replay: Buffer ensemble from :func:`~lore_torchrl.dreamer.replay.build_replay`.

    Keyword Args:
        num_steps: Steps of a draw.
        pseudocount: :math:`k`; with 0 there is no limit. Default: ``8.0``.
        seed: Seed of the random stream. Default: ``0``.

    Raises:
        TypeError: If ``replay`` is no such ensemble.
        ValueError: If ``num_steps`` is not positive, or ``pseudocount`` is not from 0 to 1e6.
    """

    def __init__(
        self,
        replay: ReplayBufferEnsemble,
        *,
        num_steps: int,
        pseudocount: float = 8.0,
        seed: int = 0,
    ) -> None:
        if num_steps < 1:
            raise ValueError(f"num_steps must be positive, got {num_steps}.")
        if not 0.0 <= pseudocount <= 1e6:
            raise ValueError(f"pseudocount must be from 0 to 1e6, got {pseudocount}.")
        if not isinstance(replay, ReplayBufferEnsemble):
            raise TypeError(
                f"replay must be a ReplayBufferEnsemble, as build_replay() returns, got "
                f"{type(replay).__name__}: with another one set imitation_ratio=0, which imitates "
                "steps of the batch."
            )
        self.replay = replay
        self.num_steps, self.pseudocount = num_steps, pseudocount
        self.generator = torch.Generator().manual_seed(seed)

    def sample(self) -> TensorDictBase:
        r"""Return state, belief, action, :math:`f` and :math:`p_{max}` of steps ``[num_steps]``.

        Before any step has a positive weight they are arbitrary, of weight 0.
        """
        stored = [
            self.replay[stream].storage[:].select(*_ENTRIES, "is_init", strict=False)
            for stream in range(len(self.replay.writer))
            if len(self.replay[stream])
        ]
        if keys.IMITATION_WEIGHT not in stored[0]:
            raise KeyError(
                f"Replay has no {keys.IMITATION_WEIGHT!r}: pass the records through "
                "lore.returns().prepare(records) before replay.extend(records)."
            )
        weights = torch.cat([part.get(keys.IMITATION_WEIGHT).reshape(-1) for part in stored])
        episode = torch.cat([part.pop("is_init").reshape(-1) for part in stored]).cumsum(0)
        pool = (weights > 0).nonzero().squeeze(-1)
        number = len(episode[pool].unique_consecutive())
        if not number:
            number, pool = 1, pool.new_zeros(1)
        drawn = torch.randint(len(pool), (self.num_steps,), generator=self.generator)
        places = pool[drawn].sort().values
        parts, first = [], 0
        for part in stored:
            inside = places[(places >= first) & (places < first + len(part))] - first
            parts.append(part[inside])
            first += len(part)
        steps = torch.cat(parts)
        weight = steps.get(keys.IMITATION_WEIGHT)
        limit = torch.full_like(weight, number / (number + self.pseudocount))
        return steps.set(keys.IMITATION_LIMIT, limit)

    def extend(self, sample: TensorDictBase, steps: TensorDictBase | None = None) -> TensorDictBase:
        """Put a draw beside a batch, as its entry ``lore_imitation``.

        ``num_steps`` must be a multiple of the batch's records; ``steps`` stand for a draw. After
        the update :func:`~lore_torchrl.dreamer.replay.write_back_latents` writes the new
        weights into replay: without it none is ever positive.
        """
        steps = self.sample() if steps is None else steps
        return sample.set(keys.IMITATION, steps.reshape(*sample.batch_size, -1))

    def state_dict(self) -> dict[str, list[int]]:
        """Return where the random stream is."""
        return {"rng": self.generator.get_state().tolist()}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        """Go on with a saved random stream."""
        self.generator.set_state(torch.tensor(state["rng"], dtype=torch.uint8))


def empty_steps(records: TensorDictBase, num_steps: int) -> TensorDict:
    """Return steps of zeros in the shape that :meth:`ImitationSampler.sample` gives them."""
    zeros = records[:1].select(*_ENTRIES).apply(torch.zeros_like)
    zeros.set(keys.IMITATION_LIMIT, torch.ones_like(zeros.get(keys.IMITATION_WEIGHT)))
    return zeros.expand(num_steps).clone()
