"""A situation to ask about, reached by random steps."""

from __future__ import annotations

import torch

from lore_torchrl.advisors.base import AdviceRequest
from lore_torchrl.envs.family import EnvFamily, anchors_of, close_env, read_row
from lore_torchrl.envs.family_checks import check_picture


def sample_request(
    family: EnvFamily,
    *,
    steps: int = 0,
    seed: int = 0,
    memory: bool = False,
    image: bool = False,
) -> AdviceRequest:
    """Take random steps in an environment and describe what is seen then.

    Args:
        family: Its family.

    Keyword Args:
        steps: Steps, from the first observation; a finished episode begins anew.
        seed: Seed of the environment and of the steps.
        memory: Whether the describer remembers what was seen.
        image: Whether the request holds a picture.

    Raises:
        ValueError: If ``steps`` is negative, or the request lacks the picture asked for.

    Examples:
        >>> from lore_torchrl.envs.minigrid import MiniGrid
        >>> sample_request(MiniGrid("MiniGrid-Empty-5x5-v0"), steps=2).actions[:2]
        ('left', 'right')
    """
    if steps < 0:
        raise ValueError(f"steps must not be negative, got {steps}.")
    env = family.make_env(num_envs=1, seed=seed)
    describer = family.make_describer(memory=memory, image=image)
    # What stands for each name: a one-hot, or a continuous action.
    actions = anchors_of(describer)
    if actions is None:
        actions = torch.eye(len(describer.actions), dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    tensordict = env.reset()
    seen = read_row(tensordict, 0, describer.in_keys)
    describer.observe(0, seen, None, reset=True)
    for _ in range(steps):
        mask = tensordict.get("action_mask", torch.ones(1, len(describer.actions)))
        choices = mask[0].nonzero().flatten()
        action = choices[torch.randint(len(choices), (), generator=generator)]
        tensordict["action"] = actions[action][None]
        stepped, tensordict = env.step_and_maybe_reset(tensordict)
        ended = bool(stepped["next", "done"].any())
        seen = read_row(tensordict, 0, describer.in_keys)
        describer.observe(0, seen, None if ended else int(action), reset=ended)
    close_env(env)
    request = describer.request(0, seen)
    if image:
        check_picture(request, describer)
    return request
