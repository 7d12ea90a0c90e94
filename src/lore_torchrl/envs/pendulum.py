"""Pendulum: swing a rod up and hold it there, by a continuous torque."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.envs.adapter import MemorylessDescriber
from lore_torchrl.envs.gym_adapter import GymAdapter, gym
from lore_torchrl.envs.programs.pendulum import PROGRAMS

#: The actions that the advisor chooses among, and their torques.
TORQUES = {
    "strong clockwise": -2.0,
    "clockwise": -1.0,
    "gentle clockwise": -0.4,
    "none": 0.0,
    "gentle counterclockwise": 0.4,
    "counterclockwise": 1.0,
    "strong counterclockwise": 2.0,
}
_MEANINGS = tuple(
    f"turn {name.split()[-1]} with a torque of {abs(torque)}" if torque else "let it swing"
    for name, torque in TORQUES.items()
)
# Angle from upright, radians, within which the rod counts as upright.
UPRIGHT = 0.3
# Degrees and radians a second that one situation spans: near the top, and elsewhere.
_FINE, _COARSE = (5, 0.5), (15, 1.0)
# Where the planner leaves swinging for balancing: the angle, radians.
_BALANCE = 0.6
_STIFFNESS, _DAMPING = 10.0, 2.5
_MISSION = (
    "swing the rod up and hold it upright; the motor is too weak to lift it in one go, so that it "
    "must be swung to and fro first"
)
_UNITS = "Angles are counterclockwise from upright, so that 180 degrees hangs straight down."


class _Held(gym.ObservationWrapper):
    """Count the steps for which the rod has been upright without a break."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        held = gym.spaces.Box(0.0, np.inf, (1,), np.float32)
        self.observation_space = gym.spaces.Dict(
            {"observation": env.observation_space, "held": held}
        )

    def reset(self, **settings: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        self._steps = 0
        return super().reset(**settings)

    def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        self._steps = self._steps + 1 if observation[0] > math.cos(UPRIGHT) else 0
        return {"observation": observation, "held": np.array([self._steps], dtype=np.float32)}


class Pendulum(GymAdapter):
    """Gymnasium's Pendulum as an :class:`~lore_torchrl.envs.adapter.EnvAdapter`.

    The agent sees cosine and sine of the angle from upright and the angular velocity, and
    acts by a torque ``[N, 1]`` from -2 to 2, positive counterclockwise. The advisor chooses
    among the torques of :data:`TORQUES`. An episode succeeds if the rod has been within
    :data:`UPRIGHT` of upright in each of its last ``hold_steps`` steps.

    Args:
        env_id: Gymnasium id. Default: ``"Pendulum-v1"``.

    Keyword Args:
        max_steps: Step limit of an episode; ``None`` for the id's own, 200. Default: ``None``.
        hold_steps: Steps for which the rod must be upright in the end. Default: ``50``.

    Raises:
        ValueError: If ``hold_steps`` is not positive, or an episode is too short for it.
    """

    programs = PROGRAMS

    def __init__(
        self, env_id: str = "Pendulum-v1", *, max_steps: int | None = None, hold_steps: int = 50
    ) -> None:
        limit = gym.spec(env_id).max_episode_steps if max_steps is None else max_steps
        if not 1 <= hold_steps <= limit:
            raise ValueError(
                f"hold_steps={hold_steps} must lie between 1 and the episode's {limit} steps: "
                "lower env.options.hold_steps, or raise env.max_steps."
            )
        self.env_id, self.max_steps, self.hold_steps = env_id, limit, hold_steps

    def make_gym(self, pixels: bool = False) -> gym.Env:
        """Make a pendulum; ``observation`` is ``[3]``, the action ``[1]``."""
        mode = "rgb_array" if pixels else None
        return _Held(gym.make(self.env_id, render_mode=mode, max_episode_steps=self.max_steps))

    def success(self, following: TensorDictBase) -> Tensor:
        """Return whether the episode ends here, and the rod was held up to then."""
        return following.get("done") & (following.get("held") >= self.hold_steps)

    def make_describer(self, *, memory: bool = False, image: bool = False) -> PendulumDescriber:
        """Make the describer, which has no memory and no picture."""
        return PendulumDescriber()

    def make_planner(self) -> PendulumPlanner:
        """Make the planner."""
        return PendulumPlanner()


def energy(angle: float, speed: float) -> float:
    r"""Return the rod's energy, 5 where it stands upright and -5 where it hangs.

    .. math::
        E = \tfrac16 \dot\theta^2 + 5 \cos\theta

    in joules, for a rod of mass 1 kg and length 1 m under 10 m/s², an ``angle`` from upright
    in radians and a ``speed`` in radians a second.
    """
    return speed**2 / 6.0 + 5.0 * math.cos(angle)


class PendulumDescriber(MemorylessDescriber):
    """Angle, speed and energy in words, rounded finely near the top and coarsely elsewhere."""

    in_keys = ("observation",)
    actions = tuple(TORQUES)
    anchors = tuple((torque,) for torque in TORQUES.values())
    #: What a program sees, and what it means.
    program_fields: Mapping[str, str] = {
        "degrees": "int from -179 to 180, the rod's angle, counterclockwise from upright, rounded",
        "speed": "float, rad/s, positive counterclockwise, rounded",
        "lacking": "float, J that the rod lacks to stand upright at rest; negative: too much",
        "mission": "the task in words",
    }

    def cache_key(self, row: int, observation: Mapping[str, Any]) -> str:
        """Return the rounded angle and speed."""
        return "{},{}".format(*_round(observation))

    def abstract_state(self, row: int, observation: Mapping[str, Any]) -> str:
        """Return angle and speed, rounded coarsely everywhere."""
        return "{},{}".format(*_round(observation, near_top=_COARSE))

    def request(self, row: int, observation: Mapping[str, Any]) -> AdviceRequest:
        """Return the question about this state."""
        degrees, speed = _round(observation)
        angle = math.radians(degrees)
        if abs(angle) < UPRIGHT:
            where = "nearly upright"
        elif abs(angle) > math.pi - UPRIGHT:
            where = "nearly straight down"
        else:
            where = f"leaning to the {'left' if angle > 0 else 'right'}"
        turning = "at rest"
        if speed:
            turning = f"turning {'counter' * (speed > 0)}clockwise at {abs(speed):.2f} rad/s"
        missing = 5.0 - energy(angle, speed)
        lack = f"lacks {missing:.1f} J" if missing > 0 else f"has {-missing:.1f} J too much"
        return AdviceRequest(
            f"A rod swings around one end. It is {where}, at {degrees} degrees, {turning}. "
            f"{_UNITS} To stand upright at rest its energy {lack}.",
            self.actions,
            self.cache_key(row, observation),
            facts={"angle": angle, "speed": speed},
            action_meanings=_MEANINGS,
            mission=_MISSION,
        )

    def program_view(self, row: int, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return what :attr:`program_fields` names, as plain Python data: what the text tells."""
        degrees, speed = _round(observation)
        lacking = round(5.0 - energy(math.radians(degrees), speed), 1)
        return {"degrees": degrees, "speed": speed, "lacking": lacking, "mission": _MISSION}


def _round(
    observation: Mapping[str, Any], near_top: tuple[int, float] = _FINE
) -> tuple[int, float]:
    """Return the angle in degrees and the speed, rounded."""
    cosine, sine, speed = (float(value) for value in observation["observation"])
    angle = math.atan2(sine, cosine)
    cell = near_top if abs(angle) < _BALANCE else _COARSE
    degrees = round(math.degrees(angle) / cell[0]) * cell[0]
    # Straight down is one place, and adding zero makes -0.0 the same as 0.0.
    return 180 if degrees == -180 else degrees, round(speed / cell[1]) * cell[1] + 0.0


class PendulumPlanner:
    r"""Values of the named torques: pump energy in, then balance.

    .. math::
        u^\star = \begin{cases}
            -10\,\theta - 2.5\,\dot\theta & |\theta| < 0.6 \\
            \mathrm{sign}(\dot\theta)\,(5 - E(\theta, \dot\theta)) & \dot\theta \ne 0 \\
            \mathrm{sign}(\sin\theta)\,(5 - E(\theta, \dot\theta)) & \text{otherwise}
        \end{cases}

    clipped to the motor's range; a torque's value is how near it comes to it. Swing-up by
    energy control: https://doi.org/10.1016/S0005-1098(99)00140-5.
    """

    def __call__(self, request: AdviceRequest) -> list[float] | None:
        """Return one value a torque, ``None`` for requests of other describers."""
        angle, speed = (request.facts.get(name) for name in ("angle", "speed"))
        if angle is None or speed is None:
            return None
        if abs(angle) < _BALANCE:
            wanted = -_STIFFNESS * angle - _DAMPING * speed
        else:
            missing = 5.0 - energy(angle, speed)
            # From rest the way that gravity goes too: against it the motor may just hold the rod.
            wanted = math.copysign(1.0, speed or math.sin(angle)) * missing
        wanted = min(max(wanted, -2.0), 2.0)
        return [-abs(wanted - torque) for torque in TORQUES.values()]
