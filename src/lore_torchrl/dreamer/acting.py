"""What acts: environments that carry all that advice needs, and the policy that leans on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tensordict import NestedKey
from tensordict.nn import TensorDictModuleBase
from torchrl._utils import logger as torchrl_logger
from torchrl.data import Unbounded
from torchrl.envs import EnvBase, InitTracker, TensorDictPrimer

from lore_torchrl import keys
from lore_torchrl.advisors.base import Advisor
from lore_torchrl.advisors.recorded import RecordedAdvisor, RecordingAdvisor
from lore_torchrl.configs import (
    ChatAdvisorConfig,
    EnvConfig,
    LoReConfig,
    RecordedAdvisorConfig,
    ScriptedAdvisorConfig,
    TrainConfig,
)
from lore_torchrl.dreamer.advice import announce, build_advisor
from lore_torchrl.dreamer.agent import DreamerAgent, build_agent
from lore_torchrl.dreamer.programs import Programs, build_programs, subgoals_of_run
from lore_torchrl.envs.adapter import EnvAdapter, build_adapter, planner_of
from lore_torchrl.envs.checks import check_adapter
from lore_torchrl.lore import LoRe
from lore_torchrl.modules import LoReActor, ValidEGreedyModule
from lore_torchrl.service import AdviceService


@dataclass(frozen=True)
class Acting:
    """Environment and policy of a run; without LoRe the optional parts are ``None``.

    Replay keeps the ``observed_keys`` with each observation; ``epsilon`` are random steps;
    ``programs`` are those of features, progress and subgoals.
    """

    env: EnvBase
    policy: TensorDictModuleBase
    observed_keys: tuple[NestedKey, ...]
    lore: LoRe | None = None
    epsilon: ValidEGreedyModule | None = None
    programs: Programs | None = None

    @property
    def service(self) -> AdviceService | None:
        """What asks the advisor."""
        return None if self.lore is None else self.lore.service

    @property
    def lore_actor(self) -> LoReActor | None:
        """Gate and mixer around the stock actor."""
        return None if self.lore is None else self.lore.actor


def adapter_of(config: EnvConfig) -> EnvAdapter:
    """Make the environment adapter that a configuration names."""
    return build_adapter(
        config.adapter, config.id, max_steps=config.max_steps, options=config.options
    )


def build_env_agent(
    config: TrainConfig, adapter: EnvAdapter, *, device: torch.device | str = "cpu"
) -> DreamerAgent:
    """Check the environments of a run, and build the agent that fits them."""
    lore = config.lore
    sizes = check_adapter(
        adapter,
        memory=config.env.memory,
        image=sends_image(config.advisor),
        abstract_states=lore.enabled and lore.calls.abstract_states,
        masked=lore.enabled and lore.epsilon.eps_init > 0,
        advised=lore.enabled,
    )
    features = {}
    if lore.enabled and lore.features.enabled:
        c = lore.features
        features = {"features_dim": c.columns, "features_hidden": c.hidden_dim}
    if lore.enabled and lore.subgoal.condition:
        features["num_subgoals"] = len(subgoals_of_run(config, adapter))
    return build_agent(config.dreamer, **sizes._asdict(), **features, device=device)


def build_acting_env(
    config: TrainConfig,
    adapter: EnvAdapter,
    agent: DreamerAgent,
    *,
    num_envs: int,
    evaluation: bool = False,
    pixels: bool = False,
    programs: Programs | None = None,
) -> EnvBase:
    """Build environments that carry the policy's latent state from step to step.

    With ``evaluation`` they play the held-out seeds, in this process; with ``pixels`` each
    observation has a picture too. Of ``programs`` the features are written, and in training the
    reward is shaped. An agent that sees subgoals sees none in evaluation.
    """
    env = adapter.make_env(
        num_envs=num_envs,
        seed=config.seed,
        evaluation=evaluation,
        parallel=config.env.parallel and not evaluation,
        pixels=pixels,
    )
    # What is no TransformedEnv yet becomes one.
    env = env.append_transform(InitTracker())
    primers = agent.primers()
    if evaluation and agent.num_subgoals is not None:
        primers[keys.SUBGOAL] = Unbounded((agent.num_subgoals,))
    env = env.append_transform(
        TensorDictPrimer(primers, random=False, default_value=0, expand_specs=True)
    )
    return env if programs is None else programs.append_to(env, evaluation=evaluation)


def build_acting(
    config: TrainConfig,
    adapter: EnvAdapter,
    agent: DreamerAgent,
    *,
    append: bool = False,
    advisor: Advisor | None = None,
    device: torch.device | str = "cpu",
    **env_options: Any,
) -> Acting:
    """Build what a run acts with: stock DreamerV3, or LoRe where it is enabled.

    With ``append`` a recording of answers goes on in its file. An ``advisor`` takes the place of
    ``config.advisor``. The rest is as of :func:`build_acting_env`.
    """
    c = config
    programs = build_programs(c, adapter)
    env = build_acting_env(c, adapter, agent, programs=programs, **env_options)
    if not c.lore.enabled:
        return Acting(env, agent.policy(), agent.observed)

    if advisor is None:
        for message in idle_channels(c):
            torchrl_logger.warning(message)
        advisor = build_advisor(c.advisor, planner=planner_of(adapter), seed=c.seed)
    announce(advisor)
    if c.record is not None:
        advisor = RecordingAdvisor(advisor, c.record, append=append)
    # What environment, agent and replay are built with is not LoRe's to build.
    default = LoReConfig()
    own = replace(
        c.lore,
        features=default.features,
        progress=default.progress,
        sampling=default.sampling,
        epsilon=default.epsilon,
        subgoal=replace(c.lore.subgoal, condition=False, path=None),
    )
    describer = adapter.make_describer(memory=c.env.memory, image=sends_image(c.advisor))
    if programs is not None:
        describer = programs.name_subgoals(describer)
    lore = LoRe(
        own,
        actor=agent.actor,
        value=agent.value,
        advisor=advisor,
        describer=describer,
        latent_sizes=(agent.state_dim, agent.belief_dim),
        world=agent.world,
        discount=1.0 - 1.0 / c.dreamer.continuation_horizon,
        success_key="success",
        seed=c.seed,
        device=device,
    )
    env = lore.advise(env)
    after, epsilon = [], None
    if c.lore.epsilon.eps_init > 0:
        mask = "action_mask" if agent.action_bounds is None else None
        settings = asdict(c.lore.epsilon)
        epsilon = ValidEGreedyModule(env.action_spec, action_mask_key=mask, **settings).to(device)
        after.append(epsilon)
    policy = agent.policy(*lore.policy_modules(), *after)
    kept = () if programs is None else programs.observed_keys
    if lore.subgoals is not None:
        kept += (keys.RAW_REWARD,)
    observed = tuple(dict.fromkeys((*agent.observed, *lore.observed_keys, *kept)))
    return Acting(env, policy, observed, lore, epsilon, programs)


def idle_channels(config: TrainConfig) -> list[str]:
    """Return a warning for each channel that is on though no answer can supply anything for it."""
    lore, advisor = config.lore, config.advisor
    wanted = {
        "plan": lore.calls.plan_horizon > 0,
        "subgoal": lore.subgoal.enabled,
        "valid_actions": lore.mixer.action_mask,
    }
    if not any(wanted.values()):
        return []
    calls = lore.calls
    if calls.budget == 0 or lore.gate.beta_max < calls.min_beta:
        names = ", ".join(name for name, on in wanted.items() if on)
        return [
            f"No call will be made, and nothing new comes through the channel of {names}: it takes "
            "lore.calls.budget above 0, and lore.calls.min_beta of at most lore.gate.beta_max."
        ]
    path = "advisor"
    while inner := next((name for name in ("advisor", "before") if hasattr(advisor, name)), None):
        advisor, path = getattr(advisor, inner), f"{path}.{inner}"
    if isinstance(advisor, ScriptedAdvisorConfig):
        given = {
            "plan": advisor.plan_length > 0 and advisor.competence != 0.0,
            "subgoal": advisor.subgoals and advisor.competence > 0.0,
            "valid_actions": advisor.valid_actions and advisor.competence >= 0.0,
        }
        how = {
            "plan": f"{path}.plan_length=16, {path}.competence other than 0",
            "subgoal": f"{path}.subgoals=true, {path}.competence above 0",
            "valid_actions": f"{path}.valid_actions=true, {path}.competence 0 or more",
        }
    elif isinstance(advisor, ChatAdvisorConfig):
        given, how = dict.fromkeys(advisor.ask_for, True), {}
    elif isinstance(advisor, RecordedAdvisorConfig):
        held = RecordedAdvisor(advisor.path).extras
        given = {name: name.removesuffix("_actions") in held for name in wanted}
        how = dict.fromkeys(wanted, f"a recording whose answers hold it ({path}.path)")
    else:
        return []
    ask = f"a server with {path}.mode=json '{path}.ask_for=[{{}}]'"
    return [
        f"The advisor gives no {name}, and the channel for it does nothing: it takes "
        f"{how.get(name, ask.format(name))}."
        for name, on in wanted.items()
        if on and not given.get(name, False)
    ]


def sends_image(advisor: object) -> bool:
    """Return whether an advisor, by its settings, or one that it asks sends a picture."""
    settings = advisor if isinstance(advisor, Mapping) else getattr(advisor, "__dict__", {})
    return bool(settings.get("send_image", False)) or any(map(sends_image, settings.values()))
