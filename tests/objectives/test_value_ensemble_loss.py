from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from lore_torchrl.modules import ValueEnsemble
from lore_torchrl.objectives import ValueEnsembleLoss

S, D, K = 6, 4, 5


def build(**kwargs):
    return ValueEnsemble(S, D, **{"num_members": K, "hidden_dim": 16, **kwargs})


def batch(*shape):
    shape = shape or (4, 5)
    return TensorDict(
        state=torch.randn(*shape, S),
        belief=torch.randn(*shape, D),
        value_target=30 * torch.randn(*shape, 1),
        batch_size=shape,
    )


def test_formula_in_symlog_units():
    ensemble, td = build(), batch()
    found = ValueEnsembleLoss(ensemble)(td)
    target = td["value_target"].sign() * td["value_target"].abs().log1p()
    members = ensemble.predict(td["state"], td["belief"])
    errors = torch.stack([(member - target).square().mean() for member in members])
    torch.testing.assert_close(found["loss_value_ensemble"], errors.mean())
    variance = ensemble.variance(td["state"], td["belief"]).mean()
    torch.testing.assert_close(found["value_variance"], variance)


def test_rows_that_do_not_count():
    loss, td = ValueEnsembleLoss(build()), batch(8)
    valid = torch.tensor([True] * 5 + [False] * 3).unsqueeze(-1)
    target = td["value_target"].clone()
    target[5:] = float("nan")
    found = loss.terms(td, target, valid)
    expected = loss(td[:5])
    for name in ("loss_value_ensemble", "value_variance"):
        torch.testing.assert_close(found[name], expected[name])
    found["loss_value_ensemble"].backward()
    assert all(p.grad.isfinite().all() for p in loss.parameters())
    assert loss.terms(td, target, torch.zeros_like(valid))["loss_value_ensemble"] == 0


def test_a_target_that_is_no_number_does_not_count():
    loss, td = ValueEnsembleLoss(build()), batch(8)
    td["value_target"][5:] = torch.tensor([[float("nan")], [float("inf")], [-float("inf")]])
    expected = loss(td[:5])["loss_value_ensemble"]
    found = loss(td)["loss_value_ensemble"]
    torch.testing.assert_close(found, expected)
    found.backward()
    assert all(p.grad.isfinite().all() for p in loss.parameters())


def test_gradient_reaches_the_ensemble_alone():
    ensemble, td = build(), batch()
    entries = [td[key].requires_grad_() for key in ("state", "belief", "value_target")]
    found = ValueEnsembleLoss(ensemble)(td)
    assert not found["value_variance"].requires_grad
    found["loss_value_ensemble"].backward()
    assert all(x.grad is None for x in entries)
    for parameter in ensemble.parameters():
        assert parameter.grad.flatten(1).ne(0).any(-1).all()


def test_variance_falls_where_there_are_returns_and_stays_elsewhere():
    ensemble = build(hidden_dim=32)
    loss = ValueEnsembleLoss(ensemble)
    optimizer = torch.optim.Adam(ensemble.parameters(), 3e-3)
    seen, unseen = batch(128), batch(128)
    unseen["belief"] = unseen["belief"] + 4.0
    seen["value_target"] = 5 * seen["state"][:, :1]

    def measure(td):
        return ensemble.variance(td["state"], td["belief"]).mean().item()

    before = measure(seen), measure(unseen)
    for _ in range(300):
        optimizer.zero_grad()
        loss(seen)["loss_value_ensemble"].backward()
        optimizer.step()
    assert measure(seen) < 0.1 * before[0]
    assert measure(unseen) > 10 * measure(seen)
    predicted = ensemble.predict(seen["state"], seen["belief"]).mean(0)
    target = seen["value_target"].sign() * seen["value_target"].abs().log1p()
    assert (predicted - target).abs().mean() < 0.2


def test_keys():
    ensemble = build(state_key=("a", "s"))
    loss = ValueEnsembleLoss(ensemble)
    td = batch(3)
    moved = TensorDict(
        {("a", "s"): td["state"], "belief": td["belief"], "target": td["value_target"]}, [3]
    )
    loss.set_keys(value_target="target")
    assert loss.in_keys == [("a", "s"), "belief", "target"]
    found = loss(moved)
    assert sorted(found.keys()) == sorted(loss.out_keys)
    assert torch.equal(
        found["loss_value_ensemble"],
        loss.terms(moved, td["value_target"])["loss_value_ensemble"],
    )


def test_state_dict_roundtrip():
    loss, resumed = (ValueEnsembleLoss(build()) for _ in range(2))
    td = batch()
    wanted = loss(td)["loss_value_ensemble"]
    assert resumed(td)["loss_value_ensemble"] != wanted
    resumed.load_state_dict(loss.state_dict())
    assert torch.equal(resumed(td)["loss_value_ensemble"], wanted)


def test_compiles_whole():
    loss, td = ValueEnsembleLoss(build()), batch()

    def compute(state, belief, target):
        features = TensorDict({"state": state, "belief": belief}, state.shape[:-1])
        return loss.terms(features, target)["loss_value_ensemble"]

    arguments = (td["state"], td["belief"], td["value_target"])
    compiled = torch.compile(compute, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*arguments), compute(*arguments))


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"ValueEnsemble.*Linear"):
        ValueEnsembleLoss(torch.nn.Linear(2, 2))
    loss, td = ValueEnsembleLoss(build()), batch(4)
    with pytest.raises(ValueError, match=r"value_target.*\(4,\)"):
        loss.terms(td, td["value_target"].squeeze(-1))
    with pytest.raises(ValueError, match=r"valid.*\(4,\)"):
        loss.terms(td, td["value_target"], torch.ones(4).bool())
    for key in loss.in_keys:
        with pytest.raises(KeyError, match=key):
            loss(td.exclude(key))
