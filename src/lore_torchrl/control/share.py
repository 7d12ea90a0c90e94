"""Holding the share of advice that the bandit drew, for an episode or a stretch of it."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.data import Bounded, Categorical
from torchrl.envs.transforms import TensorDictPrimer

from lore_torchrl import keys
from lore_torchrl.control.bandit import ShareBandit


class EpisodeShare(TensorDictModuleBase):
    """Hold one arm of a :class:`ShareBandit` for an episode, or for a stretch of it.

    In training, environments whose episode begins draw a new arm; all others, and every
    environment in evaluation mode, keep the one that they carry. Placed in front of the
    acting policy; see :meth:`make_tensordict_primer` for what carries the arm.

    With ``segment_steps`` a new arm is drawn every so many steps of an episode too. Where
    failing episodes are many times as long as others, an arm that fails would otherwise
    hold its environment for most of the training. A stretch then counts as an episode
    for the bandit, with the reward that fell in it: see :meth:`ends`.

    Args:
        bandit: Where arms are drawn.

    Keyword Args:
        segment_steps: Longest stretch under one arm, environment steps; ``None`` for
            whole episodes. Default: ``None``.
        step_count_key: Steps since the reset, ``[*B, 1]``, as
            :class:`~torchrl.envs.StepCounter` writes them; read only with
            ``segment_steps``. Default: ``"step_count"``.
        is_init_key: Boolean ``[*B, 1]``, true at the first step. Default: ``"is_init"``.

    Examples:
        >>> from tensordict import TensorDict
        >>> share = EpisodeShare(ShareBandit(arms=(0.0, 0.5))).eval()
        >>> td = TensorDict(is_init=torch.zeros(2, 1).bool(), batch_size=[2])
        >>> td["lore_arm"], td["lore_arm_prob"] = torch.tensor([[0], [1]]), torch.ones(2, 1)
        >>> share(td)["lore_share"].flatten().tolist()
        [0.0, 0.5]
    """

    def __init__(
        self,
        bandit: ShareBandit,
        *,
        segment_steps: int | None = None,
        step_count_key: NestedKey = "step_count",
        is_init_key: NestedKey = "is_init",
    ):
        super().__init__()
        if segment_steps is not None and segment_steps < 1:
            raise ValueError(
                f"segment_steps must be positive, got {segment_steps}. Use None for episodes."
            )
        self.bandit = bandit
        self.segment_steps = segment_steps
        self.in_keys = [is_init_key, keys.ARM, keys.ARM_PROB]
        if segment_steps is not None:
            self.in_keys.append(step_count_key)
        held = [keys.ARM, keys.ARM_PROB]
        self.out_keys = [*held, keys.SHARE, *(("next", key) for key in held)]

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Return the transform that carries arm and probability from step to step.

        Both start as the arm without advice, drawn for certain.
        """
        return TensorDictPrimer(
            {
                keys.ARM: Categorical(self.bandit.num_arms, shape=(1,), dtype=torch.long),
                keys.ARM_PROB: Bounded(0.0, 1.0, shape=(1,), dtype=torch.float32),
            },
            random=False,
            default_value={keys.ARM: 0, keys.ARM_PROB: 1.0},
            expand_specs=True,
        )

    def ends(self, done: Tensor, step_count: Tensor) -> Tensor:
        """Return where an arm's stretch ends with a step, boolean.

        Args:
            done: Where the episode ends with it, boolean, any shape.
            step_count: Steps since the reset, that one included, same shape.
        """
        return done if self.segment_steps is None else done | (step_count % self.segment_steps == 0)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write arm, probability and share, and carry the first two on."""
        begins, arm, prob, *steps = (tensordict.get(key) for key in self.in_keys)
        if self.training:
            if steps:
                begins = begins | (steps[0] % self.segment_steps == 0)
            # One draw for each row, used or not: how many begin is known to the device only.
            new_arm, new_prob = self.bandit.draw(arm.numel())
            arm = torch.where(begins, new_arm.reshape(arm.shape), arm)
            prob = torch.where(begins, new_prob.reshape(prob.shape), prob)
        written = (arm, prob, self.bandit.arms[arm], arm, prob)
        for key, value in zip(self.out_keys, written, strict=True):
            tensordict.set(key, value)
        return tensordict
