from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lore_torchrl.service import BudgetExceededError, CallBudget


def test_spends_until_nothing_is_left():
    budget = CallBudget(2)
    budget.spend()
    budget.spend(1)
    assert budget.remaining == 0
    with pytest.raises(BudgetExceededError, match="0 of 2 left"):
        budget.spend()
    assert budget.spent == 2


@given(total=st.integers(0, 20), spends=st.lists(st.integers(0, 8)))
def test_is_never_overrun(total, spends):
    budget = CallBudget(total)
    taken = 0
    for n in spends:
        try:
            budget.spend(n)
        except BudgetExceededError:
            assert taken + n > total
        else:
            taken += n
        assert taken <= total
        assert budget.remaining == total - taken


def test_state_survives_json_and_a_smaller_total():
    budget = CallBudget(5)
    budget.spend(4)
    restored = CallBudget(3)
    restored.load_state_dict(json.loads(json.dumps(budget.state_dict())))
    assert restored.spent == 4 and restored.remaining == 0


@pytest.mark.parametrize("total", [-1, 1.5, True, None])
def test_rejects_what_is_no_number_of_calls(total):
    with pytest.raises(ValueError, match=f"total={total}"):
        CallBudget(total)


def test_rejects_refunds():
    with pytest.raises(ValueError, match="n=-1"):
        CallBudget(3).spend(-1)
