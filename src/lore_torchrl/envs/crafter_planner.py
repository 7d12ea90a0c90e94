"""A planner for Crafter's achievement tree, from what is in view."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.envs.crafter_rules import (
    ACTIONS,
    CODE,
    CODES,
    COLLECT,
    DIRECTION_NAMES,
    DIRECTIONS,
    MAKE,
    PLACE,
    VIEW,
    WALKABLE,
    things_around,
)

_CENTRE = (VIEW[0] // 2, VIEW[1] // 2)
_INDEX = {action: index for index, action in enumerate(ACTIONS)}
# Needs at or below these are seen to before anything is built.
_THIRST, _HUNGER, _FATIGUE, _WEAK = 4, 4, 3, 3
_ORES = ("stone", "coal", "iron", "diamond")
Cell = tuple[int, int]


@dataclass(frozen=True)
class _Situation:
    view: np.ndarray
    held: Mapping[str, int]
    facing: int
    dark: bool
    unlocked: frozenset[str]

    def at(self, cell: Cell) -> str:
        inside = 0 <= cell[0] < VIEW[0] and 0 <= cell[1] < VIEW[1]
        return CODES[self.view[cell]] if inside else "edge"

    def cells(self, *kinds: str) -> list[Cell]:
        found = np.argwhere(np.isin(self.view, [CODE[kind] for kind in kinds]))
        return [(int(column), int(row)) for column, row in found]

    def can_collect(self, material: str) -> bool:
        return all(self.held[item] >= n for item, n in COLLECT[material]["require"].items())

    def affords(self, uses: Mapping[str, int]) -> bool:
        return all(self.held[item] >= count for item, count in uses.items())

    def beside(self, things: Iterable[str], cell: Cell = _CENTRE) -> bool:
        return things_around(self.view, cell).issuperset(things)

    @property
    def ahead(self) -> str:
        return self.at(_step(_CENTRE, self.facing))


class CrafterPlanner:
    """What to do next on the way through Crafter's achievements, by what is in view.

    In order: fight what is adjacent, or flee from it when weak; drink, eat or sleep where a need
    is low; take the easy achievements that lie near (a drink, a cow, a sapling, a
    plant, a nap); then the tree of tools, each with what it is made of: wood, table, wooden
    pickaxe and sword, stone, stone tools, coal, iron, furnace, iron tools, diamond. It digs
    where it has a pickaxe. Where nothing of use is in view it goes on the way it faces. It
    remembers nothing: a table out of sight is built anew. It does not wall itself in
    for the night, nor guard plants until they are ripe.

    Returns one value an action: 1 for the one chosen, -1 for a step into lava, else 0.
    """

    def __call__(self, request: AdviceRequest) -> list[float] | None:
        """Return one value an action, ``None`` for requests of other describers."""
        facts = request.facts
        if request.actions != ACTIONS or "unlocked" not in facts:
            return None
        here = _Situation(
            facts["view"], facts["inventory"], facts["facing"], facts["dark"], facts["unlocked"]
        )
        values = [0.0] * len(ACTIONS)
        for direction, name in enumerate(DIRECTION_NAMES):
            if here.at(_step(_CENTRE, direction)) == "lava":
                values[_INDEX[f"move_{name}"]] = -1.0
        chosen = "sleep" if facts["asleep"] else next(_wishes(here))
        values[_INDEX[chosen]] = 1.0
        return values


def _wishes(here: _Situation) -> Iterator[str]:
    """Yield what could be done, the most pressing first; the last is always possible."""
    for source in (_danger, _needs, _easy, _tools, _explore):
        yield from (action for action in source(here) if action is not None)


def _danger(here: _Situation) -> Iterator[str | None]:
    for enemy in here.cells("zombie", "skeleton"):
        if _distance(enemy) == 1:
            yield _flee(here, enemy) if here.held["health"] <= _WEAK else _use(here, [enemy])


def _needs(here: _Situation) -> Iterator[str | None]:
    held = here.held
    if held["drink"] <= _THIRST:
        yield _use(here, here.cells("water"))
    if held["food"] <= _HUNGER:
        yield _use(here, here.cells("cow", "ripe plant"))
    if held["energy"] <= _FATIGUE and not here.cells("zombie", "skeleton"):
        yield "sleep"


def _easy(here: _Situation) -> Iterator[str | None]:
    def missing(name: str) -> bool:
        return name not in here.unlocked

    if missing("collect_drink"):
        yield _use(here, here.cells("water"))
    if missing("eat_cow"):
        yield _use(here, here.cells("cow"))
    if missing("eat_plant"):
        yield _use(here, here.cells("ripe plant"))
    if missing("place_plant") and here.held["sapling"] and here.ahead in PLACE["plant"]["where"]:
        yield "place_plant"
    if missing("collect_sapling") and here.ahead == "grass":
        yield "do"
    if missing("wake_up") and here.held["energy"] < 9 and not here.dark:
        yield None if here.cells("zombie", "skeleton") else "sleep"
    for enemy in ("zombie", "skeleton"):
        if missing(f"defeat_{enemy}") and here.held["health"] > _WEAK + 2:
            yield _use(here, here.cells(enemy))


def _tools(here: _Situation) -> Iterator[str | None]:
    for tool in MAKE:
        if not here.held[tool]:
            yield from _make(here, tool)
    if "place_stone" not in here.unlocked and here.held["stone"]:
        yield _place(here, "stone")
    if "collect_diamond" not in here.unlocked:
        yield _collect(here, "diamond")


def _make(here: _Situation, tool: str) -> Iterator[str | None]:
    """Yield the step towards a tool, its materials and what must stand beside it."""
    uses, nearby = MAKE[tool]["uses"], MAKE[tool]["nearby"]
    if here.affords(uses) and here.beside(nearby):
        yield f"make_{tool}"
    for item, count in uses.items():
        if here.held[item] < count:
            yield _collect(here, _source(item))
            return
    for direction in (0, 2):
        # At the left and upper edge of the world nothing counts as near.
        if nearby and here.at(_step(_CENTRE, direction)) == "edge":
            inward = direction + 1
            yield _go(here, inward) if _passable(here, _step(_CENTRE, inward)) else None
    if all(here.cells(thing) for thing in nearby):
        yield _approach(here, [cell for cell in here.cells(*WALKABLE) if here.beside(nearby, cell)])
    for thing in nearby:
        if here.beside([thing]):
            continue
        # One that stands too far from what is here already is built anew.
        if here.cells(thing) and not any(here.beside([other]) for other in nearby):
            yield _approach(here, here.cells(thing))
        for item, count in PLACE[thing]["uses"].items():
            # What the tool itself takes must be left.
            if here.held[item] < count + uses.get(item, 0):
                yield _collect(here, _source(item))
                return
        yield _place(here, thing)


def _explore(here: _Situation) -> Iterator[str | None]:
    """Yield the way on: ahead while it is free, else to the side with most room."""
    if _free(here, _step(_CENTRE, here.facing)):
        yield f"move_{DIRECTION_NAMES[here.facing]}"
    if here.ahead in _ORES and here.can_collect(here.ahead):
        yield "do"
    back = here.facing ^ 1
    sides = [side for side in range(4) if here.at(_step(_CENTRE, side)) != "lava"]
    rooms = [(_room(here, side), side != back, -side) for side in sides if side != here.facing]
    yield f"move_{DIRECTION_NAMES[-max(rooms)[2]]}" if rooms else "noop"


def _source(item: str) -> str:
    return next(name for name, rule in COLLECT.items() if item in rule["receive"])


def _collect(here: _Situation, material: str) -> str | None:
    return _use(here, here.cells(material)) if here.can_collect(material) else None


def _place(here: _Situation, thing: str) -> str | None:
    """Place it ahead, or step to where that is possible."""
    if not here.affords(PLACE[thing]["uses"]):
        return None
    if here.ahead in PLACE[thing]["where"]:
        return f"place_{thing}"
    for direction in range(4):
        ahead = _step(_CENTRE, direction)
        if _free(here, ahead) and here.at(_step(ahead, direction)) in PLACE[thing]["where"]:
            return f"move_{DIRECTION_NAMES[direction]}"
    return None


def _use(here: _Situation, targets: list[Cell]) -> str | None:
    """Face the nearest target that can be reached, and use it."""
    if _step(_CENTRE, here.facing) in targets:
        return "do"
    return _approach(here, targets)


def _approach(here: _Situation, targets: list[Cell]) -> str | None:
    """Return the first step of the shortest way to a target, digging where that is possible."""
    if not targets:
        return None
    goals, first = set(targets), {_CENTRE: -1}
    queue = deque([_CENTRE])
    while queue:
        cell = queue.popleft()
        for direction in range(4):
            ahead = _step(cell, direction)
            if ahead in first:
                continue
            start = direction if cell == _CENTRE else first[cell]
            if ahead in goals:
                return _go(here, start)
            if _passable(here, ahead):
                first[ahead] = start
                queue.append(ahead)
    return None


def _go(here: _Situation, direction: int) -> str:
    """Step, or turn; dig what is in the way once it is faced."""
    if direction == here.facing and _diggable(here, _step(_CENTRE, direction)):
        return "do"
    return f"move_{DIRECTION_NAMES[direction]}"


def _flee(here: _Situation, enemy: Cell) -> str | None:
    ways = [side for side in range(4) if _free(here, _step(_CENTRE, side))]

    def gap(side: int) -> int:
        cell = _step(_CENTRE, side)
        return abs(cell[0] - enemy[0]) + abs(cell[1] - enemy[1])

    return f"move_{DIRECTION_NAMES[max(ways, key=gap)]}" if ways else _use(here, [enemy])


def _room(here: _Situation, direction: int) -> int:
    cell, steps = _step(_CENTRE, direction), 0
    while _free(here, cell):
        cell, steps = _step(cell, direction), steps + 1
    return steps


def _free(here: _Situation, cell: Cell) -> bool:
    return here.at(cell) in WALKABLE


def _passable(here: _Situation, cell: Cell) -> bool:
    return _free(here, cell) or _diggable(here, cell)


def _diggable(here: _Situation, cell: Cell) -> bool:
    return here.at(cell) in _ORES and here.can_collect(here.at(cell))


def _step(cell: Cell, direction: int) -> Cell:
    return cell[0] + DIRECTIONS[direction][0], cell[1] + DIRECTIONS[direction][1]


def _distance(cell: Cell) -> int:
    return abs(cell[0] - _CENTRE[0]) + abs(cell[1] - _CENTRE[1])
