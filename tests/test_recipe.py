"""TorchRL's own recipe, out of the wheel, runs with LoRe in it and without."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hydra")

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "torchrl_recipe.py"
SHORT = ["collector.total_frames=256", "logger.eval_every=0", "replay_buffer.batch_size=2"]


@pytest.mark.parametrize(
    ("config", "calls"),
    [("torchrl_recipe", 3), ("torchrl_recipe", 0), ("torchrl_recipe_minigrid", 3)],
)
def test_the_recipe_runs(tmp_path, config, calls):
    metrics = tmp_path / "metrics.jsonl"
    words = [
        f"--config-name={config}",
        *SHORT,
        f"calls={calls}",
        f"logger.metrics_jsonl={metrics}",
        "logger.train_every=64",
    ]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    told = re.search(r"(\d+) calls, (\d+) answers from the cache", result.stdout)
    if calls:
        assert int(told[1]) == calls and int(told[2]) > 10
    else:
        assert told is None
    assert '"type": "train"' in metrics.read_text()
