"""Checkpoints as an attacker would change them: with pickles that run, and sealed again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def seal_again(path: Path) -> None:
    """Seal a checkpoint as it is now, which everybody can."""
    (path / "seal.json").unlink()
    files = {
        file.relative_to(path).as_posix(): [
            file.stat().st_size,
            hashlib.blake2b(file.read_bytes()).hexdigest(),
        ]
        for file in path.rglob("*")
        if file.is_file()
    }
    (path / "seal.json").write_text(json.dumps({"format_version": 6, "files": files}))


def forge_config(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the configuration in a checkpoint, and seal it again."""
    (file,) = path.glob("components/*-config/value.json")
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    seal_again(path)


def put_other_pickle(component: Path, marker: Path) -> None:
    shutil.rmtree(component / "state", ignore_errors=True)
    TensorDict(tensor_00000000=NonTensorData(Payload(marker))).memmap(component / "state")


def put_archive(component: Path, marker: Path) -> None:
    shutil.rmtree(component / "state", ignore_errors=True)
    TensorDict(x=NonTensorData(Payload(marker))).save(component / "state.tdz", archive=True)
    marker.rmdir()  # Saving loads what it has written.


def put_torch_file(component: Path, marker: Path) -> None:
    torch.save({"x": Payload(marker)}, component / "state.pt")


def put_link(component: Path, marker: Path) -> None:
    """Replace the state by a link to a folder elsewhere, which the seal does not see."""
    elsewhere = marker.with_name("elsewhere")
    TensorDict(x=NonTensorData(Payload(marker))).memmap(elsewhere)
    shutil.rmtree(component / "state", ignore_errors=True)
    (component / "state").symlink_to(elsewhere)


#: What is forged, and the name of the file that the refusal must tell.
FORGERIES = {
    "other.pickle": put_other_pickle,
    "state.tdz": put_archive,
    "state.pt": put_torch_file,
    "state": put_link,
}
