"""What a run's machine was, in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe_machine() -> str:
    """Return cores, processor, system and Python of this machine, such as for a report."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    python = platform.python_version()
    return f"{os.cpu_count()} cores of {model}, {platform.system()}, Python {python}"
