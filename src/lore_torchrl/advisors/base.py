"""What an adviser is asked, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


class AdviceError(ValueError):
    """An answer that cannot be used: wrong length, not finite, out of range."""


@dataclass(frozen=True, slots=True)
class AdviceRequest:
    """One question to an adviser.

    Args:
        description: What the agent sees, as text. Two situations that deserve the
            same advice have the same text.
        actions: Names of the actions, in the order of the logits asked for.
        cache_key: Canonical, short form of the situation. Equal keys share advice.
        facts: Structured form of the same information, for advisers that compute
            rather than read (planners). Holds nothing that ``description`` hides.
    """

    description: str
    actions: tuple[str, ...]
    cache_key: str
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Advice:
    """One answer: a preference over the actions and how sure the adviser is.

    Args:
        logits: One finite number for each action, unnormalised, in the request's order.
        confidence: The adviser's own confidence, from 0 to 1. Default: ``1.0``.

    Raises:
        AdviceError: If a logit is not a finite number, there are none, or the
            confidence lies outside 0 to 1.

    Examples:
        >>> Advice(logits=(0.0, 3.0), confidence=0.5).confidence
        0.5
    """

    logits: tuple[float, ...]
    confidence: float = 1.0

    def __post_init__(self) -> None:
        if not self.logits:
            raise AdviceError("Advice needs at least one logit.")
        if not all(math.isfinite(value) for value in self.logits):
            raise AdviceError(f"Advice logits must be finite, got {self.logits}.")
        if not 0.0 <= self.confidence <= 1.0:
            raise AdviceError(f"Advice confidence must lie in [0, 1], got {self.confidence}.")


@runtime_checkable
class Advisor(Protocol):
    """Anything that answers a batch of requests.

    The answers come in the order of the requests; ``None`` stands for a request
    that could not be answered. An adviser may raise: the service counts the error
    and the run goes on without that advice.
    """

    async def advise(self, requests: Sequence[AdviceRequest]) -> list[Advice | None]:
        """Answer each request, or ``None`` where there is no answer."""
        ...


@runtime_checkable
class Describer(Protocol):
    """Turns one row of an environment's output into questions for an adviser.

    ``observation`` maps each of :attr:`in_keys` to that row's value: a numpy array
    for tensors, a ``str`` for text. A describer may remember: ``row`` names the
    environment within the batch, and :meth:`observe` is called once for each new
    observation of that row, before :meth:`cache_key` and :meth:`request`.
    """

    in_keys: Sequence[str]
    actions: tuple[str, ...]

    def observe(
        self, row: int, observation: Mapping[str, Any], action: int | None, *, reset: bool
    ) -> None:
        """Take note of a new observation, reached by ``action`` (``None`` after a reset)."""
        ...

    def cache_key(self, row: int, observation: Mapping[str, Any]) -> str:
        """Return the key of the situation; called every step, so it must be cheap."""
        ...

    def request(self, row: int, observation: Mapping[str, Any]) -> AdviceRequest:
        """Return the full question; called only when the adviser will be asked."""
        ...
