"""Train LoRe, or stock DreamerV3, from a Hydra configuration.

Examples::

    python examples/train.py experiment=doorkey5x5
    python examples/train.py experiment=doorkey5x5 lore=off
    python examples/train.py experiment=doorkey5x5 logger=wandb seed=1
    python examples/train.py experiment=doorkey5x5 resume=outputs/2026-01-01/12-00-00-123456

The exit code is 0 only for a run that went to its last step: 130 after Ctrl-C, 143 after SIGTERM,
1 where ``health.stop`` ended it.
"""

from __future__ import annotations

import signal

import hydra
from omegaconf import DictConfig

from lore_torchrl.advisors.redaction import redact_output
from lore_torchrl.configs import register_configs, settings_of
from lore_torchrl.dreamer.run import read_stop, train
from lore_torchrl.dreamer.secrets import hide_secrets

register_configs()


@hydra.main(version_base="1.3", config_path="../configs", config_name="config")
def main(config: DictConfig) -> float:
    """Train once; the held-out success is what a sweeper maximizes."""
    hide_secrets(config)
    summary = train(settings_of(config))
    failed = sorted(name for name in summary if name.startswith("advice/error_") and summary[name])
    advice = ("advice/calls", "advice/answered", *failed)
    for name in ("eval/success", "train/success", *advice, "time/steps_per_s"):
        if name in summary:
            print(f"{name:18s} {summary[name]:.3f}")
    print(f"run folder         {config.output_dir}")
    stopped = read_stop(config.output_dir)
    if stopped is None:
        # A run that is resumed at its end writes nothing.
        return summary.get("eval/success", float("nan"))
    name = stopped["reason"]
    at = f"{stopped['step']:,} of {stopped['total_steps']:,}"
    way = (
        f"; the same command with resume={config.output_dir} goes on"
        if config.checkpoint_interval
        else ""
    )
    print(f"stopped            at step {at} ({name}){way}")
    if name in signal.Signals.__members__:
        # As the shell does it; a sweep ends with it.
        raise SystemExit(128 + signal.Signals[name])
    raise RuntimeError(f"stopped at step {at}: {name}")


if __name__ == "__main__":
    redact_output()
    main()
