"""Gymnasium environments as the batch that a run collects from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from tensordict import TensorDictBase
from torchrl.data import Binary, Composite
from torchrl.envs import EnvBase, GymWrapper, ParallelEnv, SerialEnv, Transform, TransformedEnv

from lore_torchrl.envs.family import MAX_ENVS, row_seed

try:
    import gymnasium as gym
except ImportError as err:
    raise ImportError("These environments need gymnasium: pip install gymnasium") from err


class Success(Transform):
    """Write ``success``: whether the episode terminated with this step and a reward above 0.

    Bool ``[*B, 1]``, beside ``done``; false at a reset. Put it on the outermost batch.
    """

    def __init__(self) -> None:
        super().__init__(out_keys=["success"])

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rewarded = next_tensordict.get("reward") > 0
        return next_tensordict.set("success", next_tensordict.get("terminated") & rewarded)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        never = torch.zeros_like(tensordict_reset.get("done"))
        return tensordict_reset.set("success", never)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare the entry."""
        shape = (*observation_spec.shape, 1)
        observation_spec["success"] = Binary(
            1, shape=shape, dtype=torch.bool, device=observation_spec.device
        )
        return observation_spec


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
    if not 1 <= num_envs <= MAX_ENVS:
        raise ValueError(f"num_envs must lie in [1, {MAX_ENVS}], got {num_envs}.")
    seeds = [row_seed(seed, row, evaluation=evaluation) for row in range(num_envs)]
    makers = [partial(make_row, make, row, pixels) for row in seeds]
    batched = (ParallelEnv if parallel else SerialEnv)(num_envs, makers)
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
