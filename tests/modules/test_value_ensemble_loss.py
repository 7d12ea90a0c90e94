from __future__ import annotations

import pytest
import torch

from lore_torchrl.modules import ValueEnsemble

S, D, K = 6, 4, 5


def build(**kwargs):
    return ValueEnsemble(S, D, **{"num_members": K, "hidden_dim": 16, **kwargs})


def batch(*shape):
    """Latent states and what they returned."""
    shape = shape or (4, 5)
    return torch.randn(*shape, S), torch.randn(*shape, D), 30 * torch.randn(*shape, 1)


def symlog(value):
    return value.sign() * value.abs().log1p()


def test_formula_in_symlog_units():
    ensemble, (state, belief, returns) = build(), batch()
    found = ensemble.loss(state, belief, returns)
    members = ensemble.predict(state, belief)
    errors = torch.stack([(member - symlog(returns)).square().mean() for member in members])
    torch.testing.assert_close(found["loss_value_ensemble"], errors.mean())
    variance = ensemble.variance(state, belief).mean()
    torch.testing.assert_close(found["value_variance"], variance)


def test_a_return_that_is_no_number_does_not_count():
    ensemble, (state, belief, returns) = build(), batch(8)
    returns[5:] = torch.tensor([[float("nan")], [float("inf")], [-float("inf")]])
    expected = ensemble.loss(state[:5], belief[:5], returns[:5])
    found = ensemble.loss(state, belief, returns)
    torch.testing.assert_close(found, expected)
    found["loss_value_ensemble"].backward()
    assert all(p.grad.isfinite().all() for p in ensemble.parameters())
    assert ensemble.loss(state, belief, returns * torch.nan)["loss_value_ensemble"] == 0


def test_gradient_reaches_the_ensemble_alone():
    ensemble, entries = build(), [value.requires_grad_() for value in batch()]
    found = ensemble.loss(*entries)
    assert not found["value_variance"].requires_grad
    found["loss_value_ensemble"].backward()
    assert all(x.grad is None for x in entries)
    for parameter in ensemble.parameters():
        assert parameter.grad.flatten(1).ne(0).any(-1).all()


def test_variance_falls_where_there_are_returns_and_stays_elsewhere():
    ensemble = build(hidden_dim=32)
    optimizer = torch.optim.Adam(ensemble.parameters(), 3e-3)
    (state, belief, _), (other, there, _) = batch(128), batch(128)
    returns = 5 * state[:, :1]

    def measure():
        places = (state, belief), (other, there + 4.0)
        return [ensemble.variance(*place).mean().item() for place in places]

    before = measure()
    for _ in range(300):
        optimizer.zero_grad()
        ensemble.loss(state, belief, returns)["loss_value_ensemble"].backward()
        optimizer.step()
    seen, unseen = measure()
    assert seen < 0.1 * before[0]
    assert unseen > 10 * seen
    predicted = ensemble.predict(state, belief).mean(0)
    assert (predicted - symlog(returns)).abs().mean() < 0.2


def test_compiles_whole():
    ensemble, arguments = build(), batch()

    def compute(*arguments):
        return ensemble.loss(*arguments)["loss_value_ensemble"]

    compiled = torch.compile(compute, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*arguments), compute(*arguments))


def test_returns_of_another_shape():
    state, belief, returns = batch(4)
    with pytest.raises(ValueError, match=r"returns must be \(4, 1\).*\(4,\)"):
        build().loss(state, belief, returns.squeeze(-1))
