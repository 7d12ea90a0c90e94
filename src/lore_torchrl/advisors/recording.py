"""The file that answers are recorded to: one SQLite database, one row an answer."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows, where two runs may get into one file
    fcntl = None

from lore_torchrl.advisors.base import Advice, AdviceRequest
from lore_torchrl.advisors.errors import (
    AdviceError,
    FatalAdviceError,
    StatusError,
    Usage,
    safe_kind,
)
from lore_torchrl.advisors.foreign_sqlite import decoded, foreign_part
from lore_torchrl.advisors.redaction import redact

# Marks the file as ours, so that no other program's database is written into.
_APPLICATION_ID = 0x4C6F5272
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
    raw TEXT NOT NULL,                     -- the answer as it came, cut at 65,536 characters
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
# All of it or nothing, and once, whoever else begins.
_BEGIN = f"""
BEGIN IMMEDIATE;
{_SCHEMA}
INSERT INTO recording SELECT '{_FORMAT}' WHERE NOT EXISTS (SELECT 1 FROM recording);
PRAGMA application_id = {_APPLICATION_ID};
COMMIT;
"""
_COLUMNS = (
    *("cache_key", "model", "mission", "description", "actions", "logits", "confidence"),
    *("raw", "error_kind", "error_status", "error_message", "raised", "latency_s"),
    *("prompt_tokens", "completion_tokens", "cost", "time"),
)
_INSERT = f"INSERT INTO answers ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_LONGEST_MESSAGE = 1000
# Characters of an answer's raw text, for a person to read.
_LONGEST_RAW = 65_536
# Servers report strange numbers; SQLite's integers have 64 bits.
_MOST_TOKENS = 2**53


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One answer of a recording.

    Args:
        answer: Advice, an error, or ``None`` where the advisor had nothing to say.
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
    return safe_kind(getattr(error, "kind", type(error).__name__))


def error_of_kind(
    kind: str, message: str, *, status: int | None = None, usage: Usage | None = None
) -> AdviceError:
    """Return an error of the class with this ``kind``, or a plain one that bears it.

    A ``kind`` that cannot name a metric becomes ``"other"``.

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
    error.kind = safe_kind(kind)
    return error


class Recording:
    """Appends answers to a SQLite file in WAL mode; safe for threads and processes.

    Each batch is one transaction: a process that is killed loses no answer that was
    returned and leaves no half of one. The file is complete by itself after
    :meth:`close`; before, it may have a ``-wal`` file beside it that belongs to it. A
    ``-lock`` file beside it keeps other runs out, for as long as this one lives.

    Args:
        path: The file. It and its folder are made where missing.

    Keyword Args:
        append: Whether a file that holds answers already may be added to, as others may do
            at the same time; if not, this one alone writes. Default: ``True``.

    Raises:
        FileExistsError: If the file holds answers and ``append`` is false, or another
            recorder has it for itself.
        ValueError: If the file is no recording. It is left as it is.
    """

    def __init__(self, path: str | os.PathLike[str], *, append: bool = True):
        self.path = Path(path).expanduser().resolve()
        if self.path.is_dir():
            raise ValueError(f"A recording is a file, {str(self.path)!r} is a folder.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = _is_new(self.path)
        self._claim = _claim(self.path, shared=append)
        try:
            self._connect()
            if new:
                self._database.executescript(_BEGIN)
            count = len(self)
        except sqlite3.Error as err:
            self.close()
            raise _unusable(self.path, err) from err
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
        try:
            self._database = sqlite3.connect(self.path, timeout=5.0, check_same_thread=False)
        except sqlite3.Error as err:
            raise _unusable(self.path, err) from err
        # Closing merges the WAL, also at the end of a process that forgot to.
        self._closer = weakref.finalize(self, _close, self._database, self._claim, self._pid)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        # The original's claim counts for its copies.
        self._claim = None
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
            self._claim = None
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


def _close(database: sqlite3.Connection, claim: IO[str] | None, pid: int) -> None:
    if pid == os.getpid():
        database.close()
        if claim is not None:
            # By name: a forked process still has the file open.
            fcntl.flock(claim, fcntl.LOCK_UN)
            claim.close()


def _claim(path: Path, *, shared: bool) -> IO[str] | None:
    """Keep other recorders out of a file, or with ``shared`` those that want it alone."""
    if fcntl is None:
        return None
    claim = Path(f"{path}-lock").open("a")  # noqa: SIM115 - as long as the recorder lives
    try:
        fcntl.flock(claim, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as err:
        claim.close()
        raise FileExistsError(
            f"Another run is recording to {str(path)!r}: two runs in one file cannot be "
            "repeated. Give another path, or wait until that run has ended."
        ) from err
    except OSError:
        # A network file system that keeps no locks.
        claim.close()
        return None
    return claim


def _is_new(path: Path) -> bool:
    """Return whether there is nothing in a file yet, without a change to it.

    Raises:
        ValueError: If what is there is no recording.
    """
    if not path.exists() or path.stat().st_size == 0:
        return True
    try:
        database = _open_to_read(path)
        try:
            return not _holds_recording(database, path)
        finally:
            database.close()
    except sqlite3.Error as err:
        raise _unusable(path, err) from err


def _unusable(path: Path, error: sqlite3.Error) -> ValueError:
    return ValueError(
        f"{str(path)!r} is no recording that can be written to ({error}). Give another path."
    )


def _holds_recording(database: sqlite3.Connection, path: Path) -> bool:
    """Return whether a database is a recording; ``False`` if there is nothing in it."""
    (owner,) = database.execute("PRAGMA application_id").fetchone()
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    if owner not in (0, _APPLICATION_ID) or (tables and not {"recording", "answers"} & tables):
        raise ValueError(
            f"{str(path)!r} is another program's database, not a recording. Give another path."
        )
    if not tables:
        return False
    database.execute("PRAGMA trusted_schema = OFF")
    if (part := foreign_part(database, ("recording", "answers"), ("answers_by_key",))) is not None:
        raise ValueError(f"{str(path)!r} holds {part}, which no recording does. Give another path.")
    (found,) = database.execute("SELECT format FROM recording").fetchone() or (None,)
    if found != _FORMAT:
        raise ValueError(f"{str(path)!r} has format {found!r}, not {_FORMAT!r}.")
    return True


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
        confidence, usage = float(answer.confidence), answer.usage
        raw = clean(answer.raw)[:_LONGEST_RAW]
    elif answer is not None:
        kind, usage = safe_kind(answer.kind), answer.usage
        status = _status(answer)
        message = clean(str(answer))[:_LONGEST_MESSAGE]
    # The cache key stays as it is: the answer is found by it.
    return (
        *(request.cache_key, clean(model), clean(request.mission), clean(request.description)),
        *(json.dumps(request.actions), logits, confidence, raw, kind, status, message),
        *(int(recorded.raised), latency_s, _tokens(usage.prompt_tokens)),
        *(_tokens(usage.completion_tokens), _cost(usage), time.time()),
    )


def _status(error: AdviceError) -> int | None:
    status = getattr(error, "status", None)
    return status if isinstance(status, int) and 0 <= status < 1000 else None


def _tokens(count: float) -> int:
    return int(max(-_MOST_TOKENS, min(_MOST_TOKENS, count)))


def _cost(usage: Usage) -> float:
    return usage.cost if math.isfinite(usage.cost) else 0.0


def read_recording(path: Path) -> dict[str, list[RecordedAnswer]]:
    """Return the answers of a SQLite recording by cache key, in their order.

    Args:
        path: A file that :class:`Recording` wrote. It is opened for reading only.

    Raises:
        ValueError: If the file is no recording, or one of its answers cannot be read.
    """
    answers: dict[str, list[RecordedAnswer]] = {}
    try:
        database = _open_to_read(path)
        # Text that is no UTF-8 is told with its row.
        database.text_factory = decoded
        try:
            if not _holds_recording(database, path):
                raise ValueError(f"{str(path)!r} is an empty database: record to it first.")
            for row, *values in database.execute(_SELECT, (_LONGEST_RAW,)):
                try:
                    key, recorded = _read_row(*values)
                except (ValueError, TypeError, OverflowError, RecursionError) as err:
                    raise ValueError(
                        f"{str(path)!r}: row {row} of answers cannot be read "
                        f"({type(err).__name__}: {str(err)[:200]}). Delete it to do without this "
                        "answer, or record anew."
                    ) from err
                answers.setdefault(key, []).append(recorded)
        finally:
            database.close()
    except sqlite3.Error as err:
        raise ValueError(
            f"{str(path)!r} cannot be read as a recording of answers ({err}). Give another "
            "path, or record anew."
        ) from err
    return answers


_SELECT = """
    SELECT id, cache_key, actions, logits, confidence, substr(raw, 1, ?), error_kind,
        error_status, error_message, raised, prompt_tokens, completion_tokens, cost
    FROM answers ORDER BY id
"""


def _read_row(
    key: Any,
    actions: Any,
    logits: Any,
    confidence: Any,
    raw: Any,
    kind: Any,
    status: Any,
    message: Any,
    raised: Any,
    *usage: Any,
) -> tuple[str, RecordedAnswer]:
    names = ("prompt_tokens", "completion_tokens", "cost")
    for name, value in zip(names, usage, strict=True):
        _check(value, (int, float) if name == "cost" else int, name)
    names = tuple(_check(name, str, "an action") for name in _listed(actions, "actions"))
    answer: Advice | AdviceError | None = None
    if logits is not None:
        values = tuple(_check(v, (int, float), "a logit") + 0.0 for v in _listed(logits, "logits"))
        _check(confidence, (int, float), "confidence")
        answer = Advice(values, confidence, Usage(*usage), _check(raw, str, "raw"))
    elif kind is not None:
        if status is not None:
            _check(status, int, "error_status")
        message = _check("" if message is None else message, str, "error_message")
        kind = _check(kind, str, "error_kind")
        answer = error_of_kind(kind, message, status=status, usage=Usage(*usage))
    if _check(raised, int, "raised") and not isinstance(answer, AdviceError):
        raise ValueError("raised, but there is no error")
    return _check(key, str, "cache_key"), RecordedAnswer(answer, bool(raised), names)


def _listed(text: Any, name: str) -> list[Any]:
    return _check(json.loads(_check(text, str, name)), list, name)


def _check(value: Any, kind: type | tuple[type, ...], name: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} is {type(value).__name__}")
    return value


def _open_to_read(path: Path) -> sqlite3.Connection:
    # What nobody writes to is taken as it lies: SQLite would make files beside it, which it
    # could not in a folder that is read-only.
    written = any(Path(f"{path}{end}").exists() for end in ("-wal", "-journal"))
    mode = "mode=ro" if written else "immutable=1"
    return sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, timeout=5.0)
