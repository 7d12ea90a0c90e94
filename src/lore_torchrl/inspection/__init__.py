"""Episodes of a trained agent, step by step: what it saw, was advised and did."""

from lore_torchrl.inspection.episodes import SOURCES, Episode, Moment, Recording, play
from lore_torchrl.inspection.figures import draw, save_timeline, save_video
from lore_torchrl.inspection.page import inspect_checkpoint, to_png, write_page

__all__ = [
    "SOURCES",
    "Episode",
    "Moment",
    "Recording",
    "draw",
    "inspect_checkpoint",
    "play",
    "save_timeline",
    "save_video",
    "to_png",
    "write_page",
]
