"""Held-out evaluation: does the agent manage without its advisor?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type, step_mdp


@torch.no_grad()
def evaluate(
    policy: TensorDictModuleBase,
    env: EnvBase,
    *,
    seed: int = 0,
    deterministic: bool = False,
    episode_keys: Sequence[NestedKey] = (),
    summarize: Callable[[TensorDictBase], Mapping[str, float]] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Play one episode in each row of a batched environment and report the outcome.

    Training's random streams are left as they were.

    Args:
        policy: Acting policy, built without advice.
        env: Batched environment with ``success`` under ``"next"``; one row an episode.

    Keyword Args:
        seed: Seed of the policy's draws; the environment brings its own. Default: ``0``.
        deterministic: Take the likeliest action instead of sampling. Default: ``False``.
        episode_keys: Entries that ``summarize`` reads. Default: none.
        summarize: Makes further metrics of these entries at the last step of each episode,
            ``[episodes, ...]``. Default: ``None``.
        stopped: Read before each step; where it is true, the evaluation is broken off.
            Default: never.

    Returns:
        ``success`` (share of episodes), ``return`` and ``length`` (means),
        ``episodes``, and what ``summarize`` returns; ``None`` if it was broken off.
    """
    kind = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
    was_training = policy.training
    policy.eval()
    with torch.random.fork_rng(), set_exploration_type(kind):
        torch.manual_seed(seed)
        td = env.reset()
        rows = td.batch_size[0]
        alive = torch.ones(rows, 1, dtype=torch.bool)
        total = torch.zeros(rows, 1)
        length = torch.zeros(rows, 1)
        success = torch.zeros(rows, 1, dtype=torch.bool)
        device = next(policy.parameters()).device
        last: dict[NestedKey, torch.Tensor] = {}
        while alive.any() and not stopped():
            td = policy(td.to(device)).to("cpu")
            # Finished rows are not stepped: their worlds stand still until the next reset.
            td.set("_step", alive.squeeze(-1))
            td = env.step(td)
            outcome = td.get("next")
            total += torch.where(alive, outcome.get("reward"), 0.0)
            length += alive
            success |= alive & outcome.get("success")
            for key in episode_keys:
                value = outcome.get(key)
                played = alive.reshape(rows, *[1] * (value.ndim - 1))
                last[key] = torch.where(played, value, last.get(key, value))
            alive &= ~outcome.get("done")
            td = step_mdp(td)
    policy.train(was_training)
    if stopped():
        return None
    return {
        "success": success.float().mean().item(),
        "return": total.mean().item(),
        "length": length.mean().item(),
        "episodes": float(rows),
        **({} if summarize is None else summarize(TensorDict(last, [rows]))),
    }
