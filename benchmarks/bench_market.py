"""What simple rules earn in a market, this package's and TorchRL's own.

Run from the project's root::

    python benchmarks/bench_market.py --market regimes --episodes 100

Returns of held-out episodes of 252 days in percent, with a 95% bootstrap interval, and the
share of episodes that return more than 0; never trading returns 0. ``torchrl`` is
``FinancialRegimeEnv`` as it comes, ``torchrl1`` the same at a price of 1, ``stock`` its drift and
volatility in this package's market, where what is held is sold at the end, and ``regimes`` this
package's default.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.envs import FinancialRegimeEnv

from lore_torchrl.envs.batch import close_env
from lore_torchrl.envs.finance import (
    ACTIONS,
    STATE,
    FinancialRegimes,
    MarketDescriber,
    MomentumPlanner,
)
from lore_torchrl.experiments import bootstrap

BUY, SELL = ACTIONS.index("buy"), ACTIONS.index("sell")
STOCK = [{"drift": 0.05, "volatility": 0.2}]
DAYS = FinancialRegimeEnv.DEFAULT_MAX_STEPS
Rule = Callable[[dict[str, Any]], int]


def momentum(cost: float) -> Rule:
    """Return this package's planner as a rule."""
    describer, planner = MarketDescriber(cost=cost, max_steps=DAYS), MomentumPlanner()
    return lambda seen: int(np.argmax(planner(describer.request(0, seen))))


def sell_gains_only(cost: float) -> Rule:
    """Return the rule to buy at once, sell what has gained four costs, keep what has not."""

    def rule(seen: dict[str, Any]) -> int:
        gain = seen["price_history"][-1] / max(seen["entry_price"].item(), 1e-6) - 1.0
        return SELL if seen["current_holdings"].item() and gain > 4.0 * cost else BUY

    return rule


def rules(cost: float) -> dict[str, Rule]:
    """Return the rules by name; ``momentum`` is this package's planner."""
    random = np.random.default_rng(0)
    return {
        "random": lambda seen: int(random.integers(3)),
        "buy and keep": lambda seen: SELL if seen["day"] >= DAYS - 1 else BUY,
        "gains only": sell_gains_only(cost),
        "momentum": momentum(cost),
    }


def own_returns(adapter: FinancialRegimes, rule: Rule, episodes: int) -> np.ndarray:
    """Return each held-out episode's return, percent."""
    keys = adapter.make_describer().in_keys
    env = adapter.make_env(num_envs=episodes, seed=0, evaluation=True)

    def policy(tensordict: TensorDict) -> TensorDict:
        seen = {key: tensordict[key].numpy() for key in keys}
        rows = ({key: seen[key][row] for key in keys} for row in range(episodes))
        actions = torch.tensor([rule(one) for one in rows])
        return tensordict.set("action", torch.nn.functional.one_hot(actions, len(ACTIONS)))

    rollout = env.rollout(DAYS, policy)
    close_env(env)
    return rollout["next", "episode_reward"][:, -1, 0].numpy()


def torchrl_returns(price: float, rule: Rule, episodes: int) -> np.ndarray:
    """Return the same of TorchRL's own environment, where nothing is sold at the end."""
    totals = []
    for seed in range(episodes):
        env = FinancialRegimeEnv(seed=seed)
        state, total = env.reset(env.gen_params(initial_price=price)), 0.0
        for _ in range(DAYS):
            seen = {key: state[key].numpy() for key in STATE}
            state["action"] = torch.tensor([rule(seen | {"day": state["step_count"].numpy()})])
            state = env.step(state)["next"]
            total += state["reward"].item()
        totals.append(100.0 * total)
    return np.array(totals)


def main() -> None:
    """Print a table of one market."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    markets = ("regimes", "stock", "torchrl1", "torchrl")
    parser.add_argument("--market", choices=markets, default="regimes")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--rule", choices=rules(0.0), nargs="*", help="default: all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    price = 100.0 if args.market == "torchrl" else 1.0
    print(f"| {args.market} | return, % | 95% interval | return > 0 |\n| --- | --- | --- | --- |")
    for name, rule in rules(0.001 * price).items():
        if args.rule and name not in args.rule:
            continue
        if args.market.startswith("torchrl"):
            returns = torchrl_returns(price, rule, args.episodes)
        else:
            adapter = FinancialRegimes(regimes=STOCK if args.market == "stock" else None)
            returns = own_returns(adapter, rule, args.episodes)
        mean, low, high = bootstrap(lambda x: x.mean(-1), returns)
        print(
            f"| {name} | {mean:.1f} | {low:.1f} to {high:.1f} | {(returns > 0).mean():.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
