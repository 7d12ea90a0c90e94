"""What a run needs to know of an environment: one class a family, by its import path."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from tensordict import TensorDictBase
from torchrl.data import Bounded, OneHot, TensorSpec
from torchrl.envs import EnvBase

from lore_torchrl.advisors.base import AdviceRequest, Describer
from lore_torchrl.advisors.scripted import Planner

MAX_ENVS = 1000
MAX_SEED = 1_000_000
#: Held-out seeds begin here: no training seed reaches as far.
EVAL_SEED_OFFSET = MAX_SEED * MAX_ENVS


class Sizes(NamedTuple):
    """What an agent must fit.

    Size of ``observation`` and shape of ``frame``, each ``None`` where there is none; number
    of actions, or of dimensions of a continuous one; and its lowest and highest value, each
    ``[A]``, ``None`` where actions are discrete.
    """

    observation_dim: int | None
    frame_shape: tuple[int, ...] | None
    num_actions: int
    action_bounds: tuple[torch.Tensor, torch.Tensor] | None = None


@runtime_checkable
class EnvFamily(Protocol):
    """Environments of one kind, with their describer.

    Besides what is named here a family may have ``make_planner()``, which returns what
    :class:`~lore_torchrl.advisors.scripted.ScriptedAdvisor` computes its advice by, and
    ``summarize(batch)``, which returns further metrics of a collector's batch by their name (a
    number, or a list with one for each case of what is to be averaged, such as an episode),
    and ``summarize_episodes(last)`` with ``episode_keys``, which does so of what these entries
    hold at the last step of held-out episodes, ``[episodes, ...]``.
    """

    def make_env(
        self,
        *,
        num_envs: int,
        seed: int,
        evaluation: bool = False,
        parallel: bool = False,
        pixels: bool = False,
    ) -> EnvBase:
        """Make a batch of environments, of batch size ``[num_envs]`` even for one.

        The policy reads ``observation``, float32 ``[num_envs, D]``, or ``frame``, uint8
        ``[num_envs, C, H, W]``, or both, and writes ``action`` ``[num_envs, A]``: one-hot, or
        continuous within finite bounds, in which case the describer has ``anchors``.
        ``success``, bool ``[num_envs, 1]``, tells whether the episode has succeeded with this
        step or before. Random steps (``lore.epsilon``) need an ``action_mask``, bool
        ``[num_envs, A]``, where actions are one-hot.

        Keyword Args:
            num_envs: Rows of the batch.
            seed: Seed of the run: see :func:`row_seed`.
            evaluation: Whether to draw from seeds that training never uses.
            parallel: Whether each row gets its own process.
            pixels: Whether to add ``pixels``, uint8 ``[num_envs, H, W, 3]``, for people.
        """
        ...

    def make_describer(self, *, memory: bool = False, image: bool = False) -> Describer:
        """Make what turns observations into questions.

        Keyword Args:
            memory: Whether it remembers what was seen since the reset.
            image: Whether its requests hold a picture.
        """
        ...


def row_seed(seed: int, row: int, *, evaluation: bool = False) -> int:
    """Return the seed of one row of a batch: ``seed * 1000 + row``.

    Evaluation adds :data:`EVAL_SEED_OFFSET`, the number of training row seeds that
    exist, so no evaluation row ever shares its random stream with a training row, nor
    with another row. (In small rooms two streams can still draw the same layout.)

    Args:
        seed: Seed of the run, from 0 to 999,999.
        row: Row of the batch, from 0 to 999.
        evaluation: Whether to return a held-out seed. Default: ``False``.

    Raises:
        ValueError: If ``seed`` or ``row`` is out of range.

    Examples:
        >>> row_seed(3, 1), row_seed(3, 1, evaluation=True)
        (3001, 1000003001)
    """
    if not 0 <= seed < MAX_SEED:
        raise ValueError(f"seed must lie in [0, {MAX_SEED}), got {seed}.")
    if not 0 <= row < MAX_ENVS:
        raise ValueError(f"row must lie in [0, {MAX_ENVS}), got {row}.")
    return seed * MAX_ENVS + row + (EVAL_SEED_OFFSET if evaluation else 0)


_METHODS = {
    "make_env": ("num_envs", "seed", "evaluation", "parallel", "pixels"),
    "make_describer": ("memory", "image"),
}


def build_family(
    path: str, env_id: str, *, max_steps: int | None, options: Mapping[str, Any]
) -> EnvFamily:
    """Make a family by the import path of its class.

    Args:
        path: Such as ``"lore_torchrl.envs.minigrid.MiniGrid"``, or a class of your own.
        env_id: Its first argument.

    Keyword Args:
        max_steps: Step limit of an episode, ``None`` for the environment's own.
        options: Further keywords of the class.

    Raises:
        ValueError: If there is no such class, it does not take these options, or one whose
            default is true or false is neither.
        TypeError: If it is no :class:`EnvFamily`, or its class does not take ``env_id``.
    """
    module, _, name = path.rpartition(".")
    try:
        made = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"env.family={path!r} cannot be imported: {error}. Give the import path of a class, "
            "and see that its module is on PYTHONPATH."
        ) from error
    known = inspect.signature(made).parameters
    unknown = sorted(set(options) - set(known))
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        raise ValueError(
            f"env.options: {name} does not take {', '.join(unknown)}. It takes "
            f"{', '.join(k for k in known if k not in ('self', 'env_id', 'max_steps'))}."
        )
    for option in ("env_id", "max_steps"):
        if option in options:
            raise ValueError(
                f"env.options.{option}: set env.{option.removeprefix('env_')} instead."
            )
    for option, value in options.items():
        flag = option in known and isinstance(known[option].default, bool)
        if flag and not isinstance(value, bool):
            raise ValueError(f"env.options.{option} must be true or false, got {value!r}.")
    _check_takes(made, name, ("max_steps",))
    try:
        inspect.signature(made).bind(env_id, max_steps=max_steps, **options)
    except TypeError as error:
        raise TypeError(
            f"{name}() cannot be called with env.id as its first argument and the keywords "
            f"{', '.join(['max_steps', *options])}: {error}. See "
            "lore_torchrl.envs.family.EnvFamily."
        ) from error
    family = made(env_id, max_steps=max_steps, **options)
    for method, keywords in _METHODS.items():
        if not callable(getattr(family, method, None)):
            raise TypeError(f"{path} has no {method}(): see lore_torchrl.envs.family.EnvFamily.")
        _check_takes(getattr(family, method), f"{name}.{method}", keywords)
    return family


def _check_takes(function: Callable[..., Any], name: str, keywords: Sequence[str]) -> None:
    known = inspect.signature(function).parameters
    missing = [keyword for keyword in keywords if keyword not in known]
    if missing and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        raise TypeError(
            f"{name}() must take the keyword{'s' * (len(missing) > 1)} {', '.join(missing)}: see "
            "lore_torchrl.envs.family.EnvFamily."
        )


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
    needed = dict.fromkeys(getattr(family, "episode_keys", ()), "summarize_episodes()")
    for key in ("reward", "done", "terminated"):
        needed.pop(key, None)
    needed["success"] = "every run"
    if advised:
        describer = family.make_describer(memory=memory, image=image)
        _check_describer(describer, coarse=coarse)
        needed |= dict.fromkeys(describer.in_keys, type(describer).__name__)
    env = family.make_env(num_envs=2, seed=0)
    if masked and isinstance(env.action_spec, OneHot):
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
                request = _check_questions(describer, env, image=image, coarse=coarse)
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
    discrete = isinstance(actions, OneHot) and len(actions.shape) == 2
    shapes = {key: tuple(part.shape[1:]) for key, part in seen.items()}
    return Sizes(
        shapes["observation"][0] if "observation" in shapes else None,
        shapes.get("frame"),
        actions.shape[-1],
        None if discrete else _bounds(actions, name),
    )


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


def anchors_of(describer: Describer) -> torch.Tensor | None:
    """Return the continuous actions that a describer's names stand for, ``[K, A]``.

    ``None`` where it has no ``anchors``: its actions are the environment's own.

    Args:
        describer: The describer.
    """
    anchors = getattr(describer, "anchors", None)
    return None if anchors is None else torch.as_tensor(anchors, dtype=torch.float32)


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
    describer: Describer, env: EnvBase, *, image: bool, coarse: bool
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
    following = env.step(tensordict.set("action", action)).get("next")
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


def read_row(tensordict: TensorDictBase, row: int | None, in_keys: Sequence[str]) -> dict[str, Any]:
    """Return one row's entries as a describer takes them: arrays, and text as ``str``.

    Args:
        tensordict: Output of an environment.
        row: Index into its batch, ``None`` for one without.
        in_keys: The describer's.
    """
    values = {}
    for key in in_keys:
        value = tensordict[key]
        # Text that all rows share is not a list of rows.
        if row is not None and not isinstance(value, str):
            value = value[row]
        values[key] = value.cpu().numpy() if isinstance(value, torch.Tensor) else str(value)
    return values


def close_env(env: EnvBase) -> None:
    """Close an environment, opened or not, and leave the number of threads as it was.

    Closing a batched one makes TorchRL 0.14 raise it to that of the process's start.

    Args:
        env: The environment.
    """
    threads = torch.get_num_threads()
    env.close(raise_if_closed=False)
    torch.set_num_threads(threads)


def planner_of(family: EnvFamily) -> Planner | None:
    """Return the family's planner, ``None`` where it has none."""
    make = getattr(family, "make_planner", None)
    return None if make is None else make()
