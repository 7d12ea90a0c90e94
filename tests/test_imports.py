from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lore_torchrl

ROOT = Path(lore_torchrl.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# What each subpackage may import of the others; a module of one file is listed under its name.
ALLOWED = {
    "keys": set(),
    "configs": set(),
    "functional": {"keys"},
    "advisors": {"keys"},
    "service": {"advisors", "configs"},
    "sandbox": {"advisors", "service"},
    "transforms": {"advisors", "configs", "sandbox", "service", "keys"},
    "policies": {"functional", "keys"},
    "modules": {"configs", "functional", "keys", "policies"},
    "control": {"configs", "functional", "keys"},
    "objectives": {"configs", "control", "modules", "functional", "keys", "policies"},
    "envs": {"advisors", "keys"},
    "replay": {"advisors", "keys"},
    "lore": {
        "advisors",
        "configs",
        "control",
        "keys",
        "modules",
        "objectives",
        "policies",
        "replay",
        "service",
        "transforms",
    },
    "dreamer": {
        "advisors",
        "configs",
        "control",
        "envs",
        "functional",
        "keys",
        "lore",
        "modules",
        "objectives",
        "policies",
        "replay",
        "sandbox",
        "service",
        "transforms",
    },
    "experiments": {"advisors", "configs", "dreamer"},
    "inspection": {"advisors", "configs", "dreamer", "envs", "keys", "lore", "policies"},
    # The package's own __init__: the public names.
    "__init__": {
        "advisors",
        "configs",
        "control",
        "keys",
        "lore",
        "modules",
        "objectives",
        "policies",
        "replay",
        "service",
        "transforms",
    },
}

# Optional extras and clients: a plain `import lore_torchrl` must not need or load them.
HEAVY = (
    "crafter",
    "gymnasium",
    "httpx",
    "hydra",
    "matplotlib",
    "minigrid",
    "pydantic_monty",
    "transformers",
    "wandb",
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def subpackage_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, anywhere in it."""
    package = ["lore_torchrl", *path.relative_to(ROOT).parent.parts]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from lore_torchrl import name` may import a subpackage.
            names.add(module)
            if module == "lore_torchrl":
                names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def imported_subpackages(path: Path) -> set[str]:
    parts = (name.split(".") for name in imported_modules(path))
    found = {name[1] for name in parts if name[0] == "lore_torchrl" and len(name) > 1}
    return found - {"__version__"}


def test_import_loads_no_optional_package():
    code = f"import sys, lore_torchrl; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.split() == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_one_way(path):
    name = subpackage_of(path)
    assert name in ALLOWED, f"{name} is new: say in ALLOWED what it may import"
    forbidden = imported_subpackages(path) - ALLOWED[name] - {name}
    assert not forbidden, f"{name_of(path)} may not import {sorted(forbidden)}"


def test_rule_sees_every_form_of_import(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "modules").mkdir()
    path = tmp_path / "modules" / "gate.py"
    path.write_text(
        "import lore_torchrl.envs.minigrid\n"
        "from lore_torchrl import keys, __version__\n"
        "from .. import advisors\n"
        "from ..service import budget\n"
        "def late():\n    from lore_torchrl.dreamer.agent import build_agent\n"
    )
    assert imported_subpackages(path) == {"envs", "keys", "advisors", "service", "dreamer"}
    assert subpackage_of(path) == "modules"


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if subpackage_of(p) == "advisors" and p.name != "local.py"],
    ids=name_of,
)
def test_advisors_import_no_torch(path):
    tops = {name.split(".")[0] for name in imported_modules(path)}
    assert not tops & {"torch", "torchrl", "tensordict"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_prints(path):
    calls = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not calls, f"{name_of(path)} prints in lines {calls}: use torchrl.logger"
