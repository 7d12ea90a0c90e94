"""What collected steps tell the bandit, and how often PriorNet's advice was used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from lore_torchrl import keys
from lore_torchrl.control.bandit import AdviceBandit

# Mean KL(mixed policy, policy) below which advice had no effect in a segment, nats.
_LEAST_KL = 0.01


class AdviceObserver:
    """Show the bandit each finished segment: whether advice acted in it, and what it returned.

    It needs ``step_count``. When ``exhausted()`` says that no more answers can be bought, the
    bandit raises its probability to one half if it is lower, once.
    """

    def __init__(self, bandit: AdviceBandit | None, *, exhausted: Callable[[], bool] | None = None):
        self.bandit = bandit
        self.exhausted = exhausted
        self._renewed = False
        self._running: torch.Tensor | None = None
        # Steps at which PriorNet's advice was used in place of an answer, whatever its weight.
        self.served = torch.zeros((), dtype=torch.long)

    def __call__(self, batch: TensorDictBase) -> None:
        """Take note of collected steps ``[E, T]``."""
        origin = batch.get(keys.ORIGIN, None)
        if origin is not None:
            self.served += (origin == keys.ORIGIN_PRIOR_NET).sum().cpu()
        if self.bandit is None:
            return
        self._tell(batch)
        used_up = self.exhausted is not None and self.exhausted()
        if used_up and not self._renewed:
            self.bandit.renew()
        self._renewed = used_up

    def _tell(self, batch: TensorDictBase) -> None:
        following = batch.get("next")
        rows = keys.raw_reward(following), *(following.get(k) for k in ("done", "step_count"))
        reward, done, steps = (value.squeeze(-1).cpu() for value in rows)
        ends, begins = self.bandit.ends(done, steps), steps == 1
        # Of the segment under way in each environment: return, length and divergence.
        steps = torch.stack((reward, torch.ones_like(reward), batch.get(keys.KL).squeeze(-1).cpu()))
        if self._running is None:
            self._running = torch.zeros(3, len(reward))
        sums = torch.zeros_like(steps)
        for step in range(reward.shape[1]):
            self._running[:, begins[:, step]] = 0.0
            self._running += steps[..., step]
            sums[..., step] = self._running
            self._running[:, ends[:, step]] = 0.0
        returns, lengths, divergence = sums
        advised = (batch.get(keys.COEFFICIENT).squeeze(-1).cpu() > 0) & (
            divergence > _LEAST_KL * lengths
        )
        device = self.bandit.log_odds.device
        self.bandit.observe(*(value.to(device) for value in (advised, returns, ends)))

    def stats(self) -> dict[str, float]:
        """Return the numbers for the log."""
        values = {} if self.bandit is None else self.bandit.stats()
        values = {f"bandit/{name}": value for name, value in values.items()}
        return values | {"prior_net/served": float(self.served)}

    def state_dict(self) -> dict[str, Any]:
        """Return the count; the bandit is saved with the policy."""
        return {"served": int(self.served), "renewed": self._renewed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the count."""
        self.served.fill_(state_dict["served"])
        self._renewed = state_dict["renewed"]
        self._running = None
