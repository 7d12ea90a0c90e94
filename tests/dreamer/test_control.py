from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from lore_torchrl import keys
from lore_torchrl.advisors.base import Advice
from lore_torchrl.control import ConfidenceCalibrator, EpisodeShare, ShareBandit
from lore_torchrl.dreamer.control import AdviceControlHook
from lore_torchrl.modules import PriorNet

ENVS, STEPS, ACTIONS = 2, 4, 3


def batch(*, reward=0.0, done=(), first_step=1, arm=1, kl=0.5) -> TensorDict:
    """Steps of two environments; ``done`` lists (environment, step)."""
    steps = torch.arange(first_step, first_step + STEPS).expand(ENVS, -1).unsqueeze(-1)
    ends = torch.zeros(ENVS, STEPS, 1, dtype=torch.bool)
    for env, step in done:
        ends[env, step] = True
    return TensorDict(
        {
            keys.ARM: torch.full((ENVS, STEPS, 1), arm),
            keys.ARM_PROB: torch.full((ENVS, STEPS, 1), 0.5),
            keys.KL: torch.full((ENVS, STEPS, 1), kl),
            "next": {
                "reward": torch.full((ENVS, STEPS, 1), float(reward)),
                "done": ends,
                "step_count": steps.clone(),
            },
        },
        [ENVS, STEPS],
    )


def hook(segment_steps=None) -> AdviceControlHook:
    bandit = ShareBandit(arms=(0.0, 1.0), decay=1.0)
    return AdviceControlHook(EpisodeShare(bandit, segment_steps=segment_steps), None)


def test_an_episode_over_several_batches_is_one_return():
    control = hook()
    control(batch(reward=1.0))
    assert control.share.bandit.episodes == 0
    control(batch(reward=2.0, done=[(0, 1)], first_step=5))
    bandit = control.share.bandit
    assert bandit.episodes == 1 and bandit.counts.tolist() == [0.0, 1.0]
    assert bandit.return_sums[1] == 4 * 1.0 + 2 * 2.0
    assert bandit.length_sums[1] == 6
    control(batch(reward=1.0, done=[(0, 3), (1, 3)], first_step=9))
    assert bandit.return_sums[1] == 8.0 + (2 * 2.0 + 4) + (4 + 8 + 4)


def test_a_stretch_ends_in_the_middle_of_an_episode():
    control = hook(segment_steps=2)
    control(batch(reward=1.0))
    bandit = control.share.bandit
    assert bandit.episodes == 4
    assert bandit.return_sums[1] == 8.0 and bandit.length_sums[1] == 8.0


def test_the_arm_is_that_of_the_stretch():
    control = hook(segment_steps=4)
    control(batch(arm=0))
    control(batch(arm=1, first_step=5))
    assert control.share.bandit.counts.tolist() == [2.0, 2.0]


def test_advice_without_a_say_is_no_advice():
    """An agent that is sure shuts its gate: its returns are its own, whatever the arm."""
    for kl, advised in ((0.5, 2), (0.005, 0)):
        control = hook()
        control(batch(reward=1.0, kl=kl, done=[(0, 3), (1, 3)]))
        bandit = control.share.bandit
        assert bandit.episodes == 2 and bandit.advised_episodes == advised
        assert bandit.counts.tolist() == [0.0, 2.0], "EXP3 counts the arm that was drawn"
        assert (bandit.baseline_count > 0) == (advised == 0)
        assert (bandit.uplift_sum > 0) == (advised > 0)


def test_a_say_is_a_matter_of_the_whole_stretch():
    control = hook()
    control(batch(kl=0.03))
    control(batch(kl=0.0, first_step=5, done=[(0, 0)]))
    control(batch(kl=0.0, first_step=9, done=[(1, 3)]))
    assert control.share.bandit.advised_episodes == 1, "0.12 nats over 5 steps, and over 12"


def test_a_new_trial_each_time_the_answers_have_grown():
    bandit = ShareBandit(arms=(0.0, 1.0), trial_episodes=1)
    bought = [0.0]
    control = AdviceControlHook(
        EpisodeShare(bandit), None, answers=lambda: bought[0], retrial_growth=1.5
    )
    granted = []
    for count in (10, 19, 20, 29, 30, 31, 45):
        bought[0] = float(count)
        control(batch(done=[(0, 3)]))
        granted.append(bool(bandit.granted > bandit.advised_episodes))
    assert granted == [False, False, True, False, True, False, True]
    other = AdviceControlHook(None, None)
    other.load_state_dict(control.state_dict())
    assert other.state_dict() == control.state_dict()


def test_trials_for_answers_that_nobody_counts():
    with pytest.raises(ValueError, match=r"retrial_growth=1.5.*pass answers"):
        AdviceControlHook(hook().share, None, retrial_growth=1.5)


def test_one_more_trial_when_no_more_can_be_bought():
    bandit, left = ShareBandit(arms=(0.0, 1.0), trial_episodes=1, last_trial_episodes=1), [5]
    control = AdviceControlHook(
        EpisodeShare(bandit),
        None,
        answers=lambda: 12.0,
        exhausted=lambda: left[0] == 0,
        retrial_growth=1.5,
    )
    bandit.hit_rate = 0.9
    bandit.barren.fill_(5.0)
    granted = []
    for remaining in (5, 3, 0, 0, 0):
        left[0] = remaining
        control(batch(done=[(0, 3)]))
        granted.append(bool(bandit.granted > bandit.advised_episodes))
    assert granted == [False, False, True, False, False]


def test_a_run_resumed_with_more_calls_is_tried_again():
    bought, left = [98.0], [0]

    def made(bandit):
        return AdviceControlHook(
            EpisodeShare(bandit),
            None,
            answers=lambda: bought[0],
            exhausted=lambda: left[0] == 0,
            retrial_growth=1.5,
        )

    before = made(ShareBandit(arms=(0.0, 1.0), trial_episodes=1))
    before._next_trial = 100.0
    before(batch(done=[(0, 3)]))
    bandit = ShareBandit(arms=(0.0, 1.0), trial_episodes=1, last_trial_episodes=1)
    after = made(bandit)
    after.load_state_dict(before.state_dict())
    granted = []
    for count, remaining in ((98, 400), (146, 352), (147, 351), (200, 298), (498, 0), (498, 0)):
        bought[0], left[0] = float(count), remaining
        after(batch(done=[(0, 3)]))
        granted.append(bool(bandit.granted > bandit.advised_episodes))
    # By growth at 147 and at 498, and there, one batch later, the last one.
    assert granted == [False, False, True, False, True, True]


def test_new_arms_are_drawn_where_stretches_begin():
    torch.manual_seed(0)
    bandit = ShareBandit(gated=False)
    share = EpisodeShare(bandit, segment_steps=10)
    td = TensorDict(
        {
            "is_init": torch.zeros(400, 1, dtype=torch.bool),
            "step_count": torch.arange(400).unsqueeze(-1),
            keys.ARM: torch.full((400, 1), 3),
            keys.ARM_PROB: torch.full((400, 1), 0.125),
        },
        [400],
    )
    share(td)
    begins = torch.arange(400) % 10 == 0
    assert (td[keys.ARM][~begins] == 3).all() and (td[keys.ARM_PROB][~begins] == 0.125).all()
    assert set(td[keys.ARM][begins].flatten().tolist()) == {0, 1, 2, 3}
    assert (td[keys.ARM_PROB][begins] == 0.25).all()


def test_impossible_stretch():
    with pytest.raises(ValueError, match="segment_steps"):
        EpisodeShare(ShareBandit(), segment_steps=0)


def advice_batch(right: list[bool], fresh: list[bool], claimed: float = 1.0) -> TensorDict:
    """One environment; the network says action 0, the adviser agrees where ``right``."""
    n = len(right)
    answer = torch.tensor([0 if r else 1 for r in right])
    said = torch.zeros(1, n, ACTIONS)
    said[..., 0] = 2.0
    return TensorDict(
        {
            keys.MASK: torch.ones(1, n, 1, dtype=torch.bool),
            keys.CONFIDENCE: torch.full((1, n, 1), claimed),
            keys.ADVICE_ID: torch.tensor(fresh).long().reshape(1, n, 1),
            keys.PRIOR_LOGITS: torch.nn.functional.one_hot(answer, ACTIONS).float().unsqueeze(0),
            keys.PRIOR_NET_LOGITS: said,
            keys.PRIOR_NET_CONFIDENCE: torch.full((1, n, 1), 0.95),
            keys.ORIGIN: torch.tensor([1, 2] * (n // 2)).reshape(1, n, 1),
        },
        [1, n],
    )


def test_only_fresh_answers_calibrate_the_network():
    calibrator = ConfidenceCalibrator(prior_strength=1.0, decay=1.0)
    control = AdviceControlHook(None, PriorNet(6, ACTIONS, calibrator=calibrator))
    right = [True, False, False, False]
    control(advice_batch(right, fresh=[True, True, False, False]))
    assert calibrator.counts.sum() == 2 and calibrator.wins.sum() == 1
    assert control.gauges()["prior_net/served"] == 2
    assert control.gauges()["prior_net/ece"] == pytest.approx(0.45, abs=1e-5)


def test_the_network_is_calibrated_to_the_confidence_of_the_answer():
    """What it is trained to claim: the adviser's confidence where it is right, 0 where not."""
    calibrator = ConfidenceCalibrator(prior_strength=1.0, decay=1.0)
    control = AdviceControlHook(None, PriorNet(6, ACTIONS, calibrator=calibrator))
    asked = advice_batch([True, True, False, True], fresh=[True] * 4, claimed=0.25)
    asked[keys.CONFIDENCE][0, 3] = float("nan")
    control(asked)
    assert calibrator.counts[0, 9] == 3 and calibrator.wins[0, 9] == 2 * 0.25
    asked = advice_batch([False] * 4, fresh=[False] * 4)
    asked[keys.ADVICE_ID] = torch.arange(2, 6).reshape(1, 4, 1)
    asked[keys.MASK] = torch.zeros(1, 4, 1, dtype=torch.bool)
    control(asked)
    for logits, outcome in (((3.0, 0.0, 0.0), 0.75), ((0.0, 3.0, 0.0), 0.0)):
        before = calibrator.wins.sum()
        control.late([(2 + (outcome == 0), Advice(logits=logits, confidence=0.75))])
        assert calibrator.wins.sum() - before == outcome
    assert calibrator.counts.sum() == 5


def test_late_answers_calibrate_the_network_by_what_it_had_said():
    calibrator = ConfidenceCalibrator(prior_strength=1.0, decay=1.0)
    control = AdviceControlHook(None, PriorNet(6, ACTIONS, calibrator=calibrator))
    asked = advice_batch([False] * 6, fresh=[False] * 6)
    # 3 is asked about while other advice stands in, 4 twice; 5 is lost.
    asked[keys.ADVICE_ID] = torch.tensor([2, -3, 4, 4, 5, 0]).reshape(1, 6, 1)
    asked[keys.MASK] = (asked[keys.ADVICE_ID] < 0) | (asked[keys.ADVICE_ID] == 0)
    asked[keys.PRIOR_NET_CONFIDENCE][0, 1] = 0.35
    control(asked)
    assert calibrator.counts.sum() == 0
    # The network said action 0: right of 2 and 4, wrong of 3. Row 6 has not come yet.
    answers = [(number, Advice(logits=(3.0, 0.0, 0.0))) for number in (2, 4, 6)]
    control.late([*answers, (3, Advice(logits=(0.0, 3.0, 0.0))), (5, None)])
    assert calibrator.counts[0, [3, 9]].tolist() == [1.0, 2.0] and calibrator.counts.sum() == 3
    assert calibrator.wins[0, [3, 9]].tolist() == [0.0, 2.0]
    asked[keys.ADVICE_ID] = torch.tensor([4, 6, 0, 0, 0, 0]).reshape(1, 6, 1)
    asked[keys.MASK] = torch.zeros(1, 6, 1, dtype=torch.bool)
    control(asked)
    control.late([])
    assert calibrator.counts.sum() == 4 and len(control._open) == 0


def test_the_count_survives_a_checkpoint():
    control = AdviceControlHook(None, PriorNet(6, ACTIONS))
    control(advice_batch([True, True], fresh=[False, False]))
    other = AdviceControlHook(None, PriorNet(6, ACTIONS))
    other.load_state_dict(control.state_dict())
    assert other.gauges() == control.gauges() == {"prior_net/served": 1.0}


@pytest.mark.parametrize("kept", [True, False])
def test_the_error_of_the_adviser_is_its_own(kept):
    calibrator = ConfidenceCalibrator(num_groups=2)
    claim, group = torch.full((4, 1), 0.9), torch.tensor([[0], [0], [1], [1]])
    outcome = torch.tensor([[0.4], [0.6], [0.9], [0.9]])
    calibrator.update(claim, outcome, torch.ones(4, 1), group)
    loss = SimpleNamespace(outcomes=SimpleNamespace(calibrator=calibrator if kept else None))
    trainer = SimpleNamespace(
        loss_module=loss, register_op=lambda *_: None, register_module=lambda *_: None
    )
    control = AdviceControlHook(None, None)
    control.register(trainer)
    expected = {"advice/ece": pytest.approx(0.4, abs=1e-6)} if kept else {}
    assert control.gauges() == expected
