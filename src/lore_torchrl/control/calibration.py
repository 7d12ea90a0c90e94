"""Replacing what an adviser claims about itself by what came of its advice."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def superiority(value: Tensor, first: Tensor, second: Tensor) -> Tensor:
    r"""Return how often each row of one sample exceeds a row of another.

    .. math::
        S_i = \frac{1}{n_2} \sum_{j \in \mathrm{second}}
            \bigl([x_i > x_j] + \tfrac12 [x_i = x_j]\bigr), \qquad i \in \mathrm{first}

    The mean over ``first`` is the probability of superiority, the statistic of Mann and
    Whitney (1947, https://doi.org/10.1214/aoms/1177730491) divided by
    :math:`n_1 n_2`; one half is chance.

    Args:
        value: Values :math:`x`, shape ``[N]``. A NaN belongs to neither sample.
        first: Rows to judge, boolean, shape ``[N]``.
        second: Rows to compare with, boolean, shape ``[N]``.

    Returns:
        Shape ``[N]``; one half in rows outside ``first``, and everywhere if ``second``
        is empty.

    Examples:
        >>> x = torch.tensor([3.0, 1.0, 1.0, 2.0])
        >>> superiority(x, torch.tensor([1, 1, 0, 0]).bool(), torch.tensor([0, 0, 1, 1]).bool())
        tensor([1.0000, 0.2500, 0.5000, 0.5000])
    """
    second = second & ~value.isnan()
    count = second.sum()
    # The rows of `second` in order, then infinities that the clamps leave out.
    ordered = torch.where(second, value, torch.full_like(value, torch.inf)).sort().values
    below = torch.searchsorted(ordered, value).clamp_max(count)
    up_to = torch.searchsorted(ordered, value, right=True).clamp_max(count)
    share = (below + up_to).to(value.dtype) / (2 * count).clamp_min(1)
    judged = first & ~value.isnan() & (count > 0)
    return torch.where(judged, share, torch.full_like(value, 0.5))


class ConfidenceCalibrator(nn.Module):
    r"""Recalibrate confidence by histogram binning with forgetting.

    The claimed confidence :math:`c` falls into the bin
    :math:`k = \min(\lfloor cK \rfloor, K - 1)` of its group. A bin keeps decayed sums of
    weighted outcomes :math:`W_k`, weights :math:`N_k` and claims :math:`C_k`, and answers

    .. math::
        \hat c = \frac{W_k + s\,c}{N_k + s}

    With no data that is the claim itself; :math:`s` observations count as much as the
    claim. Histogram binning: Zadrozny and Elkan (2001); with the expected calibration
    error in `On Calibration of Modern Neural Networks
    <https://arxiv.org/abs/1706.04599>`_.

    Keyword Args:
        num_bins: Bins :math:`K` of equal width. Default: ``10``.
        num_groups: Sources that are measured apart, such as an adviser and a network
            that learnt from it. Default: ``1``.
        decay: Forgetting of all sums at each update that holds data, in ``(0, 1]``.
            Default: ``0.999``.
        prior_strength: :math:`s > 0`, in observations. Default: ``10.0``.
        chance: Outcome of advice that is worth nothing, in ``(0, 1)``. Default: ``0.5``.

    Raises:
        ValueError: If an argument is out of range.

    Examples:
        >>> calibrator = ConfidenceCalibrator(prior_strength=1.0)
        >>> claim = torch.full((99, 1), 0.9)
        >>> calibrator.update(claim, torch.zeros(99, 1), torch.ones(99, 1))
        >>> calibrator(torch.tensor([[0.9], [0.3]]))
        tensor([[0.0090],
                [0.3000]])
    """

    wins: Tensor
    counts: Tensor
    claims: Tensor

    def __init__(
        self,
        *,
        num_bins: int = 10,
        num_groups: int = 1,
        decay: float = 0.999,
        prior_strength: float = 10.0,
        chance: float = 0.5,
    ):
        super().__init__()
        for name, count in (("num_bins", num_bins), ("num_groups", num_groups)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}.")
        if not 0 < decay <= 1:
            raise ValueError(f"decay must lie in (0, 1], got {decay}: 1 forgets nothing.")
        if not prior_strength > 0:
            raise ValueError(
                f"prior_strength must be positive, got {prior_strength}: an empty bin has "
                "only its prior."
            )
        if not 0 < chance < 1:
            raise ValueError(f"chance must lie in (0, 1), got {chance}.")
        self.num_bins = num_bins
        self.num_groups = num_groups
        self.decay = decay
        self.prior_strength = prior_strength
        self.chance = chance
        for name in ("wins", "counts", "claims"):
            self.register_buffer(name, torch.zeros(num_groups, num_bins))

    def _slot(self, confidence: Tensor, group: Tensor | int | None) -> Tensor:
        """Return each row's place in the flattened buffers."""
        share = torch.nan_to_num(confidence, nan=0.0).clamp(0.0, 1.0)
        slot = (share * self.num_bins).long().clamp_max(self.num_bins - 1)
        return slot if group is None else slot + self.num_bins * group

    @torch.no_grad()
    def update(
        self, confidence: Tensor, outcome: Tensor, weight: Tensor, group: Tensor | None = None
    ) -> None:
        """Take note of how advice of a claimed confidence turned out.

        Args:
            confidence: Claimed, clipped to 0 to 1, shape ``[*B, 1]``.
            outcome: What came of it, clipped to 0 (bad) to 1 (good), shape ``[*B, 1]``.
            weight: Weight of each row, not negative, or a boolean; shape ``[*B, 1]``.
                Rows with a NaN count nothing.
            group: Source of each row, int64 in ``[0, num_groups)``, shape ``[*B, 1]``.
                Default: group 0.

        Raises:
            ValueError: If the shapes differ.
        """
        _same_shape(confidence=confidence, outcome=outcome, weight=weight, group=group)
        weight = weight.to(self.counts.dtype)
        counted = (weight > 0) & weight.isfinite() & ~confidence.isnan() & ~outcome.isnan()
        slot = self._slot(confidence, group).reshape(-1)
        decay = torch.where(counted.any(), self.decay, 1.0)
        for sums, value in (
            (self.wins, outcome.clamp(0.0, 1.0)),
            (self.counts, torch.ones_like(confidence)),
            (self.claims, confidence.clamp(0.0, 1.0)),
        ):
            added = torch.where(counted, weight * value, torch.zeros_like(weight))
            sums.mul_(decay)
            sums.view(-1).index_add_(0, slot, added.reshape(-1).to(sums.dtype))

    def forward(self, confidence: Tensor, group: Tensor | int | None = None) -> Tensor:
        """Return the calibrated confidence, shape ``[*B, 1]``.

        Args:
            confidence: Claimed, shape ``[*B, 1]``; a NaN stays one.
            group: As in :meth:`update`, or one for all. Default: group 0.
        """
        return self._shrunk(confidence, group, confidence.clamp(0.0, 1.0))

    def trust(
        self, confidence: Tensor, group: Tensor | int | None = None, margin: float = 0.1
    ) -> Tensor:
        r"""Return the share of its weight that advice of this confidence keeps.

        .. math::
            \mathrm{clip}\Bigl(1 + \frac{q - q_0}{m}, 0, 1\Bigr), \qquad
            q = \frac{W_k + s\,q_0}{N_k + s}

        with :math:`q_0` the ``chance``: whole from chance up, and so without data, zero
        at ``chance - margin``.

        Args:
            confidence: Claimed, shape ``[*B, 1]``.
            group: As in :meth:`update`, or one for all. Default: group 0.
            margin: :math:`m > 0`. Default: ``0.1``.

        Raises:
            ValueError: If ``margin`` is not positive.
        """
        if not margin > 0:
            raise ValueError(f"margin must be positive, got {margin}.")
        chance = torch.full_like(confidence, self.chance)
        outcome = self._shrunk(confidence, group, chance)
        return (1.0 + (outcome - chance) / margin).clamp(0.0, 1.0)

    def _shrunk(self, confidence: Tensor, group: Tensor | int | None, prior: Tensor) -> Tensor:
        """Return each row's bin mean, shrunk towards ``prior``; ``prior`` itself if empty."""
        slot = self._slot(confidence, group)
        wins, counts = self.wins.view(-1)[slot], self.counts.view(-1)[slot]
        return prior + (wins - counts * prior) / (counts + self.prior_strength)

    def expected_calibration_error(self, group: int | None = None) -> Tensor:
        r"""Return :math:`\sum_k \frac{N_k}{N} |W_k / N_k - C_k / N_k|`, a scalar.

        Of the claims, over the bins; zero without data.

        Args:
            group: Whose claims. Default: ``None``, those of all groups.
        """
        rows = slice(None) if group is None else group
        error = (self.wins[rows] - self.claims[rows]).abs().sum()
        # Small sums are data too, once they have decayed.
        return error / self.counts[rows].sum().clamp_min(torch.finfo(error.dtype).tiny)


def _same_shape(**values: Tensor | None) -> None:
    shapes = {name: tuple(value.shape) for name, value in values.items() if value is not None}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"One row each is needed, so one shape for all, got {shapes}.")
