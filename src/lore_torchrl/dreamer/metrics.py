"""What LoRe did in a collector batch, as scalars; ``docs/metrics.md`` gives the meanings."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from lore_torchrl import keys
from lore_torchrl.functional import log_floor
from lore_torchrl.policies.gaussian import gaussian_entropy


def policy_metrics(batch: TensorDictBase) -> dict[str, float]:
    """Return what a collector batch tells of the policy that acted, and of the advice in it.

    It has ``logits``, or ``loc`` and ``scale``, and, under LoRe, the ``lore_*`` entries.
    """
    log_p, values = batch.get("logits", None), {}
    mix = batch.get(keys.MIX_SCALE if log_p is None else keys.MIX_LOGITS, None)
    if log_p is None:
        values["lore/entropy_wm"] = gaussian_entropy(batch.get("scale")).mean()
        if mix is not None:
            values["lore/entropy_mix"] = gaussian_entropy(mix).mean()
    else:
        log_p = log_floor(torch.log_softmax(log_p.float(), -1))
        values["lore/entropy_wm"] = -(log_p.exp() * log_p).sum(-1).mean()
        if mix is not None:
            values["lore/entropy_mix"] = -(mix.exp() * mix).sum(-1).mean()
        values["lore/prob_max"] = (log_p if mix is None else mix).exp().amax(-1).mean()
    if mix is not None:
        beta, source = batch.get(keys.BETA), batch.get(keys.SOURCE)
        values |= {
            "lore/kl": batch.get(keys.KL).mean(),
            "lore/beta_mean": beta.mean(),
            # A single weight shows no spread: neither NaN nor a 0 that looks like a gate stuck.
            **({"lore/beta_std": beta.std()} if beta.numel() > 1 else {}),
            "lore/uncertainty": batch.get(keys.UNCERTAINTY).mean(),
            "lore/src_wm": (source == keys.SOURCE_POLICY).float().mean(),
            "lore/src_llm": (source == keys.SOURCE_ADVICE).float().mean(),
            "lore/src_rand": (source == keys.SOURCE_RANDOM).float().mean(),
            "lore/advised": batch.get(keys.MASK).float().mean(),
        }
        origin, coefficient = batch.get(keys.ORIGIN, None), batch.get(keys.COEFFICIENT, None)
        if origin is not None:
            values["prior_net/advised"] = (origin == keys.ORIGIN_PRIOR_NET).float().mean()
        valid = batch.get(keys.ACTION_MASK, None)
        if valid is not None:
            values["lore/invalid_actions"] = (~valid).float().mean()
        found = batch.get(keys.ACTION_VALUES, None)
        if found is not None:
            values["lore/value_span"] = (found.amax(-1) - found.amin(-1)).mean()
        score = batch.get(keys.PLANNER_SCORE, None)
        if score is not None:
            values["planner/seed_score"] = batch.get(keys.PLANNER_SEED_SCORE).mean()
            values["planner/score"] = score.mean()
        if coefficient is not None:
            values["bandit/coefficient"] = coefficient.mean()
    return {name: value.item() for name, value in values.items()}
