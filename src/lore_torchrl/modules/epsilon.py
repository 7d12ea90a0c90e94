"""Random actions that are at least possible, and a note of where they were taken."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import Bounded, TensorSpec
from torchrl.modules import EGreedyModule

from lore_torchrl import keys
from lore_torchrl.configs.lore import EpsilonConfig


class ValidEGreedyModule(EGreedyModule):
    r"""TorchRL's :math:`\varepsilon`-greedy exploration, restricted to valid actions.

    ``lore_source`` becomes 2 (random) where a random action replaced another one, and
    :meth:`anneal` sets :math:`\varepsilon` for a number of frames at once. Random actions are
    drawn evenly from ``action_mask_key``; continuous ones evenly between their bounds, in all
    dimensions at once. ``action_log_prob`` stays that of the action that was replaced.

    Args:
        spec: Action spec of the acting environment: one-hot, or bounded floats.

    Keyword Args:
        eps_init: First :math:`\varepsilon`. Default: ``0.3``.
        eps_end: Last :math:`\varepsilon`. Default: ``0.1``.
        annealing_num_steps: Frames between the two. Default: ``10_000``.
        action_mask_key: Valid actions, boolean ``[*B, A]``; ``None`` for continuous ones, or
            where all are valid. Default: ``"action_mask"``.

    Raises:
        ValueError: If an epsilon lies outside ``[0, 1]``, grows, or the length is not positive,
            or there is a mask for continuous actions.
    """

    def __init__(
        self,
        spec: TensorSpec,
        *,
        eps_init: float = 0.3,
        eps_end: float = 0.1,
        annealing_num_steps: int = 10_000,
        action_mask_key: NestedKey | None = "action_mask",
    ):
        c = EpsilonConfig(float(eps_init), float(eps_end), annealing_num_steps)
        if action_mask_key is not None and isinstance(spec, Bounded):
            raise ValueError(
                "Continuous actions have no mask: set action_mask_key=None, got "
                f"{action_mask_key!r}."
            )
        super().__init__(spec, action_mask_key=action_mask_key, **vars(c))
        self.out_keys = [*self.out_keys, keys.SOURCE]

    def anneal(self, frames: int) -> None:
        """Set epsilon to its value after ``frames`` frames in all."""
        progress = min(frames / self.annealing_num_steps, 1.0)
        self.eps.copy_(self.eps_init + (self.eps_end - self.eps_init) * progress)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Replace actions at random and mark the rows where that changed something."""
        before = tensordict.get(self.action_key)
        super().forward(tensordict)
        changed = (tensordict.get(self.action_key) != before).any(-1, keepdim=True)
        source = tensordict.get(keys.SOURCE, None)
        if source is None:  # a policy without advice, such as the stock actor
            source = torch.full_like(changed, keys.SOURCE_POLICY, dtype=torch.long)
        random = torch.full_like(source, keys.SOURCE_RANDOM)
        tensordict.set(keys.SOURCE, torch.where(changed, random, source))
        return tensordict
