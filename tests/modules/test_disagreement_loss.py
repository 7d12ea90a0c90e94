from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lore_torchrl.modules import LatentDisagreement

S, D, A, K = 6, 4, 3, 5
N, T = 3, 7


def build(**kwargs):
    return LatentDisagreement(S, D, A, **{"num_members": K, "hidden_dim": 16, **kwargs})


def records(n=N, t=T, episodes=True):
    action = F.one_hot(torch.randint(A, (n, t)), A)
    is_init = (torch.rand(n, t, 1) < 0.3) if episodes else torch.zeros(n, t, 1).bool()
    return {
        "state": torch.randn(n, t, S),
        "belief": torch.randn(n, t, D),
        "action": torch.where(is_init, 0, action),
        "is_init": is_init,
    }


class TestLoss:
    def test_formula(self):
        ensemble, batch = build(), records()
        found = ensemble.loss(**batch)
        errors, spreads = [], []
        for n in range(N):
            for t in range(T - 1):
                if batch["is_init"][n, t + 1]:
                    continue
                out = ensemble.predict(
                    batch["state"][n, t], batch["belief"][n, t], batch["action"][n, t + 1].float()
                )
                target = batch["state"][n, t + 1]
                errors.append(0.5 * (out - target).square().sum(-1).mean())
                spreads.append((out - out.mean(0)).square().mean())
        assert 0 < len(errors) < N * (T - 1)
        torch.testing.assert_close(found["loss_disagreement"], torch.stack(errors).mean())
        torch.testing.assert_close(found["disagreement"], torch.stack(spreads).mean().detach())

    def test_alignment_of_the_action(self):
        """A world that an ensemble can learn only from the action of the record after."""
        torch.manual_seed(1)
        moves = torch.randn(A, S)
        action = F.one_hot(torch.randint(A, (64, 9)), A).float()
        state = torch.empty(64, 9, S)
        state[:, 0] = torch.randn(64, S)
        for t in range(8):
            # What is done at posterior t stands in record t + 1.
            state[:, t + 1] = 0.5 * state[:, t] + action[:, t + 1] @ moves
        batch = {
            "state": state,
            "belief": torch.zeros(64, 9, D),
            "is_init": torch.zeros(64, 9, 1).bool(),
        }

        def trained(shown):
            ensemble = build(hidden_dim=32)
            optimizer = torch.optim.Adam(ensemble.parameters(), 1e-2)
            for _ in range(120):
                optimizer.zero_grad()
                value = ensemble.loss(**batch, action=shown)["loss_disagreement"]
                value.backward()
                optimizer.step()
            return value.item()

        right, wrong = trained(action), trained(torch.roll(action, -1, 1))
        assert right < 0.1 < 1.0 < wrong

    @pytest.mark.parametrize("offset", [-1, 0, 1])
    def test_reads_only_what_belongs_to_the_pair(self, offset):
        """One pair counts: its action and its target are those of record t + 1."""
        ensemble = build()
        batch = records(n=1, t=6, episodes=False)
        batch["is_init"][:] = True
        batch["is_init"][0, 3] = False
        before = ensemble.loss(**batch)["loss_disagreement"]
        time = 3 + offset
        changes = {
            "action": offset == 0,
            "state": offset in (-1, 0),
            "belief": offset == -1,
        }
        for name, matters in changes.items():
            other = {**batch, name: batch[name].clone()}
            other[name][0, time] = other[name][0, time].roll(1, -1)
            changed = not torch.equal(ensemble.loss(**other)["loss_disagreement"], before)
            assert changed == matters, name

    def test_pairs_across_a_reset_are_left_out(self):
        ensemble, batch = build(), records(episodes=False)
        whole = ensemble.loss(**batch)
        cut = {**batch, "is_init": batch["is_init"].clone(), "state": batch["state"].clone()}
        cut["is_init"][:, 4] = True
        cut["state"][:, 4:] += 100.0
        left = {name: value[:, :4] for name, value in batch.items()}
        right = {name: value[:, 4:] for name, value in cut.items()}
        sums = [ensemble.loss(**x)["loss_disagreement"] * N * p for x, p in ((left, 3), (right, 2))]
        found = ensemble.loss(**cut)["loss_disagreement"]
        torch.testing.assert_close(found, sum(sums) / (N * 5))
        assert whole["loss_disagreement"] != found

    def test_first_record_of_a_sequence_may_begin_an_episode(self):
        ensemble, batch = build(), records(episodes=False)
        before = ensemble.loss(**batch)["loss_disagreement"]
        batch["is_init"][:, 0] = True
        assert torch.equal(ensemble.loss(**batch)["loss_disagreement"], before)

    @pytest.mark.parametrize("time", [1, 4])
    def test_zero_where_no_pair_counts(self, time):
        ensemble, batch = build(), records(t=time)
        batch["is_init"][:] = True
        found = ensemble.loss(**batch)
        assert found["loss_disagreement"] == 0 and found["disagreement"] == 0
        found["loss_disagreement"].backward()
        assert all(p.grad is None or p.grad.eq(0).all() for p in ensemble.parameters())


class TestGradient:
    def test_reaches_the_ensemble_alone(self):
        ensemble, batch = build(), records()
        batch["action"] = batch["action"].float()
        for name in ("state", "belief", "action"):
            batch[name].requires_grad_()
        found = ensemble.loss(**batch)
        assert not found["disagreement"].requires_grad
        found["loss_disagreement"].backward()
        assert all(batch[name].grad is None for name in ("state", "belief", "action"))
        for parameter in ensemble.parameters():
            # Every member learns.
            assert parameter.grad.flatten(1).ne(0).any(-1).all()

    def test_members_learn_for_themselves(self):
        """The gradient of a member is what it would be without the others."""
        ensemble, batch = build(), records()
        ensemble.loss(**batch)["loss_disagreement"].backward()
        weight = ensemble.network.layers[0].weight
        before = weight.grad[0].clone()
        with torch.no_grad():
            for parameter in ensemble.parameters():
                parameter[1:] *= 3.0
                parameter.grad = None
        ensemble.loss(**batch)["loss_disagreement"].backward()
        torch.testing.assert_close(weight.grad[0], before)
        assert not torch.allclose(weight.grad[1], before)


def test_latents_in_half_precision_are_learned_in_float32():
    batch = records()
    ensemble = build()
    half = {name: x.bfloat16() if x.is_floating_point() else x.clone() for name, x in batch.items()}
    found = ensemble.loss(**half)
    assert found["loss_disagreement"].dtype == torch.float32
    rounded = {name: x.float() if x.is_floating_point() else x for name, x in half.items()}
    torch.testing.assert_close(found, ensemble.loss(**rounded))


def test_continuous_actions_are_learned_where_they_were_taken():
    """A world moved by the action of the record after; only actions below zero are shown."""
    torch.manual_seed(1)
    action = -2 * torch.rand(64, 7, 1)
    state = torch.randn(64, 7, S)
    for t in range(6):
        state[:, t + 1] = 0.5 * state[:, t] + torch.sin(2 * action[:, t + 1])
    batch = {"state": state, "belief": torch.zeros(64, 7, D), "action": action}
    ensemble = LatentDisagreement(S, D, 1, hidden_dim=32)
    optimizer = torch.optim.Adam(ensemble.parameters(), 1e-2)
    for _ in range(120):
        optimizer.zero_grad()
        found = ensemble.loss(**batch, is_init=torch.zeros(64, 7, 1).bool())
        found["loss_disagreement"].backward()
        optimizer.step()
    shifted = ensemble.loss(**batch | {"action": action.roll(-1, 1)}, is_init=torch.zeros(64, 7, 1))
    assert found["loss_disagreement"] < 0.2 < 1.0 < shifted["loss_disagreement"]

    def spread(value):
        return ensemble.at(state[:, 3], batch["belief"][:, 3], torch.full((64, 1), value)).mean()

    assert spread(1.5) > 5 * spread(-1.0)


def test_disagreement_falls_where_there_is_data_and_stays_elsewhere():
    """Two regions of latent space and two actions; data from one region, action 0 only."""
    ensemble = build(hidden_dim=32)
    optimizer = torch.optim.Adam(ensemble.parameters(), 3e-3)

    def region(sign, n=64, t=5):
        state = F.one_hot(torch.randint(3, (n, t)) + (3 if sign > 0 else 0), S).float()
        return state, sign + 0.1 * torch.randn(n, t, D)

    def certain(a):
        return torch.log_softmax(50.0 * F.one_hot(torch.tensor(a), A).float(), -1).expand(64, 5, A)

    def measure(sign, a):
        torch.manual_seed(5)
        return ensemble.expected(*region(sign), certain(a)).mean().item()

    places = [(-1.0, 0), (1.0, 0), (-1.0, 1)]
    before = [measure(*place) for place in places]
    action = F.one_hot(torch.zeros(64, 5, dtype=torch.long), A)
    is_init = torch.zeros(64, 5, 1).bool()
    for step in range(250):
        torch.manual_seed(100 + step)
        state, belief = region(-1.0)
        # The next state is the present one, moved on by one place.
        for t in range(4):
            state[:, t + 1] = state[:, t].roll(1, -1) * (state[:, t, 2:3] == 0)
            state[:, t + 1, 0] += state[:, t, 2]
        optimizer.zero_grad()
        found = ensemble.loss(state, belief, action, is_init)
        found["loss_disagreement"].backward()
        optimizer.step()
    seen, elsewhere, other_action = (measure(*place) for place in places)
    assert seen < 0.05 * before[0]
    assert elsewhere > 5 * seen
    assert other_action > 5 * seen
    assert found["disagreement"].item() < 0.05 * before[0]


class TestModule:
    def test_compiles_whole(self):
        ensemble, batch = build(), records()

        def compute(**batch):
            return ensemble.loss(**batch)["loss_disagreement"]

        compiled = torch.compile(compute, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(**batch), compute(**batch))

    @pytest.mark.parametrize("name", ["state", "belief", "action", "is_init"])
    def test_wrong_shape(self, name):
        batch = records()
        batch[name] = torch.cat((batch[name], batch[name]), -1)
        with pytest.raises(ValueError, match=rf"{name} must be"):
            build().loss(**batch)
