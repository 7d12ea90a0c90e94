"""A market with regimes: hold, buy or sell one share, in TorchRL's ``FinancialRegimeEnv``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Composite, OneHot, Unbounded
from torchrl.envs import EnvBase, FinancialRegimeEnv, RewardScaling, RewardSum, TransformedEnv

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.envs.adapter import MemorylessDescriber
from lore_torchrl.envs.batch import ObservationTransform, Success, batch_rows
from lore_torchrl.envs.programs.finance import PROGRAMS

ACTIONS = ("hold", "buy", "sell")
DAYS_A_YEAR = 252
WEEK = 5
# Volatilities, a year's, that are told apart.
_LEVELS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.2)
#: Volatility up to which a market is calm, and from which it is turbulent.
CALM, TURBULENT = 0.15, 0.3
#: Standard errors from none beyond which a trend is clear.
CLEAR = 0.75
# Days before the end in which it hardly pays to buy.
_LAST_DAYS = 10
# Gain or loss of what is held that is more than about even.
_EVEN = 0.01
_MISSION = "end the year in profit, after costs"
#: Entries of ``FinancialRegimeEnv`` that are carried from day to day, beside the day.
STATE = ("price_history", "current_holdings", "entry_price")
_HEIGHT, _COLUMNS = 96, 8
# Paper, price without a share, and price with one.
_CHART_COLORS = ((250, 250, 250), (90, 90, 90), (30, 140, 60))
#: Rising and falling, calm and turbulent. The drifts are several times those of real
#: markets: with real ones a trend can hardly be told from chance within a year.
REGIMES = (
    {"drift": 0.6, "volatility": 0.12},
    {"drift": -0.6, "volatility": 0.12},
    {"drift": 1.5, "volatility": 0.35},
    {"drift": -1.5, "volatility": 0.35},
)


class FinancialRegimes:
    """:class:`RegimeSwitchingEnv` as an :class:`~lore_torchrl.envs.adapter.EnvAdapter`.

    The reward is in percent. ``success`` is a year with a return above 0, after costs, what was
    still held sold at the last price. Waiting is often right here, so use
    ``lore.calls.noop_filter=false``.

    Args:
        env_id: Not used. Default: ``"FinancialRegimes"``.

    ``calm_confidence`` is as of :class:`MomentumPlanner`, the other keywords are as of
    :class:`RegimeSwitchingEnv`, with the same defaults, ``None`` standing for them.

    Raises:
        ValueError: If a setting is out of range.
    """

    programs = PROGRAMS

    def __init__(
        self,
        env_id: str = "FinancialRegimes",
        *,
        max_steps: int | None = None,
        window: int = 20,
        regimes: Sequence[Mapping[str, float]] | None = None,
        regime_days: float | None = 60.0,
        cost: float = 0.001,
        calm_confidence: float = 1.0,
    ) -> None:
        self.settings: dict[str, Any] = {
            "window": window,
            "regimes": REGIMES if regimes is None else regimes,
            "regime_days": regime_days,
            "cost": cost,
            "max_steps": FinancialRegimeEnv.DEFAULT_MAX_STEPS if max_steps is None else max_steps,
        }
        self.planner = MomentumPlanner(calm_confidence=calm_confidence)
        RegimeSwitchingEnv(**self.settings)

    def make_env(self, *, pixels: bool = False, **batch: Any) -> EnvBase:
        """Make a batch of markets: see :meth:`lore_torchrl.envs.adapter.EnvAdapter.make_env`."""
        # TorchRL's environment draws a whole batch from one generator: a row has its own.
        env = TransformedEnv(batch_rows(self._make_row, **batch), RewardScaling(0.0, 100.0))
        env.append_transform(RewardSum()).append_transform(Success(self.success))
        return env.append_transform(PriceChart()) if pixels else env

    def _make_row(self, seed: int) -> EnvBase:
        return RegimeSwitchingEnv(**self.settings, seed=seed)

    def success(self, following: TensorDictBase) -> Tensor:
        """Return whether a year has ended in profit, bool ``[N, 1]``."""
        return following.get("done") & (following.get("episode_reward") > 0)

    def make_describer(self, *, memory: bool = False, image: bool = False) -> MarketDescriber:
        """Make the describer, which has no memory but the window, and no picture."""
        s = self.settings
        return MarketDescriber(cost=s["cost"], max_steps=s["max_steps"])

    def make_planner(self) -> MomentumPlanner:
        """Make the planner, which follows a clear trend."""
        return self.planner


class RegimeSwitchingEnv(FinancialRegimeEnv):
    r"""One market of TorchRL's ``FinancialRegimeEnv`` whose drift and volatility change.

    The log price moves by :math:`\mu_k / 252 + \sigma_k \varepsilon / \sqrt{252}` a day,
    where the regime :math:`k` is drawn at each reset, and again after a day with probability
    1 / ``regime_days``; what comes out does not tell it. TorchRL's own rules hold (a tenth of
    each day's return counts while a share is held), with these changes:

    - The action is one-hot.
    - What is still held at the episode's end (``terminated``) is sold there.
    - ``observation``, float32 ``[window + 3]``, is what a trader sees: the daily log returns of
      the window in percent, the log price against the first, whether a share is held, ten times
      its log gain (0 without one), and the share of days left.
    - Prices begin at 1. TorchRL takes a trade's cost as a share of the *price* from a
      reward that is a share of the *entry*; the two are in one unit only at a price of 1.

    Keyword Args:
        regimes: Mappings with ``drift`` and ``volatility``, both a year's.
            Default: :data:`REGIMES`.
        regime_days: Mean days between draws of a regime, which may draw the same; ``None`` for
            one regime an episode. Default: ``60.0``.
        cost: Cost of a trade, as a share. Default: ``0.001``.
        window: Prices that are seen, at least 6. Default: ``20``.
        max_steps: Days of an episode. Default: ``252``.
        seed: Of all its episodes. Default: ``0``.

    Raises:
        ValueError: If a setting is out of range.
    """

    def __init__(
        self,
        *,
        regimes: Sequence[Mapping[str, float]] = REGIMES,
        regime_days: float | None = 60.0,
        cost: float = 0.001,
        window: int = 20,
        max_steps: int = FinancialRegimeEnv.DEFAULT_MAX_STEPS,
        seed: int = 0,
    ) -> None:
        if isinstance(regimes, Mapping) or not regimes:
            raise ValueError(f"regimes must be a list of mappings, at least one, got {regimes!r}.")
        for regime in regimes:
            finite = all(map(math.isfinite, regime.values()))
            if set(regime) != {"drift", "volatility"} or not finite or regime["volatility"] <= 0:
                raise ValueError(
                    f"A regime has finite drift and volatility, the latter positive, got {regime}."
                )
        whole = f"a whole number, at least {WEEK + 1}"
        for name, value, possible, rule in (
            ("window", window, isinstance(window, int) and window > WEEK, whole),
            ("cost", cost, 0 <= cost < 1, "in [0, 1)"),
            ("regime_days", regime_days, regime_days is None or regime_days >= 1, "at least 1"),
        ):
            if not possible:
                raise ValueError(f"{name} must be {rule}, got {value}.")
        shared = {"window_size": window, "max_steps": max_steps, "transaction_cost": float(cost)}
        shared["initial_price"] = 1.0  # else cost and reward are in different units
        self._regimes = [
            self.gen_params(**{name: float(value) for name, value in regime.items()}, **shared)
            for regime in regimes
        ]
        super().__init__(self._regimes[0], seed=seed)
        self._change = 0.0 if regime_days is None else 1.0 / regime_days
        self.action_spec = OneHot(len(ACTIONS), dtype=torch.int64)
        # The regime stays inside; and StepCounter, which a run appends, has a step_count
        # of its own.
        seen = self.observation_spec.clone()
        seen["day"] = seen["step_count"]
        del seen["step_count"], seen["params"]
        self.state_spec = seen.clone()
        seen["observation"] = Unbounded((window + 3,))
        self.observation_spec = seen
        self._days = max_steps

    def _draw_regime(self) -> TensorDictBase:
        self._regime = self._regimes[torch.randint(len(self._regimes), (), generator=self.rng)]
        return self._regime

    def _reset(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        return self._outward(super()._reset(self._draw_regime()))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        state = tensordict.select(*STATE).update(self._regime)
        state.set("action", tensordict.get("action").argmax(-1, keepdim=True))
        out = super()._step(state.set("step_count", tensordict.get("day")))
        if out.get("done").any():
            # What selling brings, where a share is held.
            price, entry = out.get("price_history")[-1:], out.get("entry_price")
            cost = out["params", "transaction_cost"] * price
            profit = (price - entry) / entry.clamp_min(1e-6) - cost
            sold = torch.where(out.get("current_holdings"), profit, 0.0)
            out.set("reward", out.get("reward") + sold)
            out.set("terminated", out.get("done").clone())
            out.set("truncated", torch.zeros_like(out.get("done")))
        elif torch.rand((), generator=self.rng) < self._change:
            self._draw_regime()
        return self._outward(out)

    def _outward(self, out: TensorDictBase) -> TensorDictBase:
        out = out.exclude("params").rename_key_("step_count", "day")
        prices, held, entry, day = (out.get(key) for key in (*STATE, "day"))
        logs = prices.log()
        gain = torch.where(held, logs[-1:] - entry.clamp_min(1e-6).log(), 0.0)
        parts = [
            100.0 * logs.diff(),
            logs[-1:],
            held.float(),
            10.0 * gain,
            (1.0 - day / self._days).reshape(1),
        ]
        return out.set("observation", torch.cat(parts))


class PriceChart(ObservationTransform):
    """Draw ``pixels``, uint8 ``[*B, 96, 8 window, 3]``, for people.

    A bar for each price of the window, green while a share is held.
    """

    def __init__(self) -> None:
        super().__init__(in_keys=["price_history", "current_holdings"], out_keys=["pixels"])

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        prices, held = (next_tensordict.get(key) for key in self.in_keys)
        low, high = prices.aminmax(dim=-1, keepdim=True)
        heights = 4.0 + (_HEIGHT - 8.0) * (prices - low) / (high - low).clamp_min(1e-9)
        bars = torch.arange(_HEIGHT, 0, -1).view(-1, 1) <= heights.unsqueeze(-2)
        paper, grey, green = torch.tensor(_CHART_COLORS, dtype=torch.uint8)
        ink = torch.where(held[..., None, None], green, grey)
        chart = torch.where(bars.unsqueeze(-1), ink, paper)
        return next_tensordict.set("pixels", chart.repeat_interleave(_COLUMNS, -2))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare the entry."""
        *batch, window = observation_spec["price_history"].shape
        observation_spec["pixels"] = Bounded(
            0, 255, (*batch, _HEIGHT, _COLUMNS * window, 3), dtype=torch.uint8
        )
        return observation_spec


@dataclass(frozen=True, slots=True)
class Market:
    r"""What counts of a window of prices, coarse enough for situations to come again.

    Args:
        days: Daily returns :math:`n` in the window.
        trend: Standard errors of the mean daily return from none,
            :math:`\bar r \sqrt n / s`, to the next half, from -3 to 3.
        week: The same of the last five days, to the next whole, from -2 to 2.
        volatility: :math:`s \sqrt{252}`, to the nearest level.
        held: Whether a share is held.
        gain: -1, 0 or 1: held at a loss of more than 1%, about even, at a gain.
        ending: Whether ten days or fewer are left.
    """

    days: int
    trend: float
    week: float
    volatility: float
    held: bool
    gain: int
    ending: bool

    @classmethod
    def read(cls, observation: Mapping[str, Any], *, max_steps: int) -> Market:
        """Read one row of the environment's output, of episodes of ``max_steps`` days."""
        prices = np.asarray(observation["price_history"], dtype=np.float64)
        returns = np.diff(np.log(prices))
        spread = max(float(returns.std(ddof=1)), 1e-9)
        held = bool(observation["current_holdings"].item())
        gain = prices[-1] / float(observation["entry_price"].item()) - 1.0 if held else 0.0

        def errors(part: np.ndarray, step: float, most: float) -> float:
            value = part.mean() * math.sqrt(len(part)) / spread
            # Without the sum a value that rounds to nothing could be -0.0.
            return float(np.clip(round(value / step) * step, -most, most)) + 0.0

        yearly = spread * math.sqrt(DAYS_A_YEAR)
        return cls(
            days=len(returns),
            trend=errors(returns, 0.5, 3.0),
            week=errors(returns[-WEEK:], 1.0, 2.0),
            volatility=min(_LEVELS, key=lambda level: abs(math.log(yearly / level))),
            held=held,
            gain=int(gain > _EVEN) - int(gain < -_EVEN),
            ending=int(observation["day"].item()) >= max_steps - _LAST_DAYS,
        )

    @property
    def direction(self) -> str:
        """``"rising"``, ``"falling"`` or ``"flat"``."""
        if abs(self.trend) <= CLEAR:
            return "flat"
        return "rising" if self.trend > 0 else "falling"

    @property
    def mood(self) -> str:
        """``"calm"``, ``"moving"`` or ``"turbulent"``."""
        if self.volatility <= CALM:
            return "calm"
        return "turbulent" if self.volatility >= TURBULENT else "moving"


class MarketDescriber(MemorylessDescriber):
    """The window of prices as text: trend, last week, volatility, regime, position, cost.

    All numbers are rounded as in :class:`Market`. ``cost`` is that of a trade at the year's first
    price, ``max_steps`` the days of an episode.
    """

    in_keys = ("price_history", "current_holdings", "entry_price", "day")
    actions = ACTIONS
    #: What a program sees, and what it means; all rounded as in :class:`Market`.
    program_fields: Mapping[str, str] = {
        "days": "int, daily returns that are seen",
        "trend": "float from -3 to 3, standard errors of their mean from none",
        "week": f"float from -2 to 2, the same of the last {WEEK} days",
        "volatility": "float, a year's",
        "held": "bool, whether you hold a share",
        "gain": "-1, 0 or 1: held at a loss, about even (or not held), at a profit",
        "ending": f"bool, whether {_LAST_DAYS} days or fewer are left",
        "cost": "float, cost of a trade as a share of the year's first price",
        "mission": "the task in words",
    }

    def __init__(self, *, cost: float, max_steps: int) -> None:
        self.cost = cost
        self.max_steps = max_steps

    def cache_key(self, row: int, observation: Mapping[str, Any]) -> str:
        """Return all that :class:`Market` keeps, and what trades cost."""
        market = self._read(observation)
        position = f"in{market.gain:+d}" if market.held else "out"
        seen = f"{market.trend:+.1f} {market.week:+.0f} {market.volatility:g} {position}"
        return f"{market.days}d {self.cost:g} {seen}{' end' if market.ending else ''}"

    def abstract_state(self, row: int, observation: Mapping[str, Any]) -> str:
        """Return the abstract state: direction, band of volatility and position."""
        market = self._read(observation)
        seen = f"{market.direction} {market.mood} {'in' if market.held else 'out'}"
        return f"{market.days}d {self.cost:g} {seen}"

    def request(self, row: int, observation: Mapping[str, Any]) -> AdviceRequest:
        """Return the question about this day."""
        market = self._read(observation)
        return AdviceRequest(
            _tell(market, self.cost),
            self.actions,
            self.cache_key(row, observation),
            facts={"cost": self.cost, **asdict(market)},
            action_meanings=(
                "leave things as they are",
                "buy one share, if you hold none",
                "sell your share, if you hold one",
            ),
            mission=_MISSION,
        )

    def program_view(self, row: int, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return what :attr:`program_fields` names, as plain Python data: what the text tells."""
        return {**asdict(self._read(observation)), "cost": self.cost, "mission": _MISSION}

    def _read(self, observation: Mapping[str, Any]) -> Market:
        return Market.read(observation, max_steps=self.max_steps)


def _tell(market: Market, cost: float) -> str:
    def moved(errors: float, days: int) -> str:
        # The log return that lies so many standard errors from none.
        percent = 100.0 * (errors * market.volatility * math.sqrt(days / DAYS_A_YEAR))
        if round(abs(percent), 1) == 0:
            return "hardly moved"
        return f"{'rose' if percent > 0 else 'fell'} by about {abs(percent):.1f}%"

    position = "You hold no share."
    if market.held:
        now = {-1: "at a loss", 0: "about even", 1: "at a profit"}[market.gain]
        position = f"You hold one share, {now} against the price that you paid."
    trend = "The trend cannot be told from none."
    if market.trend:
        side = "above" if market.trend > 0 else "below"
        trend = f"The trend lies {abs(market.trend):.1f} standard errors {side} none."
    left = f"{_LAST_DAYS} days or fewer" if market.ending else f"More than {_LAST_DAYS} days"
    return (
        f"A share's price, day by day. In the last {market.days} days it "
        f"{moved(market.trend, market.days)}, in the last {WEEK} days it "
        f"{moved(market.week, WEEK)}. Volatility is about {100 * market.volatility:.0f}% a year. "
        f"{trend} The market looks {market.direction} and {market.mood}; such regimes last for "
        f"weeks and then change without notice.\n{position} Each purchase and each sale costs "
        f"about {100 * cost:.2f}% at the year's first price, and more in proportion as the price "
        f"is higher. {left} are left; at the end what is held is sold."
    )


class MomentumPlanner:
    r"""Buy on a clear rise, sell on a clear fall, hold otherwise.

    What is clear of the trend, :math:`z` standard errors, is expected to go on for as long as
    the window lasted, or for :math:`d` = 5 days where ten or fewer are left:

    .. math::
        g = \mathrm{sign}(z)\,\max(|z| - 0.75, 0)\;\sigma\sqrt{n / 252}\;
            \min(1, d / n)

    Without a share, the value of buying is :math:`g` less the cost of two trades at the year's
    first price. With one, the value of selling is :math:`-g`. All other values are 0. See `Time
    series momentum <https://doi.org/10.1016/j.jfineco.2011.11.003>`_.

    Keyword Args:
        calm_confidence: Confidence in a calm market; it grows linearly with volatility to 1
            in a turbulent one. Default: ``1.0``.

    Raises:
        ValueError: If ``calm_confidence`` lies outside 0 to 1.
    """

    def __init__(self, *, calm_confidence: float = 1.0) -> None:
        if not 0.0 <= calm_confidence <= 1.0:
            raise ValueError(
                f"calm_confidence must lie in [0, 1], got {calm_confidence}: 1 makes advice "
                "equally strong in all markets."
            )
        self.calm_confidence = calm_confidence

    @property
    def cache_prefix(self) -> str:
        """Its setting, which shapes what it claims."""
        return f"calm {self.calm_confidence!r}"

    def __call__(self, request: AdviceRequest) -> list[float] | None:
        """Return one value an action, ``None`` for requests of other describers."""
        facts = request.facts
        if "trend" not in facts or request.actions != ACTIONS:
            return None
        days = facts["days"]
        ahead = min(days, _LAST_DAYS // 2) if facts["ending"] else days
        clear = math.copysign(max(abs(facts["trend"]) - CLEAR, 0.0), facts["trend"])
        gain = clear * facts["volatility"] * math.sqrt(days / DAYS_A_YEAR) * ahead / days
        if facts["held"]:
            return [0.0, 0.0, -gain]
        return [0.0, gain - 2.0 * facts["cost"], 0.0]

    def confidence(self, request: AdviceRequest) -> float:
        """Return the confidence of its advice, from ``calm_confidence`` to 1."""
        share = (request.facts["volatility"] - CALM) / (TURBULENT - CALM)
        return self.calm_confidence + (1.0 - self.calm_confidence) * min(max(share, 0.0), 1.0)
