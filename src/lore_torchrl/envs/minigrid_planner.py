"""A planner for MiniGrid that knows no more than the describer's facts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
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
from lore_torchrl.envs.minigrid_routes import (
    HEADINGS,
    Cell,
    Distances,
    Situation,
    SubGoal,
    distance_to,
    distances_to,
    reachable,
    turning_reveals,
)

_DEADLY = -1000.0
_UNREACHABLE = 100.0
_UNDO = 2.0
_DROP_RADIUS = 3
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
class _Task:
    """What the mission asks to do with which object, and whether others may be taken up."""

    kind: int | None = None
    color: int | None = None
    tools: bool = True
    action: str = "pickup"


class MiniGridPlanner:
    """Value each action by the steps left to the current sub-goal after taking it.

    The value is minus the number of steps of a shortest path over (position, heading)
    through the cells known, opening doors on the way. The sub-goal is the first of these
    that is known and can be reached:

    1. the goal, or the object that the mission names; where the mission is to go to what is
       carried, an empty cell to drop it in;
    2. an object that bars the way to a locked door: take it up;
    3. a locked door whose key is carried: open it;
    4. a key, unless an open door of its colour shows that it has served;
    5. an object that bars the way to the goal: take it up;
    6. a closed door: open it;
    7. the nearest unseen cell next to a cell that can be walked on: face it (before 6 where
       the mission is to go to something).

    With memory, and with all explored that can be reached:

    8. what bars the way to the object to go to, or the next of 2 to 4 where a locked door is
       known: missions to go to something leave keys and objects alone until here;
    9. a box, unless the mission names it: open it, for it may hide a key;
    10. an object that bars the way to a closed door or an unseen cell: take it up.

    Whatever else is carried is dropped first, where it blocks nothing: in the agent's own
    cell, once it has left it, where there is no other. It turns right where a turn is sure to
    show unseen cells; with none of these it returns ``None``. Lava is never entered and has
    the lowest value. Useless actions leave the distance as it is; those to be undone later,
    such as dropping the key, add to it. Turning left counts a quarter step more than turning
    right, to decide between equals.

    It covers missions that reach a goal (Empty, DoorKey, MultiRoom, FourRooms, Crossing,
    LavaGap, DistShift, LockedRoom), open one door (Unlock, BabyAI's KeyInBox and
    OpenDoorColor), pick up one named object (Fetch, UnlockPickup, BlockedUnlockPickup,
    KeyCorridor, ObstructedMaze, BabyAI's Pickup) or go to one (GoToDoor, GoToObject, BabyAI's
    GoTo): facing it, ``done``. Where a mission ends in failure at what it takes for an errand
    (opening a wrong door or taking up a wrong object, as in BabyAI's Debug levels), it is not
    covered, and moving obstacles are treated as fixed. For any other mission (Memory, PutNext,
    RedBlueDoors, BabyAI's with several parts, "object", or places, as some of OpenDoor's), and
    for a request without the facts of
    :class:`~lore_torchrl.envs.minigrid_describe.MiniGridDescriber`, it returns ``None``.

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
        if not {"map", "position", "carrying", "mission", "memory", "view"} <= facts.keys():
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
        now = Situation(cells, facts["position"], 0, facts["carrying"])
        goal = _choose(now, task, view=facts["view"].shape[:2], memory=facts["memory"])
        if goal is None:
            return None
        distances = distances_to(now, goal)
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


def _choose(now: Situation, task: _Task, *, view: Cell, memory: bool) -> SubGoal | None:
    """Return the sub-goal, the first of the planner's list that can be reached."""
    barred = None
    if task.kind is not None:
        wanted = [cell for cell in now.find(task.kind) if task.color in (None, now.cells[cell][1])]
        if task.action == "toggle":
            wanted = [cell for cell in wanted if _opens(now, cell)]
        goal = SubGoal(frozenset(wanted), task.action)
        if reachable(now, goal):
            by_hand = goal.action == "pickup" and now.carrying is not None
            errand = _drop(now, goal) if by_hand else goal
            if errand is not None:
                return errand
        elif task.action == "done" and now.carrying is not None:
            kind, color = now.carrying
            if kind == task.kind and task.color in (None, color):
                return _put_down(now)
        barred = goal

    doors = [(cell, *now.cells[cell][1:]) for cell in now.find(DOOR)]
    closed = SubGoal(frozenset(cell for cell, _, state in doors if state == CLOSED), "toggle")
    # Without memory, what lies behind the view's near edge can never become known.
    explore = SubGoal(_frontier(now, view=None if memory else view), "look")
    if task.tools:
        if any(state == LOCKED for _, _, state in doors):
            errand = _unlock(now, doors) or _clear(now, barred)
        else:  # No key is known to be of use: what can be cleared by hand goes first.
            errand = _clear(now, barred)
            # Nor is a key, where doors are known and no further one can be found.
            needless = memory and doors and not any(reachable(now, g) for g in (closed, explore))
            if errand is None and not needless:
                errand = _unlock(now, doors)
        if errand is not None:
            return errand

    # GoToDoor ends where a wrong door is opened: there, look around first.
    for errand in (explore, closed) if task.action == "done" else (closed, explore):
        if reachable(now, errand):
            return errand
    if not memory:
        # Along the walls, one way round.
        ahead = math.isfinite(now.entry_cost(now.front))
        return SubGoal(frozenset(), "forward" if ahead else "right")
    if turning_reveals(now, view):
        return SubGoal(frozenset(), "right")
    return _last_errand(now, task, doors, barred=barred, closed=closed)


def _last_errand(
    now: Situation,
    task: _Task,
    doors: Sequence[tuple[Cell, int, int]],
    *,
    barred: SubGoal | None,
    closed: SubGoal,
) -> SubGoal | None:
    """Return what is left to try where all that can be reached is explored."""
    if task.action == "done":
        unlock = any(state == LOCKED for _, _, state in doors)
        errand = _clear(now, barred) or (_unlock(now, doors) if unlock else None)
        if errand is not None:
            return errand
    if not (task.tools or task.action == "done"):
        return None
    # A key may be hidden in a box. GoToObject, which is without tools, ends at any toggle.
    if task.tools and now.carrying is not None and now.carrying[0] == BOX:
        return _put_down(now)
    named = barred.targets if barred is not None else frozenset()
    boxes = SubGoal(frozenset(now.find(BOX)) - named, "toggle")
    if task.tools and reachable(now, boxes):
        return boxes
    beyond = SubGoal(_frontier(now, *PICKABLE, view=None), "look")
    return _clear(now, closed) or _clear(now, beyond)


def _opens(now: Situation, door: Cell) -> bool:
    """Return whether a door is shut and would open with what is carried."""
    _, color, state = now.at(door)
    return state == CLOSED or (state == LOCKED and now.carrying == (KEY, color))


def _unlock(now: Situation, doors: Sequence[tuple[Cell, int, int]]) -> SubGoal | None:
    """Return the next errand towards opening a locked door: clear it, open it, get the key."""
    locked = [(cell, color) for cell, color, state in doors if state == LOCKED]
    held_key = now.carrying[1] if now.carrying and now.carrying[0] == KEY else None
    known = {now.cells[cell][1] for cell in now.find(KEY)} | {held_key}
    # Doors whose key is known, if any is; of these the ones that nothing bars, if any is free.
    useful = [door for door in locked if door[1] in known] or locked
    free = [door for door in useful if reachable(now, SubGoal(frozenset([door[0]]), "toggle"))]
    useful = free or useful
    colors = {color for _, color in useful}
    doorways = SubGoal(frozenset(cell for cell, _ in useful), "toggle")
    if locked and not free:
        clear = _clear(now, doorways)
        if clear is not None:
            return clear
    fitting = frozenset(cell for cell, color in free if color == held_key)
    if fitting:
        return SubGoal(fitting, "toggle", needs=now.carrying)
    if held_key is not None and (not locked or held_key in colors):
        return None
    served = {color for _, color, state in doors if state == OPEN}
    if not locked:
        colors = set(range(len(COLORS))) - served
    keys = frozenset(cell for cell in now.find(KEY) if now.cells[cell][1] in colors)
    fetch = SubGoal(keys, "pickup")
    if not reachable(now, fetch):
        return _clear(now, fetch)
    return fetch if now.carrying is None else _drop(now, fetch, doorways if locked else None)


def _frontier(now: Situation, *taken_up: int, view: Cell | None) -> frozenset[Cell]:
    """Return the unseen cells, within ``view``, beside one to walk on or of a kind taken up."""
    walkable = [now.position, *now.find(EMPTY, FLOOR, *taken_up)]
    walkable += [cell for cell in now.find(DOOR) if math.isfinite(now.entry_cost(cell))]
    beside = {(cell[0] + dx, cell[1] + dy) for cell in walkable for dx, dy in HEADINGS}
    unseen = beside - now.cells.keys()
    if view is not None:
        unseen = {cell for cell in unseen if 0 <= cell[0] < view[0] and cell[1] < view[1]}
    return frozenset(unseen)


def _clear(now: Situation, barred: SubGoal | None) -> SubGoal | None:
    """Return the errand of taking up the first object on the way to a barred sub-goal."""
    if barred is None or not barred.targets:
        return None
    distance = distances_to(now, barred, push=True)
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
                clear = SubGoal(frozenset([ahead]), "pickup")
                return clear if now.carrying is None else _drop(now, clear)
            state = (ahead, here.heading)
        else:
            turns = [(here.position, (here.heading + turn) % 4) for turn in (1, -1)]
            state = min(turns, key=lambda turned: distance.get(turned, math.inf))
    return None


def _put_down(now: Situation) -> SubGoal:
    """Return the errand of emptying the hands in the nearest empty cell, beside no door."""
    empty = frozenset(now.find(EMPTY))
    return SubGoal(frozenset(c for c in empty if not _beside_door(now, c)) or empty, "drop")


def _beside_door(now: Situation, cell: Cell) -> bool:
    return any(now.at((cell[0] + dx, cell[1] + dy))[0] == DOOR for dx, dy in HEADINGS)


def _drop(now: Situation, later: SubGoal, then: SubGoal | None = None) -> SubGoal | None:
    """Return the errand of emptying the hands where ``later``, and ``then``, stay reachable.

    The agent's own cell, which it has to leave first, comes last.
    """
    content = (*now.carrying, 0)
    cells, beside_doors, own = set(), set(), set()
    for cell in now.find(EMPTY):
        near = abs(cell[0] - now.position[0]) + abs(cell[1] - now.position[1]) <= _DROP_RADIUS
        if not near:
            continue
        put = now.put(cell, content, carrying=None)
        if reachable(put, later) and (then is None or reachable(put, then)):
            kept = (
                own if cell == now.position else beside_doors if _beside_door(now, cell) else cells
            )
            kept.add(cell)
    drops = (SubGoal(frozenset(place), "drop") for place in (cells, beside_doors, own))
    return next((drop for drop in drops if reachable(now, drop)), None)


def _value(now: Situation, goal: SubGoal, action: str, distances: Distances) -> float:
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
        steps = distance_to(after, goal)
    if not math.isfinite(steps):
        # What cannot be reached any more can be again once the action is undone.
        steps = distances.get((now.position, now.heading), _UNREACHABLE) + _UNDO
    return -(steps + undo) - (_LEFT_BIAS if action == "left" else 0.0)
