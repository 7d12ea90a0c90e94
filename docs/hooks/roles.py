"""Griffe extension: the roles, formulas and links of docstrings, for MkDocs."""

from __future__ import annotations

import re
from typing import Any

import griffe

_FORMULA = re.compile(r"^( *)\.\. math::\n+((?:\1 +\S.*(?:\n|$))+)", re.MULTILINE)
_CODE = re.compile(r"^ *\.\. code-block:: python\n+", re.MULTILINE)
_MATH = re.compile(r":math:`([^`]+)`")
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(?:([^`<]+) <)?(~?)([\w.]+)>?`")
_LINK = re.compile(r"`([^`<]+?)\s*<(https?://[^>]+)>`_")


class Roles(griffe.Extension):
    """Rewrites reStructuredText as Markdown; a name without a page stays plain code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is None:
            return

        def formula(found: re.Match[str]) -> str:
            indent, lines = found[1], found[2].rstrip().splitlines()
            if "\\\\" in found[2]:
                lines = [f"{indent}\\begin{{aligned}}", *lines, f"{indent}\\end{{aligned}}"]
            return "\n".join([f"{indent}$$", *lines, f"{indent}$$", ""])

        def name(found: re.Match[str]) -> str:
            shown, short, path = found.groups()
            shown = shown or (path.rpartition(".")[2] if short else path)
            try:
                if not path.startswith(("lore_torchrl.", "torch")):
                    first, dot, rest = path.partition(".")
                    path = obj.resolve(first) + dot + rest
            except griffe.NameResolutionError:
                return f"`{shown}`"
            return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'

        text = _CODE.sub("", obj.docstring.value)
        text = _FORMULA.sub(formula, text)
        text = _MATH.sub(lambda found: f"${' '.join(found[1].split())}$", text)
        text = _ROLE.sub(name, text)
        obj.docstring.value = _LINK.sub(r"[\1](\2)", text)
