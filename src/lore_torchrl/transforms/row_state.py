"""What the advice transform knows of each row between steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lore_torchrl.service import Reply


class RowState:
    """Advice for the observation of each row, and how its episode stands.

    Args:
        rows: Number of rows.
        n_actions: Number of actions.
    """

    def __init__(self, rows: int, n_actions: int) -> None:
        self.logits = np.zeros((rows, n_actions), dtype=np.float32)
        self.confidence = np.zeros((rows, 1), dtype=np.float32)
        self.mask = np.zeros((rows, 1), dtype=bool)
        self.advice_id = np.zeros((rows, 1), dtype=np.int64)
        # Rows that ended and were not reset yet: what a batch steps beyond is no episode.
        self.ended = np.ones(rows, dtype=bool)
        # Resets that the call policy was not told of, since the transform was not armed.
        self.untold_resets = np.zeros(rows, dtype=bool)
        # Key of the situation that each row is in.
        self.situations: list[str | None] = [None] * rows
        # Of the step before: value of its observation and reward, for the TD error.
        self._value = np.full(rows, np.nan)
        self._reward = np.zeros(rows)

    def __len__(self) -> int:
        return len(self.mask)

    def reset(self, rows: np.ndarray) -> None:
        """Begin new episodes in the rows where ``rows`` is true."""
        self.untold_resets |= rows
        self.ended &= ~rows
        self._value[rows] = np.nan

    def step(self, done: np.ndarray) -> np.ndarray:
        """Let a step pass; return which rows made it, for the others had ended before."""
        stepped = ~self.ended
        self.ended |= done
        return stepped

    def preferred(self) -> list[int | None]:
        """Return the action that the advice of each row prefers, ``None`` without advice."""
        best = self.logits.argmax(1).tolist()
        return [a if given else None for a, given in zip(best, self.mask[:, 0], strict=True)]

    def td_errors(
        self, values: Sequence[float], reward: np.ndarray, discount: float
    ) -> list[float | None]:
        """Return the TD error of the step before, which the value acted on now completes.

        Args:
            values: Value of the observation acted on, one a row.
            reward: Reward of this step.
            discount: Weight of the later value.

        Returns:
            One error a row, ``None`` in the first step of an episode.
        """
        now = np.asarray(values, dtype=np.float64)
        errors = self._reward + discount * now - self._value
        self._value, self._reward = now, reward.astype(np.float64)
        return [float(error) if np.isfinite(error) else None for error in errors]

    def clear(self, rows: Sequence[int] | slice) -> None:
        """Forget the advice of some rows."""
        for values in self.values():
            values[rows] = 0

    def values(self) -> tuple[np.ndarray, ...]:
        """Return logits, confidence, mask and number of the question, ``[rows, ...]`` each."""
        return self.logits, self.confidence, self.mask, self.advice_id

    def put(self, row: int, reply: Reply) -> bool:
        """Note a reply; return whether the row has advice, or will have it."""
        advice_id, advice = reply
        if advice is None:
            # Other advice stands in until this comes: it must not pass for the answer.
            self.advice_id[row] = -advice_id if self.mask[row] else advice_id
            return advice_id > 0
        # A cache restored from another action set is no reason to stop the run.
        if len(advice.logits) != self.logits.shape[1]:
            return False
        self.logits[row] = advice.logits
        self.confidence[row] = advice.confidence
        self.mask[row] = True
        self.advice_id[row] = advice_id
        return True
