"""Choosing in which segments of an episode advice acts, by what segments return."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl._utils import logger as torchrl_logger
from torchrl.data import Bounded
from torchrl.envs.transforms import TensorDictPrimer

from lore_torchrl import keys
from lore_torchrl.configs.lore import BanditConfig

# Least mean return of unadvised segments that an advised one is compared with; it weighs as much
# as one segment. And the largest return, of which sums and spans stay finite.
_LEAST_BASELINE, _LARGEST_RETURN = 0.05, 1e30
_OWN_STREAM = 1 << 32
# Policy steps in training, more than a collector's batch has, within which some must be observed.
_LEARNS_WITHIN = 4_000


class AdviceBandit(TensorDictModuleBase):
    r"""Let advice act in a segment with the probability that it helps.

    A segment is an episode, or at most ``segment_steps`` of one. With :math:`r \in [0, 1]`
    its normalized return and :math:`b` the mean of recent unadvised segments, two hypotheses
    are compared by Wald's sequential probability ratio: advised segments return :math:`b`, or
    they close the share :math:`h` of the gap between :math:`b` and 1. Each advised segment
    moves the log-odds, and the bounds let them follow a change (as in CUSUM):

    .. math::
        L &\leftarrow \mathrm{clip}\Bigl(L + r \log\bigl(1 + h \tfrac{1 - b}{b}\bigr)
            + (1 - r) \log(1 - h),\; \pm\log\tfrac{1 - \epsilon}{\epsilon}\Bigr) \\
        p &= \sigma(L), \qquad p_0 = 1 - 2 \epsilon

    A segment that gains nothing costs :math:`\log(1 - h)`, whatever :math:`b` is: in about
    eight of them :math:`p` falls to the floor :math:`\epsilon`, also where nobody has been
    rewarded yet. Returns are normalized by the smallest and the largest so far, 0 included.
    One that is not finite, or above 1e30 in size, only counts in ``ignored``.

    Placed in front of the acting policy it writes the mixing coefficient of each
    environment's segment, 0 or 1, which the policy multiplies :math:`\beta` with;
    :meth:`primer` carries it from step to step. In evaluation mode it keeps
    what is carried. It reads ``"step_count"`` ``[*B, 1]`` of
    :class:`~torchrl.envs.StepCounter`, for whole episodes ``"is_init"``.

    Sequential tests: https://doi.org/10.1214/aoms/1177731118. CUSUM:
    https://doi.org/10.1093/biomet/41.1-2.100.

    Keyword Args:
        segment_steps: Longest segment, environment steps; ``None`` for whole episodes.
            Default: ``128``.
        gain: :math:`h`, in ``(0, 1)``. Default: ``0.5``.
        floor: :math:`\epsilon`, in ``(0, 0.5)``. Default: ``0.05``.
        decay: Forgetting of unadvised returns at each unadvised segment, in ``(0, 1]``.
            Default: ``0.9``.
        seed: Seed of the bandit's own random stream. Default: ``0``.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        *,
        segment_steps: int | None = 128,
        gain: float = 0.5,
        floor: float = 0.05,
        decay: float = 0.9,
        seed: int = 0,
    ):
        super().__init__()
        BanditConfig(segment_steps=segment_steps, gain=gain, floor=floor, decay=decay)
        self.segment_steps, self.gain, self.decay = segment_steps, gain, decay
        self.seed, self._generator = seed, None
        self._unobserved = 0  # policy steps since the last call of observe()
        self.bound = math.log((1 - floor) / floor)
        self.register_buffer("log_odds", torch.tensor(math.log((1 - 2 * floor) / (2 * floor))))
        for name in ("baseline_sum", "baseline_count", "low", "high"):
            self.register_buffer(name, torch.zeros(()))
        for name in ("advised_segments", "ignored"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long))
        # The steps since the reset tell a first step too.
        begins_key = "is_init" if segment_steps is None else "step_count"
        self.in_keys = [begins_key, keys.COEFFICIENT]
        self.out_keys = [keys.COEFFICIENT, ("next", keys.COEFFICIENT)]

    def _generator_on(self, device: torch.device) -> torch.Generator:
        # There is no generator on the meta device, where nothing is drawn.
        device = torch.device("cpu") if device.type == "meta" else device
        if self._generator is None or self._generator.device != device:
            # Of the same seed the global stream would draw the same numbers.
            self._generator = torch.Generator(device).manual_seed(self.seed + _OWN_STREAM)
        return self._generator

    def get_extra_state(self) -> Tensor:
        """Return the state of the random stream, for ``state_dict``."""
        return self._generator_on(self.log_odds.device).get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Go on with a saved random stream; one of another kind of device is left out."""
        generator = self._generator_on(self.log_odds.device)
        if state.numel() == generator.get_state().numel():
            generator.set_state(state.cpu())

    def __getstate__(self) -> dict[str, Any]:
        # A generator cannot be copied: a copy begins at the seed.
        return {**self.__dict__, "_generator": None}

    def primer(self) -> TensorDictPrimer:
        """Return the transform that carries the coefficient; it starts at 0."""
        spec = {keys.COEFFICIENT: Bounded(0.0, 1.0, shape=(1,), dtype=torch.float32)}
        return TensorDictPrimer(spec, random=False, default_value=0.0, expand_specs=True)

    def ends(self, done: Tensor, step_count: Tensor) -> Tensor:
        """Return where a segment ends: ``done``, or after so many steps since the reset."""
        return done if self.segment_steps is None else done | (step_count % self.segment_steps == 0)

    def probability(self) -> Tensor:
        """Return :math:`p`, a scalar."""
        return self.log_odds.sigmoid()

    def baseline(self) -> Tensor:
        """Return :math:`b`, a scalar."""
        total = self._normalized(self.baseline_sum, self.baseline_count) + _LEAST_BASELINE
        mean = total / (self.baseline_count + 1.0)
        return mean.clamp(_LEAST_BASELINE, 1.0 - _LEAST_BASELINE)

    def _normalized(self, total: Tensor, count: Tensor | float) -> Tensor:
        """Return a sum of ``count`` returns on the scale from 0 to ``count``."""
        span = self.high - self.low
        return torch.where(span > 0, (total - count * self.low) / span, 0.0)

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the coefficient: drawn where a segment begins, else unchanged."""
        begins, coefficient = (tensordict.get(key, None) for key in self.in_keys)
        if begins is None or coefficient is None:
            raise KeyError(
                f"The bandit needs {self.in_keys} beside the observation: collect from the "
                "environment that advise() returns, env = lore.advise(env)."
            )
        if self.training:
            if not torch.compiler.is_compiling():
                self._count_unobserved()
            if self.segment_steps is not None:
                begins = begins % self.segment_steps == 0
            # One draw for each row, used or not: how many begin is known to the device only.
            device = coefficient.device
            drawn = torch.rand(
                coefficient.shape, generator=self._generator_on(device), device=device
            )
            coefficient = torch.where(begins, drawn < self.probability(), coefficient)
        for key in self.out_keys:
            tensordict.set(key, coefficient)
        return tensordict

    def _count_unobserved(self) -> None:
        self._unobserved += 1
        if self._unobserved == _LEARNS_WITHIN:
            torchrl_logger.warning(
                f"The bandit has acted for {_LEARNS_WITHIN:,} policy steps and was told of no "
                "result: bad advice is not dropped. Call lore.observe(batch) with every collector "
                "batch, and give the collector the policy itself, not a copy."
            )

    @torch.no_grad()
    def observe(self, advised: Tensor, segment_return: Tensor, ended: Tensor) -> None:
        """Learn from the segments that ``ended``; the rows of a call count as simultaneous.

        All have one shape, or a ``ValueError`` is raised: whether advice acted in the segment,
        boolean; its undiscounted return; and where one ended, boolean.
        """
        shapes = [tuple(value.shape) for value in (advised, segment_return, ended)]
        if len(set(shapes)) > 1:
            raise ValueError(f"advised, segment_return, ended: shapes differ, {shapes}.")
        self._unobserved = 0
        if not ended.numel():
            return
        value = segment_return.float()
        usable = value.abs() <= _LARGEST_RETURN
        self.ignored.add_((ended & ~usable).sum())
        ended = ended & usable
        value = torch.where(ended, value, 0.0)
        self.low.copy_(torch.minimum(self.low, value.amin()))
        self.high.copy_(torch.maximum(self.high, value.amax()))
        advised, alone = ended & advised, ended & ~advised
        self.advised_segments.add_(advised.sum())

        base, result = self.baseline(), self._normalized(value, 1.0)
        hit, miss = torch.log1p(self.gain * (1 - base) / base), math.log1p(-self.gain)
        change = torch.where(advised, result * hit + (1 - result) * miss, 0.0).sum()
        self.log_odds.add_(change).clamp_(-self.bound, self.bound)

        kept = self.decay ** alone.sum()
        self.baseline_sum.mul_(kept).add_(torch.where(alone, value, 0.0).sum())
        self.baseline_count.mul_(kept).add_(alone.sum())

    @torch.no_grad()
    def renew(self) -> None:
        """Raise the probability to one half at least: the advice is no longer what it was."""
        self.log_odds.clamp_(min=0.0)

    def stats(self) -> dict[str, float]:
        """Return numbers for the log; waits for the device."""
        values = {"probability": self.probability(), "baseline": self.baseline()}
        values |= {name: getattr(self, name) for name in ("advised_segments", "ignored")}
        numbers = torch.stack([value.float() for value in values.values()]).tolist()
        return dict(zip(values, numbers, strict=True))
