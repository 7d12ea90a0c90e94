"""A planner for Crafter's achievement tree, from what is in view."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.envs.crafter.rules import (
    ACHIEVEMENTS,
    ACTIONS,
    CENTER,
    COLLECT,
    DIRECTION_NAMES,
    LOW,
    MAKE,
    PLACE,
    WALKABLE,
    Cell,
    Situation,
    step,
)

_INDEX = {action: index for index, action in enumerate(ACTIONS)}
_ORES = ("stone", "coal", "iron", "diamond")


class CrafterPlanner:
    """What to do next on the way through Crafter's achievements, by what is in view.

    In order: fight what is adjacent, or flee from it when weak; drink, eat or sleep where a need
    is low; take the easy achievements that lie near (a drink, a cow, a sapling, a
    plant, a nap); then the tree of tools, each with what it is made of. It digs where it has a
    pickaxe. Where nothing of use is in view it goes on the way it faces. It remembers nothing:
    a table out of sight is built again.

    Returns one value an action: 1 for the one chosen, -1 for a step into lava, else 0.
    """

    def __call__(self, request: AdviceRequest) -> list[float] | None:
        """Return one value an action, ``None`` for requests of other describers."""
        facts = request.facts
        if request.actions != ACTIONS or "unlocked" not in facts:
            return None
        here = Situation(**facts)
        values = [0.0] * len(ACTIONS)
        for direction, name in enumerate(DIRECTION_NAMES):
            if here.at(step(CENTER, direction)) == "lava":
                values[_INDEX[f"move_{name}"]] = -1.0
        chosen = "sleep" if here.asleep else next(_wishes(here))
        values[_INDEX[chosen]] = 1.0
        return values


def _wishes(here: Situation) -> Iterator[str]:
    """Yield what could be done, the most pressing first; the last is always possible."""
    for source in (_danger, _needs, _easy, _tools, _explore):
        yield from (action for action in source(here) if action is not None)


def _danger(here: Situation) -> Iterator[str | None]:
    for enemy in here.cells("zombie", "skeleton"):
        if _distance(enemy) == 1:
            weak = here.inventory["health"] <= LOW["health"]
            yield _flee(here, enemy) if weak else _use(here, [enemy])


def _needs(here: Situation) -> Iterator[str | None]:
    held = here.inventory
    if held["drink"] <= LOW["drink"]:
        yield _use(here, here.cells("water"))
    if held["food"] <= LOW["food"]:
        yield _use(here, here.cells("cow", "ripe plant"))
    if held["energy"] <= LOW["energy"] and not here.cells("zombie", "skeleton"):
        yield "sleep"


def _easy(here: Situation) -> Iterator[str | None]:
    missing = set(ACHIEVEMENTS) - here.unlocked
    easy = {"collect_drink": "water", "eat_cow": "cow", "eat_plant": "ripe plant"}
    for name, kind in easy.items():
        if name in missing:
            yield _use(here, here.cells(kind))
    rule = PLACE["plant"]
    if "place_plant" in missing and here.has(rule["uses"]) and here.ahead in rule["where"]:
        yield "place_plant"
    if "collect_sapling" in missing and here.ahead == "grass":
        yield "do"
    if "wake_up" in missing and here.inventory["energy"] < 9 and not here.dark:
        yield None if here.cells("zombie", "skeleton") else "sleep"
    for enemy in ("zombie", "skeleton"):
        if f"defeat_{enemy}" in missing and here.inventory["health"] > LOW["health"] + 2:
            yield _use(here, here.cells(enemy))


def _tools(here: Situation) -> Iterator[str | None]:
    for tool in MAKE:
        if not here.inventory[tool]:
            yield from _make(here, tool)
    if "place_stone" not in here.unlocked and here.inventory["stone"]:
        yield _place(here, "stone")
    if "collect_diamond" not in here.unlocked:
        yield _collect(here, "diamond")


def _make(here: Situation, tool: str) -> Iterator[str | None]:
    """Yield the step towards a tool, its materials and what must stand beside it."""
    uses, nearby = MAKE[tool]["uses"], MAKE[tool]["nearby"]
    if here.has(uses) and here.beside(nearby):
        yield f"make_{tool}"
    for item, count in uses.items():
        if here.inventory[item] < count:
            yield _collect(here, _source(item))
            return
    for direction in (0, 2):
        # At the left and upper edge of the world nothing counts as near.
        if nearby and here.at(step(CENTER, direction)) == "edge":
            inward = direction + 1
            cell = step(CENTER, inward)
            yield _go(here, inward) if _free(here, cell) or _diggable(here, cell) else None
    if all(here.cells(thing) for thing in nearby):
        yield _approach(here, [cell for cell in here.cells(*WALKABLE) if here.beside(nearby, cell)])
    for thing in nearby:
        if here.beside([thing]):
            continue
        # One that stands too far from what is here already is built again.
        if here.cells(thing) and not any(here.beside([other]) for other in nearby):
            yield _approach(here, here.cells(thing))
        for item, count in PLACE[thing]["uses"].items():
            # What the tool itself takes must be left.
            if here.inventory[item] < count + uses.get(item, 0):
                yield _collect(here, _source(item))
                return
        yield _place(here, thing)


def _explore(here: Situation) -> Iterator[str | None]:
    """Yield the way on: ahead while it is free, else to the side with most room."""
    if _free(here, step(CENTER, here.facing)):
        yield f"move_{DIRECTION_NAMES[here.facing]}"
    if here.ahead in _ORES and here.has(COLLECT[here.ahead]["require"]):
        yield "do"
    back = here.facing ^ 1
    sides = [side for side in range(4) if here.at(step(CENTER, side)) != "lava"]
    rooms = [(_room(here, side), side != back, -side) for side in sides if side != here.facing]
    yield f"move_{DIRECTION_NAMES[-max(rooms)[2]]}" if rooms else "noop"


def _source(item: str) -> str:
    return next(name for name, rule in COLLECT.items() if item in rule["receive"])


def _collect(here: Situation, material: str) -> str | None:
    return _use(here, here.cells(material)) if here.has(COLLECT[material]["require"]) else None


def _place(here: Situation, thing: str) -> str | None:
    """Place it ahead, or step to where that is possible."""
    if not here.has(PLACE[thing]["uses"]):
        return None
    if here.ahead in PLACE[thing]["where"]:
        return f"place_{thing}"
    for direction in range(4):
        ahead = step(CENTER, direction)
        if _free(here, ahead) and here.at(step(ahead, direction)) in PLACE[thing]["where"]:
            return f"move_{DIRECTION_NAMES[direction]}"
    return None


def _use(here: Situation, targets: list[Cell]) -> str | None:
    """Face the nearest target that can be reached, and use it."""
    return "do" if step(CENTER, here.facing) in targets else _approach(here, targets)


def _approach(here: Situation, targets: list[Cell]) -> str | None:
    """Return the first step of the shortest way to a target, digging where that is possible."""
    if not targets:
        return None
    first = {CENTER: -1}
    queue = deque([CENTER])
    while queue:
        cell = queue.popleft()
        for direction in range(4):
            ahead = step(cell, direction)
            if ahead in first:
                continue
            start = direction if cell == CENTER else first[cell]
            if ahead in targets:
                return _go(here, start)
            if _free(here, ahead) or _diggable(here, ahead):
                first[ahead] = start
                queue.append(ahead)
    return None


def _go(here: Situation, direction: int) -> str:
    """Step, or turn; dig what is in the way once it is faced."""
    if direction == here.facing and _diggable(here, step(CENTER, direction)):
        return "do"
    return f"move_{DIRECTION_NAMES[direction]}"


def _flee(here: Situation, enemy: Cell) -> str | None:
    ways = [side for side in range(4) if _free(here, step(CENTER, side))]
    if not ways:
        return _use(here, [enemy])
    away = max(ways, key=lambda side: _distance(step(CENTER, side), enemy))
    return f"move_{DIRECTION_NAMES[away]}"


def _room(here: Situation, direction: int) -> int:
    cell, steps = step(CENTER, direction), 0
    while _free(here, cell):
        cell, steps = step(cell, direction), steps + 1
    return steps


def _free(here: Situation, cell: Cell) -> bool:
    return here.at(cell) in WALKABLE


def _diggable(here: Situation, cell: Cell) -> bool:
    return here.at(cell) in _ORES and here.has(COLLECT[here.at(cell)]["require"])


def _distance(cell: Cell, other: Cell = CENTER) -> int:
    return abs(cell[0] - other[0]) + abs(cell[1] - other[1])
