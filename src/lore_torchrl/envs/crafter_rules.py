"""Crafter's rules as its own data file has them, and the codes of what is seen."""

from __future__ import annotations

import numpy as np

try:
    import crafter
    from crafter import constants
except ImportError as err:
    raise ImportError(
        "Crafter is not installed: pip install 'lore-torchrl[crafter]', or choose another env."
    ) from err

#: Columns and rows of the local view, the player in its middle.
VIEW = (9, 7)
ACTIONS: tuple[str, ...] = tuple(constants.actions)
ACHIEVEMENTS: tuple[str, ...] = tuple(constants.achievements)
ITEMS: tuple[str, ...] = tuple(constants.items)
WALKABLE = frozenset(constants.walkable)
#: What a material needs and gives, where a thing can be placed, what a tool is made of.
COLLECT, PLACE, MAKE = constants.collect, constants.place, constants.make
#: By the order of ``stance``'s facing.
DIRECTIONS = ((-1, 0), (1, 0), (0, -1), (0, 1))
DIRECTION_NAMES = ("left", "right", "up", "down")

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


def things_around(view: np.ndarray, cell: tuple[int, int]) -> set[str]:
    """Return what the game takes to be near a cell: nothing at the world's left and upper edge.

    Its own look-up slices from -1 there, which is empty.

    Args:
        view: Codes of the local view, ``[columns, rows]``.
        cell: Column and row of a cell of it that is in the world.
    """
    x, y = cell
    codes = view[max(x - 1, 0) : x + 2, max(y - 1, 0) : y + 2]
    outside = (x > 0 and view[x - 1, y] == CODE["edge"]) or (
        y > 0 and view[x, y - 1] == CODE["edge"]
    )
    return set() if outside else {CODES[code] for code in codes.reshape(-1)}
