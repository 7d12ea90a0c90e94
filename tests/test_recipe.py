"""TorchRL's own recipe, out of the wheel, runs with LoRe in it and without."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torchrl

pytest.importorskip("hydra")

from hydra import compose, initialize_config_dir

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "torchrl_recipe.py"
RECIPE = Path(torchrl.__file__).parent.parent / "sota-implementations" / "dreamer_v3"
SHORT = [
    *("collector.total_frames=160", "logger.eval_every=0"),
    *("replay_buffer.batch_size=2", "optimization.train_ratio=4"),
]


@pytest.mark.parametrize(
    ("config", "calls"),
    [
        ("torchrl_recipe", 3),
        pytest.param("torchrl_recipe", 0, marks=pytest.mark.slow),
        pytest.param("torchrl_recipe_minigrid", 3, marks=pytest.mark.slow),
    ],
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
    told = re.search(
        r"(\d+) calls, (\d+) answers from the cache, (\d+) advised segments", result.stdout
    )
    if calls:
        assert int(told[1]) == calls and int(told[2]) > 10
        # The bandit reads what the recipe's SelectTransform lets through.
        assert "lore.observe() finds no" not in result.stderr + result.stdout
    else:
        assert told is None
    assert '"type": "train"' in metrics.read_text()


@pytest.mark.parametrize("config", ["torchrl_recipe", "torchrl_recipe_minigrid"])
def test_the_recipe_collects_whole_batches_as_it_is_configured(config):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        collector = compose(config).collector
    assert collector.total_frames % collector.frames_per_batch == 0


ADVICE = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
from torchrl_recipe import CartPoleDescriber, push_under
from lore_torchrl.advisors.scripted import ScriptedAdvisor

asked = []


def push(request):
    asked.append(request)
    return push_under(request)


advisor, describer = ScriptedAdvisor(push), CartPoleDescriber()
"""
RUN = """
import sys
import hydra
import train
import my_advice

overrides = sys.argv[2:]
with hydra.initialize_config_dir(sys.argv[1], version_base="1.3"):
    config = hydra.compose("torchrl_recipe", overrides=overrides)
train.main.__wrapped__(config)
print(len(my_advice.asked), "asked")
"""


@pytest.mark.slow
def test_the_lines_of_the_page_change_the_recipe(tmp_path):
    """The diff in docs/torchrl_recipe.md applies to the wheel's file, and what comes of it runs."""
    page = (ROOT / "docs" / "torchrl_recipe.md").read_text()
    diff = re.search(r"```diff\n(.*?)```", page, re.DOTALL)[1]
    source = (RECIPE / "train.py").read_text()
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines()
        old = "\n".join(line[1:] for line in lines if line[0] != "+")
        new = "\n".join(line[1:] for line in lines if line[0] != "-")
        assert source.count(old + "\n") >= 1, f"not in the recipe:\n{old}"
        source = source.replace(old + "\n", new + "\n", 1)
    assert sum(line[0] == "+" for line in diff.splitlines()) <= 15
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "my_advice.py").write_text(ADVICE)
    (tmp_path / "run.py").write_text(RUN)
    for helper in RECIPE.glob("*.py"):
        if helper.name != "train.py":
            (tmp_path / helper.name).write_text(helper.read_text())
    metrics = tmp_path / "metrics.jsonl"
    words = [*SHORT, f"logger.metrics_jsonl={metrics}", "logger.train_every=64"]
    result = subprocess.run(
        [sys.executable, "run.py", str(ROOT / "configs"), *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(re.search(r"(\d+) asked", result.stdout)[1]) >= 5
    assert "lore.observe() finds no" not in result.stderr + result.stdout
    assert '"type": "train"' in metrics.read_text()
