from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lore_torchrl.modules import LatentDisagreement

S, D, A, K = 6, 4, 3, 5


def build(**kwargs):
    return LatentDisagreement(S, D, A, **{"num_members": K, "hidden_dim": 16, **kwargs})


def latents(*shape):
    return torch.randn(*shape, S), torch.randn(*shape, D)


def log_probs(*shape):
    return torch.log_softmax(2 * torch.randn(*shape, A), -1)


def one_member(ensemble, k, x):
    """Run member ``k`` alone, layer by layer."""
    layers = list(ensemble.network.layers)
    for i, layer in enumerate(layers):
        x = F.linear(x if i == 0 else F.silu(x), layer.weight[k].T, layer.bias[k, 0])
    return x


def by_hand(ensemble, state, belief, log_p):
    """The formula, member by member and action by action."""
    total = torch.zeros(*state.shape[:-1], 1)
    for a in range(A):
        action = F.one_hot(torch.tensor(a), A).float().expand(*state.shape[:-1], A)
        x = torch.cat((state, belief, action), -1)
        out = torch.stack([one_member(ensemble, k, x) for k in range(K)])
        variance = (out - out.mean(0)).square().sum(0) / K
        total += log_p[..., a : a + 1].exp() * variance.mean(-1, keepdim=True)
    return total


class TestPredict:
    @pytest.mark.parametrize("depth", [1, 2, 3])
    @pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
    def test_equals_its_members_one_by_one(self, depth, shape):
        ensemble = build(depth=depth)
        state, belief = latents(*shape)
        action = F.one_hot(torch.randint(A, shape), A).float()
        out = ensemble.predict(state, belief, action)
        assert out.shape == (K, *shape, S)
        x = torch.cat((state, belief, action), -1)
        for k in range(K):
            torch.testing.assert_close(out[k], one_member(ensemble, k, x))

    def test_without_gradient_gives_the_same_and_keeps_its_input(self):
        ensemble = build()
        inputs = (*latents(2, 3), F.one_hot(torch.randint(A, (2, 3)), A).float())
        before = [value.clone() for value in inputs]
        with torch.no_grad():
            out = ensemble.predict(*inputs)
            x = torch.cat(inputs, -1)
            ensemble.network(x)
            again = ensemble.network(x)
        assert torch.equal(out, ensemble.predict(*inputs)) and torch.equal(out, again)
        assert all(map(torch.equal, inputs, before))

    def test_members_start_apart(self):
        ensemble = build()
        for layer in ensemble.network.layers:
            for tensor in (layer.weight, layer.bias):
                flat = tensor.detach().flatten(1)
                distance = torch.cdist(flat, flat) + torch.eye(K)
                assert (distance > 0.05).all()

    def test_batched_parameters(self):
        shapes = [tuple(p.shape) for p in build(hidden_dim=7).parameters()]
        sizes = [(S + D + A, 7), (7, 7), (7, S)]
        expected = [s for i, o in sizes for s in ((K, i, o), (K, 1, o))]
        assert shapes == expected


class TestDisagreement:
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
    def test_formula(self, depth, shape):
        ensemble = build(depth=depth)
        state, belief = latents(*shape)
        log_p = log_probs(*shape)
        found = ensemble.expected(state, belief, log_p)
        assert found.shape == (*shape, 1)
        torch.testing.assert_close(found, by_hand(ensemble, state, belief, log_p))

    def test_is_of_the_action_that_the_policy_takes(self):
        ensemble = build()
        state, belief = latents(4)
        spreads = []
        for a in range(A):
            action = F.one_hot(torch.full((4,), a), A).float()
            out = ensemble.predict(state, belief, action)
            spread = out.var(0, correction=0).mean(-1, keepdim=True)
            log_p = torch.log_softmax(100.0 * action, -1)
            torch.testing.assert_close(ensemble.expected(state, belief, log_p), spread)
            spreads.append(spread)
        assert (spreads[0] != spreads[1]).all()

    def test_zero_where_the_members_are_one(self):
        ensemble = build()
        with torch.no_grad():
            for parameter in ensemble.parameters():
                parameter.copy_(parameter[:1].expand_as(parameter))
        found = ensemble.expected(*latents(5), log_probs(5))
        assert found.abs().max() < 1e-10

    def test_an_action_that_is_never_taken_is_no_number(self):
        log_p = torch.tensor([[0.5, 0.5, 0.0]]).log()
        assert build().expected(*latents(1), log_p).isfinite().all()

    def test_no_graph(self):
        state, belief = (x.requires_grad_() for x in latents(3))
        found = build().expected(state, belief, log_probs(3).requires_grad_())
        assert not found.requires_grad

    def test_the_same_under_autocast(self):
        ensemble = build()
        state, belief = latents(5)
        log_p = log_probs(5)
        plain = ensemble.expected(state, belief, log_p)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = ensemble.expected(state, belief, log_p)
        assert torch.equal(plain, mixed)

    def test_compiles_whole(self):
        ensemble = build()
        arguments = (*latents(5), log_probs(5))
        compiled = torch.compile(ensemble.expected, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*arguments), ensemble.expected(*arguments))


class TestAt:
    """The disagreement about one given action, continuous or not."""

    @pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
    def test_formula_member_by_member(self, shape):
        ensemble, (state, belief) = build(), latents(*shape)
        action = torch.randn(*shape, A)
        x = torch.cat((state, belief, action), -1)
        out = torch.stack([one_member(ensemble, k, x) for k in range(K)])
        expected = (out - out.mean(0)).square().mean(0).mean(-1, keepdim=True)
        found = ensemble.at(state, belief, action)
        assert found.shape == (*shape, 1) and not found.requires_grad
        torch.testing.assert_close(found, expected)

    def test_the_same_under_autocast_and_compiled(self):
        ensemble, given = build(), (*latents(5), torch.randn(5, A))
        plain = ensemble.at(*given)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(ensemble.at(*given), plain)
        compiled = torch.compile(ensemble.at, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*given), plain)


def test_state_dict_roundtrip():
    ensemble, resumed = build(), build()
    arguments = (*latents(4), log_probs(4))
    wanted = ensemble.expected(*arguments)
    assert not torch.equal(resumed.expected(*arguments), wanted)
    resumed.load_state_dict(ensemble.state_dict())
    assert torch.equal(resumed.expected(*arguments), wanted)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"num_members": 1}, "num_members.*1"),
        ({"depth": 0}, "depth.*0"),
        ({"hidden_dim": 0}, "hidden_dim.*0"),
        ({"state_dim": 0}, "state_dim.*0"),
        ({"belief_dim": -1}, "belief_dim.*-1"),
        ({"num_actions": 0}, "num_actions.*0"),
    ],
)
def test_bad_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match):
        LatentDisagreement(**{"state_dim": S, "belief_dim": D, "num_actions": A, **kwargs})
