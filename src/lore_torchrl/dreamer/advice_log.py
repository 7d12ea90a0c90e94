"""What was asked and what came of it, for people to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl import logger as torchrl_logger

from lore_torchrl import keys
from lore_torchrl.advisors.redaction import redact_all
from lore_torchrl.dreamer.logging import earlier_file, read_rows, rewrite
from lore_torchrl.replay.late_advice import is_open
from lore_torchrl.service import AdviceService


class AdviceLog:
    """Write a line of JSON for each step that an answer was bought for.

    In blocking mode rows that share a question have a line each, in async mode one.

    ``prior``, ``policy`` and ``mix`` are probabilities by the action's name; where actions are
    continuous, the latter two are the Gaussian's location and scale (before its tanh), and
    ``action`` is its numbers. In async mode a ``late`` answer came after its step, which acted
    without it, or on a fallback; its line is written when it comes. There are ``limit`` lines in
    all. ``resume_step`` and ``resume_from`` are as of :class:`RunLogger`.
    """

    def __init__(
        self,
        path: str | Path,
        service: AdviceService,
        actions: Sequence[str],
        *,
        limit: int = 2_000,
        resume_step: int | None = None,
        resume_from: Path | None = None,
    ) -> None:
        self.path = Path(path)
        self.service = service
        self.actions = tuple(actions)
        kept: list[str] = []
        if resume_step is not None:
            earlier = read_advice(earlier_file(self.path.resolve(), resume_from))
            kept = [json.dumps(line) for line in earlier if line["step"] <= resume_step]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rewrite(self.path, kept)
        self._left = max(0, limit - len(kept))
        self._step = resume_step or 0
        self._open: dict[int, dict[str, Any]] = {}  # lines that wait for their answers
        self._last_id = 0

    def __call__(self, batch: TensorDictBase) -> None:
        """Take note of a collector batch ``[E, T]``."""
        advice = batch.select(keys.ADVICE_ID, keys.MASK, keys.FALLBACK).cpu()
        ids, waits = advice.get(keys.ADVICE_ID).squeeze(-1), is_open(advice)
        fresh = (ids > 0) & ~waits
        num_envs, start = fresh.shape[0], self._step

        def line(env: int, time: int) -> dict[str, Any]:
            step = start + time * num_envs + env + 1
            return self._line(batch[env, time], int(ids[env, time]), step, env)

        self._write([line(env, time) for env, time in fresh.nonzero().tolist()[: self._left]])
        self._step += fresh.numel()
        if self._left:
            # Rows that share a question have one line, about the first of them.
            new: dict[int, dict[str, Any]] = {}
            for time, env in waits.t().nonzero().tolist():
                advice_id = int(ids[env, time])
                if advice_id > self._last_id and advice_id not in new:
                    new[advice_id] = line(env, time)
            self._open |= new
            self._last_id = max(new, default=self._last_id)

    def write_late(self) -> None:
        """Write the lines of answers that have come since their steps."""
        if not self._left:
            return
        lines = []
        for advice_id, advice in self.service.answers(list(self._open)).items():
            line = self._open.pop(advice_id)
            if advice is not None:
                line["prior"] = self._probs(torch.tensor(advice.logits))
                lines.append(line | {"confidence": round(advice.confidence, 4), "late": True})
        self._write(lines[: self._left])

    def _write(self, lines: list[dict[str, Any]]) -> None:
        self._left -= len(lines)
        if not lines:
            return
        ordered = sorted(lines, key=lambda line: line["step"])
        try:
            with self.path.open("a") as file:
                file.writelines(json.dumps(redact_all(line)) + "\n" for line in ordered)
        except OSError as error:
            self._left = 0
            torchrl_logger.warning(f"{self.path} ends here, the run goes on: {error}.")

    def _line(self, row: TensorDictBase, advice_id: int, step: int, env: int) -> dict[str, Any]:
        request = self.service.question(advice_id)
        advisor = self.service.advisor
        advisor = getattr(advisor, "advisor", advisor)  # of a recording
        written = None
        if request is not None and callable(prompt := getattr(advisor, "prompt", None)):
            try:
                written = str(prompt(request))
            except Exception as error:  # it is the user's
                written = f"{type(error).__name__}: {error}"
        if row.get("logits", None) is not None:
            policy, mix = self._probs(row.get("logits")), self._probs(row.get(keys.MIX_LOGITS))
            action = self.actions[int(row.get("action").argmax(-1))]
        else:
            policy = {name: _numbers(row.get(name)) for name in ("loc", "scale")}
            mix = {
                "loc": _numbers(row.get(keys.MIX_LOC)),
                "scale": _numbers(row.get(keys.MIX_SCALE)),
            }
            action = _numbers(row.get("action"))
        return {
            "step": step,
            "environment": env,
            "advice_id": advice_id,
            "observation": None if request is None else request.description,
            "prompt": written,
            "prior": self._probs(row.get(keys.PRIOR_LOGITS)),
            "confidence": round(float(row.get(keys.CONFIDENCE)), 4),
            "policy": policy,
            "mix": mix,
            "beta": round(float(row.get(keys.BETA)), 4),
            "action": action,
            "late": False,
        }

    def _probs(self, logits: torch.Tensor) -> dict[str, float]:
        probs = torch.softmax(logits.detach().float().cpu(), -1).tolist()
        return {name: round(p, 4) for name, p in zip(self.actions, probs, strict=True)}


def _numbers(values: torch.Tensor) -> list[float]:
    return [round(value, 4) for value in values.detach().cpu().tolist()]


def read_advice(path: str | Path) -> list[dict[str, Any]]:
    """Read the lines of a run's ``advice.jsonl``, or of its folder; none if there is no such file.

    Raises:
        ValueError: If a line is damaged: see :func:`~lore_torchrl.dreamer.logging.read_rows`.
    """
    path = Path(path)
    if path.is_dir():
        path /= "advice.jsonl"
    if not path.exists():
        return []
    return list(read_rows(path).values())
