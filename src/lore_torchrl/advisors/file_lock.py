"""Locks on files, which the kernel lets go of when their process ends."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_log = logging.getLogger(__name__)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: set[IO[str]] = set()


@contextmanager
def file_lock(path: Path, *, shared: bool = False) -> Iterator[IO[str] | None]:
    """Lock a file, which is made where missing; ``None`` if another process has it.

    With ``shared`` others may have it so too, and none for itself. A child that is given the file
    (``pass_fds``) holds the lock as well, one that is forked does not. Windows and some network
    file systems have no such locks; there a file is never found locked.
    """
    with path.open("a") as file:
        taken = False
        try:
            if fcntl is not None:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            taken = True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning("%s cannot be locked (%s): see to it that one run uses it.", path, error)
        if taken:
            yield None
            return
        _held.add(file)
        try:
            yield file
        finally:
            _held.discard(file)


def _let_go() -> None:
    for file in _held:
        file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    # A worker that outlives a killed run must not keep its files.
    os.register_at_fork(after_in_child=_let_go)
