"""One answer, many steps: an advisor's plan as advice while the world goes as it expects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lore_torchrl.advisors.base import Advice
from lore_torchrl.advisors.parsing import NAMED_ACTION_LOGIT


class PlanFollower:
    """Follows the plan of one environment's latest advice.

    While each planned action is taken and changes the situation, the next one is what the
    advisor says of the situation reached: the logit 3 for it, 0 for the others, with the answer's
    confidence and the rest of the plan, without subgoal and valid actions. The plan ends where
    another action is taken, where the situation stays as it was, and where a thing comes into
    view that the episode has not shown.

    Args:
        horizon: Steps of a plan that are followed, the answer's own included, at least 1.
    """

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self._advice: Advice | None = None
        self._seen: set[str] = set()

    def reset(self, things: Iterable[str]) -> None:
        """Begin an episode without a plan; ``things`` are what its first observation shows."""
        self._advice, self._seen = None, set(things)

    def step(self, action: int, *, changed: bool, things: Iterable[str]) -> Advice | None:
        """Return what the plan says after ``action``, or ``None`` where it has ended.

        Args:
            action: Index of the action taken.

        Keyword Args:
            changed: Whether the situation is another than before.
            things: Names of what is in view.
        """
        new = not self._seen.issuperset(things)
        self._seen.update(things)
        advice, self._advice = self._advice, None
        if advice is None or new or not changed or advice.plan[0] != action or not advice.plan[1:]:
            return None
        rest = advice.plan[1:]
        logits = [0.0] * len(advice.logits)
        logits[rest[0]] = NAMED_ACTION_LOGIT
        # Subgoal and valid actions are those of the situation that was asked about.
        return replace(advice, logits=tuple(logits), plan=rest, valid=(), subgoal="")

    def follow(self, advice: Advice | None) -> None:
        """Take the plan of the advice that the row got; without one there is nothing to follow."""
        self._advice = None
        if advice is not None and advice.plan:
            self._advice = replace(advice, plan=advice.plan[: self.horizon])
