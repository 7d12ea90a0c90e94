"""MiniGrid and BabyAI, with a describer of egocentric views and a shortest-path planner."""

from __future__ import annotations

import os
from typing import Any

# Importing pygame, which MiniGrid does, greets on stdout otherwise.
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")

try:
    import minigrid  # noqa: F401  (registers the MiniGrid ids)
    from minigrid.core.mission import MissionSpace
    from minigrid.envs import DynamicObstaclesEnv
except ImportError as err:
    raise ImportError(
        "MiniGrid environments need gymnasium and minigrid: pip install 'lore-torchrl[minigrid]'"
    ) from err

from tensordict import TensorDictBase
from torchrl.envs import TransformedEnv

from lore_torchrl.envs.gym_adapter import GymAdapter, gym
from lore_torchrl.envs.minigrid.describer import MiniGridDescriber
from lore_torchrl.envs.minigrid.environment import MiniGridObservation, TensorObservation
from lore_torchrl.envs.minigrid.planner import MiniGridPlanner
from lore_torchrl.envs.minigrid.skills import MiniGridSkills, summarize_skills
from lore_torchrl.envs.programs.minigrid import PROGRAMS


class MiniGrid(GymAdapter):
    """MiniGrid and BabyAI as an :class:`~lore_torchrl.envs.adapter.EnvAdapter`.

    Entries of the environment, at the root and under ``"next"``:

    | key | shape | dtype | meaning |
    | --- | --- | --- | --- |
    | ``observation`` | ``[N, D]`` | float32 | view as one-hot features, D = 1033 for 7x7 views; 55 words more where the id's missions vary |
    | ``image`` | ``[N, 7, 7, 3]`` | uint8 | raw egocentric view, for describers |
    | ``direction`` | ``[N, 1]`` | int64 | compass: 0 right, 1 down, 2 left, 3 up |
    | ``mission`` | ``[N]`` | str | the task as text, non-tensor |
    | ``action_mask`` | ``[N, A]`` | bool | :func:`~lore_torchrl.envs.minigrid.environment.valid_actions` |
    | ``success`` | ``[N, 1]`` | bool | the episode terminated here with a reward above 0 |
    | ``skill_*`` | ``[N, 1]`` | bool, float32 | in training, :class:`~lore_torchrl.envs.minigrid.skills.MiniGridSkills` |
    | ``pixels`` | ``[N, H, W, 3]`` | uint8 | the whole grid, for people; with ``pixels`` only |

    Actions are one-hot ``[N, A]``.

    Args:
        env_id: Any Gymnasium id of MiniGrid or BabyAI.

    Keyword Args:
        max_steps: Step limit of an episode; ``None`` for the id's own. The reward,
            ``1 - 0.9 * steps / max_steps``, scales with it. Default: ``None``.
        done_is_valid: Whether ``done`` is valid, and said to end the mission: only GoToDoor and
            GoToObject react to it. Default: ``False``.

    Raises:
        ValueError: If ``env_id`` is another kind of environment.
    """  # noqa: E501

    #: Hand-written programs by kind.
    programs = PROGRAMS

    def __init__(
        self, env_id: str, *, max_steps: int | None = None, done_is_valid: bool = False
    ) -> None:
        self.env_id = env_id
        self.settings = {} if max_steps is None else {"max_steps": max_steps}
        self.done_is_valid = done_is_valid
        probe = gym.make(env_id, disable_env_checker=True)
        space = getattr(probe.observation_space, "spaces", {}).get("mission")
        if space is None:
            raise ValueError(
                f"{env_id} is no environment of MiniGrid or BabyAI: it has no mission."
            )
        # BabyAI's space is a subclass that generates its missions out of the space's sight.
        varies = type(space) is not MissionSpace or bool(space.ordered_placeholders)
        self.mission: str | None = None if varies else space.sample()
        self.num_actions = int(probe.action_space.n)
        self.others_move = isinstance(probe.unwrapped, DynamicObstaclesEnv)
        probe.close()

    def make_gym(self, pixels: bool = False) -> gym.Env:
        """Make one grid with its view, and its mission where that varies, as arrays."""
        # The checker would compare each mission with its space on every step.
        mode = "rgb_array" if pixels else None
        env = gym.make(self.env_id, disable_env_checker=True, render_mode=mode, **self.settings)
        return TensorObservation(env, with_mission=self.mission is None)

    def make_env(self, *, evaluation: bool = False, **settings: Any) -> TransformedEnv:
        """Make a batch of environments; those of training also record skills."""
        env = super().make_env(evaluation=evaluation, **settings)
        actions = {"num_actions": self.num_actions, "done_is_valid": self.done_is_valid}
        env.append_transform(MiniGridObservation(mission=self.mission, **actions))
        return env if evaluation else env.append_transform(MiniGridSkills())

    def make_describer(self, *, memory: bool = False, image: bool = False) -> MiniGridDescriber:
        """Make the describer of views.

        Raises:
            ValueError: With ``memory`` where other things move.
        """
        if memory and self.others_move:
            raise ValueError(
                f"In {self.env_id} other things move, and a remembered map goes wrong: set "
                "env.memory=false."
            )
        actions = {"num_actions": self.num_actions, "done_is_valid": self.done_is_valid}
        return MiniGridDescriber(memory=memory, image=image, **actions)

    def make_planner(self) -> MiniGridPlanner:
        """Make the planner over the describer's facts."""
        return MiniGridPlanner()

    def summarize(self, batch: TensorDictBase) -> dict[str, list[float]]:
        """Return the skills that a batch shows: see :func:`summarize_skills`."""
        return summarize_skills(batch)
