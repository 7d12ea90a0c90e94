"""Checkpoints that can be told from damaged ones, and finding the one to go on from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from torchrl.checkpoint import Checkpoint, CheckpointError, CheckpointRotation

from lore_torchrl.configs import TrainConfig, restore_config

_SEAL = "seal.json"
#: Version of what a checkpoint of this package holds; 0 is one without a seal. Older ones are
#: read: settings that came later get their defaults (`restore_config`), and a module whose
#: buffers have changed fills in what is missing (`ShareBandit._load_from_state_dict`).
FORMAT_VERSION = 1


class SealedRotation(CheckpointRotation):
    """A rotation whose checkpoints hold the size and digest of each of their files.

    TorchRL publishes a checkpoint in one move once it is written, so that a killed process
    leaves a whole one or none. The seal is for what happens later: a full disk, a copy that
    was cut off, a file of something else.
    """

    def save(self, checkpoint: Checkpoint, **kwargs: Any) -> Path:
        """Save, rotate and seal; arguments as of TorchRL's rotation."""
        path = super().save(checkpoint, **kwargs)
        seal = {
            "format_version": FORMAT_VERSION,
            "files": {
                file.relative_to(path).as_posix(): [file.stat().st_size, _digest(file)]
                for file in sorted(path.rglob("*"))
                if file.is_file()
            },
        }
        # A kill before the move leaves a checkpoint without seal, which is whole too.
        staged = path / f".{_SEAL}"
        staged.write_text(json.dumps(seal))
        os.replace(staged, path / _SEAL)
        return path


def verify(path: Path) -> None:
    """Check that a checkpoint is whole and can be read by this version.

    One without a seal is checked by its manifest alone.

    Args:
        path: The checkpoint.

    Raises:
        CheckpointError: If a file is missing or not what was saved, or the checkpoint is of
            a newer version, or no checkpoint of TorchRL's at all.
    """
    Checkpoint.manifest(path)
    if not (path / _SEAL).exists():
        return
    try:
        seal = json.loads((path / _SEAL).read_text())
        version, files = int(seal["format_version"]), dict(seal["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: its seal cannot be read.") from error
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} was written by a newer lore_torchrl (format {version}, this one reads up to "
            f"{FORMAT_VERSION}): pip install -U lore-torchrl."
        )
    for name, (size, digest) in files.items():
        file = path / name
        if not file.exists():
            raise CheckpointError(f"{path}: {name} is missing.")
        if file.stat().st_size != size:
            raise CheckpointError(f"{path}: {name} has {file.stat().st_size} of {size} bytes.")
        if _digest(file) != digest:
            raise CheckpointError(f"{path}: {name} is not what was saved.")


def find_checkpoint(path: str) -> Path:
    """Return the checkpoint that a path names: itself, or the latest in a folder.

    Args:
        path: Run folder, its checkpoints folder, or one checkpoint.

    Raises:
        FileNotFoundError: If there is none.
        CheckpointError: If it is damaged; the message names the one before, where that is
            whole.
    """
    candidate = Path(path).expanduser().resolve()
    for place in (candidate, candidate / "checkpoints"):
        if (place / "manifest.json").exists():
            _check(place)
            return place
        if place.is_dir():
            latest = CheckpointRotation(place, keep_last=1).latest()
            if latest is not None:
                _check(latest)
                return latest
    raise FileNotFoundError(
        f"{path}: no checkpoint there. Give a run folder, its checkpoints folder, or "
        "one checkpoint in it."
    )


def run_folder(path: Path) -> Path | None:
    """Return the folder of the run that a checkpoint belongs to; ``None`` if it is in no run's.

    Args:
        path: The checkpoint.
    """
    return path.parent.parent if path.parent.name == "checkpoints" else None


def set_aside(folder: Path, *, after: int) -> list[Path]:
    """Move a run's checkpoints later than a step to ``abandoned``, next to their folder.

    A run that goes on from an earlier one would have its own new ones rotated away as the
    oldest, and the next resume would take one that is no longer the run's past. One of the
    same step that was abandoned before is replaced.

    Args:
        folder: The run's checkpoints folder.

    Keyword Args:
        after: Last step whose checkpoint stays.

    Returns:
        Where they are now, earliest first.
    """
    moved = []
    for path in CheckpointRotation(folder, keep_last=1).checkpoints():
        if int(path.name.rsplit("-", 1)[1]) > after:
            target = folder.parent / "abandoned" / path.name
            target.parent.mkdir(exist_ok=True)
            if target.exists():
                shutil.rmtree(target)
            moved.append(path.replace(target))
    return moved


def load_config(path: Path) -> TrainConfig:
    """Return the configuration of the run that wrote a checkpoint.

    Settings that came after it have their defaults: see
    :func:`~lore_torchrl.configs.restore_config`.

    Args:
        path: The checkpoint.
    """
    loaded = Checkpoint(config={}).load(path, components={"config"})
    return restore_config(loaded.values["config"])


def _check(path: Path) -> None:
    try:
        verify(path)
    except CheckpointError as error:
        others = CheckpointRotation(path.parent, keep_last=1).checkpoints()
        for other in reversed([one for one in others if one.name < path.name]):
            try:
                verify(other)
            except CheckpointError:
                continue
            raise CheckpointError(f"{error} Go on from the one before: resume={other}") from error
        raise CheckpointError(f"{error} There is no whole one before it.") from error


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()
