"""The file that answers are recorded to: one SQLite database, one row an answer."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lore_torchrl.advisors.base import Advice, AdviceRequest
from lore_torchrl.advisors.errors import (
    AdviceError,
    FatalAdviceError,
    StatusError,
    Usage,
)
from lore_torchrl.advisors.redaction import redact

_FORMAT = "lore_torchrl recording 1"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS recording (format TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order in which answers came
    cache_key TEXT NOT NULL,
    model TEXT NOT NULL,
    mission TEXT NOT NULL,
    description TEXT NOT NULL,             -- the request's text
    actions TEXT NOT NULL,                 -- JSON list
    logits TEXT,                           -- JSON list; NULL where there was no advice
    confidence REAL,
    raw TEXT NOT NULL,                     -- the answer as it came
    error_kind TEXT,                       -- NULL where nothing went wrong
    error_status INTEGER,
    error_message TEXT,
    raised INTEGER NOT NULL,               -- 1: the error failed the whole batch
    latency_s REAL NOT NULL,               -- of the batch
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    cost REAL NOT NULL,
    time REAL NOT NULL                     -- seconds since 1970
);
CREATE INDEX IF NOT EXISTS answers_by_key ON answers (cache_key);
"""
_COLUMNS = (
    *("cache_key", "model", "mission", "description", "actions", "logits", "confidence"),
    *("raw", "error_kind", "error_status", "error_message", "raised", "latency_s"),
    *("prompt_tokens", "completion_tokens", "cost", "time"),
)
_INSERT = f"INSERT INTO answers ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_LONGEST_MESSAGE = 1000


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One answer of a recording.

    Args:
        answer: Advice, an error, or ``None`` where the adviser had nothing to say.
        raised: Whether the error was raised, which fails the whole batch.
            Default: ``False``.
        actions: Names of the actions that were asked about; empty where the recording
            does not say. Default: empty.
    """

    answer: Advice | AdviceError | None
    raised: bool = False
    actions: tuple[str, ...] = ()


def error_kind(error: BaseException) -> str:
    """Return what the service counts an error as."""
    return str(getattr(error, "kind", type(error).__name__))


def error_of_kind(
    kind: str, message: str, *, status: int | None = None, usage: Usage | None = None
) -> AdviceError:
    """Return an error of the class with this ``kind``, or a plain one that bears it.

    Examples:
        >>> error_of_kind("quota", "nothing left", status=429)
        QuotaError('nothing left')
        >>> error_of_kind("ConnectionError", "the server is down").kind
        'ConnectionError'
    """
    pending: list[type[AdviceError]] = [AdviceError]
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        status_kind = cls is StatusError and kind == f"status_{status}"
        # Only our own classes: what others need to be built is not known here.
        if cls.__module__ == AdviceError.__module__ and (cls.kind == kind or status_kind):
            if issubclass(cls, StatusError):
                return cls(status or 0, message, usage=usage)
            return cls(message, usage=usage)
    error = AdviceError(message, usage=usage)
    error.kind = kind
    return error


class Recording:
    """Appends answers to a SQLite file in WAL mode; safe for threads and processes.

    Each batch is one transaction: a process that is killed loses no answer that was
    returned and leaves no half of one. The file is complete by itself after
    :meth:`close`; before, it may have a ``-wal`` file beside it that belongs to it.

    Args:
        path: The file. It and its folder are made where missing.

    Keyword Args:
        append: Whether a file that holds answers already may be added to.
            Default: ``True``.

    Raises:
        FileExistsError: If the file holds answers and ``append`` is false.
        ValueError: If the file is no recording.
    """

    def __init__(self, path: str | os.PathLike[str], *, append: bool = True):
        self.path = Path(path).expanduser().resolve()
        if self.path.is_dir():
            raise ValueError(f"A recording is a file, {str(self.path)!r} is a folder.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._connect()
        try:
            with self._database:
                self._database.executescript(_SCHEMA)
                found = self._database.execute("SELECT format FROM recording").fetchone()
                if found is None:
                    self._database.execute("INSERT INTO recording VALUES (?)", (_FORMAT,))
            count = len(self)
        except sqlite3.DatabaseError as err:
            self.close()
            raise ValueError(
                f"{str(self.path)!r} is no recording that can be written to ({err}). Give "
                "another path."
            ) from err
        if found is not None and found[0] != _FORMAT:
            self.close()
            raise ValueError(f"{str(self.path)!r} has format {found[0]!r}, not {_FORMAT!r}.")
        if count and not append:
            self.close()
            raise FileExistsError(
                f"The recording {str(self.path)!r} holds {count} answers already: two runs in "
                "one file cannot be repeated. Give another path, or resume that run."
            )

    def _connect(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        # The lock, not SQLite, keeps threads apart.
        self._database = sqlite3.connect(self.path, timeout=30.0, check_same_thread=False)
        try:
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
        except sqlite3.DatabaseError as err:
            self._database.close()
            raise ValueError(
                f"{str(self.path)!r} is no SQLite file ({err}). Give another path."
            ) from err
        # Closing merges the WAL, also at the end of a process that forgot to.
        self._closer = weakref.finalize(self, _close, self._database, self._pid)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self._connect()

    def __len__(self) -> int:
        return self._database.execute("SELECT COUNT(*) FROM answers").fetchone()[0]

    def append(
        self,
        requests: Sequence[AdviceRequest],
        answers: Sequence[RecordedAnswer],
        *,
        model: str,
        latency_s: float,
        secrets: Iterable[str] = (),
    ) -> None:
        """Write one batch.

        Args:
            requests: What was asked.
            answers: What came of each.

        Keyword Args:
            model: Who answered.
            latency_s: Seconds that the batch took.
            secrets: Values that must not be written. Default: none.

        Raises:
            FatalAdviceError: If the file cannot be written.
        """
        secrets = tuple(secrets)
        rows = [
            _row(request, answer, model=model, latency_s=latency_s, secrets=secrets)
            for request, answer in zip(requests, answers, strict=True)
        ]
        if self._pid != os.getpid():
            # SQLite's connections do not survive a fork.
            self._connect()
        try:
            with self._lock, self._database:
                self._database.executemany(_INSERT, rows)
        except sqlite3.Error as err:
            raise FatalAdviceError(
                f"The recording {str(self.path)!r} cannot be written: {err}. Make room or give "
                "another path; without record= the run needs none."
            ) from err

    def close(self) -> None:
        """Merge the WAL into the file and let go of it."""
        self._closer()


def _close(database: sqlite3.Connection, pid: int) -> None:
    if pid == os.getpid():
        database.close()


def _row(
    request: AdviceRequest,
    recorded: RecordedAnswer,
    *,
    model: str,
    latency_s: float,
    secrets: tuple[str, ...],
) -> tuple[Any, ...]:
    def clean(text: str) -> str:
        # Half an emoji, as JSON may hold it, is no text to SQLite.
        return redact(text, secrets).encode("utf-8", "replace").decode()

    answer = recorded.answer
    logits = confidence = kind = status = message = None
    usage, raw = Usage(), ""
    if isinstance(answer, Advice):
        # NumPy's numbers are no JSON; as Python's floats they lose no bit.
        logits = json.dumps([float(value) for value in answer.logits])
        confidence, usage, raw = float(answer.confidence), answer.usage, clean(answer.raw)
    elif answer is not None:
        kind, usage = answer.kind, answer.usage
        status = getattr(answer, "status", None)
        message = clean(str(answer))[:_LONGEST_MESSAGE]
    # The cache key stays as it is: the answer is found by it.
    return (
        *(request.cache_key, clean(model), clean(request.mission), clean(request.description)),
        *(json.dumps(request.actions), logits, confidence, raw, kind, status, message),
        *(int(recorded.raised), latency_s, usage.prompt_tokens, usage.completion_tokens),
        *(usage.cost, time.time()),
    )


def read_recording(path: Path) -> dict[str, list[RecordedAnswer]]:
    """Return the answers of a SQLite recording by cache key, in their order.

    Args:
        path: A file that :class:`Recording` wrote. It is opened for reading only.

    Raises:
        ValueError: If the file is no recording.
    """
    answers: dict[str, list[RecordedAnswer]] = {}
    try:
        database = _open_to_read(path)
        try:
            (found,) = database.execute("SELECT format FROM recording").fetchone() or (None,)
            if found != _FORMAT:
                raise ValueError(f"{str(path)!r} has format {found!r}, not {_FORMAT!r}.")
            rows = database.execute(
                "SELECT cache_key, actions, logits, confidence, raw, error_kind, error_status, "
                "error_message, raised, prompt_tokens, completion_tokens, cost "
                "FROM answers ORDER BY id"
            ).fetchall()
        finally:
            database.close()
    except sqlite3.DatabaseError as err:
        raise ValueError(f"{str(path)!r} is no recording of answers ({err}).") from err
    for key, actions, logits, confidence, raw, kind, status, message, raised, *usage in rows:
        answer: Advice | AdviceError | None = None
        if logits is not None:
            answer = Advice(tuple(json.loads(logits)), confidence, Usage(*usage), raw)
        elif kind is not None:
            answer = error_of_kind(kind, message, status=status, usage=Usage(*usage))
        recorded = RecordedAnswer(answer, bool(raised), tuple(json.loads(actions)))
        answers.setdefault(key, []).append(recorded)
    return answers


def _open_to_read(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=30.0)
    try:
        database.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    except sqlite3.OperationalError:
        # A database in WAL mode wants to make files beside it, which a folder that is
        # read-only forbids. Without a WAL, the file alone is all there is to read.
        database.close()
        if Path(f"{path}-wal").exists():
            raise
        database = sqlite3.connect(f"{path.resolve().as_uri()}?immutable=1", uri=True)
    return database
