"""The cache's answers in the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lore_torchrl.advisors.base import Advice
from lore_torchrl.service.store import AdviceStore


class StoredAnswer(NamedTuple):
    """One row: its number, exact key, answer, coarse key and latent ``[D]``."""

    seq: int
    key: str
    advice: Advice
    coarse: str | None
    latent: np.ndarray | None


class AnswerTable:
    """What a store keeps of the answers under one prefix.

    Args:
        store: The file.
        prefix: What the answers depend on beside the situation.
    """

    def __init__(self, store: AdviceStore, prefix: str) -> None:
        self.store = store
        self.prefix = prefix

    def save(
        self, rows: Sequence[tuple[str, Advice, str | None, np.ndarray | None]]
    ) -> list[int | None]:
        """Write keys, answers, coarse keys and latents in one transaction.

        Returns:
            Their numbers. An answer that is replaced gets a new one, by which other
            processes find it.

        Raises:
            StoreError: If the store cannot be written.
        """
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
        return [
            StoredAnswer(
                seq,
                key,
                _from_json(answer),
                coarse,
                None if latent is None else np.frombuffer(latent, dtype=np.float32),
            )
            for seq, key, answer, coarse, latent in rows
        ]


def _to_json(advice: Advice) -> str:
    # float() for those of numpy; its repr, which JSON uses, comes back to the bit.
    return json.dumps([[float(value) for value in advice.logits], float(advice.confidence)])


def _from_json(text: str) -> Advice:
    logits, confidence = json.loads(text)
    return Advice(logits=tuple(logits), confidence=confidence)
