"""Advice that has been bought once and is free from then on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torchrl import logger as torchrl_logger

from lore_torchrl.advisors.base import Advice
from lore_torchrl.service.answer_table import AnswerTable, StoredAnswer
from lore_torchrl.service.locks import SharedLock
from lore_torchrl.service.neighbours import Neighbourhood, as_vector
from lore_torchrl.service.store import AdviceStore, StoreBusyError, patience
from lore_torchrl.service.votes import Ballots, average

_COUNTERS = ("hits", "near_hits", "misses", "expired", "refuted")


@dataclass(slots=True)
class _Entry:
    advice: Advice
    coarse: str | None = None
    latent: np.ndarray | None = None
    born: int = 0  # the cache's clock when it came
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
    it worth another, also in a situation that has been asked about, once it has been
    visited often enough since the last: see :class:`~lore_torchrl.service.votes.Ballots`.

    What :meth:`refute` has ruled out in a situation does not serve there any more.

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
        radius: Largest Euclidean distance at which a latent's advice serves another;
            ``None`` for no search by latents. Latents of different world models cannot
            be compared: keep their caches apart by ``prefix``. Default: ``None``.
        votes: Answers that a coarse key should have; ``None`` for the latest alone.
            Default: ``None``.
        vote_visits: Visits to a class before its second answer, doubled for each further
            one; at least 1. Default: ``8``.
        prefix: What the answers depend on beside the situation, such as the hash of
            the advisor's prompt. Caches of other prefixes in the same store are not
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
        radius: float | None = None,
        votes: int | None = None,
        vote_visits: int = 8,
        prefix: str = "",
    ) -> None:
        if max_entries < 1:
            raise ValueError(f"AdviceCache needs at least one entry, got {max_entries=}.")
        for name, value in (("ttl_steps", ttl_steps), ("votes", votes)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}. Use None for no end.")
        self.max_entries = max_entries
        self.store = store
        self.ttl_steps = ttl_steps
        self.radius = radius
        self.votes = votes
        self.prefix = prefix
        self._table = None if store is None else AnswerTable(store, prefix)
        self.hits = 0
        self.near_hits = 0
        self.misses = 0
        self.expired = 0
        self.refuted = 0
        self._ballots = Ballots(vote_visits)
        self._now = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._near = Neighbourhood(radius)
        self._seen = 0  # the last number given; with a store, the last one known of it
        self._dropped = False  # the store holds what the memory does not
        self._outlived: dict[str, int] = {}  # expired here, though the store has it
        self._lock = SharedLock()

    def __len__(self) -> int:
        with self._lock:
            self.pull()
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
            if self.votes is not None and coarse is not None:
                self._ballots.visit(coarse)
            if key in (found, found.rpartition("#")[0]):
                self.hits += 1
            else:
                self.near_hits += 1
            advice = self._voted(found, key, coarse)
            self._entries.move_to_end(found)
            return advice

    def peek(
        self, key: str, coarse: str | None = None, latent: ArrayLike | None = None
    ) -> Advice | None:
        """Return what :meth:`get` would; neither counters, order nor uses change."""
        with self._lock:
            found, _ = self._find(key, coarse, latent)
            return None if found is None else self._voted(found, key, coarse)

    def wants(self, key: str, coarse: str | None = None, *, known: bool = False) -> bool:
        """Return whether a question about a situation is worth its price.

        Without advice it is, unless the advisor has answered with a refuted action
        twice; with advice where its class is due for another vote.

        Args:
            key: Exact key.
            coarse: Coarse key; without one there is no class. Default: none.

        Keyword Args:
            known: Whether :meth:`get` has found advice. Default: ``False``.
        """
        with self._lock:
            if self._ballots.closed(key):
                return False
            if not known or self.votes is None or coarse is None:
                return not known
            answers = len(self._voters(key, coarse))
            return 0 < answers < self.votes and self._ballots.due(coarse, answers)

    def refute(self, key: str, action: int) -> None:
        """Take note that ``action`` left a situation as it was, and gained nothing.

        Answers that prefer it do not serve this situation any more, which makes it worth
        another question. In other situations of its class they still do.

        Args:
            key: Exact key.
            action: Index of the action.
        """
        with self._lock:
            self.refuted += self._ballots.refute(key, action)

    def _voters(self, key: str, coarse: str) -> list[Advice]:
        """Return the answers of a class that serve a situation, latest first."""
        return [
            self._entries[found].advice
            for found in self._near.find(coarse=coarse)
            if self._serves(found, key)
        ]

    def _voted(self, found: str, key: str, coarse: str | None) -> Advice:
        """Return the advice found or, with ``votes``, the average of its class."""
        own = self._entries[found]
        if self.votes is None or coarse is None or own.coarse != coarse:
            return own.advice
        return average(self._voters(key, coarse) or [own.advice])

    def _find(
        self, key: str, coarse: str | None, latent: ArrayLike | None
    ) -> tuple[str | None, list[str]]:
        """Return the key that serves, and the expired ones passed over on the way to it."""
        if not self._alive(key):
            # What waits behind another process's lock comes at a later miss.
            with suppress(StoreBusyError), patience(0.0):
                self.pull()
                if self._dropped and not self._alive(key):
                    self._admit(self._stored("key = ?", key))
        dead = []
        for found in self._candidates(key, coarse, latent):
            if self._serves(found, key):
                return found, dead
            if not self._alive(found):
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
        return self.ttl_steps is None or self._now - entry.born < self.ttl_steps

    def _serves(self, found: str, key: str) -> bool:
        """Whether an entry is alive, and not refuted in the situation that is looked up."""
        return self._alive(found) and not self._ballots.bars(key, self._entries[found].advice)

    def _slot(self, key: str) -> str:
        """Return where a further answer about the same situation is kept."""
        slot, number = key, 1
        while self.votes is not None and self._alive(slot):
            number += 1
            slot = f"{key}#{number}"
        return slot

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

        With ``votes`` it is one more of its class, beside an earlier one for ``key``;
        without, it replaces that one. One that prefers a refuted action is forgotten.

        Args:
            key: Exact key.
            advice: The answer. Its ``raw`` text and its ``usage`` are not kept.
            coarse: Coarse key under which neighbours may find it. Default: none.
            latent: Latent ``[D]`` near which neighbours may find it. Default: none.

        Raises:
            StoreError: If the store cannot be written. The answer is in memory
                nevertheless, and is served from there.
            ValueError: If ``latent`` is not a vector.
        """
        # A raw answer may have megabytes, and the cache lives as long as the run.
        advice = Advice(advice.logits, advice.confidence)
        entry = _Entry(advice, coarse, None if latent is None else as_vector(latent))
        with self._lock:
            if not self._ballots.answered(key, coarse, advice):
                return
            slot = self._slot(key) if coarse is not None else key
        try:
            # Outside the lock: look-ups of the environments go on meanwhile.
            self._save([(slot, entry)])
        finally:
            with self._lock:
                entry.born = self._now
                self._number(entry)
                self._insert(slot, entry)

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

    def expect(self, n_actions: int) -> None:
        """Take answers with ``n_actions`` logits alone from the store."""
        if self._table is not None:
            self._table.n_actions = n_actions

    def take_unreadable(self) -> list[str]:
        """Return one line about each row of the store that could not be read, once."""
        lines = [] if self._table is None else self._table.unreadable
        return [lines.popleft() for _ in range(len(lines))]

    def _save(self, entries: Sequence[tuple[str, _Entry]]) -> None:
        if self._table is None or not entries:
            return
        rows = [(key, entry.advice, entry.coarse, entry.latent) for key, entry in entries]
        for (_, entry), number in zip(entries, self._table.save(rows), strict=True):
            entry.seq = number

    def _stored(self, where: str, value: Any) -> list[StoredAnswer]:
        return [] if self._table is None else self._table.select(where, value, self.max_entries)

    def pull(self) -> None:
        """Take in what the store has got since the last time; raises :class:`StoreError`."""
        with self._lock:
            rows = self._stored("seq > ?", self._seen)
            if rows:
                self._dropped |= len(rows) == self.max_entries
                self._seen = rows[0].seq
                self._admit(rows[::-1])

    def _admit(self, rows: Sequence[StoredAnswer]) -> None:
        for seq, key, advice, coarse, latent in rows:
            if advice is None:
                continue
            known = self._entries.get(key)
            if seq > (self._outlived.get(key, 0) if known is None else known.seq):
                self._insert(key, _Entry(advice, coarse, latent, born=self._now, seq=seq))

    # ---- progress ----

    def state_dict(self) -> dict[str, Any]:
        """Return entries in memory, least recently used first, and counters, for JSON."""
        with self._lock:
            return {
                "entries": [
                    [key, list(entry.advice.logits), entry.advice.confidence, self._extra(entry)]
                    for key, entry in self._entries.items()
                ],
                **{name: getattr(self, name) for name in _COUNTERS},
                "now": self._now,
                "seen": self._seen,
                "outlived": dict(self._outlived),
                "ballots": self._ballots.state_dict(),
                "prefix": self.prefix,
            }

    def _extra(self, entry: _Entry) -> dict[str, Any]:
        extra = {
            "coarse": entry.coarse,
            "latent": None if entry.latent is None else entry.latent.tolist(),
            "born": entry.born,
            "seq": entry.seq,
        }
        return {name: value for name, value in extra.items() if value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace entries and counters.

        With a store its answers come first, and what it lacks of the state is written
        into it. Entries of another ``prefix`` are left out, with a warning.

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
            for name in _COUNTERS:
                setattr(self, name, int(state.get(name, 0)))
            self._now = int(state.get("now", 0))
            if state.get("prefix", "") != self.prefix:
                if state["entries"]:
                    torchrl_logger.warning(
                        f"Cached answers left out: {len(state['entries']):,}. They are under "
                        f"{state.get('prefix', '')!r}, this advisor's are under {self.prefix!r}."
                    )
                state = {"entries": ()}
            self._outlived = dict(state.get("outlived", {}))
            self._ballots.load_state_dict(state.get("ballots", {}))
            self.pull()
            self._restore(state["entries"])

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
            # A row that cannot be read is as good as none.
            stored = known is not None or any(r.advice for r in self._stored("key = ?", key))
            if self.store is not None and not stored:
                unsaved.append((key, entry))
        unsaved.sort(key=lambda item: item[1].seq)
        try:
            self._save(unsaved)
        finally:
            for key, entry in entries:
                self._number(entry)
                self._insert(key, entry)
