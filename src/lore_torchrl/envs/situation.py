"""A situation to ask about, reached by random steps."""

from __future__ import annotations

import torch

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.envs.minigrid import make_single_env
from lore_torchrl.envs.minigrid_describe import MiniGridDescriber


def sample_request(
    env_id: str,
    *,
    steps: int = 0,
    seed: int = 0,
    max_steps: int | None = None,
    memory: bool = False,
    image: bool = False,
) -> AdviceRequest:
    """Take random steps in a MiniGrid environment and describe what is seen then.

    Args:
        env_id: Any Gymnasium id of MiniGrid or BabyAI.

    Keyword Args:
        steps: Steps, from the first observation; a finished episode begins anew.
        seed: Seed of the room and of the steps.
        max_steps: Step limit of an episode. Default: the id's own.
        memory: Whether the describer remembers what was seen.
        image: Whether the request holds a picture.

    Raises:
        ValueError: If ``steps`` is negative.

    Examples:
        >>> sample_request("MiniGrid-Empty-5x5-v0", steps=2).actions[:2]
        ('left', 'right')
    """
    if steps < 0:
        raise ValueError(f"steps must not be negative, got {steps}.")
    env = make_single_env(env_id, seed=seed, max_steps=max_steps)
    describer = MiniGridDescriber(memory=memory, image=image)
    generator = torch.Generator().manual_seed(seed)

    def observed(tensordict) -> dict:
        seen = {key: tensordict[key] for key in describer.in_keys}
        return {k: v.numpy() if isinstance(v, torch.Tensor) else str(v) for k, v in seen.items()}

    tensordict = env.reset()
    observation = observed(tensordict)
    describer.observe(0, observation, None, reset=True)
    for _ in range(steps):
        choices = tensordict["action_mask"].nonzero().flatten()
        action = choices[torch.randint(len(choices), (), generator=generator)]
        tensordict["action"] = torch.nn.functional.one_hot(action, len(describer.actions))
        tensordict = env.step(tensordict)["next"]
        ended = bool(tensordict["done"].any())
        tensordict = env.reset() if ended else tensordict.exclude("reward")
        observation = observed(tensordict)
        describer.observe(0, observation, None if ended else int(action), reset=ended)
    env.close()
    return describer.request(0, observation)
