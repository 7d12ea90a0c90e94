"""Wrappers that degrade another advisor's answers, for studies of robustness."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lore_torchrl.advisors.base import (
    Advice,
    AdviceRequest,
    Advisor,
    Wrapper,
    check,
    read_extras,
)
from lore_torchrl.advisors.errors import AdviceError, Usage
from lore_torchrl.advisors.parsing import logits_of
from lore_torchrl.advisors.scripted import restore_stream, stream_state

Answer = Advice | AdviceError | None


class _Flawed(Wrapper):
    """Saves its state together with the wrapped advisors', and marks their cache keys."""

    wrapped: tuple[str, ...] = ("advisor",)
    mark: str

    @property
    def cache_prefix(self) -> str:
        """The wrapped advisors' own behind a mark, so that a store never mixes the two."""
        inner = (getattr(getattr(self, name), "cache_prefix", "") for name in self.wrapped)
        return f"{self.mark}:{'|'.join(inner)}"

    def state_dict(self) -> dict[str, Any]:
        """Return its own and the wrapped advisors' states, in types that JSON holds."""
        state = self._own_state()
        for name in self.wrapped:
            advisor = getattr(self, name)
            state[name] = advisor.state_dict() if hasattr(advisor, "state_dict") else None
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        self._load_own_state(state_dict)
        for name in self.wrapped:
            advisor = getattr(self, name)
            if state_dict[name] is not None and hasattr(advisor, "load_state_dict"):
                advisor.load_state_dict(state_dict[name])


class StaleAdvisor(_Flawed):
    r"""Give each question the answer that belonged to an earlier one.

    Question :math:`k` is answered :math:`a(q_{k - \text{lag}})`, where :math:`a` is the
    wrapped advisor; the first ``lag`` questions are answered as they are. Questions count in
    the order in which their answers come. Errors pass at once and do not count.

    Args:
        advisor: Whose answers come late.
        lag: How many questions late. Default: ``1``.

    Raises:
        ValueError: If ``lag`` is not a positive integer, or ``advisor`` has no ``advise``.

    """

    def __init__(self, advisor: Advisor, *, lag: int = 1):
        _check_advisor("advisor", advisor)
        check(isinstance(lag, int) and lag >= 1, "lag", lag, "a positive integer")
        self.advisor = advisor
        self.lag = lag
        self.mark = f"stale-{lag}"
        self._earlier: deque[Advice | None] = deque(maxlen=lag)

    async def advise(self, requests: Sequence[AdviceRequest]) -> list[Answer]:
        """Ask the wrapped advisor, and answer with what it said earlier."""
        return [self._swap(answer) for answer in await self.advisor.advise(requests)]

    def _swap(self, fresh: Answer) -> Answer:
        if isinstance(fresh, AdviceError):
            return fresh
        late = self._earlier[0] if len(self._earlier) == self.lag else fresh
        self._earlier.append(fresh)
        if late is None:
            return None
        return replace(late, usage=Usage() if fresh is None else fresh.usage)

    def _own_state(self) -> dict[str, Any]:
        earlier = [
            one and [list(one.logits), one.confidence, one.raw, one.extras()]
            for one in self._earlier
        ]
        return {"earlier": earlier}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        earlier = (
            one and Advice(tuple(one[0]), one[1], raw=one[2], **read_extras(*one[3:] or ({},)))
            for one in state["earlier"]
        )
        self._earlier = deque(earlier, maxlen=self.lag)


class TruncatedAdvisor(_Flawed):
    r"""Leave a random subset of the actions out of each answer.

    With :math:`p = \mathrm{softmax}(\ell)` and the set :math:`K` of the actions kept, each one
    with probability ``keep`` and at least one,

    .. math::
        \ell'_a = \log\max\left([a \in K]\, p_a / p(K),\; 10^{-4}\right),
        \qquad c' = c\, p(K), \qquad p(K) = \sum_{b \in K} p_b.

    Args:
        advisor: Whose answers lose actions.
        keep: Probability with which each action stays, from 0 (one random action stays)
            to 1 (all do). Default: ``0.5``.
        seed: Seed of the wrapper's own random stream. Default: ``0``.

    Raises:
        ValueError: If ``keep`` is out of range, or ``advisor`` has no ``advise``.

    """

    def __init__(self, advisor: Advisor, *, keep: float = 0.5, seed: int = 0):
        _check_advisor("advisor", advisor)
        check(0.0 <= keep <= 1.0, "keep", keep, "a probability, from 0 to 1")
        self.advisor = advisor
        self.keep = float(keep)
        self.mark = f"truncated-{self.keep!r},{seed}"
        # A stream of its own: the wrapped advisor may have been given the same seed.
        self._random = random.Random(f"truncated {seed}")

    async def advise(self, requests: Sequence[AdviceRequest]) -> list[Answer]:
        """Ask the wrapped advisor, and leave out actions from each answer."""
        answers = await self.advisor.advise(requests)
        return [self._truncate(one) if isinstance(one, Advice) else one for one in answers]

    def _truncate(self, advice: Advice) -> Advice:
        kept = [self._random.random() < self.keep for _ in advice.logits]
        if not any(kept):
            kept[self._random.randrange(len(kept))] = True
        pairs = list(zip(advice.logits, kept, strict=True))
        # Each sum from its own top: none underflows, however far the best action left out.
        top_kept = max(logit for logit, stays in pairs if stays)
        weights = [math.exp(logit - top_kept) if stays else 0.0 for logit, stays in pairs]
        top = max(advice.logits)
        everything = sum(math.exp(logit - top) for logit in advice.logits)
        mass = math.exp(top_kept - top) * sum(weights) / everything
        return replace(
            advice,
            logits=logits_of(weights),
            confidence=advice.confidence * min(1.0, mass),
        )

    def _own_state(self) -> dict[str, Any]:
        return {"random": stream_state(self._random)}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        restore_stream(self._random, state["random"])


class TurningAdvisor(_Flawed):
    """Answer as one advisor first, and as another from some question on.

    A question counts once it is asked, answered or not; a batch may be split between the
    two. A cache in front goes on giving the answers that it holds from before the turn,
    until they expire.

    Args:
        before: Who answers the first ``turn_after`` questions.
        after: Who answers all others.
        turn_after: Questions before the turn; 0 turns at once. Default: ``None``, never.

    Raises:
        ValueError: If ``turn_after`` is neither ``None`` nor a non-negative integer, or an
            advisor has no ``advise``.

    """

    wrapped = ("before", "after")

    def __init__(self, before: Advisor, after: Advisor, *, turn_after: int | None = None):
        _check_advisor("before", before)
        _check_advisor("after", after)
        valid = turn_after is None or (isinstance(turn_after, int) and turn_after >= 0)
        check(valid, "turn_after", turn_after, "an integer from 0 up, or None for never")
        self.before = before
        self.after = after
        self.turn_after = turn_after
        # The turn does not change it.
        self.mark = f"turns-{turn_after}"
        self._asked = 0

    @property
    def advisor(self) -> Advisor:
        """Who answers the next question."""
        turned = self.turn_after is not None and self._asked >= self.turn_after
        return self.after if turned else self.before

    async def advise(self, requests: Sequence[AdviceRequest]) -> list[Answer]:
        """Put each question to the one whose turn it is."""
        first = len(requests)
        if self.turn_after is not None:
            first = max(0, self.turn_after - self._asked)
        # Counted before anything is awaited: several calls may be under way.
        self._asked += len(requests)
        answers: list[Answer] = []
        for advisor, part in ((self.before, requests[:first]), (self.after, requests[first:])):
            if part:
                answers += await advisor.advise(part)
        return answers

    async def aclose(self) -> None:
        """Close both advisors' connections, where they have any."""
        for advisor in (self.before, self.after):
            if hasattr(advisor, "aclose"):
                await advisor.aclose()

    def _own_state(self) -> dict[str, Any]:
        return {"asked": self._asked}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self._asked = state["asked"]


def _check_advisor(name: str, advisor: object) -> None:
    valid = callable(getattr(advisor, "advise", None))
    check(valid, name, advisor, "an advisor with an async `advise`")
