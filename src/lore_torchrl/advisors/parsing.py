"""Reads what models write, in the shapes that they write it, as advice."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lore_torchrl.advisors.base import LONGEST_PLAN, Advice
from lore_torchrl.advisors.errors import (
    EmptyAnswerError,
    MalformedError,
    NotFiniteError,
    NotJSONError,
)
from lore_torchrl.advisors.redaction import shown

LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# What an action has that got no probability at all: about e to the -9.
PROBABILITY_FLOOR = 1e-4
# Logit of an action that was only named, as ScriptedAdvisor's default sharpness.
NAMED_ACTION_LOGIT = 3.0
# Far beyond any preference; within it, float32 and softmax stay exact enough.
MAX_LOGIT = 1e4

_PROBABILITIES = ("probabilities", "probs")
_ACTION = ("action", "answer", "choice", "label")
# The regular expression engine holds the GIL, so that no deadline ends it: each pattern
# here takes time linear in the text.
_THOUGHT_TAG = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_FENCE = re.compile(r"```[\w-]*+\s*+(.*?)```", re.DOTALL)
_LEAD_IN = re.compile(r"(?:the\s+)?(?:best\s+)?(?:action|answer)\s*(?:is|[:=])\s*", re.I)
_AROUND_NAMES = "*`\"'()[].:! \n\t"
_LONGEST_ANSWER = 1 << 16
# Characters at the end of a text in which thoughts are looked for: a search stops all threads.
_LONGEST_TEXT = 1 << 17
# Objects and fences tried of one answer, and how often its characters are read for them.
_MAX_CANDIDATES = 50
_MAX_READS = 4
_LONGEST_SUBGOAL = 200


def parse_answer(text: str, actions: Sequence[str], subgoals: Sequence[str] = ()) -> Advice:
    """Read an answer's text; ``subgoals`` are the names that one may have, any if there are none.

    Understood are JSON objects, plain, in a code fence or amid other text, with

    - ``action_prior`` around any of the following,
    - ``logits``: numbers, as a list in the actions' order or by action name,
    - ``probabilities`` or ``probs``: the same, not negative; they need not add up to 1, and
      a name left out has none,
    - ``action``, ``answer``, ``choice`` or ``label``: one action's name, index or letter,

    each with or without ``confidence``, ``plan`` and ``valid_actions``, lists of actions, and
    ``subgoal``, one of ``subgoals`` if there are any; and, without JSON, a text that is one
    action's name, index or letter. Where no confidence is claimed it is the preference's largest
    probability. An action that is only named gets the logit 3, the others 0.

    Text within ``<think>`` or ``<thinking>`` does not count: neither that before a closing
    tag whose opening one was in the prompt, nor that after one that is never closed. Of
    the last 131,072 characters, those outside are read, at most the last 65,536. The time is
    linear in the text's length, whatever it holds.

    Raises:
        MalformedError: Of the kind that says what is wrong.
    """
    text = _without_thoughts(text[-_LONGEST_TEXT:]).strip()[-_LONGEST_ANSWER:]
    if not text:
        raise EmptyAnswerError("The answer has no text.")
    if (named := find_action(text, actions)) is not None:
        return advice_of(_named(named, actions), None)
    error: MalformedError | None = None
    for value in _objects(text):
        try:
            advice = _read_object(value, actions)
            return replace(advice, **_extras(value, actions, subgoals))
        except MalformedError as err:
            # The first object that was meant as the answer tells what is wrong with it.
            error = error or err
    raise error or NotJSONError(f"No JSON in the answer, which begins '{shown(text, 60)}'.")


def _read_object(answer: Mapping[str, Any], actions: Sequence[str]) -> Advice:
    prior = member(answer, "action_prior", dict) or {}
    if all(prior.get(name) is None for name in ("logits", *_PROBABILITIES, *_ACTION)):
        prior = answer
    confidence = confidence_of(prior)
    if confidence is None:
        confidence = confidence_of(answer)
    if (logits := member(prior, "logits", list, dict)) is not None:
        logits = _in_order(logits, actions, "logits")
        if max(map(abs, logits)) > MAX_LOGIT:
            raise MalformedError(f"logits must lie in [-{MAX_LOGIT:g}, {MAX_LOGIT:g}].")
    elif (weights := _first(prior, _PROBABILITIES, list, dict)) is not None:
        logits = logits_of(_in_order(weights, actions, "probabilities", missing=0.0))
    elif (said := _first(prior, _ACTION, int, str)) is not None:
        index = find_action(said, actions)
        if index is None:
            raise MalformedError(f"No action is called '{shown(str(said), 60)}'.")
        logits = _named(index, actions)
    else:
        raise MalformedError(f"None of the known fields among '{shown(', '.join(answer), 60)}'.")
    return advice_of(logits, confidence)


def _extras(
    answer: Mapping[str, Any], actions: Sequence[str], subgoals: Sequence[str]
) -> dict[str, Any]:
    """Return plan, subgoal and valid actions of an answer, as far as there are any."""

    def indices(name: str) -> list[int]:
        said = (member(answer, name, list) or [])[:LONGEST_PLAN]
        found = [find_action(one, actions) if type(one) in (int, str) else None for one in said]
        if None in found:
            unknown = shown(str(said[found.index(None)]), 60)
            raise MalformedError(f"{name}: no action is called '{unknown}'.")
        return found

    valid = set(indices("valid_actions"))
    subgoal = (member(answer, "subgoal", str) or "").strip()
    if subgoal and subgoals and subgoal not in subgoals:
        raise MalformedError(f"No subgoal is called '{shown(subgoal, 60)}'.")
    return {
        "plan": tuple(indices("plan")),
        "valid": tuple(index in valid for index in range(len(actions))) if valid else (),
        "subgoal": subgoal[:_LONGEST_SUBGOAL],
    }


def member(owner: Any, name: str, *kinds: type) -> Any:
    """Return a JSON object's member of one of these types, ``None`` where it is absent or null.

    Raises:
        MalformedError: If the owner is no object, or the member is of another type.
    """
    value = owner.get(name) if isinstance(owner, dict) else owner
    known = type(value) in kinds or value is None
    if not isinstance(owner, dict) or not known:
        raise MalformedError(f"Unexpected shape at '{name}': {type(value).__name__}.")
    return value


def required(owner: Any, name: str, *kinds: type) -> Any:
    """Return a JSON object's :func:`member`, which must be there."""
    value = member(owner, name, *kinds)
    if value is None:
        raise MalformedError(f"The answer has no '{name}'.")
    return value


def number(value: Any, name: str) -> float:
    """Return a JSON number as a finite float, or raise a ``MalformedError``."""
    if type(value) not in (int, float):
        raise MalformedError(f"{name} must be numbers, got {type(value).__name__}.")
    if isinstance(value, int) and abs(value) > 1 << 64:
        raise MalformedError(f"{name} are out of range.")
    if not math.isfinite(value):
        raise NotFiniteError(f"{name} must be finite numbers.")
    return float(value)


def confidence_of(answer: Mapping[str, Any]) -> float | None:
    """Return the confidence that an answer states, ``None`` where it states none."""
    value = answer.get("confidence")
    return None if value is None else number(value, "confidence")


def logits_of(probabilities: Sequence[float]) -> tuple[float, ...]:
    """Return the logarithms of weights made to add up to 1, down to a floor."""
    total = sum(probabilities)
    if min(probabilities) < 0.0 or not 0.0 < total < math.inf:
        raise MalformedError("probabilities must not be negative, nor all 0.")
    return tuple(math.log(max(value / total, PROBABILITY_FLOOR)) for value in probabilities)


def advice_of(logits: tuple[float, ...], confidence: float | None) -> Advice:
    """Return advice with a confidence that defaults to the largest probability."""
    if confidence is None:
        top = max(logits)
        confidence = 1.0 / sum(math.exp(value - top) for value in logits)
    return Advice(logits, confidence)


def find_action(said: str | int, actions: Sequence[str]) -> int | None:
    """Return the index of the action that a name, index or letter means, else ``None``."""
    if isinstance(said, int):
        return said if 0 <= said < len(actions) else None
    word = said.strip().strip(_AROUND_NAMES)
    if lead_in := _LEAD_IN.match(word):
        word = word[lead_in.end() :].strip(_AROUND_NAMES)
    names = [_canonical(action) for action in actions]
    if (name := _canonical(word)) in names:
        return names.index(name)
    index = None
    if len(word) == 1 and word.isascii() and word.isalpha():
        index = LABELS.index(word.upper())
    # Longer digit strings are no index, and int() refuses them by the thousand.
    elif len(word) < 10 and word.isascii() and word.isdigit():
        index = int(word)
    return index if index is not None and index < len(actions) else None


def _canonical(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", unicodedata.normalize("NFC", name.strip())).casefold()


def _named(index: int, actions: Sequence[str]) -> tuple[float, ...]:
    return tuple(NAMED_ACTION_LOGIT if i == index else 0.0 for i in range(len(actions)))


def _first(owner: Mapping[str, Any], names: Sequence[str], *kinds: type) -> Any:
    found = (member(owner, name, *kinds) for name in names)
    return next((value for value in found if value is not None), None)


def _in_order(
    values: list[Any] | dict[str, Any],
    actions: Sequence[str],
    name: str,
    *,
    missing: float | None = None,
) -> tuple[float, ...]:
    # Before any is read: a body may hold a megabyte of them.
    if len(values) > len(actions):
        raise MalformedError(f"{name}: {len(values)} numbers for {len(actions)} actions.")
    if isinstance(values, dict):
        by_index: dict[int, Any] = {}
        for key, value in values.items():
            index = find_action(key, actions)
            if index is None:
                raise MalformedError(f"{name}: no action is called '{shown(key, 60)}'.")
            by_index[index] = value
        absent = [a for i, a in enumerate(actions) if i not in by_index]
        if absent and missing is None:
            raise MalformedError(f"{name}: nothing for '{shown(', '.join(absent), 60)}'.")
        values = [by_index.get(i, missing) for i in range(len(actions))]
    if len(values) != len(actions):
        raise MalformedError(f"{name}: {len(values)} numbers for {len(actions)} actions.")
    return tuple(number(value, name) for value in values)


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
    for candidate in (text, *_FENCE.findall(text)[:_MAX_CANDIDATES]):
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
