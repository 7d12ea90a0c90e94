"""Crafter, an open world with twenty-two achievements: environment, describer and planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from lore_torchrl.envs.crafter.describer import CrafterDescriber
from lore_torchrl.envs.crafter.environment import CrafterEnv, Observe
from lore_torchrl.envs.crafter.planner import CrafterPlanner
from lore_torchrl.envs.crafter.rules import ACHIEVEMENTS
from lore_torchrl.envs.gym_adapter import GymAdapter, gym
from lore_torchrl.envs.programs.crafter import PROGRAMS


class Crafter(GymAdapter):
    """:class:`CrafterEnv` as an :class:`~lore_torchrl.envs.adapter.EnvAdapter`.

    Args:
        env_id: Not used. Default: ``"Crafter"``.

    ``max_steps``, ``observe`` and ``area`` are as of :class:`CrafterEnv`, with the same defaults;
    ``goal`` is the achievement that counts as success.

    Raises:
        ValueError: If ``goal`` is no achievement, or as :class:`CrafterEnv` does.
    """

    #: What :meth:`summarize_episodes` reads of an episode's last step.
    episode_keys = ("achievements",)
    #: Hand-written programs by kind.
    programs = PROGRAMS

    def __init__(
        self,
        env_id: str = "Crafter",
        *,
        max_steps: int | None = None,
        observe: Observe = "symbolic",
        goal: str = "make_wood_pickaxe",
        area: tuple[int, int] = (64, 64),
    ) -> None:
        if goal not in ACHIEVEMENTS:
            raise ValueError(f"goal must be one of {', '.join(ACHIEVEMENTS)}, got {goal!r}.")
        if not isinstance(area, Sequence) or len(area) != 2:
            raise ValueError(f"area must be a width and a height, such as (64, 64), got {area!r}.")
        self.goal = goal
        self.settings: dict[str, Any] = {
            "observe": observe,
            "max_steps": 10_000 if max_steps is None else max_steps,
            "area": tuple(area),
        }
        CrafterEnv(**self.settings)

    def make_gym(self, pixels: bool = False) -> gym.Env:
        """Make a world: a :class:`CrafterEnv`."""
        return CrafterEnv(**self.settings, render_mode="rgb_array" if pixels else None)

    def success(self, following: TensorDictBase) -> Tensor:
        """Return whether the goal has been unlocked in this episode."""
        return following.get("achievements")[..., ACHIEVEMENTS.index(self.goal), None]

    def make_describer(self, *, memory: bool = False, image: bool = False) -> CrafterDescriber:
        """Make the describer.

        Raises:
            ValueError: With ``memory``: it tells what is seen, and remembers nothing.
        """
        if memory:
            raise ValueError("Crafter's describer remembers nothing: set env.memory=false.")
        return CrafterDescriber(image=image)

    def make_planner(self) -> CrafterPlanner:
        """Make the planner of the achievement tree."""
        return CrafterPlanner()

    def summarize(self, batch: TensorDictBase) -> dict[str, list[float]]:
        """Return what the episodes that ended in a batch unlocked, as :meth:`summarize_episodes`.

        The score, which is no mean, is left out.
        """
        following = batch.get("next")
        ended = following.get("done").squeeze(-1)
        unlocked = following.get("achievements")[ended].float()
        cases = {"crafter/achievements": unlocked.sum(-1)}
        for index, name in enumerate(ACHIEVEMENTS):
            cases[f"crafter/unlock_{name}"] = unlocked[:, index]
        return {name: case.tolist() for name, case in cases.items()}

    def summarize_episodes(self, last: TensorDictBase) -> dict[str, float]:
        r"""Return unlock rates and Crafter's score.

        With :math:`s_i` the share of episodes that unlocked achievement :math:`i`, in percent,

        .. math::
            S = \exp\Bigl(\tfrac{1}{22} \sum_i \ln(1 + s_i)\Bigr) - 1

        Returns:
            ``crafter/score``, ``crafter/achievements`` (mean number) and
            ``crafter/unlock_<name>`` (shares). Empty without an episode.
        """
        unlocked = last.get("achievements").float()
        if not unlocked.numel():
            return {}
        rates = unlocked.reshape(-1, len(ACHIEVEMENTS)).mean(0)
        shares = zip(ACHIEVEMENTS, rates.tolist(), strict=True)
        return {
            "crafter/score": torch.log1p(100 * rates).mean().expm1().item(),
            "crafter/achievements": rates.sum().item(),
            **{f"crafter/unlock_{name}": rate for name, rate in shares},
        }
