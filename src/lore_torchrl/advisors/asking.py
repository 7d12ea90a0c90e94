"""What every way of asking a chat server has in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.advisors.errors import StatusError
from lore_torchrl.advisors.parsing import Preference

# Sends a body to a path and returns the JSON object that came.
Post = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]

# Statuses by which a server says that it does not know, or not allow, what it was asked.
UNSUPPORTED = frozenset((400, 404, 405, 415, 422, 501))
# Those among them that speak of a field, not of the path.
UNSUPPORTED_FIELD = frozenset((400, 422, 501))


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What all modes send alike; documented at :class:`~lore_torchrl.advisors.chat.ChatAdvisor`."""

    model: str
    server: str = "openai"
    temperature: float | None = None
    max_tokens: int = 1024
    votes: int = 8
    smoothing: float = 0.1
    min_label_mass: float = 0.01
    send_image: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)


class ProbeSchedule:
    """Says which calls try everything, and which only one thing, after everything failed.

    After a failed probe the next 8 calls try one thing, after the second 16, and so on up
    to 512. So a lasting failure costs little more than one request a call.

    Examples:
        >>> schedule = ProbeSchedule()
        >>> schedule.due()
        True
        >>> schedule.failed()
        >>> [schedule.due() for _ in range(9)].index(True)
        8
    """

    def __init__(self) -> None:
        self.interval = 0
        self._left = 0

    def due(self) -> bool:
        """Return whether this call is a probe; asked once a call."""
        if self._left == 0:
            return True
        self._left -= 1
        return False

    def failed(self) -> None:
        """Take note of a probe in which everything failed."""
        # Probes at the same time fail together.
        if self._left == 0:
            self.interval = min(max(8, 2 * self.interval), 512)
            self._left = self.interval

    def answered(self) -> None:
        """Take note of an answer: the next call is a probe."""
        self.interval = self._left = 0


class Forms:
    """Forms of one request, tried in turn until the server takes one.

    Forms before that one are not tried again. Where the server refuses all, later calls
    try one, as a :class:`ProbeSchedule` says: the one that was taken before, else the
    plainest.

    Args:
        names: The forms, the plainest last.
        refusals: Statuses by which a server refuses a form.
    """

    def __init__(self, names: Sequence[str], refusals: Container[int]) -> None:
        self.names = list(names)
        self.refusals = refusals
        self.proven = False
        self._schedule = ProbeSchedule()

    async def ask(self, send: Callable[[str], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Return what the first form that is taken brings.

        Raises:
            AdviceError: As ``send`` does; if all forms are refused, the last refusal.
        """
        probe = self._schedule.due()
        names = tuple(self.names) if probe else (self.names[0 if self.proven else -1],)
        for name in names:
            try:
                answer = await send(name)
            except StatusError as error:
                if error.status not in self.refusals:
                    raise
                refusal = error
                continue
            self._schedule.answered()
            # Only an answer proves that the refusals were about the form.
            if probe and name in self.names:
                del self.names[: self.names.index(name)]
                self.proven = True
            return answer
        if probe:
            self._schedule.failed()
        raise refusal


class Mode(Protocol):
    """Asks one question and reads the answer."""

    async def ask(self, post: Post, request: AdviceRequest) -> tuple[Preference, str]:
        """Return the preference and the answer as the server wrote it."""
        ...
