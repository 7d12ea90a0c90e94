from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import Bounded, Composite, OneHot, Unbounded
from torchrl.envs import Compose, EnvBase, InitTracker, SerialEnv, StepCounter, TransformedEnv

from lore_torchrl import keys
from lore_torchrl.configs import LoReConfig
from lore_torchrl.control import AdviceBandit
from lore_torchrl.lore import build_bandit

SEEDS = range(6)
MISS = math.log(1 - 0.5)


def tell(bandit, advised, *returns):
    """Show a bandit segments that have ended, one after the other."""
    for value in returns:
        bandit.observe(torch.tensor([advised]), torch.tensor([value]), torch.tensor([True]))


def draw(bandit, count, start=True, step=0, carried=0.0):
    """Return the coefficients that a bandit writes for so many environments, ``[count]``."""
    column = torch.ones(count, 1)
    td = TensorDict(is_init=column.bool() & start, step_count=column.long() * step)
    td = td.set(keys.COEFFICIENT, column * carried).auto_batch_size_(1)
    written = bandit(td)
    assert torch.equal(written["next", keys.COEFFICIENT], written[keys.COEFFICIENT])
    return written[keys.COEFFICIENT].squeeze(-1)


def play(bandit, segments, alone, advised, num=4):
    """Play segments of ``num`` environments that return 1 with these chances, else 0."""
    for _ in range(segments // num):
        acts = draw(bandit, num) > 0
        chance = torch.where(acts, advised, alone)
        bandit.observe(acts, torch.bernoulli(chance), torch.ones(num, dtype=torch.bool))
    return bandit.probability().item()


def of_a_run(seed):
    """The bandit that a run has by default, and returns that have nothing to do with its draws."""
    torch.manual_seed(seed + 1000)
    return build_bandit(LoReConfig(), seed=seed)


def odds(bandit):
    return bandit.log_odds.exp().item()


def same(one, other, *, but=()):
    state = other.state_dict()
    return all(
        torch.equal(x, state[name]) for name, x in one.state_dict().items() if name not in but
    )


class TestUpdate:
    def test_by_hand(self):
        bandit = AdviceBandit(gain=0.5, floor=0.1, decay=0.5)
        assert odds(bandit) == pytest.approx(0.8 / 0.2)
        assert bandit.baseline().item() == pytest.approx(0.05)
        tell(bandit, False, 1.0)
        assert bandit.baseline().item() == pytest.approx((1 + 0.05) / 2)
        assert odds(bandit) == pytest.approx(4)
        # b = 0.525: a hit is worth 1 + 0.5 * 0.475 / 0.525 = 1.452381, a miss one half.
        tell(bandit, True, 0.5)
        assert odds(bandit) == pytest.approx(4 * math.sqrt(1.452381 * 0.5), rel=1e-5)
        # What was unadvised counts half: a sum of 0.5 over 1.5, and the 0.05 that counts as one.
        tell(bandit, False, 0.0)
        assert bandit.baseline().item() == pytest.approx(0.55 / 2.5)
        tell(bandit, True, 0.0, 1.0)
        # A miss and a hit: 1 + 0.5 * 0.78 / 0.22 = 2.772727.
        expected = 4 * math.sqrt(1.452381 * 0.5) * 0.5 * 2.772727
        assert odds(bandit) == pytest.approx(expected, rel=1e-5)
        assert bandit.advised_segments == 3

    def test_the_rows_of_a_call_are_simultaneous(self):
        bandit = AdviceBandit(gain=0.5, decay=0.5)
        bandit.log_odds.zero_()
        rows = torch.tensor([[False, True, False], [True, False, True]])
        returns = torch.tensor([[1.0, 1.0, 0.5], [0.0, 0.0, 9.0]])
        ended = torch.tensor([[True, True, True], [True, True, False]])
        bandit.observe(rows.unsqueeze(-1), returns.unsqueeze(-1), ended.unsqueeze(-1))
        # Compared with what was known before: b = 0.05, a hit is worth 1 + 0.5 * 19.
        assert odds(bandit) == pytest.approx(10.5 * 0.5, rel=1e-5)
        assert bandit.baseline().item() == pytest.approx((1.5 + 0.05) / 4)

    @pytest.mark.parametrize(
        "seen",
        [[], [(False, 0.0)] * 9, [(False, 1.0)] * 9, [(False, -3.0), (True, -1.0), (False, 2.0)]],
    )
    def test_a_miss_costs_the_same_whatever_others_returned(self, seen):
        bandit = AdviceBandit()
        for advised, value in seen:
            tell(bandit, advised, value)
        bandit.log_odds.fill_(1.0)
        tell(bandit, True, bandit.low.item())
        assert bandit.log_odds.item() == pytest.approx(1.0 + MISS)

    def test_floor_and_ceiling(self):
        bandit = AdviceBandit(floor=0.02)
        tell(bandit, True, *[1.0] * 50)
        assert bandit.probability().item() == pytest.approx(0.98)
        tell(bandit, True, *[0.0] * 50)
        assert bandit.probability().item() == pytest.approx(0.02)
        # What was too much is not remembered: one hit, worth 1 + 0.5 * 19, is seen at once.
        tell(bandit, True, 1.0)
        assert odds(bandit) == pytest.approx(10.5 * 0.02 / 0.98, rel=1e-5)

    def test_the_baseline_forgets_and_advised_segments_leave_it_alone(self):
        bandit = AdviceBandit(decay=0.9)
        tell(bandit, False, *[1.0] * 200)
        assert bandit.baseline_count.item() == pytest.approx(10, rel=1e-5)
        assert bandit.baseline().item() == pytest.approx((10 + 0.05) / 11, rel=1e-5)
        tell(bandit, False, *[0.0] * 10)
        expected = (10 * 0.9**10 + 0.05) / 11
        assert bandit.baseline().item() == pytest.approx(expected, rel=1e-4)
        tell(bandit, True, *[1.0] * 10)
        assert bandit.baseline().item() == pytest.approx(expected, rel=1e-4)

    def test_the_baseline_keeps_off_0_and_1(self):
        bandit = AdviceBandit(decay=1.0)
        tell(bandit, False, *[1.0] * 40)
        assert bandit.baseline().item() == pytest.approx(0.95)
        bandit = AdviceBandit(decay=1.0)
        tell(bandit, False, 1.0, *[0.0] * 99)
        assert bandit.baseline().item() == pytest.approx(0.05)

    def test_negative_returns(self):
        bandit = AdviceBandit(gain=0.5)
        tell(bandit, False, -10.0)
        bandit.log_odds.zero_()
        # From -10 to 0, which is always part of the span: r = 0.8 beside b = 0.05.
        tell(bandit, True, -2.0)
        assert odds(bandit) == pytest.approx(10.5**0.8 * 0.5**0.2, rel=1e-5)
        # The span grows, and with it what unadvised segments have returned.
        tell(bandit, True, -20.0)
        assert bandit.baseline().item() == pytest.approx((0.5 + 0.05) / 2)

    def test_what_is_not_finite_is_counted_and_left_out(self):
        bandit, clean = AdviceBandit(), AdviceBandit()
        broken = [math.nan, math.inf, -math.inf, 2e30]
        for each, extra in ((bandit, broken), (clean, [])):
            tell(each, True, *extra, 0.25)
            tell(each, False, *extra, 1.0)
        assert bandit.ignored == 8 and bandit.stats()["ignored"] == 8
        assert same(bandit, clean, but=("ignored",))

    def test_rows_that_have_not_ended_are_left_out(self):
        bandit, before = AdviceBandit(), AdviceBandit()
        for each in (bandit, before):
            tell(each, False, 0.5)
        advised = torch.tensor([True, False, True])
        bandit.observe(advised, torch.tensor([9.0, -9.0, math.nan]), torch.zeros(3).bool())
        assert same(bandit, before)

    def test_renew(self):
        bandit = AdviceBandit()
        bandit.renew()
        assert bandit.probability().item() == pytest.approx(0.9)
        tell(bandit, True, *[0.0] * 50)
        bandit.renew()
        assert bandit.probability().item() == 0.5


class TestDraw:
    def test_as_often_as_the_probability_says(self):
        bandit = AdviceBandit()
        bandit.log_odds.fill_(math.log(0.3 / 0.7))
        drawn = draw(bandit, 20_000)
        assert set(drawn.tolist()) == {0.0, 1.0}
        assert drawn.mean().item() == pytest.approx(0.3, abs=0.01)

    def test_from_a_stream_of_its_own(self):
        drawn, state = [], torch.get_rng_state()
        for seed in (1, 1, 2):
            bandit = AdviceBandit(seed=seed)
            drawn.append(torch.stack([draw(bandit, 100) for _ in range(2)]))
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
        assert not torch.equal(drawn[0][0], drawn[0][1])

    @pytest.mark.parametrize("segment_steps", [3, None])
    def test_held_for_a_segment(self, segment_steps):
        bandit = AdviceBandit(segment_steps=segment_steps)
        bandit.log_odds.zero_()
        td = rollout(bandit, 70)
        begins, held = td["is_init"].clone(), td[keys.COEFFICIENT]
        if segment_steps:
            begins |= td["step_count"] % segment_steps == 0
        assert begins.sum() == (70 // 7 * 3 + 70 // 5 * 2 if segment_steps else 10 + 14)
        changed = held[:, 1:] != held[:, :-1]
        assert not changed[~begins[:, 1:]].any()
        assert 4 < changed[begins[:, 1:]].sum() < begins.sum() - 4
        assert torch.equal(td["next", keys.COEFFICIENT], held)
        # The bandit is told of the same segments.
        ends = bandit.ends(td["next", "done"], td["next", "step_count"])
        assert torch.equal(ends[:, :-1], begins[:, 1:])

    def test_evaluation_keeps_what_is_carried(self):
        bandit = AdviceBandit().eval()
        before = bandit.get_extra_state()
        for carried in (0.0, 0.5, 1.0):
            assert draw(bandit, 50, carried=carried).tolist() == [carried] * 50
        assert torch.equal(bandit.get_extra_state(), before)
        assert (rollout(bandit, 10)[keys.COEFFICIENT] == 0).all()

    def test_a_restored_bandit_goes_on_identically(self):
        first = of_a_run(3)
        play(first, 40, 0.3, 0.6)
        second = build_bandit(LoReConfig(), seed=4)
        second.load_state_dict(first.state_dict())
        for bandit in (first, second):
            torch.manual_seed(5)
            play(bandit, 40, 0.3, 0.6)
        assert same(first, second)
        assert torch.equal(draw(first, 100), draw(second, 100))

    def test_on_the_meta_device_it_still_has_a_state(self):
        bandit = AdviceBandit()
        draw(bandit, 5)
        state = bandit.get_extra_state()
        assert bandit.to("meta").log_odds.is_meta
        assert torch.equal(bandit.get_extra_state(), state)


def test_a_bandit_that_is_told_nothing_says_so_once(monkeypatch):
    told = []
    monkeypatch.setattr("lore_torchrl.control.bandit.torchrl_logger.warning", told.append)
    monkeypatch.setattr("lore_torchrl.control.bandit._LEARNS_WITHIN", 3)
    bandit = AdviceBandit()
    for _ in range(2):
        draw(bandit, 2)
        draw(bandit, 2)
        tell(bandit, True, 0.0)
    bandit.eval()
    for _ in range(4):
        draw(bandit, 2)
    assert not told
    bandit.train()
    for _ in range(9):
        draw(bandit, 2)
    assert len(told) == 1 and "lore.observe(batch)" in told[0]


class TestAdvisors:
    """With the settings of a run: at most 60 segments, in rounds of 4 or of all at once."""

    @pytest.mark.parametrize("num", [4, 64])
    @pytest.mark.parametrize("alone", [1.0, 0.0], ids=["only_unadvised", "nobody_rewarded"])
    def test_useless_advice(self, num, alone):
        found = [play(of_a_run(seed), max(60, num), alone, 0.0, num=num) for seed in SEEDS]
        assert max(found) < 0.2 and sum(found) / len(found) < 0.12

    @pytest.mark.parametrize("num", [4, 64])
    def test_good_advice(self, num):
        for seed in SEEDS:
            bandit = of_a_run(seed)
            lowest = min(play(bandit, num, 0.1, 0.9, num=num) for _ in range(256 // num))
            assert lowest > 0.75 and bandit.probability() > 0.9

    @pytest.mark.parametrize("num", [4, 64])
    def test_a_good_advisor_that_turns_bad(self, num):
        for seed in SEEDS:
            bandit = of_a_run(seed)
            assert play(bandit, 128, 0.3, 0.9, num=num) > 0.9
            assert play(bandit, max(60, num), 0.3, 0.0, num=num) < 0.2

    def test_a_bad_advisor_that_turns_good(self):
        for seed in SEEDS:
            bandit = of_a_run(seed)
            assert play(bandit, 60, 0.1, 0.0) < 0.2
            assert play(bandit, 400, 0.1, 0.9) > 0.9

    def test_advice_that_changes_nothing(self):
        found = [play(of_a_run(seed), 800, 0.3, 0.3) for seed in SEEDS]
        assert sum(found) / len(found) < 0.2


def test_stats():
    bandit = AdviceBandit()
    tell(bandit, True, 0.0, 0.0)
    tell(bandit, False, 1.0, math.nan)
    assert bandit.stats() == {
        "probability": pytest.approx(1 / (1 + 1 / (9 * 0.5**2))),
        "baseline": pytest.approx(1.05 / 2),
        "advised_segments": 2.0,
        "ignored": 1.0,
    }


@pytest.mark.parametrize(
    "bad",
    [
        {"segment_steps": 0},
        {"gain": 0.0},
        {"gain": 1.0},
        {"floor": 0.0},
        {"floor": 0.5},
        {"decay": 0.0},
        {"decay": 1.5},
    ],
)
def test_bad_arguments(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=rf"{name}={value} is impossible"):
        AdviceBandit(**bad)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"shapes differ.*\(3, 1\), \(3,\), \(3, 1\)"):
        AdviceBandit().observe(torch.ones(3, 1).bool(), torch.ones(3), torch.ones(3, 1).bool())


class _Counting(EnvBase):
    """An episode of a fixed length."""

    def __init__(self, length):
        super().__init__()
        self.length, self.time = length, 0
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = OneHot(2)
        self.reward_spec = Bounded(0, 1, (1,))

    def _reset(self, tensordict=None, **kwargs):
        self.time = 0
        return TensorDict(observation=torch.zeros(1))

    def _step(self, tensordict):
        self.time += 1
        done = torch.tensor([self.time == self.length])
        return TensorDict(observation=torch.zeros(1), reward=done.float(), done=done)

    def _set_seed(self, seed):
        pass


def rollout(bandit, steps):
    """Play episodes of 7 and of 5 steps, with the transforms of a run."""
    env = SerialEnv(2, [lambda: _Counting(7), lambda: _Counting(5)])
    env = TransformedEnv(env, Compose(InitTracker(), bandit.primer(), StepCounter()))
    act = TensorDictModule(
        lambda x: torch.eye(2)[x.long().squeeze(-1)], ["observation"], ["action"]
    )
    return env.rollout(steps, TensorDictSequential(bandit, act), break_when_any_done=False)
