from __future__ import annotations

import json
import math
import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lore_torchrl.advisors.errors import Usage
from lore_torchrl.service import AdviceStore, BudgetExceededError, CallBudget
from lore_torchrl.service.store import patience


@pytest.fixture(params=["memory", "store"])
def make(request, tmp_path):
    store = AdviceStore(tmp_path / "advice.sqlite") if request.param == "store" else None
    return lambda total=10, **config: CallBudget(total, store=store, **config)


def test_spends_and_settles(make):
    budget = make(5)
    budget.spend(2)
    budget.settle(Usage(prompt_tokens=10, completion_tokens=5, cost=0.25))
    budget.settle(Usage(prompt_tokens=1, cost=0.5))
    assert (budget.spent, budget.tokens, budget.cost) == (2, 16, 0.75)
    assert budget.remaining == 3
    with pytest.raises(BudgetExceededError, match="3 of 5 left"):
        budget.spend(4)
    assert budget.spent == 2


@pytest.mark.parametrize(
    ("limit", "usage"),
    [({"max_tokens": 100}, Usage(prompt_tokens=100)), ({"max_cost": 0.5}, Usage(cost=0.5))],
)
def test_is_used_up_by_tokens_or_money(make, limit, usage):
    budget = make(5, **limit)
    budget.spend()
    assert budget.remaining == 4
    budget.settle(usage)
    assert budget.remaining == 0
    assert budget.spend_up_to(1) == 0
    with pytest.raises(BudgetExceededError):
        budget.spend()
    budget.spend(0)


def test_takes_as_many_as_are_left(make):
    budget = make(3)
    assert [budget.spend_up_to(2) for _ in range(3)] == [2, 1, 0]
    with pytest.raises(ValueError, match="n=-1"):
        budget.spend_up_to(-1)


def test_strange_numbers_are_no_refund(make):
    budget = make(max_tokens=10**15)
    budget.settle(Usage(prompt_tokens=7, completion_tokens=-100, cost=1.0))
    for cost in (-5.0, math.nan, math.inf):
        budget.settle(Usage(cost=cost))
    assert (budget.tokens, budget.cost) == (7, 1.0)
    for _ in range(3):
        budget.settle(Usage(prompt_tokens=10**40))
    assert budget.spend_up_to(1) == 0


def test_state_survives_json(make):
    budget = make()
    budget.spend(4)
    budget.settle(Usage(prompt_tokens=3, cost=0.5))
    budget.refund(sent=True)
    restored = CallBudget(10)
    restored.load_state_dict(json.loads(json.dumps(budget.state_dict())))
    assert restored.state_dict() == budget.state_dict()
    assert restored.spent == 3


def test_calls_that_were_never_sent_are_given_back_without_limit(make):
    budget = make(2)
    for _ in range(5):
        assert budget.spend_up_to(9) == 2
        assert budget.refund(2) == 2
    assert budget.remaining == 2


def test_calls_that_failed_before_a_byte_was_taken_are_given_back_up_to_the_total(make):
    budget = make(3)
    given_back = []
    for _ in range(5):
        budget.spend()
        given_back.append(budget.refund(sent=True))
    assert given_back == [1, 1, 1, 0, 0]
    assert budget.spent == 2
    with pytest.raises(ValueError, match="n=-1"):
        budget.refund(-1)


def test_a_refund_that_finds_the_store_busy_is_entered_with_the_next_change(tmp_path):
    budget = CallBudget(5, store=AdviceStore(tmp_path / "advice.sqlite"))
    budget.spend(3)
    with sqlite3.connect(tmp_path / "advice.sqlite", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with patience(0.01):
            assert budget.refund(2) == 2
        assert (budget.remaining, budget.spent) == (4, 1)
        other.execute("ROLLBACK")
    budget.spend()
    assert CallBudget(5, store=AdviceStore(tmp_path / "advice.sqlite")).spent == 2


def test_the_store_is_the_truth_and_a_checkpoint_gives_nothing_back(tmp_path):
    store = AdviceStore(tmp_path / "advice.sqlite")
    budget = CallBudget(10, store=store)
    budget.spend(3)
    checkpoint = budget.state_dict()
    budget.spend(4)
    budget.settle(Usage(prompt_tokens=3))
    budget.load_state_dict(checkpoint)
    assert (budget.spent, budget.tokens) == (7, 3)
    elsewhere = CallBudget(10, store=AdviceStore(tmp_path / "lost.sqlite"))
    elsewhere.load_state_dict(checkpoint)
    assert elsewhere.spent == 3


def test_ledgers_of_one_store_are_apart(tmp_path):
    store = AdviceStore(tmp_path / "advice.sqlite")
    CallBudget(5, store=store, ledger="seed 1").spend(4)
    assert CallBudget(5, store=store, ledger="seed 2").remaining == 5
    assert CallBudget(3, store=store, ledger="seed 1").remaining == 0


@given(
    total=st.integers(0, 12),
    spends=st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(-3, 9))),
)
def test_no_sequence_overruns_calls_or_spends_after_the_last_token(total, spends):
    budget = CallBudget(total, max_tokens=20)
    taken = tokens = 0
    for n, partly, used in spends:
        left = 0 if tokens >= 20 else total - taken
        if partly:
            assert budget.spend_up_to(n) == min(n, left)
            taken += min(n, left)
        elif n > left:
            with pytest.raises(BudgetExceededError):
                budget.spend(n)
        else:
            budget.spend(n)
            taken += n
        budget.settle(Usage(prompt_tokens=used))
        tokens += max(0, used)
        assert (budget.spent, budget.tokens) == (taken, tokens)
        assert taken <= total
