"""Advice computed by a planner, from perfect to adversarial."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lore_torchrl.advisors.base import LONGEST_PLAN, Advice, AdviceRequest, check

Planner = Callable[[AdviceRequest], Sequence[float] | None]


class ScriptedAdvisor:
    r"""Advise what a planner finds best, degraded to a chosen competence.

    The action advised gets the logit ``sharpness``, the others 0. Where the planner
    returns ``None`` there is no advice.

    Args:
        planner: Returns one value an action, higher is better, or ``None``. Among equals
            the first counts. A method ``confidence(request)``, from 0 to 1, scales the
            confidence; an attribute ``cache_prefix`` names settings of its own.
        competence: With :math:`c \ge 0`, the best action with probability :math:`c`, else
            a uniformly random one; with :math:`c < 0`, a worst action with probability
            :math:`|c|`, else a uniformly random one. Default: ``1.0``.
        sharpness: Logit of the action advised. Default: ``3.0``.
        confidence: Confidence that its advice claims, from 0 to 1. Default: ``1.0``.
        plan_length: Longest plan given, at most 64, the planner's ``plan(request, length)`` where
            the best action is advised; where a worst action is, that again and again. Default:
            ``0``, none.
        subgoals: Whether to name a subgoal, the planner's ``subgoal(request)``, where the best
            action is advised. Default: ``False``.
        valid_actions: Whether to say which actions are of any use, the planner's
            ``valid_actions(request)``; not at a negative competence. Default: ``False``.
        seed: Seed of the advisor's own random stream. Default: ``0``.

    Raises:
        ValueError: If an argument is out of range, or the planner's values do not match
            the actions.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        competence: float = 1.0,
        sharpness: float = 3.0,
        confidence: float = 1.0,
        plan_length: int = 0,
        subgoals: bool = False,
        valid_actions: bool = False,
        seed: int = 0,
    ):
        check(callable(planner), "planner", planner, "callable with an AdviceRequest")
        rule = "from 1, perfect, over 0, random, to -1, adversarial"
        check(-1.0 <= competence <= 1.0, "competence", competence, rule)
        rule = "positive and finite; a negative competence advises against the best action"
        check(0.0 < sharpness < math.inf, "sharpness", sharpness, rule)
        check(0.0 <= confidence <= 1.0, "confidence", confidence, "from 0 to 1")
        rule = f"0 to {LONGEST_PLAN}, and the planner needs a plan()"
        fits = plan_length == 0 or (0 < plan_length <= LONGEST_PLAN and hasattr(planner, "plan"))
        check(fits, "plan_length", plan_length, rule)
        rule = "the planner needs a subgoal()"
        check(not subgoals or hasattr(planner, "subgoal"), "subgoals", subgoals, rule)
        rule = "the planner needs a valid_actions(), as MiniGrid's has"
        fits = not valid_actions or hasattr(planner, "valid_actions")
        check(fits, "valid_actions", valid_actions, rule)
        self.planner = planner
        self.plan_length, self.subgoals = plan_length, subgoals
        self.valid_actions = valid_actions
        self.competence = float(competence)
        self.sharpness = float(sharpness)
        self.confidence = float(confidence)
        self.seed = seed
        self._random = random.Random(seed)

    @property
    def cache_prefix(self) -> str:
        """What tells this advisor's answers from those of another in the same store."""
        name = getattr(self.planner, "__qualname__", type(self.planner).__qualname__)
        own = getattr(self.planner, "cache_prefix", "")
        own += f",plan {self.plan_length}" * bool(self.plan_length)
        own += ",subgoals" * self.subgoals + ",valid" * self.valid_actions
        settings = f"{name},{own},{self.competence!r},{self.sharpness!r},{self.confidence!r}"
        # Where the best action is always advised, nothing is drawn.
        return f"scripted-{settings}{'' if self.competence == 1.0 else f',{self.seed}'}:"

    async def advise(self, requests: Sequence[AdviceRequest]) -> list[Advice | None]:
        """Answer each request, or ``None`` where the planner has no answer."""
        return [self._advise(request) for request in requests]

    def _advise(self, request: AdviceRequest) -> Advice | None:
        values = self.planner(request)
        if values is None:
            return None
        if len(values) != len(request.actions):
            raise ValueError(
                f"planner must return one value an action: got {len(values)} for "
                f"{len(request.actions)} actions."
            )
        plan, subgoal, valid = (), "", ()
        if self.valid_actions and self.competence >= 0.0:
            valid = tuple(self.planner.valid_actions(request))
        if self._random.random() >= abs(self.competence):
            chosen = self._random.randrange(len(values))
        else:
            pick = max if self.competence > 0.0 else min
            chosen = pick(range(len(values)), key=values.__getitem__)
            if self.plan_length:
                plan = (chosen,) * self.plan_length
                if self.competence > 0.0:
                    plan = tuple(self.planner.plan(request, self.plan_length))
            if self.subgoals and self.competence > 0.0:
                subgoal = self.planner.subgoal(request)
        logits = [0.0] * len(values)
        logits[chosen] = self.sharpness
        claim = getattr(self.planner, "confidence", None)
        scale = 1.0 if claim is None else claim(request)
        confidence = self.confidence * scale
        return Advice(tuple(logits), confidence, plan=plan, subgoal=subgoal, valid=valid)

    def state_dict(self) -> dict[str, Any]:
        """Return the random stream's state in types that JSON holds."""
        return {"random": stream_state(self._random)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        restore_stream(self._random, state_dict["random"])


def stream_state(stream: random.Random) -> list[Any]:
    """Return a random stream's state in types that JSON holds."""
    version, words, gauss = stream.getstate()
    return [version, list(words), gauss]


def restore_stream(stream: random.Random, state: Sequence[Any]) -> None:
    """Continue a random stream from a state that :func:`stream_state` returned."""
    version, words, gauss = state
    stream.setstate((version, tuple(words), gauss))
