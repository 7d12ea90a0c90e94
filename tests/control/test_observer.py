from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from lore_torchrl import keys
from lore_torchrl.control import AdviceBandit, AdviceObserver

ENVS, STEPS = 2, 4


class Told(AdviceBandit):
    """A bandit that notes the segments it is shown and how often it is renewed."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.told, self.renewals = [], 0

    def observe(self, advised, segment_return, ended):
        super().observe(advised, segment_return, ended)
        for env, step in ended.nonzero().tolist():
            self.told.append((env, advised[env, step].item(), segment_return[env, step].item()))

    def renew(self):
        super().renew()
        self.renewals += 1


def batch(*, reward=1.0, done=(), first_step=1, coefficient=1.0, kl=0.5) -> TensorDict:
    """Steps of two environments; ``done`` lists (environment, step)."""
    steps = torch.arange(first_step, first_step + STEPS).expand(ENVS, -1).unsqueeze(-1)
    ends = torch.zeros(ENVS, STEPS, 1, dtype=torch.bool)
    for env, step in done:
        ends[env, step] = True

    def column(value):
        return torch.as_tensor(value).float().expand(ENVS, STEPS).unsqueeze(-1)

    return TensorDict(
        {
            keys.COEFFICIENT: column(coefficient),
            keys.KL: column(kl),
            "next": {"reward": column(reward), "done": ends, "step_count": steps.clone()},
        },
        [ENVS, STEPS],
    )


def test_an_episode_over_several_batches_is_one_segment():
    bandit = Told(segment_steps=None)
    control = AdviceObserver(bandit)
    control(batch(reward=[1.0, 2.0, 3.0, 4.0]))
    assert bandit.told == []
    control(batch(reward=[5.0, 6.0, 7.0, 8.0], first_step=5, done=[(0, 1)]))
    assert bandit.told == [(0, True, 21.0)]
    control(batch(reward=-1.0, first_step=9, done=[(0, 0), (1, 3)]))
    assert bandit.told[1:] == [(0, True, 7 + 8 - 1.0), (1, True, 36 - 4.0)]


def test_what_a_reset_cut_off_counts_for_no_other_episode():
    bandit = Told(segment_steps=None)
    control = AdviceObserver(bandit)
    control(batch(reward=1.0))
    control(batch(reward=0.0, done=[(0, 3), (1, 3)]))
    assert [earned for *_, earned in bandit.told] == [0.0, 0.0]
    control(batch(reward=1.0))
    control.load_state_dict(control.state_dict())
    control(batch(reward=0.0, first_step=5, done=[(0, 0)]))
    assert bandit.told[2:] == [(0, True, 0.0)]


def test_a_segment_ends_in_the_middle_of_an_episode_and_with_it():
    bandit = Told(segment_steps=3)
    control = AdviceObserver(bandit)
    control(batch(reward=[1.0, 2.0, 3.0, 4.0], done=[(1, 3)]))
    assert bandit.told == [(0, True, 6.0), (1, True, 6.0), (1, True, 4.0)]
    control(batch(reward=[5.0, 6.0, 7.0, 8.0], first_step=5))
    assert bandit.told[3:] == [(0, True, 4 + 5 + 6.0), (1, True, 5 + 6.0)]


def test_the_coefficient_is_that_of_the_segment():
    bandit = Told(segment_steps=2)
    AdviceObserver(bandit)(batch(coefficient=[0.0, 0.0, 1.0, 1.0]))
    assert bandit.told == [(env, advised, 2.0) for env in (0, 1) for advised in (False, True)]


@pytest.mark.parametrize(("kl", "advised"), [(0.02, True), (0.005, False)])
def test_advice_that_moved_nothing_counts_as_unadvised(kl, advised):
    """An agent that is sure shuts its gate: its returns are its own."""
    bandit = AdviceBandit()
    AdviceObserver(bandit)(batch(kl=kl, done=[(0, 3), (1, 3)]))
    assert bandit.advised_segments == 2 * advised
    assert bandit.baseline_count == 2 * (not advised)


def test_what_moved_is_a_matter_of_the_whole_segment():
    bandit = Told(segment_steps=None)
    control = AdviceObserver(bandit)
    control(batch(kl=0.03))
    control(batch(kl=0.0, first_step=5, done=[(0, 0)]))
    # 0.12 nats over 5 steps, and over 16.
    for first_step in (9, 13):
        control(batch(kl=0.0, first_step=first_step, done=[(1, 3)] if first_step == 13 else []))
    assert [advised for _, advised, _ in bandit.told] == [True, False]


def test_renewed_once_when_the_calls_are_used_up():
    bandit, left = Told(), [5]
    control = AdviceObserver(bandit, exhausted=lambda: left[0] == 0)
    renewals = []
    # A run that was resumed with more calls can use them up again.
    for remaining in (5, 3, 0, 0, 4, 0, 0):
        left[0] = remaining
        bandit.log_odds.fill_(-2.0)
        control(batch())
        renewals.append(bandit.renewals)
    assert renewals == [0, 0, 1, 1, 1, 2, 2]
    assert bandit.probability().item() == pytest.approx(1 / (1 + math.exp(2)))
    other = AdviceObserver(bandit, exhausted=lambda: True)
    other.load_state_dict(control.state_dict())
    other(batch())
    assert bandit.renewals == 2, "what was saved was renewed"


def test_a_renewed_bandit_advises_every_other_segment_at_least():
    bandit = AdviceBandit()
    bandit.log_odds.fill_(-2.0)
    AdviceObserver(bandit, exhausted=lambda: True)(batch())
    assert bandit.probability().item() == 0.5


def test_steps_that_prior_net_served_are_counted():
    control = AdviceObserver(None)
    origins = torch.tensor([[0, 1, 2, 2], [2, 0, 0, 1]]).unsqueeze(-1)
    for _ in range(2):
        control(TensorDict({keys.ORIGIN: origins}, [ENVS, STEPS]))
    assert control.stats() == {"prior_net/served": 6.0}
    other = AdviceObserver(None)
    other.load_state_dict(control.state_dict())
    assert other.stats() == control.stats()


def test_gauges_show_the_bandit():
    bandit = AdviceBandit()
    control = AdviceObserver(bandit)
    control(batch(done=[(0, 3)]))
    shown = {f"bandit/{name}": value for name, value in bandit.stats().items()}
    assert control.stats() == shown | {"prior_net/served": 0.0}
    assert shown["bandit/advised_segments"] == 1.0
