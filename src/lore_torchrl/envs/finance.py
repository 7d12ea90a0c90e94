"""A market with regimes: hold, buy or sell one share, in TorchRL's ``FinancialRegimeEnv``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import OneHot
from torchrl.envs import (
    EnvBase,
    FinancialRegimeEnv,
    RewardScaling,
    RewardSum,
    TransformedEnv,
)

from lore_torchrl.envs.batch import batch_rows
from lore_torchrl.envs.finance_advice import (
    ACTIONS,
    MIN_WINDOW,
    MarketDescriber,
    MomentumPlanner,
)
from lore_torchrl.envs.finance_view import STATE, MarketView, PriceChart, Profit

#: Rising and falling, calm and turbulent. The drifts are several times those of real
#: markets: with real ones a trend can hardly be told from chance within a year.
REGIMES = (
    {"drift": 0.6, "volatility": 0.12},
    {"drift": -0.6, "volatility": 0.12},
    {"drift": 1.5, "volatility": 0.35},
    {"drift": -1.5, "volatility": 0.35},
)


class RegimeSwitchingEnv(FinancialRegimeEnv):
    r"""One market of TorchRL's ``FinancialRegimeEnv`` whose drift and volatility change.

    The log price moves by :math:`\mu_k / 252 + \sigma_k \varepsilon / \sqrt{252}` a day,
    where the regime :math:`k` is drawn at each reset, and anew after a day with probability
    1 / ``regime_days``; what comes out does not tell it. TorchRL's own rules hold beside
    three changes:

    - The action is one-hot.
    - The episode's end is an end (``terminated``), and what is still held is sold there.
      Otherwise a loss would cost nothing as long as it is not sold, and the best rule
      would be to sell gains only.
    - Prices begin at 1. TorchRL takes a trade's cost as a share of the *price* from a
      reward that is a share of the *entry*; the two are in one unit only at a price of 1.

    Keyword Args:
        regimes: Mappings with ``drift`` (a year) and ``volatility`` (standard deviation of
            a year). Default: :data:`REGIMES`.
        regime_days: Mean days between draws of a regime, which may draw the same;
            ``None`` for one regime an episode.
            Default: ``60.0``.
        cost: Cost of a trade, as a share. Default: ``0.001``.
        initial_price: Price before the first window. Default: ``1.0``.
        window: Prices that are seen. Default: ``20``.
        max_steps: Days of an episode. Default: ``252``.
        seed: Of all its episodes. Default: ``0``.

    Raises:
        ValueError: If a setting is out of range.

    Examples:
        >>> env = RegimeSwitchingEnv(window=8, max_steps=3)
        >>> env.rollout(10)["next", "terminated"].flatten()
        tensor([False, False,  True])
    """

    def __init__(
        self,
        *,
        regimes: Sequence[Mapping[str, float]] = REGIMES,
        regime_days: float | None = 60.0,
        cost: float = 0.001,
        initial_price: float = 1.0,
        window: int = 20,
        max_steps: int = FinancialRegimeEnv.DEFAULT_MAX_STEPS,
        seed: int = 0,
    ) -> None:
        if isinstance(regimes, Mapping):
            raise ValueError(f"regimes must be a list of mappings, got one mapping: {regimes}.")
        _check_regimes(regimes)
        for name, value, possible, rule in (
            (
                "window",
                window,
                isinstance(window, int) and window >= MIN_WINDOW,
                f"a whole number, at least {MIN_WINDOW}",
            ),
            ("max_steps", max_steps, max_steps >= 1, "positive"),
            ("cost", cost, 0 <= cost < 1, "in [0, 1)"),
            ("initial_price", initial_price, 0 < initial_price < math.inf, "positive"),
            ("regime_days", regime_days, regime_days is None or regime_days >= 1, "at least 1"),
        ):
            if not possible:
                raise ValueError(f"{name} must be {rule}, got {value}.")
        params = [
            self.gen_params(
                window_size=window,
                initial_price=float(initial_price),
                volatility=float(regime["volatility"]),
                drift=float(regime["drift"]),
                transaction_cost=float(cost),
                max_steps=max_steps,
            )
            for regime in regimes
        ]
        super().__init__(params[0], seed=seed)
        self._change = 0.0 if regime_days is None else 1.0 / regime_days
        self._regimes = params
        self._regime = params[0]
        self.action_spec = OneHot(len(ACTIONS), dtype=torch.int64)
        # The regime stays inside; and StepCounter, which a run appends, has a step_count
        # of its own.
        seen = self.observation_spec.clone()
        seen["day"] = seen["step_count"]
        del seen["step_count"], seen["params"]
        self.observation_spec, self.state_spec = seen, seen.clone()

    def _draw(self) -> TensorDictBase:
        index = torch.randint(len(self._regimes), (), generator=self.rng)
        return self._regimes[int(index)]

    def _reset(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        self._regime = self._draw()
        return self._outward(super()._reset(self._regime))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        state = tensordict.select(*STATE).update(self._regime)
        state.set("action", tensordict.get("action").argmax(-1, keepdim=True))
        out = super()._step(state.set("step_count", tensordict.get("day")))
        if out.get("done").any():
            out.set("reward", out.get("reward") + self._settlement(out))
            out.set("terminated", out.get("done").clone())
            out.set("truncated", torch.zeros_like(out.get("done")))
        elif torch.rand((), generator=self.rng) < self._change:
            self._regime = self._draw()
        return self._outward(out)

    @staticmethod
    def _outward(out: TensorDictBase) -> TensorDictBase:
        return out.exclude("params").rename_key_("step_count", "day")

    @staticmethod
    def _settlement(out: TensorDictBase) -> Tensor:
        price, entry = out.get("price_history")[..., -1:], out.get("entry_price")
        cost = out["params", "transaction_cost"] * price
        profit = (price - entry) / entry.clamp_min(1e-6) - cost
        return torch.where(out.get("current_holdings"), profit, 0.0)


def _check_regimes(regimes: Sequence[Mapping[str, float]]) -> None:
    if not regimes:
        raise ValueError(f"regimes must hold at least one, got {regimes!r}.")
    for regime in regimes:
        if set(regime) != {"drift", "volatility"}:
            raise ValueError(f"A regime has drift and volatility, got {dict(regime)}.")
        if not (math.isfinite(regime["drift"]) and 0 < regime["volatility"] < math.inf):
            raise ValueError(
                f"A regime's drift must be finite and its volatility positive, got {dict(regime)}."
            )


class FinancialRegimes:
    """:class:`RegimeSwitchingEnv` as an :class:`~lore_torchrl.envs.family.EnvFamily`.

    The reward is in percent. ``success`` is a year that ended in profit: with a return above
    0, after costs, what was still held sold at the last price. As in TorchRL a tenth of each
    day's return counts too while a share is held. Waiting is often right here, so use
    ``lore.calls.refute=false``.

    Args:
        env_id: A name for logs. Default: ``"FinancialRegimes"``.

    Keyword Args:
        max_steps: Days of an episode; ``None`` for TorchRL's own, 252. Default: ``None``.
        window: Prices that are seen, at least 6. Default: ``20``.
        regimes: Mappings with ``drift`` and ``volatility``, both a year's; ``None`` for
            :data:`REGIMES`. Default: ``None``.
        regime_days: Mean days between draws of a regime, which may draw the same;
            ``None`` for one regime an episode.
            Default: ``60.0``.
        cost: Cost of a trade, as a share. Default: ``0.001``.
        initial_price: Price before the first window. Default: ``1.0``.
        calm_confidence: Confidence of the planner's advice where volatility is low; it grows
            to 1 where it is high. The weight of advice is ``beta`` times confidence, so that
            with 0.25 advice weighs four times as much in a turbulent market as in a calm one.
            Default: ``1.0``, the same in all.

    Raises:
        ValueError: If a setting is out of range.

    Examples:
        >>> family = FinancialRegimes(max_steps=10)
        >>> env = family.make_env(num_envs=2, seed=0)
        >>> env.rollout(10)["observation"].shape
        torch.Size([2, 10, 23])
    """

    def __init__(
        self,
        env_id: str = "FinancialRegimes",
        *,
        max_steps: int | None = None,
        window: int = 20,
        regimes: Sequence[Mapping[str, float]] | None = None,
        regime_days: float | None = 60.0,
        cost: float = 0.001,
        initial_price: float = 1.0,
        calm_confidence: float = 1.0,
    ) -> None:
        self.env_id = env_id
        self.settings: dict[str, Any] = {
            "window": window,
            "regimes": REGIMES if regimes is None else regimes,
            "regime_days": regime_days,
            "cost": cost,
            "initial_price": initial_price,
            "max_steps": RegimeSwitchingEnv.DEFAULT_MAX_STEPS if max_steps is None else max_steps,
        }
        self.planner = MomentumPlanner(calm_confidence=calm_confidence)
        RegimeSwitchingEnv(**self.settings)

    def make_env(
        self,
        *,
        num_envs: int,
        seed: int,
        evaluation: bool = False,
        parallel: bool = False,
        pixels: bool = False,
    ) -> EnvBase:
        """Make a batch of markets, seen by ``MarketView``."""
        # TorchRL's environment draws a whole batch from one generator: a row has its own.
        batch = batch_rows(
            self._make_row, num_envs=num_envs, seed=seed, evaluation=evaluation, parallel=parallel
        )
        s = self.settings
        view = MarketView(**{name: s[name] for name in ("window", "initial_price", "max_steps")})
        env = TransformedEnv(batch)
        for transform in (view, RewardScaling(0.0, 100.0), RewardSum(), Profit()):
            env.append_transform(transform)
        if pixels:
            env.append_transform(PriceChart(window=s["window"]))
        return env

    def _make_row(self, seed: int) -> EnvBase:
        return RegimeSwitchingEnv(**self.settings, seed=seed)

    def make_describer(self, *, memory: bool = False, image: bool = False) -> MarketDescriber:
        """Make the describer; the window is all that it remembers, and there is no picture."""
        s = self.settings
        return MarketDescriber(cost=s["cost"] * s["initial_price"], max_steps=s["max_steps"])

    def make_planner(self) -> MomentumPlanner:
        """Make the planner, which follows a clear trend."""
        return self.planner
