"""Looking at a trained agent: what it saw, thought, was advised and did, step by step."""

from lore_torchrl.inspection.inspecting import inspect_checkpoint
from lore_torchrl.inspection.page import write_page
from lore_torchrl.inspection.pictures import draw, save_sheets, save_timeline, save_video
from lore_torchrl.inspection.playing import SOURCES, Episode, Moment, Recording, play

__all__ = [
    "SOURCES",
    "Episode",
    "Moment",
    "Recording",
    "draw",
    "inspect_checkpoint",
    "play",
    "save_sheets",
    "save_timeline",
    "save_video",
    "write_page",
]
