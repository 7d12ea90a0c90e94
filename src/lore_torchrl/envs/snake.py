"""Snake: eat apples, or avoid them, without hitting anything."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.envs.adapter import MemorylessDescriber
from lore_torchrl.envs.gym_adapter import GymAdapter, gym
from lore_torchrl.envs.programs.snake import PROGRAMS

ACTIONS = ("up", "right", "down", "left")
_MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))
EMPTY, BODY, HEAD, APPLE, ENEMY = range(5)
# In the observation only: what lies beyond the edge. And how far it sees, to each side.
_WALL, _SIGHT = 5, 2
_SEEN = (BODY, APPLE, ENEMY, _WALL)
_WORDS = ("free", "body", "head", "apple", "snake")
_SYMBOLS = ".o@A#"
_COLORS = ((40, 40, 40), (60, 160, 60), (120, 230, 120), (210, 50, 50), (150, 80, 200))
_DEADLY, _UNREACHABLE, _BITTER = -1000.0, -100.0, 50.0
Cell = tuple[int, int]


class SnakeEnv(gym.Env):
    """A snake on a square field, with an apple, and another snake that moves at random.

    The snake grows by one with each apple. An episode ends when it hits the wall, itself or
    the other one (reward -1), and when it has eaten ``apples`` (reward 1 each). With
    ``poison`` an apple costs 1 and ends nothing.

    ``observation`` is what is near, and where the apple lies, seen from the head; ``field`` is
    all, from above.

    Keyword Args:
        size: Cells of a side, at least 4. Default: ``7``.
        apples: Apples that end an episode. Default: ``3``.
        poison: Whether apples are bad. Default: ``False``.
        enemy: Whether there is another snake, of two cells. Default: ``True``.
        max_steps: Step limit of an episode. Default: ``100``.
        render_mode: ``"rgb_array"`` or ``None``. Default: ``None``.

    Raises:
        ValueError: If a number is out of range.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}  # noqa: RUF012

    def __init__(
        self,
        *,
        size: int = 7,
        apples: int = 3,
        poison: bool = False,
        enemy: bool = True,
        max_steps: int = 100,
        render_mode: str | None = None,
    ) -> None:
        for name, value, least in (("size", size, 4), ("apples", apples, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number from {least} on, got {value}.")
        most = size * size - 1 - 2 * enemy
        if apples > most and not poison:
            raise ValueError(
                f"apples must be at most {most}, got {apples}: a field of {size} by {size} has no "
                "room for a snake that has eaten them all. Raise size."
            )
        self.size, self.apples, self.poison, self.enemy = size, apples, poison, enemy
        self.max_steps, self.render_mode = max_steps, render_mode
        self.action_space = gym.spaces.Discrete(len(ACTIONS))
        near = len(_SEEN) * (2 * _SIGHT + 1) ** 2
        features = gym.spaces.Box(-1.0, 1.0, (near + 8,), np.float32)
        field = gym.spaces.Box(0, len(_SYMBOLS) - 1, (size, size), np.uint8)
        self.observation_space = gym.spaces.Dict({"observation": features, "field": field})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Put a snake of one cell, an apple and the other snake on the field."""
        super().reset(seed=seed)
        self.body, self.other, self.apple = deque[Cell](), deque[Cell](), None
        for snake in (self.body, self.other)[: 1 + self.enemy]:
            snake.append(self._free_cell())
        self.apple = self._free_cell()
        self.eaten = self.steps = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Move; then the other snake moves."""
        self.steps += 1
        head, reward = _ahead(self.body[0], int(action)), 0.0
        # The tail too, though it moves on: what the field shows as body is deadly.
        crashed = not self._inside(head) or head in self.body or head in self.other
        if crashed:
            reward = -1.0
        else:
            self.body.appendleft(head)
            if head == self.apple:
                self.eaten += 1
                reward = -1.0 if self.poison else 1.0
                self.apple = self._free_cell()
            else:
                self.body.pop()
            if self.enemy:
                self._move_other()
        terminated = crashed or (not self.poison and self.eaten >= self.apples)
        return self._observe(), reward, terminated, self.steps >= self.max_steps, {}

    def field(self) -> np.ndarray:
        """Return what is where, uint8 ``[size, size]``."""
        cells = np.full((self.size, self.size), EMPTY, dtype=np.uint8)
        for kind, where in ((BODY, self.body), (ENEMY, self.other)):
            for cell in where:
                cells[cell] = kind
        cells[self.body[0]] = HEAD
        cells[self.apple] = APPLE
        return cells

    def render(self) -> np.ndarray:
        """Return the field as a picture, uint8 ``[16 size, 16 size, 3]``."""
        picture = np.array(_COLORS, dtype=np.uint8)[self.field()]
        return picture.repeat(16, 0).repeat(16, 1)

    def _observe(self) -> dict[str, np.ndarray]:
        field, (y, x) = self.field(), self.body[0]
        sight = 2 * _SIGHT + 1
        near = np.pad(field, _SIGHT, constant_values=_WALL)[y : y + sight, x : x + sight]
        seen = [(near == kind).reshape(-1) for kind in _SEEN]
        for away in (self.apple[0] - y, self.apple[1] - x):
            seen.append([away < 0, away == 0, away > 0, away / self.size])
        return {"observation": np.concatenate(seen, dtype=np.float32), "field": field}

    def _free_cell(self) -> Cell:
        return self._pick(list(np.ndindex(self.size, self.size))) or self.body[-1]

    def _pick(self, cells: list[Cell]) -> Cell | None:
        """Draw one of the cells of the field that hold nothing, ``None`` where there is none."""
        taken = {*self.body, *self.other, self.apple}
        free = [cell for cell in cells if self._inside(cell) and cell not in taken]
        return free[int(self.np_random.integers(len(free)))] if free else None

    def _inside(self, cell: Cell) -> bool:
        return all(0 <= part < self.size for part in cell)

    def _move_other(self) -> None:
        cell = self._pick([_ahead(self.other[0], action) for action in range(len(_MOVES))])
        if cell is not None:
            self.other.appendleft(cell)
            if len(self.other) > 2:
                self.other.pop()


class Snake(GymAdapter):
    """:class:`SnakeEnv` as an :class:`~lore_torchrl.envs.adapter.EnvAdapter`.

    Args:
        env_id: Not used. Default: ``"Snake"``.

    Success is to have eaten all apples; with ``poison``, to live to the step limit without
    eating one. The keywords are as of :class:`SnakeEnv`, with the same defaults.
    """

    programs = PROGRAMS

    def __init__(
        self,
        env_id: str = "Snake",
        *,
        max_steps: int | None = None,
        size: int = 7,
        apples: int = 3,
        poison: bool = False,
        enemy: bool = True,
    ) -> None:
        self.poison = poison
        limit = 100 if max_steps is None else max_steps
        self.settings: dict[str, Any] = dict(
            size=size, apples=apples, poison=poison, enemy=enemy, max_steps=limit
        )
        SnakeEnv(**self.settings)

    def make_gym(self, pixels: bool = False) -> gym.Env:
        """Make a field; ``observation`` is what lies within two cells of the head, ``[108]``.

        25 cells each for bodies of its own, the apple, the other snake and beyond the edge; then
        whether the apple lies above, level or below, and how far down, in sides of the field;
        and the same from left to right.
        """
        return SnakeEnv(**self.settings, render_mode="rgb_array" if pixels else None)

    def success(self, following: TensorDictBase) -> Tensor:
        """Return whether all apples are eaten; with ``poison``, whether none was to the end."""
        if not self.poison:
            return super().success(following)
        # Each apple eaten has left the snake longer than the one cell that it began with.
        ate = (following.get("field") == BODY).flatten(-2).any(-1, keepdim=True)
        return following.get("truncated") & ~following.get("terminated") & ~ate

    def make_describer(self, *, memory: bool = False, image: bool = False) -> SnakeDescriber:
        """Make the describer, which has no memory and no picture: all is in sight."""
        return SnakeDescriber(poison=self.poison)

    def make_planner(self) -> SnakePlanner:
        """Make the planner, which looks for a way to the apple, or around it."""
        return SnakePlanner()


class SnakeDescriber(MemorylessDescriber):
    """The field as text; ``poison`` is whether apples are bad."""

    in_keys = ("field",)
    actions = ACTIONS
    #: What a program sees, and what it means.
    program_fields: Mapping[str, str] = {
        "view": "list of rows of words, one word a cell, seen from above; row 0 is the uppermost, "
        f"column 0 the leftmost. Words: {', '.join(_WORDS)} (another one); beyond the edge, on a "
        "body and on another snake it is deadly",
        "row": "int, the head's row in view",
        "column": "int, the head's column in view",
        "poison": "bool, whether apples are bad",
        "mission": "the task in words",
    }

    def __init__(self, *, poison: bool = False) -> None:
        self.poison = poison
        # One store may hold the answers of both games.
        self._rules = "poison " if poison else ""

    def cache_key(self, row: int, observation: Mapping[str, Any]) -> str:
        """Return the field, cell by cell, and whether apples are bad."""
        return self._rules + "".join(_SYMBOLS[cell] for cell in observation["field"].reshape(-1))

    def abstract_state(self, row: int, observation: Mapping[str, Any]) -> str:
        """Return where the apple lies, and which of the four cells around the head are free."""
        field = observation["field"]
        head, apple = _find(field, HEAD), _find(field, APPLE)
        side = "".join(str(np.sign(a - h)) for a, h in zip(apple, head, strict=True))
        around = ("x" if _blocked(field, head, action) else "." for action in range(4))
        return self._rules + side + "".join(around)

    def request(self, row: int, observation: Mapping[str, Any]) -> AdviceRequest:
        """Return the question about this field."""
        field = observation["field"]
        rows = "\n".join("".join(_SYMBOLS[cell] for cell in line) for line in field)
        apples = "poisonous: do not eat them" if self.poison else "good: eat them, you grow by one"
        return AdviceRequest(
            f"A game of Snake, seen from above ('@' your head, 'o' your body, 'A' apple, '#' "
            f"another snake, which moves at random, '.' free; the edge is deadly, as are "
            f"bodies):\n{rows}\nApples are {apples}.",
            self.actions,
            self.cache_key(row, observation),
            facts={"field": field.copy(), "poison": self.poison},
            action_meanings=tuple(f"move one cell {action}" for action in self.actions),
            mission=self._mission(),
        )

    def program_view(self, row: int, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return what :attr:`program_fields` names, as plain Python data: what the text tells."""
        field = observation["field"]
        y, x = _find(field, HEAD)
        return {
            "view": [[_WORDS[cell] for cell in line] for line in field.tolist()],
            "row": y,
            "column": x,
            "poison": self.poison,
            "mission": self._mission(),
        }

    def _mission(self) -> str:
        return "stay alive and eat no apple" if self.poison else "stay alive and eat apples"


class SnakePlanner:
    """One value an action: the shortest free way to the apple, or room to move without it."""

    def __call__(self, request: AdviceRequest) -> list[float] | None:
        """Return one value an action, ``None`` for requests of other describers."""
        field = request.facts.get("field")
        if field is None or request.actions != ACTIONS:
            return None
        head, values = _find(field, HEAD), []
        for action in range(len(ACTIONS)):
            if _blocked(field, head, action):
                values.append(_DEADLY)
                continue
            first = _ahead(head, action)
            distances = _flood(field, first)
            ways_on = sum(not _blocked(field, first, action) for action in range(len(ACTIONS)))
            # Where the other snake could shut it in there is less room.
            room = min(len(distances), 12) + 0.1 * ways_on
            way = [steps for cell, steps in distances.items() if field[cell] == APPLE]
            if request.facts["poison"]:
                values.append(room - (_BITTER if field[first] == APPLE else 0.0))
            else:
                values.append(-float(way[0]) if way else _UNREACHABLE + room)
        return values


def _ahead(cell: Cell, action: int) -> Cell:
    return cell[0] + _MOVES[action][0], cell[1] + _MOVES[action][1]


def _find(field: np.ndarray, kind: int) -> Cell:
    y, x = np.argwhere(field == kind)[0].tolist()
    return y, x


def _blocked(field: np.ndarray, cell: Cell, action: int) -> bool:
    y, x = _ahead(cell, action)
    inside = 0 <= y < field.shape[0] and 0 <= x < field.shape[1]
    return not inside or field[y, x] in (BODY, ENEMY)


def _flood(field: np.ndarray, start: Cell) -> dict[Cell, int]:
    """Return the steps to every cell that can be reached from ``start``, itself included."""
    distances, queue = {start: 0}, deque([start])
    while queue:
        cell = queue.popleft()
        for action in range(len(ACTIONS)):
            ahead = _ahead(cell, action)
            if not _blocked(field, cell, action) and ahead not in distances:
                distances[ahead] = distances[cell] + 1
                queue.append(ahead)
    return distances
