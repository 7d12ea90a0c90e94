"""MkDocs hook: the tutorial's notebook as a page of the site."""

from __future__ import annotations

import json
from pathlib import Path

from mkdocs.structure.files import File, Files


def markdown(notebook: dict) -> str:
    """Return the cells as Markdown, with the outputs that are stored, as text."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            text = "".join(output.get("text") or output["data"]["text/plain"])
            parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts)


def on_files(files: Files, config) -> Files:
    """Add ``tutorial.md``."""
    notebook = json.loads(Path(config.docs_dir, "tutorial.ipynb").read_text())
    files.append(File.generated(config, "tutorial.md", content=markdown(notebook)))
    return files


def on_page_markdown(text: str, page, config, files: Files) -> str:
    """Link to that page, where GitHub has the notebook."""
    return text.replace("(tutorial.ipynb)", "(tutorial.md)")
