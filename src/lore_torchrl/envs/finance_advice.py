"""A market in words, and a planner that follows its trend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lore_torchrl.advisors.base import AdviceRequest

ACTIONS = ("hold", "buy", "sell")
DAYS_A_YEAR = 252
WEEK = 5
MIN_WINDOW = WEEK + 1
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
        """Read one row of the environment's output.

        Args:
            observation: ``price_history`` ``[window]``, ``current_holdings`` ``[1]``,
                ``entry_price`` ``[1]`` and ``day`` ``[]``.

        Keyword Args:
            max_steps: Days of an episode.
        """
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

    def change(self, errors: float, days: int) -> float:
        """Return the log return of some days that lies ``errors`` standard errors from none."""
        return errors * self.volatility * math.sqrt(days / DAYS_A_YEAR)


class MarketDescriber:
    """The window of prices as text: trend, last week, volatility, regime, position, cost.

    All numbers are rounded as in :class:`Market`, so that an answer serves again.

    Keyword Args:
        cost: Cost of a trade, as a share.
        max_steps: Days of an episode.
    """

    in_keys = ("price_history", "current_holdings", "entry_price", "day")
    actions = ACTIONS

    def __init__(self, *, cost: float, max_steps: int) -> None:
        self.cost = cost
        self.max_steps = max_steps

    def observe(
        self, row: int, observation: Mapping[str, Any], action: int | None, *, reset: bool
    ) -> None:
        """Nothing is remembered."""

    def cache_key(self, row: int, observation: Mapping[str, Any]) -> str:
        """Return all that :class:`Market` keeps, and what trades cost."""
        return self._key(self._read(observation))

    def coarse_key(self, row: int, observation: Mapping[str, Any]) -> str:
        """Return direction, class of volatility and position."""
        market = self._read(observation)
        rules = f"{market.days}d {self.cost:g}"
        return f"{rules} {market.direction} {market.mood} {'in' if market.held else 'out'}"

    def request(self, row: int, observation: Mapping[str, Any]) -> AdviceRequest:
        """Return the question about this day."""
        market = self._read(observation)
        return AdviceRequest(
            _tell(market, self.cost),
            self.actions,
            self._key(market),
            facts={"cost": self.cost, **asdict(market)},
            action_meanings=(
                "leave things as they are",
                "buy one share, if you hold none",
                "sell your share, if you hold one",
            ),
            mission="end the year in profit, after costs",
        )

    def _read(self, observation: Mapping[str, Any]) -> Market:
        return Market.read(observation, max_steps=self.max_steps)

    def _key(self, market: Market) -> str:
        position = f"in{market.gain:+d}" if market.held else "out"
        seen = f"{market.trend:+.1f} {market.week:+.0f} {market.volatility:g} {position}"
        return f"{market.days}d {self.cost:g} {seen}{' end' if market.ending else ''}"


def _tell(market: Market, cost: float) -> str:
    def moved(errors: float, days: int) -> str:
        percent = 100.0 * market.change(errors, days)
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

    With the trend :math:`z` in standard errors, what of it is clear is expected to go on for
    as long as the window lasted, or for five days where ten or fewer are left:

    .. math::
        g = \mathrm{sign}(z)\,\max(|z| - 0.75, 0)\;\sigma\sqrt{n / 252}\;
            \min(1, d / n)

    Without a share, buying is worth :math:`g` less the cost of two trades, taken at the year's
    first price. With one, selling
    is worth :math:`-g`: its cost is due sooner or later anyway. Everything else is worth 0.
    Following a trend is an old rule: `Time series momentum
    <https://doi.org/10.1016/j.jfineco.2011.11.003>`_.

    Keyword Args:
        calm_confidence: Confidence in a calm market; it grows linearly with volatility to 1
            in a turbulent one. Default: ``1.0``.

    Raises:
        ValueError: If ``calm_confidence`` lies outside 0 to 1.

    Examples:
        >>> facts = {"trend": 2.0, "volatility": 0.3, "days": 19, "held": False, "cost": 0.001}
        >>> request = AdviceRequest("", ACTIONS, "", facts={**facts, "ending": False})
        >>> values = MomentumPlanner()(request)
        >>> ACTIONS[max(range(3), key=values.__getitem__)]
        'buy'
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
