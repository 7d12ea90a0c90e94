"""The names of every tensordict entry that this package reads or writes.

Advice at the root of a tensordict concerns the observation at that root; advice
under ``"next"`` concerns the next observation. ``*B`` is the batch size, ``A`` the
number of actions.

| name | shape | dtype | meaning |
| --- | --- | --- | --- |
| :data:`PRIOR_LOGITS` | ``[*B, A]`` | float32 | advice as raw logits, zeros where there is none |
| :data:`CONFIDENCE` | ``[*B, 1]`` | float32 | the advisor's own confidence, 0 to 1 |
| :data:`MASK` | ``[*B, 1]`` | bool | ``False`` where there is no usable advice |
| :data:`ADVICE_ID` | ``[*B, 1]`` | int64 | question that the advice comes from, 0 for none |
| :data:`FALLBACK` | ``[*B, 1]`` | bool | other advice serves until that question is answered |
| :data:`BETA` | ``[*B, 1]`` | float32 | weight that the gate gave to the advice |
| :data:`UNCERTAINTY` | ``[*B, 1]`` | float32 | what the gate saw, before its sigmoid |
| :data:`KL` | ``[*B, 1]`` | float32 | KL(mixed policy, policy) of the step, nats |
| :data:`SOURCE` | ``[*B, 1]`` | int64 | who picked the action, see the ``SOURCE_*`` constants |
| :data:`ACTION_VALUES` | ``[*B, A]`` | float32 | what one imagined step of each action is worth |
| :data:`MIX_LOGITS` | ``[*B, A]`` | float32 | normalized logits of the mixed policy |
| :data:`MIX_LOC` | ``[*B, A]`` | float32 | location of the mixed policy, for continuous actions |
| :data:`MIX_SCALE` | ``[*B, A]`` | float32 | its scale |
| :data:`ACQUISITION` | ``[*B, 1]`` | float32 | weight that bought advice would add |
| :data:`ORIGIN` | ``[*B, 1]`` | int64 | whose advice was at hand, see the ``ORIGIN_*`` constants |
| :data:`PRIOR_NET_LOGITS` | ``[*B, A]`` | float32 | PriorNet's prior |
| :data:`PRIOR_NET_CONFIDENCE` | ``[*B, 1]`` | float32 | its own, raw confidence, 0 to 1 |
| :data:`PLANNER_LOGITS` | ``[*B, A]`` | float32 | first step of the plan, as advice |
| :data:`PLANNER_SEED_SCORE` | ``[*B, 1]`` | float32 | mean score of the first sequences |
| :data:`PLANNER_SCORE` | ``[*B, 1]`` | float32 | mean score of the last sequences |
| :data:`COEFFICIENT` | ``[*B, 1]`` | float32 | mixing coefficient, 1 where advice acts |
| :data:`RETURN` | ``[*B, 1]`` | float32 | real discounted return from here on, NaN while unknown |
| :data:`IMITATION` | ``[*B, K, ...]`` | nested | steps to imitate, drawn from all of replay |
| :data:`IMITATION_WEIGHT` | ``[*B, 1]`` | float32 | how much the step of a record is imitated |
| :data:`IMITATION_LIMIT` | ``[*B, 1]`` | float32 | probability up to which a step is imitated |
| :data:`IMAGINED` | ``[N, ...]`` | nested | imagined first steps, in the losses alone |
| :data:`LAMBDA_RETURN` | ``[*B, 1]`` | float32 | lambda return from here on, in the losses alone |
| :data:`PLAN` | ``[*B, H]`` | int64 | the advisor's plan from here on, -1 beyond its end |
| :data:`ACTION_MASK` | ``[*B, A]`` | bool | actions that the advisor calls valid |
| :data:`SUBGOAL` | ``[*B, G]`` | float32 | the advisor's subgoal, one-hot over the names |
| :data:`FEATURES` | ``[*B, K]`` | float32 | features by programs, zeros where there are none |
| :data:`FEATURES_MASK` | ``[*B, 1]`` | bool | ``False`` where no program computed any |
| :data:`CODE_ID` | ``[*B, 1]`` | int64 | number of those programs, 0 for none |
| :data:`REACHED` | ``[*B, G]`` | float32 | which subgoals are true of the observation |
| :data:`GATE` | ``[*B, 1]`` | bool | hysteresis state of the gate, carried from step to step |
| :data:`RAW_REWARD` | ``[*B, 1]`` | float32 | the environment's reward where ``reward`` is shaped |
"""

from __future__ import annotations

from tensordict import TensorDictBase
from torch import Tensor

PRIOR_LOGITS = "llm_prior_logits"
CONFIDENCE = "llm_confidence"
MASK = "llm_mask"
ADVICE_ID = "llm_advice_id"
FALLBACK = "llm_fallback"
ADVICE_KEYS = (PRIOR_LOGITS, CONFIDENCE, MASK)
PLAN = "llm_plan"
ACTION_MASK = "llm_action_mask"
SUBGOAL = "llm_subgoal"
REACHED = "llm_reached"
FEATURES = "llm_features"
FEATURES_MASK = "llm_features_mask"
CODE_ID = "llm_code_id"
FEATURE_KEYS = (FEATURES, FEATURES_MASK, CODE_ID)

UNCERTAINTY = "lore_uncertainty"
BETA = "lore_beta"
KL = "lore_kl"
SOURCE = "lore_source"
ACTION_VALUES = "lore_action_values"
MIX_LOGITS = "lore_logits"
MIX_LOC = "lore_loc"
MIX_SCALE = "lore_scale"
GATE = "lore_gate"
RETURN = "lore_return"
LAMBDA_RETURN = "lore_lambda_return"
IMITATION = "lore_imitation"
IMAGINED = "lore_imagined"
IMITATION_WEIGHT = "lore_imitation_weight"
IMITATION_LIMIT = "lore_imitation_limit"

SOURCE_POLICY = 0
SOURCE_ADVICE = 1
SOURCE_RANDOM = 2

ACQUISITION = "lore_acquisition"
ORIGIN = "lore_origin"
PRIOR_NET_LOGITS = "prior_net_logits"
PRIOR_NET_CONFIDENCE = "prior_net_confidence"
PLANNER_LOGITS = "planner_logits"
PLANNER_SEED_SCORE = "planner_seed_score"
PLANNER_SCORE = "planner_score"

COEFFICIENT = "lore_coefficient"

# Whose advice was at hand, also where the coefficient left it no weight.
ORIGIN_NONE = 0
ORIGIN_ADVISOR = 1
ORIGIN_PRIOR_NET = 2

RAW_REWARD = "raw_reward"


def raw_reward(following: TensorDictBase) -> Tensor:
    """Return the environment's own reward of a step, whether or not ``reward`` is shaped.

    Whatever measures an agent reads this. What is compared with the critic, which learns from
    ``reward``, reads ``reward``.

    Args:
        following: The ``"next"`` of a step or of a batch of steps.
    """
    reward = following.get(RAW_REWARD, None)
    return following.get("reward") if reward is None else reward
