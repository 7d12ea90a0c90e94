"""One training run: build every part from a configuration, train, resume, report."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl._utils import logger as torchrl_logger
from torchrl.checkpoint import CheckpointRotation, GlobalRNGState
from torchrl.collectors import Collector
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType
from torchrl.trainers import Trainer

from lore_torchrl.advisors.base import Advisor
from lore_torchrl.advisors.recorded import RecordingAdvisor
from lore_torchrl.advisors.redaction import redact_all
from lore_torchrl.configs import TrainConfig
from lore_torchrl.dreamer.acting import (
    Acting,
    adapter_of,
    build_acting,
    build_env_agent,
)
from lore_torchrl.dreamer.advice_log import AdviceLog, read_advice
from lore_torchrl.dreamer.agent import DreamerAgent
from lore_torchrl.dreamer.checkpoint import (
    RunCheckpoint,
    find_checkpoint,
    load_config,
    remove_leftovers,
    set_aside,
    steps_of,
)
from lore_torchrl.dreamer.evaluation import evaluate
from lore_torchrl.dreamer.figures import save_figures
from lore_torchrl.dreamer.health import build_health, count_nonfinite, is_finite
from lore_torchrl.dreamer.hooks import DreamerReplayHook, EvaluationHook, MetricsHook
from lore_torchrl.dreamer.learner import Learner, build_learner
from lore_torchrl.dreamer.logging import RunLogger, read_metrics, read_object, rewrite
from lore_torchrl.dreamer.metrics import policy_metrics
from lore_torchrl.dreamer.replay import ReplayState, build_replay, stream_records
from lore_torchrl.dreamer.run_lock import SIGNALS, handled_signals, own_folder
from lore_torchrl.envs.adapter import EnvAdapter
from lore_torchrl.envs.batch import seed_all
from lore_torchrl.replay.imitation_sampler import empty_steps
from lore_torchrl.service import AdviceService


@dataclass
class Run:
    """Everything that one training run is made of."""

    config: TrainConfig
    agent: DreamerAgent
    learner: Learner
    env: EnvBase
    collector: Collector
    trainer: Trainer
    replay_hook: DreamerReplayHook
    service: AdviceService | None
    logger: RunLogger
    evaluation: EvaluationHook = field(init=False)

    def close(self, *, failed: bool = False) -> None:
        """Release environments, advisor and log files; see :meth:`RunLogger.close`."""
        self.collector.shutdown()
        if self.service is not None:
            self.service.close(drain_s=self.config.lore.calls.drain_s)
            if isinstance(self.service.advisor, RecordingAdvisor):
                self.service.advisor.close()
        self.logger.close(failed=failed)


# Buffers that hold settings: those of the configuration count, not those of the checkpoint.
_SETTINGS = {"eps_init", "eps_end"}


def _check_resumable(saved: TrainConfig, config: TrainConfig) -> None:
    # What a checkpoint holds is redacted.
    before, now = redact_all(_structure(saved)), redact_all(_structure(config))
    changed = [line for name in now for line in _changes(name, before.get(name), now[name])]
    if changed:
        raise ValueError(
            f"resume: the checkpoint's run had other settings: {'; '.join(changed)}. Use the "
            "same configuration, or start a new run."
        )


# Settings that a resume changes by itself.
_OF_THE_COMMAND = (".resume ", ".output_dir ", ".total_steps ")


def _changes(name: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from _changes(f"{name}.{key}", before.get(key), now.get(key))
    elif before != now:
        yield f"{name} {before!r} there, {now!r} here"


def _structure(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that decide what there is to restore, by name."""
    lore, gate, net = config.lore, config.lore.gate, config.lore.prior_net
    features = lore.features
    fixed = {name: getattr(config, name) for name in ("env", "dreamer", "seed")}
    fixed["lore.enabled"] = lore.enabled
    if not lore.enabled:
        return fixed
    ensemble = gate.value_source == "ensemble"
    return fixed | {
        "lore.bandit": lore.bandit.enabled,
        "lore.prior_net": [net.depth, net.num_cells] if net.enabled else None,
        # What else the acting policy consists of.
        "lore.planner": lore.planner.enabled,
        "lore.epsilon": lore.epsilon.eps_init > 0,
        "lore.calls.td_spike": lore.calls.td_spike is not None,
        "lore.gate.value_source": gate.value_source,
        "lore.gate.value_weight": bool(gate.value_weight),
        "lore.gate.disagreement_weight": bool(gate.disagreement_weight),
        "lore.gate.hysteresis": bool(gate.hysteresis),
        "lore.loss.beta_imagine_max": bool(lore.loss.beta_imagine_max),
        "lore.loss.imitation_weight": lore.loss.imitation_weight > 0,
        "lore.features": (
            [features.columns, features.hidden_dim, features.path] if features.enabled else None
        ),
        "lore.mixer.action_mask": lore.mixer.action_mask,
        "lore.mixer.value_gate": lore.mixer.value_temperature is not None,
        "lore.subgoal": [lore.subgoal.enabled, lore.subgoal.imagine, lore.subgoal.condition],
        "lore.subgoal.path": lore.subgoal.path is not None,
        "lore.progress": lore.progress.enabled,
        "lore.disagreement": lore.disagreement if gate.disagreement_weight else None,
        "lore.value_ensemble": lore.value_ensemble if ensemble else None,
    }


def build_run(config: TrainConfig, *, advisor: Advisor | None = None) -> Run:
    """Build environment, agent, learner, replay and trainer for one run.

    With ``config.lore.enabled`` false this is stock DreamerV3, nothing of LoRe in it. An
    ``advisor`` takes the place of ``config.advisor``.
    """
    c = config
    if c.num_threads is not None:
        torch.set_num_threads(c.num_threads)
    seed_all(c.seed)
    try:
        device = torch.device(c.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).item()
    # AssertionError: a PyTorch without CUDA; NotImplementedError: meta.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        known = "cpu, cuda or cuda:1" if torch.cuda.is_available() else "cpu: there is no CUDA"
        raise ValueError(f"device={c.device!r} cannot be used here: use {known}.") from error
    output = Path(c.output_dir)
    remove_leftovers(output / "checkpoints")
    resume = None if c.resume is None else find_checkpoint(c.resume)
    if resume is not None:
        saved = load_config(resume, trust=None)
        _check_resumable(saved, c)
        lines = _changes("", redact_all(saved), redact_all(c))
        changed = [line[1:] for line in lines if not line.startswith(_OF_THE_COMMAND)]
        if changed:
            torchrl_logger.warning(f"Resumed with other settings: {'; '.join(changed)}.")

    adapter = adapter_of(c.env)
    agent = build_env_agent(c, adapter, device=device)
    acting = build_acting(
        c,
        adapter,
        agent,
        num_envs=c.env.num_envs,
        append=resume is not None,
        advisor=advisor,
        device=device,
    )
    if resume is not None and acting.programs is not None:
        # Before the collector begins the first episodes, which run what is chosen then.
        component = "trainer_module.programs"
        RunCheckpoint(**{component: acting.programs}).load(resume, components={component})
    learner = build_learner(
        c.dreamer,
        agent,
        lore=acting.lore,
        device=device,
    )
    steps = -(-c.total_steps // c.steps_per_batch) * c.steps_per_batch
    if steps < c.dreamer.learning_starts:
        torchrl_logger.warning(
            f"Nothing will be learned in {steps} steps: the first update comes at "
            f"dreamer.learning_starts={c.dreamer.learning_starts}."
        )
    collector = Collector(
        acting.env,
        acting.policy,
        frames_per_batch=c.steps_per_batch,
        total_frames=steps,
        policy_device=device,
        env_device="cpu",
        storing_device="cpu",
        exploration_type=ExplorationType.RANDOM,
        # The environment carries everything that the policy needs already.
        auto_register_policy_transforms=False,
    )
    replay = build_replay(
        num_envs=c.env.num_envs,
        buffer_size=c.dreamer.buffer_size,
        batch_size=c.dreamer.batch_size,
        seq_len=c.dreamer.seq_len,
        seed=c.seed,
        sampling=c.lore.sampling,
    )
    replay_hook = DreamerReplayHook(
        replay, c.dreamer, observed_keys=acting.observed_keys, device=device, lore=acting.lore
    )
    if any(learner.stepper.resolve(device)):
        learner.stepper.warmup(_example_sample(acting.env, replay_hook))
    checkpoint = RunCheckpoint(
        config=redact_all(c), random=GlobalRNGState(), replay_buffer=ReplayState(replay)
    )
    if acting.service is not None:
        checkpoint.register("advice", acting.service)
    rotation = CheckpointRotation(output / "checkpoints", keep_last=c.checkpoint_keep)
    trainer = Trainer(
        collector=collector,
        total_frames=steps,
        frame_skip=1,
        # Unbounded: the replay hook ends each round when the owed updates are done.
        optim_steps_per_batch=None,
        loss_module=learner.loss,
        optimization_stepper=learner.stepper,
        replay_buffer=replay,
        progress_bar=c.logger.progress_bar,
        checkpoint=checkpoint,
        checkpoint_rotation=rotation if c.checkpoint_interval else None,
        save_trainer_interval=c.checkpoint_interval or steps,
        auto_log_optim_steps=False,
    )
    earlier: dict[str, Any] = {}
    if resume is not None:
        inside = resume.parent.name == "checkpoints"
        folder = resume.parent.parent if inside else None
        earlier = {"resume_step": steps_of(resume), "resume_from": folder}
    # Before the rows are cut: a kill in between must not leave a checkpoint later than they are.
    for path in set_aside(rotation.directory, after=earlier.get("resume_step", -1)):
        torchrl_logger.info(f"Set aside {path}: it is later than where this run begins.")
    if not earlier and (output / "metrics.jsonl").exists():
        kept = output / "metrics.replaced.jsonl"
        with kept.open("ab") as file:
            file.write((output / "metrics.jsonl").read_bytes())
        torchrl_logger.warning(
            f"{output} held another run, which is replaced: its rows are at the end of {kept.name}."
        )
        parts = (c.lore.features, c.lore.progress, c.lore.subgoal)
        named = {Path(part.path).resolve() for part in parts if part.path is not None}
        programs = output / "programs.jsonl"
        if programs.resolve() not in named:
            programs.unlink(missing_ok=True)
        (output / "advice.jsonl").unlink(missing_ok=True)
    logger = RunLogger(c.logger, output, run_config=redact_all(c), **earlier)
    advice_log = None
    if acting.service is not None and c.logger.advice_rows:
        path, actions = output / "advice.jsonl", adapter.make_describer().actions
        limit = c.logger.advice_rows
        advice_log = AdviceLog(path, acting.service, actions, limit=limit, **earlier)
    run = Run(
        c, agent, learner, acting.env, collector, trainer, replay_hook, acting.service, logger
    )
    _register_hooks(run, acting, adapter, advice_log)
    if resume is not None:
        _restore(run, resume)
        if acting.epsilon is not None:
            acting.epsilon.anneal(trainer.collected_frames)
    if acting.programs is not None:
        acting.programs.keep_in(output / "programs.jsonl")
    return run


def _register_hooks(
    run: Run, acting: Acting, adapter: EnvAdapter, advice_log: AdviceLog | None
) -> None:
    """Give the trainer its hooks, which it calls in this order."""
    c, trainer, replay_hook = run.config, run.trainer, run.replay_hook
    lore, service, loss = acting.lore, acting.service, run.learner.loss
    late = lore is not None and lore.late is not None

    def drain() -> None:
        # The last checkpoint is written then: an answer that comes after it is paid for, and
        # in a cache without a store it is lost.
        if trainer._stop_training or trainer.collected_frames >= trainer.total_frames:
            service.drain(c.lore.calls.drain_s)
            replay_hook.write_late()

    gauges = [replay_hook.stats]
    if lore is not None:
        trainer.register_op("batch_process", lore.observe)
        trainer.register_module("advice_control", lore.observer)
        gauges.append(lore.stats)
    if acting.programs is not None:
        trainer.register_module("programs", acting.programs)
        gauges.append(acting.programs.stats)
    health = build_health(c, trainer.total_frames, run.agent)
    if health is not None:
        gauges.append(partial(count_nonfinite, loss))
    summarize = getattr(adapter, "summarize", None)
    metrics = MetricsHook(
        run.logger,
        interval=c.logger.interval,
        num_envs=c.env.num_envs,
        updates=lambda: replay_hook.updates,
        batch_metrics=(policy_metrics, *([summarize] if summarize else [])),
        gauges=gauges,
        bar=dict if service is None else lambda: {"calls": service.budget.spent},
        health=health,
        finite=None if health is None else partial(is_finite, loss),
        stop=c.health.stop,
    )
    if advice_log is not None:
        trainer.register_op("batch_process", advice_log)
        replay_hook.listeners.append(advice_log.write_late)
    replay_hook.register(trainer)
    if late:
        trainer.register_op("post_steps", drain)
    metrics.register(trainer)
    if acting.epsilon is not None:
        trainer.register_op("post_steps", lambda: acting.epsilon.anneal(trainer.collected_frames))
    run.evaluation = EvaluationHook(
        partial(
            evaluate,
            c,
            adapter,
            run.agent,
            acting.lore,
            programs=acting.programs,
            stopped=partial(_interrupted, trainer),
        ),
        run.logger,
        interval=c.evaluation.interval,
    )
    run.evaluation.register(trainer)
    if late:
        # Once more, as the last of the round: those before it may have ended the run.
        trainer.register_op("post_steps", drain)


def _example_sample(env: EnvBase, hook: DreamerReplayHook) -> TensorDictBase:
    """Return a sample of the right shape to compile the learner on, at no advisor's cost."""
    zeros = env.fake_tensordict().apply(torch.zeros_like).unsqueeze(-1)
    records = stream_records(zeros, hook.observed_keys)
    if hook.returns is not None:
        records = hook.returns.prepare(records)
    sample = records[:1].expand(*hook.shape).clone()
    if hook.stored is not None:
        sample = hook.stored.extend(sample, empty_steps(records, hook.stored.num_steps))
    return sample.to(hook.device)


def _restore(run: Run, path: Path) -> None:
    trainer = run.trainer
    parts = {"loss": run.learner.loss, "policy": run.collector.policy}
    buffers = {f"{part}.{n}": b for part, m in parts.items() for n, b in m.named_buffers()}
    # A temperature that does not follow the advice, or a fixed multiplier, is one as well.
    lore = run.config.lore
    rates = {"temperature": lore.temperature.rate, "multiplier": lore.loss.multiplier_lr}
    held = _SETTINGS | {name for name, rate in rates.items() if not rate}
    settings = {name: b.clone() for name, b in buffers.items() if name.split(".")[-1] in held}
    trainer.load_from_file(path)
    for name, value in settings.items():
        buffers[name].copy_(value)
    # Episodes under way are not restored: their streams end here, environments restart. What is
    # done and neither terminated nor truncated is how readers of replay know a cut episode.
    run.replay_hook.replay.end_streams(truncated_key=None)
    RunCheckpoint(random=GlobalRNGState()).load(path, components={"random"})
    if trainer.progress_bar:
        trainer.register_op("setup", lambda: _advance_bar(trainer))
    torchrl_logger.info(f"Resumed {path} at step {trainer.collected_frames}; environments restart.")


def _advance_bar(trainer: Trainer) -> None:
    """Start the progress bar where the run goes on; TorchRL starts it at 0."""
    bar = trainer._pbar
    bar.initial = bar.n = bar.last_print_n = trainer.collected_frames
    bar.refresh()


def _interrupted(trainer: Trainer) -> bool:
    """Whether a signal ends this run."""
    return trainer._stop_reason in signal.Signals.__members__


def _stop(run: Run, signum: int) -> None:
    """End training within seconds; a second signal ends the process at once.

    What the run waits for is broken off: advice, updates that are owed, an evaluation.
    """
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    run.trainer.request_stop(signal.Signals(signum).name)
    if run.service is not None:
        run.service.stop_asking()


def train(config: TrainConfig, *, advisor: Advisor | None = None) -> dict[str, float]:
    """Train from a configuration and return the last value of every metric.

    Writes ``config.json``, ``metrics.jsonl``, the chosen loggers' files, checkpoints and,
    with ``logger.figures``, figures into ``config.output_dir``. Ctrl-C and SIGTERM stop
    within seconds, without figures, and save a checkpoint unless ``checkpoint_interval`` is
    ``None``; :func:`read_stop` tells of it. A second signal ends the process at once. An
    ``advisor`` takes the place of ``config.advisor``.

    Raises:
        FloatingPointError: If the agent's parameters are no longer finite.
        RuntimeError: If another run that is under way has ``config.output_dir``.
    """
    with own_folder(config):
        return _train(config, advisor)


def _train(config: TrainConfig, advisor: Advisor | None) -> dict[str, float]:
    output = Path(config.output_dir)
    (output / "stopped.json").unlink(missing_ok=True)
    run = build_run(config, advisor=advisor)
    rewrite(output / "config.json", [json.dumps(redact_all(config), indent=2)])
    failed = True
    try:
        with handled_signals(lambda signum, _frame: _stop(run, signum)):
            run.evaluation.make_up(read_metrics(output))
            going_on = run.trainer.collected_frames < run.trainer.total_frames
            if not going_on:
                step = run.trainer.collected_frames
                torchrl_logger.warning(f"Already at step {step}: raise total_steps to go on.")
            elif not _interrupted(run.trainer):
                run.trainer.train()
    except (RuntimeError, ValueError) as error:
        # Within a round of updates it shows first as a distribution that cannot be drawn from.
        if is_finite(run.learner.loss):
            raise
        raise FloatingPointError(
            "The agent's parameters are no longer finite: start over with a lower dreamer.lr, "
            f"which a resume cannot change. Checkpoints from before are in {output}/checkpoints."
        ) from error
    else:
        step, total = run.trainer.collected_frames, run.trainer.total_frames
        if step < total or run.evaluation.due:
            about = {"step": step, "total_steps": total, "reason": run.trainer._stop_reason}
            (output / "stopped.json").write_text(json.dumps(about))
        summary = _publish(run, output)
        failed = False
    finally:
        run.close(failed=failed)
    return summary


def read_stop(output_dir: str | Path) -> dict[str, Any] | None:
    """Read why the run in a folder ended before its last step, ``None`` if it went through.

    Returned are ``step``, ``total_steps`` and ``reason``: the name of a signal, or
    ``health.stop names`` and the check.
    """
    path = Path(output_dir) / "stopped.json"
    return read_object(path) if path.exists() else None


def _publish(run: Run, output: Path) -> dict[str, float]:
    """Draw the figures and hand the loggers what a run leaves behind; return its summary."""
    drawn = run.config.logger.figures and not _interrupted(run.trainer)
    figures = save_figures(output) if drawn else []
    for path in figures:
        torchrl_logger.info(f"Wrote {path}")
    summary: dict[str, float] = {}
    for row in read_metrics(output):
        summary |= row
    folder = output / "checkpoints"
    errors = {name: n for name, n in summary.items() if name.startswith("advice/error_") and n}
    came = ("advice/answered", "advice/cache_hits", "advice/cache_shared_hits")
    if errors and not any(summary.get(name) for name in came):
        torchrl_logger.warning(
            f"No question got an answer ({', '.join(sorted(errors))}): the run had no advice. "
            "python examples/advise.py, with env=, advisor= and advisor.* as in this run, shows "
            "one question and what comes of it."
        )
    wanted = run.config.logger.upload_checkpoint and folder.is_dir()
    checkpoint = CheckpointRotation(folder, keep_last=1).latest() if wanted else None
    advice = read_advice(output)
    try:
        run.logger.publish(summary, figures=figures, advice=advice, checkpoint=checkpoint)
    except Exception as error:  # a logger's, of any class; the run is complete without it
        about = f"{type(error).__name__}: {error}"
        torchrl_logger.warning(f"The end of {output} is not uploaded, its files are whole: {about}")
    return summary
