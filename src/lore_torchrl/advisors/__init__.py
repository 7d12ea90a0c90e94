"""Who is asked: the protocol of advisers and describers, and the embedded adviser."""

from __future__ import annotations

from lore_torchrl.advisors.base import Advice, AdviceError, AdviceRequest, Advisor, Describer
from lore_torchrl.advisors.scripted import ScriptedAdvisor

__all__ = ["Advice", "AdviceError", "AdviceRequest", "Advisor", "Describer", "ScriptedAdvisor"]
