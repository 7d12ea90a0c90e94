"""Crafter as a Gymnasium environment with symbolic or pixel observations."""

from __future__ import annotations

from collections import defaultdict
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from lore_torchrl.envs.crafter.rules import (
    ACHIEVEMENTS,
    ACTIONS,
    CODES,
    DIRECTIONS,
    ITEMS,
    MAKE,
    OBJECTS,
    PLACE,
    RIPE,
    VIEW,
    Situation,
    crafter,
)
from lore_torchrl.envs.gym_adapter import gym

Observe = Literal["symbolic", "pixels", "both"]
_FRAME = 64
_VECTOR = VIEW[0] * VIEW[1] * len(CODES) + len(ITEMS) + len(DIRECTIONS) + 2


class _Ordered(dict):
    """A set that keeps the order in which things came: that of a set differs by process."""

    def add(self, thing: Any) -> None:
        self[thing] = None

    def remove(self, thing: Any) -> None:
        del self[thing]


class _World(crafter.engine.World):
    def reset(self, seed: int | None = None) -> None:
        super().reset(seed)
        self._chunks = defaultdict(_Ordered)


class _Game(crafter.Env):
    """The game, the same for a seed in every process, and without pictures where none is wanted.

    Crafter draws the noise of its night pictures from the world's random stream: where no
    picture is made, as many numbers are drawn.
    """

    def __init__(self, *, drawn: bool, area: tuple[int, int]) -> None:
        # Neither the seed nor the step limit is its own: see CrafterEnv.
        super().__init__(area=area, view=(9, 9), size=(_FRAME, _FRAME), length=None, seed=0)
        self.drawn = drawn
        # Views hold this very object, so it cannot be replaced.
        self._world.__class__ = _World
        # The map of the whole world, which no one reads.
        self._sem_view = lambda: None

    player = property(attrgetter("_player"))
    world = property(attrgetter("_world"))

    def begin(self, seed: int) -> np.ndarray | None:
        self._seed, self._episode = seed, 0
        return self.reset()

    def picture(self, side: int) -> np.ndarray:
        """Draw what is seen without moving the world's random stream."""
        state = self._world.random.get_state()
        picture = self.render((side, side))
        self._world.random.set_state(state)
        return picture

    def _obs(self) -> np.ndarray | None:
        if self.drawn:
            return self.render()
        if self._world.daylight < 0.5:
            unit = self._size // self._view
            self._world.random.uniform(size=tuple(np.array(VIEW) * unit))
        return None


class CrafterEnv(gym.Env):
    r"""`Crafter <https://arxiv.org/abs/2109.06780>`_ with symbolic or pixel observations.

    The observation is a ``Dict``:

    | entry | type | what it holds |
    | --- | --- | --- |
    | ``observation`` | float32 ``[1282]`` | view, inventory, facing, asleep, daylight in one |
    | ``frame`` | uint8 ``[3, 64, 64]`` | Crafter's own picture |
    | ``view`` | uint8 ``[9, 7]`` | code of what lies in each cell, by column and row |
    | ``inventory`` | uint8 ``[16]`` | health, food, drink, energy and what is carried |
    | ``stance`` | uint8 ``[3]`` | facing (left, right, up, down), asleep, daylight in percent |
    | ``achievements`` | bool ``[22]`` | unlocked in this episode |
    | ``action_mask`` | bool ``[17]`` | whether the rules let an action have an effect |

    The first, codes and facing one-hot, all else in 0 to 1, is there unless
    ``observe="pixels"``, the second unless ``observe="symbolic"``.

    The reward is Crafter's: 1 for each first unlocking, and a tenth of each gain or loss of
    health. An episode terminates with death. For a seed the worlds are the same in every
    process, whether pictures are drawn or not.

    Keyword Args:
        observe: ``"symbolic"``, ``"pixels"`` or ``"both"``. Default: ``"symbolic"``.
        max_steps: Step limit of an episode. Default: ``10000``, Crafter's own.
        area: Width and height of the world. Default: ``(64, 64)``.
        render_mode: ``"rgb_array"`` or ``None``. Default: ``None``.

    Raises:
        ValueError: If ``observe`` is unknown, or ``area`` too small for a view.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}  # noqa: RUF012

    def __init__(
        self,
        *,
        observe: Observe = "symbolic",
        max_steps: int = 10_000,
        area: tuple[int, int] = (64, 64),
        render_mode: str | None = None,
    ) -> None:
        if observe not in ("symbolic", "pixels", "both"):
            raise ValueError(f"observe must be symbolic, pixels or both, got {observe!r}.")
        if min(area) < max(VIEW):
            raise ValueError(f"area must be at least {max(VIEW)} cells wide and high, got {area}.")
        self.symbolic, self.drawn = observe != "pixels", observe != "symbolic"
        self.max_steps, self.render_mode, self.steps = max_steps, render_mode, 0
        self._first: dict[str, np.ndarray] | None = None
        self.game = _Game(drawn=self.drawn, area=tuple(area))
        self.action_space = gym.spaces.Discrete(len(ACTIONS))
        box = gym.spaces.Box
        spaces = {
            "view": box(0, len(CODES) - 1, VIEW, np.uint8),
            "inventory": box(0, 9, (len(ITEMS),), np.uint8),
            "stance": box(0, 100, (3,), np.uint8),
            "achievements": box(0, 1, (len(ACHIEVEMENTS),), np.bool_),
            "action_mask": box(0, 1, (len(ACTIONS),), np.bool_),
        }
        if self.symbolic:
            spaces["observation"] = box(0.0, 1.0, (_VECTOR,), np.float32)
        if self.drawn:
            spaces["frame"] = box(0, 255, (3, _FRAME, _FRAME), np.uint8)
        self.observation_space = gym.spaces.Dict(spaces)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Make a new world, or keep one that no step was taken in."""
        super().reset(seed=seed)
        if seed is not None or self.steps or self._first is None:
            self.steps = 0
            frame = self.game.begin(int(self.np_random.integers(2**31 - 1)))
            self._first = self._observe(frame)
        return {key: value.copy() for key, value in self._first.items()}, {}

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Act; then the creatures act."""
        self.steps += 1
        frame, reward, dead, _ = self.game.step(int(action))
        return self._observe(frame), float(reward), bool(dead), self.steps >= self.max_steps, {}

    def render(self) -> np.ndarray:
        """Return what the player sees, uint8 ``[288, 288, 3]``."""
        return self.game.picture(288)

    def _view(self) -> np.ndarray:
        world, (x, y) = self.game.world, self.game.player.pos
        left, top = x - VIEW[0] // 2, y - VIEW[1] // 2
        # The world's part of the view; beyond its edge there is nothing, code 0.
        x0, y0 = max(left, 0), max(top, 0)
        part = np.s_[x0 : left + VIEW[0], y0 : top + VIEW[1]]
        cells = np.zeros(VIEW, dtype=np.uint8)
        seen = cells[x0 - left :, y0 - top :]
        materials, things = world._mat_map[part], world._obj_map[part]
        seen[: materials.shape[0], : materials.shape[1]] = materials
        for column, row in zip(*things.nonzero(), strict=True):
            thing = world._objects[things[column, row]]
            ripe = isinstance(thing, crafter.objects.Plant) and thing.ripe
            seen[column, row] = RIPE if ripe else OBJECTS[type(thing)]
        return cells

    def _observe(self, frame: np.ndarray | None) -> dict[str, np.ndarray]:
        player = self.game.player
        view = self._view()
        inventory = np.array([player.inventory[item] for item in ITEMS], dtype=np.uint8)
        facing = DIRECTIONS.index(tuple(player.facing))
        daylight = float(np.clip(self.game.world.daylight, 0.0, 1.0))
        stance = np.array([facing, player.sleeping, round(100 * daylight)], dtype=np.uint8)
        unlocked = np.array([player.achievements[name] > 0 for name in ACHIEVEMENTS])
        seen = {"view": view, "inventory": inventory, "stance": stance, "achievements": unlocked}
        seen["action_mask"] = _action_mask(Situation.read(seen))
        if self.symbolic:
            vector = np.zeros(_VECTOR, dtype=np.float32)
            cells = view.size * len(CODES)
            vector[np.arange(view.size) * len(CODES) + view.reshape(-1)] = 1.0
            vector[cells : cells + len(ITEMS)] = inventory / 9.0
            vector[cells + len(ITEMS) + facing] = 1.0
            vector[-2:] = player.sleeping, daylight
            seen["observation"] = vector
        if frame is not None:
            seen["frame"] = np.ascontiguousarray(frame.transpose(2, 0, 1))
        return seen


def _action_mask(here: Situation) -> np.ndarray:
    """Tell by inventory and neighborhood what can have an effect, bool ``[17]``."""
    mask = np.ones(len(ACTIONS), dtype=np.bool_)
    for index, action in enumerate(ACTIONS):
        verb, _, name = action.partition("_")
        if verb in ("place", "make"):
            rule = PLACE[name] if verb == "place" else MAKE[name]
            there = here.ahead in rule["where"] if verb == "place" else here.beside(rule["nearby"])
            # Asleep, the game takes every action for sleep until energy is full.
            awake = not here.asleep or here.inventory["energy"] >= 9
            mask[index] = there and awake and here.has(rule["uses"])
    mask[ACTIONS.index("sleep")] = here.inventory["energy"] < 9
    return mask
