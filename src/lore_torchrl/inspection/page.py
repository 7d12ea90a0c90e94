"""A page that holds all steps of all episodes, with a slider."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from lore_torchrl.inspection.playing import Recording

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; }
img { max-width: 100%; }
pre { background: #f6f6f6; padding: 0.7rem; white-space: pre-wrap; font-size: 13px; }
input[type=range] { width: 100%; }
label { margin-right: 1rem; }
"""
_SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
function choose() {
  const episode = data[find("episode").value];
  find("step").max = episode.steps.length - 1;
  find("step").value = 0;
  find("timeline").src = episode.timeline;
  find("outcome").textContent = episode.outcome;
  show();
}
function show() {
  const step = data[find("episode").value].steps[find("step").value];
  find("picture").src = step.picture;
  find("text").textContent = step.text;
}
find("episode").addEventListener("change", choose);
find("step").addEventListener("input", show);
choose();
"""


def write_page(
    path: str | Path,
    recording: Recording,
    pictures: Sequence[Sequence[bytes]],
    timelines: Sequence[Path],
) -> Path:
    """Write one HTML file with every step's picture and text and a slider over them.

    It needs nothing beside itself. The arrow keys move the slider.

    Args:
        path: The file.
        recording: What was played.
        pictures: For each episode, one PNG for each step: see :func:`to_png`.
        timelines: For each episode, its time line as PNG.
    """
    data = []
    for episode, drawn, timeline in zip(recording.episodes, pictures, timelines, strict=True):
        steps = [
            {"picture": _inline(picture), "text": moment.text}
            for moment, picture in zip(episode.moments, drawn, strict=True)
        ]
        data.append(
            {
                "outcome": episode.outcome,
                "timeline": _inline(Path(timeline).read_bytes()),
                "steps": steps,
            }
        )
    options = "".join(f'<option value="{i}">episode {i}</option>' for i in range(len(data)))
    title = f"{recording.env_id} after {recording.step:,} steps"
    # "</script" would end the script element, "<!--" and "<script" keep it from ending.
    content = json.dumps(data).replace("<", "\\u003c")
    path = Path(path)
    path.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><p><code>{html.escape(str(recording.checkpoint))}</code></p>"
        f'<p><label>Episode <select id="episode">{options}</select></label>'
        '<span id="outcome"></span></p>'
        '<p><label for="step">Step</label><input id="step" type="range" min="0" value="0"></p>'
        '<img id="picture" alt="frame, policies and numbers of the step">'
        '<h2>What the advisor would be told</h2><pre id="text"></pre>'
        '<h2>The whole episode</h2><img id="timeline" alt="the episode over its steps">'
        f'<script id="data" type="application/json">{content}</script>'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )
    return path


def to_png(picture: np.ndarray) -> bytes:
    """Return a picture, uint8 ``[H, W, 3]``, as a small PNG of 64 colours."""
    buffer = io.BytesIO()
    Image.fromarray(picture).quantize(64).save(buffer, "png", optimize=True)
    return buffer.getvalue()


def _inline(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
