"""What is seen of a market: the observation, whether it paid, and a chart for people."""

from __future__ import annotations

import math

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import Transform

from lore_torchrl.envs.batch import Success

#: Entries of ``FinancialRegimeEnv`` that are carried from day to day, beside the day.
STATE = ("price_history", "current_holdings", "entry_price")
_HEIGHT, _COLUMNS = 96, 8
_PAPER, _INK, _HELD, _ENTRY = (250, 250, 250), (90, 90, 90), (30, 140, 60), (200, 120, 40)


class MarketView(Transform):
    """Write ``observation``, float32 ``[*B, window + 3]``: what a trader sees, nothing of regimes.

    The daily log returns of the window in percent, the log price against the first, whether
    a share is held, ten times its log gain (0 without one), and the share of days left.

    Keyword Args:
        window: Prices that are seen.
        initial_price: Price before the first window.
        max_steps: Days of an episode.
    """

    def __init__(self, *, window: int, initial_price: float, max_steps: int) -> None:
        super().__init__(in_keys=[*STATE, "day"], out_keys=["observation"])
        self.window, self.initial_price, self.max_steps = window, initial_price, max_steps

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        prices, held, entry, day = (next_tensordict.get(key) for key in self.in_keys)
        logs = prices.log()
        gain = torch.where(held, logs[..., -1:] - entry.clamp_min(1e-6).log(), 0.0)
        parts = [
            100.0 * logs.diff(dim=-1),
            logs[..., -1:] - math.log(self.initial_price),
            held.float(),
            10.0 * gain,
            (1.0 - day / self.max_steps).unsqueeze(-1),
        ]
        return next_tensordict.set("observation", torch.cat(parts, -1))

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare the entry."""
        shape = (*observation_spec.shape, self.window + 3)
        observation_spec["observation"] = Unbounded(shape, device=observation_spec.device)
        return observation_spec


class Profit(Success):
    """Write ``success``: whether the episode ended with a return, ``episode_reward``, above 0."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        earned = next_tensordict.get("episode_reward") > 0
        return next_tensordict.set("success", next_tensordict.get("done") & earned)


class PriceChart(Transform):
    """Draw ``pixels``, uint8 ``[*B, 96, 8 (window - 1), 3]``, for people.

    The window's prices as a line, green while a share is held, and the price it was bought
    at as another.

    Keyword Args:
        window: Prices that are seen.
    """

    def __init__(self, *, window: int) -> None:
        super().__init__(in_keys=list(STATE), out_keys=["pixels"])
        self.columns = _COLUMNS * (window - 1)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        prices, held, entry = (next_tensordict.get(key) for key in self.in_keys)
        marks = torch.where(held, entry, prices[..., -1:])
        low = torch.minimum(prices.amin(-1, keepdim=True), marks)
        high = torch.maximum(prices.amax(-1, keepdim=True), marks)

        def height(price: Tensor) -> Tensor:
            return 4.0 + (_HEIGHT - 9.0) * (high - price) / (high - low).clamp_min(1e-9)

        line = torch.nn.functional.interpolate(
            height(prices).unsqueeze(-2), self.columns + 1, mode="linear", align_corners=True
        ).squeeze(-2)
        rows = torch.arange(_HEIGHT).view(-1, 1)
        first, second = line[..., None, :-1], line[..., None, 1:]
        drawn = (rows >= torch.minimum(first, second) - 1) & (rows <= torch.maximum(first, second))
        bought = held[..., None] & ((rows - height(entry)[..., None]).abs() < 0.5)

        def paint(picture: Tensor | tuple[int, ...], where: Tensor, color: Tensor) -> Tensor:
            return torch.where(where.unsqueeze(-1), color, picture)

        paper, ink, green, amber = (
            torch.tensor(color, dtype=torch.uint8) for color in (_PAPER, _INK, _HELD, _ENTRY)
        )
        picture = paint(paper, bought, amber)
        ink = torch.where(held[..., None, None], green, ink)
        return next_tensordict.set("pixels", paint(picture, drawn, ink))

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare the entry."""
        shape = (*observation_spec.shape, _HEIGHT, self.columns, 3)
        observation_spec["pixels"] = Bounded(
            0, 255, shape, dtype=torch.uint8, device=observation_spec.device
        )
        return observation_spec
