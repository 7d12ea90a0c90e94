"""Parts that are built alone refuse what their settings refuse, by the same limits."""

from __future__ import annotations

import pytest

from lore_torchrl.service import (
    AdviceCache,
    AdviceService,
    CallBudget,
    CallPolicy,
    Cooldown,
    MacroBoundaries,
    Novelty,
    OutageBackoff,
    TDErrorSpike,
)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: AdviceCache(0), "cache_size=0"),
        (lambda: AdviceCache(ttl_steps=0), "ttl_steps=0"),
        (lambda: AdviceCache(answers_averaged=0), "answers_averaged=0"),
        (lambda: AdviceCache(averaging_visits=0), "averaging_visits=0"),
        (lambda: CallBudget(-1), "total=-1"),
        (lambda: CallBudget(5, max_tokens=0), "max_tokens=0"),
        (lambda: CallBudget(5, max_cost=float("nan")), "max_cost=nan"),
        (lambda: CallPolicy(CallBudget(5), min_beta=1.5), "min_beta=1.5"),
        (lambda: CallPolicy(CallBudget(5), calls_per_step=0), "calls_per_step=0"),
        (lambda: Cooldown(-1), "cooldown=-1"),
        (lambda: Cooldown(steps_after_success=-1), "cooldown_after_success=-1"),
        (lambda: MacroBoundaries(no_reward_steps=0), "no_reward_steps=0"),
        (lambda: MacroBoundaries(after_reset=False), "without a trigger"),
        (lambda: Novelty(1.0), "novelty=1.0"),
        (lambda: TDErrorSpike(1.0, 2.0), "td_spike_low=2.0"),
        (lambda: OutageBackoff(base_steps=0), "base_steps=0"),
        (lambda: OutageBackoff(max_free_steps=9000), "max_free_steps=9000"),
        (lambda: service(timeout_s=0.0), "timeout_s=0.0"),
        (lambda: service(timeout_s=float("nan")), "timeout_s=nan"),
        (lambda: service(max_in_flight=0), "max_in_flight=0"),
        (lambda: service(mode="later"), "mode='later'"),
    ],
)
def test_what_is_out_of_range_is_named(build, named):
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        build()


class Silent:
    async def advise(self, requests):
        return [None for _ in requests]


def service(**settings):
    return AdviceService(Silent(), budget=CallBudget(5), **settings)
