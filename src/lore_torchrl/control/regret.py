"""What a bandit may lose against the best fixed choice."""

from __future__ import annotations

import math


def exp3_regret_bound(
    num_episodes: int,
    num_switches: int,
    *,
    num_arms: int,
    least_weight: float,
    learning_rate: float,
    exploration: float,
    exploration_ix: float,
    sharing: float,
) -> float:
    r"""Bound the expected regret of EXP3-IX with shared weights after :math:`N` episodes.

    .. math::
        \mathbb{E}[R_N] \le
            \frac{\ln\frac{1}{w_{\min}} + S \ln\frac{K}{\alpha}
            + (N - S) \ln\frac{1}{1 - \alpha}}{\eta}
            + \Bigl(\frac{\eta}{2 (1 - \gamma)} + \gamma_{ix}\Bigr) K N + \gamma N

    against the best sequence of arms, fixed in advance, that changes :math:`S` times,
    with :math:`w_{\min}` the least of the first weights, :math:`1/K` by default;
    :math:`\ln K / \eta + \eta K N` for :math:`\alpha = \gamma = S = 0` and
    :math:`\gamma_{ix} = \eta / 2`. The weights pay :math:`\frac{\eta}{2} \sum_k w_k
    \hat\ell_k^2 \le \frac{\eta}{2 (1 - \gamma)} \sum_k \hat\ell_k`, implicit
    exploration hides :math:`\gamma_{ix} \sum_k \hat\ell_k`, and each
    :math:`\hat\ell_k` expects at most 1. Exploration costs at most :math:`\gamma` an
    episode; sharing leaves an arm :math:`1 - \alpha` of its weight and hands a new one
    :math:`\alpha / K`. For any returns in :math:`[0, 1]`, on a scale that is known,
    learnt one by one, with losses :math:`1 - r \ge 0` as a
    :class:`~lore_torchrl.control.ShareBandit` with ``gated=False`` takes them; a mean return
    in the place of the 1 makes losses negative and breaks the bound.
    `Neu (2015) <https://arxiv.org/abs/1506.03271>`_ has the form that holds with high
    probability.

    Args:
        num_episodes: :math:`N`.
        num_switches: :math:`S`.

    Keyword Args:
        num_arms: :math:`K`.
        least_weight: :math:`w_{\min}`, of weights that add up to 1.
        learning_rate: :math:`\eta`.
        exploration: :math:`\gamma`.
        exploration_ix: :math:`\gamma_{ix}`.
        sharing: :math:`\alpha`.

    Raises:
        ValueError: If a count is out of range, or if there is a switch but no sharing.
    """
    if not 0 <= num_switches <= num_episodes:
        raise ValueError(f"num_switches={num_switches} is not in 0 to {num_episodes} episodes.")
    if num_switches and not sharing:
        raise ValueError(f"sharing=0 has no bound for num_switches={num_switches}: raise it.")
    cost = -math.log(least_weight) - (num_episodes - num_switches) * math.log1p(-sharing)
    if num_switches:
        cost += num_switches * math.log(num_arms / sharing)
    second = learning_rate / 2 / (1.0 - exploration) + exploration_ix
    return cost / learning_rate + (second * num_arms + exploration) * num_episodes
