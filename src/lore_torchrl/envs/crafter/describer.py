"""What a Crafter player sees, as text, as a key and as a picture."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.envs.adapter import MemorylessDescriber
from lore_torchrl.envs.crafter.rules import (
    ACHIEVEMENTS,
    ACTIONS,
    CENTER,
    CODE,
    CODES,
    COLLECT,
    DIRECTION_NAMES,
    ITEMS,
    LOW,
    MAKE,
    NEEDS,
    PLACE,
    VIEW,
    WALKABLE,
    Situation,
    crafter,
    things_around,
)
from lore_torchrl.envs.picture import encode_png

_SYMBOLS = dict(zip(CODES, "#~.o :T!ci$tf@CZS*pP", strict=True))
_ENEMIES = ("zombie", "skeleton")
# Whom to eat, and for which achievement.
_FOOD = {"cow": "eat_cow", "ripe plant": "eat_plant"}
_TILE = 32
_MISSION = "stay alive and unlock as many of the achievements as you can"


class CrafterDescriber(MemorylessDescriber):
    """The local view as a map, inventory, needs and achievements.

    ``image`` is whether requests hold the view as a PNG, drawn with Crafter's tiles as by day.
    """

    in_keys = ("view", "inventory", "stance", "achievements")
    actions = ACTIONS
    subgoals = tuple(name.replace("_", " ") for name in ACHIEVEMENTS)
    #: What a program sees, and what it means.
    program_fields: Mapping[str, str] = {
        "view": f"list of {VIEW[1]} rows of {VIEW[0]} words, one word a cell, seen from above; row "
        f"0 is the uppermost, column 0 the leftmost. Words: {', '.join(CODES)}",
        "row": "int, the player's row in view",
        "column": "int, the player's column in view",
        "facing": f"one of {', '.join(DIRECTION_NAMES)}",
        "front": "the word of the cell that the player faces",
        "inventory": f"dict of counts from 0 to 9: {', '.join(ITEMS)}",
        "asleep": "bool, whether the player sleeps",
        "night": "bool, whether it is night",
        "unlocked": "list of the achievements unlocked in this episode, of "
        f"{', '.join(ACHIEVEMENTS)}",
        "mission": "the task in words",
    }

    def __init__(self, *, image: bool = False) -> None:
        self.image = image

    def cache_key(self, row: int, observation: Mapping[str, Any]) -> str:
        """Return a digest of all that the question tells."""
        facing, asleep, daylight = observation["stance"].tolist()
        digest = hashlib.blake2b(observation["view"].tobytes(), digest_size=16)
        digest.update(observation["inventory"].tobytes())
        digest.update(np.packbits(observation["achievements"] > 0).tobytes())
        digest.update(bytes((facing, asleep, daylight < 50)))
        return digest.hexdigest()

    def abstract_state(self, row: int, observation: Mapping[str, Any]) -> str:
        """Return the abstract state.

        Which needs are low (health where an enemy is in view), what could be made, placed or
        slept off, where the player faces and what is there, and of the things of use or danger
        in view the nearest: its kind, side and whether it is adjacent. Of use is what a low need
        asks for, what is lacking for a tool or for a thing to be placed, and what has not been
        collected or eaten yet.
        """
        here = Situation.read(observation)
        view, held, unlocked = here.view, here.inventory, here.unlocked
        in_view = {CODES[code] for code in np.unique(view)}
        near = things_around(view, CENTER)
        tools = {tool: rule for tool, rule in MAKE.items() if not held[tool]}
        # What has to be built first, and what that and the tools take.
        missing = {thing for rule in tools.values() for thing in rule["nearby"]} - in_view
        missing |= {thing for thing in PLACE if f"place_{thing}" not in unlocked}
        takes = _takes(tools, missing)
        # "!" marks what leaves enough for the tool, and a tool that can be made on the spot.
        able = [
            thing + "!" * all(held[item] >= takes[item] for item in rule["uses"])
            for thing, rule in PLACE.items()
            if thing in missing and here.has(rule["uses"])
        ]
        wanted = _wanted(here, takes)
        for tool, rule in tools.items():
            if here.has(rule["uses"]):
                able.append(tool + "!" * near.issuperset(rule["nearby"]))
                wanted |= {*rule["nearby"]} - near
        if "wake_up" not in unlocked and held["energy"] < 9:
            able.append("sleep")
        nearest, found = "", np.array(here.cells(*wanted - {"grass"}))
        if len(found):
            offsets = found - CENTER
            distances = np.abs(offsets).sum(1)
            index = int(distances.argmin())
            side = "".join(str(sign) for sign in np.sign(offsets[index]))
            nearest = f"{here.at(tuple(found[index]))} {side} {int(distances[index] == 1)}"
        ahead = here.ahead
        if ahead not in wanted and ahead != "lava":
            ahead = "free" if ahead in WALKABLE else "blocked"
        # Weakness matters where there is something to flee from.
        needs = NEEDS[1:] if in_view.isdisjoint(_ENEMIES) else NEEDS
        low = [need for need in needs if held[need] <= LOW[need]]
        asleep, facing = str(int(here.asleep)), DIRECTION_NAMES[here.facing]
        return "|".join((",".join(low), ",".join(able), asleep, facing, ahead, nearest))

    def things(self, row: int, observation: Mapping[str, Any]) -> set[str]:
        """Return the kinds of creature, plant, material and table in view."""
        return {CODES[code] for code in np.unique(observation["view"])}.difference(WALKABLE)

    def reached(self, row: int, observation: Mapping[str, Any]) -> set[str]:
        """Return which of :attr:`subgoals`, the achievements, this episode has unlocked."""
        return {self.subgoals[index] for index in np.flatnonzero(observation["achievements"])}

    def request(self, row: int, observation: Mapping[str, Any]) -> AdviceRequest:
        """Return the question about this situation."""
        here = Situation.read(observation)
        view, held, unlocked = here.view, here.inventory, here.unlocked
        lines = ["".join(_SYMBOLS[CODES[code]] for code in line) for line in view.T]
        present = [CODES[code] for code in np.unique(view)]
        told = {"player": "you", "lava": "lava (deadly)"}
        legend = ", ".join(f"'{_SYMBOLS[name]}' {told.get(name, name)}" for name in present)
        carried = [f"{held[item]} {item}" for item in ITEMS if held[item] and item not in NEEDS]
        needs = ", ".join(f"{name} {held[name]}" for name in NEEDS)
        done = [name for name in ACHIEVEMENTS if name in unlocked]
        left = [name for name in ACHIEVEMENTS if name not in unlocked]

        def told_of(names: list[str]) -> str:
            return ", ".join(names).replace("_", " ") or "nothing"

        text = (
            f"The survival game Crafter, seen from above ({legend}):",
            *lines,
            f"You face {DIRECTION_NAMES[here.facing]}: {here.ahead}."
            + " You are asleep." * here.asleep
            + " It is night." * here.dark,
            f"Of 9: {needs}. You carry: {told_of(carried)}.",
            f"Achieved: {told_of(done)}.",
            f"Not yet: {told_of(left)}.",
        )
        return AdviceRequest(
            "\n".join(text),
            self.actions,
            self.cache_key(row, observation),
            facts=vars(here),
            image=_draw(here) if self.image else None,
            action_meanings=_meanings(),
            mission=_MISSION,
            subgoals=self.subgoals,
        )

    def program_view(self, row: int, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return what :attr:`program_fields` names, as plain Python data: what the text tells."""
        here = Situation.read(observation)
        column, line = CENTER
        return {
            "view": [[CODES[code] for code in cells] for cells in here.view.T.tolist()],
            "row": line,
            "column": column,
            "facing": DIRECTION_NAMES[here.facing],
            "front": here.ahead,
            "inventory": dict(here.inventory),
            "asleep": here.asleep,
            "night": here.dark,
            "unlocked": [name for name in ACHIEVEMENTS if name in here.unlocked],
            "mission": _MISSION,
        }


def _takes(tools: Mapping[str, Any], missing: set[str]) -> dict[str, int]:
    """Return how many of each item the costliest tool takes, with what has to stand there."""
    takes = dict.fromkeys(ITEMS, 0)
    plans = [(rule["uses"], missing.intersection(rule["nearby"])) for rule in tools.values()]
    plans += [({}, {thing}) for thing in missing]
    for uses, built in plans:
        needed = Counter(uses)
        for thing in built:
            needed.update(PLACE[thing]["uses"])
        for item, count in needed.items():
            takes[item] = max(takes[item], count)
    return takes


def _wanted(here: Situation, takes: Mapping[str, int]) -> set[str]:
    """Return the kinds of thing that are of use now, and those to beware of."""
    wanted, held = {*_ENEMIES}, here.inventory
    for kind, rule in COLLECT.items():
        for item in rule["receive"] if here.has(rule["require"]) else ():
            lacking = held[item] <= LOW[item] if item in LOW else held[item] < takes[item]
            if lacking or f"collect_{item}" not in here.unlocked:
                wanted.add(kind)
    for kind, achievement in _FOOD.items():
        if held["food"] <= LOW["food"] or achievement not in here.unlocked:
            wanted.add(kind)
    return wanted


def _costs(uses: Mapping[str, int]) -> str:
    return " and ".join(f"{count} {item}" for item, count in uses.items())


@cache
def _meanings() -> tuple[str, ...]:
    harvest = ", ".join(
        name if not rule["require"] else f"{name} (needs {next(iter(rule['require']))})"
        for name, rule in COLLECT.items()
    ).replace("_", " ")
    meanings = {
        "noop": "do nothing",
        "do": f"use what you face: collect {harvest}; hit a creature; eat a ripe plant",
        "sleep": "sleep, which restores energy; you wake when rested or hurt",
    }
    for action in ACTIONS:
        verb, _, name = action.partition("_")
        if verb == "move":
            meanings[action] = f"turn {name}, and step there if nothing is in the way"
        elif verb == "place":
            where = ", ".join(PLACE[name]["where"])
            meanings[action] = f"costs {_costs(PLACE[name]['uses'])}; onto {where} before you"
        elif verb == "make":
            near = " and ".join(MAKE[name]["nearby"])
            meanings[action] = f"costs {_costs(MAKE[name]['uses'])}; beside a {near}"
    return tuple(meanings[action] for action in ACTIONS)


@cache
def _textures() -> Any:
    return crafter.engine.Textures(crafter.constants.root / "assets")


def _draw(here: Situation) -> bytes:
    """Return the view and the inventory below it as a PNG."""
    textures, unit = _textures(), np.array((_TILE, _TILE))
    canvas = np.zeros((VIEW[0] * _TILE, VIEW[1] * _TILE, 3), np.uint8)
    names = {"edge": "unknown", "arrow": "arrow-up", "ripe plant": "plant-ripe"}
    names["player"] = "player-sleep" if here.asleep else f"player-{DIRECTION_NAMES[here.facing]}"
    for (column, row), code in np.ndenumerate(here.view):
        layers = [CODES[code]]
        if code >= CODE["player"]:
            # What it stands on is hidden; skeletons keep to tunnels.
            layers.insert(0, "path" if layers[0] in ("skeleton", "arrow") else "grass")
        for name in layers:
            texture = textures.get(names.get(name, name), unit)
            crafter.engine._draw_alpha(canvas, np.array((column, row)) * _TILE, texture)
    items = crafter.engine.ItemView(textures, (VIEW[0], 2))(here.inventory, unit)
    return encode_png(np.ascontiguousarray(np.concatenate((canvas, items), 1).transpose(1, 0, 2)))
