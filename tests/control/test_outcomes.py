from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from lore_torchrl.control import AdviceOutcomes, ConfidenceCalibrator

ACTIONS, N, T = 3, 5, 6
GAMMA, LMBDA = 0.9, 0.8


def critic():
    """The value is the first number of the state."""
    return TensorDictModule(
        lambda state: state[..., :1], in_keys=["state"], out_keys=["state_value"]
    )


def outcomes_of(calibrator=None) -> AdviceOutcomes:
    return AdviceOutcomes(calibrator, critic(), gamma=GAMMA, lmbda=LMBDA)


def sequences(seed=0):
    """Random sequences; one episode ends in the middle and a reset record follows."""
    torch.manual_seed(seed)
    flags = torch.zeros(N, T, 1, dtype=torch.bool)
    sample = TensorDict(
        {
            "action": torch.nn.functional.one_hot(torch.randint(ACTIONS, (N, T)), ACTIONS),
            "is_init": flags.clone(),
            "next": {
                "reward": torch.randn(N, T, 1),
                "done": flags.clone(),
                "terminated": flags.clone(),
            },
        },
        [N, T],
    )
    sample["next", "done"][1, 2] = sample["next", "terminated"][1, 2] = True
    sample["next", "done"][2, 3] = True  # cut off by a time limit
    sample["is_init"][1, 3] = sample["is_init"][2, 4] = True
    posterior = TensorDict({"state": torch.randn(N, T, 2)}, [N, T])
    return posterior, sample


def by_hand(posterior, sample, n, t):
    """Lambda return from posterior t on: what record t + 1 did comes next."""
    reward, done = sample["next", "reward"][n, t + 1], sample["next", "done"][n, t + 1]
    value = posterior["state"][n, t + 1, :1]
    if sample["next", "terminated"][n, t + 1]:
        return reward
    last = t + 2 >= T or bool(done)
    rest = value if last else (1 - LMBDA) * value + LMBDA * by_hand(posterior, sample, n, t + 1)
    return reward + GAMMA * rest


def test_returns_and_advantages_by_hand():
    posterior, sample = sequences()
    found = outcomes_of().evaluate(posterior, sample)
    for n in range(N):
        for t in range(T):
            taken = t + 1 < T and not sample["is_init"][n, t + 1]
            assert found.valid[n, t].item() == taken
            if taken:
                expected = by_hand(posterior, sample, n, t)
                torch.testing.assert_close(found.returns[n, t], expected)
                value = posterior["state"][n, t, :1]
                torch.testing.assert_close(found.advantage[n, t], expected - value)
            else:
                assert found.returns[n, t] == 0 and found.advantage[n, t] == 0


def judged(follows_are_better: float, calibrator, learnt=None):
    """Advice is followed in half of the states, which gains ``follows_are_better`` there."""
    posterior, sample = sequences(1)
    posterior["state"].zero_()
    sample["next", "done"].zero_()
    sample["next", "terminated"].zero_()
    sample["is_init"].zero_()
    followed = torch.rand(N, T) < 0.5
    advised = torch.randint(ACTIONS, (N, T))
    taken = torch.where(followed, advised, (advised + 1) % ACTIONS)
    # The action at posterior t is in record t + 1, and so is its reward.
    chosen = taken.unsqueeze(-1).roll(1, 1)
    reward = torch.where(followed, follows_are_better, 0.0).unsqueeze(-1)
    sample["next", "reward"] = reward.roll(1, 1)
    module = AdviceOutcomes(calibrator, critic(), gamma=0.0, lmbda=0.0)
    logits = 3.0 * torch.nn.functional.one_hot(advised, ACTIONS)
    confidence = torch.full((N, T, 1), 0.95)
    mask = torch.ones(N, T, 1, dtype=torch.bool)
    metrics = module.judge(
        module.evaluate(posterior, sample), chosen, logits, confidence, mask, learnt
    )
    return metrics, followed[:, :-1].float().mean()


@pytest.mark.parametrize(("gain", "reliability"), [(1.0, 1.0), (-1.0, 0.0), (0.0, 0.5)])
def test_reliability_is_how_often_following_beats_not_following(gain, reliability):
    calibrator = ConfidenceCalibrator(num_groups=2)
    metrics, share = judged(gain, calibrator)
    assert metrics["lore_reliability"] == reliability
    torch.testing.assert_close(metrics["lore_followed"], share * (T - 1) / T)
    assert calibrator.wins[0, -1] == reliability * calibrator.counts[0, -1]
    assert calibrator.counts[0, -1] > 0 and calibrator.counts[1].sum() == 0


def test_bad_advice_loses_all_trust_and_good_advice_none():
    for gain, trust in ((-1.0, 0.0), (1.0, 1.0)):
        calibrator = ConfidenceCalibrator(prior_strength=5.0)
        for _ in range(20):
            judged(gain, calibrator)
        assert calibrator.trust(torch.tensor([[0.95]])) == trust


def test_advice_of_the_network_is_judged_apart():
    calibrator = ConfidenceCalibrator(num_groups=2)
    learnt = torch.zeros(N, T, 1, dtype=torch.bool)
    learnt[: N // 2] = True
    judged(1.0, calibrator, learnt)
    assert (calibrator.counts.sum(1) > 0).all()


def test_nothing_is_learnt_where_every_step_followed():
    calibrator = ConfidenceCalibrator()
    posterior, sample = sequences(2)
    module = outcomes_of(calibrator)
    chosen = sample["action"].argmax(-1, keepdim=True)
    logits = 3.0 * sample["action"].roll(-1, 1).float()
    ones = torch.ones(N, T, 1)
    metrics = module.judge(module.evaluate(posterior, sample), chosen, logits, ones, ones.bool())
    assert metrics["lore_reliability"] == 0.5 and calibrator.counts.sum() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_advantage_that_is_not_finite_counts_on_neither_side(bad):
    posterior, sample = sequences(3)
    logits = 3.0 * torch.nn.functional.one_hot(torch.randint(ACTIONS, (N, T)), ACTIONS)
    chosen = sample["action"].argmax(-1, keepdim=True)
    followed = chosen.roll(-1, 1) == logits.argmax(-1, keepdim=True)
    module = outcomes_of()
    good = module.evaluate(posterior, sample)
    rows = torch.zeros_like(good.valid)
    for kind in (followed, ~followed):
        first = (good.valid & kind).nonzero()[0]
        rows[tuple(first)] = True
    found = []
    for outcomes in (
        good._replace(advantage=good.advantage.masked_fill(rows, bad)),
        good._replace(valid=good.valid & ~rows),
    ):
        module.calibrator = ConfidenceCalibrator()
        confidence = torch.full((N, T, 1), 0.95)
        metrics = module.judge(outcomes, chosen, logits, confidence, good.valid)
        found.append((*metrics.values(), module.calibrator.wins, module.calibrator.counts))
    assert found[1][-1].sum() == (good.valid & followed).sum() - 1
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_no_gradient_and_no_parameters():
    posterior, sample = sequences()
    posterior["state"].requires_grad_()
    module = outcomes_of(ConfidenceCalibrator())
    assert not module.evaluate(posterior, sample).returns.requires_grad
    assert not list(module.parameters())


@pytest.mark.parametrize("name", ["gamma", "lmbda"])
def test_impossible_settings_name_themselves(name):
    with pytest.raises(ValueError, match=name):
        AdviceOutcomes(None, critic(), **{name: 1.5})


def test_entries_of_other_names_are_found():
    posterior, sample = sequences()
    expected = outcomes_of().evaluate(posterior.clone(), sample)
    names = {"is_init_key": "first", "reward_key": "r", "done_key": "d", "terminated_key": "t"}
    renamed = sample.rename_key_("is_init", "first")
    for old, new in (("reward", "r"), ("done", "d"), ("terminated", "t")):
        renamed.rename_key_(("next", old), ("next", new))
    for found, value in zip(
        outcomes_of().evaluate(posterior, renamed, **names), expected, strict=True
    ):
        assert torch.equal(found, value)
