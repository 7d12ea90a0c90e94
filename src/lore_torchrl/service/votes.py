"""Several answers to like situations: their average, when another is due, what failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lore_torchrl.advisors.base import Advice


class Ballots:
    """What is known about situations and their classes beyond the answers.

    A class is worth its ``n + 1``-th answer after ``first_visits * 2**(n - 1)`` visits
    since the ``n``-th: good advice leads away from a situation, so that visits gather
    where advice fails. An action that left a situation as it was is refuted there, and so
    is each answer that prefers it. An answer that was refuted before it came closes the
    situation: the advisor repeats itself.

    Args:
        first_visits: Visits to a class before its second answer, at least 1.
            Default: ``8``.

    Raises:
        ValueError: If ``first_visits`` is below 1.

    Examples:
        >>> ballots = Ballots(first_visits=2)
        >>> ballots.visit("hall")
        >>> ballots.due("hall", answers=1)
        False
        >>> ballots.visit("hall")
        >>> ballots.due("hall", answers=1), ballots.due("hall", answers=2)
        (True, False)
        >>> ballots.refute("door", 1)
        True
        >>> ballots.bars("door", Advice(logits=(0.0, 3.0)))
        True
    """

    def __init__(self, first_visits: int = 8) -> None:
        if first_visits < 1:
            raise ValueError(
                f"vote_visits must be at least 1, got {first_visits}. With 1 a class is asked "
                "about again at once."
            )
        self.first_visits = first_visits
        self._visits: dict[str, int] = {}  # to a class since its last answer
        self._refuted: dict[str, set[int]] = {}  # actions in a situation
        self._closed: set[str] = set()

    def visit(self, coarse: str) -> None:
        """Count a visit to a class that has an answer."""
        self._visits[coarse] = self._visits.get(coarse, 0) + 1

    def answered(self, key: str, coarse: str | None, advice: Advice) -> bool:
        """Take note of an answer; return whether it is of use in its own situation."""
        if coarse is not None:
            self._visits[coarse] = 0
        barred = self.bars(key, advice)
        if barred:
            self._closed.add(key)
        return not barred

    def due(self, coarse: str, answers: int) -> bool:
        """Return whether a class that has ``answers``, at least 1, is worth another."""
        return self._visits.get(coarse, 0) >= self.first_visits * 2 ** (answers - 1)

    def closed(self, key: str) -> bool:
        """Return whether asking about a situation has become pointless."""
        return key in self._closed

    def refute(self, key: str, action: int) -> bool:
        """Take note that an action changed nothing; return whether that is new."""
        known = self._refuted.setdefault(key, set())
        new = action not in known
        known.add(action)
        return new

    def bars(self, key: str, advice: Advice) -> bool:
        """Return whether an answer prefers an action that was refuted in this situation."""
        refuted = self._refuted.get(key)
        return refuted is not None and best_action(advice) in refuted

    def state_dict(self) -> dict[str, Any]:
        """Return visits, refuted actions and closed situations as JSON-able types."""
        return {
            "visits": dict(self._visits),
            "refuted": {key: sorted(actions) for key, actions in self._refuted.items()},
            "closed": sorted(self._closed),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; of an empty one, nothing."""
        self._visits = {key: int(count) for key, count in state.get("visits", {}).items()}
        refuted = state.get("refuted", {})
        self._refuted = {key: {int(a) for a in actions} for key, actions in refuted.items()}
        self._closed = set(state.get("closed", ()))


def best_action(advice: Advice) -> int:
    """Return the action with the highest logit, the first among equals.

    Examples:
        >>> best_action(Advice(logits=(0.0, 3.0)))
        1
    """
    return max(range(len(advice.logits)), key=advice.logits.__getitem__)


def average(advices: Sequence[Advice]) -> Advice:
    """Return the confidence-weighted mean of some answers' distributions, as one answer.

    Args:
        advices: At least one; those with another number of logits than the first are
            left out.

    Examples:
        >>> both = average([Advice(logits=(0.0, 3.0)), Advice(logits=(3.0, 0.0))])
        >>> both.logits[0] == both.logits[1]
        True
    """
    if len(advices) == 1:
        return advices[0]
    same = [advice for advice in advices if len(advice.logits) == len(advices[0].logits)]
    logits = np.array([advice.logits for advice in same], dtype=np.float64)
    weights = np.array([advice.confidence for advice in same])
    share = weights if weights.any() else np.ones_like(weights)
    probs = np.exp(logits - logits.max(1, keepdims=True))
    mean = share @ (probs / probs.sum(1, keepdims=True)) / share.sum()
    # The smallest probability that a float32 keeps apart from zero.
    logs = np.log(np.maximum(mean, 1e-38))
    return Advice(logits=tuple(logs.tolist()), confidence=float(weights.mean()))
