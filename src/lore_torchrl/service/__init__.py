"""When and how an advisor is asked: cache, budget, call policy and the service over them."""

from __future__ import annotations

from lore_torchrl.service.budget import BudgetExceededError, CallBudget
from lore_torchrl.service.cache import AdviceCache
from lore_torchrl.service.flight import Near, Reply
from lore_torchrl.service.pauses import Cooldown, OutagePause
from lore_torchrl.service.policy import CallPolicy
from lore_torchrl.service.service import AdviceService
from lore_torchrl.service.store import AdviceStore, StoreError
from lore_torchrl.service.triggers import MacroBoundaries, Novelty, TDErrorSpike

__all__ = [
    "AdviceCache",
    "AdviceService",
    "AdviceStore",
    "BudgetExceededError",
    "CallBudget",
    "CallPolicy",
    "Cooldown",
    "MacroBoundaries",
    "Near",
    "Novelty",
    "OutagePause",
    "Reply",
    "StoreError",
    "TDErrorSpike",
]
