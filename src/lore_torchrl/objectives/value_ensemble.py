"""Training the ensemble of critics whose variance the gate reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.objectives import symlog
from torchrl.objectives.common import LossModule

from lore_torchrl.functional import ensemble_variance, masked_mean
from lore_torchrl.modules.value_ensemble import ValueEnsemble


class ValueEnsembleLoss(LossModule):
    r"""Regress the members of a :class:`~lore_torchrl.modules.ValueEnsemble` on returns.

    .. math::
        \mathtt{loss\_value\_ensemble} = \Bigl\langle \frac{1}{K} \sum_k
            \bigl(v_k(\mathrm{sg}(s, h)) - \mathrm{symlog}(\mathrm{sg}(G))\bigr)^2
            \Bigr\rangle

    All members see the same targets; what sets them apart is their start and their prior
    function (https://arxiv.org/abs/1806.03335).

    Args:
        ensemble: The critics. Only their parameters get a gradient.

    The input needs ``state``, ``belief`` and ``value_target``, the return :math:`G`
    ``[*B, 1]`` in units of reward. Returns ``loss_value_ensemble`` and the detached
    ``value_variance``, the mean variance across the members.

    Raises:
        TypeError: If ``ensemble`` is no :class:`~lore_torchrl.modules.ValueEnsemble`.
        KeyError: In a call, if an entry is missing.
        ValueError: In a call, if target or mask has another shape than ``[*B, 1]``.

    Examples:
        >>> loss = ValueEnsembleLoss(ValueEnsemble(4, 2, hidden_dim=8))
        >>> td = TensorDict(
        ...     state=torch.zeros(5, 4), belief=torch.zeros(5, 2),
        ...     value_target=torch.zeros(5, 1), batch_size=[5],
        ... )
        >>> sorted(loss(td).keys())
        ['loss_value_ensemble', 'value_variance']
    """

    @dataclass
    class _AcceptedKeys:
        """Configurable tensordict keys.

        Attributes:
            value_target (NestedKey): Return to regress. Default: ``"value_target"``.
        """

        value_target: NestedKey = "value_target"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys

    def __init__(self, ensemble: ValueEnsemble):
        super().__init__()
        if not isinstance(ensemble, ValueEnsemble):
            raise TypeError(f"ensemble must be a ValueEnsemble, got {type(ensemble).__name__}.")
        self.ensemble = ensemble
        self.out_keys = ["loss_value_ensemble", "value_variance"]

    @property
    def in_keys(self) -> list[NestedKey]:
        """What the ensemble reads, and the target."""
        return [*self.ensemble.in_keys, self.tensor_keys.value_target]

    def _forward_value_estimator_keys(self, **kwargs) -> None:
        return None

    def terms(
        self, tensordict: TensorDictBase, value_target: Tensor, valid: Tensor | None = None
    ) -> TensorDict:
        """Compute the loss and its metric for a target that is not in the tensordict.

        Args:
            tensordict: ``state`` and ``belief``, any batch shape ``*B``. The variance of each
                state is written there, as by the ensemble itself.
            value_target: Return, shape ``[*B, 1]``.
            valid: States that count, boolean, shape ``[*B, 1]``; of them those whose target
                is finite do. Default: all.
        """
        state, belief = (tensordict[key].detach() for key in self.ensemble.in_keys)
        for name, value in (("value_target", value_target), ("valid", valid)):
            if value is not None and value.shape != (*state.shape[:-1], 1):
                raise ValueError(
                    f"{name} must be {(*state.shape[:-1], 1)}, one number a state: got "
                    f"{tuple(value.shape)}."
                )
        if valid is None:
            valid = torch.ones_like(value_target, dtype=torch.bool)
        valid = valid & value_target.isfinite()
        # A number that does not count must not reach the gradient either, were it infinite.
        target = symlog(value_target.detach().float()).masked_fill(~valid, 0.0)
        predicted = self.ensemble.predict(state, belief)
        error = (predicted - target).square().mean(0)
        spread = ensemble_variance(predicted.detach())
        tensordict.set(self.ensemble.out_keys[0], spread)
        return TensorDict(
            {
                "loss_value_ensemble": masked_mean(error, valid),
                "value_variance": masked_mean(spread, valid),
            },
            [],
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return the loss and its metric."""
        return self.terms(tensordict, tensordict[self.tensor_keys.value_target])
