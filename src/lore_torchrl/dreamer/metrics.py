"""What LoRe did in a collector batch, as scalars; ``docs/metrics.md`` gives the meanings."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from lore_torchrl import keys


def policy_metrics(batch: TensorDictBase) -> dict[str, float]:
    """Entropy and sharpness of the policy that acted.

    Args:
        batch: Collector output with ``logits`` and, under LoRe, the ``lore_*`` entries.
    """
    log_p = torch.log_softmax(batch.get("logits").float(), -1)
    values = {"lore/entropy_wm": -(log_p.exp() * log_p).sum(-1).mean()}
    log_mix = batch.get(keys.MIX_LOGITS, None)
    if log_mix is None:
        log_mix = log_p
    else:
        beta = batch.get(keys.BETA)
        source = batch.get(keys.SOURCE)
        values |= {
            "lore/entropy_mix": -(log_mix.exp() * log_mix).sum(-1).mean(),
            "lore/kl": batch.get(keys.KL).mean(),
            "lore/beta_mean": beta.mean(),
            "lore/beta_std": beta.std(),
            "lore/uncertainty": batch.get(keys.UNCERTAINTY).mean(),
            "lore/src_wm": (source == keys.SOURCE_POLICY).float().mean(),
            "lore/src_llm": (source == keys.SOURCE_ADVICE).float().mean(),
            "lore/src_rand": (source == keys.SOURCE_RANDOM).float().mean(),
            "lore/advised": batch.get(keys.MASK).float().mean(),
        }
        origin = batch.get(keys.ORIGIN, None)
        if origin is not None:
            used = (origin == keys.ORIGIN_PRIOR_NET).float().mean()
            values["prior_net/advised"] = used
        share = batch.get(keys.SHARE, None)
        if share is not None:
            values["bandit/share"] = share.mean()
    values["lore/prob_max"] = log_mix.exp().amax(-1).mean()
    return {name: value.item() for name, value in values.items()}
