from __future__ import annotations

import asyncio
import tracemalloc
from collections import Counter

import pytest

pytest.importorskip("httpx")

from fault_server import FAULTS, FaultServer

from lore_torchrl.advisors.base import Advice, AdviceRequest
from lore_torchrl.advisors.chat import ChatAdvisor

KINDS = {
    *("connection", "timeout", "rate_limited", "status_500", "status_503"),
    *("not_json", "malformed", "too_large", "not_finite", "empty"),
}


@pytest.mark.slow
def test_two_thousand_calls_with_every_fault():
    requests = [AdviceRequest(f"door {i}", ("left", "right"), f"{i}") for i in range(20)]

    async def ask_all(advisor: ChatAdvisor) -> Counter:
        outcomes: Counter = Counter()
        for _ in range(100):
            for answer in await advisor.advise(requests):
                outcomes["advice" if isinstance(answer, Advice) else answer.kind] += 1
        await advisor.aclose()
        return outcomes

    with FaultServer(random_of=("fine", "fine", *FAULTS), seed=7) as server:
        advisor = ChatAdvisor(
            "m",
            base_url=server.url,
            mode="json",
            server="vllm",
            deadline_s=1.0,
            retries=1,
            backoff_s=(0.01, 0.02),
        )
        tracemalloc.start()
        try:
            outcomes = asyncio.run(ask_all(advisor))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert sum(outcomes.values()) == 2000
        assert set(outcomes) <= {"advice", *KINDS}
        # 100 MB bodies and bombs of 100 MB came by the hundred.
        assert server.did["huge"] > 50
        assert peak < 150 << 20
