"""Brings answers that came late to the replay rows that they belong to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torchrl.data import ReplayBufferEnsemble

from lore_torchrl import keys
from lore_torchrl.advisors.base import Advice

# Questions whose rows, and answers whose rows, are waited for at most.
_MAX_OPEN = 1_024

# Where a row was written: buffer, slot in it, and the slot's generation.
_Place = tuple[int, int, int]


def is_open(advice_id: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return which rows wait for the answer to a question, boolean, ``[*B]``.

    Those that have a question and no advice, and those whose question is negative: other
    advice stands in until their own comes.

    Args:
        advice_id: Number of each row's question, 0 for none, int64 ``[*B]``.
        mask: Whether each row has advice, boolean ``[*B]``.

    Examples:
        >>> mask = torch.tensor([False, False, True, True])
        >>> is_open(torch.tensor([0, 7, 7, -7]), mask)
        tensor([False,  True, False,  True])
    """
    return (advice_id < 0) | ((advice_id > 0) & ~mask)


class OpenQuestions:
    """Keeps what is told of the row that asked each question until its answer comes.

    Rows that share a question are told of once, by the first. Questions are numbered in
    the order in which they are asked, so a number not above those of earlier batches is no
    new one. An answer may come before its row.

    Examples:
        >>> from tensordict import TensorDict
        >>> ids = torch.tensor([[[0], [7], [7]]])
        >>> batch = TensorDict({"llm_advice_id": ids, "llm_mask": torch.zeros_like(ids).bool()})
        >>> questions = OpenQuestions()
        >>> questions.note(batch, lambda advice_id, env, time: f"{advice_id} at {time}")
        >>> questions.take([(7, Advice(logits=(0.0, 3.0)))])
        [('7 at 1', Advice(logits=(0.0, 3.0), confidence=1.0))]
    """

    def __init__(self) -> None:
        self._last = 0
        self._waiting: OrderedDict[int, Any] = OrderedDict()
        self._answers: OrderedDict[int, Advice | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def note(self, batch: TensorDictBase, tell: Callable[[int, int, int], Any]) -> None:
        """Take note of the rows that have asked.

        Args:
            batch: Collector batch ``[E, T]``.
            tell: From a question's number, environment and time to what is to be kept.
        """
        ids, mask = (batch.get(key).squeeze(-1).cpu() for key in (keys.ADVICE_ID, keys.MASK))
        new: dict[int, Any] = {}
        for time, env in is_open(ids, mask).t().nonzero().tolist():
            advice_id = abs(int(ids[env, time]))
            if advice_id > self._last and advice_id not in new:
                new[advice_id] = tell(advice_id, env, time)
        self._waiting.update(new)
        self._last = max(new, default=self._last)
        _drop_oldest(self._waiting)

    def take(self, late: Iterable[tuple[int, Advice | None]]) -> list[tuple[Any, Advice]]:
        """Return what was kept of the questions that are answered now, with their answers.

        Args:
            late: As for :meth:`LateAdvice.apply`.
        """
        self._answers.update(late)
        taken = []
        for advice_id in [known for known in self._waiting if known in self._answers]:
            told, advice = self._waiting.pop(advice_id), self._answers[advice_id]
            if advice is not None:
                taken.append((told, advice))
        for advice_id in [known for known in self._answers if known <= self._last]:
            del self._answers[advice_id]
        _drop_oldest(self._answers)
        return taken


def _drop_oldest(values: OrderedDict[int, Any]) -> None:
    while len(values) > _MAX_OPEN:
        values.popitem(last=False)


class LateAdvice:
    r"""Remembers where the rows of open questions are stored, and writes their answers there.

    A row waits if its ``("next", "llm_advice_id")`` is above 0 and its mask is ``False``, or
    below 0, where other advice stands in. Its answer replaces logits, confidence and mask
    under ``"next"``, and makes the number positive, unless the slot has been written anew
    since, which its generation tells
    (:meth:`~torchrl.data.ReplayBuffer.update_if_present`).

    An answer may come before its row: collection and storage are a batch apart. So the
    latest answers are kept for rows that are noted after them.

    Args:
        max_rows: Rows that wait, at least 1; the rows of the oldest questions are given up
            first. Default: ``100_000``.
        max_answers: Answers kept for rows to come, at least 1. Default: ``1_024``.
        prior_logits_key: Entry of the logits beside the observation.
            Default: ``"llm_prior_logits"``.
        confidence_key: Entry of the confidence. Default: ``"llm_confidence"``.
        mask_key: Entry of the mask. Default: ``"llm_mask"``.
        advice_id_key: Entry of the question's number. Default: ``"llm_advice_id"``.

    Raises:
        ValueError: If ``max_rows`` or ``max_answers`` is below 1.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
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
        ...     "llm_advice_id": torch.tensor([[0], [7]]),
        ... }
        >>> env_index = torch.zeros(2, dtype=torch.long)
        >>> rows = TensorDict({"env_index": env_index, "next": advice}, [2])
        >>> late = LateAdvice()
        >>> late.note(rows, replay.extend(rows))
        >>> late.apply(replay, [(7, Advice(logits=(0.0, 0.0, 3.0)))])
        1
        >>> member[:]["next", "llm_prior_logits"]
        tensor([[0., 0., 0.],
                [0., 0., 3.]])
    """

    def __init__(
        self,
        *,
        max_rows: int = 100_000,
        max_answers: int = 1_024,
        prior_logits_key: NestedKey = keys.PRIOR_LOGITS,
        confidence_key: NestedKey = keys.CONFIDENCE,
        mask_key: NestedKey = keys.MASK,
        advice_id_key: NestedKey = keys.ADVICE_ID,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("max_answers", max_answers)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        self.max_rows = max_rows
        self.max_answers = max_answers
        self.prior_logits_key = unravel_key(("next", prior_logits_key))
        self.confidence_key = unravel_key(("next", confidence_key))
        self.mask_key = unravel_key(("next", mask_key))
        self.advice_id_key = unravel_key(("next", advice_id_key))
        self.written = 0
        self.missed = 0
        self._waiting: OrderedDict[int, list[_Place]] = OrderedDict()
        self._rows = 0
        self._answers: OrderedDict[int, Advice | None] = OrderedDict()

    def __len__(self) -> int:
        return self._rows

    def note(self, records: TensorDictBase, where: TensorDictBase) -> None:
        """Take note of where records were stored.

        Args:
            records: What was stored, ``[N]``.
            where: What the buffer's ``extend`` returned: ``buffer_ids``, ``index`` and
                ``index_generation``, each ``[N]``.
        """
        ids = records.get(self.advice_id_key).reshape(-1)
        rows = is_open(ids, records.get(self.mask_key).reshape(-1)).nonzero().squeeze(-1)
        if not rows.numel():
            return
        places = torch.stack(
            [where.get(name)[rows] for name in ("buffer_ids", "index", "index_generation")], 1
        )
        for advice_id, place in zip(ids[rows].abs().tolist(), places.tolist(), strict=True):
            self._waiting.setdefault(advice_id, []).append(tuple(place))
        self._rows += rows.numel()
        while self._rows > self.max_rows and self._waiting:
            given_up = len(self._waiting.popitem(last=False)[1])
            self._rows -= given_up
            self.missed += given_up

    def apply(
        self, replay: ReplayBufferEnsemble, late: Iterable[tuple[int, Advice | None]] = ()
    ) -> int:
        """Write answers into the rows that wait for them.

        Args:
            replay: The buffer that the places belong to.
            late: Answers by question, as from
                :meth:`~lore_torchrl.service.AdviceService.take_late`; ``None`` for one that
                will never come. Default: none beyond those already seen.

        Returns:
            Rows written.
        """
        self._answers.update(late)
        places: list[_Place] = []
        ids: list[int] = []
        advices: list[Advice] = []
        for advice_id in [known for known in self._waiting if known in self._answers]:
            waiting = self._waiting.pop(advice_id)
            self._rows -= len(waiting)
            advice = self._answers[advice_id]
            if advice is None:
                self.missed += len(waiting)
            else:
                places += waiting
                ids += [advice_id] * len(waiting)
                advices += [advice] * len(waiting)
        while len(self._answers) > self.max_answers:
            self._answers.popitem(last=False)
        written = self._write(replay, places, ids, advices) if places else 0
        self.written += written
        self.missed += len(places) - written
        return written

    def _write(
        self,
        replay: ReplayBufferEnsemble,
        places: list[_Place],
        ids: list[int],
        advices: list[Advice],
    ) -> int:
        logits = torch.tensor([advice.logits for advice in advices], dtype=torch.float32)
        claims = [[advice.confidence] for advice in advices]
        confidence = torch.tensor(claims, dtype=torch.float32)
        buffer_ids, index, generation = torch.tensor(places).unbind(1)
        result = replay.update_if_present(
            index=TensorDict({"buffer_ids": buffer_ids, "index": index}, [len(index)]),
            generation=generation,
            patch={
                self.prior_logits_key: logits,
                self.confidence_key: confidence,
                self.mask_key: torch.ones(len(index), 1, dtype=torch.bool),
                self.advice_id_key: torch.tensor(ids).unsqueeze(-1),
            },
        )
        return int(result.updated.sum())

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
        """Restore the counters; no row waits any more.

        Args:
            state: What :meth:`state_dict` returned.
        """
        self.written = int(state["written"])
        self.missed = int(state["missed"])
        self._waiting.clear()
        self._answers.clear()
        self._rows = 0
