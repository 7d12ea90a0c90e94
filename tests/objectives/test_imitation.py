"""Which executed steps gained: the returns of replayed sequences, and what is imitated of them."""

from __future__ import annotations

import pytest
import torch

from lore_torchrl.objectives import imitation_weight, replay_returns
from lore_torchrl.replay import EpisodeReturns

NAN, INF = float("nan"), float("inf")


def by_hand(value, reward, done, terminated, is_init, *, gamma, lmbda):
    """Lambda return from each posterior of one sequence, from lists."""
    last = len(value) - 1
    returns = [NAN] * len(value)
    after = value[last]
    for t in reversed(range(last)):
        # What is done at posterior t, and what it gains, stand in record t + 1.
        if is_init[t + 1]:
            after = value[t]  # what comes next is another episode
            continue
        ahead = (1 - lmbda) * value[t + 1] + lmbda * after
        if done[t + 1]:
            ahead = 0.0 if terminated[t + 1] else value[t + 1]
        after = returns[t] = reward[t + 1] + gamma * ahead
    return returns


def column(values, dtype=torch.float):
    return torch.tensor(values, dtype=dtype).reshape(1, -1, 1)


def returns_of(value, reward, *, ends="", gamma=0.5, lmbda=0.5):
    """Returns of one sequence. ``ends`` has a letter a record: Terminated, Cut, Init or none."""
    ends = ends.ljust(len(value), ".")
    flags = [[x in letters for x in ends] for letters in ("TC", "T", "I")]
    found = replay_returns(
        column(value),
        column(reward),
        *(column(flag, torch.bool) for flag in flags),
        gamma=gamma,
        lmbda=lmbda,
    )
    expected = by_hand(value, reward, *flags, gamma=gamma, lmbda=lmbda)
    assert found.shape == (1, len(value), 1)
    return found.flatten().tolist(), expected


def same(found, expected):
    return found == pytest.approx(expected, rel=1e-6, nan_ok=True)


# Records 0 to 3: values of the posteriors, and the rewards of the records.
VALUE, REWARD = [4.0, 8.0, 2.0, 6.0], [100.0, 1.0, 3.0, 5.0]


class TestReplayReturns:
    def test_in_numbers(self):
        # G_2 = 5 + 6 / 2, G_1 = 3 + (2 / 2 + 8 / 2) / 2, G_0 = 1 + (8 / 2 + 5.5 / 2) / 2.
        found, expected = returns_of(VALUE, REWARD)
        assert same(found, [4.375, 5.5, 8.0, NAN]) and same(found, expected)

    def test_nothing_follows_a_terminal_state(self):
        # G_1 = 3; what is at posterior 2 leads to the reset in record 3.
        found, expected = returns_of(VALUE, REWARD, ends="..TI")
        assert same(found, [1 + (8 / 2 + 3 / 2) / 2, 3.0, NAN, NAN]) and same(found, expected)

    def test_behind_a_time_limit_the_critic_goes_on(self):
        # G_1 = 3 + 2 / 2.
        found, expected = returns_of(VALUE, REWARD, ends="..CI")
        assert same(found, [1 + (8 / 2 + 4 / 2) / 2, 4.0, NAN, NAN]) and same(found, expected)

    @pytest.mark.parametrize(("end", "last"), [("T", 5.0), ("C", 5.0 + 6.0 / 2)])
    def test_a_sequence_that_ends_with_its_episode(self, end, last):
        found, expected = returns_of(VALUE, REWARD, ends="..." + end)
        assert found[2] == last and same(found, expected)

    def test_a_reset_at_the_start_changes_nothing(self):
        assert returns_of(VALUE, REWARD, ends="I...")[0][:3] == returns_of(VALUE, REWARD)[0][:3]

    def test_a_reset_cuts_as_a_truncation_before_it(self):
        """A resumed run has cut an episode off: what came after was another's."""
        # G_0 = 1 + 8 / 2, G_2 = 5 + 6 / 2.
        found, expected = returns_of(VALUE, REWARD, ends="..I.")
        assert same(found, [5.0, NAN, 8.0, NAN]) and same(found, expected)
        assert same(found, returns_of(VALUE, REWARD, ends=".CI.")[0])
        assert same(returns_of(VALUE, REWARD, ends="...I")[0], [1 + 4 / 2 + 4 / 4, 4.0, NAN, NAN])

    @pytest.mark.parametrize("lmbda", [0.0, 0.95, 1.0])
    @pytest.mark.parametrize("seed", range(3))
    def test_long_sequences(self, seed, lmbda):
        torch.manual_seed(seed)
        count, time = 4, 30
        value, reward = torch.randn(2, count, time, 1)
        done = torch.rand(count, time, 1) < 0.2
        done[:, -1] = False
        terminated = done & (torch.rand(count, time, 1) < 0.5)
        is_init = done.roll(1, 1) | (torch.rand(count, time, 1) < 0.05)
        settings = {"gamma": 0.9, "lmbda": lmbda}
        found = replay_returns(value, reward, done, terminated, is_init, **settings)
        for row in range(count):
            parts = (value, reward, done, terminated, is_init)
            lists = [part[row].flatten().tolist() for part in parts]
            expected = by_hand(*lists, **settings)
            assert found[row].flatten().tolist() == pytest.approx(
                expected, rel=1e-4, abs=1e-5, nan_ok=True
            )
        acted = ~is_init[:, 1:]
        assert torch.equal(found[:, :-1].isfinite(), acted) and 0.5 < acted.float().mean() < 0.95

    @pytest.mark.parametrize("ends", ["....", "..TI"])
    @pytest.mark.parametrize("moved", ["value", "reward"])
    def test_a_shift_by_one_is_noticed(self, ends, moved):
        given = {"value": VALUE, "reward": REWARD}
        found, expected = returns_of(**given, ends=ends)
        given[moved] = given[moved][1:] + given[moved][:1]
        shifted, _ = returns_of(**given, ends=ends)
        assert same(found, expected) and not same(shifted, expected)

    def test_only_what_follows_counts(self):
        """Reward of record s reaches the posteriors before it, discounted, and no other."""
        for s in range(5):
            reward = [0.0] * 5
            reward[s] = 1.0
            found, _ = returns_of([0.0] * 5, reward, gamma=0.5, lmbda=1.0)
            expected = [0.5 ** (s - 1 - t) if t < s else 0.0 for t in range(4)]
            assert same(found, [*expected, NAN])

    def test_two_posteriors(self):
        assert same(returns_of([3.0, 4.0], [1.0, 2.0])[0], [2.0 + 4.0 / 2, NAN])

    def test_it_agrees_with_what_is_written_into_replay(self):
        """With lambda = 1 and a sequence that has the whole episode both are the same."""
        written = EpisodeReturns(None, gamma=0.9)._returns([0.0, 1.0, 2.0, 4.0], cut=None)
        found, _ = returns_of([9.0] * 4, [0.0, 1.0, 2.0, 4.0], ends="I..T", gamma=0.9, lmbda=1.0)
        assert found[:3] == pytest.approx(written[:3])

    def test_integer_rewards(self):
        arguments = [column(VALUE), column([int(x) for x in REWARD], torch.long)]
        flags = [torch.zeros(1, 4, 1, dtype=torch.bool)] * 3
        found = replay_returns(*arguments, *flags, gamma=0.5, lmbda=0.5)
        assert same(found.flatten().tolist(), [4.375, 5.5, 8.0, NAN])

    def test_compiles_whole(self):
        torch.manual_seed(0)
        value, reward = torch.randn(2, 2, 6, 1)
        done = torch.rand(2, 6, 1) < 0.3

        def compute(value, reward):
            return replay_returns(value, reward, done, done, done.roll(1, 1), gamma=0.9, lmbda=0.9)

        compiled = torch.compile(compute, fullgraph=True, backend="eager")
        found, expected = (f(value, reward) for f in (compiled, compute))
        torch.testing.assert_close(found, expected, equal_nan=True)


class TestImitationWeight:
    def test_in_numbers(self):
        # Gains -1, 0, 0.1, 0.25, 1 and 7 over a critic of 3.
        returns = torch.tensor([2.0, 3.0, 3.1, 3.25, 4.0, 10.0])
        found = imitation_weight(returns, torch.full((6,), 3.0))
        torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 0.1, 0.25, 1.0, 1.0]))

    def test_the_threshold_itself_is_not_imitated(self):
        returns = torch.tensor([0.2, 0.25, 0.3])
        found = imitation_weight(returns, torch.zeros(3), threshold=0.25)
        assert found.tolist() == pytest.approx([0.0, 0.0, 0.3])

    def test_the_default_threshold(self):
        found = imitation_weight(torch.tensor([0.049, 0.051]), torch.zeros(2))
        assert found.tolist() == pytest.approx([0.0, 0.051])

    def test_a_threshold_of_zero_lets_no_loss_through(self):
        found = imitation_weight(torch.tensor([-0.5, 0.0, 0.01]), torch.zeros(3), threshold=0.0)
        assert found.tolist() == pytest.approx([0.0, 0.0, 0.01])

    @pytest.mark.parametrize("scale", [4.0, torch.tensor(4.0)])
    def test_the_scale_divides_before_threshold_and_clip(self, scale):
        returns = torch.tensor([1.15, 1.25, 3.0, 5.0, 9.0])
        found = imitation_weight(returns, torch.ones(5), scale=scale)
        assert found.tolist() == pytest.approx([0.0, 0.0625, 0.5, 1.0, 1.0])

    @pytest.mark.parametrize("unknown", [NAN, -INF, INF])
    def test_a_return_that_is_no_number_is_not_imitated(self, unknown):
        returns, value = torch.tensor([[unknown], [1.0]]), torch.tensor([[0.0], [0.5]])
        assert imitation_weight(returns, value).tolist() == [[0.0], [0.5]]

    def test_a_broken_critic_imitates_nothing(self):
        assert imitation_weight(torch.ones(1), torch.tensor([NAN])).tolist() == [0.0]


class TestRealReturn:
    """The real return decides whether a step is imitated, the lambda return how much."""

    def test_an_episode_that_failed_is_not_imitated(self):
        # The critic hopes for 0.9 from here on; the episode returned 0.
        hopes, value = torch.tensor([0.9]), torch.tensor([0.4])
        assert imitation_weight(hopes, value).tolist() == pytest.approx([0.5])
        assert imitation_weight(hopes, value, torch.tensor([0.0])).tolist() == [0.0]

    def test_it_must_pass_the_threshold(self):
        real = torch.tensor([-1.0, 0.0, 0.2, 0.25, 0.3, 9.0])
        found = imitation_weight(torch.full((6,), 0.5), torch.zeros(6), real, threshold=0.25)
        assert found.tolist() == [0.0, 0.0, 0.0, 0.0, 0.5, 0.5]

    def test_the_weight_is_the_gain_of_the_lambda_return(self):
        """However small it is, but no loss."""
        returns = torch.tensor([2.0, 3.0, 3.01, 3.5, 4.0, 10.0])
        found = imitation_weight(returns, torch.full((6,), 3.0), torch.full((6,), 3.5))
        torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 0.01, 0.5, 1.0, 1.0]))

    def test_the_scale_divides_both(self):
        real, returns = torch.tensor([0.9, 1.1, 1.1]), torch.tensor([2.0, 2.0, 9.0])
        found = imitation_weight(returns, torch.zeros(3), real, scale=4.0, threshold=0.25)
        assert found.tolist() == [0.0, 0.5, 1.0]

    @pytest.mark.parametrize("unknown", [NAN, -INF, INF])
    @pytest.mark.parametrize("which", ["real", "lambda"])
    def test_what_is_no_number_is_not_imitated(self, which, unknown):
        known, broken = torch.tensor([1.0, 1.0]), torch.tensor([1.0, unknown])
        pair = (known, broken) if which == "real" else (broken, known)
        found = imitation_weight(pair[0], torch.full((2,), 0.5), pair[1])
        assert found.tolist() == [0.5, 0.0]
