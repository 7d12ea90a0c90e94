"""Crafter's rules as its own data file has them, and the codes of what is seen."""

from __future__ import annotations

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
