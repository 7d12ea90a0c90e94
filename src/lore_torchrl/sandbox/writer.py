"""Asks a language model for a program, checks what it wrote, and asks again with what was wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from lore_torchrl.advisors.errors import AdviceError, Sending
from lore_torchrl.advisors.prompt import Prompt
from lore_torchrl.sandbox.checks import judged
from lore_torchrl.sandbox.program import Kind, Program, ProgramStore
from lore_torchrl.sandbox.sandbox import Sandbox
from lore_torchrl.service import CallBudget

if TYPE_CHECKING:
    # It needs the http extra.
    from lore_torchrl.advisors.chat import ChatAdvisor

# A block of code and its language, whatever that is: a fence that ends one must begin no other.
_BLOCK = re.compile(r"```[ \t]*(\w*)[^\n`]*\n(.*?)```", re.DOTALL)
_LONGEST_CODE = 20_000


def program_prompt(
    kind: Kind,
    *,
    env: str,
    mission: str,
    fields: Mapping[str, str],
    example: Mapping[str, Any],
    most_features: int = 8,
    code: str = "",
    problem: str = "",
) -> Prompt:
    """Return the question for a program.

    Args:
        kind: ``"features"``, ``"progress"`` or ``"subgoals"``.

    Keyword Args:
        env: Name of the environment.
        mission: The task in words.
        fields: The describer's ``program_fields``.
        example: What a program saw once.
        most_features: Entries of what it may return. Default: ``8``.
        code: On a retry, what was written before. Default: empty.
        problem: On a retry, the traceback or what was wrong. Default: empty.
    """
    text = files("lore_torchrl.advisors") / "prompts" / f"program.{kind}.txt"
    system, _, user = text.read_text(encoding="utf-8").partition("\n---\n")
    if problem:
        problem = (
            f"You wrote this before:\n```python\n{code}\n```\nIt did not work:\n{problem}\n\n"
            "Write it again without that fault.\n"
        )
    values = {
        "env": env,
        "mission": mission or "none given",
        "fields": "\n".join(f"- {name}: {meaning}" for name, meaning in fields.items()),
        "example": json.dumps(example),
        "most": most_features,
        "problem": problem,
    }
    return Prompt(*(Template(part).substitute(values).strip() for part in (system, user)))


def code_of(answer: str) -> str:
    """Return the program in an answer.

    It is the last block of Python, or of no language, that defines a function, else the last of
    them; all of the answer where there is none.
    """
    found = _BLOCK.findall(answer)
    blocks = [code for name, code in found if re.fullmatch("(?i)|py|python3?", name)]
    defining = [code for code in blocks if re.search(r"^[ \t]*def ", code, re.MULTILINE)]
    code = (defining or blocks or [answer])[-1].strip()[:_LONGEST_CODE]
    # JSON can hold half of a surrogate pair, which no file can.
    return code.encode(errors="replace").decode()


class ProgramWriter:
    """Asks a model for a program until one passes the checks.

    Every program goes to the store, those that failed too.

    Args:
        advisor: The model behind its server.
        store: Where programs are kept. Default: ``None``, nowhere.

    Keyword Args:
        budget: Ledger of calls, of which each attempt takes one. Default: ``None``, no limit.
        attempts: Questions for one program, at least 1. Default: ``3``.

    Raises:
        ValueError: If ``attempts`` is not positive.
    """

    def __init__(
        self,
        advisor: ChatAdvisor,
        store: ProgramStore | None = None,
        *,
        budget: CallBudget | None = None,
        attempts: int = 3,
    ) -> None:
        if attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {attempts}.")
        self.advisor, self.store, self.budget = advisor, store, budget
        self.attempts, self.sandbox = attempts, Sandbox()

    async def write(
        self,
        kind: Kind,
        *,
        env: str,
        mission: str,
        fields: Mapping[str, str],
        views: Sequence[Mapping[str, Any]],
        returns: Sequence[float] | None = None,
    ) -> Program:
        """Return an accepted program.

        Keyword arguments are as of :func:`program_prompt` and
        :func:`~lore_torchrl.sandbox.check_program`; the first view is the prompt's example.

        Raises:
            ProgramError: If the last attempt failed too, with what was wrong.
            AdviceError: If the server did not answer.
            BudgetExceededError: If no call is left.
            ValueError: If there are fewer than two ``views``.
        """
        if len(views) < 2:
            raise ValueError(f"A program is checked on at least 2 views, got {len(views)}.")
        errors: list[str] = []
        code = ""
        while True:
            prompt = program_prompt(
                kind,
                env=env,
                mission=mission,
                fields=fields,
                example=views[0],
                most_features=self.sandbox.limits.most_features,
                code=code,
                problem=errors[-1] if errors else "",
            )
            answer = await self._ask(prompt)
            code = code_of(answer)
            about = {"model": self.advisor.model, "env": env, "errors": tuple(errors)}
            about |= {"prompt": str(prompt), "answer": answer}
            program, failure = judged(
                Program(kind, code, **about), views, returns=returns, sandbox=self.sandbox
            )
            if self.store is not None:
                self.store.append(program)
            if failure is None:
                return program
            errors.append(str(failure))
            if len(errors) >= self.attempts:
                raise failure

    async def _ask(self, prompt: Prompt) -> str:
        if self.budget is not None:
            self.budget.spend()
        try:
            answer, usage = await self.advisor.complete(prompt)
        except AdviceError as error:
            if self.budget is not None:
                self.budget.settle(error.usage)
                if error.sending is not Sending.DONE:
                    self.budget.refund(sent=error.sending is Sending.TRIED)
            raise
        if self.budget is not None:
            self.budget.settle(usage)
        return answer
