"""Prompts as files: what a question to a language model looks like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.advisors.parsing import LABELS

_FIELDS = frozenset(("situation", "options", "answer", "mission", "count"))
_SEPARATOR = "\n---\n"
# How the answer is asked for in each mode.
_ANSWERS = {"logprobs": "letter", "vote": "letter", "json": "json"}

#: What may be asked for beside a preference; each has a file that says so.
EXTRAS = ("plan", "valid_actions", "subgoal")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question in words: who the model is, which may be empty, and what it is asked."""

    system: str
    user: str

    def __str__(self) -> str:
        return f"{self.system}\n\n{self.user}".strip()


class PromptTemplate:
    """A prompt's file and what is filled in.

    A file holds ``$situation``, the description with the mission before it where it does
    not name it, and may hold ``$options``, the actions with letters and meanings;
    ``$answer``, how this mode wants its answer; ``$mission`` and ``$count``. What comes
    before a line of three dashes is the system message.

    Args:
        name: Name of a file that comes with the package, such as ``default``, or the path
            of one of your own, ending in ``.txt``.
        mode: ``logprobs``, ``json`` or ``vote``.
        ask_for: Which of :data:`EXTRAS` are asked for beside the preference. Default: none.

    Raises:
        ValueError: If there is no such file, it lacks ``$situation``, or has an unknown field.
    """

    def __init__(self, name: str, mode: str, ask_for: Sequence[str] = ()) -> None:
        self.text = _read(name)
        names = (_ANSWERS[mode], *(extra for extra in EXTRAS if extra in ask_for))
        self.answer = "\n".join(_packaged(f"answer.{one}").strip() for one in names)
        template = Template(self.text)
        if not template.is_valid():
            raise ValueError(f"prompt={name!r}: a lone '$' in the file; write '$$' for one.")
        fields = set(template.get_identifiers())
        if unknown := fields - _FIELDS:
            raise ValueError(
                f"prompt={name!r}: unknown fields {sorted(unknown)}; known are {sorted(_FIELDS)}."
            )
        if "situation" not in fields:
            raise ValueError(f"prompt={name!r}: the file must hold $situation.")

    @property
    def source(self) -> str:
        """Everything that a prompt is made from, besides the question itself."""
        return f"{self.text}\0{self.answer}"

    def _ask(self, request: AdviceRequest) -> str:
        count = len(request.actions)
        zeros = ", ".join("0" * count)
        subgoals = "".join(f"\n- {name}" for name in request.subgoals) or " in a few words"
        values = {"count": count, "zeros": zeros, "subgoals": subgoals}
        return Template(self.answer).substitute(values)

    def render(self, request: AdviceRequest) -> Prompt:
        """Return the prompt for one question."""
        situation = request.description
        if request.mission and request.mission not in situation:
            situation = f"Mission: {request.mission}\n\n{situation}"
        values = {
            "situation": situation,
            "options": _options(request),
            "answer": self._ask(request),
            "mission": request.mission,
            "count": len(request.actions),
        }
        # The template is split, not the text: a description may hold dashes of its own.
        system, found, user = self.text.partition(_SEPARATOR)
        if not found:
            system, user = "", self.text
        parts = (Template(part).substitute(values).strip() for part in (system, user))
        return Prompt(*parts)


def _options(request: AdviceRequest) -> str:
    lines = []
    for index, action in enumerate(request.actions):
        letter = LABELS[index] if index < len(LABELS) else str(index)
        meaning = "".join(request.action_meanings[index : index + 1])
        lines.append(f"{letter}: {action}" + (f" ({meaning})" if meaning else ""))
    return "\n".join(lines)


def _packaged(name: str) -> str:
    return (files("lore_torchrl.advisors") / "prompts" / f"{name}.txt").read_text(encoding="utf-8")


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8") if name.endswith(".txt") else _packaged(name)
    except FileNotFoundError as err:
        raise ValueError(
            f"prompt={name!r}: no such file. Name one that comes with the package ('default') or "
            "give the path of your own, ending in '.txt'."
        ) from err
