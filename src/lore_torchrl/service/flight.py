"""Questions in flight, and answers that came too late for the step that asked."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lore_torchrl.advisors.base import Advice, AdviceRequest

# Late answers that wait to be taken; the cache has them in any case.
_MAX_LATE = 10_000


class Reply(NamedTuple):
    """Advice that is there, and the request that it comes or will come from.

    Attributes:
        advice_id: Number of the request, 0 for none or for advice from the cache; negative
            where that advice stands in until the request's own comes.
        advice: ``None`` where there is none, or not yet.
    """

    advice_id: int = 0
    advice: Advice | None = None


class Near(NamedTuple):
    """What a situation shares with those near it, for the cache's neighbourhood.

    Attributes:
        coarse: Coarse key. Default: none.
        latent: Vector ``[D]``. Default: none.
    """

    coarse: str | None = None
    latent: Any = None


@dataclass(slots=True, eq=False)
class Call:
    """One question that was paid for.

    Args:
        advice_id: Its number, from 1 on.
        request: The question.
        cache_key: Where its answer will be kept: fixed when it is asked, since an answer
            belongs to the model and prompt that it was asked of.
        near: By what its neighbours may find it. Default: nothing.
        started: Clock at which it was asked, seconds.
    """

    advice_id: int
    request: AdviceRequest
    cache_key: str
    near: Near = field(default_factory=Near)
    started: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        """Seconds since it was asked."""
        return time.monotonic() - self.started


class Flight:
    """The questions in flight by their key, and what has come of earlier ones.

    Not safe for several threads at once: the service holds its lock.

    Examples:
        >>> flight = Flight()
        >>> call = Call(1, AdviceRequest("a wall", ("forward", "right"), "wall"), "wall")
        >>> flight.start([call])
        >>> flight.advice_id("wall"), len(flight)
        (1, 1)
        >>> flight.land(call, Advice(logits=(0.0, 3.0)))
        >>> flight.take()
        [(1, Advice(logits=(0.0, 3.0), confidence=1.0))]
    """

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}
        self._late: OrderedDict[int, Advice | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, call: Call) -> bool:
        return self._calls.get(call.request.cache_key) is call

    def advice_id(self, key: str) -> int:
        """Return the number of the question in flight about ``key``, 0 for none."""
        call = self._calls.get(key)
        return 0 if call is None else call.advice_id

    @property
    def oldest_s(self) -> float:
        """Seconds since the oldest question in flight was asked, 0 without any."""
        started = min((call.started for call in self._calls.values()), default=math.inf)
        return max(0.0, time.monotonic() - started)

    def start(self, calls: Sequence[Call]) -> None:
        """Take note of questions that are asked now."""
        self._calls.update((call.request.cache_key, call) for call in calls)

    def land(self, call: Call, advice: Advice | None) -> None:
        """Take note of an answer, or that none will come (``None``)."""
        del self._calls[call.request.cache_key]
        self._late[call.advice_id] = advice
        if len(self._late) > _MAX_LATE:
            self._late.popitem(last=False)

    def give_up(self) -> list[Call]:
        """Wait for no question any more and return those that there were."""
        calls = list(self._calls.values())
        for call in calls:
            self.land(call, None)
        return calls

    def claim(self, advice_id: int) -> bool:
        """Take an answer out of the late ones; false where it is not among them."""
        return self._late.pop(advice_id, None) is not None

    def take(self) -> list[tuple[int, Advice | None]]:
        """Return the late answers, oldest first, and forget them."""
        taken = list(self._late.items())
        self._late.clear()
        return taken
