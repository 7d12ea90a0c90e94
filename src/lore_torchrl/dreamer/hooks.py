"""Hooks that let TorchRL's :class:`~torchrl.trainers.Trainer` carry DreamerV3 and LoRe."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl._utils import logger as torchrl_logger
from torchrl.data import ReplayBufferEnsemble
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import DreamerV3UpdateRatio
from torchrl.trainers.trainers import TrainerHookBase

from lore_torchrl import keys
from lore_torchrl.configs import DreamerConfig
from lore_torchrl.dreamer.health import HealthMonitor
from lore_torchrl.dreamer.logging import RunLogger
from lore_torchrl.dreamer.replay import OBSERVED_KEYS, stream_records, write_back_latents
from lore_torchrl.lore import LoRe


@dataclass(eq=False)
class DreamerReplayHook(TrainerHookBase):
    """Store records, owe updates by the replay ratio, and refresh latent states.

    :class:`~torchrl.trainers.Trainer` with ``optim_steps_per_batch=None`` asks for samples
    until its sampling hook raises ``StopIteration``: here when the updates are done that the
    collected steps have earned. With ``lore``, late advice and returns come to the stored rows,
    and steps for the imitation to the samples. ``listeners`` are called after late answers were
    written.
    """

    replay: ReplayBufferEnsemble
    config: DreamerConfig
    _: KW_ONLY
    observed_keys: Sequence[NestedKey] = OBSERVED_KEYS
    device: torch.device | str = "cpu"
    lore: LoRe | None = None
    listeners: list[Callable[[], None]] = field(default_factory=list, init=False)
    updates: int = field(default=0, init=False)
    _owed: int = field(default=0, init=False)
    # Sequences drawn since the last row of metrics, and those with a reward above 0 in them.
    _drawn: list[int] = field(default_factory=lambda: [0, 0], init=False)
    _trainer: Trainer | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Derive the shape of a sample and the rate of updates."""
        self.shape = (self.config.batch_size, self.config.seq_len)
        records = math.prod(self.shape)
        self.schedule = DreamerV3UpdateRatio(self.config.replay_ratio / records)
        self.late = self.returns = self.stored = None
        if self.lore is not None:
            self.late, self.returns = self.lore.late, self.lore.returns()
            self.stored = self.lore.imitation_sampler(self.replay, batch_size=records)

    def extend(self, batch: TensorDictBase) -> None:
        """Store a collector batch, and the advice that has come for earlier ones."""
        records = stream_records(batch, self.observed_keys)
        if self.returns is not None:
            records = self.returns.prepare(records)
        where = self.replay.extend(records)
        if self.returns is not None:
            self.returns.write(self.replay, records, where)
        if self.late is not None:
            self.late.note(records, where)
            self.write_late()

    def write_late(self) -> None:
        """Write the advice that has come since the last time into the rows that wait for it."""
        self.late.apply(self.replay, self.lore.service.answers)
        for listener in self.listeners:
            listener()

    def start(self) -> None:
        """Count the updates owed for the steps collected so far."""
        steps = self._trainer.collected_frames
        if steps < self.config.learning_starts or not self.replay.can_sample():
            self._owed = 0
        else:
            self._owed += self.schedule(steps)

    def sample(self, _batch: TensorDictBase) -> TensorDictBase:
        """Return the next sample, or end this round of updates.

        A run that is being stopped does not wait for the rest of them: they are saved as owed.
        """
        if not self._owed or self._trainer._stop_training:
            raise StopIteration
        self._owed -= 1
        self.updates += 1
        sample = self.replay.sample().reshape(self.shape[0], self.shape[1] + 1)
        self._whole = sample
        sample = sample[:, :-1].exclude("index", "index_generation")
        rewarded = (keys.raw_reward(sample.get("next")) > 0).flatten(1).any(1)
        self._drawn[0] += len(rewarded)
        self._drawn[1] += int(rewarded.sum())
        if self.stored is not None:
            sample = self.stored.extend(sample)
        return sample.to(self.device, non_blocking=True)

    def stats(self) -> dict[str, float]:
        """Return the share of sequences drawn since the last call that hold a reward above 0."""
        (drawn, rewarded), self._drawn = self._drawn, [0, 0]
        return {"replay/rewarded": rewarded / drawn} if drawn else {}

    def write_back(self, sample: TensorDictBase) -> None:
        """Refresh the stored latent states after an update."""
        write_back_latents(self.replay, self._whole, sample.get("replay_context"))

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's progress and the sampler's random state."""
        state = {
            "schedule": self.schedule.state_dict(),
            "updates": self.updates,
            "owed": self._owed,
            "drawn": self._drawn,
            "rng": self.replay._rng.get_state().tolist(),
        }
        if self.stored is not None:
            state["stored"] = self.stored.state_dict()
        return state if self.late is None else {**state, "late": self.late.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the schedule's progress and the sampler's random state."""
        self.schedule.load_state_dict(state_dict["schedule"])
        self.updates = state_dict["updates"]
        self._owed = state_dict["owed"]
        self._drawn = list(state_dict["drawn"])
        generator = torch.Generator()
        generator.set_state(torch.tensor(state_dict["rng"], dtype=torch.uint8))
        self.replay.set_rng(generator)
        if self.stored is not None and "stored" in state_dict:
            self.stored.load_state_dict(state_dict["stored"])
        if self.late is not None and "late" in state_dict:
            self.late.load_state_dict(state_dict["late"])

    def register(self, trainer: Trainer, name: str = "dreamer_replay") -> None:
        """Attach to the trainer's batch, sampling and post-update slots."""
        self._trainer = trainer
        trainer.register_op("batch_process", self.extend)
        trainer.register_op("pre_optim_steps", self.start)
        trainer.register_op("process_optim_batch", self.sample)
        trainer.register_op("post_optim_log", self.write_back)
        trainer.register_module(name, self)


@dataclass(eq=False)
class MetricsHook(TrainerHookBase):
    """Average what is collected and learned over an interval and write one row of it.

    ``batch_metrics`` make metrics of a collector batch: numbers, averaged over batches, or lists
    (arrays, tensors) with one for each case, averaged over all. ``gauges`` are read when a row is
    written, ``bar`` at every batch, and ``finite`` after each round of updates: where the learner
    is not, a row is written at once. Of the checks of ``health`` those named in ``stop`` end the
    run: ``nonfinite`` by raising ``FloatingPointError``, without another checkpoint, the others
    with one.
    """

    logger: RunLogger
    _: KW_ONLY
    interval: int
    num_envs: int
    updates: Callable[[], int]
    batch_metrics: Sequence[Callable[[TensorDictBase], Mapping[str, Any]]] = ()
    gauges: Sequence[Callable[[], Mapping[str, float]]] = ()
    bar: Callable[[], Mapping[str, Any]] = dict
    health: HealthMonitor | None = None
    finite: Callable[[], bool] | None = None
    stop: Sequence[str] = ()
    _trainer: Trainer | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Begin the first row."""
        self._returns = torch.zeros(self.num_envs)
        self._lengths = torch.zeros(self.num_envs)
        self._next = self.interval
        self._elapsed = 0.0
        self._window: dict[str, list[float]] = defaultdict(list)
        self._started = time.perf_counter()
        self._window_start = (0, 0.0)
        self._success = 0.0
        self._urgent = False

    @property
    def elapsed(self) -> float:
        """Seconds of training, those before a resume included."""
        return self._elapsed + time.perf_counter() - self._started

    def collected(self, batch: TensorDictBase) -> dict[str, Any]:
        """Follow episodes and note the batch's metrics; feed the progress bar."""
        reward = keys.raw_reward(batch.get("next")).squeeze(-1).cpu()
        done = batch.get(("next", "done")).squeeze(-1).cpu()
        success = batch.get(("next", "success")).squeeze(-1).cpu()
        for step in range(reward.shape[1]):
            self._returns += reward[:, step]
            self._lengths += 1
            ended = done[:, step]
            if ended.any():
                self._window["train/success"] += success[ended, step].float().tolist()
                self._window["train/return"] += self._returns[ended].tolist()
                self._window["train/episode_length"] += self._lengths[ended].tolist()
                self._returns[ended] = 0
                self._lengths[ended] = 0
        for function in self.batch_metrics:
            for name, value in function(batch).items():
                value = value.tolist() if hasattr(value, "tolist") else value
                self._window[name] += value if isinstance(value, Sequence) else [value]
        recent = self._window["train/success"]
        if recent:
            self._success = sum(recent) / len(recent)
        bar = {"log_pbar": True, "success": self._success, **self.bar()}
        if self._window["lore/kl"]:
            bar["kl"] = self._window["lore/kl"][-1]
        return bar

    def learned(self, losses: TensorDictBase | None) -> None:
        """Note the losses and metrics of one round of updates (``None`` if it had none)."""
        if losses is None:
            return
        for key, value in losses.items():
            group = "loss" if key.startswith("loss_") else "learner"
            self._window[f"{group}/{key.removeprefix('loss_')}"].append(value)
        self._urgent = self.finite is not None and not self.finite()

    def write(self) -> None:
        """Write a row if the interval has passed, or there is no going on."""
        step = self._trainer.collected_frames
        if step < self._next and step < self._trainer.total_frames and not self._urgent:
            return
        self._next = _after(step, self.interval)
        row = {name: mean for name, (mean, _) in self._means().items()}
        row["train/episodes"] = float(len(self._window["train/success"]))
        for gauge in self.gauges:
            row.update(gauge())
        last_step, last_time = self._window_start
        elapsed = self.elapsed
        row |= {"time/updates": float(self.updates()), "time/elapsed_s": elapsed}
        row["time/steps_per_s"] = (step - last_step) / max(elapsed - last_time, 1e-9)
        self._window_start = (step, elapsed)
        findings = []
        if self.health is not None:
            metrics, findings = self.health.observe(step, row)
            row |= metrics
        self.logger.log(step, row)
        self._window.clear()
        for finding in findings:
            torchrl_logger.warning(f"Step {step:,}, {finding.check}: {finding.message}")
            if finding.check not in self.stop:
                continue
            if finding.check == "nonfinite":
                # Another checkpoint would take the place of a good one.
                raise FloatingPointError(f"Step {step:,}: {finding.message}")
            self._trainer.request_stop(f"health.stop names {finding.check}")

    def _means(self) -> dict[str, list[float]]:
        """Return mean and count of what the coming row holds so far."""
        return {
            name: [sum(map(float, values)) / len(values), len(values)]
            for name, values in self._window.items()
            if values
        }

    def state_dict(self) -> dict[str, Any]:
        """Return where the next row is due, what it holds so far, and what health has seen."""
        state = {
            "next": self._next,
            "interval": self.interval,
            "elapsed": self.elapsed,
            "start": list(self._window_start),
            "window": self._means(),
        }
        return state if self.health is None else {**state, "health": self.health.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; of the coming row its means so far."""
        if self.health is not None and "health" in state_dict:
            self.health.load_state_dict(state_dict["health"])
        self._next = _due(state_dict, self.interval)
        self._elapsed = state_dict["elapsed"]
        self._window_start = tuple(state_dict["start"])
        self._window.clear()
        for name, (mean, count) in state_dict["window"].items():
            self._window[name] = [mean] * count
        self._started = time.perf_counter()

    def register(self, trainer: Trainer, name: str = "metrics") -> None:
        """Attach to the trainer's logging slots."""
        self._trainer = trainer
        trainer.register_op("pre_steps_log", self.collected)
        trainer.register_op("post_optim_complete_log", lambda _steps, losses: self.learned(losses))
        trainer.register_op("post_steps", self.write)
        trainer.register_module(name, self)


@dataclass(eq=False)
class EvaluationHook(TrainerHookBase):
    """Evaluate every ``interval`` environment steps and at the end, and log ``eval/``.

    ``evaluate`` returns it as scalars, or ``None`` if it was broken off: it is :attr:`due` then,
    and :meth:`make_up` makes it in the resumed run.
    """

    evaluate: Callable[[], Mapping[str, float] | None]
    logger: RunLogger
    _: KW_ONLY
    interval: int
    _trainer: Trainer | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Begin with the first interval."""
        self._next = self.interval

    def __call__(self) -> None:
        """Evaluate if the interval has passed or training ends."""
        step = self._trainer.collected_frames
        if step < self._next and step < self._trainer.total_frames:
            return
        outcome = self.evaluate()
        if outcome is None:
            self._next = step
            return
        self._next = _after(step, self.interval)
        self.logger.log(step, {f"eval/{name}": value for name, value in outcome.items()})

    def make_up(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Make an evaluation that was broken off, unless ``rows`` of the log have it already."""
        if not self.due:
            return
        step = self._trainer.collected_frames
        made = (row for row in rows if any(name.startswith("eval/") for name in row))
        if any(row["step"] == step for row in made):
            self._next = _after(step, self.interval)
        else:
            self()

    @property
    def due(self) -> bool:
        """Whether the evaluation at the steps collected so far is still to be made."""
        return self._next <= self._trainer.collected_frames

    def state_dict(self) -> dict[str, Any]:
        """Return where the next evaluation is due."""
        return {"next": self._next, "interval": self.interval}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore where the next evaluation is due, by the interval of now."""
        self._next = _due(state_dict, self.interval)

    def register(self, trainer: Trainer, name: str = "evaluation") -> None:
        """Attach to the end of each round."""
        self._trainer = trainer
        trainer.register_op("post_steps", self)
        trainer.register_module(name, self)


def _after(step: int, interval: int) -> int:
    """Return the first multiple of an interval after a step."""
    return (step // interval + 1) * interval


def _due(saved: Mapping[str, Any], interval: int) -> int:
    """Return where something is due that was saved with an interval that may have been longer."""
    due = saved["next"]
    return min(due, _after(due - saved.get("interval", interval), interval))
