"""The market: its rules, its words, and the rule that follows its trend."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
import torch

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.advisors.scripted import ScriptedAdvisor
from lore_torchrl.envs.adapter import build_adapter
from lore_torchrl.envs.finance import (
    ACTIONS,
    REGIMES,
    FinancialRegimes,
    Market,
    MarketDescriber,
    MomentumPlanner,
    RegimeSwitchingEnv,
)
from lore_torchrl.modules import AdviceBatch, LogitMixer

HOLD, BUY, SELL = torch.eye(3, dtype=torch.int64)
DRIFT = math.log(1.01)
# Without chance: the price rises by 1% each day.
SURE = {"regimes": [{"drift": 252 * DRIFT, "volatility": 1e-9}], "cost": 0.002}


def play(env, actions):
    """Step a market of batch size [] through ``actions``; return each step's outcome."""
    state, outcomes = env.reset(), []
    for action in actions:
        state = env.step(state.set("action", action))["next"]
        outcomes.append(state)
        state = state.exclude("reward", "done", "terminated", "truncated")
    return outcomes


def test_a_trade_pays_its_gain_less_costs_and_a_tenth_of_each_day():
    env = RegimeSwitchingEnv(**SURE, max_steps=5)
    rewards = [out["reward"].item() for out in play(env, [HOLD, BUY, BUY, SELL, SELL])]
    prices = [1.01**day for day in range(5)]
    expected = [
        0.0,
        -0.002 * prices[1] + 0.1 * 0.01,
        0.1 * 0.01,
        prices[3] / prices[1] - 1.0 - 0.002 * prices[3],
        0.0,
    ]
    assert rewards == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("drift", [DRIFT, -DRIFT])
def test_what_is_held_at_the_end_is_sold(drift):
    regime = {"drift": 252 * drift, "volatility": 1e-9}
    env = RegimeSwitchingEnv(regimes=[regime], cost=0.002, max_steps=3)
    *_, last = play(env, [BUY, HOLD, HOLD])
    end, day = math.exp(3 * drift), 0.1 * (math.exp(drift) - 1.0)
    assert last["reward"].item() == pytest.approx(day + end - 1.0 - 0.002 * end, abs=1e-6)
    assert last["terminated"].item() and last["done"].item() and not last["truncated"].item()


def test_regimes_change_within_an_episode_and_stay_hidden():
    # The sign of a day's return tells the regime.
    regimes = [{"drift": sign * 252 * DRIFT, "volatility": 1e-9} for sign in (1, -1)]
    for regime_days in (5.0, None):
        env = RegimeSwitchingEnv(regimes=regimes, regime_days=regime_days, max_steps=50, seed=1)
        signs = []
        for _ in range(4):
            rollout = env.rollout(50)
            assert not {"params", "drift"} & {str(key) for key in rollout.keys(True)}
            signs.append(rollout["next", "price_history"][:, -2:].diff(dim=-1).sign().flatten())
        changes = sum(int((one.diff() != 0).sum()) for one in signs)
        # Half of 4 * 49 / 5 draws give the other of the two.
        assert 10 < changes < 30 if regime_days else changes == 0
        assert set(torch.cat(signs).tolist()) == {1.0, -1.0}


def test_observation_holds_what_a_trader_sees():
    adapter = FinancialRegimes(**SURE, max_steps=4, window=6)
    env = adapter.make_env(num_envs=1, seed=0)
    state = env.reset()
    assert state["observation"][0].tolist() == pytest.approx([0.0] * 7 + [0.0, 1.0], abs=1e-4)
    for action in (BUY, HOLD):
        state = env.step(state.set("action", action[None]))["next"]
    expected = [0.0] * 3 + [100 * DRIFT] * 2 + [2 * DRIFT, 1.0, 20 * DRIFT, 0.5]
    assert state["observation"][0].tolist() == pytest.approx(expected, abs=1e-4)


def test_success_is_a_year_in_profit():
    falling = {"regimes": [{"drift": -1.0, "volatility": 1e-9}], "max_steps": 3}
    for settings, success in ((SURE | {"max_steps": 3}, [False, True]), (falling, [False, False])):
        env = FinancialRegimes(**settings).make_env(num_envs=2, seed=0)
        state, seen = env.reset(), []
        for _ in range(3):
            # The first row never trades.
            state = env.step(state.set("action", torch.stack([HOLD, BUY])))["next"]
            seen.append(state["success"].flatten().tolist())
        assert seen == [[False, False], [False, False], success]


def test_a_row_does_not_depend_on_the_others():
    def buy(tensordict):
        return tensordict.set("action", BUY.expand(*tensordict.shape, 3))

    adapter = FinancialRegimes(max_steps=10)
    envs = [adapter.make_env(num_envs=rows, seed=4) for rows in (1, 3)]
    for _ in range(2):
        prices = [env.rollout(12, buy, break_when_any_done=False)["price_history"] for env in envs]
        assert torch.equal(prices[0][0], prices[1][0])


def observation(returns, *, held=False, entry=1.0, day=0):
    prices = np.exp(np.cumsum([0.0, *returns])).astype(np.float32)
    return {
        "price_history": prices,
        "current_holdings": np.array([held]),
        "entry_price": np.array([entry], dtype=np.float32),
        "day": np.array(day),
    }


def wave(mean, spread, days=19):
    """Return daily returns of a given mean and standard deviation."""
    turns = np.resize([1.0, -1.0], days)
    turns = (turns - turns.mean()) / turns.std(ddof=1)
    return mean + spread * turns


def test_the_text_tells_trend_volatility_regime_position_and_cost():
    describer = MarketDescriber(cost=0.001, max_steps=252)
    rising = observation(wave(0.01, 0.3 / 252**0.5), held=True, entry=0.9)
    request = describer.request(0, rising)
    # 0.01 * sqrt(19) / 0.0189 = 2.3 standard errors, the nearest half of which is 2.5.
    for words in (
        "In the last 19 days it rose by about 20.6%",
        "Volatility is about 30% a year",
        "2.5 standard errors above none",
        "looks rising and turbulent",
        "You hold one share, at a profit",
        "costs about 0.10% at the year's first price, and more",
        "More than 10 days are left",
    ):
        assert words in request.description
    assert request.cache_key == "19d 0.001 +2.5 +2 0.3 in+1"
    assert describer.abstract_state(0, rising) == "19d 0.001 rising turbulent in"
    falling = observation(wave(-0.004, 0.1 / 252**0.5), day=242)
    text = describer.request(0, falling).description
    assert "fell by about" in text and "falling and calm" in text and "hold no share" in text
    assert "10 days or fewer are left" in text
    flat = observation(wave(0.0, 0.2 / 252**0.5))
    assert describer.abstract_state(0, flat) == "19d 0.001 flat moving out"


def test_situations_come_again():
    describer = MarketDescriber(cost=0.001, max_steps=252)
    one, close, other = (
        describer.cache_key(0, observation(wave(mean, 0.0189))) for mean in (0.01, 0.0101, 0.02)
    )
    assert one == close != other
    # Prices that never move have no trend, rather than one that cannot be divided by.
    assert Market.read(observation([0.0] * 19), max_steps=252).trend == 0.0


@pytest.mark.parametrize(
    ("mean", "held", "day", "cost", "action"),
    [
        (0.01, False, 0, 0.001, "buy"),
        (0.01, True, 0, 0.001, "hold"),
        (-0.01, True, 0, 0.001, "sell"),
        (-0.01, False, 0, 0.001, "hold"),
        (0.0, True, 0, 0.001, "hold"),
        (0.0, False, 0, 0.001, "hold"),
        # Two trades cost more than the trend brings, in a year or in what is left of it.
        (0.01, False, 0, 0.2, "hold"),
        (0.01, False, 250, 0.02, "hold"),
        (0.01, False, 100, 0.02, "buy"),
    ],
)
def test_the_planner_follows_clear_trends_as_far_as_they_pay(mean, held, day, cost, action):
    describer = MarketDescriber(cost=cost, max_steps=252)
    seen = observation(wave(mean, 0.0189), held=held, day=day)
    values = MomentumPlanner()(describer.request(0, seen))
    assert ACTIONS[int(np.argmax(values))] == action


def returns_of(rule, *, rows=12, days=100):
    """Return of each held-out episode, percent."""
    adapter = FinancialRegimes(max_steps=days)
    keys = adapter.make_describer().in_keys

    def policy(tensordict):
        seen = {key: tensordict[key].numpy() for key in keys}
        actions = [rule({key: seen[key][row] for key in keys}) for row in range(rows)]
        return tensordict.set("action", torch.eye(3, dtype=torch.int64)[actions])

    env = adapter.make_env(num_envs=rows, seed=0, evaluation=True)
    return env.rollout(days, policy)["next", "episode_reward"][:, -1, 0]


def test_following_the_trend_earns_more_than_chance_and_than_never_trading():
    describer, planner = FinancialRegimes(max_steps=100).make_describer(), MomentumPlanner()
    random = np.random.default_rng(0)
    earned = returns_of(lambda seen: int(np.argmax(planner(describer.request(0, seen)))))
    chance = returns_of(lambda seen: int(random.integers(3)))
    error = (earned.var() / len(earned) + chance.var() / len(chance)).sqrt()
    assert earned.mean() > chance.mean() + 2 * error
    assert earned.mean() > 2 * earned.std() / len(earned) ** 0.5


def advice(spread, **settings):
    adapter = FinancialRegimes(**settings)
    request = adapter.make_describer().request(0, observation(wave(0.005, spread)))
    return asyncio.run(ScriptedAdvisor(adapter.make_planner(), confidence=0.8).advise([request]))[0]


def test_advice_weighs_more_in_turbulence_where_that_is_configured():
    calm, turbulent = (advice(spread, calm_confidence=0.25) for spread in (0.0063, 0.0189))
    between = advice(0.2 / 252**0.5, calm_confidence=0.25)
    assert calm.logits == turbulent.logits == between.logits == (0.0, 3.0, 0.0)
    assert (calm.confidence, between.confidence, turbulent.confidence) == pytest.approx(
        (0.2, 0.4, 0.8)
    )
    given = AdviceBatch.clean(
        torch.tensor([calm.logits, turbulent.logits]),
        torch.tensor([[calm.confidence], [turbulent.confidence]]),
        torch.ones(2, 1, dtype=torch.bool),
    )
    mixed = LogitMixer().mix(torch.zeros(2, 3).log_softmax(-1), given, torch.ones(2, 1)).policy
    # Log odds of what is advised: weight of the gate times confidence times the logit.
    odds = mixed[:, 1] - mixed[:, 0]
    assert odds.tolist() == pytest.approx([0.2 * 3.0, 0.8 * 3.0], rel=1e-4)
    assert advice(0.0063).confidence == advice(0.0189).confidence == 0.8


def test_the_chart_shows_the_price_and_what_is_held():
    env = FinancialRegimes(max_steps=9).make_env(num_envs=2, seed=0, pixels=True)
    state = env.step(env.reset().set("action", torch.stack([HOLD, BUY])))["next"]
    out, bought = state["pixels"]
    assert out.shape == (96, 8 * 20, 3) and out.dtype == torch.uint8
    # Every column has a bar, grey without a share and green with one.
    for picture, color in ((out, (90, 90, 90)), (bought, (30, 140, 60))):
        assert (picture == torch.tensor(color, dtype=torch.uint8)).all(-1).any(0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 5}, "window.*6.*5"),
        ({"cost": -0.1}, "cost.*-0.1"),
        ({"regime_days": 0.5}, "regime_days.*0.5"),
        ({"regimes": []}, "at least one"),
        ({"regimes": [{"drift": 0.1}]}, "drift and volatility.*0.1"),
        ({"regimes": [{"drift": 0.1, "volatility": 0.0}]}, "positive.*0.0"),
        ({"calm_confidence": 1.5}, "calm_confidence.*1.5"),
    ],
)
def test_impossible_markets(settings, message):
    with pytest.raises(ValueError, match=message):
        FinancialRegimes(**settings)


def test_other_questions_are_not_the_planners():
    assert MomentumPlanner()(AdviceRequest("", ACTIONS, "")) is None
    adapter = build_adapter(
        "lore_torchrl.envs.finance.FinancialRegimes", "x", max_steps=7, options={"window": 9}
    )
    assert adapter.settings["max_steps"] == 7 and adapter.settings["regimes"] == REGIMES
