from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from test_disagreement import one_member

from lore_torchrl.modules import Gaussian, GaussianDisagreement

S, D, A, K = 6, 4, 2, 5
LOW, HIGH = torch.tensor([-2.0, -1.0]), torch.tensor([2.0, 3.0])


def build(bounds=(LOW, HIGH), **kwargs):
    return GaussianDisagreement(
        S, D, A, bounds=bounds, **{"num_members": K, "hidden_dim": 16, **kwargs}
    )


def inputs(*shape):
    policy = Gaussian(2 * torch.randn(*shape, A), torch.rand(*shape, A) + 0.1)
    return torch.randn(*shape, S), torch.randn(*shape, D), policy


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_formula_member_by_member(bounded, shape):
    ensemble = build((LOW, HIGH) if bounded else None)
    state, belief, policy = inputs(*shape)
    action = policy.loc
    if bounded:
        action = (LOW + HIGH) / 2 + (HIGH - LOW) / 2 * torch.tanh(action)
    x = torch.cat((state, belief, action), -1)
    out = torch.stack([one_member(ensemble, k, x) for k in range(K)])
    expected = (out - out.mean(0)).square().mean(0).mean(-1, keepdim=True)
    found = ensemble.disagreement(state, belief, policy)
    assert found.shape == (*shape, 1) and not found.requires_grad
    torch.testing.assert_close(found, expected)


def test_it_is_of_the_location_and_draws_nothing():
    ensemble, (state, belief, policy) = build(), inputs(8)
    before = torch.get_rng_state()
    found = ensemble.disagreement(state, belief, policy)
    wider = ensemble.disagreement(state, belief, policy._replace(scale=3 * policy.scale))
    moved = ensemble.disagreement(state, belief, policy._replace(loc=-policy.loc))
    assert torch.equal(found, wider) and (found != moved).all()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_under_autocast_and_compiled():
    ensemble, given = build(), inputs(5)
    plain = ensemble.disagreement(*given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ensemble.disagreement(*given), plain)
    compiled = torch.compile(ensemble.disagreement, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*given), plain)


def test_module_and_state_dict():
    ensemble = build(state_key=("agent", "s"), belief_key="h", loc_key="l", out_key="dis")
    assert ensemble.in_keys == [("agent", "s"), "h", "l"]
    state, belief, policy = inputs(2, 3)
    td = TensorDict(agent={"s": state}, h=belief, l=policy.loc, batch_size=[2, 3])
    assert ensemble(td) is td
    resumed = build((LOW - 1, HIGH))
    resumed.load_state_dict(ensemble.state_dict())
    assert torch.equal(td["dis"], resumed.disagreement(state, belief, policy))


def test_one_dimension_and_bounds_in_order():
    assert GaussianDisagreement(S, D, 1, bounds=(-2.0, 2.0)).low.tolist() == [-2.0]
    with pytest.raises(ValueError, match="bounds must be in order"):
        build((HIGH, LOW))
    with pytest.raises(ValueError, match="num_actions must be at least 1, got 0"):
        GaussianDisagreement(S, D, 0)
