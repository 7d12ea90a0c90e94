"""The map of a MiniGrid room with the agent in it, and the ways through it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lore_torchrl.envs.minigrid_describe import (
    CLOSED,
    DOOR,
    EMPTY,
    FLOOR,
    GOAL,
    KEY,
    OPEN,
    PICKABLE,
    UNSEEN,
    WALL,
)

Cell = tuple[int, int]
Distances = dict[tuple[Cell, int], float]
# Egocentric headings ahead, right, behind, left as (columns, rows); rows grow backwards.
HEADINGS = ((0, -1), (1, 0), (0, 1), (-1, 0))
_UNSEEN_CELL = (UNSEEN, 0, 0)
# More than any way round in a room: only objects that truly bar the way are taken up.
_PUSH = 50.0


@dataclass(frozen=True)
class Situation:
    """A map with the agent in it; actions lead from one to the next."""

    cells: Mapping[Cell, tuple[int, int, int]]
    position: Cell
    heading: int
    carrying: tuple[int, int] | None

    @property
    def front(self) -> Cell:
        """The cell ahead of the agent."""
        dx, dy = HEADINGS[self.heading]
        return self.position[0] + dx, self.position[1] + dy

    def at(self, cell: Cell) -> tuple[int, int, int]:
        """Return kind, colour and state of a cell; what lies off the map is unseen."""
        return self.cells.get(cell, _UNSEEN_CELL)

    def find(self, *kinds: int) -> list[Cell]:
        """Return the cells that hold one of ``kinds``."""
        return [cell for cell, content in self.cells.items() if content[0] in kinds]

    def put(self, cell: Cell, content: tuple[int, int, int], **changes: object) -> Situation:
        """Return the situation with one cell and the fields in ``changes`` replaced."""
        return replace(self, cells={**self.cells, cell: content}, **changes)

    def entry_cost(self, cell: Cell, *, push: bool = False) -> float:
        """Return the steps to enter a neighbouring cell that the agent faces."""
        kind, color, state = self.at(cell)
        if kind in (EMPTY, FLOOR, GOAL):
            return 1.0
        if kind == DOOR:
            if state == OPEN:
                return 1.0
            if state == CLOSED or self.carrying == (KEY, color):
                return 2.0
        return _PUSH if push and kind in PICKABLE else math.inf


@dataclass(frozen=True)
class SubGoal:
    """Face one of ``targets``, then take ``action``."""

    targets: frozenset[Cell]
    action: str
    needs: tuple[int, int] | None = None


def distances_to(now: Situation, goal: SubGoal, *, push: bool = False) -> Distances:
    """Return the steps to complete ``goal`` from each (position, heading) that can.

    Dijkstra backwards from the states that face a target: entering a closed door costs a
    toggle more.
    """
    distance: Distances = {}
    queue: list[tuple[float, Cell, int]] = []
    enter: dict[Cell, float] = {}

    def cost(cell: Cell) -> float:
        if cell not in enter:
            enter[cell] = now.entry_cost(cell, push=push)
        return enter[cell]

    for target in goal.targets:
        for heading, (dx, dy) in enumerate(HEADINGS):
            cell = (target[0] - dx, target[1] - dy)
            if cell == now.position or math.isfinite(cost(cell)):
                # A goal behind no door is one step; a target door is toggled, not entered.
                heapq.heappush(queue, (0.0 if goal.action == "look" else 1.0, cell, heading))
    while queue:
        steps, cell, heading = heapq.heappop(queue)
        if (cell, heading) in distance:
            continue
        distance[cell, heading] = steps
        for turn in (1, 3):
            if (cell, (heading + turn) % 4) not in distance:
                heapq.heappush(queue, (steps + 1.0, cell, (heading + turn) % 4))
        dx, dy = HEADINGS[heading]
        back = (cell[0] - dx, cell[1] - dy)
        # The agent's own cell may be one that it could not enter again, such as lava.
        if (back, heading) not in distance and (back == now.position or math.isfinite(cost(back))):
            step = cost(cell)
            if math.isfinite(step):
                heapq.heappush(queue, (steps + step, back, heading))
    return distance


def distance_to(now: Situation, goal: SubGoal) -> float:
    """Return the steps to complete ``goal`` from here, ``inf`` where it cannot be."""
    if goal.needs is not None and now.carrying != goal.needs:
        return math.inf
    return distances_to(now, goal).get((now.position, now.heading), math.inf)


def reachable(now: Situation, goal: SubGoal) -> bool:
    """Return whether there is a target that can be faced, and what it needs is carried."""
    return bool(goal.targets) and math.isfinite(distance_to(now, goal))


def turning_reveals(now: Situation, view: Cell) -> bool:
    """Return whether a turn on the spot is sure to show an unseen cell.

    Sight spreads as in MiniGrid, row by row away from the agent, and is taken to end at
    what is unseen.

    Args:
        now: The situation.
        view: Columns and rows of the agent's view.
    """
    for heading in (1, 2, 3):
        (ahead_x, ahead_y), (right_x, right_y) = HEADINGS[heading], HEADINGS[(heading + 1) % 4]
        row = {0}
        for ahead in range(view[1]):
            following: set[int] = set()
            for side in (1, -1):
                # What is lit on one side of a clear cell may be clear and light the next.
                for column in range(-(view[0] // 2) * side, (view[0] // 2 + 1) * side, side):
                    if column not in row:
                        continue
                    kind, _, state = now.at(
                        (
                            now.position[0] + ahead * ahead_x + column * right_x,
                            now.position[1] + ahead * ahead_y + column * right_y,
                        )
                    )
                    if kind == UNSEEN:
                        return True
                    if kind != WALL and (kind != DOOR or state == OPEN):
                        row.add(column + side)
                        following |= {column, column + side}
            row = {column for column in following if abs(column) <= view[0] // 2}
    return False
