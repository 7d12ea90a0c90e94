"""A program that a language model wrote, and the file that keeps every one of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

Kind = Literal["features", "progress", "subgoals"]
#: The function that a program of each kind defines.
FUNCTIONS: dict[str, str] = {
    "features": "compute_features",
    "progress": "progress",
    "subgoals": "reached",
}
HAND_WRITTEN = "hand-written"


@dataclass(frozen=True)
class Program:
    """Code that defines ``compute_features(obs)``, ``progress(obs)`` or ``reached(obs)``.

    Args:
        kind: ``"features"``, ``"progress"`` or ``"subgoals"``.
        code: Source, run in a :class:`~lore_torchrl.sandbox.Sandbox` and nowhere else.
        model: Who wrote it; ``"hand-written"`` for the adapters' own. Default: that.
        env: Environment id that it was written for. Default: empty, for any.
        accepted: Whether it passed :func:`~lore_torchrl.sandbox.check_program`. Default: ``True``.
        errors: What was wrong with the attempts before it, oldest first. Default: none.
        checks: What :func:`~lore_torchrl.sandbox.check_program` measured. Default: nothing.
        prompt: The last question. Default: empty.
        answer: The answer that the code was taken from. Default: empty.

    Raises:
        ValueError: If the kind is unknown.
    """

    kind: str
    code: str
    model: str = HAND_WRITTEN
    env: str = ""
    accepted: bool = True
    errors: tuple[str, ...] = ()
    checks: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = ""
    answer: str = ""

    def __post_init__(self) -> None:
        if self.kind not in FUNCTIONS:
            raise ValueError(f"kind must be one of {', '.join(FUNCTIONS)}, got {self.kind!r}.")

    @property
    def code_id(self) -> str:
        """Version: the first 16 hexadecimal digits of the code's SHA-256."""
        return hashlib.sha256(self.code.encode(errors="replace")).hexdigest()[:16]

    @property
    def prompt_hash(self) -> str:
        """SHA-256 of the question, empty without one."""
        return hashlib.sha256(self.prompt.encode()).hexdigest() if self.prompt else ""

    @property
    def function(self) -> str:
        """Name of the function that the code defines."""
        return FUNCTIONS[self.kind]


def fits_name(name: object) -> bool:
    """Whether a feature or subgoal may be called so: 1 to 60 printable characters."""
    return isinstance(name, str) and 0 < len(name) <= 60 and name.isprintable()


def stable_number(*code_ids: str) -> int:
    """Return a positive 63-bit number of versions, the same in every process; 0 for none."""
    if not code_ids:
        return 0
    digest = hashlib.sha256("\0".join(code_ids).encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 1) or 1


class ProgramStore:
    """Programs in a file of JSON Lines, which is only ever appended to.

    A line holds the fields of a :class:`Program` and ``code_id``, ``prompt_hash`` and ``retries``.

    Args:
        path: The file; it need not exist yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def append(self, program: Program) -> None:
        """Add a program, accepted or not."""
        derived = {
            "code_id": program.code_id,
            "prompt_hash": program.prompt_hash,
            "retries": len(program.errors),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A line that was cut off, or saved without its end by an editor, stays on its own.
        before = self.path.read_bytes() if self.path.is_file() else b""
        cut = bool(before) and not before.endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * cut + json.dumps(derived | asdict(program)) + "\n")

    def read(self) -> list[Program]:
        """Return all programs, oldest first.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If a line holds no program, or its code is not that of its ``code_id``.
        """
        return [_read_line(self.path, n, text) for n, text in enumerate(self._lines(), 1) if text]

    def select(self, kind: Kind, env: str) -> list[Program]:
        """Return the accepted programs of a kind that were written for ``env`` or for any.

        Raises:
            FileNotFoundError: As :meth:`read`.
            ValueError: As there, or if there is none.
        """
        fit = [p for p in self.read() if p.accepted and p.kind == kind and p.env in ("", env)]
        # A program that was written again is kept once, where it was written first, with checks
        # where it has some.
        found: dict[str, Program] = {}
        for program in fit:
            if program.code_id not in found or (
                program.checks and not found[program.code_id].checks
            ):
                found[program.code_id] = program
        if not found:
            raise ValueError(
                f"{self.path} holds no accepted {kind} program for {env}: ask for one with "
                f"python examples/advise.py program={kind}, or set path=null."
            )
        return list(found.values())

    def _lines(self) -> list[str]:
        if not self.path.is_file():
            raise FileNotFoundError(
                f"{self.path}: there is no such file of programs. python examples/advise.py "
                "program=... save=FILE makes one; lore.KIND.path=null takes the adapter's own."
            )
        return self.path.read_text(encoding="utf-8").split("\n")


def _read_line(path: Path, number: int, text: str) -> Program:
    try:
        row = json.loads(text)
        known = {part.name for part in fields(Program)}
        program = Program(**{name: row[name] for name in known & set(row)})
        for name, value in asdict(program).items():
            form = {"accepted": bool, "checks": dict, "errors": (list, tuple)}.get(name, str)
            if not isinstance(value, form):
                raise TypeError(f"its {name} is a {type(value).__name__}")
        names, score = (program.checks.get(name) for name in ("names", "score"))
        if not (names is None or (type(names) is list and all(map(fits_name, names)))):
            raise TypeError("the names in its checks are no list of 1 to 60 printable characters")
        if not (score is None or (type(score) in (int, float) and -1.0 <= score <= 1.0)):
            raise TypeError("the score in its checks is no number from -1 to 1")
        if row.get("code_id", program.code_id) != program.code_id:
            raise ValueError("its code is not that of its code_id")
        program = replace(program, errors=tuple(program.errors))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged: line {number} holds no program ({error}). Remove that line, or "
            "restore the file."
        ) from None
    return program
