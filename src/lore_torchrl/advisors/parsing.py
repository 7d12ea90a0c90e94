"""Reads what models write, in the shapes that they write it, as a preference over actions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

try:
    from pydantic import AliasChoices, BaseModel, ConfigDict, Field
except ImportError as err:
    raise ImportError(
        "Reading answers of language models needs pydantic: pip install 'lore-torchrl[http]'."
    ) from err

from lore_torchrl.advisors.errors import (
    EmptyAnswerError,
    MalformedError,
    NotFiniteError,
    NotJSONError,
)
from lore_torchrl.advisors.redaction import shown
from lore_torchrl.advisors.wire import Bounded, validated

LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# What an action has that got no probability at all: about e to the -9.
PROBABILITY_FLOOR = 1e-4
# Logit of an action that was only named, as ScriptedAdvisor's default sharpness.
NAMED_ACTION_LOGIT = 3.0
# Far beyond any preference; within it, float32 and softmax stay exact enough.
MAX_LOGIT = 1e4

# Strict: true and "0.8" are no numbers. NaN passes here, to get an error of its own kind.
_Number = Annotated[float, Field(strict=True, allow_inf_nan=True)]
_Values = Annotated[list[_Number] | dict[str, _Number], Bounded]
# The regular expression engine holds the GIL, so that no deadline ends it: each pattern
# here takes time linear in the text.
_THOUGHT_TAG = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_FENCE_LANGUAGE = re.compile(r"[\w-]*\s*")
_LEAD_IN = re.compile(r"(?:the\s+)?(?:best\s+)?(?:action|answer)\s*(?:is|[:=])\s*", re.I)
_AROUND_NAMES = "*`\"'()[].:! \n\t"
# Characters that an answer may have beside its thoughts.
_LONGEST_ANSWER = 1 << 16
# Characters at the end of a text in which thoughts are looked for: a search stops all threads.
_LONGEST_TEXT = 1 << 17
# Objects and fences tried of one answer, and how often its characters are read for them.
_MAX_CANDIDATES = 50
_MAX_READS = 4


@dataclass(frozen=True, slots=True)
class Preference:
    """What an answer says.

    Args:
        logits: One finite number for each action.
        confidence: From 0 to 1.
    """

    logits: tuple[float, ...]
    confidence: float


class _Prior(BaseModel):
    """One preference, in one of its shapes. Fields beside these are of no interest."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    logits: _Values | None = None
    probabilities: _Values | None = Field(
        default=None, validation_alias=AliasChoices("probabilities", "probs")
    )
    action: Annotated[int, Field(strict=True)] | Annotated[str, Field(strict=True)] | None = Field(
        default=None, validation_alias=AliasChoices("action", "answer", "choice", "label")
    )
    confidence: _Number | None = None

    @property
    def says_nothing(self) -> bool:
        return self.logits is None and self.probabilities is None and self.action is None


class _Answer(_Prior):
    action_prior: _Prior | None = None


def parse_answer(text: str, actions: Sequence[str]) -> Preference:
    """Read an answer's text.

    Understood are JSON objects, plain, in a code fence or amid other text, with

    - ``action_prior`` around any of the following,
    - ``logits``: numbers, as a list in the actions' order or by action name,
    - ``probabilities`` or ``probs``: the same, not negative; they need not add up to 1, and
      a name left out has none,
    - ``action``, ``answer``, ``choice`` or ``label``: one action's name, index or letter,

    each with or without ``confidence``; and, without JSON, a text that is one action's name
    or letter. Where no confidence is claimed it is the preference's largest probability.
    An action that is only named gets the logit 3, the others 0.

    Text within ``<think>`` or ``<thinking>`` does not count: neither that before a closing
    tag whose opening one was in the prompt, nor that after one that is never closed. Of
    the last 131,072 characters, those outside are read, at most the last 65,536. The time is
    linear in the text's length, whatever it holds.

    Args:
        text: The answer.
        actions: Names of the actions, in the order of the logits.

    Raises:
        MalformedError: Of the kind that says what is wrong: empty, no JSON, not finite
            numbers, or another shape, length or range.

    Examples:
        >>> parse_answer('Sure: {"logits": [0, 2], "confidence": 0.9}', ("left", "right"))
        Preference(logits=(0.0, 2.0), confidence=0.9)
        >>> parse_answer("B", ("left", "right")).logits
        (0.0, 3.0)
    """
    text = _without_thoughts(text[-_LONGEST_TEXT:]).strip()[-_LONGEST_ANSWER:]
    if not text:
        raise EmptyAnswerError("The answer has no text.")
    named = find_action(text, actions)
    if named is not None:
        return _named(named, len(actions), None)
    error: MalformedError = NotJSONError(
        f"No JSON in the answer, which begins '{shown(text, 60)}'."
    )
    for value in _objects(text):
        try:
            return read_preference(value, actions)
        except MalformedError as err:
            # The first object that was meant as the answer tells what is wrong with it.
            if isinstance(error, NotJSONError):
                error = err
    raise error


def read_preference(value: Mapping[str, Any], actions: Sequence[str]) -> Preference:
    """Read a JSON object in one of the shapes that :func:`parse_answer` lists."""
    answer = validated(_Answer, value, most=len(actions))
    prior = answer
    if answer.action_prior is not None and not answer.action_prior.says_nothing:
        prior = answer.action_prior
    confidence = answer.confidence if prior.confidence is None else prior.confidence
    if confidence is not None:
        _check_finite((confidence,), "confidence")
        if not 0.0 <= confidence <= 1.0:
            raise MalformedError(f"confidence must lie in [0, 1], got {confidence:g}.")
    if prior.logits is not None:
        logits = _in_order(prior.logits, actions, "logits")
        if max(map(abs, logits)) > MAX_LOGIT:
            raise MalformedError(f"logits must lie in [-{MAX_LOGIT:g}, {MAX_LOGIT:g}].")
    elif prior.probabilities is not None:
        values = _in_order(prior.probabilities, actions, "probabilities", missing=0.0)
        logits = logits_of(values)
    elif prior.action is not None:
        index = find_action(prior.action, actions)
        if index is None:
            raise MalformedError(f"No action is called '{shown(str(prior.action), 60)}'.")
        return _named(index, len(actions), confidence)
    else:
        raise MalformedError(f"None of the known fields among '{shown(', '.join(value), 60)}'.")
    return Preference(logits, max_probability(logits) if confidence is None else confidence)


def logits_of(probabilities: Sequence[float]) -> tuple[float, ...]:
    """Return the logarithms of weights made to add up to 1, none below :data:`PROBABILITY_FLOOR`.

    Raises:
        MalformedError: If one is negative or not finite, or all are 0.
    """
    _check_finite(probabilities, "probabilities")
    total = sum(probabilities)
    if min(probabilities) < 0.0 or not 0.0 < total < math.inf:
        raise MalformedError("probabilities must not be negative, nor all 0.")
    return tuple(math.log(max(value / total, PROBABILITY_FLOOR)) for value in probabilities)


def max_probability(logits: Sequence[float]) -> float:
    """Return the largest probability of the softmax."""
    top = max(logits)
    return 1.0 / sum(math.exp(value - top) for value in logits)


def find_action(said: str | int, actions: Sequence[str]) -> int | None:
    """Return the action that a name, index or letter stands for, else ``None``.

    Examples:
        >>> find_action("**Action: Right**.", ("left", "right"))
        1
        >>> find_action("I would go right", ("left", "right")) is None
        True
    """
    return _find(said, _by_name(actions), len(actions))


def _find(said: str | int, by_name: Mapping[str, int], count: int) -> int | None:
    if isinstance(said, int):
        return said if 0 <= said < count else None
    word = said.strip().strip(_AROUND_NAMES)
    if lead_in := _LEAD_IN.match(word):
        word = word[lead_in.end() :].strip(_AROUND_NAMES)
    index = by_name.get(_canonical(word))
    if index is None and len(word) == 1 and word.isascii():
        index = LABELS[:count].find(word.upper())
        index = None if index < 0 else index
    # Longer digit strings are no index, and int() refuses them by the thousand.
    if index is None and len(word) < 10 and word.isascii() and word.isdigit():
        index = int(word) if int(word) < count else None
    return index


def _by_name(actions: Sequence[str]) -> dict[str, int]:
    # Backwards, so that of equal names the first stays.
    return {_canonical(action): index for index, action in reversed([*enumerate(actions)])}


def _canonical(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name.strip()).casefold()


def _named(index: int, count: int, confidence: float | None) -> Preference:
    logits = tuple(NAMED_ACTION_LOGIT if i == index else 0.0 for i in range(count))
    return Preference(logits, max_probability(logits) if confidence is None else confidence)


def _in_order(
    values: list[float] | dict[str, float],
    actions: Sequence[str],
    name: str,
    *,
    missing: float | None = None,
) -> tuple[float, ...]:
    if isinstance(values, dict):
        by_name = _by_name(actions)
        by_index: dict[int, float] = {}
        for key, value in values.items():
            index = _find(key, by_name, len(actions))
            if index is None:
                raise MalformedError(f"{name}: no action is called '{shown(key, 60)}'.")
            by_index[index] = value
        absent = [a for i, a in enumerate(actions) if i not in by_index]
        if absent and missing is None:
            raise MalformedError(f"{name}: nothing for '{shown(', '.join(absent), 60)}'.")
        values = [by_index.get(i, missing) for i in range(len(actions))]
    if len(values) != len(actions):
        raise MalformedError(f"{name}: {len(values)} numbers for {len(actions)} actions.")
    _check_finite(values, name)
    return tuple(float(value) for value in values)


def _check_finite(values: Sequence[float], name: str) -> None:
    if not all(math.isfinite(value) for value in values):
        raise NotFiniteError(f"{name} must be finite numbers.")


def _without_thoughts(text: str) -> str:
    before, *rest = _THOUGHT_TAG.split(text)
    slashes, texts = rest[::2], rest[1::2]
    outside = [after for slash, after in zip(slashes, texts, strict=True) if slash]
    # A chat template may have put the opening tag into the prompt.
    if slashes[:1] != ["/"]:
        outside.insert(0, before)
    return "".join(outside)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a text, the likeliest to be the answer first."""
    # Every second part stands in a fence; the last has no end.
    fences = text.split("```")[1:-1:2]
    for candidate in (text, *fences[:_MAX_CANDIDATES]):
        if candidate is not text:
            candidate = candidate[_FENCE_LANGUAGE.match(candidate).end() :]
        try:
            value = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value
            return
        raise MalformedError(f"The answer is a JSON {type(value).__name__}, not an object.")
    decoder = json.JSONDecoder()
    start = text.find("{")
    characters = _MAX_READS * len(text)
    for _ in range(_MAX_CANDIDATES):
        if start < 0 or characters < 0:
            return
        value, end = None, start + 1
        try:
            value, end = decoder.raw_decode(text, start)
            read = end
        except json.JSONDecodeError as err:
            read = err.pos
        except ValueError:
            # Digits by the thousand, somewhere.
            read = len(text)
        except RecursionError:
            # Brackets nested by the thousand: no answer begins so.
            return
        characters -= read - start
        if isinstance(value, dict):
            yield value
        start = text.find("{", end)
