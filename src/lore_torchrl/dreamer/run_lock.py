"""Keeping a run's folder to one process, and what a signal does to it."""

from __future__ import annotations

import logging
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from torchrl import logger as torchrl_logger

from lore_torchrl.advisors.file_lock import file_lock
from lore_torchrl.advisors.redaction import redacted_log, remember, secrets_of
from lore_torchrl.configs import TrainConfig

#: What ends a run early.
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def sign(lock: IO[str], pid: int) -> None:
    """Write into a locked file which process on which machine has it."""
    lock.truncate(0)
    lock.write(f"{pid} on {platform.node()}")
    lock.flush()


@contextmanager
def handled_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Have a function handle SIGINT and SIGTERM meanwhile; outside the main thread none can."""
    main = threading.current_thread() is threading.main_thread()
    previous = {s: signal.signal(s, handler) for s in SIGNALS} if main else {}
    try:
        yield
    finally:
        for signum, before in previous.items():
            signal.signal(signum, before)


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Append what this package and TorchRL log meanwhile to a file."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    loggers = (torchrl_logger, logging.getLogger("lore_torchrl"))
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()


@contextmanager
def own_folder(config: TrainConfig) -> Iterator[None]:
    """Have a run's ``output_dir`` to itself, its secrets hidden, and its log in ``run.log`` there.

    Raises:
        RuntimeError: If another run that is under way has the folder.
    """
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.lock"
    remember(*secrets_of(config))
    with redacted_log(), file_lock(path) as lock:
        if lock is None:
            raise RuntimeError(
                f"{folder} belongs to a run under way (process "
                f"{path.read_text() or 'now beginning'}): wait for it, end it, or "
                "give another output_dir."
            )
        sign(lock, os.getpid())
        with _log_file(folder / "run.log"):
            yield
