"""A server that goes away costs the advice of that time, hardly a call, and never the run."""

from __future__ import annotations

import pytest

pytest.importorskip("httpx")

from fault_server import FaultServer
from questions import step
from torchrl import logger as torchrl_logger

from lore_torchrl.advisors.chat import ChatAdvisor
from lore_torchrl.service import AdviceService, CallBudget, CallPolicy

ROWS = 4


def chat(url: str, **keywords) -> ChatAdvisor:
    settings = {"mode": "json", "deadline_s": 2.0, "backoff_s": (0.001, 0.002)}
    return ChatAdvisor("m", base_url=url, server="vllm", **(settings | keywords))


@pytest.fixture(params=["blocking", "async"])
def make_service(request):
    opened = []

    def make(url: str, budget: int = 98, store=None, **keywords) -> AdviceService:
        ledger = CallBudget(budget, store=store)
        policy = CallPolicy(ledger)
        advisor = chat(url, **keywords)
        service = AdviceService(advisor, budget=ledger, policy=policy, mode=request.param)
        opened.append(service)
        return service

    yield make
    for service in opened:
        service.close()


class Steps:
    """Vector steps in each of which every row meets a new situation."""

    def __init__(self, service: AdviceService) -> None:
        self.service = service
        self.count = 0

    def until_advice(self, limit: int) -> int | None:
        """Return the environment steps until an answer comes, ``None`` for none by ``limit``."""
        answered = self.service.stats()["answered"]
        for steps in range(ROWS, limit + 1, ROWS):
            self.count += 1
            keys = [f"{self.count}.{row}" for row in range(ROWS)]
            step(self.service, *keys)
            assert self.service.drain(5.0) == 0
            if self.service.stats()["answered"] > answered:
                return steps
        return None


def test_an_outage_at_the_start_and_one_in_the_middle_cost_no_call(make_service, monkeypatch):
    told = []
    monkeypatch.setattr(torchrl_logger, "warning", told.append)
    with FaultServer(after="refused") as server:
        service = make_service(server.url)
        steps = Steps(service)
        assert steps.until_advice(2_000) is None
        assert service.budget.spent == 0
        server.after = "fine"
        server.back()
        assert steps.until_advice(200) is not None
        server.away()
        assert steps.until_advice(2_000) is None
        server.back()
        assert steps.until_advice(200) is not None
    stats = service.stats()
    # The request that finds the kept connection closed may count as sent.
    assert service.budget.spent == stats["calls"] <= 3 and stats["lost"] <= 1
    assert stats["refunded"] > 10
    assert [line.split(" ")[1] for line in told] == ["stops", "is"] * 2


@pytest.mark.parametrize("fault", ["500", "stall", "html"])
def test_a_server_that_takes_calls_and_fails_gets_ever_fewer(make_service, fault):
    with FaultServer(random_of=(fault,)) as server:
        service = make_service(server.url, deadline_s=0.05, retries=0)
        assert Steps(service).until_advice(500) is None
    # Pauses of 32, 64, 128 and 256 steps, after up to three unreadable answers in a row.
    assert 4 <= service.budget.spent == service.stats()["lost"] <= 8


def test_what_waits_for_its_turn_in_vain_costs_nothing(make_service):
    with FaultServer() as server:
        service = make_service(server.url, requests_per_minute=1, deadline_s=0.3)
        steps = Steps(service)
        assert steps.until_advice(4) == 4
        assert steps.until_advice(12) is None
        assert service.budget.spent == server.total == 1
    assert service.errors == {"not_sent": 3} and not service.policy.outage.out
