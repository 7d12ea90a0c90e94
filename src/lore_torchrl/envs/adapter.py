"""What a run knows of an environment: one class, found by its import path."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from lore_torchrl.advisors.base import AdviceRequest, Describer, question_of
from lore_torchrl.advisors.scripted import Planner
from lore_torchrl.envs.batch import close_env

# Of the samples that programs are checked with.
_RANDOM_SHARE, _GAMMA = 0.5, 1.0 - 1.0 / 333.0


@runtime_checkable
class EnvAdapter(Protocol):
    """Makes batches of one kind of environment, and their describer.

    An adapter may also have:

    - ``make_planner()``: what :class:`~lore_torchrl.advisors.scripted.ScriptedAdvisor` computes
      its advice by;
    - ``programs``: source of a hand-written program by kind, ``features``, ``progress`` and
      ``subgoals``, over what its describer's ``program_view(row, observation)`` returns: plain
      Python data that holds nothing that the description hides, as ``program_fields`` (name to
      meaning) documents it;
    - ``summarize(batch)``: further metrics of a collector's batch by name, each a number or a list
      with one number for each case (such as an episode) to average over;
    - ``summarize_episodes(last)`` with ``episode_keys``: further metrics of held-out episodes, from
      these entries at their last steps, ``[episodes, ...]``.
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
        ``success``, bool ``[num_envs, 1]``, is whether the episode has succeeded with this step or
        before. Random steps (``lore.epsilon``) need an ``action_mask``, bool ``[num_envs, A]``,
        where actions are one-hot.

        Keyword Args:
            num_envs: Rows of the batch.
            seed: Seed of the run: see :func:`~lore_torchrl.envs.batch.row_seed`.
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


class MemorylessDescriber:
    """Base of describers that remember nothing."""

    def observe(
        self, row: int, observation: Mapping[str, Any], action: int | None, *, reset: bool
    ) -> None:
        """Take no note of an observation."""


def build_adapter(
    path: str, env_id: str, *, max_steps: int | None, options: Mapping[str, Any]
) -> EnvAdapter:
    """Make an adapter by the import path of its class.

    Args:
        path: Such as ``"lore_torchrl.envs.minigrid.MiniGrid"``, or a class of your own.
        env_id: Its first argument.

    Keyword Args:
        max_steps: Step limit of an episode, ``None`` for the environment's own.
        options: Further keywords of the class.

    Raises:
        ValueError: If there is no such class, or it does not take these options.
        TypeError: If a method of :class:`EnvAdapter` is missing.
    """
    module, _, name = path.rpartition(".")
    try:
        made = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"env.adapter={path!r} cannot be imported: {error}. Give the import path of a class, "
            "and see that its module is on PYTHONPATH."
        ) from error
    for option, setting in (("env_id", "id"), ("max_steps", "max_steps")):
        if option in options:
            raise ValueError(f"env.options.{option}: set env.{setting} instead.")
    signature = inspect.signature(made)
    try:
        signature.bind(env_id, max_steps=max_steps, **options)
    except TypeError as error:
        raise ValueError(
            f"{name}{signature} does not take env.id as its first argument and the keywords "
            f"{', '.join(['max_steps', *options])} (of env.options): {error}."
        ) from error
    for option, value in options.items():
        known = signature.parameters.get(option)
        if known and isinstance(known.default, bool) and not isinstance(value, bool):
            raise ValueError(f"env.options.{option} must be true or false, got {value!r}.")
    adapter = made(env_id, max_steps=max_steps, **options)
    if not isinstance(adapter, EnvAdapter):
        raise TypeError(
            f"{path} needs make_env() and make_describer(): see "
            "lore_torchrl.envs.adapter.EnvAdapter."
        )
    return adapter


def program_sources(**functions: Callable[..., Any]) -> dict[str, str]:
    """Return an adapter's ``programs``: the source of each function, by kind.

    The kinds are ``features``, a function ``compute_features(obs)``, ``progress``, a function
    ``progress(obs)``, and ``subgoals``, a function ``reached(obs)``. They run in the sandbox, as a
    language model's do, each alone: what it imports, it imports itself.
    """
    return {
        kind: textwrap.dedent(inspect.getsource(function)) for kind, function in functions.items()
    }


def planner_of(adapter: EnvAdapter) -> Planner | None:
    """Return the adapter's planner, ``None`` where it has none."""
    make = getattr(adapter, "make_planner", None)
    return None if make is None else make()


def anchors_of(describer: Describer) -> torch.Tensor | None:
    """Return the continuous actions that a describer's names stand for, float32 ``[K, A]``.

    ``None`` where it has no ``anchors``: its actions are the environment's own.
    """
    anchors = getattr(describer, "anchors", None)
    return None if anchors is None else torch.as_tensor(anchors, dtype=torch.float32)


def read_row(tensordict: TensorDictBase, row: int | None, in_keys: Sequence[str]) -> dict[str, Any]:
    """Return one row's entries as a describer takes them: arrays, and text as ``str``.

    ``row`` is an index into the batch, ``None`` for a ``tensordict`` without.
    """
    values = {}
    for key in in_keys:
        value = tensordict[key]
        # Text that all rows share is not a list of rows.
        if row is not None and not isinstance(value, str):
            value = value[row]
        values[key] = value.cpu().numpy() if isinstance(value, torch.Tensor) else str(value)
    return values


def check_picture(request: AdviceRequest, describer: Describer) -> None:
    """Raise ``ValueError`` where a question that is to hold a picture holds none."""
    if request.image is None:
        raise ValueError(
            f"{type(describer).__name__}.request() holds no picture, which advisor.send_image "
            "sends: set advisor.send_image=false."
        )


def sample_request(
    adapter: EnvAdapter,
    *,
    steps: int = 0,
    seed: int = 0,
    memory: bool = False,
    image: bool = False,
) -> AdviceRequest:
    """Take random steps in an environment and describe what is seen then.

    Args:
        adapter: Makes the environment.

    Keyword Args:
        steps: Steps from the first observation; a finished episode is reset. Default: ``0``.
        seed: Seed of the environment and of the steps. Default: ``0``.
        memory: Whether the describer remembers what was seen. Default: ``False``.
        image: Whether the request holds a picture. Default: ``False``.

    Raises:
        ValueError: If ``steps`` is negative, or the request lacks the picture asked for.
    """
    if steps < 0:
        raise ValueError(f"steps must not be negative, got {steps}.")
    describer = adapter.make_describer(memory=memory, image=image)
    *_, (seen, _, _) = _play(adapter, describer, None, steps=steps, seed=seed)
    request = question_of(describer, 0, seen)
    if image:
        check_picture(request, describer)
    return request


def sample_views(
    adapter: EnvAdapter, *, steps: int = 400, seed: int = 0, memory: bool = False
) -> tuple[list[dict[str, Any]], list[float]]:
    """Play and return what a program would have seen, and what each observation returned.

    The player is the adapter's planner with half of its actions random, or random without one.

    Args:
        adapter: Makes the environment; its describer needs a ``program_view``.

    Keyword Args:
        steps: Steps to play. Default: ``400``.
        seed: Seed of the environment and of the steps. Default: ``0``.
        memory: Whether the describer remembers what was seen. Default: ``False``.

    Returns:
        Each different view in the order of its coming, and the discounted return that followed it
        first; the episode that the steps cut off counts as if nothing more came.
    """
    describer = adapter.make_describer(memory=memory)
    played = [
        (describer.program_view(0, seen), reward, begins)
        for seen, reward, begins in _play(
            adapter, describer, planner_of(adapter), steps=steps, seed=seed
        )
    ]
    returns, following = [], 0.0
    for _, reward, begins in played[:0:-1]:
        following = reward + _GAMMA * (0.0 if begins else following)
        returns.append(following)
    found: dict[str, tuple[dict[str, Any], float]] = {}
    for (view, _, _), following in zip(played[:-1], returns[::-1], strict=True):
        found.setdefault(repr(view), (view, following))
    return [view for view, _ in found.values()], [value for _, value in found.values()]


def _play(
    adapter: EnvAdapter, describer: Describer, planner: Planner | None, *, steps: int, seed: int
) -> Iterator[tuple[dict[str, Any], float, bool]]:
    """Yield each observation, the reward that led to it, and whether an episode begins there."""
    env = adapter.make_env(num_envs=1, seed=seed)
    actions = anchors_of(describer)
    if actions is None:
        actions = torch.eye(len(describer.actions), dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    tensordict, seen, last, reward = env.reset(), {}, None, 0.0
    for step in range(steps + 1):
        if step:
            values = None if planner is None else planner(describer.request(0, seen))
            mask = tensordict.get("action_mask", torch.ones(1, len(actions)))
            choices = mask[0].nonzero().flatten()
            last = int(choices[torch.randint(len(choices), (), generator=generator)])
            if values is not None and torch.rand((), generator=generator) >= _RANDOM_SHARE:
                last = int(torch.as_tensor(values).argmax())
            stepped, tensordict = env.step_and_maybe_reset(
                tensordict.set("action", actions[last][None])
            )
            reward = float(stepped["next", "reward"])
            if stepped["next", "done"].any():
                last = None
        seen = read_row(tensordict, 0, describer.in_keys)
        describer.observe(0, seen, last, reset=last is None)
        yield seen, reward, last is None
    close_env(env)
