"""Crafter's rules as its own data file has them, and the codes of what is seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

try:
    import crafter
    from crafter import constants
except ImportError as err:
    raise ImportError(
        "Crafter is not installed: pip install 'lore-torchrl[crafter]', or choose another env."
    ) from err

#: Columns and rows of the local view, and the player's cell in its middle.
VIEW = (9, 7)
CENTER = (VIEW[0] // 2, VIEW[1] // 2)
Cell = tuple[int, int]
ACTIONS: tuple[str, ...] = tuple(constants.actions)
ACHIEVEMENTS: tuple[str, ...] = tuple(constants.achievements)
ITEMS: tuple[str, ...] = tuple(constants.items)
WALKABLE = frozenset(constants.walkable)
#: What a material needs and gives, where a thing can be placed, what a tool is made of.
COLLECT, PLACE, MAKE = constants.collect, constants.place, constants.make
#: By the order of ``stance``'s facing.
DIRECTIONS = ((-1, 0), (1, 0), (0, -1), (0, 1))
DIRECTION_NAMES = ("left", "right", "up", "down")
NEEDS = ("health", "food", "drink", "energy")
#: Needs at or below these are low.
LOW = {"health": 3, "food": 4, "drink": 4, "energy": 3}

_KINDS = ("Player", "Cow", "Zombie", "Skeleton", "Arrow", "Plant")
#: Names of the codes in ``view``: nothing (beyond the edge), materials, things that move or grow.
CODES: tuple[str, ...] = (
    "edge",
    *constants.materials,
    *(kind.lower() for kind in _KINDS),
    "ripe plant",
)
CODE = {name: code for code, name in enumerate(CODES)}
RIPE = CODE["ripe plant"]
OBJECTS = {getattr(crafter.objects, kind): CODE[kind.lower()] for kind in _KINDS}


def step(cell: Cell, direction: int) -> Cell:
    """Return the neighbor of a cell in one of :data:`DIRECTIONS`."""
    return cell[0] + DIRECTIONS[direction][0], cell[1] + DIRECTIONS[direction][1]


def things_around(view: np.ndarray, cell: Cell) -> set[str]:
    """Return what the game takes to be near a cell: nothing at the world's left and upper edge.

    Its own look-up slices from -1 there, which is empty.
    """
    x, y = cell
    edge = CODE["edge"]
    if (x > 0 and view[x - 1, y] == edge) or (y > 0 and view[x, y - 1] == edge):
        return set()
    codes = view[max(x - 1, 0) : x + 2, max(y - 1, 0) : y + 2]
    return {CODES[code] for code in codes.reshape(-1)}


@dataclass(frozen=True)
class Situation:
    """What a player sees and has: the facts of a request.

    ``view`` are the codes of the local view, uint8 ``[9, 7]``, ``facing`` is an index into
    :data:`DIRECTIONS`, ``unlocked`` are the achievements of this episode.
    """

    view: np.ndarray
    inventory: Mapping[str, int]
    facing: int
    asleep: bool
    dark: bool
    unlocked: frozenset[str]

    @classmethod
    def read(cls, observation: Mapping[str, Any]) -> Situation:
        """Read one row of the environment's output."""
        facing, asleep, daylight = observation["stance"].tolist()
        return cls(
            np.array(observation["view"]),
            dict(zip(ITEMS, observation["inventory"].tolist(), strict=True)),
            facing,
            bool(asleep),
            daylight < 50,
            frozenset(np.array(ACHIEVEMENTS)[observation["achievements"] > 0].tolist()),
        )

    @property
    def ahead(self) -> str:
        """What the player faces."""
        return self.at(step(CENTER, self.facing))

    def at(self, cell: Cell) -> str:
        """Return what is in a cell, ``"edge"`` beyond the view."""
        inside = 0 <= cell[0] < VIEW[0] and 0 <= cell[1] < VIEW[1]
        return CODES[self.view[cell]] if inside else "edge"

    def cells(self, *kinds: str) -> list[Cell]:
        """Return the cells in view that hold one of ``kinds``."""
        found = np.argwhere(np.isin(self.view, [CODE[kind] for kind in kinds]))
        return [(int(column), int(row)) for column, row in found]

    def beside(self, things: Iterable[str], cell: Cell = CENTER) -> bool:
        """Return whether all ``things`` are near a cell."""
        return things_around(self.view, cell).issuperset(things)

    def has(self, items: Mapping[str, int]) -> bool:
        """Return whether the inventory covers what a rule asks for."""
        return all(self.inventory[item] >= count for item, count in items.items())
