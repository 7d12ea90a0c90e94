"""Figures of an episode: its steps as pictures and video, and its timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lore_torchrl.inspection.episodes import SOURCES, Episode, Recording

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image
except ImportError as err:
    raise ImportError(
        "The inspector draws with matplotlib: pip install 'lore-torchrl[train]'."
    ) from err

_BARS = {"policy π_wm": "#4c72b0", "advice ρ": "#dd8452", "mix π_mix": "#55a868"}
_SOURCE_COLORS = dict(
    zip(SOURCES, ("#cccccc", "#c44e52", "#dd8452", "#ccb974", "#8172b3"), strict=True)
)


def draw(recording: Recording, episode: int, step: int) -> np.ndarray:
    """Draw a step of an episode: the frame, the three policies as bars, and the numbers.

    Returned is uint8 ``[360, 720, 3]``.
    """
    moments = recording.episodes[episode].moments
    moment = moments[step]
    figure = Figure(figsize=(7.2, 3.6), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    frame, bars = figure.subplots(1, 2, width_ratios=(1, 1.3))
    frame.imshow(moment.frame)
    frame.set_axis_off()
    frame.set_title(f"episode {episode}, step {step + 1} of {len(moments)}", fontsize=9)
    exact = ", ".join(f"{value:.2f}" for value in moment.exact)
    numbers = [
        f"advice: {moment.source}" + (f" ({moment.confidence:.2f})" if moment.prior else ""),
        f"β {moment.beta:.2f} × {moment.coefficient:.2g}   KL {moment.kl:.3f}   "
        f"V {moment.value:.2f}",
        "   ".join(f"{name} {part:.2f}" for name, part in moment.uncertainty.items())
        + (f"   action {exact}" if exact else ""),
    ]
    frame.text(0.0, -0.04, "\n".join(numbers), transform=frame.transAxes, va="top", fontsize=8)
    places = np.arange(len(recording.actions))[::-1]
    for row, (label, color) in enumerate(_BARS.items()):
        probs = (moment.policy, moment.prior, moment.mix)[row]
        if probs is not None:
            bars.barh(places + 0.27 * (1 - row), probs, 0.25, color=color, label=label)
    names = [
        f"▸ {name}" if index == moment.action else name
        for index, name in enumerate(recording.actions)
    ]
    bars.set_yticks(places, names, fontsize=8)
    bars.set_xlim(0, 1)
    bars.tick_params(axis="x", labelsize=7)
    bars.grid(axis="x", alpha=0.3)
    bars.legend(fontsize=7, loc="lower right")
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def save_video(path: Path, pictures: Sequence[np.ndarray], *, steps_per_s: float) -> None:
    """Write pictures, uint8 ``[H, W, 3]`` of one size, as an animated GIF or an MP4, by the suffix.

    Raises:
        ImportError: If an MP4 is asked for without ``imageio-ffmpeg``.
    """
    if path.suffix == ".gif":
        frames = [Image.fromarray(picture).quantize(64) for picture in pictures]
        duration = round(1000 / steps_per_s)
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=duration, loop=0)
    else:
        height, width = pictures[0].shape[:2]
        writer = require_mp4()(str(path), (width, height), fps=steps_per_s, macro_block_size=2)
        writer.send(None)
        for picture in pictures:
            writer.send(np.ascontiguousarray(picture))
        writer.close()


def require_mp4() -> Callable:
    """Return ``imageio_ffmpeg.write_frames``, or raise ``ImportError`` if it is not installed."""
    try:
        from imageio_ffmpeg import write_frames
    except ImportError as err:
        raise ImportError(
            "MP4 needs an encoder: pip install 'lore-torchrl[video]', or use a GIF."
        ) from err
    return write_frames


def save_timeline(path: str | Path, episode: Episode) -> Path:
    """Draw an episode over its steps: weight and source of advice, uncertainty, KL, value."""
    moments = episode.moments
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    weight, uncertainty, rest = figure.subplots(3, 1, sharex=True)
    steps = np.arange(1, len(moments) + 1)
    weight.plot(steps, [m.beta for m in moments], label="β")
    allowed = [m.beta * m.coefficient for m in moments]
    weight.plot(steps, allowed, label="β × coefficient", linestyle="--")
    for source, color in _SOURCE_COLORS.items():
        at = [step for step, m in zip(steps, moments, strict=True) if m.source == source]
        if at:
            weight.scatter(at, np.zeros(len(at)), color=color, s=14, label=source, clip_on=False)
    for part in moments[0].uncertainty:
        uncertainty.plot(steps, [m.uncertainty[part] for m in moments], label=part)
    rest.plot(steps, [m.kl for m in moments], label="KL, nats")
    rest.plot(steps, [m.value for m in moments], label="value")
    titles = ("weight and source of the advice", "uncertainty by part", "KL and value")
    for axes, title in zip((weight, uncertainty, rest), titles, strict=True):
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, ncols=4)
    rest.set_xlabel("step")
    figure.savefig(path, dpi=100)
    return Path(path)
