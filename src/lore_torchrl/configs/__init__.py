"""Structured configuration: one dataclass a group, one field a setting.

The dataclasses are plain Python and are what the builders take. :func:`register_configs`
registers them as Hydra schemas, so that an unknown key in a file of ``configs/`` or on the
command line fails before anything is built; impossible values fail when the dataclass is made,
with name and value in the message. The files of ``configs/`` hold only what differs. All
settings with their defaults: ``docs/configuration.md``, written by
``python -m lore_torchrl.configs.reference``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from lore_torchrl.configs.advisors import (
    ChatAdvisorConfig,
    LocalAdvisorConfig,
    RecordedAdvisorConfig,
    ScriptedAdvisorConfig,
    StaleAdvisorConfig,
    TruncatedAdvisorConfig,
    TurningAdvisorConfig,
)
from lore_torchrl.configs.lore import (
    BanditConfig,
    CallsConfig,
    DisagreementConfig,
    EpsilonConfig,
    FeaturesConfig,
    GateConfig,
    LoReConfig,
    LossConfig,
    MixerConfig,
    PlannerConfig,
    PriorNetConfig,
    ProgressConfig,
    SamplingConfig,
    SubgoalConfig,
    TemperatureConfig,
    ValueEnsembleConfig,
)
from lore_torchrl.configs.run import (
    CHECKS,
    DreamerConfig,
    EnvConfig,
    EvaluationConfig,
    HealthConfig,
    LoggerConfig,
    TrainConfig,
    restore_config,
)
from lore_torchrl.configs.scripts import InspectConfig, StudyConfig

__all__ = [
    "CHECKS",
    "BanditConfig",
    "CallsConfig",
    "ChatAdvisorConfig",
    "DisagreementConfig",
    "DreamerConfig",
    "EnvConfig",
    "EpsilonConfig",
    "EvaluationConfig",
    "FeaturesConfig",
    "GateConfig",
    "HealthConfig",
    "InspectConfig",
    "LoReConfig",
    "LocalAdvisorConfig",
    "LoggerConfig",
    "LossConfig",
    "MixerConfig",
    "PlannerConfig",
    "PriorNetConfig",
    "ProgressConfig",
    "RecordedAdvisorConfig",
    "SamplingConfig",
    "ScriptedAdvisorConfig",
    "StaleAdvisorConfig",
    "StudyConfig",
    "SubgoalConfig",
    "TemperatureConfig",
    "TrainConfig",
    "TruncatedAdvisorConfig",
    "TurningAdvisorConfig",
    "ValueEnsembleConfig",
    "register_configs",
    "restore_config",
    "settings_of",
]


def settings_of(config: Any) -> Any:
    """Make the dataclass of settings that a Hydra configuration describes.

    Raises:
        ValueError: If a setting that has no default is not given, or one is impossible.
    """
    from omegaconf import OmegaConf

    if missing := sorted(OmegaConf.missing_keys(config)):
        raise ValueError(
            f"{', '.join(missing)} must be given: add {missing[0]}=... to the command."
        )
    return OmegaConf.to_object(config)


@cache
def register_configs() -> None:
    """Register the schemas with Hydra's ``ConfigStore``, for a script with Hydra overrides.

    A second call does nothing.

    Raises:
        ImportError: If Hydra is not installed.
    """
    try:
        from hydra.core.config_store import ConfigStore
    except ImportError as err:
        raise ImportError(
            "The example scripts need Hydra: pip install 'lore-torchrl[train]'."
        ) from err
    store = ConfigStore.instance()
    # Missing here, since one advisor's schema does not merge with another's.
    store.store(name="schema", node=TrainConfig(advisor="???"))
    store.store(name="study_schema", node=StudyConfig)
    store.store(name="inspect_schema", node=InspectConfig)
    for group, name, node in (
        ("env", "schema", EnvConfig),
        ("lore", "schema", LoReConfig),
        ("dreamer", "schema", DreamerConfig),
        ("logger", "schema", LoggerConfig),
        ("health", "schema", HealthConfig),
        ("advisor", "scripted_schema", ScriptedAdvisorConfig),
        ("advisor", "stale_schema", StaleAdvisorConfig(advisor="???")),
        ("advisor", "truncated_schema", TruncatedAdvisorConfig(advisor="???")),
        ("advisor", "turns_schema", TurningAdvisorConfig),
        ("advisor", "recorded_schema", RecordedAdvisorConfig),
        ("advisor", "local_schema", LocalAdvisorConfig),
        ("advisor", "chat_schema", ChatAdvisorConfig),
    ):
        store.store(group=group, name=name, node=node)
