"""Checkpoints that can be told from damaged ones, and finding the one to go on from."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
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
    try:
        Checkpoint.manifest(path)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: its manifest is missing or cannot be read.") from error
    if not (path / _SEAL).exists():
        return
    try:
        seal = json.loads((path / _SEAL).read_text())
        version = int(seal["format_version"])
        files = [(name, int(size), digest) for name, (size, digest) in seal["files"].items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: its seal cannot be read.") from error
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} was written by a newer lore_torchrl (format {version}, this one reads up to "
            f"{FORMAT_VERSION}): pip install -U lore-torchrl."
        )
    for name, size, digest in files:
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
        if (place / "manifest.json").exists() or _step_of(place) is not None:
            _check(place)
            return place
        if place.is_dir():
            named = _named(place)
            if named:
                _check(named[-1])
                return named[-1]
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
    for path in _named(folder):
        if _step_of(path) > after:
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

    Raises:
        CheckpointError: If it is of another program.
    """
    foreign = f"{path} is no checkpoint of lore_torchrl: it holds no configuration of a run."
    try:
        saved = Checkpoint(config={}).load(path, components={"config"}).values["config"]
    except CheckpointError as error:
        raise CheckpointError(foreign) from error
    if not isinstance(saved, Mapping) or not {"env", "dreamer", "total_steps"} <= set(saved):
        raise CheckpointError(foreign)
    return restore_config(saved)


def _step_of(path: Path) -> int | None:
    """Return the step in the name of a rotation's checkpoint, ``None`` for another folder."""
    found = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(found[1]) if found and path.is_dir() else None


def _named(folder: Path) -> list[Path]:
    """Return a rotation's checkpoints by name, earliest first, also what cannot be read of them.

    A damaged one must not go unnoticed.
    """
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _step_of(path) is not None), key=_step_of)


def _check(path: Path) -> None:
    try:
        verify(path)
    except CheckpointError as error:
        step = _step_of(path)
        others = [one for one in _named(path.parent) if step is None or _step_of(one) < step]
        for other in reversed(others):
            try:
                verify(other)
            except CheckpointError:
                continue
            raise CheckpointError(f"{error} Go on from the one before: resume={other}") from error
        raise CheckpointError(f"{error} There is no whole one before it.") from error


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()
