"""What a run needs to know of an environment: one class a family, by its import path."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from lore_torchrl.advisors.base import Describer
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


def seed_all(seed: int) -> None:
    """Seed the global random streams of Python, NumPy and PyTorch.

    Args:
        seed: Seed of all three, in ``[0, 2**32)``.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


_METHODS = {
    "make_env": ("num_envs", "seed", "evaluation", "parallel", "pixels"),
    "make_describer": ("memory", "image"),
}
# What a family may have, and the one argument that is given to it.
_OPTIONAL = {
    "make_gym": "pixels, whether to draw",
    "summarize": "a batch",
    "summarize_episodes": "the last steps of episodes",
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
    for method, argument in _OPTIONAL.items():
        if hasattr(family, method):
            try:
                inspect.signature(getattr(family, method)).bind(None)
            except TypeError as error:
                raise TypeError(f"{name}.{method}() must take {argument}: {error}.") from error
    return family


def _check_takes(function: Callable[..., Any], name: str, keywords: Sequence[str]) -> None:
    known = inspect.signature(function).parameters
    missing = [keyword for keyword in keywords if keyword not in known]
    if missing and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        raise TypeError(
            f"{name}() must take the keyword{'s' * (len(missing) > 1)} {', '.join(missing)}: see "
            "lore_torchrl.envs.family.EnvFamily."
        )


def anchors_of(describer: Describer) -> torch.Tensor | None:
    """Return the continuous actions that a describer's names stand for, ``[K, A]``.

    ``None`` where it has no ``anchors``: its actions are the environment's own.

    Args:
        describer: The describer.
    """
    anchors = getattr(describer, "anchors", None)
    return None if anchors is None else torch.as_tensor(anchors, dtype=torch.float32)


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
