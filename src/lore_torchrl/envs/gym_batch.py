"""Gymnasium environments as the batch that a run collects from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from torchrl.envs import EnvBase, GymWrapper, Transform, TransformedEnv

from lore_torchrl.envs.batch import Success, batch_rows

try:
    import gymnasium as gym
except ImportError as err:
    raise ImportError("These environments need gymnasium: pip install gymnasium") from err


def gym_batch(
    make: Callable[[bool], gym.Env],
    *,
    num_envs: int,
    seed: int,
    evaluation: bool = False,
    parallel: bool = False,
    pixels: bool = False,
    transform: Transform | None = None,
) -> TransformedEnv:
    """Make a batch of Gymnasium environments, seeded row by row.

    Args:
        make: Makes one environment, with ``render_mode="rgb_array"`` where its argument is
            true. Its observations are a ``Dict`` with ``observation``, a float32 ``Box`` of
            one dimension, and its actions are ``Discrete`` or a bounded ``Box``. With
            ``parallel`` it must be picklable.

    Keyword Args:
        num_envs: Number of rows, up to 1000.
        seed: Seed of the run: see :func:`~lore_torchrl.envs.family.row_seed`.
        evaluation: Whether to draw from the held-out seeds. Default: ``False``.
        parallel: Whether each row gets its own process. Default: ``False``.
        pixels: Whether to draw each observation by its ``render()``. Default: ``False``.
        transform: Writes ``success``, and whatever else, for all rows at once.
            Default: :class:`Success`.

    Raises:
        ValueError: If ``num_envs`` is out of range, or ``pixels`` are asked of an environment
            whose ``render_mode`` is not ``"rgb_array"``.
    """
    batched = batch_rows(
        partial(make_row, make, pixels=pixels),
        num_envs=num_envs,
        seed=seed,
        evaluation=evaluation,
        parallel=parallel,
    )
    return TransformedEnv(batched, Success() if transform is None else transform)


def make_row(make: Callable[[bool], gym.Env], seed: int, pixels: bool = False) -> EnvBase:
    """Make one row of the batch, with its own random stream.

    Args:
        make: As in :func:`gym_batch`.
        seed: Of all its episodes.
        pixels: Whether to draw each observation. Default: ``False``.
    """
    env = make(pixels)
    if pixels and env.render_mode != "rgb_array":
        raise ValueError(
            f"{type(env.unwrapped).__name__} cannot be drawn: give it render_mode='rgb_array' and "
            "a render() that returns uint8 [H, W, 3]."
        )
    # Seeds the generator that all later resets of this environment draw from.
    env.reset(seed=seed)
    return GymWrapper(env, from_pixels=pixels, pixels_only=False)


class GymFamily(ABC):
    """Base of an :class:`~lore_torchrl.envs.family.EnvFamily` of Gymnasium environments."""

    @abstractmethod
    def make_gym(self, pixels: bool = False) -> gym.Env:
        """Make one environment, as :func:`gym_batch` wants it.

        Args:
            pixels: Whether it is to be drawn. Default: ``False``.
        """

    def make_success(self) -> Transform:
        """Make what writes ``success``: :class:`~lore_torchrl.envs.batch.Success`."""
        return Success()

    def make_env(
        self,
        *,
        num_envs: int,
        seed: int,
        evaluation: bool = False,
        parallel: bool = False,
        pixels: bool = False,
    ) -> EnvBase:
        """Make a batch: see :class:`~lore_torchrl.envs.family.EnvFamily`."""
        return gym_batch(
            self.make_gym,
            num_envs=num_envs,
            seed=seed,
            evaluation=evaluation,
            parallel=parallel,
            pixels=pixels,
            transform=self.make_success(),
        )
