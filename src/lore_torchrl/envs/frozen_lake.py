"""FrozenLake: a walk over ice with holes, slippery or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.envs.adapter import MemorylessDescriber
from lore_torchrl.envs.gym_adapter import GymAdapter, gym
from lore_torchrl.envs.programs.frozen_lake import PROGRAMS

ACTIONS = ("left", "down", "right", "up")
_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
_WORDS = {"S": "start", "F": "ice", "H": "hole", "G": "goal"}
_MISSION = "reach the goal without falling into a hole"
_LEGEND = "'S' start, 'F' ice, 'H' hole (deadly), 'G' goal, '@' you"
# Of value iteration.
_SWEEPS, _DISCOUNT = 500, 0.99


class FrozenLake(GymAdapter):
    """Gymnasium's FrozenLake as an :class:`~lore_torchrl.envs.adapter.EnvAdapter`.

    The agent sees its own square, one-hot; the advisor is also told the map, which does not
    change. On slippery ice a move goes as meant in one case of three, and to either side of
    that in the others: use ``lore.calls.noop_filter=false`` there.

    Args:
        env_id: Gymnasium id, such as ``"FrozenLake8x8-v1"``. Default: ``"FrozenLake-v1"``.

    Keyword Args:
        max_steps: Step limit of an episode; ``None`` for the id's own (100, and 200
            of ``FrozenLake8x8-v1``). Default: ``None``.
        slippery: Whether moves go astray. Default: ``True``.

    Raises:
        ValueError: If ``env_id`` is another kind of environment.
    """

    programs = PROGRAMS

    def __init__(
        self,
        env_id: str = "FrozenLake-v1",
        *,
        max_steps: int | None = None,
        slippery: bool = True,
    ) -> None:
        self.env_id, self.slippery = env_id, slippery
        settings = {"is_slippery": slippery, "max_episode_steps": max_steps}
        self.settings = {name: value for name, value in settings.items() if value is not None}
        probe = gym.make(env_id, **self.settings)
        if not hasattr(probe.unwrapped, "desc"):
            raise ValueError(f"{env_id} is no FrozenLake: it has no map of ice, holes and a goal.")
        self.squares = tuple("".join(cell.decode() for cell in r) for r in probe.unwrapped.desc)
        probe.close()

    def make_gym(self, pixels: bool = False) -> gym.Env:
        """Make a lake; ``observation`` is the square, one-hot ``[squares]``."""
        mode = "rgb_array" if pixels else None
        env = gym.make(self.env_id, render_mode=mode, **self.settings)
        squares = int(env.observation_space.n)
        box = gym.spaces.Box(0.0, 1.0, (squares,), np.float32)
        return gym.wrappers.TransformObservation(
            env,
            lambda square: {"observation": np.eye(squares, dtype=np.float32)[square]},
            gym.spaces.Dict({"observation": box}),
        )

    def make_describer(self, *, memory: bool = False, image: bool = False) -> FrozenLakeDescriber:
        """Make the describer, which has no memory and no picture."""
        return FrozenLakeDescriber(self.squares, slippery=self.slippery)

    def make_planner(self) -> FrozenLakePlanner:
        """Make the planner, which knows the map and whether ice is slippery."""
        return FrozenLakePlanner(self.squares, slippery=self.slippery)


class FrozenLakeDescriber(MemorylessDescriber):
    """The map with the agent on it, as text.

    ``squares`` are the rows of the map, of S, F, H and G; ``slippery`` is whether moves go astray.
    """

    in_keys = ("observation",)
    actions = ACTIONS
    #: What a program sees, and what it means.
    program_fields: Mapping[str, str] = {
        "view": "list of rows of words, one word a square, seen from above; row 0 is the "
        "uppermost, column 0 the leftmost. Words: start, ice, hole (deadly), goal, you",
        "row": "int, your row in view",
        "column": "int, your column in view",
        "slippery": "bool, whether two moves of three slide to one side",
        "mission": "the task in words",
    }

    def __init__(self, squares: tuple[str, ...], *, slippery: bool) -> None:
        self.squares = squares
        self.slippery = slippery
        # One store may hold the answers about several lakes.
        self._lake = f"{'/'.join(squares)} {'ice' if slippery else 'snow'}"

    def cache_key(self, row: int, observation: Mapping[str, Any]) -> str:
        """Return the map, whether it is slippery, and the square's number."""
        return f"{self._lake} {_square(observation)}"

    abstract_state = cache_key

    def request(self, row: int, observation: Mapping[str, Any]) -> AdviceRequest:
        """Return the question about this square."""
        square = _square(observation)
        y, x = divmod(square, len(self.squares[0]))
        rows = list(self.squares)
        rows[y] = rows[y][:x] + "@" + rows[y][x + 1 :]
        ice = "Two moves of three slide to one side." if self.slippery else "Moves go as meant."
        return AdviceRequest(
            f"A frozen lake, seen from above ({_LEGEND}):\n" + "\n".join(rows) + f"\n{ice}",
            self.actions,
            self.cache_key(row, observation),
            facts={"square": square},
            action_meanings=tuple(f"move one square {action}" for action in self.actions),
            mission=_MISSION,
        )

    def program_view(self, row: int, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return what :attr:`program_fields` names, as plain Python data: what the text tells."""
        y, x = divmod(_square(observation), len(self.squares[0]))
        words = [[_WORDS[kind] for kind in squares] for squares in self.squares]
        words[y][x] = "you"
        return {
            "view": words,
            "row": y,
            "column": x,
            "slippery": self.slippery,
            "mission": _MISSION,
        }


def _square(observation: Mapping[str, Any]) -> int:
    return int(np.argmax(observation["observation"]))


class FrozenLakePlanner:
    r"""Values of the actions by value iteration on the true map.

    .. math::
        Q(s, a) = \sum_{s'} P(s' \mid s, a) \bigl(r(s') + \gamma \max_{a'} Q(s', a')\bigr),
        \quad \gamma = 0.99

    Its arguments are those of :class:`FrozenLakeDescriber`.
    """

    def __init__(self, squares: tuple[str, ...], *, slippery: bool) -> None:
        height, width = len(squares), len(squares[0])
        flat = "".join(squares)
        reward = np.array([kind == "G" for kind in flat], dtype=np.float64)
        ends = np.array([kind in "GH" for kind in flat])
        y, x = np.divmod(np.arange(len(flat))[:, None], width)
        down, right = np.array(_MOVES).T
        following = (y + down).clip(0, height - 1) * width + (x + right).clip(0, width - 1)
        self._values = np.zeros((len(flat), 4))
        for _ in range(_SWEEPS):
            best = np.where(ends, 0.0, self._values.max(1))
            values = (reward + _DISCOUNT * best)[following]
            if slippery:
                # As meant, or at a right angle to it, to either side.
                values = (values + np.roll(values, 1, 1) + np.roll(values, -1, 1)) / 3
            self._values = values

    def __call__(self, request: AdviceRequest) -> list[float] | None:
        """Return one value an action, ``None`` for requests of other describers."""
        square = request.facts.get("square")
        return None if square is None else self._values[square].tolist()
