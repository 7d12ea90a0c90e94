"""Keeping secrets of a script's command line and configuration to the script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lore_torchrl.advisors.redaction import redact, remember, secrets_of


def hide_secrets(config: Any) -> None:
    """Have the secrets in a Hydra script's configuration hidden from now on.

    They are taken out of ``sys.argv``, which W&B keeps, and out of the YAML files that Hydra has
    written before ``main``, whose ``DictConfig`` is ``config``.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    remember(*secrets_of(OmegaConf.to_container(config, resolve=True)))
    sys.argv[1:] = map(redact, sys.argv[1:])
    if not HydraConfig.initialized():
        return
    hydra, written = HydraConfig.get(), []
    if hydra.mode is RunMode.MULTIRUN:
        written.append(Path(hydra.sweep.dir) / "multirun.yaml")
    if hydra.output_subdir is not None:
        written += Path(hydra.runtime.output_dir, hydra.output_subdir).glob("*.yaml")
    for path in written:
        path.write_text(redact(path.read_text()))
