"""Run a study: methods x experiments x seeds, restartable, with a report at the end.

Examples::

    python examples/study.py study=method experiments=[doorkey5x5,doorkey6x6] seeds=5
    python examples/study.py study=competence jobs=4
    python examples/study.py study=parts seeds=3 retry=true

On a cluster each run is one cell of the grid, sent by a Hydra launcher; called again without
``cell``, it runs what is missing and writes the report. A cell that fails keeps none of the
others from running::

    python examples/study.py -m hydra/launcher=joblib study=method seeds=5 'cell=range(0,15)'
"""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lore_torchrl.advisors.redaction import redact_output
from lore_torchrl.configs import register_configs, settings_of
from lore_torchrl.dreamer.secrets import hide_secrets
from lore_torchrl.experiments import run_study

register_configs()
# Not relative: where a test imports this file, Hydra would look for a package.
CONFIGS = str(Path(__file__).resolve().parent.parent / "configs")


@hydra.main(version_base="1.3", config_path=CONFIGS, config_name="study")
def main(config: DictConfig) -> None:
    """Run what is open, then report."""
    hide_secrets(config)
    script = Path(__file__).resolve().parent / "train.py"
    study = settings_of(config)
    known = {path.stem for path in Path(CONFIGS, "experiment").glob("*.yaml")}
    unknown = sorted({*study.experiments, *study.experiment_overrides} - known)
    if unknown and not any("searchpath" in word for word in study.overrides):
        raise SystemExit(
            f"There are no experiments {unknown}: choose from {sorted(known)}. For experiments of "
            "your own name their folder, 'overrides=[\"hydra.searchpath=[file:///...]\"]'."
        )
    if study.references and not Path(study.references).exists():
        # The default one, from another folder.
        study.references = str(script.parent.parent / study.references)
    try:
        errors, page = run_study(study, script=script)
    except KeyboardInterrupt:
        print("Stopped. Finished runs are kept; the same command goes on with the others.")
        raise SystemExit(130) from None
    if page is not None:
        print(f"report {page}")
    if errors:
        text = "\n".join(errors)
        if config.cell is not None or HydraConfig.get().mode is RunMode.MULTIRUN:
            # Hydra notes an exception and goes on to the next cell; an exit would end the sweep.
            raise RuntimeError(text)
        raise SystemExit(text)


if __name__ == "__main__":
    redact_output()
    sys.exit(main())
