"""What can be seen of a family before a run: that its parts exist and fit together."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from tensordict import TensorDictBase
from torchrl.data import Bounded, MultiOneHot, OneHot, TensorSpec
from torchrl.envs import EnvBase

from lore_torchrl.advisors.base import AdviceRequest, Describer
from lore_torchrl.advisors.scripted import Planner
from lore_torchrl.envs.family import EnvFamily, Sizes, anchors_of, close_env, planner_of, read_row


def check_family(
    family: EnvFamily,
    *,
    memory: bool = False,
    image: bool = False,
    coarse: bool = False,
    masked: bool = False,
    advised: bool = True,
) -> Sizes:
    """Make environments of a family, and see that they and their describer fit together.

    Args:
        family: The family.

    Keyword Args:
        memory: Whether its describer is asked to remember. Default: ``False``.
        image: Whether requests must hold a picture. Default: ``False``.
        coarse: Whether a ``coarse_key`` is needed. Default: ``False``.
        masked: Whether one-hot actions need an ``action_mask``. Default: ``False``.
        advised: Whether there is a describer to look at. Default: ``True``.

    Raises:
        TypeError: If the describer lacks something, or a spec is of another kind.
        ValueError: If shapes, actions or keys do not fit, or the planner fails.
    """
    name = type(family).__name__
    if hasattr(family, "episode_keys") and not hasattr(family, "summarize_episodes"):
        raise TypeError(f"{name} has episode_keys, but no summarize_episodes() that reads them.")
    needed = dict.fromkeys(getattr(family, "episode_keys", ()), "summarize_episodes()")
    for key in ("reward", "done", "terminated"):
        needed.pop(key, None)
    needed["success"] = "every run"
    if advised:
        describer = family.make_describer(memory=memory, image=image)
        _check_describer(describer, coarse=coarse)
        needed |= dict.fromkeys(describer.in_keys, type(describer).__name__)
    env = family.make_env(num_envs=2, seed=0)
    if not isinstance(env, EnvBase):
        raise TypeError(
            f"{name}.make_env() must return a TorchRL environment, got {type(env).__name__}."
        )
    if masked and _is_one_hot(env.action_spec):
        needed["action_mask"] = "lore.epsilon"
    try:
        sizes = _check_specs(env, needed, name)
        if advised:
            if sizes.action_bounds is not None:
                _check_anchors(describer, sizes, name)
            elif sizes.num_actions != len(describer.actions):
                raise ValueError(
                    f"{name} has {sizes.num_actions} actions, {type(describer).__name__} names "
                    f"{len(describer.actions)}: {list(describer.actions)}."
                )
            # A stock run, which has no describer, goes on from the same random numbers.
            with torch.random.fork_rng(devices=[]):
                request = _check_questions(describer, env, name, image=image, coarse=coarse)
                _check_planner(planner_of(family), request, name)
    finally:
        close_env(env)
    return sizes


def _check_describer(describer: Describer, *, coarse: bool) -> None:
    needed = dict.fromkeys(("in_keys", "actions", "observe", "cache_key", "request"), "")
    if coarse:
        needed["coarse_key"] = " (or set lore.calls.coarse=false)"
    for part, hint in needed.items():
        if not hasattr(describer, part):
            raise TypeError(
                f"{type(describer).__name__} has no {part!r}, which a describer needs{hint}: see "
                "lore_torchrl.advisors.base.Describer."
            )
    for part in ("in_keys", "actions"):
        if isinstance(getattr(describer, part), str):
            raise TypeError(
                f"{type(describer).__name__}.{part} must list names, got the single text "
                f"{getattr(describer, part)!r}."
            )


def _check_specs(env: EnvBase, needed: Mapping[str, str], name: str) -> Sizes:
    if tuple(env.batch_size) != (2,):
        raise ValueError(
            f"{name}.make_env(num_envs=2) has batch size {list(env.batch_size)}, not [2]: wrap "
            "single environments in a SerialEnv."
        )
    spec = env.full_observation_spec
    for key, reader in needed.items():
        if key not in spec.keys(True, True):
            raise ValueError(f"{name}: the environment has no entry {key!r}, which {reader} reads.")
    widths = {"success": 1, "action_mask": env.action_spec.shape[-1]}
    for key in needed.keys() & widths.keys():
        if (spec[key].dtype, tuple(spec[key].shape)) != (torch.bool, (2, widths[key])):
            raise ValueError(
                f"{name}: {key!r} must be torch.bool [N, {widths[key]}], got {spec[key].dtype} "
                f"[N{''.join(f', {side}' for side in spec[key].shape[1:])}]."
            )
    seen = {key: spec[key] for key in ("observation", "frame") if key in spec}
    if not seen:
        raise ValueError(
            f"{name}: the environment has neither 'observation' nor 'frame', so the policy sees "
            "nothing."
        )
    for key, dtype, sides in (("observation", torch.float32, "D"), ("frame", torch.uint8, "CHW")):
        if key in seen and (seen[key].dtype, seen[key].ndim) != (dtype, 1 + len(sides)):
            raise ValueError(
                f"{name}: {key!r} must be {dtype} [N, {', '.join(sides)}], got {seen[key].dtype} "
                f"{list(seen[key].shape)}."
            )
    actions = env.action_spec
    discrete = _is_one_hot(actions) and len(actions.shape) == 2
    shapes = {key: tuple(part.shape[1:]) for key, part in seen.items()}
    return Sizes(
        shapes["observation"][0] if "observation" in shapes else None,
        shapes.get("frame"),
        actions.shape[-1],
        None if discrete else _bounds(actions, name),
    )


def _is_one_hot(spec: TensorSpec) -> bool:
    # TorchRL's spec of several choices at once is a kind of one-hot one.
    return isinstance(spec, OneHot) and not isinstance(spec, MultiOneHot)


def _bounds(spec: TensorSpec, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest and highest value of a continuous action, each ``[A]``."""
    fits = isinstance(spec, Bounded) and len(spec.shape) == 2 and spec.dtype.is_floating_point
    if not fits:
        raise ValueError(
            f"{name}: the action must be one-hot, [N, A], or bounded floats, [N, A], got "
            f"{type(spec).__name__} {list(spec.shape)} of {spec.dtype}."
        )
    low, high = spec.space.low[0].float(), spec.space.high[0].float()
    if not (low.isfinite() & high.isfinite()).all():
        raise ValueError(
            f"{name}: a continuous action needs finite bounds, got {low.tolist()} to "
            f"{high.tolist()}."
        )
    return low, high


def _check_anchors(describer: Describer, sizes: Sizes, name: str) -> None:
    kind, anchors = type(describer).__name__, anchors_of(describer)
    shape = [len(describer.actions), sizes.num_actions]
    if anchors is None or list(anchors.shape) != shape:
        raise ValueError(
            f"{name} has continuous actions: {kind} needs anchors, one action for each of its "
            f"names, {shape}, got {None if anchors is None else list(anchors.shape)}."
        )
    low, high = sizes.action_bounds
    if not ((anchors >= low) & (anchors <= high)).all():
        raise ValueError(
            f"{kind}: anchors must lie within the action's bounds, {low.tolist()} to "
            f"{high.tolist()}, got {anchors.tolist()}."
        )


def check_picture(request: AdviceRequest, describer: Describer) -> None:
    """Raise ``ValueError`` where a question that is to hold a picture holds none."""
    if request.image is None:
        raise ValueError(
            f"{type(describer).__name__}.request() holds no picture, which advisor.send_image "
            "sends: set advisor.send_image=false."
        )


def _check_planner(planner: Planner | None, request: AdviceRequest, name: str) -> None:
    """Raise where a family's planner cannot answer its describer's question."""
    wanted = f"{name}.make_planner(): a planner returns None or {len(request.actions)} numbers"
    try:
        values = None if planner is None else planner(request)
        numbers = None if values is None else [float(value) for value in values]
    except Exception as error:
        raise ValueError(f"{wanted}; at the first question this one fails: {error!r}.") from error
    odd = numbers is not None and len(numbers) != len(request.actions)
    if odd or any(map(math.isnan, numbers or [])):
        raise ValueError(f"{wanted}, one for each of {list(request.actions)}; got {numbers}.")


def _check_questions(
    describer: Describer, env: EnvBase, name: str, *, image: bool, coarse: bool
) -> AdviceRequest:
    tensordict = env.reset()
    request = _check_question(describer, tensordict, None, coarse=coarse)
    if image:
        check_picture(request, describer)
    # A step by the first of the actions that it names.
    anchors = anchors_of(describer)
    if anchors is None:
        action = env.action_spec.zero()
        action[:, 0] = 1
    else:
        action = anchors[:1].expand(2, -1).clone()
    try:
        following = env.step(tensordict.set("action", action)).get("next")
    except Exception as error:
        raise ValueError(
            f"{name}: the first step of its environment fails: {error!r}. One of Gymnasium returns "
            "observation, reward, terminated, truncated and info."
        ) from error
    if not following.get("done")[0]:
        _check_question(describer, following, 0, coarse=coarse)
    return request


def _check_question(
    describer: Describer, tensordict: TensorDictBase, action: int | None, *, coarse: bool
) -> AdviceRequest:
    kind = type(describer).__name__
    seen = read_row(tensordict, 0, describer.in_keys)
    describer.observe(0, seen, action, reset=action is None)
    key = describer.cache_key(0, seen)
    for part in ("cache_key", "coarse_key") if coarse else ("cache_key",):
        found = getattr(describer, part)(0, seen)
        if not isinstance(found, str):
            raise TypeError(f"{kind}.{part}() must return text, got {type(found).__name__}.")
    request = describer.request(0, seen)
    if not isinstance(request, AdviceRequest):
        raise TypeError(
            f"{kind}.request() must return an AdviceRequest, got {type(request).__name__}."
        )
    if request.cache_key != key:
        raise ValueError(
            f"{kind}: the request's cache_key {request.cache_key!r} is not what cache_key() "
            f"gives, {key!r}: the answer would never be found again."
        )
    if tuple(request.actions) != tuple(describer.actions):
        raise ValueError(
            f"{kind}: the request's actions {request.actions} are not its own, {describer.actions}."
        )
    return request
