"""A planner for MiniGrid that knows no more than the describer's facts."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.envs.minigrid_describe import (
    BOX,
    CLOSED,
    COLORS,
    DOOR,
    EMPTY,
    FLOOR,
    GOAL,
    KEY,
    LAVA,
    LOCKED,
    OBJECTS,
    OPEN,
    PICKABLE,
    UNSEEN,
)

Cell = tuple[int, int]
_Distances = dict[tuple[Cell, int], float]
# Egocentric headings ahead, right, behind, left as (columns, rows); rows grow backwards.
_HEADINGS = ((0, -1), (1, 0), (0, 1), (-1, 0))
_UNSEEN_CELL = (UNSEEN, 0, 0)
_DEADLY = -1000.0
_UNREACHABLE = 100.0
_UNDO = 2.0
_DROP_RADIUS = 3
# More than any way round in a room: only objects that truly bar the way are taken up.
_PUSH = 50.0
# Below one step, so it only decides between equally good turns. A planner without memory
# then sweeps one way round instead of turning back and forth.
_LEFT_BIAS = 0.25

_REACH = re.compile(r"\b(?:go|get|to|reach)\b.*\bgoal\b")
_FETCH = re.compile(
    r"^(?P<verb>pick up|get|go get|fetch|go fetch|you must fetch) (?:the|an?) "
    rf"(?:(?P<color>{'|'.join(COLORS)}) )?(?P<kind>key|ball|box)$"
)
_GO = re.compile(
    rf"^(?P<verb>go to|open) (?:the|an?) (?:(?P<color>{'|'.join(COLORS)}) )?"
    r"(?P<kind>key|ball|box|door)$"
)


@dataclass(frozen=True)
class _Situation:
    """A map with the agent in it; actions lead from one to the next."""

    cells: Mapping[Cell, tuple[int, int, int]]
    position: Cell
    heading: int
    carrying: tuple[int, int] | None

    @property
    def front(self) -> Cell:
        dx, dy = _HEADINGS[self.heading]
        return self.position[0] + dx, self.position[1] + dy

    def at(self, cell: Cell) -> tuple[int, int, int]:
        """Return kind, colour and state of a cell; what lies off the map is unseen."""
        return self.cells.get(cell, _UNSEEN_CELL)

    def find(self, *kinds: int) -> list[Cell]:
        """Return the cells that hold one of ``kinds``."""
        return [cell for cell, content in self.cells.items() if content[0] in kinds]

    def put(self, cell: Cell, content: tuple[int, int, int], **changes: object) -> _Situation:
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
class _Task:
    """What the mission asks to do with which object, and whether others may be taken up."""

    kind: int | None = None
    color: int | None = None
    tools: bool = True
    action: str = "pickup"


@dataclass(frozen=True)
class _SubGoal:
    """Face one of ``targets``, then take ``action``."""

    targets: frozenset[Cell]
    action: str
    needs: tuple[int, int] | None = None


class MiniGridPlanner:
    """Value each action by the steps left to the current sub-goal after taking it.

    The value is minus the number of steps of a shortest path over (position, heading)
    through the cells known, opening doors on the way. The sub-goal is the first of these
    that is known and can be reached:

    1. the goal, or the object that the mission names;
    2. an object that bars the way to a locked door: take it up;
    3. a locked door whose key is carried: open it;
    4. a key, unless an open door of its colour shows that it has served;
    5. an object that bars the way to the goal: take it up;
    6. a closed door: open it;
    7. the nearest unseen cell next to a cell that can be walked on: face it (before 6 where
       the mission is to go to something).

    Whatever else is carried is dropped first, where it blocks nothing. With none of these
    it turns right. Lava is never entered and has the lowest value. Useless actions leave
    the distance as it is; those to be undone later, such as dropping the key, add to it.
    Turning left counts a quarter step more than turning right, to decide between equals.

    It covers missions that reach a goal (Empty, DoorKey, MultiRoom, FourRooms, Crossing,
    LavaGap, DistShift, LockedRoom), open one door (Unlock, BabyAI's OpenDoor), pick up one
    named object (Fetch, UnlockPickup, BlockedUnlockPickup, KeyCorridor, BabyAI's Pickup) or
    go to one (GoToDoor, GoToObject, BabyAI's GoTo): facing it, ``done``. Boxes are not
    opened, so mazes that hide the key in one (ObstructedMaze ``h``) are explored but not
    solved, and moving obstacles are treated as fixed. For any other mission (Memory,
    PutNext, BabyAI's with several parts, places or "object"), and for a request without the
    facts of :class:`~lore_torchrl.envs.minigrid_describe.MiniGridDescriber`, it returns
    ``None``.

    Without the describer's memory it forgets what leaves the view. It then looks only for
    unseen cells within the view and, with nothing to do, walks along the walls and turns
    right. In rooms wider than the view it may do so for ever.

    Examples:
        >>> import numpy as np
        >>> from lore_torchrl.envs.minigrid_describe import MiniGridDescriber
        >>> view = np.ones((7, 7, 3), dtype=np.uint8)
        >>> view[3, 4] = (GOAL, 1, 0)
        >>> seen = {"image": view, "direction": np.array([0]), "mission": "reach the goal"}
        >>> values = MiniGridPlanner()(MiniGridDescriber().request(0, seen))
        >>> values[:3]
        [-3.25, -3.0, -1.0]
    """

    def __call__(self, request: AdviceRequest) -> list[float] | None:
        """Return one value an action, in the request's order, or ``None``."""
        facts = request.facts
        if not {"map", "position", "carrying", "mission", "memory"} <= facts.keys():
            return None
        task = _task(facts["mission"])
        if task is None:
            return None
        cells = {
            (column, row): tuple(content)
            for column, cells_of_column in enumerate(np.asarray(facts["map"]).tolist())
            for row, content in enumerate(cells_of_column)
            if content[0] != UNSEEN
        }
        now = _Situation(cells, facts["position"], 0, facts["carrying"])
        # Without memory, what lies behind the view's near edge can never become known.
        view = None if facts["memory"] else facts["map"].shape[:2]
        goal = _choose(now, task, view=view)
        distances = _distances(now, goal)
        return [_value(now, goal, action, distances) for action in request.actions]


def _task(mission: str) -> _Task | None:
    """Read a mission; ``None`` where it is not covered."""
    mission = mission.lower().strip()
    fetch = _FETCH.match(mission)
    if fetch:
        color = None if fetch["color"] is None else COLORS.index(fetch["color"])
        # Fetch, which never says "pick up", ends at the first object taken up.
        return _Task(OBJECTS.index(fetch["kind"]), color, tools=fetch["verb"] == "pick up")
    if _REACH.search(mission):
        return _Task(GOAL, action="forward")
    go = _GO.match(mission)
    if go and (go["verb"] == "go to" or go["kind"] == "door"):
        color = None if go["color"] is None else COLORS.index(go["color"])
        opens = go["verb"] == "open"
        # What is gone to may be a key or an obstacle: nothing is taken up on the way.
        action = "toggle" if opens else "done"
        return _Task(OBJECTS.index(go["kind"]), color, tools=opens, action=action)
    # Unlock: opening the locked door ends the episode, so there is nothing to find.
    return _Task() if mission == "open the door" else None


def _choose(now: _Situation, task: _Task, *, view: Cell | None) -> _SubGoal:
    """Return the sub-goal, the first of the planner's list that can be reached."""
    barred = None
    if task.kind is not None:
        wanted = [cell for cell in now.find(task.kind) if task.color in (None, now.cells[cell][1])]
        if task.action == "toggle":
            wanted = [cell for cell in wanted if _opens(now, cell)]
        goal = _SubGoal(frozenset(wanted), task.action)
        if _reachable(now, goal):
            by_hand = goal.action == "pickup" and now.carrying is not None
            return _drop(now, goal) if by_hand else goal
        barred = goal

    doors = [(cell, *now.cells[cell][1:]) for cell in now.find(DOOR)]
    if task.tools:
        if any(state == LOCKED for _, _, state in doors):
            errand = _unlock(now, doors) or _clear(now, barred)
        else:  # No key is known to be of use: what can be cleared by hand goes first.
            errand = _clear(now, barred) or _unlock(now, doors)
        if errand is not None:
            return errand

    closed = _SubGoal(frozenset(cell for cell, _, state in doors if state == CLOSED), "toggle")
    explore = _SubGoal(_frontier(now, view=view), "look")
    # GoToDoor ends where a wrong door is opened: there, look around first.
    for errand in (explore, closed) if task.action == "done" else (closed, explore):
        if _reachable(now, errand):
            return errand
    # Without memory: along the walls, one way round.
    ahead = view is not None and math.isfinite(now.entry_cost(now.front))
    return _SubGoal(frozenset(), "forward" if ahead else "right")


def _opens(now: _Situation, door: Cell) -> bool:
    """Return whether a door is shut and would open with what is carried."""
    _, color, state = now.at(door)
    return state == CLOSED or (state == LOCKED and now.carrying == (KEY, color))


def _unlock(now: _Situation, doors: Sequence[tuple[Cell, int, int]]) -> _SubGoal | None:
    """Return the next errand towards opening a locked door: clear it, open it, get the key."""
    locked = {color: cell for cell, color, state in doors if state == LOCKED}
    doorways = _SubGoal(frozenset(locked.values()), "toggle")
    if locked and not _reachable(now, doorways):
        clear = _clear(now, doorways)
        if clear is not None:
            return clear
    held_key = now.carrying[1] if now.carrying and now.carrying[0] == KEY else None
    if held_key in locked:
        unlock = _SubGoal(frozenset([locked[held_key]]), "toggle", needs=now.carrying)
        if _reachable(now, unlock):
            return unlock
    if held_key is not None and (not locked or held_key in locked):
        return None
    served = {color for _, color, state in doors if state == OPEN}
    useful = locked.keys() if locked else set(range(len(COLORS))) - served
    keys = frozenset(cell for cell in now.find(KEY) if now.cells[cell][1] in useful)
    fetch = _SubGoal(keys, "pickup")
    if not _reachable(now, fetch):
        return _clear(now, fetch)
    return fetch if now.carrying is None else _drop(now, fetch, doorways if locked else None)


def _reachable(now: _Situation, goal: _SubGoal) -> bool:
    return bool(goal.targets) and math.isfinite(_distance(now, goal))


def _frontier(now: _Situation, *, view: Cell | None) -> frozenset[Cell]:
    """Return the unseen cells, up to ``last_row``, beside a cell that can be walked on."""
    walkable = [now.position, *now.find(EMPTY, FLOOR)]
    walkable += [cell for cell in now.find(DOOR) if math.isfinite(now.entry_cost(cell))]
    beside = {(cell[0] + dx, cell[1] + dy) for cell in walkable for dx, dy in _HEADINGS}
    unseen = beside - now.cells.keys()
    if view is not None:
        unseen = {cell for cell in unseen if 0 <= cell[0] < view[0] and cell[1] < view[1]}
    return frozenset(unseen)


def _clear(now: _Situation, barred: _SubGoal | None) -> _SubGoal | None:
    """Return the errand of taking up the first object on the way to a barred sub-goal."""
    if barred is None or not barred.targets:
        return None
    distance = _distances(now, barred, push=True)
    state = (now.position, now.heading)
    if state not in distance:
        return None
    # Walk down the distances until an object stands in the way.
    while distance[state] > 1.0:
        here = replace(now, position=state[0], heading=state[1])
        ahead = here.front
        step = here.entry_cost(ahead, push=True)
        if distance.get((ahead, here.heading), math.inf) + step == distance[state]:
            if now.at(ahead)[0] in PICKABLE:
                clear = _SubGoal(frozenset([ahead]), "pickup")
                return clear if now.carrying is None else _drop(now, clear)
            state = (ahead, here.heading)
        else:
            turns = [(here.position, (here.heading + turn) % 4) for turn in (1, -1)]
            state = min(turns, key=lambda turned: distance.get(turned, math.inf))
    return None


def _drop(now: _Situation, later: _SubGoal, then: _SubGoal | None = None) -> _SubGoal:
    """Return the errand of emptying the hands where ``later``, and ``then``, stay reachable."""
    content = (*now.carrying, 0)
    cells, beside_doors = set(), set()
    for cell in now.find(EMPTY):
        near = abs(cell[0] - now.position[0]) + abs(cell[1] - now.position[1]) <= _DROP_RADIUS
        if not near or cell == now.position:
            continue
        put = now.put(cell, content, carrying=None)
        if _reachable(put, later) and (then is None or _reachable(put, then)):
            beside_door = any(
                now.at((cell[0] + dx, cell[1] + dy))[0] == DOOR for dx, dy in _HEADINGS
            )
            (beside_doors if beside_door else cells).add(cell)
    return _SubGoal(frozenset(cells or beside_doors), "drop")


def _distances(now: _Situation, goal: _SubGoal, *, push: bool = False) -> _Distances:
    """Return the steps to complete ``goal`` from each (position, heading) that can.

    Dijkstra backwards from the states that face a target: entering a closed door costs a
    toggle more.
    """
    distance: _Distances = {}
    queue: list[tuple[float, Cell, int]] = []
    enter: dict[Cell, float] = {}

    def cost(cell: Cell) -> float:
        if cell not in enter:
            enter[cell] = now.entry_cost(cell, push=push)
        return enter[cell]

    for target in goal.targets:
        for heading, (dx, dy) in enumerate(_HEADINGS):
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
        dx, dy = _HEADINGS[heading]
        back = (cell[0] - dx, cell[1] - dy)
        # The agent's own cell may be one that it could not enter again, such as lava.
        if (back, heading) not in distance and (back == now.position or math.isfinite(cost(back))):
            step = cost(cell)
            if math.isfinite(step):
                heapq.heappush(queue, (steps + step, back, heading))
    return distance


def _distance(now: _Situation, goal: _SubGoal) -> float:
    if goal.needs is not None and now.carrying != goal.needs:
        return math.inf
    return _distances(now, goal).get((now.position, now.heading), math.inf)


def _value(now: _Situation, goal: _SubGoal, action: str, distances: _Distances) -> float:
    """Return minus the steps left after ``action``; ``distances`` are those of ``now``."""
    kind, color, state = now.at(now.front)
    if action == "forward" and kind == LAVA:
        return _DEADLY
    if not goal.targets:
        return 0.0 if action == goal.action else -1.0
    if action == goal.action and now.front in goal.targets:
        return 0.0
    after, undo = now, 0.0
    if action == "left":
        after = replace(now, heading=(now.heading - 1) % 4)
    elif action == "right":
        after = replace(now, heading=(now.heading + 1) % 4)
    elif action == "forward":
        if kind in (EMPTY, FLOOR, GOAL) or (kind == DOOR and state == OPEN):
            after = replace(now, position=now.front)
    elif action == "pickup" and kind in PICKABLE and now.carrying is None:
        # The way it frees is no gain: full hands have to be emptied again.
        undo = _UNDO
    elif action == "drop" and kind == EMPTY and now.carrying is not None:
        after = now.put(now.front, (*now.carrying, 0))
        undo = _UNDO
    elif action == "toggle" and kind == DOOR:
        opens = _opens(now, now.front)
        if opens or state == OPEN:
            after = now.put(now.front, (DOOR, color, OPEN if opens else CLOSED))
    elif action == "toggle" and kind == BOX:
        after = now.put(now.front, (EMPTY, 0, 0))
    if after.cells is now.cells:
        steps = distances.get((after.position, after.heading), math.inf)
    else:
        steps = _distance(after, goal)
    if not math.isfinite(steps):
        # What cannot be reached any more can be again once the action is undone.
        steps = distances.get((now.position, now.heading), _UNREACHABLE) + _UNDO
    return -(steps + undo) - (_LEFT_BIAS if action == "left" else 0.0)
