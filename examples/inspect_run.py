"""Look at a trained agent: policy, advice and mix at every step of some episodes.

Examples::

    python examples/inspect_run.py checkpoint=outputs/2026-01-01/12-00-00-123456
    python examples/inspect_run.py checkpoint=RUN_FOLDER episodes=1 coefficient=1 video=mp4
    python examples/inspect_run.py checkpoint=RUN_FOLDER calls=20
"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig

from lore_torchrl.advisors.redaction import redact_output
from lore_torchrl.configs import register_configs, settings_of
from lore_torchrl.inspection import inspect_checkpoint

register_configs()


@hydra.main(version_base="1.3", config_path="../configs", config_name="inspect")
def main(config: DictConfig) -> None:
    """Play, draw, and print where the page is."""
    try:
        recording, page = inspect_checkpoint(settings_of(config))
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        sys.exit(f"Cannot inspect: {error}")
    for index, episode in enumerate(recording.episodes):
        print(f"episode {index}: {episode.outcome}")
    print(f"page {page}")


if __name__ == "__main__":
    redact_output()
    main()
