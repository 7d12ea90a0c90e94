"""Programs that a language model wrote: checked, ranked, run in a sandbox, retired."""

from __future__ import annotations

from lore_torchrl.sandbox.bandit import ProgramBandit
from lore_torchrl.sandbox.checks import check_program, judged
from lore_torchrl.sandbox.program import Program, ProgramStore, stable_number
from lore_torchrl.sandbox.programs import ProgramSet, UsedProgram
from lore_torchrl.sandbox.ranking import discounted_returns, score
from lore_torchrl.sandbox.sandbox import Limits, ProgramError, Sandbox

__all__ = [
    "Limits",
    "Program",
    "ProgramBandit",
    "ProgramError",
    "ProgramSet",
    "ProgramStore",
    "Sandbox",
    "UsedProgram",
    "check_program",
    "discounted_returns",
    "judged",
    "score",
    "stable_number",
]
