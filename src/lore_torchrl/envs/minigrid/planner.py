"""A planner for MiniGrid that knows no more than the describer's facts."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.envs.minigrid.describer import (
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
    WALL,
)

_Cell = tuple[int, int]
_Distances = dict[tuple[_Cell, int], float]
# Egocentric headings ahead, right, behind, left as (columns, rows); rows grow backwards.
_HEADINGS = ((0, -1), (1, 0), (0, 1), (-1, 0))
_UNSEEN_CELL = (UNSEEN, 0, 0)
# More than any detour: only objects that truly bar the way are taken up.
_PUSH = 50.0
_DEADLY = -1000.0
_UNREACHABLE = 100.0
_UNDO = 2.0
_DROP_RADIUS = 3
# Below one step, so it only decides between equally good turns. A planner without memory
# then sweeps one way round instead of turning back and forth.
_LEFT_BIAS = 0.25

_REACH = re.compile(r"\b(?:go|get|to|reach)\b.*\bgoal\b")
_ERRAND = re.compile(
    r"(?P<verb>pick up|get|go get|fetch|go fetch|you must fetch|go to|open) (?:the|an?) "
    rf"(?:(?P<color>{'|'.join(COLORS)}) )?(?P<kind>key|ball|box|door)"
)


class MiniGridPlanner:
    """Value each action by the steps left to the current sub-goal after taking it.

    The value is minus the number of steps of a shortest path over (position, heading)
    through the cells known, opening doors on the way. The sub-goal is the first of these
    that is known and can be reached:

    1. the goal, or the object that the mission names; where the mission is to go to what is
       carried, an empty cell to drop it in;
    2. an object that bars the way to a locked door: take it up;
    3. a locked door whose key is carried: open it;
    4. a key, unless an open door of its color shows that it has served;
    5. an object that bars the way to the goal: take it up;
    6. a closed door: open it;
    7. the nearest unseen cell next to a cell that can be walked on: face it (before 6 where
       the mission is to go to something).

    With memory, and with all explored that can be reached:

    8. what bars the way to the object to go to, or the next of 2 to 4 where a locked door is
       known: missions to go to something leave keys and objects alone until here;
    9. a box, unless the mission names it: open it, for it may hide a key;
    10. an object that bars the way to a closed door or an unseen cell: take it up.

    Whatever else is carried is dropped first, where it blocks nothing. It turns right where a
    turn is sure to show unseen cells; with none of these it returns ``None``. Lava has the
    lowest value. Useless actions leave the distance as it is; those to be undone later, such as
    dropping the key, add to it. Turning left counts a quarter step more than turning right.

    It covers missions that reach a goal, open one door, pick up one named object or go to one:
    facing it, ``done``. Levels that end at a wrong door or object are not covered, and moving
    obstacles are treated as fixed. For any other mission, such as those with several parts,
    "object", or places, and for a request without the facts of
    :class:`~lore_torchrl.envs.minigrid.describer.MiniGridDescriber`, it returns ``None``.

    Without the describer's memory it looks only for unseen cells within the view and, with
    nothing to do, walks along the walls and turns right, in levels wider than the view maybe
    forever.
    """

    def __call__(self, request: AdviceRequest) -> list[float] | None:
        """Return one value an action, in the request's order, or ``None``."""
        read = _read(request)
        if read is None:
            return None
        now, task, sight = read
        goal = _choose(now, task, **sight)
        if goal is None:
            return None
        distances = _distances(now, goal)
        return [_value(now, goal, action, distances) for action in request.actions]

    def plan(self, request: AdviceRequest, length: int) -> list[int]:
        """Return at most ``length`` best actions in their order, as far as what is known tells.

        The plan ends with the mission, where something unseen is faced, and where nothing is known
        to be done.
        """
        read, steps = _read(request), []
        while read is not None and len(steps) < length:
            now, task, sight = read
            goal = _choose(now, task, **sight)
            if goal is None or not _reachable(now, goal):
                break
            distances = _distances(now, goal)
            values = [_value(now, goal, action, distances) for action in request.actions]
            best = max(range(len(values)), key=values.__getitem__)
            steps.append(best)
            action, (kind, color, _) = request.actions[best], now.at(now.front)
            now = _after(now, action)
            faced = goal.action == "look" and now.front in goal.targets
            if faced or (action == task.action and task.means(kind, color)):
                break
            read = now, task, sight
        return steps

    def valid_actions(self, request: AdviceRequest) -> list[bool]:
        """Return whether each action changes anything; ``done`` where it ends the mission; no lava.

        An empty list where the planner does not cover the mission.
        """
        read = _read(request)
        if read is None:
            return []
        now, task, _ = read
        there = task.action == "done" and task.means(*now.at(now.front)[:2])
        return [
            (there and action == "done") or _after(now, action) is not now
            for action in request.actions
        ]

    def subgoal(self, request: AdviceRequest) -> str:
        """Return the current sub-goal by its name in the describer's ``subgoals``, or ``""``."""
        read = _read(request)
        goal = None if read is None else _choose(*read[:2], **read[2])
        if goal is None:
            return ""
        now, task, _ = read
        if goal.action == "drop":
            return "carry nothing"
        cells = [now.at(cell) for cell in goal.targets]
        if goal.action == "look" or not cells:
            return f"see the {OBJECTS[task.kind]}"
        kind = OBJECTS[cells[0][0]]
        if goal.action == "toggle" and kind == "door":
            locked = any(state == LOCKED for _, _, state in cells)
            return "open the locked door" if locked else "open the door"
        verb = {"pickup": "hold", "forward": "face", "done": "face"}.get(goal.action)
        return "" if verb is None else f"{verb} the {kind}"


def _read(request: AdviceRequest) -> tuple[_Situation, _Task, dict[str, Any]] | None:
    """Return situation, task and reach of sight, ``None`` where the planner does not cover them."""
    facts = request.facts
    if not {"map", "position", "carrying", "mission", "memory", "view"} <= facts.keys():
        return None
    task = _task(facts["mission"])
    if task is None:
        return None
    cells = {
        (column, row): tuple(content)
        for column, contents in enumerate(facts["map"].tolist())
        for row, content in enumerate(contents)
        if content[0] != UNSEEN
    }
    now = _Situation(cells, facts["position"], 0, facts["carrying"])
    return now, task, {"view": facts["view"].shape[:2], "memory": facts["memory"]}


class _Task(NamedTuple):
    """What the mission asks to do with which object, and whether others may be taken up."""

    kind: int
    color: int | None
    tools: bool
    action: str

    def means(self, kind: int, color: int) -> bool:
        """Return whether it is about a thing of this kind and color."""
        return kind == self.kind and self.color in (None, color)


def _task(mission: str) -> _Task | None:
    """Read a mission; ``None`` where it is not covered."""
    mission = mission.lower().strip()
    if _REACH.search(mission):
        return _Task(GOAL, None, tools=True, action="forward")
    errand = _ERRAND.fullmatch(mission)
    if errand is None:
        return None
    verb, color, kind = errand["verb"], errand["color"], errand["kind"]
    action = {"go to": "done", "open": "toggle"}.get(verb, "pickup")
    if action != "done" and (action == "toggle") != (kind == "door"):
        return None
    # Fetch, which never says "pick up", ends at the first object taken up; and what is gone to
    # may be a key or an obstacle: nothing is taken up on the way.
    return _Task(
        OBJECTS.index(kind),
        None if color is None else COLORS.index(color),
        tools=verb in ("pick up", "open"),
        action=action,
    )


def _choose(now: _Situation, task: _Task, *, view: _Cell, memory: bool) -> _SubGoal | None:
    """Return the sub-goal, the first of the planner's list that can be reached."""
    wanted = [cell for cell, (kind, color, _) in now.cells.items() if task.means(kind, color)]
    if task.action == "toggle":
        wanted = [cell for cell in wanted if _opens(now, cell)]
    target = _SubGoal(frozenset(wanted), task.action)
    if _reachable(now, target):
        by_hand = task.action == "pickup" and now.carrying is not None
        errand = _drop(now, target) if by_hand else target
        if errand is not None:
            return errand
    elif task.action == "done" and now.carrying is not None and task.means(*now.carrying):
        return _put_down(now)

    doors = [(cell, *now.cells[cell][1:]) for cell in now.find(DOOR)]
    closed = _SubGoal(frozenset(cell for cell, _, state in doors if state == CLOSED), "toggle")
    # Without memory, what lies behind the view's near edge can never become known.
    explore = _SubGoal(_frontier(now, view=None if memory else view), "look")
    if task.tools:
        if any(state == LOCKED for _, _, state in doors):
            errand = _unlock(now, doors) or _clear(now, target)
        else:  # No key is known to be of use: what can be cleared by hand goes first.
            errand = _clear(now, target)
            # Nor is a key, where doors are known and no further one can be found.
            needless = memory and doors and not any(_reachable(now, g) for g in (closed, explore))
            if errand is None and not needless:
                errand = _unlock(now, doors)
        if errand is not None:
            return errand

    # GoToDoor ends where a wrong door is opened: there, look around first.
    for errand in (explore, closed) if task.action == "done" else (closed, explore):
        if _reachable(now, errand):
            return errand
    if not memory:
        # Along the walls, one way round.
        ahead = math.isfinite(now.entry_cost(now.front))
        return _SubGoal(frozenset(), "forward" if ahead else "right")
    if _turning_reveals(now, view):
        return _SubGoal(frozenset(), "right")
    # What is left to try where all that can be reached is explored.
    if task.action == "done":
        unlock = any(state == LOCKED for _, _, state in doors)
        errand = _clear(now, target) or (_unlock(now, doors) if unlock else None)
        if errand is not None:
            return errand
    elif not task.tools:
        return None
    else:
        # A key may be hidden in a box. GoToObject, which is without tools, ends at any toggle.
        if now.carrying is not None and now.carrying[0] == BOX:
            return _put_down(now)
        boxes = _SubGoal(frozenset(now.find(BOX)) - target.targets, "toggle")
        if _reachable(now, boxes):
            return boxes
    beyond = _SubGoal(_frontier(now, *PICKABLE, view=None), "look")
    return _clear(now, closed) or _clear(now, beyond)


def _opens(now: _Situation, door: _Cell) -> bool:
    """Return whether a door is shut and would open with what is carried."""
    _, color, state = now.at(door)
    return state == CLOSED or (state == LOCKED and now.carrying == (KEY, color))


def _unlock(now: _Situation, doors: Sequence[tuple[_Cell, int, int]]) -> _SubGoal | None:
    """Return the next errand toward opening a locked door: clear it, open it, get the key."""
    locked = [(cell, color) for cell, color, state in doors if state == LOCKED]
    held_key = now.carrying[1] if now.carrying and now.carrying[0] == KEY else None
    known = {now.cells[cell][1] for cell in now.find(KEY)} | {held_key}
    # Doors whose key is known, if any is; of these the ones that nothing bars, if any is free.
    useful = [door for door in locked if door[1] in known] or locked
    free = [door for door in useful if _reachable(now, _SubGoal(frozenset([door[0]]), "toggle"))]
    useful = free or useful
    colors = {color for _, color in useful}
    doorways = _SubGoal(frozenset(cell for cell, _ in useful), "toggle")
    if locked and not free:
        clear = _clear(now, doorways)
        if clear is not None:
            return clear
    fitting = frozenset(cell for cell, color in free if color == held_key)
    if fitting:
        return _SubGoal(fitting, "toggle")
    if held_key is not None and (not locked or held_key in colors):
        return None
    served = {color for _, color, state in doors if state == OPEN}
    if not locked:
        colors = set(range(len(COLORS))) - served
    keys = frozenset(cell for cell in now.find(KEY) if now.cells[cell][1] in colors)
    fetch = _SubGoal(keys, "pickup")
    if not _reachable(now, fetch):
        return _clear(now, fetch)
    return fetch if now.carrying is None else _drop(now, fetch, doorways if locked else None)


def _frontier(now: _Situation, *taken_up: int, view: _Cell | None) -> frozenset[_Cell]:
    """Return the unseen cells, within ``view``, beside one to walk on or of a kind taken up."""
    walkable = [now.position, *now.find(EMPTY, FLOOR, *taken_up)]
    walkable += [cell for cell in now.find(DOOR) if math.isfinite(now.entry_cost(cell))]
    unseen = {beside for cell in walkable for beside in _around(cell)} - now.cells.keys()
    if view is not None:
        unseen = {cell for cell in unseen if 0 <= cell[0] < view[0] and cell[1] < view[1]}
    return frozenset(unseen)


def _clear(now: _Situation, barred: _SubGoal) -> _SubGoal | None:
    """Return the errand of taking up the first object on the way to a barred sub-goal."""
    distance = _distances(now, barred, push=True)
    state = (now.position, now.heading)
    # Walk down the distances until an object stands in the way.
    while distance.get(state, 0.0) > 1.0:
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


def _around(cell: _Cell) -> list[_Cell]:
    return [(cell[0] + dx, cell[1] + dy) for dx, dy in _HEADINGS]


def _put_down(now: _Situation) -> _SubGoal:
    """Return the errand of emptying the hands in the nearest empty cell, beside no door."""
    empty = frozenset(now.find(EMPTY))
    return _SubGoal(frozenset(c for c in empty if not _beside_door(now, c)) or empty, "drop")


def _beside_door(now: _Situation, cell: _Cell) -> bool:
    return any(now.at(beside)[0] == DOOR for beside in _around(cell))


def _drop(now: _Situation, later: _SubGoal, then: _SubGoal | None = None) -> _SubGoal | None:
    """Return the errand of emptying the hands where ``later``, and ``then``, stay reachable."""
    # Free cells, cells beside a door, and the agent's own, which it has to leave first.
    places: tuple[set[_Cell], ...] = (set(), set(), set())
    for cell in now.find(EMPTY):
        if abs(cell[0] - now.position[0]) + abs(cell[1] - now.position[1]) > _DROP_RADIUS:
            continue
        put = now.put(cell, (*now.carrying, 0), carrying=None)
        if _reachable(put, later) and (then is None or _reachable(put, then)):
            places[2 if cell == now.position else _beside_door(now, cell)].add(cell)
    drops = (_SubGoal(frozenset(place), "drop") for place in places)
    return next((drop for drop in drops if _reachable(now, drop)), None)


def _after(now: _Situation, action: str) -> _Situation:
    """Return what an action leads to, the same where it does nothing."""
    kind, color, state = now.at(now.front)
    if action in ("left", "right"):
        return replace(now, heading=(now.heading + (1 if action == "right" else 3)) % 4)
    if action == "forward" and now.entry_cost(now.front) == 1.0:
        return replace(now, position=now.front)
    if action == "pickup" and kind in PICKABLE and now.carrying is None:
        return now.put(now.front, (EMPTY, 0, 0), carrying=(kind, color))
    if action == "drop" and kind == EMPTY and now.carrying is not None:
        return now.put(now.front, (*now.carrying, 0), carrying=None)
    if action == "toggle" and kind == BOX:
        return now.put(now.front, (EMPTY, 0, 0))
    if action == "toggle" and kind == DOOR and (state == OPEN or _opens(now, now.front)):
        return now.put(now.front, (DOOR, color, CLOSED if state == OPEN else OPEN))
    return now


def _value(now: _Situation, goal: _SubGoal, action: str, distances: _Distances) -> float:
    """Return minus the steps left after ``action``; ``distances`` are those of ``now``."""
    if action == "forward" and now.at(now.front)[0] == LAVA:
        return _DEADLY
    if not goal.targets:
        return 0.0 if action == goal.action else -1.0
    if action == goal.action and now.front in goal.targets:
        return 0.0
    after, undo = _after(now, action), 0.0
    if action == "pickup" and after is not now:
        # The way it frees is no gain: full hands have to be emptied again.
        after, undo = now, _UNDO
    elif action == "drop" and after is not now:
        after, undo = replace(after, carrying=now.carrying), _UNDO
    if after.cells is now.cells:
        steps = distances.get((after.position, after.heading), math.inf)
    else:
        steps = _distance(after, goal)
    if not math.isfinite(steps):
        # What cannot be reached any more can be again once the action is undone.
        steps = distances.get((now.position, now.heading), _UNREACHABLE) + _UNDO
    return -(steps + undo) - (_LEFT_BIAS if action == "left" else 0.0)


@dataclass(frozen=True)
class _Situation:
    """A map with the agent in it; actions lead from one to the next."""

    cells: Mapping[_Cell, tuple[int, int, int]]
    position: _Cell
    heading: int
    carrying: tuple[int, int] | None

    @property
    def front(self) -> _Cell:
        """The cell ahead of the agent."""
        return _around(self.position)[self.heading]

    def at(self, cell: _Cell) -> tuple[int, int, int]:
        """Return kind, color and state of a cell; what lies off the map is unseen."""
        return self.cells.get(cell, _UNSEEN_CELL)

    def find(self, *kinds: int) -> list[_Cell]:
        """Return the cells that hold one of ``kinds``."""
        return [cell for cell, content in self.cells.items() if content[0] in kinds]

    def put(self, cell: _Cell, content: tuple[int, int, int], **changes: object) -> _Situation:
        """Return the situation with one cell and the fields in ``changes`` replaced."""
        return replace(self, cells={**self.cells, cell: content}, **changes)

    def entry_cost(self, cell: _Cell, *, push: bool = False) -> float:
        """Return the steps to enter a neighboring cell that the agent faces."""
        kind, color, state = self.at(cell)
        if kind in (EMPTY, FLOOR, GOAL) or (kind == DOOR and state == OPEN):
            return 1.0
        if kind == DOOR and (state == CLOSED or self.carrying == (KEY, color)):
            return 2.0
        return _PUSH if push and kind in PICKABLE else math.inf


@dataclass(frozen=True)
class _SubGoal:
    """Face one of ``targets``, then take ``action``."""

    targets: frozenset[_Cell]
    action: str


def _distances(now: _Situation, goal: _SubGoal, *, push: bool = False) -> _Distances:
    """Return the steps to complete ``goal`` from each (position, heading), by Dijkstra's way."""
    distance: _Distances = {}
    queue: list[tuple[float, _Cell, int]] = []
    cost = cache(partial(now.entry_cost, push=push))
    for target in goal.targets:
        for heading, cell in zip((2, 3, 0, 1), _around(target), strict=True):
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
        back = _around(cell)[heading - 2]
        # The agent's own cell may be one that it could not enter again, such as lava.
        if (back, heading) not in distance and (back == now.position or math.isfinite(cost(back))):
            step = cost(cell)
            if math.isfinite(step):
                heapq.heappush(queue, (steps + step, back, heading))
    return distance


def _distance(now: _Situation, goal: _SubGoal) -> float:
    """Return the steps to complete ``goal`` from here, ``inf`` where it cannot be."""
    return _distances(now, goal).get((now.position, now.heading), math.inf)


def _reachable(now: _Situation, goal: _SubGoal) -> bool:
    """Return whether there is a target that can be faced."""
    return math.isfinite(_distance(now, goal))


def _turning_reveals(now: _Situation, view: _Cell) -> bool:
    """Return whether a turn on the spot is sure to show an unseen cell, sight as in MiniGrid."""
    for heading in (1, 2, 3):
        (ahead_x, ahead_y), (right_x, right_y) = _HEADINGS[heading], _HEADINGS[(heading + 1) % 4]
        row = {0}
        for ahead in range(view[1]):
            following: set[int] = set()
            for side in (1, -1):
                # What is lit on one side of a clear cell may be clear and light the next.
                for column in range(-(view[0] // 2) * side, (view[0] // 2 + 1) * side, side):
                    if column not in row:
                        continue
                    x = now.position[0] + ahead * ahead_x + column * right_x
                    y = now.position[1] + ahead * ahead_y + column * right_y
                    kind, _, state = now.at((x, y))
                    if kind == UNSEEN:
                        return True
                    if kind != WALL and (kind != DOOR or state == OPEN):
                        row.add(column + side)
                        following |= {column, column + side}
            row = {column for column in following if abs(column) <= view[0] // 2}
    return False
