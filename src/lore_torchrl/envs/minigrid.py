"""MiniGrid as a batched TorchRL environment with one-hot views and an action mask."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torchrl.data import Binary, Bounded, Composite, NonTensor
from torchrl.envs import EnvBase, Transform, TransformedEnv

from lore_torchrl.envs.family import row_seed
from lore_torchrl.envs.gym_batch import gym_batch, make_row
from lore_torchrl.envs.minigrid_describe import ACTIONS, MiniGridDescriber
from lore_torchrl.envs.minigrid_features import (
    MISSION_WORDS,
    NUM_COLORS,
    NUM_DIRECTIONS,
    NUM_OBJECTS,
    NUM_STATES,
    mission_features,
    one_hot_view,
    valid_actions,
)
from lore_torchrl.envs.minigrid_planner import MiniGridPlanner
from lore_torchrl.envs.minigrid_skills import MiniGridSkills, summarize_skills

# Importing pygame, which MiniGrid does, greets on stdout otherwise.
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")

try:
    import gymnasium as gym
    import minigrid  # noqa: F401  (registers the MiniGrid ids)
    from minigrid.core.mission import MissionSpace
    from minigrid.envs import DynamicObstaclesEnv
except ImportError as err:
    raise ImportError(
        "MiniGrid environments need gymnasium and minigrid: pip install 'lore-torchrl[minigrid]'"
    ) from err

_MISSION_BYTES_KEY = "mission_bytes"
_MISSION_BYTES = 512


@lru_cache(maxsize=4096)
def _decode_mission(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode()


class _TensorObservation(gym.ObservationWrapper):
    """Turns the mission into bytes: TorchRL's batched envs move tensors 1.6 times faster."""

    def __init__(self, env: gym.Env, *, with_mission: bool):
        super().__init__(env)
        self._with_mission = with_mission
        spaces = {
            "image": env.observation_space["image"],
            "direction": gym.spaces.Box(0, NUM_DIRECTIONS - 1, (1,), np.int64),
        }
        if with_mission:
            spaces[_MISSION_BYTES_KEY] = gym.spaces.Box(0, 255, (_MISSION_BYTES,), np.uint8)
        self.observation_space = gym.spaces.Dict(spaces)

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        out = {
            "image": observation["image"],
            "direction": np.array([observation["direction"]], dtype=np.int64),
        }
        if self._with_mission:
            raw = observation["mission"].encode()
            if len(raw) > _MISSION_BYTES:
                raise ValueError(
                    f"A mission may have {_MISSION_BYTES} bytes, got {len(raw)}: {raw.decode()!r}."
                )
            out[_MISSION_BYTES_KEY] = np.frombuffer(
                bytearray(raw.ljust(_MISSION_BYTES, b"\0")), np.uint8
            )
        return out


class MiniGridObservation(Transform):
    """Write features, action mask, mission text and success beside the raw view.

    It belongs on the outermost (batched) environment, where it encodes all rows at once.

    Args:
        mission: The mission where it never varies; ``None`` reads it from each row.
        encode_mission: Whether ``observation`` ends with :func:`mission_features`.
        num_actions: Number of actions of the environment. Default: ``7``.
        done_is_valid: See :func:`valid_actions`. Default: ``False``.
    """

    def __init__(
        self,
        *,
        mission: str | None,
        encode_mission: bool,
        num_actions: int = len(ACTIONS),
        done_is_valid: bool = False,
    ):
        super().__init__(in_keys=["image", "direction"], out_keys=["observation", "action_mask"])
        self.mission = mission
        self.encode_mission = encode_mission
        self.num_actions = num_actions
        self.done_is_valid = done_is_valid

    def _missions(self, tensordict: TensorDictBase) -> list[str]:
        raw = tensordict.pop(_MISSION_BYTES_KEY).cpu().numpy()
        return [_decode_mission(row.tobytes()) for row in raw.reshape(-1, _MISSION_BYTES)]

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        image = next_tensordict.get("image")
        features = one_hot_view(image, next_tensordict.get("direction"))
        batch = image.shape[:-3]
        if self.mission is not None:
            missions = [self.mission]
            text = NonTensorData(self.mission, batch_size=batch)
        else:
            missions = self._missions(next_tensordict)
            text = (
                NonTensorStack(*[NonTensorData(mission) for mission in missions])
                if batch
                else NonTensorData(missions[0])
            )
        if self.encode_mission:
            words = torch.stack([mission_features(mission) for mission in missions])
            words = words.to(features.device).expand(*batch, -1) if batch else words[0]
            features = torch.cat([features, words], dim=-1)
        next_tensordict.set("observation", features)
        next_tensordict.set(
            "action_mask",
            valid_actions(image, num_actions=self.num_actions, done_is_valid=self.done_is_valid),
        )
        next_tensordict.set("mission", text)
        return next_tensordict

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        next_tensordict = self._call(next_tensordict)
        success = next_tensordict.get("done") & (next_tensordict.get("reward") > 0)
        return next_tensordict.set("success", success)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        tensordict_reset = self._call(tensordict_reset)
        batch = tensordict_reset.get("image").shape[:-3]
        device = tensordict_reset.get("image").device
        return tensordict_reset.set(
            "success", torch.zeros(*batch, 1, dtype=torch.bool, device=device)
        )

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare what the transform writes and drop the mission's byte form."""
        image = observation_spec["image"]
        batch, device = image.shape[:-3], image.device
        size = image.shape[-3] * image.shape[-2] * (NUM_OBJECTS + NUM_COLORS + NUM_STATES)
        size += NUM_DIRECTIONS + (len(MISSION_WORDS) + 1 if self.encode_mission else 0)
        observation_spec["observation"] = Bounded(
            0.0, 1.0, shape=(*batch, size), dtype=torch.float32, device=device
        )
        observation_spec["action_mask"] = Binary(
            self.num_actions, shape=(*batch, self.num_actions), dtype=torch.bool, device=device
        )
        observation_spec["success"] = Binary(1, shape=(*batch, 1), dtype=torch.bool, device=device)
        observation_spec["mission"] = NonTensor(
            shape=batch,
            device=device,
            example_data=self.mission or "",
            batched=self.mission is None,
        )
        if self.mission is None:
            del observation_spec[_MISSION_BYTES_KEY]
        return observation_spec


def _make_gym(env_id: str, max_steps: int | None, env_kwargs: Mapping[str, Any]) -> gym.Env:
    env_kwargs = dict(env_kwargs)
    if max_steps is not None:
        env_kwargs["max_steps"] = max_steps
    # The checker would compare each mission with its space on every step.
    return gym.make(env_id, disable_env_checker=True, **env_kwargs)


def _make_worker(
    pixels: bool,
    *,
    env_id: str,
    max_steps: int | None,
    env_kwargs: Mapping[str, Any],
    with_mission: bool,
) -> gym.Env:
    if pixels:
        env_kwargs = {**env_kwargs, "render_mode": "rgb_array"}
    return _TensorObservation(_make_gym(env_id, max_steps, env_kwargs), with_mission=with_mission)


def _inspect(
    env_id: str,
    *,
    max_steps: int | None,
    encode_mission: bool | None,
    done_is_valid: bool,
    env_kwargs: Mapping[str, Any] | None,
) -> tuple[Callable[[bool], gym.Env], dict[str, Any]]:
    """Return what makes one environment, and the settings of the transform over all."""
    if max_steps is not None and max_steps < 1:
        raise ValueError(f"max_steps must be a positive integer or None, got {max_steps}.")
    env_kwargs = dict(env_kwargs or {})
    probe = _make_gym(env_id, max_steps, env_kwargs)
    spaces = getattr(probe.observation_space, "spaces", {})
    if "mission" not in spaces:
        raise ValueError(f"{env_id} is no environment of MiniGrid or BabyAI: it has no mission.")
    space = spaces["mission"]
    # BabyAI's space is a subclass that generates its missions out of the space's sight.
    varies = type(space) is not MissionSpace or bool(space.ordered_placeholders)
    settings = {
        "mission": None if varies else space.sample(),
        "encode_mission": varies if encode_mission is None else encode_mission,
        "num_actions": int(probe.action_space.n),
        "done_is_valid": done_is_valid,
    }
    probe.close()
    worker = partial(
        _make_worker,
        env_id=env_id,
        max_steps=max_steps,
        env_kwargs=env_kwargs,
        with_mission=varies,
    )
    return worker, settings


def make_single_env(
    env_id: str,
    *,
    seed: int = 0,
    evaluation: bool = False,
    max_steps: int | None = None,
    encode_mission: bool | None = None,
    done_is_valid: bool = False,
    env_kwargs: Mapping[str, Any] | None = None,
) -> TransformedEnv:
    """Return one environment without a batch dimension; see :func:`make_env`.

    Its episodes are those of row 0 of the batched form with the same seed.

    Examples:
        >>> make_single_env("MiniGrid-Empty-5x5-v0").reset()["observation"].shape
        torch.Size([1033])
    """
    worker, settings = _inspect(
        env_id,
        max_steps=max_steps,
        encode_mission=encode_mission,
        done_is_valid=done_is_valid,
        env_kwargs=env_kwargs,
    )
    env = make_row(worker, row_seed(seed, 0, evaluation=evaluation))
    return TransformedEnv(env, MiniGridObservation(**settings))


def make_env(
    env_id: str,
    *,
    num_envs: int = 1,
    seed: int = 0,
    evaluation: bool = False,
    parallel: bool = False,
    max_steps: int | None = None,
    encode_mission: bool | None = None,
    done_is_valid: bool = False,
    pixels: bool = False,
    env_kwargs: Mapping[str, Any] | None = None,
) -> TransformedEnv:
    """Make a batch of MiniGrid environments, of batch size ``[num_envs]`` even for one.

    Entries, at the root and under ``"next"``:

    | key | shape | dtype | meaning |
    | --- | --- | --- | --- |
    | ``observation`` | ``[N, D]`` | float32 | :func:`one_hot_view`, D = 1033 for 7x7 views, plus :func:`mission_features` where encoded |
    | ``image`` | ``[N, 7, 7, 3]`` | uint8 | raw egocentric view, for describers |
    | ``direction`` | ``[N, 1]`` | int64 | compass: 0 right, 1 down, 2 left, 3 up |
    | ``mission`` | ``[N]`` | str | the task as text, non-tensor |
    | ``action_mask`` | ``[N, A]`` | bool | :func:`valid_actions` |
    | ``success`` | ``[N, 1]`` | bool | the episode ended here with a positive reward |
    | ``pixels`` | ``[N, H, W, 3]`` | uint8 | the whole room, for people; with ``pixels`` only |

    Actions are one-hot ``[N, A]``. MiniGrid truncates episodes itself. ``is_init`` is
    the caller's to add: ``env.append_transform(InitTracker())``. The workers hand over
    raw views only; features are computed once for the whole batch.

    Args:
        env_id: Any Gymnasium id of MiniGrid or BabyAI.
        num_envs: Number of rows, up to 1000. Default: ``1``.
        seed: Seed of the run. The k-th episode of row r is the same whenever ``seed`` is.
            Row seeds are :func:`row_seed`. Default: ``0``.
        evaluation: Whether to draw from the held-out seeds, disjoint from those of every
            training ``seed``. Default: ``False``.
        parallel: Whether each row gets its own process. Default: ``False``.
        max_steps: Overrides MiniGrid's step limit. The reward, ``1 - 0.9 * steps /
            max_steps``, scales with it. Default: ``None``, the id's own.
        encode_mission: Whether the features contain the mission, as a bag of words: missions
            that differ in the order of their words alone, as "put the red ball next to the
            green box" and its reverse, look alike. Default: ``None``, where the id's missions
            vary.
        done_is_valid: Whether the mask allows ``done``, which only GoToDoor and
            GoToObject react to. Default: ``False``.
        pixels: Whether to draw each observation, which is slow. Default: ``False``.
        env_kwargs: Passed on to ``gymnasium.make``.

    Raises:
        ValueError: If a number is out of range.

    Examples:
        >>> env = make_env("MiniGrid-DoorKey-5x5-v0", num_envs=2, seed=1)
        >>> rollout = env.rollout(3)
        >>> rollout["next", "observation"].shape
        torch.Size([2, 3, 1033])
        >>> env.close()
    """  # noqa: E501
    worker, settings = _inspect(
        env_id,
        max_steps=max_steps,
        encode_mission=encode_mission,
        done_is_valid=done_is_valid,
        env_kwargs=env_kwargs,
    )
    return gym_batch(
        worker,
        num_envs=num_envs,
        seed=seed,
        evaluation=evaluation,
        parallel=parallel,
        pixels=pixels,
        transform=MiniGridObservation(**settings),
    )


class MiniGrid:
    """MiniGrid and BabyAI as an :class:`~lore_torchrl.envs.family.EnvFamily`.

    Args:
        env_id: Any Gymnasium id of MiniGrid or BabyAI.

    Keyword Args:
        max_steps: Step limit of an episode; ``None`` for the id's own. Default: ``None``.
        encode_mission: See :func:`make_env`. Default: ``None``.
        done_is_valid: See :func:`make_env`. Default: ``False``.

    Raises:
        ValueError: If ``encode_mission`` is neither true, false nor ``None``.
    """

    def __init__(
        self,
        env_id: str,
        *,
        max_steps: int | None = None,
        encode_mission: bool | None = None,
        done_is_valid: bool = False,
    ) -> None:
        if encode_mission not in (None, True, False):
            raise ValueError(f"encode_mission must be true, false or null, got {encode_mission!r}.")
        self.env_id = env_id
        self.settings = {
            "max_steps": max_steps,
            "encode_mission": encode_mission,
            "done_is_valid": done_is_valid,
        }

    def make_env(
        self,
        *,
        num_envs: int,
        seed: int,
        evaluation: bool = False,
        parallel: bool = False,
        pixels: bool = False,
    ) -> EnvBase:
        """Make a batch of environments; those of training tell what skills were shown."""
        env = make_env(
            self.env_id,
            num_envs=num_envs,
            seed=seed,
            evaluation=evaluation,
            parallel=parallel,
            pixels=pixels,
            **self.settings,
        )
        return env if evaluation else env.append_transform(MiniGridSkills())

    def make_describer(self, *, memory: bool = False, image: bool = False) -> MiniGridDescriber:
        """Make the describer of views.

        Raises:
            ValueError: With ``memory`` where other things move: a step that one of them barred
                would be counted, and the map go wrong.
        """
        if memory and self._things_move():
            raise ValueError(
                f"In {self.env_id} other things move, and a remembered map goes wrong: set "
                "env.memory=false."
            )
        _, room = _inspect(self.env_id, env_kwargs=None, **self.settings)
        known = {name: room[name] for name in ("done_is_valid", "num_actions")}
        return MiniGridDescriber(memory=memory, image=image, **known)

    def _things_move(self) -> bool:
        probe = _make_gym(self.env_id, None, {})
        try:
            return isinstance(probe.unwrapped, DynamicObstaclesEnv)
        finally:
            probe.close()

    def make_planner(self) -> MiniGridPlanner:
        """Make the planner over the describer's facts."""
        return MiniGridPlanner()

    def summarize(self, batch: TensorDictBase) -> dict[str, list[float]]:
        """Return the skills that a batch shows."""
        return summarize_skills(batch)
