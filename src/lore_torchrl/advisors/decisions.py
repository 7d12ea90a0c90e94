"""Typed decisions: endpoints that return a probability for each option."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from lore_torchrl.advisors.asking import UNSUPPORTED, ChatSettings, Forms, Post
from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.advisors.errors import (
    EmptyAnswerError,
    MalformedError,
    NotFiniteError,
)
from lore_torchrl.advisors.parsing import Preference, logits_of, max_probability
from lore_torchrl.advisors.prompting import PromptTemplate
from lore_torchrl.advisors.redaction import shown
from lore_torchrl.advisors.wire import Bounded, data_url, first, validated

_Probability = Annotated[float, Field(strict=True, allow_inf_nan=True)]


class _Weighted(BaseModel):
    value: str | bool
    probability: _Probability


class _Decided(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: str = "choice"
    confidence: _Probability | None = None
    probabilities: Annotated[list[_Weighted] | dict[str, _Probability] | None, Bounded] = None


class _Decisions(BaseModel):
    answers: Annotated[list[_Decided] | dict[str, _Decided], first(1)]


@dataclass
class DecisionsMode:
    """A typed question, answered with the probability of each option and without text.

    Two forms of the same idea, tried in turn until one is served:

    - ``POST /v1/decisions``: ``input`` and a list of ``questions``, the answers a list with
      ``probabilities`` as ``{"value", "probability"}``. Field names follow the types of
      openai-python (October 2026) and SGLang's documentation.
    - ``POST /v1/systemone``: ``state`` and named ``questions`` with ``criteria``, the
      answers named too, with ``probabilities`` by option. Field names follow the published
      references of that format, and the messages of llama.cpp's server, which Ollama has
      taken up as well.

    Verified against a running llama.cpp: the path, and its status 501 for a model that is
    no decision model. No answer of a decision model has been seen here; the reader takes
    either form from either path, and a refusal or another shape is an error.
    The confidence is the answer's own, else the largest probability.
    """

    settings: ChatSettings
    template: PromptTemplate
    _paths: Forms = field(init=False)

    def __post_init__(self) -> None:
        paths = ["/decisions", "/systemone"]
        if self.settings.server in ("llamacpp", "ollama"):
            paths.reverse()
        self._paths = Forms(paths, UNSUPPORTED)

    async def ask(self, post: Post, request: AdviceRequest) -> tuple[Preference, str]:
        """Ask, at the second path where the first is not served."""

        async def send(path: str) -> dict[str, Any]:
            form = self._decisions_form if path == "/decisions" else self._systemone_form
            return await post(path, {"model": self.settings.model, **form(request)})

        return _read_decision(await self._paths.ask(send), request.actions)

    def _decisions_form(self, request: AdviceRequest) -> dict[str, Any]:
        text = str(self.template.render(request))
        evidence: Any = text
        if self.settings.send_image and request.image is not None:
            parts = [
                {"type": "input_text", "text": text},
                {"type": "input_image", "image_url": data_url(request.image)},
            ]
            evidence = [{"type": "message", "role": "user", "content": parts}]
        choices: list[dict[str, str]] = [{"value": action} for action in request.actions]
        for choice, meaning in zip(choices, request.action_meanings, strict=False):
            choice["description"] = meaning
        question = {
            "type": "choice",
            "name": "action",
            "instructions": self.template.ask(request),
            "choices": choices,
        }
        return {"input": evidence, "questions": [question]}

    def _systemone_form(self, request: AdviceRequest) -> dict[str, Any]:
        meanings = request.action_meanings or request.actions
        question = {
            "type": "choice",
            "instructions": self.template.ask(request),
            "criteria": dict(zip(request.actions, meanings, strict=True)),
        }
        form = {
            "state": str(self.template.render(request)),
            "questions": {"action": question},
        }
        if self.settings.send_image and request.image is not None:
            form["images"] = [data_url(request.image)]
        return form


def _read_decision(data: Mapping[str, Any], actions: Sequence[str]) -> tuple[Preference, str]:
    answers = validated(_Decisions, data, most=len(actions)).answers
    answer = next(iter(answers.values() if isinstance(answers, dict) else answers), None)
    if answer is None:
        raise EmptyAnswerError("The server sent no answers.")
    if answer.type == "refusal":
        raise MalformedError("The model refused to answer.")
    if answer.probabilities is None:
        raise MalformedError("The answer holds no probabilities.")
    if isinstance(answer.probabilities, dict):
        found = dict(answer.probabilities)
    else:
        found = {str(entry.value): entry.probability for entry in answer.probabilities}
    if set(found) != set(actions):
        names = shown(", ".join(sorted(found)), 60)
        raise MalformedError(f"Probabilities of '{names}' where others were asked for.")
    logits = logits_of([found[action] for action in actions])
    confidence = max_probability(logits) if answer.confidence is None else answer.confidence
    if not math.isfinite(confidence):
        raise NotFiniteError("confidence must be a finite number.")
    if not 0.0 <= confidence <= 1.0:
        raise MalformedError(f"confidence must lie in [0, 1], got {confidence:g}.")
    return Preference(logits, confidence), json.dumps(found)
