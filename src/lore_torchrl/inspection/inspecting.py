"""From a checkpoint to files that a person can look at."""

from __future__ import annotations

from pathlib import Path

from lore_torchrl.configs import InspectConfig
from lore_torchrl.inspection.page import to_png, write_page
from lore_torchrl.inspection.pictures import (
    check_video,
    draw,
    save_sheets,
    save_timeline,
    save_video,
)
from lore_torchrl.inspection.playing import Recording, play


def inspect_checkpoint(config: InspectConfig) -> tuple[Recording, Path]:
    """Play episodes and write video, sheets, time line and page into ``config.output``.

    Args:
        config: What to play and how to show it.

    Returns:
        What was played, and the path of the page.
    """
    c = config
    if c.video is not None:
        check_video(c.video)
    recording = play(
        c.checkpoint,
        episodes=c.episodes,
        calls=c.calls,
        coefficient=c.coefficient,
        seed=c.seed,
        deterministic=c.deterministic,
        max_steps=c.max_steps,
        trust=c.trust,
    )
    output = Path(c.output)
    output.mkdir(parents=True, exist_ok=True)
    pictures, timelines = [], []
    for index, episode in enumerate(recording.episodes):
        drawn = [draw(recording, index, step) for step in range(len(episode.moments))]
        # Of a long episode the pictures themselves would fill the memory.
        pictures.append([to_png(picture) for picture in drawn])
        timelines.append(save_timeline(output / f"episode{index}_timeline.png", episode))
        save_sheets(output, f"episode{index}", drawn)
        if c.video is not None:
            video = output / f"episode{index}.{c.video}"
            save_video(video, drawn, steps_per_s=c.steps_per_s)
    return recording, write_page(output / "inspect.html", recording, pictures, timelines)
