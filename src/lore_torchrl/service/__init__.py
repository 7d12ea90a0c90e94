"""When and how an advisor is asked: cache, budget, call policy and the service over them."""

from __future__ import annotations

from lore_torchrl.service.budget import BudgetExceededError, CallBudget
from lore_torchrl.service.cache import AdviceCache
from lore_torchrl.service.policy import CallPolicy
from lore_torchrl.service.service import AdviceService, Query, Reply
from lore_torchrl.service.store import AdviceStore, StoreError
from lore_torchrl.service.triggers import (
    Cooldown,
    MacroBoundaries,
    Novelty,
    OutageBackoff,
    StepSignals,
    TDErrorSpike,
)

__all__ = [
    "AdviceCache",
    "AdviceService",
    "AdviceStore",
    "BudgetExceededError",
    "CallBudget",
    "CallPolicy",
    "Cooldown",
    "MacroBoundaries",
    "Novelty",
    "OutageBackoff",
    "Query",
    "Reply",
    "StepSignals",
    "StoreError",
    "TDErrorSpike",
]
