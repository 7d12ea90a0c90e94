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


def is_open(advice: TensorDictBase) -> torch.Tensor:
    """Return which rows wait for the answer to a question, boolean, ``[*B]``.

    Those that have a question, and either no advice or a fallback.
    """
    asked = advice.get(keys.ADVICE_ID) > 0
    return (asked & (~advice.get(keys.MASK) | advice.get(keys.FALLBACK))).squeeze(-1)


class LateAdvice:
    """Remembers where the rows of open questions are stored, and writes their answers there.

    A row is open if :func:`is_open` holds for its entries under ``"next"``. Its answer
    replaces logits, confidence and mask there, and which actions are valid, and clears the
    fallback, unless the slot has been overwritten since, which its generation tells
    (:meth:`~torchrl.data.ReplayBuffer.update_if_present`).
    """

    def __init__(self) -> None:
        self.written = 0
        self.missed = 0
        # By question: buffer, slot in it, and the slot's generation.
        self._places: dict[int, list[tuple[int, int, int]]] = {}
        self._action_mask = False  # whether rows hold which actions are valid

    @property
    def waiting(self) -> int:
        """How many rows wait."""
        return sum(map(len, self._places.values()))

    def note(self, records: TensorDictBase, where: TensorDictBase) -> None:
        """Remember where records ``[N]`` were stored, as the buffer's ``extend`` returned it."""
        advice = records.get("next")
        rows = is_open(advice).nonzero().squeeze(-1)
        names = ("buffer_ids", "index", "index_generation")
        places = torch.stack([where.get(name)[rows] for name in names], 1)
        ids = advice.get(keys.ADVICE_ID)[rows, 0]
        for advice_id, place in zip(ids.tolist(), places.tolist(), strict=True):
            self._places.setdefault(advice_id, []).append(tuple(place))
        self._action_mask = keys.ACTION_MASK in advice

    def apply(self, replay: ReplayBufferEnsemble, answers: Answers) -> int:
        """Write the answers that have come into the rows that wait for them, and count these."""
        found = [
            (place, advice)
            for advice_id, advice in answers(list(self._places)).items()
            for place in self._places.pop(advice_id)
        ]
        late = [row for row in found if row[1] is not None]
        self.missed += len(found) - len(late)
        if not late:
            return 0
        places, advices = zip(*late, strict=True)
        buffer_ids, index, generation = torch.tensor(places).unbind(1)
        logits = torch.tensor([a.logits for a in advices], dtype=torch.float32)
        patch = {
            keys.PRIOR_LOGITS: logits,
            keys.CONFIDENCE: torch.tensor([[float(a.confidence)] for a in advices]),
            keys.MASK: torch.ones(len(index), 1, dtype=torch.bool),
            keys.FALLBACK: torch.zeros(len(index), 1, dtype=torch.bool),
        }
        if self._action_mask:
            everything = (True,) * logits.shape[1]
            patch[keys.ACTION_MASK] = torch.tensor([a.valid or everything for a in advices])
        result = replay.update_if_present(
            index=TensorDict({"buffer_ids": buffer_ids, "index": index}, [len(index)]),
            generation=generation,
            patch={("next", key): value for key, value in patch.items()},
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
            "late_rows_waiting": float(self.waiting),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the counters. What waits now is lost with the questions in flight."""
        return {"written": self.written, "missed": self.missed + self.waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters; no row waits any more."""
        self.written = int(state["written"])
        self.missed = int(state["missed"])
        self._places.clear()
