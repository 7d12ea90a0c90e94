"""Checks of an adapter before a run: that its parts exist and fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torchrl.data import Bounded, MultiOneHot, OneHot, TensorSpec
from torchrl.envs import EnvBase

from lore_torchrl.advisors.base import AdviceRequest, Describer, question_of
from lore_torchrl.envs.adapter import EnvAdapter, anchors_of, check_picture, planner_of, read_row
from lore_torchrl.envs.batch import close_env


class Sizes(NamedTuple):
    """What an agent must fit.

    Size of ``observation`` and shape of ``frame``, ``None`` where there is none; number of
    actions, or of dimensions of a continuous one, and its lowest and highest value, each ``[A]``.
    """

    observation_dim: int | None
    frame_shape: tuple[int, ...] | None
    num_actions: int
    action_bounds: tuple[torch.Tensor, torch.Tensor] | None = None


def check_adapter(
    adapter: EnvAdapter,
    *,
    memory: bool = False,
    image: bool = False,
    abstract_states: bool = False,
    masked: bool = False,
    advised: bool = True,
) -> Sizes:
    """Make two environments, ask a question before and after one step, and ask the planner.

    Args:
        adapter: What to check.

    Keyword Args:
        memory: Whether its describer is asked to remember. Default: ``False``.
        image: Whether requests must hold a picture. Default: ``False``.
        abstract_states: Whether an ``abstract_state`` is needed. Default: ``False``.
        masked: Whether one-hot actions need an ``action_mask``. Default: ``False``.
        advised: Whether there is a describer to look at. Default: ``True``.

    Raises:
        TypeError: If a part is missing, or a key is not text.
        ValueError: If shapes, actions or keys do not fit, or the planner's answer.
    """
    name = type(adapter).__name__
    readers = dict.fromkeys(getattr(adapter, "episode_keys", ()), "summarize_episodes()")
    if readers and not hasattr(adapter, "summarize_episodes"):
        raise TypeError(f"{name} has episode_keys, but no summarize_episodes() that reads them.")
    readers |= dict.fromkeys(("success", "reward", "done", "terminated"), "every run")
    if advised:
        describer = adapter.make_describer(memory=memory, image=image)
        readers |= dict.fromkeys(describer.in_keys, type(describer).__name__)
        if abstract_states and not hasattr(describer, "abstract_state"):
            raise TypeError(
                f"{type(describer).__name__} has no abstract_state(): add it, or set "
                "lore.calls.abstract_states=false and lore.calls.answers_averaged=null."
            )
    env = adapter.make_env(num_envs=2, seed=0, evaluation=False, parallel=False, pixels=False)
    try:
        if masked and _is_one_hot(env.action_spec):
            readers["action_mask"] = "lore.epsilon"
        sizes = _check_specs(env, readers, name)
        if advised:
            actions = _named_actions(describer, sizes, name)
            # A stock run, which has no describer, goes on from the same random numbers.
            with torch.random.fork_rng(devices=[]):
                tensordict = env.reset()
                keys = ("cache_key", "abstract_state")[: 1 + abstract_states]
                request = _check_question(describer, tensordict, None, keys)
                following = env.step(tensordict.set("action", actions[:1].repeat(2, 1)))["next"]
                if not following["done"][0]:
                    _check_question(describer, following, 0, keys)
            if image:
                check_picture(request, describer)
            values = planner(request) if (planner := planner_of(adapter)) else None
            if values is not None and len(values) != len(request.actions):
                raise ValueError(
                    f"{name}.make_planner(): a planner returns None or one number for each of "
                    f"{list(request.actions)}, got {values}."
                )
    finally:
        close_env(env)
    return sizes


def _check_specs(env: EnvBase, readers: Mapping[str, str], name: str) -> Sizes:
    if tuple(env.batch_size) != (2,):
        raise ValueError(
            f"{name}.make_env(num_envs=2) has batch size {list(env.batch_size)}, not [2]: wrap "
            "single environments in a SerialEnv."
        )
    specs, actions = env.full_observation_spec, env.action_spec
    known = {*specs.keys(True, True), *env.reward_keys, *env.done_keys}
    for key, reader in readers.items():
        if key not in known:
            raise ValueError(f"{name}: the environment has no entry {key!r}, which {reader} reads.")
    if "observation" not in specs and "frame" not in specs:
        raise ValueError(f"{name} has neither 'observation' nor 'frame': the policy sees nothing.")
    for key, dtype, sides in (
        ("success", torch.bool, (1,)),
        ("action_mask", torch.bool, actions.shape[-1:]),
        ("observation", torch.float32, "D"),
        ("frame", torch.uint8, "CHW"),
    ):
        if key not in specs or (key == "action_mask" and key not in readers):
            continue
        got = tuple(specs[key].shape[1:])
        fits = len(got) == len(sides) if isinstance(sides, str) else got == tuple(sides)
        if not fits or specs[key].dtype != dtype:
            raise ValueError(
                f"{name}: {key!r} must be {dtype} [{', '.join(map(str, ('N', *sides)))}], got "
                f"{specs[key].dtype} [{', '.join(map(str, ('N', *got)))}]."
            )
    for key, spec in (
        *env.full_reward_spec.items(True, True),
        *env.full_done_spec.items(True, True),
    ):
        if tuple(spec.shape[1:]) != (1,):
            got = ", ".join(map(str, ("N", *spec.shape[1:])))
            raise ValueError(f"{name}: {key!r} must be [N, 1], got [{got}].")
    return Sizes(
        specs["observation"].shape[-1] if "observation" in specs else None,
        tuple(specs["frame"].shape[1:]) if "frame" in specs else None,
        actions.shape[-1],
        None if _is_one_hot(actions) and len(actions.shape) == 2 else _bounds(actions, name),
    )


def _is_one_hot(spec: TensorSpec) -> bool:
    # TorchRL's spec of several choices at once is a kind of one-hot one.
    return isinstance(spec, OneHot) and not isinstance(spec, MultiOneHot)


def _bounds(spec: TensorSpec, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest and highest value of a continuous action, each ``[A]``."""
    if isinstance(spec, Bounded) and len(spec.shape) == 2 and spec.dtype.is_floating_point:
        low, high = spec.space.low[0].float(), spec.space.high[0].float()
        if (low.isfinite() & high.isfinite()).all():
            return low, high
    raise ValueError(
        f"{name}: the action must be one-hot, [N, A], or floats [N, A] within finite bounds, got "
        f"{spec}."
    )


def _named_actions(describer: Describer, sizes: Sizes, name: str) -> torch.Tensor:
    """Return what each of the describer's names stands for: one-hot, or its anchors."""
    kind, names, anchors = type(describer).__name__, describer.actions, anchors_of(describer)
    if sizes.action_bounds is None:
        if sizes.num_actions != len(names):
            raise ValueError(
                f"{name} has {sizes.num_actions} actions, {kind} names {len(names)}: {list(names)}."
            )
        return torch.eye(len(names), dtype=torch.long)
    shape, (low, high) = [len(names), sizes.num_actions], sizes.action_bounds
    if anchors is None or list(anchors.shape) != shape:
        raise ValueError(
            f"{name} has continuous actions: {kind} needs anchors, one action for each of its "
            f"names, {shape}, got {None if anchors is None else list(anchors.shape)}."
        )
    if not ((anchors >= low) & (anchors <= high)).all():
        raise ValueError(
            f"{kind}: anchors must lie within the action's bounds, {low.tolist()} to "
            f"{high.tolist()}, got {anchors.tolist()}."
        )
    return anchors


def _check_question(
    describer: Describer, tensordict: TensorDictBase, action: int | None, keys: Sequence[str]
) -> AdviceRequest:
    kind, seen = type(describer).__name__, read_row(tensordict, 0, describer.in_keys)
    describer.observe(0, seen, action, reset=action is None)
    for part in keys:
        key = getattr(describer, part)(0, seen)
        if not isinstance(key, str):
            raise TypeError(f"{kind}.{part}() must return text, got {type(key).__name__}.")
    return question_of(describer, 0, seen)
