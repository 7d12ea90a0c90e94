"""python docs/reference/signatures.py > docs/reference/README.md writes all signatures."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Protocol

HEAD = """# All signatures

Every public name, its arguments and the first sentence of its docstring, as
`python docs/reference/signatures.py > docs/reference/README.md` writes them. `make docs` builds
pages with the whole docstrings.
"""


def public(module: ModuleType) -> list[tuple[str, object]]:
    """Return the public classes and functions that a module defines, or a package exports."""
    exported = getattr(module, "__all__", None)
    names = exported if exported is not None else [n for n in vars(module) if n[0] != "_"]
    found = [(name, getattr(module, name)) for name in names]
    return [
        (name, thing)
        for name, thing in found
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__doc__
        if exported is not None or thing.__module__ == module.__name__
    ]


def sentence(docstring: str) -> str:
    """Return the first sentence, with code in the place of Sphinx's roles."""
    text = " ".join(inspect.cleandoc(docstring).split("\n\n")[0].split())
    text = re.sub(r"`([^`<]+) <([^>]+)>`_", r"[\1](\2)", text)
    text = re.sub(r":math:`([^`]*)`", r"$\1$", text)
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    return re.split(r"(?<=\.) ", text)[0].replace("|", r"\|")


def signature(name: str, thing: object) -> str:
    """Return name and arguments without annotations; the name of exceptions and protocols."""
    bases = inspect.getmro(thing) if inspect.isclass(thing) else ()
    if BaseException in bases or Protocol in bases:
        return f"`{name}`"
    arguments = [
        argument.replace(annotation=inspect.Parameter.empty)
        for argument in inspect.signature(thing).parameters.values()
        if argument.name != "self"
    ]
    text = re.sub(r"<([\w.]+)[^>]*>", r"\1", str(inspect.Signature(arguments)))
    return f"`{name}{text}`".replace("|", r"\|")


def page() -> str:
    """Return the page."""
    parts, seen = [HEAD], set()
    for path in sorted(Path(__file__).parent.glob("*.md")):
        for module in re.findall(r"^::: (\S+)$", path.read_text(), re.MULTILINE):
            if module == "lore_torchrl.configs":
                continue  # docs/configuration.md
            entries = public(importlib.import_module(module))
            # Of the one object that a pipeline holds, the methods too.
            methods = [
                (f"LoRe.{name}", method)
                for _, thing in entries
                if thing.__name__ == "LoRe"
                for name, method in vars(thing).items()
                if name[0] != "_" and inspect.isfunction(method)
            ]
            rows = [
                f"| {signature(name, thing)} | {sentence(thing.__doc__)} |"
                for name, thing in [*entries, *methods]
                if thing not in seen
            ]
            seen |= {thing for _, thing in entries}
            if rows:
                parts.append(f"\n## {module}\n\n| name | what it is |\n| --- | --- |")
                parts += rows
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page(), end="")
