"""Writes answers that came late into the replay rows that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import ReplayBufferEnsemble

from lore_torchrl import keys
from lore_torchrl.advisors.base import Advice

#: Returns the answers to those questions that are no longer in flight, ``None`` for a lost one,
#: as :meth:`~lore_torchrl.service.AdviceService.answers` does.
Answers = Callable[[Iterable[int]], Mapping[int, Advice | None]]

# Where a row was written: buffer, slot in it, and the slot's generation.
_Place = tuple[int, int, int]


def is_open(advice: TensorDictBase) -> torch.Tensor:
    """Return which rows wait for the answer to a question, boolean, ``[*B]``.

    Those that have a question, and either no advice or a fallback.

    Args:
        advice: Holds ``llm_advice_id``, ``llm_mask`` and ``llm_fallback``, ``[*B, 1]`` each.

    Examples:
        >>> advice = TensorDict({
        ...     "llm_advice_id": torch.tensor([[0], [7], [7], [7]]),
        ...     "llm_mask": torch.tensor([[False], [False], [True], [True]]),
        ...     "llm_fallback": torch.tensor([[False], [False], [False], [True]]),
        ... }, [4])
        >>> is_open(advice)
        tensor([False,  True, False,  True])
    """
    asked = advice.get(keys.ADVICE_ID) > 0
    return (asked & (~advice.get(keys.MASK) | advice.get(keys.FALLBACK))).squeeze(-1)


class LateAdvice:
    """Remembers where the rows of open questions are stored, and writes their answers there.

    A row is open if :func:`is_open` holds for its entries under ``"next"``. Its answer
    replaces logits, confidence and mask there and clears the fallback, unless the slot has
    been overwritten since, which its generation tells
    (:meth:`~torchrl.data.ReplayBuffer.update_if_present`).

    Args:
        max_rows: Rows that wait, at least 1; the rows of the oldest questions are given up
            first. Default: ``100_000``.

    Raises:
        ValueError: If ``max_rows`` is below 1.

    Examples:
        >>> from torchrl.data import (
        ...     LazyTensorStorage, ReplayBufferEnsemble, TensorDictReplayBuffer,
        ...     TensorDictRoundRobinWriter,
        ... )
        >>> member = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(4),
        ...     writer=TensorDictRoundRobinWriter(track_generations=True),
        ... )
        >>> replay = ReplayBufferEnsemble(member, routing_key="env_index")
        >>> advice = {
        ...     "llm_prior_logits": torch.zeros(2, 3), "llm_confidence": torch.zeros(2, 1),
        ...     "llm_mask": torch.zeros(2, 1, dtype=torch.bool),
        ...     "llm_fallback": torch.zeros(2, 1, dtype=torch.bool),
        ...     "llm_advice_id": torch.tensor([[0], [7]]),
        ... }
        >>> env_index = torch.zeros(2, dtype=torch.long)
        >>> rows = TensorDict({"env_index": env_index, "next": advice}, [2])
        >>> late = LateAdvice()
        >>> late.note(rows, replay.extend(rows))
        >>> late.apply(replay, lambda ids: {7: Advice(logits=(0.0, 0.0, 3.0))})
        1
        >>> member[:]["next", "llm_prior_logits"]
        tensor([[0., 0., 0.],
                [0., 0., 3.]])
    """

    def __init__(self, *, max_rows: int = 100_000) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}.")
        self.max_rows = max_rows
        self.written = 0
        self.missed = 0
        self._places: dict[int, list[_Place]] = {}  # by question, oldest first
        self._rows = 0

    def __len__(self) -> int:
        """Return how many rows wait."""
        return self._rows

    def note(self, records: TensorDictBase, where: TensorDictBase) -> None:
        """Remember where records were stored.

        Args:
            records: What was stored, ``[N]``.
            where: What the buffer's ``extend`` returned: ``buffer_ids``, ``index`` and
                ``index_generation``, each ``[N]``.
        """
        advice = records.get("next")
        rows = is_open(advice).nonzero().squeeze(-1)
        names = ("buffer_ids", "index", "index_generation")
        places = torch.stack([where.get(name)[rows] for name in names], 1)
        ids = advice.get(keys.ADVICE_ID)[rows, 0]
        for advice_id, place in zip(ids.tolist(), places.tolist(), strict=True):
            self._places.setdefault(advice_id, []).append(tuple(place))
        self._rows += rows.numel()
        while self._rows > self.max_rows:
            given_up = len(self._places.pop(next(iter(self._places))))
            self._rows -= given_up
            self.missed += given_up

    def apply(self, replay: ReplayBufferEnsemble, answers: Answers) -> int:
        """Write the answers that have come into the rows that wait for them.

        Args:
            replay: The buffer that the places belong to.
            answers: Where to look the answers up, such as
                :meth:`~lore_torchrl.service.AdviceService.answers`.

        Returns:
            Rows written.
        """
        ids: list[int] = []
        places: list[_Place] = []
        advices: list[Advice] = []
        for advice_id, advice in answers(list(self._places)).items():
            waiting = self._places.pop(advice_id)
            self._rows -= len(waiting)
            if advice is None:
                self.missed += len(waiting)
            else:
                ids += [advice_id] * len(waiting)
                places += waiting
                advices += [advice] * len(waiting)
        if not places:
            return 0
        buffer_ids, index, generation = torch.tensor(places).unbind(1)
        result = replay.update_if_present(
            index=TensorDict({"buffer_ids": buffer_ids, "index": index}, [len(index)]),
            generation=generation,
            patch={
                ("next", keys.PRIOR_LOGITS): torch.tensor(
                    [a.logits for a in advices], dtype=torch.float32
                ),
                ("next", keys.CONFIDENCE): torch.tensor([[float(a.confidence)] for a in advices]),
                ("next", keys.MASK): torch.ones(len(index), 1, dtype=torch.bool),
                ("next", keys.ADVICE_ID): torch.tensor(ids).unsqueeze(-1),
                ("next", keys.FALLBACK): torch.zeros(len(index), 1, dtype=torch.bool),
            },
        )
        written = int(result.updated.sum())
        self.written += written
        self.missed += len(places) - written
        return written

    def stats(self) -> dict[str, float]:
        """Return ``late_rows`` written, ``late_rows_missed`` and ``late_rows_waiting``."""
        return {
            "late_rows": float(self.written),
            "late_rows_missed": float(self.missed),
            "late_rows_waiting": float(self._rows),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the counters. What waits now is lost with the questions in flight."""
        return {"written": self.written, "missed": self.missed + self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters; no row waits any more."""
        self.written = int(state["written"])
        self.missed = int(state["missed"])
        self._places.clear()
        self._rows = 0
