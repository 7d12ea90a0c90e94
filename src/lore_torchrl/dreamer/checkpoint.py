"""Checkpoints of tensors and JSON alone, sealed, and finding the one to go on from."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from torchrl.checkpoint import (
    Checkpoint,
    CheckpointError,
    JSONCheckpointAdapter,
    StateDictCheckpointAdapter,
)

from lore_torchrl.configs import TrainConfig, restore_config

_SEAL, _MANIFEST = "seal.json", "manifest.json"
#: Version of what a checkpoint of this package holds; no other is read.
FORMAT_VERSION = 6
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class RunCheckpoint(Checkpoint):
    """A checkpoint of tensors and JSON alone, with the size and digest of each of its files.

    Every component has ``state_dict`` and ``load_state_dict``, or is a dictionary of JSON.
    A file is a function of what is saved: it holds no time and no identifier.

    The seal tells of a full disk, a copy that was cut off, a file of something else. It is no
    signature: who can write a checkpoint can seal it, and :func:`verify` and the loading hold
    without it.
    """

    def __init__(self, **components: Any) -> None:
        super().__init__(**components)
        # Not as TorchRL chooses: its replay buffers save pickles.
        self.register_adapter(object, _TensorAdapter())
        self.register_adapter(dict, _JSONAdapter())

    @staticmethod
    def _publish_path(source: Path, destination: Path) -> None:
        _seal(source)
        Checkpoint._publish_path(source, destination)


class _TensorAdapter(StateDictCheckpointAdapter):
    """Saves a ``state_dict`` as tensors and JSON, and loads nothing else."""

    def load(self, component: Any, path: Path, **options: Any) -> Any:
        directory = path / self.state_directory
        try:
            if not directory.is_dir():
                raise FileNotFoundError(f"{directory} is missing.")
            # TorchRL's adapter loads with pickles allowed: this load refuses them before it.
            TensorDict.load_memmap(directory, allow_pickle=False)
            return super().load(component, path, **options)
        except Exception as error:
            raise CheckpointError(f"{path} cannot be restored: {error}") from error


class _JSONAdapter(JSONCheckpointAdapter):
    """Returns what was saved, and leaves alone what the next checkpoint will hold."""

    def load(self, component: Any, path: Path, **options: Any) -> Any:
        return super().load(None, path, **options)


def _seal(path: Path) -> None:
    manifest = json.loads((path / _MANIFEST).read_text())
    del manifest["checkpoint_id"], manifest["created_at"]
    (path / _MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True))
    files = {
        file.relative_to(path).as_posix(): [file.stat().st_size, _digest(file)]
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
    (path / _SEAL).write_text(json.dumps({"format_version": FORMAT_VERSION, "files": files}))


def verify(path: Path) -> None:
    """Check that a checkpoint is whole, holds tensors and JSON alone, and can be read.

    Raises:
        CheckpointError: If a file is missing, not what was saved, or neither tensors nor
            JSON, or the checkpoint is of another version, or no checkpoint of this package's.
    """
    try:
        seal = json.loads((path / _SEAL).read_bytes())
        version = seal["format_version"]
        sealed = {str(name): (size, digest) for name, (size, digest) in seal["files"].items()}
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path / _SEAL} is missing: it is no checkpoint of lore_torchrl, or not all of it."
        ) from error
    except _UNREADABLE as error:
        raise CheckpointError(f"{path / _SEAL} cannot be read: {error}.") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} was written by another version of lore_torchrl (format {version}, this one "
            f"reads {FORMAT_VERSION}): install the version that wrote it, or begin a new run."
        )
    found = {}
    for file in sorted(path.rglob("*")):
        if file.is_dir() and not file.is_symlink():
            continue
        if file.is_symlink() or not file.is_file() or file.suffix not in (".json", ".memmap"):
            raise CheckpointError(
                f"{file} is neither tensors (.memmap) nor JSON. Checkpoints hold nothing else, "
                "since other files can run code: do not use this one, whoever it is from."
            )
        found[file.relative_to(path).as_posix()] = file.stat().st_size
    del found[_SEAL]
    for name in sorted(sealed.keys() | found.keys()):
        file = path / name
        if name not in found:
            raise CheckpointError(f"{file} is missing.")
        if name not in sealed:
            raise CheckpointError(f"{file} is not in the checkpoint's {_SEAL}.")
        size, digest = sealed[name]
        if found[name] != size:
            raise CheckpointError(f"{file} has {found[name]} of {size} bytes.")
        if _digest(file) != digest:
            raise CheckpointError(f"{file} is not what was saved.")
    try:
        Checkpoint.manifest(path)
    except (CheckpointError, *_UNREADABLE) as error:
        raise CheckpointError(f"{path / _MANIFEST} cannot be read: {error}") from error


def steps_of(path: Path) -> int:
    """Return the environment steps that a checkpoint was saved after.

    Raises:
        CheckpointError: If its manifest does not tell.
    """
    metadata = Checkpoint.manifest(path).get("metadata")
    steps = metadata.get("collected_frames") if isinstance(metadata, Mapping) else None
    if not isinstance(steps, int):
        raise CheckpointError(
            f"{path / _MANIFEST} does not tell collected_frames: it is no checkpoint of a run. "
            "Give another."
        )
    return steps


def remove_leftovers(folder: Path) -> None:
    """Remove what killed saves and deletions have left in a run's checkpoints folder.

    No other process may be writing there.
    """
    for path in folder.glob(".checkpoint-*"):
        replaced = folder / path.name[1:].split(".")[0]
        if ".backup-" in path.name and not replaced.exists():
            # The kill came between the two moves that replace a checkpoint.
            path.replace(replaced)
        else:
            shutil.rmtree(path)


def find_checkpoint(path: str) -> Path:
    """Return the checkpoint that a path names: itself, or the latest in a folder or run.

    Raises:
        FileNotFoundError: If there is none.
        CheckpointError: If it is damaged; the message names the one before, where that is
            whole.
    """
    candidate = Path(path).expanduser().resolve()
    for place in (candidate, candidate / "checkpoints"):
        if (place / _MANIFEST).exists() or _step_of(place) is not None:
            _check(place)
            return place
        if named := _named(place):
            _check(named[-1])
            return named[-1]
    raise FileNotFoundError(
        f"{path}: no checkpoint there. Give a run folder, its checkpoints folder, or "
        "one checkpoint in it."
    )


def set_aside(folder: Path, *, after: int) -> list[Path]:
    """Move a run's checkpoints later than a step to ``abandoned``, next to their folder.

    A run that goes on from an earlier one would have its own new ones rotated away as the
    oldest. One of the same step that was abandoned before is replaced.
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


def load_config(
    path: Path, *, trust: Collection[str] | None = (), asks: bool = False
) -> TrainConfig:
    """Return the configuration of the run that wrote a checkpoint; what came after it is default.

    Besides the environments and advisors of this package it may name what is in ``trust``: import
    paths, and where its advisor ``asks``, servers, variables of keys, local models and tokenizers;
    with ``None``, where it is only compared with, anything.

    Raises:
        CheckpointError: If it is of another program, or names what it may not.
    """
    foreign = f"{path} is no checkpoint of lore_torchrl: it holds no configuration of a run."
    try:
        saved = RunCheckpoint(config={}).load(path, components={"config"}).values["config"]
        if not {"env", "dreamer", "total_steps"} <= set(saved):
            raise CheckpointError(foreign)
    except (CheckpointError, *_UNREADABLE) as error:
        raise CheckpointError(f"{foreign} {error}") from error
    try:
        config = restore_config(saved)
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{path}: this version cannot use the configuration of its run: {error}"
        ) from error
    for name, value in () if trust is None else _leaves(asdict(config)):
        if isinstance(value, str) and "${" in value:
            raise CheckpointError(f"{path}: {name}={value!r} would be resolved: it is refused.")
        imported = name == "env.adapter" or "_target_" in name.split(".")
        # Gymnasium imports what stands before a colon.
        imported |= name == "env.id" and ":" in str(value)
        if imported and str(value) not in trust and not _is_ours(str(value)):
            raise CheckpointError(
                f"{path}: {name}={value!r} is no environment or advisor of lore_torchrl. To import "
                "it runs its code: only if you trust it, name it yourself, "
                f"trust=[{value}]."
            )
        # The other words that Hydra knows hide what is called, and with what.
        hidden = {"_args_", "_partial_", "_recursive_"} & set(name.split("."))
        if hidden:
            raise CheckpointError(
                f"{path}: {name}={value!r} is refused: {min(hidden)} hides a call."
            )
        foreign = asks and name.startswith("advisor.") and _leads_elsewhere(name, value, config)
        if foreign and str(value) not in trust:
            raise CheckpointError(
                f"{path}: with calls, the advisor would use {name}={value!r}: what it asks, "
                "sends or loads would be the checkpoint's choice. Only if you trust it, name it "
                f"yourself, trust=[{value}]."
            )
    return config


def _leads_elsewhere(name: str, value: Any, config: TrainConfig) -> bool:
    """Whether a setting of an advisor names a server, a key or a model that is not the user's."""
    *_, setting = name.split(".")
    if setting == "base_url":
        own = (None, os.environ.get("OPENAI_BASE_URL"))
        local = re.match(r"https?://(127\.0\.0\.1|localhost)(:\d+)?(/|$)", str(value))
        return value not in own and not local
    if setting == "api_key_env":
        return value != "OPENAI_API_KEY"
    # A prompt of one's own is a file, whose text is sent; a recording is a file that is read.
    file = setting == "path" or (setting == "prompt" and value != "default")
    fetched = setting == "model" or (setting == "tokenizer" and value is not None)
    return file or (fetched and "LocalAdvisor" in str(config.advisor))


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting that holds no others, by its dotted name."""
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, part in value.items():
        yield from _leaves(part, f"{name}.{key}" if name else str(key))


def _is_ours(path: str) -> bool:
    """Whether a module of this package defines the class that an import path names.

    A prefix is not enough: Hydra finds ``os.system`` through any module that imports ``os``.
    """
    if not re.fullmatch(r"lore_torchrl\.(advisors|envs)\.\w+\.\w+", path):
        return False
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name, None)
    except ImportError as error:
        # The module lacks an extra, so that nothing of it can run; or there is no such module.
        return not str(error.name).startswith("lore_torchrl")
    # A recorder would write where the checkpoint says.
    return isinstance(found, type) and found.__module__ == module and name != "RecordingAdvisor"


def _step_of(path: Path) -> int | None:
    """Return the step in the name of a rotation's checkpoint, ``None`` for another folder."""
    found = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(found[1]) if found and path.is_dir() else None


def _named(folder: Path) -> list[Path]:
    """Return a rotation's checkpoints by name, earliest first, damaged ones too."""
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
            raise CheckpointError(f"{error} The one before it is whole: {other}") from error
        raise CheckpointError(f"{error} There is no whole one before it.") from error


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()
