"""The transform that shapes the reward by a program's measure of progress."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data.tensor_specs import TensorSpec, Unbounded

from lore_torchrl import keys
from lore_torchrl.advisors.base import Describer
from lore_torchrl.configs.lore import ProgressConfig
from lore_torchrl.sandbox import ProgramSet, UsedProgram
from lore_torchrl.transforms.program import ProgramTransform
from lore_torchrl.transforms.rows import any_true


class ProgressShaping(ProgramTransform):
    r"""Adds potential-based shaping to the reward, and keeps the environment's own.

    With :math:`\Phi = \max(0, \rho)\, p`, where :math:`p` is what ``progress(obs)`` returns, from 0
    to 1, and :math:`\rho` the program's :attr:`~lore_torchrl.sandbox.UsedProgram.score`, the rank
    correlation of :math:`p` with the raw returns that followed (1 while unknown), a step's reward
    becomes

    .. math::
        r + \gamma \Phi(s') - \Phi(s), \qquad \Phi(s_\text{terminal}) = 0

    which leaves the optimal policies as they are, whatever :math:`\Phi` is
    (`Ng et al. 1999 <https://dl.acm.org/doi/10.5555/645528.657613>`_), also while it changes
    (`Devlin and Kudenko 2012 <https://dl.acm.org/doi/10.5555/2343576.2343638>`_). Where an episode
    is truncated :math:`\Phi(s')` is kept, since the value of what follows is.

    The absolute shaping of an episode adds up to at most ``episode_budget``. :math:`\Phi(s')` is 0
    where the program fails, and where the budget would not last for the step and for taking
    :math:`\Phi(s')` back later. So the discounted shaping of an episode that terminates is
    :math:`-\Phi(s_0)`, with :math:`\Phi(s_0)` at most ``episode_budget``, whatever the policy
    does. Where the budget takes :math:`\Phi` back, the reward of a step depends on the episode
    before it, which the agent does not see.

    The learner reads ``reward``. The raw reward is written as ``raw_reward``, under ``"next"``
    for a step and 0 at a reset; :func:`lore_torchrl.keys.raw_reward` returns it.

    Args:
        programs: Programs of kind ``progress``; an episode is shaped by the first of
            :meth:`~lore_torchrl.sandbox.ProgramSet.active`.
        describer: As of :class:`~lore_torchrl.transforms.program.ProgramTransform`.

    Keyword Args:
        gamma: :math:`\gamma`, the learner's discount. Default: ``1 - 1/333``.
        episode_budget: Most absolute shaping of an episode, above 0. Default: ``4.0``.

    Raises:
        ValueError: If ``episode_budget`` is not above 0, or as there.
    """

    kind = "progress"
    writes = (keys.RAW_REWARD,)

    def __init__(
        self,
        programs: ProgramSet,
        describer: Describer,
        *,
        gamma: float = 1.0 - 1.0 / 333.0,
        episode_budget: float = 4.0,
    ) -> None:
        ProgressConfig(episode_budget=episode_budget)
        self.episode_budget = episode_budget
        self.episodes, self.paid = 0, 0.0
        super().__init__(programs, describer, gamma=gamma)

    def _begin(self, rows: int) -> None:
        super()._begin(rows)
        # Of each row: the potential paid last, and the absolute shaping of its episode.
        self._potential, self._spent = np.zeros(rows), np.zeros(rows)

    def _candidates(self) -> list[UsedProgram]:
        return self.programs.active()[:1]

    def _write(
        self,
        tensordict: TensorDictBase,
        found: dict[int, dict[UsedProgram, np.ndarray]],
        before: TensorDictBase | None,
    ) -> None:
        potentials = {
            row: float(value[0]) * max(0.0, 1.0 if used.score is None else used.score)
            for row, values in found.items()
            for used, value in values.items()
        }
        if before is None:
            for row in found:
                self._potential[row] = min(potentials.get(row, 0.0), self.episode_budget)
                self._spent[row] = 0.0
            zeros = torch.zeros(*tensordict.batch_size, 1, device=tensordict.device)
            tensordict.set(keys.RAW_REWARD, zeros)
            return
        done_keys = self.parent.done_keys
        terminated = [k for k in done_keys if (k if isinstance(k, str) else k[-1]) == "terminated"]
        ends = any_true(tensordict, terminated, len(self._potential))
        dones = any_true(tensordict, done_keys, len(self._potential))
        shaping = np.zeros(len(self._potential), dtype=np.float32)
        for row in found:
            shaping[row] = self._pay(row, 0.0 if ends[row] else potentials.get(row, 0.0))
            if dones[row]:
                self.episodes += 1
                self.paid += self._spent[row]
        reward = tensordict.get(self.parent.reward_key)
        tensordict.set(keys.RAW_REWARD, reward.float())
        added = torch.from_numpy(shaping).view(reward.shape).to(reward.device)
        tensordict.set(self.parent.reward_key, reward + added)

    def _pay(self, row: int, after: float) -> float:
        """Return the shaping of a step to potential ``after``, or to 0 within the budget."""
        paid = self.gamma * after - self._potential[row]
        if self._spent[row] + abs(paid) + after > self.episode_budget:
            after, paid = 0.0, -self._potential[row]
        self._spent[row] += abs(paid)
        self._potential[row] = after
        return paid

    def stats(self) -> dict[str, float]:
        """Return the programs' counts, and the mean absolute shaping of a finished episode."""
        return {**self.programs.stats(), "shaping_paid": self.paid / max(1, self.episodes)}

    def _specs(self, batch: Sequence[int]) -> dict[str, TensorSpec]:
        return {keys.RAW_REWARD: Unbounded((*batch, 1), dtype=torch.float32)}
