"""Advice that has been bought once and is free from then on."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lore_torchrl.advisors.base import Advice
from lore_torchrl.service.locks import SharedLock
from lore_torchrl.service.neighbours import Neighbourhood, as_vector
from lore_torchrl.service.store import AdviceStore


@dataclass(slots=True)
class _Entry:
    advice: Advice
    coarse: str | None = None
    latent: np.ndarray | None = None
    born: int = 0  # the cache's clock when it came
    served: int = 0
    seq: int = 0  # its number in the store, or without one in this cache: higher is later


class AdviceCache:
    r"""Cache from the key of a situation to its advice; drops the least recently used.

    The exact key is looked up first, then the neighbourhood: the latest advice under the
    same coarse key, then that of the nearest latent within ``radius``. Both are used
    where the caller gives a coarse key or a latent.

    With ``votes`` the situations of one coarse key are one class. The average of all its
    answers serves every situation in it, also those that have an answer of their own:
    :math:`\log \sum_i c_i\,\mathrm{softmax}(\ell_i)`, with the mean confidence. So single
    wrong answers are outvoted. Until a class has that many answers, :meth:`wants` calls
    each new situation in it worth a question.

    With a ``store`` an answer is on disk when :meth:`put` returns. What a restarted
    process finds there, or other processes have bought since, is taken in at the first
    miss. The store keeps what the memory drops. Clock, uses and counters are not in the
    store but in :meth:`state_dict`.

    Threads may share a cache; a look-up never waits for another thread's writing.

    Args:
        max_entries: Situations kept in memory, at least 1. Default: ``100_000``.
        store: Where answers are kept; ``None`` for memory only. Default: ``None``.
        ttl_steps: Environment steps, as told to :meth:`advance`, after which an answer
            is not served any more; ``None`` for never. Default: ``None``.
        ttl_hits: Times an answer is served; ``None`` for no end. Default: ``None``.
        radius: Largest Euclidean distance at which a latent's advice serves another;
            ``None`` for no search by latents. Latents of different world models cannot
            be compared: keep their caches apart by ``prefix``. Default: ``None``.
        votes: Answers that a coarse key should have; ``None`` for the latest alone.
            Default: ``None``.
        prefix: What the answers depend on beside the situation, such as the hash of
            the adviser's prompt. Caches of other prefixes in the same store are not
            seen. Default: empty.

    Raises:
        ValueError: If a number is out of its range.

    Examples:
        >>> cache = AdviceCache(max_entries=2)
        >>> cache.put("door", Advice(logits=(0.0, 3.0)), coarse="room 1")
        >>> cache.get("door").logits
        (0.0, 3.0)
        >>> cache.get("key") is None
        True
        >>> cache.get("wall", coarse="room 1").logits
        (0.0, 3.0)
        >>> cache.hits, cache.near_hits, cache.misses
        (1, 1, 1)
    """

    def __init__(
        self,
        max_entries: int = 100_000,
        *,
        store: AdviceStore | None = None,
        ttl_steps: int | None = None,
        ttl_hits: int | None = None,
        radius: float | None = None,
        votes: int | None = None,
        prefix: str = "",
    ) -> None:
        if max_entries < 1:
            raise ValueError(
                f"AdviceCache needs room for at least one entry, got max_entries={max_entries}."
            )
        limits = (("ttl_steps", ttl_steps), ("ttl_hits", ttl_hits), ("votes", votes))
        for name, value in limits:
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}. Use None for no end.")
        self.max_entries = max_entries
        self.store = store
        self.ttl_steps = ttl_steps
        self.ttl_hits = ttl_hits
        self.radius = radius
        self.votes = votes
        self.prefix = prefix
        self.hits = 0
        self.near_hits = 0
        self.misses = 0
        self.expired = 0
        self._now = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._near = Neighbourhood(radius)
        self._seen = 0  # the last number given; with a store, the last one known of it
        self._dropped = False  # the store holds what the memory does not
        self._outlived: dict[str, int] = {}  # expired here, though the store has it
        self._lock = SharedLock()

    def __len__(self) -> int:
        with self._lock:
            self._pull()
            return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return self.peek(key) is not None

    def advance(self, steps: int) -> None:
        """Let ``steps`` environment steps pass."""
        with self._lock:
            self._now += steps

    # ---- look-ups ----

    def get(
        self, key: str, coarse: str | None = None, latent: ArrayLike | None = None
    ) -> Advice | None:
        """Return the advice for a situation or ``None``, and count the hit or miss.

        Args:
            key: Exact key.
            coarse: Coarse key, to be served by a neighbour. Default: none.
            latent: Latent ``[D]``, to be served by a neighbour. Default: none.

        Raises:
            StoreError: If the store cannot be read.
            ValueError: If ``latent`` is not a vector.
        """
        with self._lock:
            found, dead = self._find(key, coarse, latent)
            self._bury(dead)
            if found is None:
                self.misses += 1
                return None
            if found == key:
                self.hits += 1
            else:
                self.near_hits += 1
            entry = self._entries[found]
            entry.served += 1
            self._entries.move_to_end(found)
            return self._voted(found, coarse)

    def peek(
        self, key: str, coarse: str | None = None, latent: ArrayLike | None = None
    ) -> Advice | None:
        """Return what :meth:`get` would; neither counters, order nor uses change."""
        with self._lock:
            found, _ = self._find(key, coarse, latent)
            return None if found is None else self._voted(found, coarse)

    def wants(self, key: str, coarse: str | None) -> bool:
        """Return whether an answer to this situation would be a new vote for its class.

        Args:
            key: Exact key.
            coarse: Coarse key; without one there is no class.
        """
        if self.votes is None or coarse is None:
            return False
        with self._lock:
            members = [found for found in self._near.find(coarse=coarse) if self._alive(found)]
            return key not in members and len(members) < self.votes

    def _voted(self, found: str, coarse: str | None) -> Advice:
        """Return the advice found or, with ``votes``, the average of its class."""
        own = self._entries[found]
        if self.votes is None or coarse is None or own.coarse != coarse:
            return own.advice
        keys = [key for key in self._near.find(coarse=coarse) if self._alive(key)]
        return average([self._entries[key].advice for key in keys]) if keys else own.advice

    def _find(
        self, key: str, coarse: str | None, latent: ArrayLike | None
    ) -> tuple[str | None, list[str]]:
        """Return the key that serves, and the expired ones passed over on the way to it."""
        if not self._alive(key):
            self._pull()
            if self._dropped and not self._alive(key):
                self._admit(self._stored("AND key = ?", key))
        dead = []
        for found in self._candidates(key, coarse, latent):
            if self._alive(found):
                return found, dead
            dead.append(found)
        return None, dead

    def _candidates(self, key: str, coarse: str | None, latent: ArrayLike | None) -> Iterator[str]:
        yield key
        # A key that two of these give is passed over twice, which does no harm.
        yield from self._near.find(coarse=coarse)
        yield from self._near.find(latent=latent)

    def _alive(self, key: str) -> bool:
        entry = self._entries.get(key)
        if entry is None:
            return False
        old = self.ttl_steps is not None and self._now - entry.born >= self.ttl_steps
        worn = self.ttl_hits is not None and entry.served >= self.ttl_hits
        return not (old or worn)

    def _bury(self, dead: Sequence[str]) -> None:
        for key in dead:
            if key in self._entries:
                if self.store is not None:
                    # It stays in there, since other processes have clocks of their own.
                    self._outlived[key] = self._entries[key].seq
                self._remove(key)
                self.expired += 1

    # ---- entries ----

    def put(
        self,
        key: str,
        advice: Advice,
        *,
        coarse: str | None = None,
        latent: ArrayLike | None = None,
    ) -> None:
        """Remember ``advice`` for ``key`` as the most recently used entry.

        Args:
            key: Exact key.
            advice: The answer; without its ``raw`` text and its ``usage`` in the store.
            coarse: Coarse key under which neighbours may find it. Default: none.
            latent: Latent ``[D]`` near which neighbours may find it. Default: none.

        Raises:
            StoreError: If the store cannot be written. The answer is in memory
                nevertheless, and is served from there.
            ValueError: If ``latent`` is not a vector.
        """
        entry = _Entry(advice, coarse, None if latent is None else as_vector(latent))
        try:
            # Outside the lock: look-ups of the environments go on meanwhile.
            self._save([(key, entry)])
        finally:
            with self._lock:
                entry.born = self._now
                self._number(entry)
                self._insert(key, entry)

    def _number(self, entry: _Entry) -> None:
        if not entry.seq:
            # Where the store could not be written, its later answers must still be seen.
            self._seen += self.store is None
            entry.seq = self._seen

    def _insert(self, key: str, entry: _Entry) -> None:
        self._entries[key] = entry
        self._entries.move_to_end(key)
        self._near.add(key, entry.seq, coarse=entry.coarse, latent=entry.latent)
        self._outlived.pop(key, None)
        if len(self._entries) > self.max_entries:
            self._remove(next(iter(self._entries)))
            self._dropped = self.store is not None

    def _remove(self, key: str) -> None:
        del self._entries[key]
        self._near.drop(key)

    # ---- the store ----

    def _save(self, entries: Sequence[tuple[str, _Entry]]) -> None:
        if self.store is None or not entries:
            return
        with self.store.write() as connection:
            numbers = [
                connection.execute(
                    # A replaced row gets a new number, by which others find it.
                    "INSERT OR REPLACE INTO advice (prefix, key, answer, coarse, latent) "
                    "VALUES (?, ?, ?, ?, ?)",
                    (
                        self.prefix,
                        key,
                        _to_json(entry.advice),
                        entry.coarse,
                        None if entry.latent is None else entry.latent.tobytes(),
                    ),
                ).lastrowid
                for key, entry in entries
            ]
        for (_, entry), number in zip(entries, numbers, strict=True):
            entry.seq = number

    def _stored(self, where: str, *values: Any) -> list[tuple[Any, ...]]:
        if self.store is None:
            return []
        return self.store.read(
            "SELECT seq, key, answer, coarse, latent FROM advice "
            f"WHERE prefix = ? {where} ORDER BY seq DESC LIMIT ?",
            (self.prefix, *values, self.max_entries),
        )

    def _pull(self) -> None:
        """Take in what the store has got since the last time, oldest first."""
        rows = self._stored("AND seq > ?", self._seen)
        if rows:
            self._dropped |= len(rows) == self.max_entries
            self._seen = rows[0][0]
            self._admit(rows[::-1])

    def _admit(self, rows: Sequence[tuple[Any, ...]]) -> None:
        for seq, key, answer, coarse, latent in rows:
            known = self._entries.get(key)
            if seq <= (self._outlived.get(key, 0) if known is None else known.seq):
                continue
            vector = None if latent is None else np.frombuffer(latent, dtype=np.float32)
            entry = _Entry(_from_json(answer), coarse, vector, born=self._now, seq=seq)
            self._insert(key, entry)

    # ---- progress ----

    def state_dict(self) -> dict[str, Any]:
        """Return entries, least recently used first, and counters as JSON-able types."""
        with self._lock:
            self._pull()
            return {
                "entries": [
                    [key, list(entry.advice.logits), entry.advice.confidence, self._extra(entry)]
                    for key, entry in self._entries.items()
                ],
                "hits": self.hits,
                "near_hits": self.near_hits,
                "misses": self.misses,
                "expired": self.expired,
                "now": self._now,
                "seen": self._seen,
                "outlived": dict(self._outlived),
                "prefix": self.prefix,
            }

    def _extra(self, entry: _Entry) -> dict[str, Any]:
        extra = {
            "coarse": entry.coarse,
            "latent": None if entry.latent is None else entry.latent.tolist(),
            "born": entry.born,
            "served": entry.served,
            "seq": entry.seq,
        }
        return {name: value for name, value in extra.items() if value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace entries and counters.

        With a store its answers come first, and what it lacks of the state is written
        into it. Entries of another ``prefix`` are left out.

        Args:
            state: What :meth:`state_dict` returned. Of more entries than
                ``max_entries``, the most recently used stay.

        Raises:
            StoreError: If the store cannot be read or written.
        """
        with self._lock:
            self._entries.clear()
            self._near = Neighbourhood(self.radius)
            self._seen = 0 if self.store is not None else int(state.get("seen", 0))
            self._dropped = False
            self.hits = int(state["hits"])
            self.misses = int(state["misses"])
            self.near_hits = int(state.get("near_hits", 0))
            self.expired = int(state.get("expired", 0))
            self._now = int(state.get("now", 0))
            same = state.get("prefix", "") == self.prefix
            self._outlived = dict(state.get("outlived", {})) if same else {}
            self._pull()
            self._restore(state["entries"] if same else ())

    def _restore(self, saved: Sequence[Sequence[Any]]) -> None:
        entries, unsaved = [], []
        for key, logits, confidence, *extra in saved:
            advice = Advice(logits=tuple(logits), confidence=confidence)
            entry = _Entry(advice, **(extra[0] if extra else {}))
            if entry.latent is not None:
                entry.latent = as_vector(entry.latent)
            known = self._entries.get(key)
            if known is not None and known.seq > entry.seq:
                continue  # bought anew since, by another process or before a crash
            entries.append((key, entry))
            if self.store is not None and known is None and not self._stored("AND key = ?", key):
                unsaved.append((key, entry))
        unsaved.sort(key=lambda item: item[1].seq)
        try:
            self._save(unsaved)
        finally:
            for key, entry in entries:
                self._number(entry)
                self._insert(key, entry)


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


def _to_json(advice: Advice) -> str:
    # float() for those of numpy; its repr, which JSON uses, comes back to the bit.
    return json.dumps([[float(value) for value in advice.logits], float(advice.confidence)])


def _from_json(text: str) -> Advice:
    logits, confidence = json.loads(text)
    return Advice(logits=tuple(logits), confidence=confidence)
