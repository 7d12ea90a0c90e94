"""Write programs that mislead: for what they cost where the agent learns without them.

    python benchmarks/bad_programs.py outputs/bad_programs.jsonl
    python examples/study.py study=channel_regret

``progress`` is highest where the agent faces a wall and sees no goal, and ``compute_features``
hashes the view: the same numbers for the same view, others for any other.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lore_torchrl.sandbox.program import Program, ProgramStore

AWAY = """def progress(obs):
    for line in obs["view"]:
        for word in line:
            if word == "goal":
                return 0.0
    return 1.0 if obs["front"] == "wall" else 0.5
"""
NOISE = """def compute_features(obs):
    mixed = 7
    for line in obs["view"]:
        for word in line:
            for letter in word[:3]:
                mixed = (mixed * 31 + ord(letter)) % 1000003
    found = {}
    for number in range(8):
        mixed = (mixed * 48271 + 11) % 1000003
        found["hash " + str(number)] = mixed / 500001.5 - 1.0
    return found
"""


def main() -> None:
    """Write the file, in place of an earlier one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", type=Path, default=Path("outputs/bad_programs.jsonl"))
    path = parser.parse_args().path
    path.unlink(missing_ok=True)
    for kind, code in (("progress", AWAY), ("features", NOISE)):
        ProgramStore(path).append(Program(kind, code, model="hand-written, to mislead"))
    print(path)


if __name__ == "__main__":
    main()
