"""Ways to get a distribution over actions from a chat server, one class each."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lore_torchrl.advisors.base import LONGEST_PLAN, Advice, AdviceRequest
from lore_torchrl.advisors.errors import (
    AdviceError,
    EmptyAnswerError,
    MalformedError,
    StatusError,
)
from lore_torchrl.advisors.parsing import (
    LABELS,
    logits_of,
    member,
    number,
    parse_answer,
    required,
)
from lore_torchrl.advisors.prompt import PromptTemplate
from lore_torchrl.advisors.redaction import shown

Post = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]

# Statuses by which a server says that it does not know, or not allow, a field.
UNSUPPORTED = frozenset((400, 422, 501))
# Added to the letters' logits, the same for all, which leaves other tokens no probability.
_BIAS = 100.0
# Above 1 only by rounding, which in 16 bits is up to 0.4 %.
_LARGEST_PROBABILITY = 1.01
# Tokens read of one position: more than the 20 that are asked for, and the one written.
_MOST_TOKENS = 128


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What all modes send alike; documented at :class:`~lore_torchrl.advisors.chat.ChatAdvisor`."""

    model: str
    server: str = "openai"
    temperature: float | None = None
    max_tokens: int = 1024
    votes: int = 8
    smoothing: float = 0.1
    min_label_mass: float = 0.01
    send_image: bool = False
    ask_for: Sequence[str] = ()
    extra_body: Mapping[str, Any] = field(default_factory=dict)


def prompt_body(
    settings: ChatSettings, system: str, content: Any, max_tokens: int
) -> dict[str, Any]:
    """Return the body of a chat request: a system message, which may be empty, and a user's."""
    messages = [{"role": "user", "content": content}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    # OpenAI's newer models know only the longer name, other servers often only the older.
    limit = "max_completion_tokens" if settings.server == "openai" else "max_tokens"
    body: dict[str, Any] = {"model": settings.model, "messages": messages, limit: max_tokens}
    if settings.temperature is not None:
        body["temperature"] = settings.temperature
    return body


class Mode(ABC):
    """Asks one question and reads the answer, which ``raw`` holds as the server wrote it."""

    def __init__(self, settings: ChatSettings, template: PromptTemplate) -> None:
        self.settings = settings
        self.template = template

    @abstractmethod
    async def ask(self, post: Post, request: AdviceRequest) -> Advice:
        """Return the advice."""

    def _body(self, request: AdviceRequest, max_tokens: int) -> dict[str, Any]:
        settings, prompt = self.settings, self.template.render(request)
        content: Any = prompt.user
        if settings.send_image and request.image is not None:
            image = f"data:image/png;base64,{base64.b64encode(request.image).decode()}"
            picture = {"type": "image_url", "image_url": {"url": image}}
            content = [{"type": "text", "text": prompt.user}, picture]
        return prompt_body(settings, prompt.system, content, max_tokens)


class Forms:
    """Forms of one request, tried in turn until the server takes one.

    Forms before that one are not tried again. Where the server refuses all, later calls try
    the plainest alone, which is the last, until it is taken.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self.refused = False

    async def ask(self, send: Callable[[str], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Return what the first form that is taken brings, or raise the last refusal."""
        refused = self.refused
        names = self.names[-1:] if refused else self.names
        for index, name in enumerate(names):
            try:
                answer = await send(name)
            except StatusError as error:
                if error.status not in UNSUPPORTED:
                    raise
                refusal = error
                continue
            # Only an answer proves that the refusals were about the form.
            if not refused:
                self.names = names[index:]
            self.refused = False
            return answer
        self.refused = True
        raise refusal


class LogprobsMode(Mode):
    """One token, a letter: the model's own probability of each is the preference.

    The logits are the logarithms of the letters' probabilities, made to add up to 1; a
    letter that the server did not list gets a floor. The confidence is the probability
    that the model put on the letters together. llama.cpp is held to the letters by a
    grammar, which makes the confidence 1.
    """

    async def ask(self, post: Post, request: AdviceRequest) -> Advice:
        """Ask once."""
        labels = LABELS[: len(request.actions)]
        if len(request.actions) > len(LABELS):
            raise MalformedError(f"{len(request.actions)} actions are more than the letters.")
        body = self._body(request, 1) | {"logprobs": True, "top_logprobs": 20}
        if self.settings.server == "llamacpp":
            # Probabilities come after the grammar only with post_sampling_probs, and are the
            # model's with the samplers off. A token that fits the grammar by chance comes with
            # those of all tokens: hence the bias.
            body |= {
                "grammar": "root ::= " + " | ".join(f'"{label}"' for label in labels),
                "logit_bias": [[label, _BIAS] for label in labels],
                "post_sampling_probs": True,
                **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
            }
        answer = await post("/chat/completions", body | dict(self.settings.extra_body))
        mass = dict.fromkeys(labels, 0.0)
        for token, probability in _first_token(_choices(answer)[0]):
            # Tokenizers mark a space before a word in their own ways.
            label = token.strip(" \t\n\u2581\u0120")
            if label in mass:
                mass[label] += probability
        total = sum(mass.values())
        if total < self.settings.min_label_mass:
            raise MalformedError(
                f"The model put only {total:.2g} of its probability on the letters."
            )
        raw = json.dumps({label: round(value, 6) for label, value in mass.items()})
        return Advice(logits_of(list(mass.values())), min(1.0, total), raw=raw)


class JSONMode(Mode):
    """A JSON object with logits and confidence, held to a schema where the server can.

    Asks for ``json_schema``; a server that refuses it is asked for ``json_object``, one
    that refuses that for text, and it stays at what worked. Whatever comes is read by
    :func:`~lore_torchrl.advisors.parsing.parse_answer`.
    """

    def __init__(self, settings: ChatSettings, template: PromptTemplate) -> None:
        super().__init__(settings, template)
        self._formats = Forms("json_schema", "json_object", "text")

    async def ask(self, post: Post, request: AdviceRequest) -> Advice:
        """Ask, once more for each format refused."""
        body = self._body(request, self.settings.max_tokens)
        schema = _advice_schema(request, self.settings.ask_for)

        async def send(name: str) -> dict[str, Any]:
            wanted: dict[str, Any] = {"type": name}
            if name == "json_schema":
                wanted[name] = {"name": "advice", "strict": True, "schema": schema}
            asked = body if name == "text" else body | {"response_format": wanted}
            return await post("/chat/completions", asked | dict(self.settings.extra_body))

        choice = _choices(await self._formats.ask(send))[0]
        text = _text_of(choice)
        try:
            return replace(parse_answer(text, request.actions, request.subgoals), raw=text)
        except MalformedError as error:
            if choice.get("finish_reason") == "length":
                raise type(error)(f"{error} It was cut off: raise max_tokens.") from None
            raise


class VoteMode(Mode):
    """Several short answers: how often each action is named is the preference.

    The logits are the logarithms of the smoothed frequencies, the confidence the fraction of
    all votes, unreadable ones included, that the winner got. Asks for ``n`` answers at once,
    and singly for those that do not come so, one before the others until one was answered.
    """

    def __init__(self, settings: ChatSettings, template: PromptTemplate) -> None:
        super().__init__(settings, template)
        names = ("at_once", "singly") if self.settings.votes > 1 else ("singly",)
        self._forms = Forms(*names)

    async def ask(self, post: Post, request: AdviceRequest) -> Advice:
        """Ask for all votes."""
        votes = self.settings.votes
        body = self._body(request, self.settings.max_tokens)
        body.setdefault("temperature", 1.0)
        body |= dict(self.settings.extra_body)

        async def send(form: str) -> dict[str, Any]:
            wanted = {"n": votes} if form == "at_once" else {}
            return await post("/chat/completions", body | wanted)

        async def single() -> dict[str, Any] | AdviceError:
            try:
                return _choices(await send("singly"))[0]
            except AdviceError as error:
                return error

        choices: list[dict[str, Any]] = []
        if self._forms.refused or self._forms.names != ("singly",):
            choices += _choices(await self._forms.ask(send), votes)
            if len(choices) == 1:
                self._forms.names = ("singly",)
        singles = await asyncio.gather(*(single() for _ in range(votes - len(choices))))
        if not choices:
            # Where every single request fails, the next question tries one before the others.
            self._forms.refused = all(isinstance(one, AdviceError) for one in singles)
        errors = [one for one in singles if isinstance(one, AdviceError)]
        choices += [one for one in singles if not isinstance(one, AdviceError)]
        counts = [0] * len(request.actions)
        texts = []
        for choice in choices:
            try:
                texts.append(_text_of(choice))
                logits = parse_answer(texts[-1], request.actions).logits
                counts[logits.index(max(logits))] += 1
            except MalformedError as error:
                errors.append(error)
        if not any(counts):
            raise errors[0]
        smoothed = [count + self.settings.smoothing for count in counts]
        logits = tuple(math.log(value / sum(smoothed)) for value in smoothed)
        return Advice(logits, max(counts) / votes, raw=json.dumps(texts))


# From what tells most about the model to what any server can do.
MODES: dict[str, type] = {
    "logprobs": LogprobsMode,
    "json": JSONMode,
    "vote": VoteMode,
}


def _advice_schema(request: AdviceRequest, ask_for: Sequence[str]) -> dict[str, Any]:
    count = len(request.actions)
    # Whole numbers and a list of tenths: grammars hold a model to these, not to a range
    # of fractions.
    integer = {"type": "integer", "minimum": -10, "maximum": 10}
    logits = {"type": "array", "items": integer, "minItems": count, "maxItems": count}
    prior = _closed({"type": {"type": "string", "enum": ["discrete"]}, "logits": logits})
    confidence = {"type": "number", "enum": [step / 10 for step in range(11)]}
    name = {"type": "string", "enum": list(request.actions)}
    subgoal = {"type": "string"}
    if request.subgoals:
        subgoal["enum"] = ["", *request.subgoals]
    extras = {
        "plan": {"type": "array", "items": name, "maxItems": LONGEST_PLAN},
        "valid_actions": {"type": "array", "items": name, "maxItems": count},
        "subgoal": subgoal,
    }
    asked = {key: extras[key] for key in ask_for}
    return _closed({"action_prior": prior, "confidence": confidence, **asked})


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _choices(data: Mapping[str, Any], most: int = 1) -> list[dict[str, Any]]:
    """Return the first answers, of which there is at least one and are at most ``most``."""
    choices = required(data, "choices", list)
    if not choices:
        raise EmptyAnswerError("The server sent no choices.")
    return choices[:most]


def answer_text(data: Mapping[str, Any]) -> str:
    """Return the text of a chat completion's first answer."""
    return _text_of(_choices(data)[0])


def _text_of(choice: dict[str, Any]) -> str:
    """Return what the model wrote, which is not nothing."""
    message = required(choice, "message", dict)
    if member(message, "refusal", str):
        raise MalformedError("The model refused to answer.")
    content = member(message, "content", str)
    if not content:
        reason = shown(member(choice, "finish_reason", str) or "", 60)
        reason = f" (finish_reason {reason})" if reason else ""
        raise EmptyAnswerError(f"The answer has no text{reason}.")
    # JSON can escape halves of characters, which no file and no database takes.
    return content.encode(errors="replace").decode()


def _first_token(choice: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the tokens that an answer might have begun with, with their probabilities."""
    logprobs = member(choice, "logprobs", dict) or {}
    positions = member(logprobs, "content", list)
    if not positions:
        raise MalformedError("The server sent no logprobs, though they were asked for.")
    listed = member(positions[0], "top_logprobs", list) or member(positions[0], "top_probs", list)
    listed = (listed or [])[:_MOST_TOKENS]
    found = [(member(each, "token", str) or "", _probability(each)) for each in listed]
    total = sum(probability for _, probability in found)
    if total > _LARGEST_PROBABILITY:
        raise MalformedError(f"The tokens' probabilities add up to {total:g}.")
    return found


def _probability(token: dict[str, Any]) -> float:
    value = member(token, "prob", int, float)
    if value is None:
        logprob = member(token, "logprob", int, float)
        if logprob is None:
            raise MalformedError("A token came without its probability.")
        # Impossible tokens come as minus infinity or -9999; large ones must not overflow.
        value = logprob if logprob == math.inf else math.exp(max(min(logprob, 700.0), -1e6))
    value = number(value, "probabilities")
    if not 0.0 <= value <= _LARGEST_PROBABILITY:
        raise MalformedError(f"A token's probability must lie in [0, 1], got {value:g}.")
    return value
