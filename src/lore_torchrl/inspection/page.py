"""One page of HTML with every step of some episodes, and the files beside it."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from lore_torchrl.configs import InspectConfig
from lore_torchrl.inspection.episodes import Recording, play
from lore_torchrl.inspection.figures import draw, require_mp4, save_timeline, save_video

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


def inspect_checkpoint(config: InspectConfig) -> tuple[Recording, Path]:
    """Play episodes and write video, timeline and page into ``config.output``.

    Returned are what was played, and the path of the page.

    Raises:
        ImportError: If an MP4 is asked for and its encoder is not installed.
        FileNotFoundError, CheckpointError, ValueError: As of :func:`play`.
    """
    c = config
    if c.video == "mp4":
        require_mp4()
    names = ("episodes", "calls", "coefficient", "seed", "deterministic", "max_steps", "trust")
    recording = play(c.checkpoint, **{name: getattr(c, name) for name in names})
    output = Path(c.output)
    output.mkdir(parents=True, exist_ok=True)
    for left in output.iterdir():
        if re.fullmatch(r"episode\d+(_timeline\.png|\.gif|\.mp4)", left.name):
            left.unlink()  # of an earlier inspection
    pictures, timelines = [], []
    for index, episode in enumerate(recording.episodes):
        drawn = [draw(recording, index, step) for step in range(len(episode.moments))]
        # The uncompressed pictures of all episodes would fill the memory.
        pictures.append([to_png(picture) for picture in drawn])
        timelines.append(save_timeline(output / f"episode{index}_timeline.png", episode))
        if c.video is not None:
            save_video(output / f"episode{index}.{c.video}", drawn, steps_per_s=c.steps_per_s)
    return recording, write_page(output / "inspect.html", recording, pictures, timelines)


def write_page(
    path: str | Path,
    recording: Recording,
    pictures: Sequence[Sequence[bytes]],
    timelines: Sequence[Path],
) -> Path:
    """Write one self-contained HTML file with a slider over the steps of each episode.

    For each episode, ``pictures`` holds one PNG for each step, as of :func:`to_png`, and
    ``timelines`` its timeline as a PNG file.
    """
    data = [
        {
            "outcome": episode.outcome,
            "timeline": _inline(Path(timeline).read_bytes()),
            "steps": [
                {"picture": _inline(picture), "text": moment.text}
                for moment, picture in zip(episode.moments, drawn, strict=True)
            ],
        }
        for episode, drawn, timeline in zip(recording.episodes, pictures, timelines, strict=True)
    ]
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
    """Return a picture, uint8 ``[H, W, 3]``, as a small PNG of 64 colors."""
    buffer = io.BytesIO()
    Image.fromarray(picture).quantize(64).save(buffer, "png", optimize=True)
    return buffer.getvalue()


def _inline(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
