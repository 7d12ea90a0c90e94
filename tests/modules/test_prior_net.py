from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from lore_torchrl.modules import PriorNet

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


def test_forward_writes_what_advise_returns():
    module = net()
    td = TensorDict(state=torch.randn(3, 4), belief=torch.randn(3, 2), batch_size=[3])
    logits, confidence = module.advise(td["state"], td["belief"])
    module(td)
    assert torch.equal(td["prior_net_logits"], logits)
    assert torch.equal(td["prior_net_confidence"], confidence)


def test_fill_uses_the_network_only_where_there_is_no_advice_and_it_is_sure():
    logits, confidence, mask = advisor()
    own = torch.randn(4, ACTIONS), torch.tensor([[0.9], [0.9], [0.9], [0.6]])
    filled = net(threshold=0.7).fill(own, logits, confidence, mask)
    assert filled.learnt.flatten().tolist() == [False, True, False, False]
    assert filled.mask.flatten().tolist() == [True, True, True, False]
    expected = torch.stack((logits[0], own[0][1], logits[2], logits[3]))
    assert torch.equal(filled.prior_logits, expected)
    assert torch.equal(filled.confidence[1], own[1][1])
    assert torch.equal(filled.confidence[0], confidence[0])


def test_what_stands_in_counts_by_its_own_confidence():
    state, belief = torch.randn(50, 4), torch.randn(50, 2)
    module = net(threshold=0.6)
    own_logits, own = module.advise(state, belief)
    logits, sure = module.stand_in(state, belief)
    assert torch.equal(logits, own_logits)
    assert torch.equal(sure, torch.where(own >= 0.6, own, 0.0))
    assert 0 < (sure > 0).sum() < 50


@pytest.mark.parametrize(("output", "value"), [(-1, "nan"), (0, "nan"), (0, "inf")])
def test_a_broken_network_does_not_stand_in(output, value):
    module = net(threshold=0.0)
    with torch.no_grad():
        module.network.model[-1].bias[output] = float(value)
    assert (module.stand_in(torch.randn(5, 4), torch.randn(5, 2))[1] == 0).all()


def test_logits_that_are_no_numbers_fill_nothing():
    logits, confidence, _ = advisor()
    own = torch.randn(4, ACTIONS), torch.full((4, 1), 0.9)
    own[0][1, 2], own[0][2, 0] = float("nan"), float("inf")
    filled = net().fill(own, logits, confidence, torch.zeros(4, 1, dtype=torch.bool))
    assert filled.learnt.flatten().tolist() == [True, False, False, True]
    assert torch.equal(filled.prior_logits[1:3], logits[1:3])


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
