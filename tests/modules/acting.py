"""How the tests of the acting mixtures let one act."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.envs import ExplorationType, set_exploration_type


def run(policy, td: TensorDict, seed: int = 7, mode=ExplorationType.RANDOM):
    """Return what the policy wrote, and the random state that it left behind."""
    torch.manual_seed(seed)
    with torch.no_grad(), set_exploration_type(mode):
        out = policy(td.clone())
    return out, torch.get_rng_state()


def observed(n: int, actions: int, sizes, *, advice=True, mask=True, scale=3.0) -> TensorDict:
    """Draw ``n`` latent states of these two sizes, with advice unless told otherwise."""
    state, belief = (torch.randn(n, size) for size in sizes)
    td = TensorDict(state=state, belief=belief, batch_size=[n])
    if advice:
        td["llm_prior_logits"] = scale * torch.randn(n, actions)
        td["llm_confidence"] = torch.ones(n, 1)
        td["llm_mask"] = torch.full((n, 1), mask)
    return td
