"""Ask an advisor once and show everything: the first thing to run with a new server.

Examples::

    python examples/advise.py env=doorkey5x5 advisor=scripted
    python examples/advise.py env=doorkey5x5 advisor=openai steps=12
    python examples/advise.py advisor=vllm advisor.model=my-model advisor.mode=json
    python examples/advise.py program=progress
    python examples/advise.py program=features advisor=vllm advisor.model=my-model
"""

from __future__ import annotations

import asyncio
import sys

import hydra
from omegaconf import DictConfig

from lore_torchrl.advisors.redaction import redact_output
from lore_torchrl.advisors.show import ask_once
from lore_torchrl.configs import register_configs, settings_of
from lore_torchrl.dreamer.acting import adapter_of, sends_image
from lore_torchrl.dreamer.advice import build_advisor
from lore_torchrl.dreamer.programs import show_program
from lore_torchrl.dreamer.secrets import hide_secrets
from lore_torchrl.envs.adapter import planner_of, sample_request

register_configs()


@hydra.main(version_base="1.3", config_path="../configs", config_name="advise")
def main(config: DictConfig) -> None:
    """Reach a situation, ask, print; exit with 1 where there is no advice.

    With ``program`` it asks for a program, checks and runs it; the adapter's hand-written one
    where no server is configured.
    """
    hide_secrets(config)
    try:
        settings = settings_of(config)
        env, advisor = settings["env"], settings["advisor"]
        adapter = adapter_of(env)
        if config.program is not None:
            report, found = show_program(config, env, adapter, advisor)
            print(report)
            sys.exit(0 if found else 1)
        request = sample_request(
            adapter,
            steps=config.steps,
            seed=config.seed,
            memory=env.memory,
            image=sends_image(advisor),
        )
        advisor = build_advisor(advisor, planner=planner_of(adapter), seed=config.seed)
        report, advised = asyncio.run(ask_once(advisor, request))
    except Exception as error:
        # Hydra wraps what a constructor raised; its first cause says what to change.
        sys.exit(f"Cannot ask: {error.__cause__ or error}")
    print(report)
    if not advised:
        sys.exit(1)


if __name__ == "__main__":
    redact_output()
    main()
