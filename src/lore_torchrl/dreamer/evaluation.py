"""Held-out evaluation: does the agent manage without its advisor?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from tensordict import NestedKey, TensorDict
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type, step_mdp

from lore_torchrl import keys
from lore_torchrl.configs import TrainConfig
from lore_torchrl.dreamer.acting import build_acting_env, sends_image
from lore_torchrl.dreamer.agent import DreamerAgent
from lore_torchrl.dreamer.programs import Programs
from lore_torchrl.envs.adapter import EnvAdapter
from lore_torchrl.envs.batch import close_env
from lore_torchrl.lore import LoRe


def evaluate(
    config: TrainConfig,
    adapter: EnvAdapter,
    agent: DreamerAgent,
    lore: LoRe | None = None,
    *,
    programs: Programs | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Play the held-out episodes side by side and report the outcome.

    As ``config.evaluation.actor`` says, the policy plays them, or its mixture with the answers
    that ``lore`` has cached, or both in turn. The features of ``programs`` are written, and the
    reward is the environment's own.

    They are the same whatever was played before, and training's random streams are left as
    they were. Once ``stopped``, which is read before each step, the evaluation is broken off.

    Returns:
        ``success`` (share of episodes), ``return`` and ``length`` (means), ``episodes``, with
        ``programs`` of features ``program_failures`` (their failed runs here), and what
        the adapter's ``summarize_episodes`` makes of its ``episode_keys`` at the last step of
        each episode, ``[episodes, ...]``; where the mixture played, all of its own once more as
        ``advised/...``, in the log ``eval/advised/...``; ``None`` if it was broken off.
    """
    play = partial(_evaluate, config, adapter, agent, programs=programs, stopped=stopped)
    actor = config.evaluation.actor
    outcome = play(lore if actor == "mixture" else None)
    if actor == "policy" or outcome is None:
        return outcome
    advised = outcome if actor == "mixture" else play(lore)
    if advised is None:
        return None
    return outcome | {f"advised/{name}": value for name, value in advised.items()}


def _evaluate(
    config: TrainConfig,
    adapter: EnvAdapter,
    agent: DreamerAgent,
    lore: LoRe | None,
    *,
    programs: Programs | None,
    stopped: Callable[[], bool],
) -> dict[str, float] | None:
    """Play the held-out episodes once, with the cached answers of ``lore`` if there is one."""
    programs = None if programs is None else programs.for_evaluation()
    env = build_acting_env(
        config,
        adapter,
        agent,
        num_envs=config.evaluation.episodes,
        evaluation=True,
        programs=programs,
    )
    policy = agent.policy()
    if lore is not None:
        describer = adapter.make_describer(
            memory=config.env.memory, image=sends_image(config.advisor)
        )
        env = lore.advise(env, describer=describer)
        policy = agent.policy(lore.actor)
    device = _device_of(policy)
    cuda = [device] if device.type == "cuda" else []
    likeliest = config.evaluation.deterministic
    kind = ExplorationType.DETERMINISTIC if likeliest else ExplorationType.RANDOM
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=cuda), set_exploration_type(kind):
            torch.manual_seed(config.seed)
            outcome = play_episodes(env, adapter, policy, stopped)
    finally:
        close_env(env)
    if outcome is not None and programs is not None:
        outcome["program_failures"] = float(programs.failed)
    return outcome


def _device_of(policy: TensorDictModuleBase) -> torch.device:
    return next((weight.device for weight in policy.parameters()), torch.device("cpu"))


def play_episodes(
    env: EnvBase,
    adapter: EnvAdapter,
    policy: TensorDictModuleBase,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Play one episode in each row of an environment; the rest is as of :func:`evaluate`."""
    policy.eval()
    device = _device_of(policy)
    td = env.reset()
    rows = td.batch_size[0]
    alive = torch.ones(rows, 1, dtype=torch.bool)
    total, length = torch.zeros(rows, 1), torch.zeros(rows, 1)
    success = torch.zeros_like(alive)
    last: dict[NestedKey, torch.Tensor] = {}
    while alive.any() and not stopped():
        td = policy(td.to(device)).to("cpu")
        # Finished rows are not stepped: their worlds stand still until the next reset.
        td.set("_step", alive.squeeze(-1))
        td = env.step(td)
        outcome = td.get("next")
        total += torch.where(alive, keys.raw_reward(outcome), 0.0)
        length += alive
        success |= alive & outcome.get("success")
        for key in getattr(adapter, "episode_keys", ()):
            value = outcome.get(key)
            played = alive.reshape(rows, *[1] * (value.ndim - 1))
            last[key] = torch.where(played, value, last.get(key, value))
        alive &= ~outcome.get("done")
        td = step_mdp(td)
    policy.train()
    if stopped():
        return None
    summarize = getattr(adapter, "summarize_episodes", None)
    return {
        "success": success.float().mean().item(),
        "return": total.mean().item(),
        "length": length.mean().item(),
        "episodes": float(rows),
        **({} if summarize is None else summarize(TensorDict(last, [rows]))),
    }
