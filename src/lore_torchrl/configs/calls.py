"""Configuration of when and how the advisor is asked; documented in ``configs/lore``."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class CallsConfig:
    """When the advisor may be asked. Documented in ``configs/lore``."""

    mode: str = "blocking"
    max_in_flight: int = 16
    drain_s: float = 5.0
    timeout_s: float = 30.0
    budget: int = 200
    max_tokens: int | None = None
    max_cost: float | None = None
    calls_per_step: int = 1
    cooldown: int = 0
    cooldown_after_success: int = 0
    min_beta: float = 0.05
    always: bool = True
    after_reset: bool = True
    no_reward_steps: int | None = 50
    novelty: float | None = None
    td_spike: float | None = None
    td_spike_low: float = 1.0
    cache_size: int = 100_000
    ttl_steps: int | None = None
    coarse: bool = True
    coarse_votes: int | None = 5
    vote_visits: int = 8
    refute: bool = True
    radius: float | None = None
    latent_key: str = "observation"
    store: str | None = None
    ledger: str = "default"

    def __post_init__(self) -> None:
        self._require(self.mode in ("blocking", "async"), "mode", "choose blocking or async")
        for name in ("budget", "cooldown", "cooldown_after_success"):
            self._require(getattr(self, name) >= 0, name, "it must not be negative")
        drain = math.isfinite(self.drain_s) and self.drain_s >= 0
        self._require(drain, "drain_s", "it must be finite and not negative")
        for name in (
            "timeout_s",
            "max_in_flight",
            "calls_per_step",
            "cache_size",
            "vote_visits",
        ):
            self._require(getattr(self, name) > 0, name, "it must be positive")
        for name in (
            "max_tokens",
            "max_cost",
            "no_reward_steps",
            "td_spike",
            "ttl_steps",
            "radius",
            "coarse_votes",
        ):
            value = getattr(self, name)
            rule = "it must be positive, or null to switch it off"
            self._require(value is None or value > 0, name, rule)
        self._require(
            self.novelty is None or 0 <= self.novelty < 1,
            "novelty",
            "it must be at least 0 and below 1, or null to switch it off",
        )
        self._require(
            self.td_spike is None or self.td_spike_low < self.td_spike,
            "td_spike_low",
            f"it must be below td_spike={self.td_spike}",
        )
        for name in ("novelty", "td_spike"):
            rule = "with always=true every situation may be asked about already: set always=false"
            self._require(not self.always or getattr(self, name) is None, name, rule)
        self._require(
            self.coarse_votes is None or self.coarse,
            "coarse_votes",
            "there are no classes without coarse keys: set coarse_votes=null too, or coarse=true",
        )
        self._require(self.ledger != "", "ledger", "it needs a name")

    def _require(self, condition: bool, name: str, rule: str) -> None:
        if not condition:
            value = getattr(self, name)
            raise ValueError(f"lore.calls.{name}={value!r} is impossible: {rule}.")
