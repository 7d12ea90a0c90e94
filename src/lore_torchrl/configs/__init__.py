"""Structured configuration: one dataclass a group, one field a keyword.

The dataclasses are plain Python and are what the builders take. :func:`register_configs`
registers them as Hydra schemas, so that an unknown key in a file of ``configs/`` or on the
command line fails before anything is built. Impossible values fail in ``__post_init__``,
with the value in the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from lore_torchrl.configs.advisors import (
    LocalAdvisorConfig,
    RecordedAdvisorConfig,
    ScriptedAdvisorConfig,
    StaleAdvisorConfig,
    TruncatedAdvisorConfig,
    TurningAdvisorConfig,
)
from lore_torchrl.configs.calls import CallsConfig
from lore_torchrl.configs.chat import ChatAdvisorConfig
from lore_torchrl.configs.check import check
from lore_torchrl.configs.health import HealthConfig
from lore_torchrl.configs.inspect import InspectConfig
from lore_torchrl.configs.parts import (
    BanditConfig,
    DisagreementConfig,
    PriorNetConfig,
    ValueEnsembleConfig,
)
from lore_torchrl.configs.study import StudyConfig


@dataclass
class EnvConfig:
    """Which environment, and how it is observed. Documented in ``configs/env``."""

    family: str = "lore_torchrl.envs.minigrid.MiniGrid"
    id: str = "MiniGrid-DoorKey-5x5-v0"
    num_envs: int = 4
    parallel: bool = False
    max_steps: int | None = None
    memory: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self.num_envs >= 1, "env.num_envs", self.num_envs, "it must be at least 1")
        check(
            self.max_steps is None or self.max_steps >= 1,
            "env.max_steps",
            self.max_steps,
            "it must be positive, or null for the environment's own limit",
        )


@dataclass
class GateConfig:
    """Keywords of :class:`~lore_torchrl.modules.UncertaintyGate`."""

    beta_max: float = 1.0
    kappa: float = 10.0
    tau: float = 0.5
    entropy_weight: float = 0.7
    value_weight: float = 0.3
    disagreement_weight: float = 0.0
    value_source: str = "two_hot"
    hysteresis: list[float] | None = None
    warmup_steps: int = 0
    dropout: float = 0.0
    scale_decay: float = 0.995

    def __post_init__(self) -> None:
        check(self.beta_max >= 0, "lore.gate.beta_max", self.beta_max, "it must not be negative")
        check(
            self.hysteresis is None or len(self.hysteresis) == 2,
            "lore.gate.hysteresis",
            self.hysteresis,
            "it must be null or [low, high]",
        )


@dataclass
class TemperatureConfig:
    """Keywords of :class:`~lore_torchrl.modules.TemperatureAligner`."""

    minimum: float = 0.5
    maximum: float = 2.0
    init: float = 1.0
    rate: float = 0.0


@dataclass
class MixerConfig:
    """Keywords of :class:`~lore_torchrl.modules.LogitMixer`.

    ``min_scale`` is of :class:`~lore_torchrl.policies.GaussianPolicy`.
    """

    max_kl: float = 1.0
    mode: str = "logit"
    min_scale: float = 0.3

    def __post_init__(self) -> None:
        value = self.min_scale
        check(value > 0, "lore.mixer.min_scale", value, "it must be positive")


@dataclass
class LossConfig:
    """Keywords of :class:`~lore_torchrl.objectives.LoReActorLoss`."""

    imitation_weight: float = 1.0
    imitation_threshold: float = 0.05
    prior_weight: float = 0.0
    prior_kl: str = "prior_to_policy"
    bonus_weight: float = 0.0
    multiplier_lr: float = 0.0
    multiplier_max: float = 0.1
    multiplier_init: float = 0.0
    delta: float = 0.1
    delta_end: float | None = None
    delta_steps: int = 0
    distillation_weight: float = 0.0
    beta_imagine_max: float = 0.0
    gated: bool = True


@dataclass
class EpsilonConfig:
    """Keywords of :class:`~lore_torchrl.modules.ValidEGreedyModule`; off when ``eps_init`` is 0."""

    eps_init: float = 0.0
    eps_end: float = 0.0
    annealing_num_steps: int = 10_000

    def __post_init__(self) -> None:
        check(
            0 <= self.eps_end <= self.eps_init <= 1,
            "lore.epsilon",
            (self.eps_init, self.eps_end),
            "it needs 0 <= eps_end <= eps_init <= 1",
        )


@dataclass
class LoReConfig:
    """Everything that LoRe adds to stock DreamerV3; ``enabled=false`` is the baseline."""

    enabled: bool = True
    compile_decision: bool = False
    calls: CallsConfig = field(default_factory=CallsConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    temperature: TemperatureConfig = field(default_factory=TemperatureConfig)
    mixer: MixerConfig = field(default_factory=MixerConfig)
    imitation_ratio: int = 2
    loss: LossConfig = field(default_factory=LossConfig)
    disagreement: DisagreementConfig = field(default_factory=DisagreementConfig)
    value_ensemble: ValueEnsembleConfig = field(default_factory=ValueEnsembleConfig)
    prior_net: PriorNetConfig = field(default_factory=PriorNetConfig)
    bandit: BanditConfig = field(default_factory=BanditConfig)
    epsilon: EpsilonConfig = field(default_factory=EpsilonConfig)


@dataclass
class DreamerConfig:
    """Sizes and rates of stock DreamerV3. Documented in ``configs/dreamer``."""

    hidden_dim: int = 64
    belief_dim: int = 128
    num_blocks: int = 8
    num_categoricals: int = 8
    num_classes: int = 8
    encoder_layers: int = 2
    decoder_layers: int = 2
    dynamics_layers: int = 1
    prior_layers: int = 1
    posterior_layers: int = 1
    head_layers: int = 1
    actor_layers: int = 2
    value_layers: int = 2
    num_bins: int = 255
    unimix: float = 0.01
    norm_eps: float = 1e-4
    symlog: bool = False
    image_depth: int = 8
    image_mults: list[int] = field(default_factory=lambda: [2, 3, 4, 4])

    batch_size: int = 16
    seq_len: int = 16
    imagination_horizon: int = 12
    replay_ratio: float = 32.0
    learning_starts: int = 600
    buffer_size: int = 50_000

    lr: float = 4e-4
    lr_warmup: int = 100
    adaptive_grad_clip: float = 0.3
    optimizer_eps: float = 1e-20
    free_nats: float = 1.0
    dynamic_weight: float = 1.0
    representation_weight: float = 0.1
    entropy_bonus: float = 3e-4
    gamma: float = 1.0
    continuation_horizon: float = 333.0
    lmbda: float = 0.95
    slow_critic_weight: float = 1.0
    slow_critic_tau: float = 0.02
    replay_value_weight: float = 0.3
    return_min_scale: float = 1.0
    compile_train_step: bool | None = None
    cudagraph: bool | None = None
    mixed_precision: bool = False

    def __post_init__(self) -> None:
        check(
            self.belief_dim % self.num_blocks == 0,
            "dreamer.belief_dim",
            self.belief_dim,
            f"it must be a multiple of num_blocks={self.num_blocks}",
        )
        for name in ("batch_size", "seq_len", "imagination_horizon", "buffer_size"):
            value = getattr(self, name)
            check(value >= 1, f"dreamer.{name}", value, "it must be positive")
        for name in ("replay_ratio", "learning_starts"):
            value = getattr(self, name)
            check(value >= 0, f"dreamer.{name}", value, "it must not be negative")
        check(self.lr > 0, "dreamer.lr", self.lr, "it must be positive")


@dataclass
class LoggerConfig:
    """Where numbers go. Documented in ``configs/logger``."""

    backends: list[str] = field(default_factory=lambda: ["csv"])
    interval: int = 500
    project: str = "lore_torchrl"
    group: str | None = None
    mode: str | None = None
    progress_bar: bool = True
    figures: bool = True
    advice_rows: int = 2_000

    def __post_init__(self) -> None:
        rows = self.advice_rows
        check(rows >= 0, "logger.advice_rows", rows, "it must not be negative; 0 keeps none")
        known = {"csv", "wandb", "tensorboard"}
        check(
            set(self.backends) <= known,
            "logger.backends",
            list(self.backends),
            f"choose from {sorted(known)}",
        )
        check(self.interval >= 1, "logger.interval", self.interval, "it must be positive")
        check(
            self.mode in (None, "online", "offline", "disabled"),
            "logger.mode",
            self.mode,
            "W&B knows online, offline and disabled; null chooses by whether there is a key",
        )


@dataclass
class EvaluationConfig:
    """Held-out evaluation with the advisor off."""

    interval: int = 2500
    episodes: int = 100
    deterministic: bool = False

    def __post_init__(self) -> None:
        check(self.interval >= 1, "evaluation.interval", self.interval, "it must be positive")
        check(self.episodes >= 1, "evaluation.episodes", self.episodes, "it must be positive")


@dataclass
class TrainConfig:
    """The root: one training run. Documented in ``configs/config.yaml``."""

    seed: int = 0
    total_steps: int = 10_000
    steps_per_batch: int = 32
    device: str | None = None
    num_threads: int | None = 1
    checkpoint_interval: int | None = 5_000
    checkpoint_keep: int = 2
    resume: str | None = None
    record: str | None = None
    output_dir: str = "outputs/run"
    env: EnvConfig = field(default_factory=EnvConfig)
    advisor: Any = field(default_factory=ScriptedAdvisorConfig)
    lore: LoReConfig = field(default_factory=LoReConfig)
    dreamer: DreamerConfig = field(default_factory=DreamerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    health: HealthConfig = field(default_factory=HealthConfig)

    def __post_init__(self) -> None:
        check(self.total_steps >= 1, "total_steps", self.total_steps, "it must be positive")
        check(
            self.steps_per_batch % self.env.num_envs == 0,
            "steps_per_batch",
            self.steps_per_batch,
            f"it must be a multiple of env.num_envs={self.env.num_envs}",
        )
        check(
            self.total_steps % self.steps_per_batch == 0 or self.total_steps > self.steps_per_batch,
            "total_steps",
            self.total_steps,
            f"it must be at least steps_per_batch={self.steps_per_batch}",
        )
        check(
            self.checkpoint_interval is None or self.checkpoint_interval >= 1,
            "checkpoint_interval",
            self.checkpoint_interval,
            "it must be positive, or null for no checkpoints",
        )
        check(
            self.num_threads is None or self.num_threads >= 1,
            "num_threads",
            self.num_threads,
            "it must be positive, or null for PyTorch's own choice",
        )
        per_stream = self.dreamer.buffer_size // self.env.num_envs
        check(
            per_stream > self.dreamer.seq_len + 1,
            "dreamer.buffer_size",
            self.dreamer.buffer_size,
            f"split over {self.env.num_envs} environments it must hold more than seq_len + 1 "
            f"= {self.dreamer.seq_len + 1} records each",
        )


def restore_config(saved: Mapping[str, Any]) -> TrainConfig:
    """Rebuild a run's configuration from what ``dataclasses.asdict`` made of it.

    A setting that this version does not know is left out, one that was not saved has its
    default. The advisor's settings stay a mapping, with ``_target_``.

    Args:
        saved: Such as the content of a run's ``config.json``.
    """
    return _rebuild(TrainConfig(), saved)


def _rebuild(default: Any, saved: Mapping[str, Any]) -> Any:
    values = {}
    for field_ in fields(default):
        if field_.name in saved:
            value, current = saved[field_.name], getattr(default, field_.name)
            nested = is_dataclass(current) and field_.name != "advisor"
            values[field_.name] = _rebuild(current, value) if nested else value
    return type(default)(**values)


def register_configs() -> None:
    """Register the schemas with Hydra's ``ConfigStore``.

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
    store.store(group="env", name="schema", node=EnvConfig)
    store.store(group="advisor", name="scripted_schema", node=ScriptedAdvisorConfig)
    stale, truncated = StaleAdvisorConfig(advisor="???"), TruncatedAdvisorConfig(advisor="???")
    store.store(group="advisor", name="stale_schema", node=stale)
    store.store(group="advisor", name="truncated_schema", node=truncated)
    store.store(group="advisor", name="turns_schema", node=TurningAdvisorConfig)
    store.store(group="advisor", name="recorded_schema", node=RecordedAdvisorConfig)
    store.store(group="advisor", name="local_schema", node=LocalAdvisorConfig)
    store.store(group="advisor", name="chat_schema", node=ChatAdvisorConfig)
    store.store(group="lore", name="schema", node=LoReConfig)
    store.store(group="dreamer", name="schema", node=DreamerConfig)
    store.store(group="logger", name="schema", node=LoggerConfig)
    store.store(group="health", name="schema", node=HealthConfig)
