"""Who is asked: the protocol of advisors and describers, and the advisors themselves.

Advisors that need an extra are imported when they are named first.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lore_torchrl.advisors.base import Advice, AdviceRequest, Advisor, Describer
from lore_torchrl.advisors.errors import AdviceError, FatalAdviceError, Usage
from lore_torchrl.advisors.flawed import StaleAdvisor, TruncatedAdvisor, TurningAdvisor
from lore_torchrl.advisors.recorded import RecordedAdvisor, RecordingAdvisor
from lore_torchrl.advisors.scripted import ScriptedAdvisor

_LAZY = {"ChatAdvisor": "chat", "LocalAdvisor": "local"}

__all__ = [
    "Advice",
    "AdviceError",
    "AdviceRequest",
    "Advisor",
    "ChatAdvisor",
    "Describer",
    "FatalAdviceError",
    "LocalAdvisor",
    "RecordedAdvisor",
    "RecordingAdvisor",
    "ScriptedAdvisor",
    "StaleAdvisor",
    "TruncatedAdvisor",
    "TurningAdvisor",
    "Usage",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
