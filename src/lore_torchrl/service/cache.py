"""The cache: answers that were bought once and are free from then on."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from sqlite3 import Connection
from typing import Any

import numpy as np
from torchrl import logger as torchrl_logger

from lore_torchrl.advisors.base import Advice, read_extras
from lore_torchrl.configs.lore import CallsConfig
from lore_torchrl.service.store import (
    AdviceStore,
    SharedLock,
    StoreBusyError,
    StoreError,
    patience,
)

_COUNTERS = ("hits", "shared_hits", "misses", "noops_filtered")
_MAX_MESSAGE = 300
# Before the number of a further answer to one situation: not printable, as no key needs it.
_SLOT = "\x1f"
_INSERT = """
    INSERT OR REPLACE INTO advice (prefix, key, answer, abstract_state) VALUES (?, ?, ?, ?)
"""


@dataclass(slots=True)
class _Entry:
    advice: Advice
    abstract: str | None = None
    born: int = 0  # the cache's clock when it came
    seq: int = 0  # number in the store, or without one in this cache: higher is later

    def answer(self) -> list[Any]:
        """Return the advice for JSON."""
        # float() for those of numpy; its repr, which JSON uses, comes back bitwise.
        logits = [float(value) for value in self.advice.logits]
        return [logits, float(self.advice.confidence), self.advice.extras()]


class AdviceCache:
    r"""Cache from the key of a situation to its advice; drops the least recently used.

    The exact key is looked up first, then the latest answer of the same abstract state.

    **Answer averaging.** With ``answers_averaged`` :math:`V` the confidence-weighted average
    of an abstract state's answers :math:`(\ell_j, c_j)` serves all its situations:
    :math:`\log \sum_j c_j\,\mathrm{softmax}(\ell_j)`, with the mean confidence. A state with
    :math:`n < V` answers :meth:`wants` another one after ``averaging_visits`` :math:`\cdot 2^{n-1}`
    visits since the last.

    **No-op filter.** After :meth:`filter_no_op` answers that prefer the action do not serve that
    situation any more. An advisor that repeats such an answer is not asked about it again; the
    answer still goes to the row that asked, for this one step.

    With a ``store`` an answer is on disk when :meth:`put` returns. Answers that are only in
    the store, from an earlier process or another one, are loaded at the first miss; those that
    ``max_entries`` has pushed out, where exactly their situation comes back. The clock, the
    order of use and the counters are in :meth:`state_dict` alone. A look-up never waits for
    another thread's writing.

    Args:
        max_entries: Answers in memory, at least 1. Default: ``100_000``.
        store: Where answers are kept; ``None`` for memory only. Default: ``None``.
        ttl_steps: Environment steps (see :meth:`advance`) after which an answer expires;
            ``None`` for never. Default: ``None``.
        answers_averaged: Answers averaged in an abstract state, at least 1; ``None`` for the
            latest alone. Default: ``5``.
        averaging_visits: Visits to an abstract state before its second answer, doubled for each
            further one, at least 1. Default: ``8``.
        prefix: What the answers depend on beside the situation, such as the hash of the
            prompt. Answers under other prefixes of the same store are not seen. Default: empty.

    Raises:
        ValueError: If a number is out of its range.
    """

    def __init__(
        self,
        max_entries: int = 100_000,
        *,
        store: AdviceStore | None = None,
        ttl_steps: int | None = None,
        answers_averaged: int | None = 5,
        averaging_visits: int = 8,
        prefix: str = "",
    ) -> None:
        CallsConfig(
            cache_size=max_entries,
            ttl_steps=ttl_steps,
            answers_averaged=answers_averaged,
            averaging_visits=averaging_visits,
        )
        self.max_entries = max_entries
        self.store = store
        self.ttl_steps = ttl_steps
        self.answers_averaged = answers_averaged
        self.averaging_visits = averaging_visits
        self.prefix = prefix
        self.hits = self.shared_hits = self.misses = self.noops_filtered = 0
        self._n_actions: int | None = None
        self._now = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._states: dict[str, dict[str, _Entry]] = {}  # entries by abstract state
        # Oldest first, each no longer than the entries: visits to an abstract state since its
        # last answer; by exact key, actions known to be no-ops, and what deserves no call, since
        # filtered answers came again or none can come.
        self._visits: dict[str, int] = {}
        self._no_ops: dict[str, set[int]] = {}
        self._closed: dict[str, None] = {}
        self._seen = 0  # the last number given; with a store, the last one known of it
        self._dropped = False  # the store holds what the memory does not
        # By number, a line about each damaged row of the store, until it is taken.
        self._unreadable: dict[int, str | None] = {}
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

    def expect(self, n_actions: int) -> None:
        """Serve answers with ``n_actions`` logits alone."""
        self._n_actions = n_actions

    # ---- look-ups ----

    def get(self, key: str, abstract_state: str | None = None) -> Advice | None:
        """Return the advice for a situation or ``None``, and count the hit or miss.

        A store that cannot be read raises a :class:`StoreError`, unless memory has an answer.
        """
        with self._lock:
            found = self._find(key, abstract_state)
            if found is None:
                self.misses += 1
                return None
            if self.answers_averaged is not None and abstract_state is not None:
                self._visits[abstract_state] = self._visits.get(abstract_state, 0) + 1
                self._trim(self._visits)
            if self._is_own(found, key):
                self.hits += 1
            else:
                self.shared_hits += 1
            advice = self._advice(found, key, abstract_state)
            self._entries.move_to_end(found)
            return advice

    def peek(self, key: str, abstract_state: str | None = None) -> Advice | None:
        """Return what :meth:`get` would; counters, visits and order of use do not change."""
        with self._lock:
            found = self._find(key, abstract_state)
            return None if found is None else self._advice(found, key, abstract_state)

    def has_own(self, key: str, abstract_state: str | None = None) -> bool:
        """Return whether an answer to exactly this situation serves."""
        with self._lock:
            return self._serves(key, key) or any(
                self._is_own(found, key) for found in self._serving(key, abstract_state)
            )

    def wants(self, key: str, abstract_state: str | None = None, *, known: bool = False) -> bool:
        """Return whether a situation deserves a call; ``known`` if :meth:`get` has found advice.

        It does without advice, unless the no-op filter has closed it, and with advice where
        its abstract state is due for another answer.
        """
        with self._lock:
            if key in self._closed:
                return False
            if not known or self.answers_averaged is None or abstract_state is None:
                return not known
            answers = len(self._serving(key, abstract_state))
            visits = self._visits.get(abstract_state, 0)
            return 0 < answers < self.answers_averaged and visits >= self.averaging_visits * 2 ** (
                answers - 1
            )

    def close(self, key: str) -> None:
        """Let exactly this situation deserve no call any more: the advisor cannot answer."""
        with self._lock:
            self._closed[key] = None
            self._trim(self._closed)

    def filter_no_op(self, key: str, action: int) -> None:
        """Record that ``action`` was a no-op: it left the situation as it was, without reward.

        Answers that prefer it do not serve this situation any more. They still serve the
        other situations of its abstract state.
        """
        with self._lock:
            actions = self._no_ops.setdefault(key, set())
            self.noops_filtered += action not in actions
            actions.add(action)
            self._trim(self._no_ops)

    def _trim(self, kept: dict[str, Any]) -> None:
        if len(kept) > self.max_entries:
            del kept[next(iter(kept))]

    def _serving(self, key: str, abstract_state: str | None) -> list[str]:
        """Return the exact keys of an abstract state that serve a situation, latest first."""
        entries = self._states.get(abstract_state, {})
        found = sorted(entries, key=lambda other: entries[other].seq, reverse=True)
        return [other for other in found if self._serves(other, key)]

    def _advice(self, found: str, key: str, abstract_state: str | None) -> Advice:
        """Return what the entry found says of a situation, averaged within its abstract state."""
        entry = self._entries[found]
        advice = entry.advice
        if None not in (self.answers_averaged, abstract_state) and entry.abstract == abstract_state:
            serving = self._serving(key, abstract_state)
            answers = [self._entries[other].advice for other in serving]
            extras = read_extras(advice.extras())
            spoken = [answer.valid for answer in answers if answer.valid]
            if spoken and not (advice.valid and self._is_own(found, key)):
                # Invalid is what every answer that speaks of it calls so; a plan's step does not.
                extras["valid"] = tuple(map(any, zip(*spoken, strict=False)))
            advice = replace(average(answers), **extras)
            if self.is_no_op(key, advice):
                # Each prefers another action, their mean a known no-op: that comes last.
                known, least = self._no_ops[key], min(advice.logits) - 1.0
                logits = [least if a in known else x for a, x in enumerate(advice.logits)]
                advice = replace(advice, logits=tuple(logits))
        # The steps of a plan are those of one situation.
        return advice if self._is_own(found, key) else replace(advice, plan=())

    @staticmethod
    def _is_own(found: str, key: str) -> bool:
        """Whether an entry is one of the answers to exactly this situation."""
        return key in (found, found.rpartition(_SLOT)[0])

    def _find(self, key: str, abstract_state: str | None) -> str | None:
        """Return the key of the entry that serves, if any."""
        fault = None
        if not self._is_live(key):
            try:
                with patience(0.0):
                    self.pull()
                    if self._dropped and not self._is_live(key):
                        self._load("key = ?", key)
            except StoreBusyError:
                pass  # what waits behind another process's lock comes at a later miss
            except StoreError as error:
                fault = error
        if self._serves(key, key):
            return key
        found = next(iter(self._serving(key, abstract_state)), None)
        if found is None and fault is not None:
            raise fault
        return found

    def _serves(self, found: str, key: str) -> bool:
        """Whether there is an entry that fits the actions and the no-op filter of ``key``."""
        if not self._is_live(found):
            return False
        advice = self._entries[found].advice
        fits = self._n_actions in (None, len(advice.logits))
        return fits and not self.is_no_op(key, advice)

    def _is_live(self, key: str) -> bool:
        """Whether there is an entry that has not expired."""
        entry = self._entries.get(key)
        if entry is None or self.ttl_steps is None:
            return entry is not None
        return self._now < entry.born + self.ttl_steps

    def is_no_op(self, key: str, advice: Advice) -> bool:
        """Return whether an answer prefers an action that is known to be a no-op."""
        # Its preferred action is the first among equals.
        return advice.logits.index(max(advice.logits)) in self._no_ops.get(key, ())

    # ---- entries ----

    def put(self, key: str, advice: Advice, *, abstract_state: str | None = None) -> None:
        """Remember ``advice`` for ``key`` as the most recently used entry.

        With ``answers_averaged`` it is kept beside an earlier answer for ``key``, without it
        replaces that one. The no-op filter drops an answer that prefers a filtered action.
        It serves the ``abstract_state`` too. Raises a :class:`StoreError` if the store cannot be
        written; it is in memory all the same.
        """
        # The cache lives as long as the run.
        entry = _Entry(advice.slim(), abstract_state)
        with self._lock:
            if abstract_state is not None:
                self._visits[abstract_state] = 0
            if self.is_no_op(key, advice):
                self.close(key)
                return
            beside = bool(self.answers_averaged) and abstract_state is not None
            slots = chain((key,), (f"{key}{_SLOT}{number}" for number in count(2)))
            slot = next(slot for slot in slots if not (beside and self._is_live(slot)))
        try:
            # Outside the lock: look-ups of the environments go on meanwhile.
            if self.store is not None:
                with self.store.write() as connection:
                    # Another process may have stored an answer there since.
                    while beside and self._is_taken(slot, connection):
                        slot = next(slots)
                    number = self._write(connection, slot, entry)
                entry.seq = number  # once it is there for others too
        finally:
            with self._lock:
                entry.born = self._now
                self._insert(slot, entry)

    def _insert(self, key: str, entry: _Entry) -> None:
        if not entry.seq:
            # Where the store could not be written, its later answers must still be seen.
            self._seen += self.store is None
            entry.seq = self._seen
        self._remove(key)
        self._entries[key] = entry
        if entry.abstract is not None:
            self._states.setdefault(entry.abstract, {})[key] = entry
        if len(self._entries) > self.max_entries:
            self._remove(next(iter(self._entries)))
            self._dropped = self.store is not None

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None and entry.abstract is not None:
            state = self._states[entry.abstract]
            del state[key]
            if not state:
                del self._states[entry.abstract]

    # ---- the store ----

    def take_unreadable(self) -> list[str]:
        """Return one line about each row of the store that could not be read, once."""
        with self._lock:
            lines = [line for line in self._unreadable.values() if line is not None]
            self._unreadable = dict.fromkeys(self._unreadable)
            return lines

    def _is_taken(self, key: str, connection: Connection) -> bool:
        """Whether the store has an answer, that can be read, where memory has none."""
        if key in self._entries:
            return False
        where = "SELECT seq FROM advice WHERE prefix = ? AND key = ?"
        row = connection.execute(where, (self.prefix, key)).fetchone()
        return row is not None and row[0] not in self._unreadable

    def _write(self, connection: Connection, key: str, entry: _Entry) -> int:
        """Write an entry and return its number, a new one also where it replaces another.

        By it other processes find the entry.
        """
        row = self.prefix, key, json.dumps(entry.answer()), entry.abstract
        return connection.execute(_INSERT, row).lastrowid

    def pull(self) -> None:
        """Load what the store has got since the last time; raises :class:`StoreError`."""
        with self._lock:
            if numbers := self._load("seq > ?", self._seen):
                self._dropped |= len(numbers) == self.max_entries
                self._seen = numbers[-1]

    def _load(self, where: str, value: Any) -> list[int]:
        """Load the rows for which a condition holds, and return their numbers, latest last."""
        if self.store is None:
            return []
        rows = self.store.read(
            "SELECT seq, key, answer, abstract_state FROM advice "
            f"WHERE prefix = ? AND {where} ORDER BY seq DESC LIMIT ?",
            (self.prefix, value, self.max_entries),
        )[::-1]
        for seq, key, answer, state in rows:
            try:
                texts = (key, answer) if state is None else (key, answer, state)
                if not all(isinstance(text, str) for text in texts):
                    raise TypeError("a text is missing")
                entry = _Entry(_from_json(answer, self._n_actions), state, self._now, seq)
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                message = f"{self.store.path}, row {seq} of advice, key {key!r:.80}: {error}"
                self._unreadable.setdefault(seq, message[:_MAX_MESSAGE])
                continue
            known = self._entries.get(key)
            if known is None or seq > known.seq:
                self._insert(key, entry)
        return [row[0] for row in rows]

    # ---- progress ----

    def state_dict(self) -> dict[str, Any]:
        """Return the entries in memory, least recently used first, and the counters, for JSON."""
        with self._lock:
            return {
                "entries": [
                    [key, *entry.answer(), entry.abstract, entry.born, entry.seq]
                    for key, entry in self._entries.items()
                ],
                **{name: getattr(self, name) for name in _COUNTERS},
                "now": self._now,
                "seen": self._seen,
                "visits": dict(self._visits),
                "no_ops": {key: sorted(actions) for key, actions in self._no_ops.items()},
                "closed": list(self._closed),
                "prefix": self.prefix,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace entries and counters.

        With a store its answers come first, and what it lacks of the state is written to it.
        Entries of another ``prefix`` are left out, with a warning. Of more entries than
        ``max_entries`` the most recently used stay. Raises a :class:`StoreError` if the store
        cannot be read or written.
        """
        with self._lock:
            self._entries.clear()
            self._states.clear()
            self._seen = 0 if self.store is not None else state["seen"]
            self._dropped = False
            for name in _COUNTERS:
                setattr(self, name, state[name])
            self._now = state["now"]
            if state["prefix"] != self.prefix:
                if state["entries"]:
                    torchrl_logger.warning(
                        f"Cached answers left out: {len(state['entries']):,}. They are under "
                        f"{state['prefix']!r}, this advisor's are under {self.prefix!r}."
                    )
                state = {"entries": (), "visits": {}, "no_ops": {}, "closed": ()}
            self._visits = dict(state["visits"])
            self._no_ops = {key: set(actions) for key, actions in state["no_ops"].items()}
            self._closed = dict.fromkeys(state["closed"])
            self.pull()
            self._restore(state["entries"])

    def _restore(self, saved: Sequence[Sequence[Any]]) -> None:
        entries = {}
        for key, logits, confidence, extras, *rest in saved:
            entry = _Entry(Advice(tuple(logits), confidence, **read_extras(extras)), *rest)
            known = self._entries.get(key)
            # Unless it was bought again since, by another process or before a crash.
            if known is None or known.seq <= entry.seq:
                entries[key] = entry
        lacking = [key for key in entries if key not in self._entries]
        lacking.sort(key=lambda key: entries[key].seq)
        try:
            if self.store is not None and lacking:
                with self.store.write() as connection:
                    numbers = [self._write(connection, key, entries[key]) for key in lacking]
                for key, number in zip(lacking, numbers, strict=True):
                    entries[key].seq = number
        finally:
            for key, entry in entries.items():
                self._insert(key, entry)


def average(advices: Sequence[Advice]) -> Advice:
    r"""Return the confidence-weighted mean of some answers' distributions, as one answer.

    :math:`\log \sum_j c_j\,\mathrm{softmax}(\ell_j) / \sum_j c_j`, with the mean confidence;
    all :math:`c_j = 0` count alike. Plans, subgoals and valid actions have no mean: of several
    answers there are none. A single answer comes back as it is.
    """
    if len(advices) == 1:
        return advices[0]
    logits = np.array([advice.logits for advice in advices], dtype=np.float64)
    confidence = np.array([advice.confidence for advice in advices])
    weights = confidence if confidence.any() else np.ones_like(confidence)
    probs = np.exp(logits - logits.max(1, keepdims=True))
    mean = weights @ (probs / probs.sum(1, keepdims=True)) / weights.sum()
    # The smallest probability that a float32 keeps apart from zero.
    logs = np.log(np.maximum(mean, 1e-38))
    return Advice(tuple(logs.tolist()), float(confidence.mean()))


def _from_json(text: str, n_actions: int | None) -> Advice:
    logits, confidence, *extras = json.loads(text)
    if not all(type(value) in (int, float) for value in (*logits, confidence)):
        raise TypeError("something else where a number was expected")
    if n_actions not in (None, len(logits)):
        raise ValueError(f"{len(logits)} logits for {n_actions} actions")
    return Advice(tuple(map(float, logits)), float(confidence), **read_extras(*extras or ({},)))
