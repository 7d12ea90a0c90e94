from __future__ import annotations

import pytest
import torch

from lore_torchrl.modules import AdviceBatch, PriorNet

ACTIONS = 4


def net(**kwargs) -> PriorNet:
    torch.manual_seed(0)
    built = PriorNet(6, ACTIONS, num_cells=8, **kwargs)
    with torch.no_grad():
        built.network.model[-1].weight.normal_()
    return built


def advisor(n=4):
    return torch.randn(n, ACTIONS), torch.rand(n, 1), torch.tensor([[True], [False]] * (n // 2))


def test_a_new_network_has_no_opinion():
    logits, confidence = PriorNet(6, ACTIONS).advise(torch.randn(5, 4), torch.randn(5, 2))
    assert (logits == 0).all() and (confidence == 0.5).all()


def test_it_completes_only_where_there_is_no_advice_and_it_is_sure():
    given = AdviceBatch.clean(*advisor())
    own = torch.randn(4, ACTIONS), torch.tensor([[0.9], [0.9], [0.9], [0.6]])
    found = given.completed(net(threshold=0.7).usable(own))
    assert found.learned.flatten().tolist() == [False, True, False, False]
    assert found.valid.flatten().tolist() == [True, True, True, False]
    centered = own[0][1] - own[0][1].mean()
    zeros = torch.zeros(ACTIONS)
    expected = torch.stack((given.prior_logits[0], centered, given.prior_logits[2], zeros))
    torch.testing.assert_close(found.prior_logits, expected)
    weights = [given.weight[0], own[1][1], given.weight[2], torch.zeros(1)]
    assert torch.equal(found.weight, torch.stack(weights))


def test_a_row_of_the_advisor_that_cannot_be_used_is_completed():
    logits, confidence, mask = advisor()
    logits[0, 1] = float("nan")
    own = torch.randn(4, ACTIONS), torch.full((4, 1), 0.9)
    found = AdviceBatch.clean(logits, confidence, mask).completed(net().usable(own))
    assert found.learned.flatten().tolist() == [True, True, False, True]


def test_only_some_rows_of_it():
    own = torch.randn(4, ACTIONS), torch.full((4, 1), 0.9)
    found = AdviceBatch.clean(*advisor()).completed(net().usable(own))
    where = torch.tensor([[True], [True], [False], [False]])
    kept = found.only(where)
    assert torch.equal(kept.valid, where) and torch.equal(kept.learned, where & found.learned)
    assert torch.equal(kept.prior_logits[:2], found.prior_logits[:2])
    assert kept.prior_logits[2:].eq(0).all() and kept.weight[2:].eq(0).all()


def test_the_fallback_counts_by_its_own_confidence():
    state, belief = torch.randn(50, 4), torch.randn(50, 2)
    module = net(threshold=0.6)
    _, own = module.advise(state, belief)
    found = module.fallback(state, belief)
    assert torch.equal(found.weight, torch.where(own >= 0.6, own, 0.0))
    assert 0 < found.valid.sum() < 50


@pytest.mark.parametrize(("output", "value"), [(-1, "nan"), (0, "nan"), (0, "inf")])
def test_a_broken_network_is_no_fallback(output, value):
    module = net(threshold=0.0)
    with torch.no_grad():
        module.network.model[-1].bias[output] = float(value)
    assert (module.fallback(torch.randn(5, 4), torch.randn(5, 2)).weight == 0).all()


def test_logits_that_are_no_numbers_complete_nothing():
    own = torch.randn(4, ACTIONS), torch.full((4, 1), 0.9)
    own[0][1, 2], own[0][2, 0] = float("nan"), float("inf")
    logits, confidence, _ = advisor()
    nobody = AdviceBatch.clean(logits, confidence, torch.zeros(4, 1, dtype=torch.bool))
    found = nobody.completed(net().usable(own))
    assert found.learned.flatten().tolist() == [True, False, False, True]
    assert found.prior_logits[1:3].eq(0).all()


def test_advise_has_no_gradient_and_predict_has():
    module = net()
    latent = torch.randn(3, 4), torch.randn(3, 2)
    assert not module.advise(*latent)[0].requires_grad
    assert module.predict(*latent)[0].requires_grad


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"threshold": 1.5}, "threshold"), ({"depth": 0}, "depth"), ({"num_cells": 0}, "num_cells")],
)
def test_impossible_settings_name_themselves(kwargs, message):
    with pytest.raises(ValueError, match=message):
        PriorNet(6, ACTIONS, **kwargs)


def test_too_few_actions():
    with pytest.raises(ValueError, match="num_actions"):
        PriorNet(6, 1)
