from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch.nn import functional as F

from lore_torchrl.modules import UncertaintyGate, ValueEnsemble

S, D, K = 6, 4, 5


def build(**kwargs):
    return ValueEnsemble(S, D, **{"num_members": K, "hidden_dim": 16, **kwargs})


def latents(*shape):
    return torch.randn(*shape, S), torch.randn(*shape, D)


def one_member(network, k, x):
    for i, layer in enumerate(network.layers):
        x = F.linear(x if i == 0 else F.silu(x), layer.weight[k].T, layer.bias[k, 0])
    return x


@pytest.mark.parametrize("prior_scale", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_equals_its_members_one_by_one(prior_scale, shape):
    ensemble = build(prior_scale=prior_scale)
    state, belief = latents(*shape)
    x = torch.cat((state, belief), -1)
    members = []
    for k in range(K):
        member = one_member(ensemble.network, k, x)
        if prior_scale:
            member = member + prior_scale * one_member(ensemble.prior, k, x)
        members.append(member)
    members = torch.stack(members)
    assert members.shape == (K, *shape, 1)
    torch.testing.assert_close(ensemble.predict(state, belief), members)
    variance = (members - members.mean(0)).square().sum(0) / K
    torch.testing.assert_close(ensemble.variance(state, belief), variance)


def test_prior_functions_are_saved_but_never_learn():
    ensemble = build()
    learning = {name for name, _ in ensemble.named_parameters()}
    saved = set(ensemble.state_dict())
    assert len(learning) == 6
    assert saved - learning == {name.replace("network", "prior") for name in learning}
    ensemble.requires_grad_(True)
    before = ensemble.prior.layers[0].weight.clone()
    ensemble.predict(*latents(7)).square().mean().backward()
    torch.optim.SGD(ensemble.parameters(), 0.1).step()
    assert torch.equal(ensemble.prior.layers[0].weight, before)
    assert all(p.grad is not None and p.grad.ne(0).any() for p in ensemble.parameters())


def test_prior_scale_zero_builds_none():
    ensemble = build(prior_scale=0.0)
    assert ensemble.prior is None
    assert set(ensemble.state_dict()) == {name for name, _ in ensemble.named_parameters()}


def test_prior_functions_keep_members_apart_where_they_agree():
    # With every learning part equal, only the prior functions are left.
    ensemble = build()
    with torch.no_grad():
        for parameter in ensemble.parameters():
            parameter.zero_()
    arguments = latents(20)
    one = ensemble.variance(*arguments)
    assert (one > 1e-4).all()
    ensemble.prior_scale = 3.0
    torch.testing.assert_close(ensemble.variance(*arguments), 9 * one)


def test_no_graph_and_the_same_under_autocast():
    ensemble = build()
    state, belief = (x.requires_grad_() for x in latents(5))
    plain = ensemble.variance(state, belief)
    assert not plain.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ensemble.variance(state, belief), plain)


def test_compiles_whole():
    ensemble = build()
    arguments = latents(5)
    compiled = torch.compile(ensemble.variance, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*arguments), ensemble.variance(*arguments))


def test_writes_what_the_gate_reads():
    ensemble = build()
    gate = UncertaintyGate(value_source="ensemble", entropy_weight=0.0, value_weight=1.0).eval()
    gate.value_scale.scale.fill_(10.0)
    state, belief = latents(4)
    td = TensorDict(state=state, belief=belief, batch_size=[4])
    variance = ensemble(td)[gate.value_key]
    torch.testing.assert_close(variance, ensemble.variance(state, belief))
    found = gate.evaluate(torch.ones(4, 1), variance).uncertainty
    torch.testing.assert_close(found, variance / 10)


def test_state_dict_roundtrip():
    ensemble, resumed = build(), build()
    arguments = latents(4)
    wanted = ensemble.variance(*arguments)
    assert not torch.equal(resumed.variance(*arguments), wanted)
    resumed.load_state_dict(ensemble.state_dict())
    assert torch.equal(resumed.variance(*arguments), wanted)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"num_members": 1}, "num_members.*1"),
        ({"depth": 0}, "depth.*0"),
        ({"hidden_dim": 0}, "hidden_dim.*0"),
        ({"state_dim": 0}, "state_dim.*0"),
        ({"belief_dim": 0}, "belief_dim.*0"),
        ({"prior_scale": -1.0}, "prior_scale.*-1.0"),
        ({"prior_scale": float("inf")}, "prior_scale.*inf"),
        ({"prior_scale": float("nan")}, "prior_scale.*nan"),
    ],
)
def test_bad_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match):
        ValueEnsemble(**{"state_dim": S, "belief_dim": D, **kwargs})
