"""The stock continuous actor, with advice mixed in where it acts."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from lore_torchrl.modules.actor import LoReActor
from lore_torchrl.modules.gaussian_mixing import Gaussian, GaussianMixer, MixedGaussian


class GaussianLoReActor(LoReActor):
    r"""Act with a stock Gaussian actor, leaning on advice where the gate opens.

    :class:`~lore_torchrl.modules.LoReActor` for continuous actions: the actor ends in a
    :class:`~torchrl.modules.TanhNormal` or an :class:`~torchrl.modules.IndependentNormal`,
    the mixer is a :class:`~lore_torchrl.modules.GaussianMixer`, the gate has a
    ``scale_range`` and ``disagreement``, if there is one, is a
    :class:`~lore_torchrl.modules.GaussianDisagreement`. The arguments are otherwise the same.

    One set of normal draws :math:`\epsilon` serves both policies: the action comes from
    :math:`\mu_{mix} + \sigma_{mix} \epsilon`, and without advice it would have come from
    :math:`\mu_{wm} + \sigma_{wm} \epsilon`. ``lore_source`` is 1 where another of the
    mixer's anchors is nearest to the one than to the other. With the gate shut both the
    actions and the random stream equal the stock actor's.

    Examples:
        >>> from tensordict import TensorDict
        >>> from lore_torchrl.modules import (
        ...     DreamerV3ContinuousActor, GaussianMixer, UncertaintyGate
        ... )
        >>> low, high = torch.tensor([-2.0]), torch.tensor([2.0])
        >>> actor = DreamerV3ContinuousActor(6, low, high, num_cells=8)
        >>> gate = UncertaintyGate(1, scale_range=actor.scale_range, value_weight=0.0)
        >>> mixer = GaussianMixer([[-2.0], [0.0], [2.0]], bounds=(low, high))
        >>> lore = GaussianLoReActor(actor, gate, mixer)
        >>> td = TensorDict(
        ...     state=torch.zeros(1, 4),
        ...     belief=torch.zeros(1, 2),
        ...     llm_prior_logits=torch.tensor([[0.0, 0.0, 9.0]]),
        ...     llm_confidence=torch.ones(1, 1),
        ...     llm_mask=torch.ones(1, 1, dtype=torch.bool),
        ...     batch_size=[1],
        ... )
        >>> out = lore(td)
        >>> bool(out["lore_loc"] > out["loc"]), out["action"].shape
        (True, torch.Size([1, 1]))
    """

    _mixer_class = GaussianMixer

    def _compute_policy(self, last: TensorDictModuleBase, tensordict: TensorDictBase) -> Gaussian:
        last(tensordict)
        return self.mixer.policy_from(*(tensordict.get(key) for key in self.policy_keys))

    def _draw(
        self, mixture: MixedGaussian, policy: Gaussian, random: bool
    ) -> tuple[Tensor, Tensor]:
        picks = [mixture.policy.loc, policy.loc]
        if random:
            noise = torch.empty_like(policy.loc).normal_()
            picks = [loc + noise * scale for loc, scale in (mixture.policy, policy)]
        nearest, stock = (self.mixer.nearest(self.mixer.squash(pick)) for pick in picks)
        return picks[0], nearest != stock

    def _write_action(
        self, tensordict: TensorDictBase, mixture: MixedGaussian, choice: Tensor
    ) -> None:
        head = self.actor[-1]
        distribution = head.distribution_class(*mixture.policy, **head.distribution_kwargs)
        action = choice
        for transform in getattr(distribution, "transforms", ()):
            action = transform(action)
        tensordict.set(self.action_key, action)
        tensordict.set(self.log_prob_key, distribution.log_prob(action))
