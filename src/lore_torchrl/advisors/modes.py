"""Ways to get a distribution over actions from a chat server, one class each."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from lore_torchrl.advisors.asking import UNSUPPORTED_FIELD, ChatSettings, Forms, Post
from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.advisors.decisions import DecisionsMode
from lore_torchrl.advisors.errors import AdviceError, MalformedError
from lore_torchrl.advisors.parsing import LABELS, Preference, logits_of, parse_answer
from lore_torchrl.advisors.prompting import PromptTemplate
from lore_torchrl.advisors.wire import Choice, data_url, read_choices, read_text

# Added to the letters' logits, the same for all: what is not a letter has no share left.
_BIAS = 100.0


def _chat_body(
    settings: ChatSettings, template: PromptTemplate, request: AdviceRequest, max_tokens: int
) -> dict[str, Any]:
    prompt = template.render(request)
    content: Any = prompt.user
    if settings.send_image and request.image is not None:
        content = [
            {"type": "text", "text": prompt.user},
            {"type": "image_url", "image_url": {"url": data_url(request.image)}},
        ]
    messages = [{"role": "user", "content": content}]
    if prompt.system:
        messages.insert(0, {"role": "system", "content": prompt.system})
    # OpenAI's newer models know only the longer name, other servers often only the older.
    limit = "max_completion_tokens" if settings.server == "openai" else "max_tokens"
    body: dict[str, Any] = {"model": settings.model, "messages": messages, limit: max_tokens}
    if settings.temperature is not None:
        body["temperature"] = settings.temperature
    return body


def _labels(request: AdviceRequest) -> str:
    if len(request.actions) > len(LABELS):
        raise MalformedError(
            f"{len(request.actions)} actions are more than the {len(LABELS)} letters."
        )
    return LABELS[: len(request.actions)]


@dataclass
class LogprobsMode:
    """One token, a letter: the model's own probability of each is the preference.

    The logits are the logarithms of the letters' probabilities, made to add up to 1; a
    letter that the server did not list gets a floor. The confidence is the probability
    that the model put on the letters together: low where it wanted to write something
    else. llama.cpp is held to the letters by a grammar, which makes the confidence 1; it
    gives probabilities after the grammar only with ``post_sampling_probs``, and unless its
    samplers are off they are not the model's. A token that fits the grammar by chance it
    takes without applying it, so that the probabilities are those of all tokens: hence the
    letters' ``logit_bias``, which leaves nothing for the others and the letters' shares as
    they are.
    """

    settings: ChatSettings
    template: PromptTemplate

    async def ask(self, post: Post, request: AdviceRequest) -> tuple[Preference, str]:
        """Ask once."""
        labels = _labels(request)
        body = _chat_body(self.settings, self.template, request, 1)
        body |= {"logprobs": True, "top_logprobs": 20}
        if self.settings.server == "llamacpp":
            body |= {
                "grammar": "root ::= " + " | ".join(f'"{label}"' for label in labels),
                "logit_bias": [[label, _BIAS] for label in labels],
                "post_sampling_probs": True,
                **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
            }
        choice = read_choices(
            await post("/chat/completions", body | dict(self.settings.extra_body))
        )[0]
        positions = (choice.logprobs and choice.logprobs.content) or []
        if not positions:
            raise MalformedError("The server sent no logprobs, though they were asked for.")
        mass = dict.fromkeys(labels, 0.0)
        for token, probability in positions[0].top:
            # Tokenizers mark a space before a word in their own ways.
            label = token.strip(" \t\n\u2581\u0120")
            if label in mass:
                mass[label] += probability
        total = sum(mass.values())
        if total < self.settings.min_label_mass:
            raise MalformedError(
                f"The model put only {total:.2g} of its probability on the letters."
            )
        preference = Preference(logits_of(list(mass.values())), min(1.0, total))
        return preference, json.dumps({name: round(value, 6) for name, value in mass.items()})


@dataclass
class JSONMode:
    """A JSON object with logits and confidence, held to a schema where the server can.

    Asks for ``json_schema``; a server that refuses it is asked for ``json_object``, one
    that refuses that for text, and it stays at what worked. Whatever comes is read by
    :func:`~lore_torchrl.advisors.parsing.parse_answer`: some servers ignore the schema.
    """

    settings: ChatSettings
    template: PromptTemplate
    _formats: Forms = field(init=False)

    def __post_init__(self) -> None:
        self._formats = Forms(("json_schema", "json_object", "text"), UNSUPPORTED_FIELD)

    async def ask(self, post: Post, request: AdviceRequest) -> tuple[Preference, str]:
        """Ask, once more for each format refused."""
        body = _chat_body(self.settings, self.template, request, self.settings.max_tokens)
        count = len(request.actions)

        async def send(name: str) -> dict[str, Any]:
            asked = body | _response_format(name, count) | dict(self.settings.extra_body)
            return await post("/chat/completions", asked)

        choice = read_choices(await self._formats.ask(send))[0]
        text = read_text(choice)
        try:
            return parse_answer(text, request.actions), text
        except MalformedError as error:
            if choice.finish_reason == "length":
                raise type(error)(f"{error} It was cut off: raise max_tokens.") from None
            raise


def _response_format(name: str, count: int) -> dict[str, Any]:
    if name == "text":
        return {}
    wanted: dict[str, Any] = {"type": name}
    if name == "json_schema":
        wanted[name] = {"name": "advice", "strict": True, "schema": _advice_schema(count)}
    return {"response_format": wanted}


def _advice_schema(count: int) -> dict[str, Any]:
    # Whole numbers and a list of tenths: grammars hold a model to these, not to a range
    # of fractions.
    logits = {
        "type": "array",
        "items": {"type": "integer", "minimum": -10, "maximum": 10},
        "minItems": count,
        "maxItems": count,
    }
    prior = _closed({"type": {"type": "string", "enum": ["discrete"]}, "logits": logits})
    confidence = {"type": "number", "enum": [step / 10 for step in range(11)]}
    return _closed({"action_prior": prior, "confidence": confidence})


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    required = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


@dataclass
class VoteMode:
    """Several short answers: how often each action is named is the preference.

    The logits are the logarithms of the smoothed frequencies, the confidence the share of
    all votes, spoilt ones included, that the winner got. Asks for ``n`` answers at once,
    and singly for those that do not come so, one before the others until one was answered.
    """

    settings: ChatSettings
    template: PromptTemplate
    _forms: Forms = field(init=False)

    def __post_init__(self) -> None:
        names = ("at_once", "singly") if self.settings.votes > 1 else ("singly",)
        self._forms = Forms(names, UNSUPPORTED_FIELD)

    async def ask(self, post: Post, request: AdviceRequest) -> tuple[Preference, str]:
        """Ask for all votes."""
        votes = self.settings.votes
        body = _chat_body(self.settings, self.template, request, self.settings.max_tokens)
        # Votes that cannot differ would say nothing.
        body.setdefault("temperature", 1.0)
        body |= dict(self.settings.extra_body)

        async def send(form: str) -> dict[str, Any]:
            wanted = {"n": votes} if form == "at_once" else {}
            return await post("/chat/completions", body | wanted)

        choices: list[Choice] = []
        if not (self._forms.proven and self._forms.names == ["singly"]):
            choices = read_choices(await self._forms.ask(send), votes)
            if len(choices) == 1:
                self._forms.names = ["singly"]
        singles = await asyncio.gather(
            *(_settled(send("singly")) for _ in range(votes - len(choices)))
        )
        if not choices:
            self._forms.proven = not all(isinstance(single, AdviceError) for single in singles)
        errors = [single for single in singles if isinstance(single, AdviceError)]
        counts = [0] * len(request.actions)
        texts = []
        for single in (*choices, *singles):
            if isinstance(single, AdviceError):
                continue
            try:
                choice = single if isinstance(single, Choice) else read_choices(single)[0]
                text = read_text(choice)
                texts.append(text)
                logits = parse_answer(text, request.actions).logits
            except MalformedError as error:
                errors.append(error)
                continue
            counts[logits.index(max(logits))] += 1
        if not any(counts):
            raise errors[0]
        smoothed = [count + self.settings.smoothing for count in counts]
        logits = tuple(math.log(value / sum(smoothed)) for value in smoothed)
        return Preference(logits, max(counts) / votes), json.dumps(texts)


async def _settled(answer: Awaitable[dict[str, Any]]) -> dict[str, Any] | AdviceError:
    try:
        return await answer
    except AdviceError as error:
        return error


# From what tells most about the model to what any server can do.
MODES: dict[str, type] = {
    "decisions": DecisionsMode,
    "logprobs": LogprobsMode,
    "json": JSONMode,
    "vote": VoteMode,
}
