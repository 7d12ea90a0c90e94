"""The page of all settings, written from the dataclasses.

python -m lore_torchrl.configs.reference > docs/configuration.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from lore_torchrl import configs
from lore_torchrl.configs.setting import Settings

_ADVISORS = {
    "scripted": configs.ScriptedAdvisorConfig,
    "openai, vllm, llamacpp, ollama": configs.ChatAdvisorConfig,
    "local": configs.LocalAdvisorConfig,
    "recorded": configs.RecordedAdvisorConfig,
    "stale": configs.StaleAdvisorConfig,
    "truncated": configs.TruncatedAdvisorConfig,
    "turns": configs.TurningAdvisorConfig,
}
_HEAD = """# Configuration

Every setting, with its default. Any of them can be set on the command line
(`python examples/train.py lore.gate.beta_max=0.5`) or in a file of `configs/`, which hold only
what differs from these defaults; `--cfg job` shows what a script uses. The few settings of
`examples/advise.py` stand in `configs/advise.yaml`.
`python -m lore_torchrl.configs.reference > docs/configuration.md` writes this page.
"""


def page() -> str:
    """Return the page as Markdown."""
    blocks = [_HEAD, *_groups(configs.TrainConfig(), "A run")]
    for name, cls in _ADVISORS.items():
        blocks += _groups(cls(), f"`advisor`: {name}")
    study = configs.StudyConfig(methods={"stock": ["lore=off"]})
    blocks += _groups(study, "`examples/study.py`")
    blocks += _groups(configs.InspectConfig(), "The inspector")
    return "\n".join(blocks)


def _groups(group: Settings, title: str) -> Iterator[str]:
    """Yield the table of a group, then those of the groups in it."""
    nested, rows = [], []
    for part in fields(group):
        value = getattr(group, part.name)
        doc = part.metadata.get("doc")
        if is_dataclass(value) and not doc:
            nested.append((part.name, value))
        elif doc is not None:
            text = doc.replace("|", "\\|")
            rows.append(f"| `{part.name}` | {_shown(value)} | {text}{_limits(part.metadata)} |")
    said = " ".join((type(group).__doc__ or "").replace("``", "`").split())
    table = ["| setting | default | meaning |", "| --- | --- | --- |", *rows, ""]
    yield "\n".join([f"## {title}", "", said, "", *table])
    for name, value in nested:
        if name != "advisor":
            yield from _groups(value, f"`{value.prefix or name}`")


def _shown(value: object) -> str:
    if value is None:
        return "`null`"
    if is_dataclass(value):
        changed = [
            f"{part.name}={getattr(value, part.name)}"
            for part in fields(value)
            if getattr(value, part.name) != getattr(type(value)(), part.name)
        ]
        return f"`{' '.join(['scripted', *changed])}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value == "???":
        return "must be given"
    return f"`{value}`"


def _limits(metadata: dict[str, object]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [f"{sign} {metadata[name]}" for name, sign in signs.items() if name in metadata]
    if "among" in metadata:
        bounds.append("one of " + ", ".join(map(str, metadata["among"])))
    return f" ({', '.join(bounds)})" if bounds else ""


if __name__ == "__main__":
    sys.stdout.write(page())
