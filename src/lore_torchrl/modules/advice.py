"""Advice on a batch of states, checked once and then passed on as one value."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from lore_torchrl import keys

# What a temperature or a weight cannot carry to infinity.
_LARGEST_LOGIT = 1e30
# Below the best allowed logit: at temperatures up to 9 of probability 0 in float32.
_RULED_OUT = 1e3
# Least factor on a prior, in logs; e to its power is 0 in float32 beside 1.
_LEAST_FACTOR = -100.0


class AdviceBatch(NamedTuple):
    r"""Advice that is safe to compute with: rows that cannot be used are exact zeros.

    Attributes:
        prior_logits: Centered logits :math:`\ell - \mathrm{mean}_a\,\ell`, ``[*B, K]``.
        weight: Confidence in ``[0, 1]``, zero where the row does not count, ``[*B, 1]``.
        valid: Rows that count, boolean, ``[*B, 1]``.
        learned: Rows that are PriorNet's, boolean, ``[*B, 1]``; ``None`` without one.
        excluded: Actions that the advisor calls invalid, of which the prior is 0, boolean,
            ``[*B, K]``; ``None`` without an action mask.
    """

    prior_logits: Tensor
    weight: Tensor
    valid: Tensor
    learned: Tensor | None = None
    excluded: Tensor | None = None

    @classmethod
    def clean(
        cls,
        prior_logits: Tensor,
        confidence: Tensor,
        mask: Tensor,
        action_mask: Tensor | None = None,
    ) -> AdviceBatch:
        """Check raw advice ``[*B, K]``, its confidence and mask ``[*B, 1]``, and detach it.

        A row counts where ``mask`` is set and its logits, up to 1e30, and confidence are finite.
        Of what it says, ``action_mask`` ``[*B, K]`` leaves the actions that are true in it, or
        all if none is.
        """
        prior_logits = prior_logits.detach().float()
        confidence = confidence.detach().float()
        # Centered first: the mean of finite but enormous logits may not be finite.
        logits = prior_logits - prior_logits.mean(-1, keepdim=True)
        usable = (logits.abs() <= _LARGEST_LOGIT).all(-1, keepdim=True)
        valid = mask & usable & confidence.isfinite()
        weight = torch.where(valid, confidence.clamp(0.0, 1.0), 0.0)
        excluded = None
        if action_mask is not None:
            excluded = ~action_mask & action_mask.any(-1, keepdim=True) & valid
            top = logits.masked_fill(excluded, -torch.inf).amax(-1, keepdim=True)
            logits = torch.where(excluded, top - top.abs().clamp_min(_RULED_OUT), logits)
            logits = logits - logits.mean(-1, keepdim=True)
        return cls(torch.where(valid, logits, 0.0), weight, valid, excluded=excluded)

    def completed(self, other: AdviceBatch) -> AdviceBatch:
        """Return the same with other advice, such as PriorNet's, in rows that do not count."""
        self.check_same(other.prior_logits)
        mine = (torch.where(self.valid, a, b) for a, b in zip(self[:2], other[:2], strict=True))
        learned = other.valid & ~self.valid
        return AdviceBatch(*mine, self.valid | other.valid, learned, self.excluded)

    def times(self, log_factor: Tensor) -> AdviceBatch:
        r"""Return the same with a prior :math:`\propto \rho f`, of :math:`\log f` ``[*B, K]``.

        A row whose factor is not finite keeps its prior.
        """
        logits = self.prior_logits + log_factor.clamp_min(_LEAST_FACTOR)
        logits = logits - logits.mean(-1, keepdim=True)
        usable = self.valid & logits.isfinite().all(-1, keepdim=True)
        return self._replace(prior_logits=torch.where(usable, logits, self.prior_logits))

    def check_same(self, logits: Tensor) -> None:
        """Raise a ``ValueError`` if PriorNet's logits name other actions than the advice."""
        if self.prior_logits.shape != logits.shape:
            raise ValueError(
                f"The advice is {tuple(self.prior_logits.shape)} and PriorNet's "
                f"{tuple(logits.shape)}: build PriorNet with "
                f"num_actions={self.prior_logits.shape[-1]}, the number of named actions."
            )

    def only(self, where: Tensor) -> AdviceBatch:
        """Return the same with nothing outside of ``where``, boolean ``[*B, 1]``."""
        logits, weight = (torch.where(where, value, 0.0) for value in self[:2])
        flags = (None if part is None else part & where for part in self[3:])
        return AdviceBatch(logits, weight, self.valid & where, *flags)


def read_advice(
    tensordict: TensorDictBase, action_mask: bool = False
) -> tuple[Tensor | None, ...] | None:
    """Return what :meth:`AdviceBatch.clean` takes, or ``None`` if there are no logits.

    These are raw logits, confidence and mask, and with ``action_mask`` that entry or ``None``.

    Raises:
        KeyError: If there are logits, but not what belongs to them.
        TypeError: If the mask is not boolean.
    """
    entries = tuple(tensordict.get(key, None) for key in keys.ADVICE_KEYS)
    if entries[0] is None:
        return None
    missing = [k for k, entry in zip(keys.ADVICE_KEYS, entries, strict=True) if entry is None]
    if missing:
        raise KeyError(f"There is advice under {keys.PRIOR_LOGITS!r}, but no {missing} beside it.")
    if entries[-1].dtype != torch.bool:
        raise TypeError(f"The mask of advice must be boolean, got {entries[-1].dtype}.")
    return (*entries, tensordict.get(keys.ACTION_MASK, None)) if action_mask else entries
