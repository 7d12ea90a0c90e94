"""The cache's answers in the store."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lore_torchrl.advisors.base import Advice
from lore_torchrl.service.locks import SharedLock
from lore_torchrl.service.store import AdviceStore, StoreError

# Answers that wait for a store that cannot be written; the cache has them in any case.
_MOST_UNSAVED = 1_000
_LONGEST_MESSAGE = 300

_Row = tuple[str, Advice, str | None, np.ndarray | None]


class StoredAnswer(NamedTuple):
    """One row: its number, exact key, answer, coarse key and latent ``[D]``.

    Of a row that cannot be read there is the number alone.
    """

    seq: int
    key: str = ""
    advice: Advice | None = None
    coarse: str | None = None
    latent: np.ndarray | None = None


class AnswerTable:
    """What a store keeps of the answers under one prefix.

    Rows that others have damaged are passed over. What could not be written is written with
    the next answer.

    Args:
        store: The file.
        prefix: What the answers depend on beside the situation.
    """

    def __init__(self, store: AdviceStore, prefix: str) -> None:
        self.store = store
        self.prefix = prefix
        # Number of logits that an answer must have, as far as known.
        self.n_actions: int | None = None
        # One line about each damaged row met, for who counts them.
        self.unreadable: deque[str] = deque()
        self._met: set[int] = set()
        self._unsaved: dict[str, _Row] = {}
        self._lock = SharedLock()

    def save(self, rows: Sequence[_Row]) -> list[int | None]:
        """Write keys, answers, coarse keys and latents in one transaction.

        Returns:
            Their numbers. An answer that is replaced gets a new one, by which other
            processes find it.

        Raises:
            StoreError: If the store cannot be written.
        """
        with self._lock:
            unsaved, self._unsaved = self._unsaved, {}
        new = {row[0]: row for row in rows}
        late = [row for key, row in unsaved.items() if key not in new]
        try:
            return self._write([*late, *rows])[len(late) :]
        except StoreError:
            with self._lock:
                unsaved |= new | self._unsaved
                self._unsaved = dict(list(unsaved.items())[-_MOST_UNSAVED:])
            raise

    def _write(self, rows: Sequence[_Row]) -> list[int | None]:
        with self.store.write() as connection:
            return [
                connection.execute(
                    "INSERT OR REPLACE INTO advice (prefix, key, answer, coarse, latent) "
                    "VALUES (?, ?, ?, ?, ?)",
                    (
                        self.prefix,
                        key,
                        _to_json(advice),
                        coarse,
                        None if latent is None else latent.tobytes(),
                    ),
                ).lastrowid
                for key, advice, coarse, latent in rows
            ]

    def select(self, where: str, value: Any, limit: int) -> list[StoredAnswer]:
        """Return at most ``limit`` answers for which a condition holds, latest first.

        Raises:
            StoreError: If the store cannot be read.
        """
        rows = self.store.read(
            "SELECT seq, key, answer, coarse, latent FROM advice "
            f"WHERE prefix = ? AND {where} ORDER BY seq DESC LIMIT ?",
            (self.prefix, value, limit),
        )
        return [self._read(*row) for row in rows]

    def _read(self, seq: int, key: Any, answer: Any, coarse: Any, latent: Any) -> StoredAnswer:
        try:
            advice = _from_json(_checked(answer, str, "answer"), self.n_actions)
            if coarse is not None:
                _checked(coarse, str, "coarse")
            if latent is not None:
                latent = np.frombuffer(_checked(latent, bytes, "latent"), dtype=np.float32)
                if not latent.size:
                    raise ValueError("latent is empty")
            return StoredAnswer(seq, _checked(key, str, "key"), advice, coarse, latent)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            if seq not in self._met:
                self._met.add(seq)
                message = f"{self.store.path}, row {seq} of advice, key {key!r:.80}: {error}"
                self.unreadable.append(message[:_LONGEST_MESSAGE])
            return StoredAnswer(seq)


def _checked(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {type(value).__name__}, not {kind.__name__}")
    return value


def _to_json(advice: Advice) -> str:
    # float() for those of numpy; its repr, which JSON uses, comes back to the bit.
    return json.dumps([[float(value) for value in advice.logits], float(advice.confidence)])


def _from_json(text: str, n_actions: int | None) -> Advice:
    logits, confidence = json.loads(text)
    if any(isinstance(value, bool) for value in (*logits, confidence)):
        raise TypeError("a truth value where a number was expected")
    if n_actions not in (None, len(logits)):
        raise ValueError(f"{len(logits)} logits for {n_actions} actions")
    # Adding makes a float of each number, and raises for what is none.
    return Advice(logits=tuple(value + 0.0 for value in logits), confidence=confidence + 0.0)
