"""Advice that has been bought once and is free from then on."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from lore_torchrl.advisors.base import Advice


class AdviceCache:
    """Exact cache from the key of a situation to its advice; drops the least recently used.

    Args:
        max_entries: Situations kept, at least 1. Default: ``100_000``.

    Raises:
        ValueError: If ``max_entries`` is below 1.

    Examples:
        >>> cache = AdviceCache(max_entries=2)
        >>> cache.put("door", Advice(logits=(0.0, 3.0)))
        >>> cache.get("door").logits
        (0.0, 3.0)
        >>> cache.get("key") is None
        True
        >>> cache.hits, cache.misses
        (1, 1)
    """

    def __init__(self, max_entries: int = 100_000) -> None:
        if max_entries < 1:
            raise ValueError(
                f"AdviceCache needs room for at least one entry, got max_entries={max_entries}."
            )
        self.max_entries = max_entries
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[str, Advice] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def get(self, key: str) -> Advice | None:
        """Return the advice for ``key`` or ``None``, and count the hit or miss."""
        advice = self._entries.get(key)
        if advice is None:
            self.misses += 1
        else:
            self.hits += 1
            self._entries.move_to_end(key)
        return advice

    def peek(self, key: str) -> Advice | None:
        """Return the advice for ``key`` or ``None``; neither counters nor order change."""
        return self._entries.get(key)

    def put(self, key: str, advice: Advice) -> None:
        """Remember ``advice`` for ``key`` as the most recently used entry."""
        self._entries[key] = advice
        self._entries.move_to_end(key)
        if len(self._entries) > self.max_entries:
            self._entries.popitem(last=False)

    def state_dict(self) -> dict[str, Any]:
        """Return entries, least recently used first, and counters as JSON-able types."""
        return {
            "entries": [
                [key, list(advice.logits), advice.confidence]
                for key, advice in self._entries.items()
            ],
            "hits": self.hits,
            "misses": self.misses,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace entries and counters.

        Args:
            state: What :meth:`state_dict` returned. Of more entries than
                ``max_entries``, the most recently used stay.
        """
        self._entries.clear()
        for key, logits, confidence in state["entries"]:
            self.put(key, Advice(logits=tuple(logits), confidence=confidence))
        self.hits = int(state["hits"])
        self.misses = int(state["misses"])
