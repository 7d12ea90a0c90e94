"""When and how an adviser is asked: cache, budget, call policy and the service over them."""

from __future__ import annotations

from lore_torchrl.service.budget import BudgetExceededError, CallBudget
from lore_torchrl.service.cache import AdviceCache
from lore_torchrl.service.policy import CallPolicy, Cooldown, MacroBoundaries
from lore_torchrl.service.service import AdviceService

__all__ = [
    "AdviceCache",
    "AdviceService",
    "BudgetExceededError",
    "CallBudget",
    "CallPolicy",
    "Cooldown",
    "MacroBoundaries",
]
