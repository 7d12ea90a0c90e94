"""MiniGrid views as text for a language model, and as facts for a planner."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from minigrid.core.actions import Actions
from minigrid.core.constants import COLOR_TO_IDX, DIR_TO_VEC, OBJECT_TO_IDX, STATE_TO_IDX
from minigrid.core.grid import Grid

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.envs.picture import encode_png

# Names by MiniGrid's codes.
OBJECTS, COLORS, DOOR_STATES = tuple(OBJECT_TO_IDX), tuple(COLOR_TO_IDX), tuple(STATE_TO_IDX)
UNSEEN, EMPTY, WALL, FLOOR, DOOR, KEY, BALL, BOX, GOAL, LAVA, _ = OBJECT_TO_IDX.values()
OPEN, CLOSED, LOCKED = STATE_TO_IDX.values()
PICKABLE = (KEY, BALL, BOX)
ACTIONS = tuple(action.name for action in Actions)

_THINGS = (KEY, BALL, BOX, DOOR, GOAL)
#: What an observation alone can tell: see :meth:`MiniGridDescriber.reached`.
SUBGOALS = (
    *(f"see the {OBJECTS[kind]}" for kind in _THINGS),
    *(f"face the {OBJECTS[kind]}" for kind in _THINGS),
    *(f"hold the {OBJECTS[kind]}" for kind in PICKABLE),
    "carry nothing",
    "open the door",
    "open the locked door",
)

_NOTABLE = (DOOR, *PICKABLE, GOAL, LAVA)
_SYMBOLS = {
    **{UNSEEN: "?", EMPTY: ".", FLOOR: ".", WALL: "#", KEY: "K"},
    **{BALL: "O", BOX: "B", GOAL: "G", LAVA: "~"},
}
_DOOR_SYMBOLS = {OPEN: "_", CLOSED: "D", LOCKED: "L"}
_LEGEND = (
    "'^' you, facing up; '.' empty, '#' wall, '?' unseen, 'K' key, 'L' locked door, "
    "'D' closed door, '_' open door, 'G' goal, 'O' ball, 'B' box, '~' lava (deadly)"
)
# Part of what stored answers were given to: the spelling stays.
_ACTION_MEANINGS = {
    "left": "turn left on the spot",
    "right": "turn right on the spot",
    "forward": "move one cell ahead, if it is free",
    "pickup": "pick up the object in the cell ahead, with empty hands",
    "drop": "put what you carry into the cell ahead, if it is empty",
    "toggle": "open or close the door ahead (a locked one needs the key of its colour), or "
    "open the box ahead",
    "done": "do nothing",
}
# Where the mission is to say so.
_DONE = "say that the mission is fulfilled"
_TILE = 24


class _Memory:
    """What one row has seen: cells by their place from where it began, along the compass."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], tuple[int, ...]] = {}
        self.position, self.direction = (0, 0), 0

    def _place(self, right: int, ahead: int) -> tuple[int, int]:
        """Return the place of a cell as the agent sees it."""
        (x, y), (dx, dy) = self.position, DIR_TO_VEC[self.direction].tolist()
        return x + ahead * dx - right * dy, y + ahead * dy + right * dx

    def step_ahead(self) -> None:
        """Move where the cell ahead, which is always in view, can be entered."""
        kind, _, state = self.cells.get(self._place(0, 1), (UNSEEN, 0, 0))
        if kind in (EMPTY, FLOOR, GOAL, LAVA) or (kind == DOOR and state == OPEN):
            self.position = self._place(0, 1)

    def record(self, view: np.ndarray, direction: int) -> None:
        self.direction = direction
        middle, last = view.shape[0] // 2, view.shape[1] - 1
        for column, row in np.argwhere(view[..., 0] != UNSEEN).tolist():
            # Its own cell shows what the agent carries, not what it stands on.
            if (column, row) != (middle, last):
                place = self._place(column - middle, last - row)
                self.cells[place] = tuple(view[column, row].tolist())
        self.cells.setdefault(self.position, (EMPTY, 0, 0))

    def egocentric(self) -> tuple[np.ndarray, tuple[int, int]]:
        """Return the known part of the map, one unseen cell around it, the agent facing up."""
        dx, dy = DIR_TO_VEC[self.direction].tolist()
        # Columns to the agent's right and rows behind it.
        turned = (np.array(list(self.cells)) - self.position) @ [[-dy, -dx], [dx, -dy]]
        corner = turned.min(0) - 1
        cells = np.zeros((*(turned.max(0) - corner + 2), 3), dtype=np.uint8)
        cells[tuple((turned - corner).T)] = list(self.cells.values())
        column, row = (-corner).tolist()
        return cells, (column, row)


class MiniGridDescriber:
    """Describe a MiniGrid view in egocentric terms, with or without a remembered map.

    It shows the agent's view, what it carries, the mission and, with ``memory``, what it has
    seen since the reset, put together by dead reckoning, as long as nothing else moves.

    Facts of a request: ``map``, uint8 ``[columns, rows, 3]`` in MiniGrid's codes, turned so
    that ahead is up, a remembered one within a ring of unseen cells; ``position``, the agent's
    (column, row) in it; ``carrying``, (object, color) codes or ``None``; ``mission``;
    ``memory``; ``view`` and ``direction``, by which recordings are looked up.

    Keyword Args:
        memory: Whether to remember each row's map. Default: ``False``.
        image: Whether a request holds what the text shows as a picture too. Default: ``False``.
        done_is_valid: Whether ``done`` is described as what ends the mission, and not as doing
            nothing. Default: ``False``.
        num_actions: How many of MiniGrid's actions there are: the first so many. Default: ``7``.

    Raises:
        ValueError: If an observation's ``image`` lacks the shape ``[N, N, 3]``.
        RuntimeError: With ``memory``, if a row is asked about before it was observed.
    """

    in_keys = ("image", "direction", "mission")
    subgoals = SUBGOALS
    #: What a program sees, and what it means.
    program_fields: Mapping[str, str] = {
        "view": "list of rows of words, one word a cell, turned so that the agent faces up: row 0 "
        "is the farthest ahead, column 0 the leftmost. Words: 'unseen', 'empty', 'wall', 'floor', "
        "'goal', 'lava', 'you' (the agent's cell), '<color> key', '<color> ball', '<color> box', "
        "'<color> door (open)', '<color> door (closed)', '<color> door (locked)'. Where the "
        "describer remembers, the view holds all that was seen in this episode, and its size "
        "changes from step to step",
        "row": "int, the agent's row in view",
        "column": "int, the agent's column in view",
        "front": "the word of the cell in front of the agent",
        "carrying": "'nothing', or the word of the object carried",
        "mission": "the task in words",
    }

    def __init__(
        self,
        *,
        memory: bool = False,
        image: bool = False,
        done_is_valid: bool = False,
        num_actions: int = len(ACTIONS),
    ) -> None:
        self.actions = ACTIONS[:num_actions]
        meanings = _ACTION_MEANINGS | ({"done": _DONE} if done_is_valid else {})
        self.meanings = tuple(meanings[action] for action in self.actions)
        self.memory = memory
        self.image = image
        self.done_is_valid = done_is_valid
        self._rows: dict[int, _Memory] = {}

    def observe(
        self, row: int, observation: Mapping[str, Any], action: int | None, *, reset: bool
    ) -> None:
        """Take note of a new observation, reached by ``action`` (``None`` after a reset)."""
        if not self.memory:
            return
        if reset or row not in self._rows:
            self._rows[row] = _Memory()
        elif action is not None and ACTIONS[action] == "forward":
            self._rows[row].step_ahead()
        self._rows[row].record(_view(observation), _direction(observation))

    def cache_key(self, row: int, observation: Mapping[str, Any]) -> str:
        """Return a digest of the view or map, what is carried, and the mission."""
        view = _view(observation)
        digest = hashlib.blake2b(observation["mission"].encode(), digest_size=16)
        # The view's own cell shows what is carried.
        if self.memory:
            cells, position = self._map(row, view)
            digest.update(f"\0{cells.shape}{position}{carried_object(view)}".encode())
            digest.update(cells.tobytes())
        else:
            digest.update(b"\0" + np.ascontiguousarray(view).tobytes())
        if self.done_is_valid:
            digest.update(b"done")
        return ("map:" if self.memory else "view:") + digest.hexdigest()

    def abstract_state(self, row: int, observation: Mapping[str, Any]) -> str:
        """Return the abstract state.

        Mission, what is carried, what is ahead, and of each thing in view that the mission
        names (of all, where it names none of them; of lava always) its kind, side (left,
        middle, right) and distance band (1, 2-3, beyond). Of colors it tells whether the mission
        names the thing, as which of its colors (``c1`` the first), and whether the key fits.
        """
        view, mission = _view(observation), observation["mission"]
        middle, last = view.shape[0] // 2, view.shape[1] - 1
        carrying = carried_object(view)
        places = _places(mission)
        words = (places.get(word, word) for word in mission.split())
        parts = [" ".join(word for word in words if word)]
        parts.append("" if carrying is None else _role((*carrying, 0), mission, None))
        if self.done_is_valid:
            parts.append("done")
        parts.append(_role(view[middle, last - 1], mission, carrying))
        lava, named, others = set(), set(), set()
        for column, line in np.argwhere(np.isin(view[..., 0], _NOTABLE)):
            cell, ahead, right = view[column, line], int(last - line), int(column - middle)
            if ahead or right:
                distance = ahead + abs(right)
                band = 0 if distance == 1 else 1 if distance <= 3 else 2
                thing = f"{_role(cell, mission, carrying)} {np.sign(right)} {band}"
                kept = named if _named(cell, mission) else lava if cell[0] == LAVA else others
                kept.add(thing)
        return "|".join([*parts, *sorted(lava | (named or others))])

    def things(self, row: int, observation: Mapping[str, Any]) -> set[str]:
        """Return the doors, objects, goals and lava in view, whatever state a door is in."""
        return {f"{kind} {color}" for kind, color, _ in _things(_view(observation)).tolist()}

    def reached(self, row: int, observation: Mapping[str, Any]) -> set[str]:
        """Return which of :attr:`subgoals` are true of an observation.

        A thing is seen in the view, faced in the cell ahead; a door is open in view, and if it has
        the color of the key carried it was the locked one.
        """
        view = _view(observation)
        kinds, carrying = set(_things(view)[:, 0].tolist()), carried_object(view)
        ahead = view[view.shape[0] // 2, view.shape[1] - 2, 0]
        found = {f"see the {OBJECTS[kind]}" for kind in kinds}
        found |= {f"face the {OBJECTS[ahead]}"}
        found.add("carry nothing" if carrying is None else f"hold the {OBJECTS[carrying[0]]}")
        doors = view[(view[..., 0] == DOOR) & (view[..., 2] == OPEN)]
        if len(doors):
            found.add("open the door")
        if any(carrying == (KEY, color) for color in doors[:, 1].tolist()):
            found.add("open the locked door")
        return found.intersection(SUBGOALS)

    def request(self, row: int, observation: Mapping[str, Any]) -> AdviceRequest:
        """Return the situation as text and as facts."""
        view, mission = _view(observation), observation["mission"]
        carrying = carried_object(view)
        cells, position = self._map(row, view)
        held = "nothing" if carrying is None else _object_name(*carrying)
        meant = zip(self.actions, self.meanings, strict=True)
        lines = [
            f"Mission: {mission or 'none given'}",
            "",
            f"What you {'remember and ' * self.memory}see ({_LEGEND}):",
            _grid_text(cells, position),
            "",
            f"Notable: {_notable_things(cells, position)}",
            f"In front of you: {_object_name(*cells[position[0], position[1] - 1].tolist())}",
            f"You carry: {held}",
            "",
            "Actions:",
            *(f"- {action}: {meaning}" for action, meaning in meant),
        ]
        return AdviceRequest(
            description="\n".join(lines),
            actions=self.actions,
            cache_key=self.cache_key(row, observation),
            facts={
                "map": cells,
                "position": position,
                "carrying": carrying,
                "mission": mission,
                "memory": self.memory,
                "view": view.copy(),
                "direction": _direction(observation),
            },
            action_meanings=self.meanings,
            mission=mission,
            subgoals=self.subgoals,
            image=_draw(cells, position) if self.image else None,
        )

    def program_view(self, row: int, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return what :attr:`program_fields` names, as plain Python data: what the text tells."""
        view = _view(observation)
        carrying = carried_object(view)
        cells, (column, line) = self._map(row, view)
        words = [
            [_object_name(*cell) for cell in cells] for cells in cells.transpose(1, 0, 2).tolist()
        ]
        front = words[line - 1][column]
        words[line][column] = "you"
        return {
            "view": words,
            "row": line,
            "column": column,
            "front": front,
            "carrying": "nothing" if carrying is None else _object_name(*carrying),
            "mission": observation["mission"],
        }

    def _map(self, row: int, view: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
        """Return the map as the agent faces it, and its position there."""
        if not self.memory:
            cells, position = view.copy(), (view.shape[0] // 2, view.shape[1] - 1)
            cells[position] = (EMPTY, 0, 0)
            return cells, position
        if row not in self._rows:
            raise RuntimeError(f"Row {row} has no map yet: observe() comes before questions.")
        return self._rows[row].egocentric()


def _things(view: np.ndarray) -> np.ndarray:
    """Return the codes ``[N, 3]`` of the things in view, what the agent carries aside."""
    seen = np.isin(view[..., 0], _NOTABLE)
    seen[view.shape[0] // 2, -1] = False
    return view[seen]


def carried_object(image: np.ndarray) -> tuple[int, int] | None:
    """Return object and color code of what the agent carries, or ``None``."""
    kind, color, _ = image[image.shape[0] // 2, -1]
    return (int(kind), int(color)) if kind in PICKABLE else None


def _view(observation: Mapping[str, Any]) -> np.ndarray:
    view = observation["image"]
    if view.ndim != 3 or view.shape[0] != view.shape[1] or view.shape[2] != 3:
        raise ValueError(f"image must have shape [N, N, 3], got {view.shape}.")
    return view


def _direction(observation: Mapping[str, Any]) -> int:
    # MiniGrid itself gives a number, TorchRL an array of one.
    return int(np.asarray(observation["direction"]).reshape(-1)[0])


@cache
def _object_name(kind: int, color: int, state: int = 0) -> str:
    """Return a cell's content in words, such as ``"yellow door (locked)"``."""
    name = f"{COLORS[color]} {OBJECTS[kind]}" if kind in (DOOR, *PICKABLE) else OBJECTS[kind]
    return f"{name} ({DOOR_STATES[state]})" if kind == DOOR else name


def _grid_text(cells: np.ndarray, position: tuple[int, int]) -> str:
    """Draw an egocentric map, one character a cell, the agent as ``^`` facing up."""
    drawn = [
        [
            _DOOR_SYMBOLS[state] if kind == DOOR else _SYMBOLS.get(kind, "?")
            for kind, _, state in line
        ]
        for line in cells.transpose(1, 0, 2).tolist()
    ]
    drawn[position[1]][position[0]] = "^"
    return "\n".join("".join(line) for line in drawn)


def _notable_things(cells: np.ndarray, position: tuple[int, int]) -> str:
    """List doors, objects, goals and lava with their place relative to the agent."""
    things = []
    for column, row in np.argwhere(np.isin(cells[..., 0], _NOTABLE)):
        ahead, right = position[1] - row, column - position[0]
        if ahead == 0 and right == 0:
            continue
        places = [
            f"{abs(ahead)} {'ahead' if ahead > 0 else 'behind'}" if ahead else "level with you"
        ]
        if right:
            places.append(f"{abs(right)} to the {'right' if right > 0 else 'left'}")
        text = f"{_object_name(*cells[column, row].tolist())}: {', '.join(places)}"
        things.append((abs(ahead) + abs(right), text))
    return "; ".join(text for _, text in sorted(things)) or "nothing notable"


def _draw(cells: np.ndarray, position: tuple[int, int]) -> bytes:
    """Return a view or map as a PNG, ahead up, as MiniGrid itself draws it."""
    grid, seen = Grid.decode(np.ascontiguousarray(cells))
    # MiniGrid's direction 3 is up; cells outside the mask are drawn dark.
    return encode_png(grid.render(_TILE, position, 3, highlight_mask=seen))


def _named(cell: Sequence[int], mission: str) -> bool:
    """Return whether a mission names a thing: by its kind, and by its color if by any."""
    kind, color, _ = cell
    if kind == GOAL:
        return "goal" in mission
    names, before = (OBJECTS[kind], "object"), (COLORS[color], "a", "an", "the")
    words = pairwise(mission.replace(",", " ").split())
    return kind in (DOOR, *PICKABLE) and any(w in names and b in before for b, w in words)


def _places(mission: str) -> dict[str, str]:
    """Return ``c1``, ``c2`` and so on for the colors of a mission, ``""`` for an only one."""
    colors = list(dict.fromkeys(word for word in mission.split() if word in COLORS))
    places = {color: f"c{number}" for number, color in enumerate(colors, 1)}
    return places if len(places) > 1 else dict.fromkeys(colors, "")


def _role(cell: Sequence[int], mission: str, carrying: tuple[int, int] | None) -> str:
    """Return a cell's content with what its color means in place of the color."""
    kind, color, state = (int(value) for value in cell)
    words = [DOOR_STATES[state]] if kind == DOOR else []
    if _named(cell, mission):
        words.append("named")
        place = _places(mission).get(COLORS[color])
        if kind != GOAL and place:
            words.append(place)
    if kind == DOOR and carrying == (KEY, color):
        words.append("fitting")
    return " ".join([*words, OBJECTS[kind]])
