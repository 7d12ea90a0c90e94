from __future__ import annotations

from pathlib import Path

import pytest

# Takes the place of the training script: writes what it was told, or fails or stops if told so.
SCRIPT = """
import json, os, signal, sys
given = {k: v.strip("'") for k, v in (word.split("=", 1) for word in sys.argv[1:])}
if given.get("fail") == given["seed"] and "MENDED" not in os.environ:
    sys.exit("told to fail")
os.makedirs(given["output_dir"], exist_ok=True)
with open(os.path.join(given["output_dir"], "metrics.jsonl"), "a") as file:
    value = float(given.get("value", 0)) + int(given["seed"]) / 10
    for step in (100, 200):
        file.write(json.dumps({"step": step, "eval/success": value * step / 200}) + "\\n")
    row = {"step": 200, "advice/calls": 7, "threads": int(os.environ["OMP_NUM_THREADS"])}
    file.write(json.dumps(row) + "\\n")
if "SLEEP" in os.environ:
    import time
    open(os.path.join(given["output_dir"], "pid"), "w").write(str(os.getpid()))
    open(os.path.join(given["output_dir"], "began"), "a").write(" ".join(sys.argv[1:]) + "\\n")
    time.sleep(float(os.environ["SLEEP"]))
cut = os.environ.get("CUT")
if cut:
    with open(os.path.join(given["output_dir"], "stopped.json"), "w") as file:
        json.dump({"step": 200, "total_steps": 900, "reason": cut}, file)
    if cut == "at once":
        os.kill(os.getpid(), signal.SIGTERM)
    sys.exit(130 if cut == "SIGINT" else 1)
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path
