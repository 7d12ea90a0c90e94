"""Structured configuration: one dataclass a group, one field a keyword, each default once.

The dataclasses are plain Python and are what the builders take. :func:`register_configs`
registers them as Hydra schemas, so that an unknown key in a file of ``configs/`` or on the
command line fails before anything is built; impossible values fail when the dataclass is made,
with name and value in the message. The files of ``configs/`` hold only what differs. All
settings with their defaults: ``docs/configuration.md``, written by
``python -m lore_torchrl.configs.reference``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

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
from lore_torchrl.configs.setting import old_names

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
    "refuse_old_names",
    "register_configs",
    "restore_config",
]


# Files of configs/ that have another name now.
_OLD_CHOICES = {
    "ablation=imitation": "method=stock_imitation",
    "ablation=no_votes": "ablation=no_averaging",
    "ablation=no_refute": "ablation=no_noop_filter",
}


def refuse_old_names(overrides: Sequence[str]) -> None:
    """Refuse a Hydra override of a setting under its old name, by naming the new one.

    Args:
        overrides: Such as ``sys.argv[1:]``.

    Raises:
        SystemExit: With one line on each.
    """
    renamed = dict(old_names(TrainConfig()))
    words = [word.lstrip("+~") for word in overrides]
    found = [(w, _OLD_CHOICES[w]) for w in words if w in _OLD_CHOICES]
    found += [(n, renamed[n]) for n in (w.split("=")[0] for w in words) if n in renamed]
    if found:
        raise SystemExit("\n".join(f"{old} is now {new}" for old, new in found))


def register_configs() -> None:
    """Register the schemas with Hydra's ``ConfigStore``, for a script with Hydra overrides.

    Raises:
        ImportError: If Hydra is not installed.
        SystemExit: As of :func:`refuse_old_names`, of the script's own command line.
    """
    refuse_old_names(sys.argv[1:])
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
