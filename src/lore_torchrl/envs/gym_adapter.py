"""Base of the adapters of Gymnasium environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase, GymWrapper, TransformedEnv

from lore_torchrl.envs.batch import Success, batch_rows

try:
    import gymnasium as gym
except ImportError as err:
    raise ImportError("These environments need gymnasium: pip install gymnasium") from err


def make_row(make: Callable[[bool], gym.Env], seed: int, pixels: bool = False) -> EnvBase:
    """Make one row of a batch, with its own random stream.

    ``make`` is as :meth:`GymAdapter.make_gym`, ``seed`` that of all episodes.

    Raises:
        ValueError: If it is to be drawn and its ``render_mode`` is not ``"rgb_array"``.
    """
    env = make(pixels)
    if pixels and env.render_mode != "rgb_array":
        raise ValueError(
            f"{type(env.unwrapped).__name__} cannot be drawn: give it render_mode='rgb_array' and "
            "a render() that returns uint8 [H, W, 3]."
        )
    actions = env.action_space
    if isinstance(actions, gym.spaces.Discrete) and actions.start:
        # GymWrapper counts from 0 on.
        counted = gym.spaces.Discrete(actions.n)
        env = gym.wrappers.TransformAction(env, lambda action: action + actions.start, counted)
    # Seeds the generator that all later resets of this environment draw from.
    env.reset(seed=seed)
    return GymWrapper(env, from_pixels=pixels, pixels_only=False)


class GymAdapter(ABC):
    """Base of an :class:`~lore_torchrl.envs.adapter.EnvAdapter` of a Gymnasium environment."""

    @abstractmethod
    def make_gym(self, pixels: bool = False) -> gym.Env:
        """Make one environment.

        Its observations are a ``Dict`` with ``observation``, a float32 ``Box`` of one dimension;
        its actions are ``Discrete`` or a bounded ``Box``. With ``parallel`` the adapter must be
        picklable, with ``pixels`` its ``render_mode`` be ``"rgb_array"``.
        """

    def success(self, following: TensorDictBase) -> Tensor:
        """Return ``success``, bool ``[N, 1]``, of a step: terminated with a reward above 0."""
        return following.get("terminated") & (following.get("reward") > 0)

    def make_env(self, *, pixels: bool = False, **batch: Any) -> TransformedEnv:
        """Make a batch: see :meth:`lore_torchrl.envs.adapter.EnvAdapter.make_env`."""
        rows = batch_rows(partial(make_row, self.make_gym, pixels=pixels), **batch)
        return TransformedEnv(rows, Success(self.success))
