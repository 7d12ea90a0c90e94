"""What following the advice led to, judged by the critic on real steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.objectives.value.functional import td_lambda_return_estimate

from lore_torchrl.control.calibration import ConfidenceCalibrator, superiority
from lore_torchrl.functional import clean_advice, masked_mean


class Outcomes(NamedTuple):
    r"""What was gained from each posterior state on, each ``[N, T, 1]``.

    ``returns`` is :math:`G^\lambda_t`, ``advantage`` is :math:`G^\lambda_t - V(s_t)`, and
    ``valid`` marks the states at which a recorded action was taken: not the last of a
    sequence, not one that ends an episode. Where it is false the others are zero.
    """

    returns: Tensor
    advantage: Tensor
    valid: Tensor


class AdviceOutcomes(nn.Module):
    r"""Recalibrate confidence by whether following the advice beat the policy's own action.

    On replayed sequences, with the critic :math:`V` and the posterior states :math:`s_t`,

    .. math::
        G^\lambda_t = r_{t+1} + \gamma (1 - d_{t+1}) \bigl(
            (1 - \lambda) V(s_{t+1}) + \lambda G^\lambda_{t+1}\bigr), \qquad
        A_t = G^\lambda_t - V(s_t)

    A step *followed* the advice if its action was the advice's first choice, or a continuous
    one lay nearest to it. The outcome
    of a followed step is the share of the advised steps of the batch that did not follow
    and whose :math:`A` is lower, ties counting one half: one half is chance. It goes to
    the calibrator, into the bin of the confidence that the adviser claimed; group 0 is
    the adviser, group 1 a :class:`~lore_torchrl.modules.PriorNet`.

    TD(lambda): https://arxiv.org/abs/1506.02438. The probability of superiority is the
    statistic of Mann and Whitney (1947).

    Args:
        calibrator: Takes the outcomes; its ``trust`` then scales weights. ``None`` only
            computes returns and advantages.
        value_model: Critic; reads ``state`` and ``belief``, writes ``value_key``.

    Keyword Args:
        gamma: Discount. Default: ``1 - 1 / 333``.
        lmbda: Mixing of the returns. Default: ``0.95``.
        value_key: Decoded value, ``[*B, 1]``. Default: ``"state_value"``.

    Raises:
        ValueError: If ``gamma`` or ``lmbda`` is outside ``[0, 1]``.
    """

    def __init__(
        self,
        calibrator: ConfidenceCalibrator | None,
        value_model: TensorDictModuleBase,
        *,
        gamma: float = 1.0 - 1.0 / 333.0,
        lmbda: float = 0.95,
        value_key: NestedKey = "state_value",
    ):
        super().__init__()
        for name, value in (("gamma", gamma), ("lmbda", lmbda)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {value}.")
        self.calibrator = calibrator
        # The critic belongs to the agent: it is neither saved nor moved with this module.
        self.__dict__["value_model"] = value_model
        self.gamma = gamma
        self.lmbda = lmbda
        self.value_key = value_key

    @torch.no_grad()
    def evaluate(
        self,
        posterior: TensorDictBase,
        sample: TensorDictBase,
        *,
        is_init_key: NestedKey = "is_init",
        reward_key: NestedKey = "reward",
        done_key: NestedKey = "done",
        terminated_key: NestedKey = "terminated",
    ) -> Outcomes:
        """Compute lambda returns and advantages along replayed sequences.

        Args:
            posterior: Latent features ``[N, T]``; index ``t`` has seen the observation
                under ``"next"`` of record ``t``. What the critic writes is added.
            sample: The records ``[N, T]``: ``is_init`` and, under ``"next"``, ``reward``,
                ``done`` and ``terminated``. What is done at posterior ``t`` is in record
                ``t + 1``.

        Keyword Args:
            is_init_key: Default: ``"is_init"``.
            reward_key: Under ``"next"``, as the two that follow. Default: ``"reward"``.
            done_key: Default: ``"done"``.
            terminated_key: Default: ``"terminated"``.
        """
        values = self.value_model(posterior.select(*self.value_model.in_keys))
        # The gate wants the critic's logits for the same states.
        posterior.update(values.detach())
        value = values.get(self.value_key)
        shape = value[:, 1:].shape
        following = sample[:, 1:]
        returns = td_lambda_return_estimate(
            self.gamma,
            self.lmbda,
            value[:, 1:],
            following.get(("next", reward_key)).reshape(shape).float(),
            following.get(("next", done_key)).reshape(shape),
            following.get(("next", terminated_key)).reshape(shape),
        )
        # A reset record follows the end of an episode: nothing was done there.
        valid = ~following.get(is_init_key).reshape(shape)
        valid = torch.nn.functional.pad(valid, (0, 0, 0, 1))
        returns = torch.nn.functional.pad(returns, (0, 0, 0, 1))
        zero = torch.zeros_like(value)
        return Outcomes(
            torch.where(valid, returns, zero), torch.where(valid, returns - value, zero), valid
        )

    @torch.no_grad()
    def judge(
        self,
        outcomes: Outcomes,
        chosen: Tensor,
        prior_logits: Tensor,
        confidence: Tensor,
        mask: Tensor,
        learnt: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Tell the calibrator how the steps that followed advice turned out.

        Rows whose advantage is not finite count neither as followed nor as strayed.

        Args:
            outcomes: Of :meth:`evaluate`.
            chosen: Index of the named action of each record, int64 ``[N, T, 1]``; of a
                continuous action, of the anchor nearest to it.
            prior_logits: Advice aligned with the posterior, ``[N, T, A]``.
            confidence: Claimed, ``[N, T, 1]``.
            mask: Where there is advice, boolean ``[N, T, 1]``.
            learnt: Where it comes from a PriorNet, boolean ``[N, T, 1]``. Default: nowhere.

        Returns:
            ``lore_reliability``, the mean outcome of the followed steps of this batch
            (one half if there is none), and ``lore_followed``, their share.
        """
        logits, _, usable = clean_advice(prior_logits, confidence, mask)
        usable = usable & outcomes.valid & outcomes.advantage.isfinite()
        taken = torch.roll(chosen, -1, dims=1)
        follows = usable & (taken == logits.argmax(-1, keepdim=True))
        strays = usable & ~follows
        group = torch.zeros_like(taken) if learnt is None else learnt.long()
        advantage = outcomes.advantage.reshape(-1)
        win = torch.full_like(advantage, 0.5)
        for index in range(self.calibrator.num_groups):
            rows = group.reshape(-1) == index
            first, second = follows.reshape(-1) & rows, strays.reshape(-1) & rows
            win = torch.where(first, superiority(advantage, first, second), win)
            # Without a step that strayed there is nothing to compare with.
            follows = follows & ((group != index) | second.any())
        win = win.reshape(follows.shape)
        self.calibrator.update(confidence, win, follows, group)
        counted = follows.float().sum()
        mean = masked_mean(win, follows)
        return {
            "lore_reliability": torch.where(counted > 0, mean, torch.full_like(mean, 0.5)),
            "lore_followed": follows.float().mean(),
        }
