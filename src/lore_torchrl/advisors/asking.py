"""What every way of asking a chat server has in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.advisors.parsing import Preference

# Sends a body to a path and returns the JSON object that came.
Post = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]

# Statuses by which a server says that it does not know, or not allow, what it was asked.
UNSUPPORTED = frozenset((400, 404, 405, 415, 422, 501))


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


class Mode(Protocol):
    """Asks one question and reads the answer."""

    async def ask(self, post: Post, request: AdviceRequest) -> tuple[Preference, str]:
        """Return the preference and the answer as the server wrote it."""
        ...
