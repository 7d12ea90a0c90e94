"""Hooks that let TorchRL's :class:`~torchrl.trainers.Trainer` carry DreamerV3 and LoRe."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
from lore_torchrl.replay import EpisodeReturns, ImitationSampler, LateAdvice
from lore_torchrl.replay.late_advice import Answers


class DreamerReplayHook(TrainerHookBase):
    """Store records, owe updates by the replay ratio, and refresh latent states.

    :class:`~torchrl.trainers.Trainer` with ``optim_steps_per_batch=None`` asks for samples
    until its sampling hook raises ``StopIteration``: here when the updates are done that the
    collected steps have earned.

    Args:
        replay: Buffer ensemble from :func:`~lore_torchrl.dreamer.replay.build_replay`.
        config: Shape of a sample, ratio and start of the updates.

    Keyword Args:
        observed_keys: Entries kept with each observation (add the advice entries).
        device: Where samples go. Default: ``"cpu"``.
        late: Brings late advice to the stored rows; the ``observed_keys`` then include
            ``llm_advice_id`` and ``llm_fallback``. Default: ``None``.
        answers: Returns the answers to questions by their numbers, for ``late``.
            Default: ``None``.
        returns: Writes the returns of the episodes that have ended. Default: ``None``.
        stored: Draws the steps that each sample has for the imitation, a multiple of its
            records. Default: ``None``.

    Attributes:
        listeners: Called after late answers were written.
    """

    def __init__(
        self,
        replay: ReplayBufferEnsemble,
        config: DreamerConfig,
        *,
        observed_keys: Sequence[NestedKey] = OBSERVED_KEYS,
        device: torch.device | str = "cpu",
        late: LateAdvice | None = None,
        answers: Answers | None = None,
        returns: EpisodeReturns | None = None,
        stored: ImitationSampler | None = None,
    ):
        self.replay = replay
        self.config = config
        self.late = late
        self.returns = returns
        self.stored = stored
        self.answers = answers
        self.listeners: list[Callable[[], None]] = []
        self.shape = (config.batch_size, config.seq_len)
        self.schedule = DreamerV3UpdateRatio(config.replay_ratio / math.prod(self.shape))
        self.observed_keys = tuple(observed_keys)
        self.device = torch.device(device)
        self.updates = 0
        self._owed = 0
        self._trainer: Trainer | None = None

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
        self.late.apply(self.replay, self.answers)
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
        self._handles = sample.select("index", "index_generation")
        sample = sample.exclude("index", "index_generation")
        self._weights = sample.get(keys.IMITATION_WEIGHT, None)
        sample = sample[:, :-1]
        if self.stored is not None:
            sample = self.with_stored(sample, self.stored.sample())
        return sample.to(self.device, non_blocking=True)

    def with_stored(self, sample: TensorDictBase, steps: TensorDictBase) -> TensorDictBase:
        """Put steps ``[batch_size * seq_len * K]`` into a sample."""
        return sample.set(keys.IMITATION, steps.reshape(*sample.batch_size, -1))

    def write_back(self, sample: TensorDictBase) -> None:
        """Refresh the stored latent states after an update."""
        context = sample.get("replay_context")
        if self._weights is None:
            context = context.exclude(keys.IMITATION_WEIGHT)
        elif keys.IMITATION_WEIGHT in context:
            # Of the last posterior it is not known what was gained: the record keeps its own.
            weight = context.get(keys.IMITATION_WEIGHT)
            weight[:, -1] = self._weights[:, -1].to(weight.device)
        write_back_latents(self.replay, self._handles, context)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's progress and the sampler's random state."""
        state = {
            "schedule": self.schedule.state_dict(),
            "updates": self.updates,
            "owed": self._owed,
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


class MetricsHook(TrainerHookBase):
    """Average what is collected and learned over an interval and write one row of it.

    Args:
        logger: Where rows go.

    Keyword Args:
        interval: Environment steps between rows.
        num_envs: Environments; episodes are followed for each.
        updates: Returns the number of learner updates so far.
        batch_metrics: Functions from a collector batch to metrics by name: a number, averaged
            over batches, or a list (array, tensor) with one for each case, averaged over all.
        gauges: Functions to scalars that are read when a row is written.
        bar: Function to what the progress bar shows beside success and KL. Default: nothing.
        health: Looks at each row before it is written. Default: ``None``.
        finite: Returns whether the learner is, after each round of updates; where it is not, a
            row is written at once. Default: ``None``.
        stop: Names of the checks that end the run: ``nonfinite`` by raising
            ``FloatingPointError`` without another checkpoint, the others with one.
            Default: none.
    """

    def __init__(
        self,
        logger: RunLogger,
        *,
        interval: int,
        num_envs: int,
        updates: Callable[[], int],
        batch_metrics: Sequence[
            Callable[[TensorDictBase], Mapping[str, float | Sequence[float]]]
        ] = (),
        gauges: Sequence[Callable[[], Mapping[str, float]]] = (),
        bar: Callable[[], Mapping[str, Any]] = dict,
        health: HealthMonitor | None = None,
        finite: Callable[[], bool] | None = None,
        stop: Sequence[str] = (),
    ):
        self.health = health
        self.finite = finite
        self._urgent = False
        self.stop = tuple(stop)
        self.logger = logger
        self.interval = interval
        self.bar = bar
        self.batch_metrics = tuple(batch_metrics)
        self.gauges = tuple(gauges)
        self.updates = updates
        self._returns = torch.zeros(num_envs)
        self._lengths = torch.zeros(num_envs)
        self._next = interval
        self._elapsed = 0.0
        self._window: dict[str, list[float]] = defaultdict(list)
        self._started = time.perf_counter()
        self._window_start = (0, 0.0)
        self._trainer: Trainer | None = None
        self._success = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds of training, those before a resume included."""
        return self._elapsed + time.perf_counter() - self._started

    def collected(self, batch: TensorDictBase) -> dict[str, Any]:
        """Follow episodes and note the batch's metrics; feed the progress bar."""
        reward = batch.get(("next", "reward")).squeeze(-1).cpu()
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
        self._next = (step // self.interval + 1) * self.interval
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
            "elapsed": self.elapsed,
            "start": list(self._window_start),
            "window": self._means(),
        }
        return state if self.health is None else {**state, "health": self.health.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; of the coming row its means so far."""
        if self.health is not None and "health" in state_dict:
            self.health.load_state_dict(state_dict["health"])
        self._next = state_dict["next"]
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


class EvaluationHook(TrainerHookBase):
    """Evaluate at fixed steps and write the outcome.

    Args:
        evaluate: Returns the outcome as scalars, or ``None`` if it was broken off: the next
            call then evaluates again.
        logger: Where rows go, under ``eval/``.

    Keyword Args:
        interval: Environment steps between evaluations.
    """

    def __init__(
        self,
        evaluate: Callable[[], Mapping[str, float] | None],
        logger: RunLogger,
        *,
        interval: int,
    ):
        self.evaluate = evaluate
        self.logger = logger
        self.interval = interval
        self._next = interval
        self._trainer: Trainer | None = None

    def __call__(self) -> None:
        """Evaluate if the interval has passed or training ends."""
        step = self._trainer.collected_frames
        if step < self._next and step < self._trainer.total_frames:
            return
        outcome = self.evaluate()
        if outcome is None:
            return
        self._next = (step // self.interval + 1) * self.interval
        self.logger.log(step, {f"eval/{name}": value for name, value in outcome.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return where the next evaluation is due."""
        return {"next": self._next}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore where the next evaluation is due."""
        self._next = state_dict["next"]

    def register(self, trainer: Trainer, name: str = "evaluation") -> None:
        """Attach to the end of each round."""
        self._trainer = trainer
        trainer.register_op("post_steps", self)
        trainer.register_module(name, self)
