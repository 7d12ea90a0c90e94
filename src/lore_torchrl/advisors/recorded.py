"""Recording what an advisor answers, and answering from the recording alone.

A recording is one SQLite file, written by :class:`RecordingAdvisor`, with one row an answer;
:class:`RecordedAdvisor` reads these, and JSON Lines that anything may have written.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lore_torchrl.advisors.base import (
    Advice,
    AdviceRequest,
    Advisor,
    Wrapper,
    read_extras,
)
from lore_torchrl.advisors.errors import (
    AdviceError,
    DeadlineError,
    FatalAdviceError,
    NotRecordedError,
    Usage,
    error_of_kind,
    safe_kind,
)
from lore_torchrl.advisors.file_lock import file_lock
from lore_torchrl.advisors.redaction import redact, remember, secrets_of

_SQLITE_MAGIC = b"SQLite format 3\0"
# Marks the file as ours, so that no other program's database is written into.
_APPLICATION_ID = 0x4C6F5272
# In one transaction, since other processes may begin at the same time.
_BEGIN = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS answers (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order in which answers came
    cache_key TEXT NOT NULL,
    model TEXT NOT NULL,
    mission TEXT NOT NULL,
    description TEXT NOT NULL,             -- the request's text
    actions TEXT NOT NULL,                 -- JSON list
    logits TEXT,                           -- JSON list, or object with more; NULL: no advice
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
PRAGMA application_id = {_APPLICATION_ID};
COMMIT;
"""
# What is read of a row, by its types.
_READ = {
    str: ("cache_key", "actions", "raw"),
    str | None: ("logits", "error_kind", "error_message"),
    int | None: ("error_status",),
    int | float | None: ("confidence",),
    int: ("raised", "prompt_tokens", "completion_tokens"),
    int | float: ("cost",),
}
# Characters that are kept of an answer's raw text.
_LONGEST_RAW = 65_536


@dataclass(frozen=True, slots=True)
class Entry:
    """One answer of a recording; an error that was ``raised`` failed the whole batch."""

    answer: Advice | AdviceError | None
    raised: bool = False
    actions: tuple[str, ...] = ()


class RecordingAdvisor(Wrapper):
    """Ask another advisor, and record every answer and every error to one SQLite file.

    What the wrapped advisor returns or raises passes through unchanged. Keys and passwords
    are redacted in every text. Several calls may be under way at once, in one process or in
    many. Each batch is one transaction: a process that is killed loses no answer that was
    returned. A ``-lock`` file beside it keeps other runs out until :meth:`close`.

    Args:
        advisor: Whom to ask.
        path: The file. It and its folder are made where missing.
        append: Whether a file that holds answers already may be added to, as others may do
            at the same time; if not, this recorder alone writes. Default: ``True``.

    Raises:
        TypeError: If ``advisor`` has no ``advise``.
        FileExistsError: If the file holds answers and ``append`` is false, or another
            recorder has it for itself.
        IsADirectoryError: If the path is a folder.
        ValueError: If the file is no recording, or the one that ``advisor`` answers from or
            records to. It is left as it is.
    """

    def __init__(
        self, advisor: Advisor, path: str | os.PathLike[str], *, append: bool = True
    ) -> None:
        if not callable(getattr(advisor, "advise", None)):
            raise TypeError(
                f"RecordingAdvisor needs an advisor with an async `advise`, got {advisor!r}."
            )
        self.advisor = advisor
        self.path = Path(path).expanduser().resolve()
        kinds = (RecordedAdvisor, RecordingAdvisor)
        own = (one.path.resolve() for one in _wrapped(advisor) if isinstance(one, kinds))
        if self.path in own:
            raise ValueError(
                f"The advisor's own answers are in {str(path)!r}, which can therefore not be "
                "recorded to: give record= another path."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > 0:
            _check_recording(self.path)
        self._claim = ExitStack()
        lock = file_lock(Path(f"{self.path}-lock"), shared=append)
        if self._claim.enter_context(lock) is None:
            raise FileExistsError(
                f"Another run is recording to {str(self.path)!r}: two runs in one file cannot be "
                "repeated. Give another path, or wait until that run has ended."
            )
        try:
            with closing(sqlite3.connect(self.path)) as database:
                database.executescript(_BEGIN)
                (count,) = database.execute("SELECT COUNT(*) FROM answers").fetchone()
        except sqlite3.Error as err:
            self._claim.close()
            raise ValueError(
                f"{str(self.path)!r} is no recording that can be written to ({err}). Give "
                "another path."
            ) from err
        if count and not append:
            self._claim.close()
            raise FileExistsError(
                f"The recording {str(self.path)!r} holds {count} answers already: two runs in "
                "one file cannot be repeated. Give another path, or resume that run."
            )
        remember(*secrets_of(advisor))

    def __getstate__(self) -> dict[str, Any]:
        return {"advisor": self.advisor, "path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The original's claim counts for its copies.
        self.__dict__.update(state, _claim=ExitStack())

    async def advise(self, requests: Sequence[AdviceRequest]) -> list[Advice | AdviceError | None]:
        """Return the wrapped advisor's answers, each of them recorded.

        Raises:
            FatalAdviceError: If the file can no longer be written: what was asked for, a run that
                can be repeated, cannot be had. The run resumes from its checkpoint.
        """
        start = time.perf_counter()
        try:
            answers = await self.advisor.advise(requests)
        except FatalAdviceError:
            raise
        except asyncio.CancelledError:
            self._record_failure(requests, DeadlineError("cancelled before it answered"), start)
            raise
        except Exception as error:
            self._record_failure(requests, error, start)
            raise
        # The service refuses what is no answer, in the repeated run too.
        if not isinstance(answers, (list, tuple)) or len(answers) != len(requests):
            error = error_of_kind("wrong_answer_count", "not one answer a question")
            self._record_failure(requests, error, start)
            return answers
        wrong = error_of_kind("wrong_type", "something else where Advice was expected")
        fits = (Advice, AdviceError, type(None))
        entries = [Entry(one if isinstance(one, fits) else wrong) for one in answers]
        self._record(requests, entries, start)
        return answers

    def _record_failure(
        self, requests: Sequence[AdviceRequest], error: Exception, start: float
    ) -> None:
        kind, status, usage = getattr(error, "kind", type(error).__name__), None, None
        if isinstance(error, AdviceError):
            status, usage = getattr(error, "status", None), error.usage
        entries = []
        for _ in requests:
            failure = error_of_kind(safe_kind(kind), str(error), status=status, usage=usage)
            entries.append(Entry(failure, raised=True))
            # One error failed the batch: its cost is in the first row alone.
            usage = None
        self._record(requests, entries, start)

    def _record(
        self, requests: Sequence[AdviceRequest], entries: list[Entry], start: float
    ) -> None:
        latency_s, model = time.perf_counter() - start, model_name(self.advisor)
        rows = [
            _row(request, entry, model, latency_s)
            for request, entry in zip(requests, entries, strict=True)
        ]
        if not rows:
            return
        columns = ", ".join(rows[0])
        values = ", ".join(f":{name}" for name in rows[0])
        try:
            # A connection for each batch: none survives a fork or a pickle.
            # Where another program reads it, the answers wait rather than be lost.
            with closing(sqlite3.connect(self.path, timeout=60.0)) as database, database:
                database.executemany(f"INSERT INTO answers ({columns}) VALUES ({values})", rows)
        except sqlite3.Error as err:
            raise FatalAdviceError(
                f"The recording {str(self.path)!r} cannot be written: {err}. Make room or give "
                "another path; without record= the run needs none."
            ) from err

    def close(self) -> None:
        """Let other runs have the file, and close the wrapped advisor where it can be closed."""
        self._claim.close()
        if hasattr(self.advisor, "close"):
            self.advisor.close()


def model_name(advisor: object) -> str:
    """Return the name of the model that an advisor asks, or of the innermost advisor's class."""
    for one in _wrapped(advisor):
        for name in (getattr(one, "model_name", None), getattr(one, "model", None)):
            if isinstance(name, str) and name:
                return name
    return type(one).__name__


def _wrapped(advisor: object) -> Iterator[object]:
    """Yield an advisor and those that it wraps."""
    yield advisor
    for name in ("advisor", "before", "after"):
        if (inner := getattr(advisor, name, None)) is not None:
            yield from _wrapped(inner)


def _row(request: AdviceRequest, entry: Entry, model: str, latency_s: float) -> dict[str, Any]:
    def clean(text: str, limit: int | None = None) -> str:
        # Half an emoji, as JSON may hold it, is no text to SQLite.
        return redact(text, limit=limit).encode("utf-8", "replace").decode()

    answer = entry.answer
    usage = Usage() if answer is None else answer.usage.counted()
    advice = answer if isinstance(answer, Advice) else None
    error = answer if isinstance(answer, AdviceError) else None
    said: Any = None
    if advice is not None:
        # NumPy's numbers are no JSON; as Python's floats they lose no bit.
        said, extras = [float(value) for value in advice.logits], advice.extras()
        said = {"logits": said, **extras} if extras else said
    return {
        # As it is: the answer is found by it.
        "cache_key": request.cache_key,
        "model": clean(model),
        "mission": clean(request.mission),
        "description": clean(request.description),
        "actions": json.dumps(request.actions),
        "logits": None if advice is None else json.dumps(said),
        "confidence": float(advice.confidence) if advice else None,
        "raw": clean(advice.raw, _LONGEST_RAW) if advice else "",
        "error_kind": safe_kind(error.kind) if error else None,
        "error_status": getattr(error, "status", None),
        "error_message": clean(str(error), _LONGEST_RAW) if error else None,
        "raised": int(entry.raised),
        "latency_s": latency_s,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cost": usage.cost,
        "time": time.time(),
    }


class RecordedAdvisor:
    """Answer from a recording alone, without a network.

    Recordings are the SQLite files of :class:`RecordingAdvisor`, looked up by cache key, or
    JSON Lines with ``logits`` and ``confidence`` a line, where there are any ``plan``, ``subgoal``
    and ``valid`` as :class:`~lore_torchrl.advisors.base.Advice` has them, and with

    - ``class``, looked up by the request's ``abstract_state``, and ``actions``, or
    - ``image`` and ``direction``, looked up by the request's facts ``view`` and ``direction``.

    Where a key was answered several times, the first question gets the first answer, and so
    on. After the last, those of an abstract state are given again in turn; of other keys the
    last is repeated. Recorded errors happen again, at the price they had. A blocking run from
    its own recording, resumed or not, is bitwise equal to the original. To a resume, a recording
    that holds other or more answers than before is another advisor.

    Args:
        path: The recording, read once, here.
        missing: What a question that is not in the recording does. ``"error"`` stops the
            run, ``"mask"`` counts a ``NotRecordedError`` and goes on without that advice.
            Default: ``None``, ``"error"`` for a SQLite recording, and ``"mask"`` for
            JSON Lines.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is no recording, or ``missing`` is unknown.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, missing: Literal["error", "mask"] | None = None
    ) -> None:
        if missing not in ("error", "mask", None):
            raise ValueError(
                f"missing={missing!r} is unknown: use 'error' to stop the run at a question "
                "that is not in the recording, or 'mask' to go on without that advice."
            )
        self.path = Path(path).expanduser()
        if not self.path.is_file():
            raise FileNotFoundError(
                f"There is no recording {str(self.path)!r} (in {os.getcwd()!r}). Make one with "
                "record=<path>, or give the path of one."
            )
        with self.path.open("rb") as file:
            in_lines = file.read(len(_SQLITE_MAGIC)) != _SQLITE_MAGIC
        self.missing = missing or ("mask" if in_lines else "error")
        read = _read_lines if in_lines else _read_sqlite
        self._kind, self._answers = read(self.path)
        known = repr((self._kind, sorted(self._answers.items())))
        self._digest = hashlib.sha256(known.encode()).hexdigest()[:16]
        self._served: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def cache_prefix(self) -> str:
        """A digest of the answers, under which the cache keeps them."""
        return f"recorded-{self._digest}:"

    @property
    def extras(self) -> set[str]:
        """Which of ``plan``, ``subgoal`` and ``valid`` an answer holds."""
        answers = (entry.answer for entries in self._answers.values() for entry in entries)
        return {
            name for answer in answers if isinstance(answer, Advice) for name in answer.extras()
        }

    async def advise(self, requests: Sequence[AdviceRequest]) -> list[Advice | AdviceError | None]:
        """Return the recorded answer to each request."""
        entries = [self._next(request) for request in requests]
        for entry in entries:
            if entry.raised:
                raise entry.answer.bare()
        return [entry.answer for entry in entries]

    def _next(self, request: AdviceRequest) -> Entry:
        in_turn = self._kind == "abstract_state"
        key = _view_key(request.facts) if self._kind == "view" else getattr(request, self._kind)
        if key is None:
            return self._not_recorded(f"the describer gives no {self._kind!r}, which it needs")
        name = key if in_turn else request.cache_key
        entries = self._answers.get(key)
        if entries is None:
            return self._not_recorded(f"no answer to {name!r}")
        turn = self._served.get(key, 0)
        entry = entries[turn % len(entries) if in_turn else min(turn, len(entries) - 1)]
        if entry.actions and entry.actions != tuple(request.actions):
            return self._not_recorded(
                f"its answer to {name!r} is about {entry.actions}, not about "
                f"{tuple(request.actions)}"
            )
        self._served[key] = turn + 1
        return entry

    def _not_recorded(self, reason: str) -> Entry:
        message = f"recording {str(self.path)!r}: {reason}"
        if self.missing == "error":
            raise FatalAdviceError(
                f"{message}. A run from its own recording needs the original's configuration, "
                "and an original without lore.calls.store, whose answers are not recorded; "
                "with missing='mask' it goes on without this advice."
            )
        return Entry(NotRecordedError(message))

    def state_dict(self) -> dict[str, Any]:
        """Return how often each question was answered, in types that JSON holds."""
        return {"served": dict(self._served)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        self._served = dict(state_dict["served"])


def _view_key(facts: Mapping[str, Any]) -> str | None:
    if facts.get("view") is None or facts.get("direction") is None:
        return None
    view = np.asarray(facts["view"], dtype=np.uint8)
    digest = hashlib.blake2b(f"{view.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(view).tobytes())
    return f"{digest.hexdigest()}:{int(facts['direction'])}"


def _read_lines(path: Path) -> tuple[str, dict[str, list[Entry]]]:
    """Return how a JSON Lines recording is looked up, and its answers by key, in their order."""
    kind = ""
    entries: dict[str, list[Entry]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                kind = kind or ("abstract_state" if "class" in row else "view")
                if kind == "view":
                    key = _view_key({"view": row["image"], "direction": row["direction"]})
                elif not isinstance(key := row["class"], str):
                    raise TypeError(f"class is {type(key).__name__}, not text")
                logits = tuple(float(value) for value in row["logits"])
                actions = tuple(str(action) for action in row.get("actions", ()))
                said = {"raw": line.decode().strip(), **read_extras(row)}
                if actions and len(actions) != len(logits):
                    raise ValueError(f"{len(logits)} logits for {len(actions)} actions")
                advice = Advice(logits, float(row["confidence"]), **said)
            except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as err:
                raise ValueError(
                    f"{str(path)!r}, line {number}, is no recorded answer "
                    f"({type(err).__name__}: {err}). A line holds class, or image and direction, "
                    "and logits and confidence; a SQLite recording begins with its own mark."
                ) from err
            entries.setdefault(key, []).append(Entry(advice, actions=actions))
    if not entries:
        raise ValueError(f"{str(path)!r} holds no recorded answer.")
    return kind, entries


def _read_sqlite(path: Path) -> tuple[str, dict[str, list[Entry]]]:
    """Return how a SQLite recording is looked up, and its answers by key, in their order."""
    _check_recording(path)
    columns = ", ".join(chain(*_READ.values()))
    entries: dict[str, list[Entry]] = {}
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            for row in database.execute(f"SELECT id, {columns} FROM answers ORDER BY id"):
                try:
                    entry = _read_row(row)
                except (ValueError, TypeError, OverflowError, RecursionError) as err:
                    raise ValueError(
                        f"{str(path)!r}: row {row['id']} of answers cannot be read "
                        f"({type(err).__name__}: {str(err)[:200]}). Delete it to do without this "
                        "answer, or record again."
                    ) from err
                entries.setdefault(row["cache_key"], []).append(entry)
    except sqlite3.Error as err:
        raise ValueError(
            f"{str(path)!r} cannot be read as a recording of answers ({err}). Give another "
            "path, or record again."
        ) from err
    return "cache_key", entries


def _read_row(row: sqlite3.Row) -> Entry:
    for kind, names in _READ.items():
        for name in names:
            if not isinstance(row[name], kind):
                raise TypeError(f"{name} is {type(row[name]).__name__}")
    actions = json.loads(row["actions"])
    if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
        raise TypeError("actions is no list of names")
    usage = Usage(row["prompt_tokens"], row["completion_tokens"], row["cost"])
    answer: Advice | AdviceError | None = None
    if row["logits"] is not None:
        # Added to, since float() would read text as well.
        held = json.loads(row["logits"])
        extras = read_extras(held) if isinstance(held, dict) else {}
        logits = tuple(value + 0.0 for value in (held["logits"] if extras else held))
        answer = Advice(logits, row["confidence"], usage, row["raw"], **extras)
    elif row["error_kind"] is not None:
        message, status = row["error_message"] or "", row["error_status"]
        answer = error_of_kind(row["error_kind"], message, status=status, usage=usage)
    if row["raised"] and not isinstance(answer, AdviceError):
        raise ValueError("raised, but there is no error")
    return Entry(answer, bool(row["raised"]), tuple(actions))


def _check_recording(path: Path) -> None:
    """Raise a ``ValueError`` unless a file has the mark of a recording in SQLite's header."""
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder: give the path of a file in it.")
    with path.open("rb") as file:
        header = file.read(72)
    if header[:16] != _SQLITE_MAGIC or int.from_bytes(header[68:], "big") != _APPLICATION_ID:
        raise ValueError(
            f"{str(path)!r} is another program's database, not a recording. Give another path."
        )
