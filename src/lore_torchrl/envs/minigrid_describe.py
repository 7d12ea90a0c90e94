"""MiniGrid views as text for a language model, and as facts for a planner."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.envs.picture import view_png

# The codes of MiniGrid's image, written out so that a recorded view can be described
# without MiniGrid installed; a test compares them with MiniGrid's own.
OBJECTS = (
    *("unseen", "empty", "wall", "floor", "door", "key"),
    *("ball", "box", "goal", "lava", "agent"),
)
COLORS = ("red", "green", "blue", "purple", "yellow", "grey")
DOOR_STATES = ("open", "closed", "locked")
UNSEEN, EMPTY, WALL, FLOOR, DOOR, KEY, BALL, BOX, GOAL, LAVA, _AGENT = range(len(OBJECTS))
OPEN, CLOSED, LOCKED = range(len(DOOR_STATES))
PICKABLE = (KEY, BALL, BOX)
ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")

_SYMBOLS = {
    **{UNSEEN: "?", EMPTY: ".", FLOOR: ".", WALL: "#", KEY: "K"},
    **{BALL: "O", BOX: "B", GOAL: "G", LAVA: "~"},
}
_DOOR_SYMBOLS = {OPEN: "_", CLOSED: "D", LOCKED: "L"}
_LEGEND = (
    "'^' you, facing up; '.' empty, '#' wall, '?' unseen, 'K' key, 'L' locked door, "
    "'D' closed door, '_' open door, 'G' goal, 'O' ball, 'B' box, '~' lava (deadly)"
)
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
# (dx, dy) for MiniGrid's directions right, down, left, up; y grows downwards.
_STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))


def object_name(cell: np.ndarray) -> str:
    """Return a cell's content in words, such as ``"yellow door (locked)"``."""
    kind, color, state = (int(value) for value in cell)
    name = OBJECTS[kind]
    if kind in (DOOR, *PICKABLE):
        name = f"{COLORS[color]} {name}"
    return f"{name} ({DOOR_STATES[state]})" if kind == DOOR else name


def carried_object(image: np.ndarray) -> tuple[int, int] | None:
    """Return object and colour code of what the agent carries, or ``None``."""
    kind, color, _ = image[image.shape[0] // 2, -1]
    return (int(kind), int(color)) if kind in PICKABLE else None


def _named(cell: Sequence[int], mission: str) -> bool:
    """Return whether a mission names a thing: by its kind, and by its colour if by any."""
    kind, color = int(cell[0]), int(cell[1])
    if kind == GOAL:
        return "goal" in mission
    words = mission.replace(",", " ").split()
    for before, word in pairwise(words):
        if word in (OBJECTS[kind], "object") and before in (COLORS[color], "a", "an", "the"):
            return kind in (DOOR, *PICKABLE)
    return False


def _places(mission: str) -> dict[str, str]:
    """Return ``c1``, ``c2`` and so on for the colours of a mission, by their first mention.

    A mission of one colour has no need to tell it from others: it is left out.
    """
    colors = list(dict.fromkeys(word for word in mission.split() if word in COLORS))
    places = {color: f"c{number}" for number, color in enumerate(colors, 1)}
    return places if len(places) > 1 else dict.fromkeys(colors, "")


def _role(cell: Sequence[int], mission: str, carrying: tuple[int, int] | None) -> str:
    """Return a cell's content with what its colour means in place of the colour."""
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


@dataclass(slots=True)
class _Memory:
    """What one row has seen: ``cells[x, y]`` around ``position``, in compass directions."""

    cells: np.ndarray
    position: tuple[int, int]
    view: np.ndarray
    direction: int


def _enterable(cell: np.ndarray) -> bool:
    kind = int(cell[0])
    return kind in (EMPTY, FLOOR, GOAL, LAVA) or (kind == DOOR and int(cell[2]) == OPEN)


def _record(memory: _Memory) -> None:
    """Write the current view into the map, growing it where the view passes its edge."""
    # A view turned by the heading has its columns along x and its rows along y.
    turned = np.rot90(memory.view, memory.direction + 1)
    size = memory.view.shape[0]
    middle, last = size // 2, size - 1
    ahead = _STEPS[memory.direction]
    # The view's corner: `middle` cells to either side, and all of it ahead of the agent.
    corner = [
        memory.position[axis] - (middle if not ahead[axis] else 0 if ahead[axis] > 0 else last)
        for axis in (0, 1)
    ]
    low = max(0, -min(corner))
    high = max(0, max(corner) + size - memory.cells.shape[0])
    if low or high:
        pad = max(low, high, size)
        memory.cells = np.pad(memory.cells, ((pad, pad), (pad, pad), (0, 0)))
        memory.position = (memory.position[0] + pad, memory.position[1] + pad)
        corner = [value + pad for value in corner]
    window = memory.cells[corner[0] : corner[0] + size, corner[1] : corner[1] + size]
    own = memory.cells[memory.position].copy()
    seen = turned[..., 0] != UNSEEN
    window[seen] = turned[seen]
    # The view shows what the agent carries there, not what it stands on.
    memory.cells[memory.position] = own if own[0] != UNSEEN else (EMPTY, 0, 0)


def _egocentric(memory: _Memory) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the known part of the map, one unseen cell around it, the agent facing up."""
    known = memory.cells[..., 0] != UNSEEN
    columns, rows = np.flatnonzero(known.any(1)), np.flatnonzero(known.any(0))
    x0, x1, y0, y1 = columns[0], columns[-1] + 1, rows[0], rows[-1] + 1
    cells = np.pad(memory.cells[x0:x1, y0:y1], ((1, 1), (1, 1), (0, 0)))
    column, row = memory.position[0] - x0 + 1, memory.position[1] - y0 + 1
    width, height = cells.shape[:2]
    turns = (memory.direction + 1) % 4
    for _ in range(turns):
        column, row, width, height = row, width - 1 - column, height, width
    return np.ascontiguousarray(np.rot90(cells, -turns)), (int(column), int(row))


class MiniGridDescriber:
    """Describe a MiniGrid view in egocentric terms, with or without a remembered map.

    It shows what the agent may know and no more: its view, what it carries, the mission
    and, with ``memory``, what it has seen since the reset, put together by dead reckoning
    from views, actions and compass. Cells remembered are as last seen. Where other things move
    into the cell ahead as the agent steps (Dynamic-Obstacles), a step that did not happen is
    counted and the map goes wrong: leave ``memory`` off there. The family refuses it.

    Facts of a request: ``map``, uint8 ``[columns, rows, 3]`` in MiniGrid's codes, turned so
    that ahead is up; ``position``, the agent's (column, row) in it; ``carrying``, (object,
    colour) codes or ``None``; ``mission``; ``memory``. A remembered map is framed by one
    ring of unseen cells, so every known cell has all its neighbours in the map. ``view``
    and ``direction`` are the observation as it came, by which recordings are looked up.
    The text names the direction only with ``key_direction``: an advisor that used it
    without would be answering a question that was not asked.

    Args:
        memory: Whether to remember each row's map. Default: ``False``.
        key_direction: Whether the cache key tells compass directions apart. Advice in
            egocentric terms does not depend on them. Default: ``False``.
        image: Whether a request holds what the text shows as a picture too, which needs
            MiniGrid. Default: ``False``.
        done_is_valid: Whether ``done`` is described as what ends the mission, as GoToDoor and
            GoToObject have it, and not as doing nothing. Default: ``False``.
        num_actions: How many of MiniGrid's actions the room has: the first so many. Default:
            ``7``, all.

    Raises:
        ValueError: If an observation lacks the 7x7-like shape ``[N, N, 3]``.

    Examples:
        >>> view = np.ones((7, 7, 3), dtype=np.uint8)
        >>> view[4, 4] = (KEY, 4, 0)
        >>> seen = {"image": view, "direction": np.array([0]), "mission": "get the key"}
        >>> request = MiniGridDescriber().request(0, seen)
        >>> "yellow key: 2 ahead, 1 to the right" in request.description
        True
    """

    in_keys = ("image", "direction", "mission")

    def __init__(
        self,
        *,
        memory: bool = False,
        key_direction: bool = False,
        image: bool = False,
        done_is_valid: bool = False,
        num_actions: int = len(ACTIONS),
    ):
        self.actions = ACTIONS[:num_actions]
        meanings = _ACTION_MEANINGS | ({"done": _DONE} if done_is_valid else {})
        self.meanings = tuple(meanings[action] for action in self.actions)
        self.memory = memory
        self.key_direction = key_direction
        self.image = image
        self.done_is_valid = done_is_valid
        self._rows: dict[int, _Memory] = {}

    def observe(
        self, row: int, observation: Mapping[str, Any], action: int | None, *, reset: bool
    ) -> None:
        """Take note of a new observation, reached by ``action`` (``None`` after a reset)."""
        if not self.memory:
            return
        view = _view(observation)
        direction = int(np.asarray(observation["direction"]).reshape(-1)[0])
        memory = self._rows.get(row)
        if reset or memory is None:
            size = 4 * view.shape[0]
            cells = np.zeros((size, size, 3), dtype=np.uint8)
            memory = _Memory(cells, (size // 2, size // 2), view, direction)
            self._rows[row] = memory
        elif (
            action is not None
            and ACTIONS[action] == "forward"
            # The cell ahead, always in view, decides whether the step was taken.
            and _enterable(memory.view[memory.view.shape[0] // 2, -2])
        ):
            dx, dy = _STEPS[memory.direction]
            memory.position = (memory.position[0] + dx, memory.position[1] + dy)
        memory.view, memory.direction = view.copy(), direction
        _record(memory)

    def cache_key(self, row: int, observation: Mapping[str, Any]) -> str:
        """Return a digest of the view or map, what is carried, and the mission."""
        view = _view(observation)
        digest = hashlib.blake2b(str(observation["mission"]).encode(), digest_size=16)
        # The view's own cell shows what is carried.
        if self.memory:
            cells, position = _egocentric(self._memory(row))
            digest.update(f"\0{cells.shape}{position}{carried_object(view)}".encode())
            digest.update(cells.tobytes())
        else:
            digest.update(b"\0" + np.ascontiguousarray(view).tobytes())
        if self.done_is_valid:
            digest.update(b"done")
        if self.key_direction:
            digest.update(bytes([int(np.asarray(observation["direction"]).reshape(-1)[0])]))
        return ("map:" if self.memory else "view:") + digest.hexdigest()

    def coarse_key(self, row: int, observation: Mapping[str, Any]) -> str:
        """Return what a situation shares with those near it.

        Mission, what is carried, what is ahead, and of each thing in view that the mission
        names (of all, where it names none of them; of lava always) its kind, side (left,
        middle, right) and distance band (1, 2-3, beyond). Colours are told by what they mean
        alone: whether the mission names the thing, as which of its colours where it has several
        (``c1`` the first), and whether the key that is carried fits.
        """
        view, mission = _view(observation), str(observation["mission"])
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
        for column, line in np.argwhere(np.isin(view[..., 0], (DOOR, *PICKABLE, GOAL, LAVA))):
            cell, ahead, right = view[column, line], int(last - line), int(column - middle)
            if ahead or right:
                distance = ahead + abs(right)
                band = 0 if distance == 1 else 1 if distance <= 3 else 2
                thing = f"{_role(cell, mission, carrying)} {np.sign(right)} {band}"
                kept = named if _named(cell, mission) else lava if cell[0] == LAVA else others
                kept.add(thing)
        return "|".join([*parts, *sorted(lava | (named or others))])

    def request(self, row: int, observation: Mapping[str, Any]) -> AdviceRequest:
        """Return the situation as text and as facts."""
        view = _view(observation)
        mission = str(observation["mission"])
        direction = int(np.asarray(observation["direction"]).reshape(-1)[0])
        carrying = carried_object(view)
        if self.memory:
            cells, position = _egocentric(self._memory(row))
        else:
            cells, position = view.copy(), (view.shape[0] // 2, view.shape[1] - 1)
            cells[position] = (EMPTY, 0, 0)
        return AdviceRequest(
            description=self._text(cells, position, carrying, mission, observation),
            actions=self.actions,
            cache_key=self.cache_key(row, observation),
            facts={
                "map": cells,
                "position": position,
                "carrying": carrying,
                "mission": mission,
                "memory": self.memory,
                "view": view.copy(),
                "direction": direction,
            },
            action_meanings=self.meanings,
            mission=mission,
            image=view_png(cells, position) if self.image else None,
        )

    def _memory(self, row: int) -> _Memory:
        if row not in self._rows:
            raise RuntimeError(
                f"Row {row} has no map yet: call observe() for each observation of a row "
                "before cache_key() and request()."
            )
        return self._rows[row]

    def _text(
        self,
        cells: np.ndarray,
        position: tuple[int, int],
        carrying: tuple[int, int] | None,
        mission: str,
        observation: Mapping[str, Any],
    ) -> str:
        column, row = position
        what = "What you remember and see" if self.memory else "What you see"
        lines = [
            f"Mission: {mission or 'none given'}",
            "",
            f"{what} ({_LEGEND}):",
            grid_text(cells, position),
            "",
            f"Notable: {notable_things(cells, position)}",
            f"In front of you: {object_name(cells[column, row - 1])}",
            "You carry: "
            + ("nothing" if carrying is None else f"{COLORS[carrying[1]]} {OBJECTS[carrying[0]]}"),
        ]
        if self.key_direction:
            compass = ("east", "south", "west", "north")
            lines.append(
                f"You face: {compass[int(np.asarray(observation['direction']).reshape(-1)[0])]}"
            )
        lines += ["", "Actions:"]
        meant = zip(self.actions, self.meanings, strict=True)
        lines += [f"- {action}: {meaning}" for action, meaning in meant]
        return "\n".join(lines)


def grid_text(cells: np.ndarray, position: tuple[int, int]) -> str:
    """Draw an egocentric map, one character a cell, the agent as ``^`` facing up."""
    drawn = [
        [
            _DOOR_SYMBOLS[int(cell[2])] if cell[0] == DOOR else _SYMBOLS.get(int(cell[0]), "?")
            for cell in cells[:, row]
        ]
        for row in range(cells.shape[1])
    ]
    drawn[position[1]][position[0]] = "^"
    return "\n".join("".join(line) for line in drawn)


def notable_things(cells: np.ndarray, position: tuple[int, int]) -> str:
    """List doors, objects, goals and lava with their place relative to the agent."""
    things = []
    for column, row in np.argwhere(np.isin(cells[..., 0], (DOOR, *PICKABLE, GOAL, LAVA))):
        ahead, right = position[1] - row, column - position[0]
        if ahead == 0 and right == 0:
            continue
        places = [
            f"{abs(ahead)} {'ahead' if ahead > 0 else 'behind'}" if ahead else "level with you"
        ]
        if right:
            places.append(f"{abs(right)} to the {'right' if right > 0 else 'left'}")
        text = f"{object_name(cells[column, row])}: {', '.join(places)}"
        things.append((abs(ahead) + abs(right), text))
    return "; ".join(text for _, text in sorted(things)) or "nothing notable"


def _view(observation: Mapping[str, Any]) -> np.ndarray:
    view = np.asarray(observation["image"])
    if view.ndim != 3 or view.shape[0] != view.shape[1] or view.shape[2] != 3:
        raise ValueError(f"image must have shape [N, N, 3], got {view.shape}.")
    return view
