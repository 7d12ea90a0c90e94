from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import Bounded, Composite, OneHot, Unbounded
from torchrl.envs import (
    Compose,
    EnvBase,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)

from lore_torchrl import keys
from lore_torchrl.configs import LoReConfig
from lore_torchrl.configs.trust import BanditConfig
from lore_torchrl.control import EpisodeShare, ShareBandit
from lore_torchrl.dreamer.learner import build_bandit

SEEDS = range(3)
SHARES = torch.tensor([0.0, 0.25, 0.5, 1.0])


def column(*values):
    return torch.tensor(values).unsqueeze(-1)


def tell(bandit, arm, prob, value, length=None):
    """Show a bandit finished episodes, given as lists."""
    length = [10.0] * len(arm) if length is None else length
    arm, prob, value, length = column(*arm), column(*prob), column(*value), column(*length)
    bandit.observe(arm, prob, value, length, torch.ones_like(arm).bool())


def play(bandit, returns, *, batch=1, lengths=None, flip=False):
    """Play a table of returns ``[N, K]``; return arms ``[N]`` and the gate's mass before each."""
    arms, masses = [], []
    for rows in returns.split(batch):
        masses.append(bandit.advised_mass().expand(len(rows)))
        arm, prob = bandit.draw(len(rows))
        value = rows.gather(-1, arm)
        length = torch.full_like(prob, 100.0) if lengths is None else lengths[arm]
        bandit.observe(arm, prob, 1 - value if flip else value, length, prob > 0)
        arms.append(arm.squeeze(-1))
    return torch.cat(arms), torch.cat(masses)


def of_a_run(seed):
    """The bandit that a run has by default."""
    return build_bandit(LoReConfig(), seed=seed)


def bernoulli(n, *means):
    return torch.bernoulli(torch.tensor(means).expand(n, -1))


def missed(returns, arms, rows=slice(None)):
    """Regret against the best fixed arm of the given rows."""
    got = returns.gather(-1, arms.unsqueeze(-1))[rows].sum()
    return (returns[rows].sum(0).max() - got).item()


class TestUpdate:
    # The first return is compared with 0 while gated, and with itself otherwise.
    @pytest.mark.parametrize(("gated", "gain"), [(True, math.exp(0.4 / 0.45)), (False, 1.0)])
    def test_weights_of_one_episode(self, gated, gain):
        bandit = ShareBandit(learning_rate=0.4, exploration=0.0, gated=gated)
        tell(bandit, [0], [0.25], [2.0])
        expected = torch.tensor([gain, 1.0, 1.0, 1.0]) / (3 + gain)
        torch.testing.assert_close(bandit.exp3_probs(), expected)
        # The range is 0 to 2, and so far the mean is the largest: 0.5 is a loss of 0.75.
        tell(bandit, [2], [0.3], [0.5])
        weight = math.exp(-0.4 * 0.75 / (0.3 + 0.2))
        expected = torch.tensor([gain, 1.0, weight, 1.0]) / (2 + gain + weight)
        torch.testing.assert_close(bandit.exp3_probs(), expected)
        # Now the mean is less than the largest, with what decay has left of the first.
        tell(bandit, [1], [0.5], [2.0])
        mean = (0.97 * 1.0 + 0.25) / (0.97 + 1.0) if gated else 1.0
        other = math.exp(-0.4 * (mean - 1.0) / (0.5 + 0.2))
        expected = torch.tensor([gain, other, weight, 1.0]) / (1 + gain + other + weight)
        torch.testing.assert_close(bandit.exp3_probs(), expected)

    def test_nothing_returned_changes_no_weight(self):
        bandit = ShareBandit(exploration=0.0, initial=(0.1, 0.1, 0.2, 0.6), gated=False)
        tell(bandit, [0, 3, 1, 3, 2], [0.1, 0.6, 0.1, 0.6, 0.2], [0.0] * 5)
        torch.testing.assert_close(bandit.probs(), torch.tensor([0.1, 0.1, 0.2, 0.6]))

    def test_sharing(self):
        bandit = ShareBandit(learning_rate=0.4, exploration=0.0, sharing=0.1)
        tell(bandit, [1], [0.25], [1.0])
        tell(bandit, [2], [0.3], [0.25])
        weights = torch.ones(4)
        weights[1] = math.exp(0.4 * 1.0 / (0.25 + 0.2))
        weights = 0.9 * weights + 0.1 * weights.mean()
        weights[2] *= math.exp(-0.4 * 0.75 / (0.3 + 0.2))
        weights = 0.9 * weights + 0.1 * weights.mean()
        torch.testing.assert_close(bandit.exp3_probs(), weights / weights.sum())

    def test_negative_returns(self):
        bandit = ShareBandit(learning_rate=0.4, exploration=0.0, gated=False)
        tell(bandit, [0, 1], [0.25, 0.25], [-10.0, -2.0])
        lost = torch.tensor([1.0, 0.2, 0.0, 0.0]) / (0.25 + 0.2)
        torch.testing.assert_close(bandit.probs(), torch.softmax(-0.4 * lost, -1))

    def test_rows_of_a_call_equal_one_call_a_row(self):
        together, apart = ShareBandit(decay=0.9), ShareBandit(decay=0.9)
        for bandit in (together, apart):
            tell(bandit, [3, 0], [0.25, 0.25], [1.0, -1.0])
        n = 12
        arm, prob, value = torch.randint(4, (n,)), 0.1 + torch.rand(n), 2 * torch.rand(n) - 1
        length, done = torch.randint(1, 50, (n,)), torch.rand(n) < 0.6
        together.observe(*(x.reshape(3, 4, 1) for x in (arm, prob, value, length, done)))
        for row in zip(arm, prob, value, length, done, strict=True):
            apart.observe(*(x.reshape(1, 1) for x in row))
        assert 2 < together.episodes < n
        for name, found in together.state_dict().items():
            # These compare with what was known before the call.
            if name not in ("uplift_sum", "barren", "log_weights", "drawn_from"):
                torch.testing.assert_close(found, apart.state_dict()[name], msg=name)

    def test_rows_that_end_nothing_change_nothing_to_the_bit(self):
        bandit = ShareBandit(sharing=0.01)
        play(bandit, bernoulli(20, 0.1, 0.4, 0.5, 0.6))
        before = {name: value.clone() for name, value in bandit.state_dict().items()}
        value = torch.tensor([[9.0], [float("nan")]])
        bandit.observe(column(1, 2), column(0.2, 0.2), value, value, torch.zeros(2, 1).bool())
        assert all(torch.equal(before[name], x) for name, x in bandit.state_dict().items())

    def test_a_broken_return_is_counted_and_left_out(self):
        bandit, clean = ShareBandit(), ShareBandit()
        tell(bandit, [1, 2, 3, 0], [0.2] * 4, [0.5, float("nan"), float("inf"), 0.2])
        tell(clean, [1, 0], [0.2] * 2, [0.5, 0.2])
        assert bandit.ignored == 2 and bandit.stats()["ignored"] == 2
        for name, value in clean.state_dict().items():
            if name != "ignored":
                torch.testing.assert_close(bandit.state_dict()[name], value, msg=name)

    @pytest.mark.parametrize("together", [True, False])
    def test_a_return_too_large_for_a_span_is_left_out(self, together):
        bandit, clean = ShareBandit(), ShareBandit()
        values = [3e38, 0.5, -3e38, 0.2]
        if together:
            tell(bandit, [1, 1, 2, 0], [0.2] * 4, values)
        else:
            for arm, value in zip([1, 1, 2, 0], values, strict=True):
                tell(bandit, [arm], [0.2], [value])
        for arms, returns in ([[1, 0], [0.5, 0.2]],) if together else ([[1], [0.5]], [[0], [0.2]]):
            tell(clean, arms, [0.2] * len(arms), returns)
        assert bandit.ignored == 2 and bandit.probs().isfinite().all()
        for name, value in clean.state_dict().items():
            if name != "ignored":
                torch.testing.assert_close(bandit.state_dict()[name], value, msg=name)

    def test_no_rows_change_nothing(self):
        bandit = ShareBandit()
        tell(bandit, [1, 0], [0.2] * 2, [0.5, 0.2])
        before = {name: value.clone() for name, value in bandit.state_dict().items()}
        none = torch.zeros(3, 0, 1)
        bandit.observe(none.long(), none, none, none, none.bool(), none.bool())
        assert all(torch.equal(before[name], x) for name, x in bandit.state_dict().items())

    def test_long_runs_stay_finite(self):
        bandit = ShareBandit(gated=False, learning_rate=1.0, exploration=0.0)
        tell(bandit, [0], [0.5], [1.0])
        for _ in range(100):
            tell(bandit, [0, 1, 2, 3] * 5, [0.01] * 20, [0.9, 0.0, 0.0, 0.0] * 5)
        assert bandit.probs().isfinite().all() and bandit.probs()[0] == 1
        assert bandit.log_weights.amax() == 0
        assert math.isfinite(bandit.stats()["regret"])


class TestExploration:
    def test_of_a_learner_that_is_sure(self):
        bandit = ShareBandit(gated=False, exploration=0.2)
        bandit.log_weights[1:] = -1000.0
        torch.testing.assert_close(bandit.probs(), torch.tensor([0.85, 0.05, 0.05, 0.05]))

    def test_long_episodes_are_explored_less_often(self):
        bandit = ShareBandit(gated=False, exploration=0.2, decay=1.0)
        # Nine of ten steps and one of fifteen hundred: a mean episode of 145 / 10.
        lengths = [10.0] * 9 + [55.0]
        tell(bandit, [1] * 9 + [0], [0.25] * 10, [0.0] * 10, lengths)
        bandit.log_weights.copy_(torch.tensor([-1000.0, -1000.0, 0.0, -1000.0]))
        probs = bandit.probs()
        # Known and short, or not known: evenly. The long arm as often as its steps allow.
        assert probs[[1, 3]].tolist() == pytest.approx([0.05, 0.05])
        assert probs[0].item() == pytest.approx(0.05 * 14.5 / 55)
        assert probs.sum().item() == pytest.approx(1)

    def test_unknown_lengths_do_not_matter(self):
        bandit = ShareBandit(gated=False, exploration=0.2)
        tell(bandit, [0, 1, 2], [0.25] * 3, [0.0] * 3, [float("nan"), 0.0, -1.0])
        torch.testing.assert_close(bandit.probs(), torch.full((4,), 0.25))


class TestRegret:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_stationary(self, seed):
        torch.manual_seed(seed)
        returns = bernoulli(2000, 0.2, 0.4, 0.5, 0.9)
        settings = {"gated": False, "learning_rate": 0.02, "exploration": 0.01}
        bandit, flipped = ShareBandit(**settings), ShareBandit(**settings)
        regret = missed(returns, play(bandit, returns, batch=10)[0])
        bound = bandit.regret_bound(2000)
        uniform = missed(returns, torch.randint(4, (2000,)))
        assert regret < bound < uniform
        assert regret < uniform / 2
        # What the bound would catch: rewards with the wrong sign.
        assert missed(returns, play(flipped, returns, batch=10, flip=True)[0]) > bound
        # The estimate that is logged; the bandit cannot see what it did not draw.
        assert bandit.regret().item() == pytest.approx(regret, abs=100)

    @pytest.mark.parametrize("seed", SEEDS)
    def test_the_best_arm_changes_half_way(self, seed):
        torch.manual_seed(seed)
        halves = bernoulli(1000, 0.1, 0.9, 0.1, 0.1), bernoulli(1000, 0.1, 0.1, 0.1, 0.9)
        returns = torch.cat(halves)
        bandit = ShareBandit(gated=False, learning_rate=0.05, exploration=0.01, sharing=5e-4)
        arms = play(bandit, returns, batch=10)[0]
        assert missed(returns, arms) < bandit.regret_bound(2000)

        def against_the_switch(arms):
            return sum(missed(returns, arms, slice(at, at + 1000)) for at in (0, 1000))

        bound = bandit.regret_bound(2000, num_switches=1)
        uniform = against_the_switch(torch.randint(4, (2000,)))
        assert against_the_switch(arms) < bound < uniform
        assert against_the_switch(arms) < uniform / 3

    @pytest.mark.parametrize("seed", SEEDS)
    def test_an_adversary_that_lowers_the_likeliest_arm(self, seed):
        bandit = ShareBandit(gated=False, learning_rate=0.05, exploration=0.01, seed=seed)
        returns, arms = [], []
        for _ in range(300):
            row = torch.ones(1, 4)
            row[0, bandit.probs().argmax()] = 0.0
            returns.append(row)
            arms.append(play(bandit, row)[0])
        assert missed(torch.cat(returns), torch.cat(arms)) < bandit.regret_bound(300)

    @pytest.mark.parametrize("seed", SEEDS)
    def test_the_best_arm_is_the_least_likely_at_first(self, seed):
        """Losses against the mean return would be about zero: 0.1 for nearly all episodes."""
        initial = (1.0, 1e-4, 1e-4, 1e-4)
        settings = {"initial": initial, "learning_rate": 0.02, "exploration": 0.0, "seed": seed}
        bandit = ShareBandit(gated=False, **settings)
        bandit.high.fill_(1.0)  # the scale is known
        returns = torch.tensor([0.1, 0.1, 0.1, 1.0]).expand(1500, -1)
        arms, _ = play(bandit, returns, batch=5)
        assert missed(returns, arms) < bandit.regret_bound(1500) < 600

    @pytest.mark.parametrize("seed", SEEDS)
    def test_with_the_gate_bad_advice_costs_trial_and_probation(self, seed):
        torch.manual_seed(seed)
        bandit = of_a_run(seed)
        returns = bernoulli(2000, 0.5, 0.0, 0.0, 0.0)
        arms, _ = play(bandit, returns, batch=20)
        most = 0.5 * (bandit.trial_episodes + 20 + bandit.probation * 2000)
        assert missed(returns, arms) < most < missed(returns, torch.randint(4, (2000,))) / 5

    @pytest.mark.parametrize("seed", SEEDS)
    def test_with_the_gate_good_advice_is_found(self, seed):
        torch.manual_seed(seed)
        returns = bernoulli(2000, 0.2, 0.9, 0.9, 0.9)
        arms, _ = play(of_a_run(seed), returns, batch=20)
        assert missed(returns, arms) < missed(returns, torch.randint(4, (2000,))) / 3

    def test_estimate_is_exact_where_all_is_known(self):
        bandit = ShareBandit(arms=(0.0, 1.0), gated=False)
        # On the scale of -1 to 1: 0.5 and 1 for the arms.
        tell(bandit, [0, 1] * 10, [0.5] * 20, [0.0, 1.0] * 9 + [-1.0, 1.0])
        # Of arm 0 nine halves and a zero: 4.5 + 10 against 20.
        assert bandit.regret().item() == pytest.approx(20 - 14.5)

    def test_estimate_weighs_by_the_probability(self):
        bandit = ShareBandit(arms=(0.0, 1.0), gated=False)
        # Arm 1 returned 1 when it was rare and 0 when it was common.
        tell(bandit, [1, 1, 0], [0.1, 0.4, 0.5], [1.0, 0.0, 0.0])
        assert bandit.regret().item() == pytest.approx(3 * 10 / 12.5 - 1)

    def test_without_episodes(self):
        assert ShareBandit().regret() == 0

    def test_bound(self):
        bandit = ShareBandit(learning_rate=0.1, exploration=0.0)
        assert bandit.regret_bound(500) == pytest.approx(math.log(4) / 0.1 + 0.1 * 4 * 500)
        bandit = ShareBandit(learning_rate=0.1, exploration=0.2, sharing=0.01)
        weights = math.log(4) + math.log(400) + 499 * math.log(1 / 0.99)
        expected = weights / 0.1 + (0.05 / 0.8 + 0.05) * 4 * 500 + 0.2 * 500
        assert bandit.regret_bound(500, num_switches=1) == pytest.approx(expected)

    def test_bad_counts(self):
        with pytest.raises(ValueError, match=r"num_switches=9.*5"):
            ShareBandit(sharing=0.1).regret_bound(5, num_switches=9)
        with pytest.raises(ValueError, match=r"sharing.*num_switches=1"):
            ShareBandit().regret_bound(5, num_switches=1)


class TestEvidence:
    def test_formula(self):
        bandit = ShareBandit(decay=0.9)
        arms, returns = [0, 1, 3, 0, 0, 2], [0.0, 4.0, 2.0, 1.0, 0.0, 3.0]
        for arm, value in zip(arms, returns, strict=True):
            tell(bandit, [arm], [0.25], [value])
        # The largest return, 4, came second: before it nothing could be compared.
        uplift = advised = recent = unadvised = total = 0.0
        alone = 0
        for arm, value in zip(arms, [0.0, 1.0, 0.5, 0.25, 0.0, 0.75], strict=True):
            now = 0.0 if not unadvised else recent / unadvised
            baseline = (0.2 + alone * now) / (2 + alone)
            total, uplift, advised = 0.9 * total, 0.9 * uplift, 0.9 * advised
            if arm:
                uplift, advised = uplift + value - baseline, advised + 1
                total += value
            else:
                recent, unadvised = 0.85 * recent + value, 0.85 * unadvised + 1
                alone += 1
        mean = (1 + total) / (2 + advised)
        baseline = (0.2 + alone * recent / unadvised) / (2 + alone)
        variance = max(mean * (1 - mean), 0.1) / (3 + advised)
        variance += max(baseline * (1 - baseline), 0.1) / (3 + unadvised)
        z = uplift / (2 + advised) / math.sqrt(variance)
        expected = 0.5 * (1 + math.erf(z / math.sqrt(2)))
        assert 0.55 < expected < 0.95
        assert bandit.evidence().item() == pytest.approx(expected, abs=1e-5)

    def test_an_agent_that_gets_better_is_no_evidence(self):
        """Advice without effect, in one of ten episodes, while returns go from 0 to 1."""
        generator = torch.Generator().manual_seed(0)
        trusted = []
        for _ in range(10):
            bandit = ShareBandit(trial_episodes=0)
            for step in range(400):
                skill = min(1.0, max(0.0, (step - 100) / 150))
                value = float(torch.rand((), generator=generator) < skill)
                arm = 3 if torch.rand((), generator=generator) < 0.1 else 0
                tell(bandit, [arm], [0.1], [value])
                trusted.append(bandit.trust())
        assert torch.stack(trusted).mean() < 0.05
        # Compared with all earlier ones, the late episodes would have looked like proof.
        assert bandit.return_sums[0] / bandit.counts[0] > 0.9

    def test_nothing_is_known_without_data_or_without_reward(self):
        bandit = ShareBandit()
        assert bandit.evidence() == 0.5 and bandit.trust() == 0
        tell(bandit, [0, 1] * 20, [0.5] * 40, [0.0] * 40)
        assert bandit.evidence().item() == pytest.approx(0.5, abs=0.01)
        assert bandit.trust() == 0

    def test_fades_with_the_advised_episodes(self):
        bandit = ShareBandit()
        tell(bandit, [0, 3] * 10, [0.5] * 20, [0.5, 1.0] * 10)
        first = bandit.evidence().item()
        tell(bandit, [0] * 300, [1.0] * 300, [0.5] * 300)
        assert first > 0.98
        # What is left of them says nothing any more.
        assert bandit.evidence().item() == pytest.approx(0.5, abs=0.05)
        assert bandit.counts[1:].sum() < 0.1

    @pytest.mark.parametrize(
        ("low", "high", "whole", "mass", "trust"),
        [
            (0.1, 0.4, 0.5, 1.0, 1.0),
            (0.4, 0.6, 0.9, 0.5, 0.0),
            (0.1, 0.3, 0.7, 1.0, 0.5),
            (0.6, 0.7, 0.9, 0.05, 0.0),
        ],
    )
    def test_ramps_of_mass_and_trust(self, low, high, whole, mass, trust):
        # Without data the evidence is one half.
        bandit = ShareBandit(
            evidence_low=low,
            evidence_high=high,
            trust_low=high,
            trust_high=whole,
            trial_episodes=0,
        )
        assert bandit.advised_mass().item() == pytest.approx(mass)
        assert bandit.trust().item() == pytest.approx(trust)
        expected = torch.full((4,), 0.25 * mass)
        expected[0] += 1 - mass
        torch.testing.assert_close(bandit.probs(), expected)

    def test_trial_counts_advised_episodes_only(self):
        bandit = ShareBandit(trial_episodes=4)
        masses = []
        for arm in (0, 1, 0, 2, 3, 1, 0):
            masses.append(bandit.advised_mass().item())
            tell(bandit, [arm], [0.25], [0.0])
        assert masses[:6] == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.5, 0.25], abs=1e-6)
        assert masses[6] < 0.25 and bandit.advised_episodes == 4

    def test_a_granted_trial_is_as_long_as_the_first(self):
        bandit = ShareBandit(trial_episodes=2, probation=0.05)
        tell(bandit, [1] * 5, [0.25] * 5, [0.0] * 5)
        assert bandit.advised_mass().item() == pytest.approx(0.05)
        bandit.grant()
        masses = []
        for _ in range(3):
            masses.append(bandit.advised_mass().item())
            tell(bandit, [1], [0.25], [0.0])
        assert masses == pytest.approx([0.5, 0.5, 0.05])

    def test_advice_that_never_pays_loses_its_credit(self):
        bandit = ShareBandit(trial_episodes=2, probation=0.2, hit_rate=0.5)
        credits, masses = [], []
        for _ in range(6):
            credits.append(bandit.credit().item())
            masses.append(bandit.advised_mass().item())
            tell(bandit, [3], [0.25], [0.0])
        # 2 * 0.5^u / (1 + 0.5^u), and a tenth from then on.
        assert credits == pytest.approx([1.0, 2 / 3, 0.4, 2 / 9, 2 / 17, 0.1])
        assert masses == pytest.approx([0.5, 0.5, 0.08, 0.4 / 9, 0.4 / 17, 0.02])
        assert bandit.barren == 6

    def test_advice_at_its_least_credit_is_granted_nothing(self):
        bandit = ShareBandit(trial_episodes=16, hit_rate=0.3)
        bandit.barren.fill_(100)
        bandit.grant()
        assert bandit.credit() == pytest.approx(0.1) and bandit.granted == 16

    def test_short_episodes_cost_little_credit(self):
        """An episode counts by its length, up to a whole one; one of unknown length is whole."""
        bandit = ShareBandit(hit_rate=0.3, whole_length=40)
        column = torch.ones(4, 1)
        for length, barren in ((10.0, 1.0), (40.0, 5.0), (90.0, 9.0), (0.0, 13.0)):
            bandit.observe(3 * column.long(), column, 0 * column, length * column, column > 0)
            assert bandit.barren == barren
        assert build_bandit(LoReConfig(bandit=BanditConfig(segment_steps=64))).whole_length == 64

    def test_half_of_the_advice_costs_half_the_credit(self):
        bandit = ShareBandit(hit_rate=0.3)
        tell(bandit, [1, 2, 0, 3], [0.25] * 4, [0.0] * 4)
        assert bandit.barren == 0.25 + 0.5 + 1.0

    def test_credit_comes_back_with_what_pays(self):
        bandit = ShareBandit(hit_rate=0.5)
        # An unadvised success brings back nothing, advice that did not act is none.
        tell(bandit, [3, 3, 0, 3], [0.25] * 4, [0.0, 0.0, 1.0, 0.0])
        assert bandit.barren == 3
        arm, done = torch.tensor([[3], [3]]), torch.ones(2, 1, dtype=torch.bool)
        column = torch.ones(2, 1)
        acted = torch.zeros(2, 1, dtype=torch.bool)
        bandit.observe(arm, 0.25 * column, 0 * column, column, done, acted)
        assert bandit.barren == 3
        # More than unadvised ones return; those after the last such count.
        tell(bandit, [3, 3, 3, 0, 3], [0.25] * 5, [0.0, 1.0, 0.0, 0.0, 0.0])
        assert bandit.barren == 2 and bandit.credit().item() == pytest.approx(0.4)
        # No more than the unadvised episodes before the call: the baseline is above a half.
        tell(bandit, [0] * 20, [0.25] * 20, [1.0] * 20)
        tell(bandit, [3], [0.25], [0.5])
        assert bandit.barren == 3

    @pytest.mark.parametrize(
        ("barren", "granted"), [(0, 6), (1, 4), (2, 3), (4, 2), (6, 1), (7, 0)]
    )
    def test_a_granted_trial_shrinks_with_the_credit(self, barren, granted):
        bandit = ShareBandit(trial_episodes=6, hit_rate=0.3)
        bandit.barren.fill_(barren)
        bandit.advised_episodes.fill_(10)
        bandit.grant()
        assert bandit.granted == 10 + granted

    def test_the_last_trial_is_a_whole_one(self):
        bandit = ShareBandit(trial_episodes=6, last_trial_episodes=9, hit_rate=0.3)
        tell(bandit, [3] * 10, [0.25] * 10, [0.0] * 10)
        bandit.grant()
        assert bandit.granted == 10 and bandit.barren == 10
        bandit.grant(last=True)
        assert bandit.granted == 19 and bandit.credit() == 1

    def test_a_last_trial_without_a_first(self):
        bandit = ShareBandit(trial_episodes=0, last_trial_episodes=2, probation=0.05)
        assert bandit.advised_mass().item() == pytest.approx(0.05)
        bandit.grant()
        assert bandit.advised_mass().item() == pytest.approx(0.05)
        bandit.grant(last=True)
        assert bandit.advised_mass() == 0.5

    def test_a_grant_does_not_shorten_the_first_trial(self):
        bandit = ShareBandit(trial_episodes=8, hit_rate=0.9)
        tell(bandit, [1] * 4, [0.25] * 4, [0.0] * 4)
        bandit.grant()
        assert bandit.granted == 8

    def test_a_grant_halves_what_older_advice_has_shown(self):
        bandit = ShareBandit()
        tell(bandit, [0, 3, 3, 0, 3], [0.25] * 5, [0.0, 1.0, 1.0, 0.0, 1.0])
        before = bandit.uplift_sum.item(), bandit.uplift_count.item()
        evidence = bandit.evidence().item()
        bandit.grant()
        assert (bandit.uplift_sum.item(), bandit.uplift_count.item()) == pytest.approx(
            (before[0] / 2, before[1] / 2)
        )
        assert 0.5 < bandit.evidence().item() < evidence

    def test_arms_are_drawn_from_what_is_known_by_then(self):
        bandit = ShareBandit(trial_episodes=1)
        for change in (
            lambda: tell(bandit, [1, 0], [0.25, 0.25], [0.0, 0.0]),
            lambda: tell(bandit, [3], [0.25], [1.0]),
            bandit.grant,
        ):
            before = bandit.drawn_from.clone()
            change()
            assert torch.equal(bandit.drawn_from, bandit.probs())
            assert not torch.equal(bandit.drawn_from, before)

    @pytest.mark.parametrize(("left", "share"), [(1.0, 1.0), (0.5, 0.5), (0.02, 0.1), (0.0, 0.1)])
    def test_what_is_hardly_taught_any_more_hardly_acts(self, left, share):
        bandit, fresh = ShareBandit(), ShareBandit()
        play(bandit, bernoulli(60, 0.1, 0.9, 0.9, 0.9))
        assert bandit.advised_mass() == 1 and fresh.advised_mass() == 0.5
        evidence, before = bandit.evidence(), bandit.drawn_from.clone()
        for each in (bandit, fresh):
            each.anneal(torch.tensor(left))
        torch.testing.assert_close(bandit.advised_mass(), torch.tensor(share))
        torch.testing.assert_close(fresh.advised_mass(), torch.tensor(0.5 * share))
        # Whether it pays is another matter; arms are drawn anew once an episode has ended.
        assert bandit.evidence() == evidence
        assert torch.equal(bandit.drawn_from, before)
        tell(bandit, [0], [0.5], [0.0], [float("nan")])
        torch.testing.assert_close(bandit.drawn_from, bandit.probs())
        again = ShareBandit()
        again.load_state_dict(bandit.state_dict())
        assert torch.equal(again.drawn_from, bandit.drawn_from)

    def test_plain_exp3_is_not_annealed(self):
        bandit = ShareBandit(gated=False)
        play(bandit, bernoulli(60, 0.1, 0.9, 0.9, 0.9))
        before = bandit.probs()
        bandit.anneal(0.0)
        assert torch.equal(bandit.probs(), before)

    def test_gate_is_a_share_of_steps(self):
        bandit = ShareBandit(arms=(0.0, 1.0), trial_episodes=0, probation=0.2, exploration=0.0)
        tell(bandit, [0, 1] * 4, [0.5] * 8, [0.0] * 8, [90.0, 10.0] * 4)
        bandit.log_weights.copy_(torch.tensor([-1000.0, 0.0]))
        probs = bandit.probs()
        steps = probs * torch.tensor([90.0, 10.0])
        assert (steps[1] / steps.sum()).item() == pytest.approx(bandit.advised_mass().item())
        assert bandit.advised_mass() < 0.3 < probs[1]


class TestAdvisers:
    def test_good(self):
        for seed in SEEDS:
            torch.manual_seed(seed)
            bandit = ShareBandit()
            play(bandit, bernoulli(30, 0.07, 0.9, 0.9, 0.9))
            assert bandit.probs()[1:].sum() > 0.6
            assert bandit.advised_mass() == 1 and bandit.trust() == 1

    def test_good_where_more_is_better(self):
        shares = []
        for seed in range(6):
            torch.manual_seed(seed)
            bandit = ShareBandit()
            play(bandit, bernoulli(40, 0.07, 0.3, 0.5, 0.9))
            shares.append((bandit.probs() * SHARES).sum())
        assert torch.stack(shares).mean() > 0.6

    def test_good_and_unadvised_episodes_take_ten_times_as_long(self):
        lengths, found = torch.tensor([100.0, 10.0, 10.0, 10.0]), []
        for seed in SEEDS:
            torch.manual_seed(seed)
            bandit = ShareBandit()
            play(bandit, bernoulli(30, 0.07, 0.9, 0.9, 0.9), lengths=lengths)
            steps = bandit.probs() * lengths
            found.append((steps[1:].sum() / steps.sum()).item())
        assert min(found) > 0.6

    def test_adversarial_from_the_start(self):
        shares = []
        for seed in range(4):
            torch.manual_seed(seed)
            bandit = ShareBandit()
            arms, _ = play(bandit, bernoulli(150, 0.07, 0.0, 0.0, 0.0))
            trial = (arms > 0).cumsum(0) <= bandit.trial_episodes
            shares.append(SHARES[arms][~trial].mean())
            assert bandit.trust() == 0
        assert torch.stack(shares).mean() < 0.1

    @pytest.mark.parametrize("seed", SEEDS)
    def test_adversarial_where_nothing_is_rewarded(self, seed):
        """No evidence can come; the share of advised episodes falls all the same."""
        torch.manual_seed(seed)
        bandit = of_a_run(seed)
        advised = []
        for _ in range(6):
            arms, _ = play(bandit, torch.zeros(24, 4), lengths=torch.full((4,), 128.0))
            advised.append((arms > 0).sum().item())
            bandit.grant()
        assert bandit.evidence() == 0.5
        # Four of the trial and a few of the grants; then a tenth of the probation.
        assert sum(advised) <= 12 and sum(advised[2:]) <= 5

    def test_good_then_adversarial(self):
        good = torch.tensor([0.3, 0.9, 0.9, 0.9]).expand(40, -1)
        bad = torch.tensor([0.3, 0.0, 0.0, 0.0]).expand(100, -1)
        for seed in SEEDS:
            torch.manual_seed(seed)
            bandit = ShareBandit(sharing=0.001)
            _, masses = play(bandit, torch.cat((good, bad)))
            assert masses[40] == 1
            assert (masses[100:] < 0.2).all(), "within 60 episodes, and for good"

    @pytest.mark.parametrize("seed", SEEDS)
    def test_good_then_adversarial_with_the_settings_of_a_run(self, seed):
        good = torch.tensor([0.3, 0.9, 0.9, 0.9]).expand(40, -1)
        bad = torch.tensor([0.3, 0.0, 0.0, 0.0]).expand(160, -1)
        torch.manual_seed(seed)
        bandit = of_a_run(seed)
        arms, masses = play(bandit, torch.cat((good, bad)))
        assert masses[40] == 1 and SHARES[arms][20:40].mean() > 0.4
        # Within 60 episodes, and for good: the share of beta that was drawn.
        assert (masses[100:] <= bandit.probation + 1e-6).all()
        assert SHARES[arms][100:].mean() < 0.1 and bandit.trust() == 0

    @pytest.mark.parametrize(
        ("low", "high", "num"), [(0.0, -1.0, 4), (0.0, 1.0, 4), (0.0, 1.0, 64), (-1.0, 0.0, 64)]
    )
    def test_useless_advice_is_not_trusted_from_the_start_either(self, low, high, num):
        """Whatever the sign of returns, and however many environments end at once."""
        trusted = []
        for seed in range(6):
            torch.manual_seed(seed)
            bandit = of_a_run(seed)
            returns = torch.where(bernoulli(128, 0.3, 0.3, 0.3, 0.3) > 0, high, low)
            for rows in returns.split(num):
                play(bandit, rows, batch=num)
                trusted.append(bandit.trust())
        assert torch.stack(trusted).mean() < 0.15

    def test_good_advice_is_trusted_where_returns_are_negative(self):
        for seed in SEEDS:
            torch.manual_seed(seed)
            bandit = of_a_run(seed)
            play(bandit, bernoulli(64, 0.07, 0.9, 0.9, 0.9) - 1.0, batch=4)
            assert bandit.trust() > 0.9

    def test_evidence_is_kept_on_the_scale_of_the_returns(self):
        """A hundredth more is much while nothing is known to be larger, and little then."""
        bandit = of_a_run(0)
        for _ in range(8):
            tell(bandit, [0, 3], [0.25, 0.25], [0.0, 0.01])
        assert bandit.trust() == 1
        tell(bandit, [0], [0.25], [1.0])
        assert bandit.trust() == 0 and bandit.uplift_sum < 0.1

    def test_useless_advice_is_not_trusted(self):
        bandit = ShareBandit()
        play(bandit, bernoulli(300, 0.9, 0.9, 0.9, 0.9), batch=3)
        assert bandit.trust() < 0.5 and bandit.advised_mass() < 0.9


def test_draw():
    bandit = ShareBandit(gated=False)
    bandit.log_weights.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]).log())
    bandit.refresh()
    arm, prob = bandit.draw(20_000)
    assert arm.shape == prob.shape == (20_000, 1) and arm.dtype == torch.int64
    assert torch.equal(prob, bandit.probs()[arm])
    torch.testing.assert_close(arm.flatten().bincount() / 20_000, bandit.probs(), atol=0.02, rtol=0)


def test_stats():
    bandit = ShareBandit(arms=(0.0, 0.25, 1.0))
    play(bandit, bernoulli(30, 0.1, 0.5, 0.9))
    stats = bandit.stats()
    probs = {"prob_0": 0, "prob_0.25": 1, "prob_1": 2}
    numbers = {"evidence", "trust", "credit", "regret", "advised_episodes", "ignored"}
    assert set(stats) == {*numbers, *probs}
    for name, index in probs.items():
        assert stats[name] == pytest.approx(bandit.probs()[index].item())
    assert stats["evidence"] == pytest.approx(bandit.evidence().item())
    assert stats["advised_episodes"] == bandit.advised_episodes.item() > 0


def test_state_dict_goes_on_as_before():
    table = bernoulli(60, 0.1, 0.4, 0.5, 0.9)
    first, second = ShareBandit(sharing=0.01), ShareBandit(sharing=0.01)
    play(first, table)
    second.load_state_dict(first.state_dict())
    runs = []
    for bandit in (first, second):
        torch.manual_seed(3)
        runs.append(play(bandit, table))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])


def test_on_the_meta_device_it_still_has_a_state():
    bandit = ShareBandit()
    bandit.draw(5)
    where = bandit.get_extra_state()
    state = bandit.to("meta").state_dict()
    assert state["counts"].is_meta and torch.equal(bandit.get_extra_state(), where)
    other = ShareBandit().to("meta")
    other.set_extra_state(where)
    assert torch.equal(other.to_empty(device="cpu").get_extra_state(), where)


def test_compiles_to_one_graph():
    plain, compiled = ShareBandit(sharing=0.01), ShareBandit(sharing=0.01)
    arm, done = torch.randint(4, (9, 1)), torch.rand(9, 1) < 0.5
    rows = arm, torch.full((9, 1), 0.25), torch.rand(9, 1), torch.rand(9, 1), done
    options = {"fullgraph": True, "backend": "eager"}
    plain.observe(*rows)
    torch.compile(compiled.observe, **options)(*rows)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(value, compiled.state_dict()[name], msg=name)
    for name in ("probs", "trust", "regret"):
        found = torch.compile(getattr(compiled, name), **options)()
        torch.testing.assert_close(found, getattr(plain, name)())


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"arms": (0.0,)}, r"arms.*\(0.0,\)"),
        ({"arms": (0.1, 1.0)}, r"arms.*\(0.1, 1.0\)"),
        ({"arms": (0.0, 0.5, 0.5)}, r"arms.*\(0.0, 0.5, 0.5\)"),
        ({"arms": (0.0, 1.5)}, r"arms.*1.5"),
        ({"learning_rate": 0.0}, "learning_rate.*0.0"),
        ({"exploration": 1.0}, "exploration.*1.0"),
        ({"sharing": -0.1}, "sharing.*-0.1"),
        ({"decay": 0.0}, "decay.*0.0"),
        ({"initial": (1.0,)}, r"initial.*4 arms.*1.0"),
        ({"initial": (1.0, 0.0, 1.0, 1.0)}, "initial.*0.0"),
        ({"trial_episodes": -1}, "trial_episodes.*-1"),
        ({"last_trial_episodes": -1}, "last_trial_episodes.*-1"),
        ({"probation": 1.2}, "probation.*1.2"),
        ({"hit_rate": 1.0}, "hit_rate.*1.0"),
        ({"whole_length": 0}, "whole_length.*0"),
        ({"evidence_low": 0.9}, "evidence.*0.9"),
        ({"trust_high": 0.7}, "trust.*0.7"),
    ],
)
def test_bad_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match):
        ShareBandit(**kwargs)


def test_shapes_must_agree():
    one, flat = torch.ones(3, 1), torch.ones(3)
    with pytest.raises(ValueError, match=r"differ.*\(3,\)"):
        ShareBandit().observe(one.long(), one, flat, one, one.bool())


class _Counting(EnvBase):
    """An episode of a fixed length that pays 1 at its end."""

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
        observation = torch.full((1,), float(self.time))
        return TensorDict(observation=observation, reward=done.float(), done=done, terminated=done)

    def _set_seed(self, seed):
        pass


class TestEpisodeShare:
    def policy(self, share):
        act = TensorDictModule(
            lambda x: torch.eye(2)[x.long().squeeze(-1) % 2], ["observation"], ["action"]
        )
        return TensorDictSequential(share, act)

    def env(self, share, lengths=(3, 5)):
        env = SerialEnv(len(lengths), [lambda n=n: _Counting(n) for n in lengths])
        primer = share.make_tensordict_primer()
        return TransformedEnv(env, Compose(InitTracker(), primer, RewardSum(), StepCounter()))

    def test_one_arm_an_episode(self):
        share = EpisodeShare(ShareBandit(gated=False))
        share.bandit.log_weights.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]).log())
        share.bandit.refresh()
        td = self.env(share).rollout(60, self.policy(share), break_when_any_done=False)
        arm = td[keys.ARM]
        assert arm.dtype == torch.int64 and arm.shape == (2, 60, 1)
        assert torch.equal(td[keys.SHARE], SHARES[arm])
        assert torch.equal(td[keys.ARM_PROB], share.bandit.probs()[arm])
        for key in (keys.ARM, keys.ARM_PROB):
            assert torch.equal(td["next", key], td[key])
        episode = td["is_init"].cumsum(1)
        for row, length in enumerate((3, 5)):
            assert episode[row, -1] == 60 // length
            starts = arm[row, ::length]
            assert torch.equal(arm[row], starts.repeat_interleave(length, 0))
            assert len(starts.unique()) > 1

    def test_the_bandit_learns_from_what_was_collected(self):
        share = EpisodeShare(ShareBandit())
        td = self.env(share).rollout(15, self.policy(share), break_when_any_done=False)
        batch = (td[keys.ARM], td[keys.ARM_PROB], td["next", "episode_reward"])
        share.bandit.observe(*batch, td["next", "step_count"], td["next", "done"])
        assert share.bandit.episodes == 5 + 3 and share.bandit.obtained == 8
        assert share.bandit.length_sums.sum() < 30 and share.bandit.ignored == 0

    def test_evaluation_draws_nothing(self):
        share = EpisodeShare(ShareBandit()).eval()
        env, policy = self.env(share), self.policy(share)
        state = torch.get_rng_state()
        td = env.rollout(12, policy, break_when_any_done=False)
        assert torch.equal(torch.get_rng_state(), state)
        assert td[keys.ARM].eq(0).all() and td[keys.SHARE].eq(0).all()
        assert td[keys.ARM_PROB].eq(1).all()
        carried = TensorDict(is_init=torch.ones(1, 1).bool(), batch_size=[1])
        carried[keys.ARM], carried[keys.ARM_PROB] = column(3), column(0.4)
        assert share(carried)[keys.SHARE] == 1


def test_an_arm_not_drawn_for_long_stays_possible():
    bandit = ShareBandit(arms=(0.0, 1.0), exploration=0.0)

    def finished(arm, number):
        column = torch.full((number, 1), float(arm))
        ones = torch.ones_like(column)
        lengths = ones * (100.0 if arm else 1.0)
        bandit.observe(column.long(), ones * 0.5, ones, lengths, ones.bool())

    finished(1, 1)
    for _ in range(100):
        finished(0, 50)
    assert torch.equal(bandit._shortness()[1], torch.ones(())) and bandit.probs()[1] > 0.0
