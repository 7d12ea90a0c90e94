"""The durable store: a SQLite file in which processes of one machine share ledger and cache."""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

# Marks the file as ours, so that no other program's database is written into.
_APPLICATION_ID = 0x4C6F5265

# Version of the tables, which is in the file.
_VERSION = 3
_TABLES = (
    """
    CREATE TABLE ledger (
        name TEXT PRIMARY KEY,
        calls INTEGER NOT NULL DEFAULT 0,
        tokens INTEGER NOT NULL DEFAULT 0,
        cost REAL NOT NULL DEFAULT 0.0,
        refunds INTEGER NOT NULL DEFAULT 0
    ) WITHOUT ROWID
    """,
    # AUTOINCREMENT never gives a number twice, and writers are serialised: what is
    # new since a number was seen is exactly what has a higher one.
    """
    CREATE TABLE advice (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        prefix TEXT NOT NULL,
        key TEXT NOT NULL,
        answer TEXT NOT NULL,
        abstract_state TEXT,
        UNIQUE (prefix, key)
    )
    """,
)

# What another process's writing answers; everything else will not pass by waiting.
_BUSY_CODES = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}

_waiting = threading.local()

_locks: weakref.WeakSet[SharedLock] = weakref.WeakSet()
_stores: weakref.WeakSet[AdviceStore] = weakref.WeakSet()


class StoreError(RuntimeError):
    """The store cannot be read or written; ``kind`` is what the service counts it as."""

    kind = "store"


class StoreBusyError(StoreError):
    """Another process is writing, and this thread waits no longer; a later try may do."""

    kind = "store_busy"


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Bound what this thread waits for other writers of any store within a ``with`` block.

    It bounds all waits of the block together, and only shortens what an outer block or a
    store's ``busy_timeout_s`` allows. With 0 the thread tries once and never waits.
    """
    outer = getattr(_waiting, "until", math.inf)
    _waiting.until = min(outer, time.monotonic() + seconds)
    try:
        yield
    finally:
        _waiting.until = outer


class SharedLock:
    """A re-entrant lock whose copies, pickles and forked children start free."""

    def __init__(self) -> None:
        self.inner = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self.inner.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.inner.release()

    def __reduce__(self) -> tuple[type[SharedLock], tuple[()]]:
        return SharedLock, ()


class AdviceStore:
    """A SQLite file for what must outlive the process: calls spent and answers bought.

    The file is opened at its first use in each process, in WAL mode, so that readers
    never wait for writers. Each change has reached the disk when it returns: a process
    that is killed leaves all of it or nothing. Threads may share a store. A copy, a pickle
    and a forked child open the file again. Put it on a local disk: SQLite's locks do not
    hold on network ones.

    The file at ``path`` and its folder are made where they are missing. Raises a ``ValueError``
    if it is a folder or ``":memory:"``.
    """

    #: Longest wait for other processes' writing, in seconds, unless :func:`patience` allows less.
    busy_timeout_s = 10.0

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if str(path) in ("", ":memory:"):
            raise ValueError(f"AdviceStore needs a file, got {str(path)!r}: use store=None.")
        # A worker may have another working directory.
        self.path = Path(path).expanduser().absolute()
        if self.path.is_dir():
            raise ValueError(f"AdviceStore needs a file, got the folder {self.path}.")
        # A look-up in an environment's step must not queue behind a commit of the
        # thread that asks, so reading has a connection of its own.
        self._locks = {"read": SharedLock(), "write": SharedLock()}
        self._connections: dict[str, sqlite3.Connection] = {}
        _stores.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)

    def __enter__(self) -> AdviceStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of one query; raises :class:`StoreError`."""
        with self._use("read") as connection:
            return connection.execute(sql, parameters).fetchall()

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Open one transaction that excludes every other writer, for a ``with`` block.

        It is on disk when the block is left, and undone if the block raises. If others write
        for longer than this thread waits, it raises :class:`StoreBusyError`.
        """
        with self._use("write") as connection, _transaction(connection):
            yield connection

    def close(self) -> None:
        """Close the file in this process. A later use opens it again."""
        with self._locks["write"], self._locks["read"]:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    # ---- the connection ----

    @contextmanager
    def _use(self, use: str) -> Iterator[sqlite3.Connection]:
        """Hold the connection for one use, within this thread's patience."""
        now = time.monotonic()
        until = max(now, min(now + self.busy_timeout_s, getattr(_waiting, "until", math.inf)))
        lock = self._locks[use].inner
        if not lock.acquire(timeout=until - now):
            raise self._busy("another thread of this process is using it")
        try:
            if use not in self._connections:
                self._connections[use] = self._open(until)
            connection = self._connections[use]
            _wait_until(connection, until)
            yield connection
        except (sqlite3.Error, OSError, UnicodeError) as error:
            if _is_busy(error):
                raise self._busy(error) from error
            raise StoreError(
                f"{self.path} cannot be used: {error}. Check that it is a file of this package "
                "on a local disk with room."
            ) from error
        finally:
            lock.release()

    def _busy(self, reason: object) -> StoreBusyError:
        return StoreBusyError(
            f"{self.path} cannot be used: {reason}. It is tried again later; if that does not "
            "help, end the process that holds it open for writing."
        )

    def _open(self, until: float) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            self.path,
            isolation_level=None,  # transactions are opened by hand, in `write`
            check_same_thread=False,  # the locks see to that
        )
        # Text that is no UTF-8 would make the whole query fail, not the row.
        connection.text_factory = _decoded
        try:
            _wait_until(connection, until)
            self._check_owner(connection)
            self._enter_wal(connection, until)
            # The default of WAL may lose the last commits with the machine's power.
            connection.execute("PRAGMA synchronous = FULL")
            self._make_tables(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_owner(self, connection: sqlite3.Connection) -> None:
        owner = _value(connection, "PRAGMA application_id")
        if owner == 0 and _value(connection, "SELECT count(*) FROM sqlite_master"):
            # Another process may have made the tables between the two queries.
            owner = _value(connection, "PRAGMA application_id") or None
        if owner not in (0, _APPLICATION_ID):
            raise StoreError(f"{self.path} is another program's database. Name another file.")

    def _enter_wal(self, connection: sqlite3.Connection, until: float) -> None:
        # SQLite does not wait by itself where two processes switch a new file at once.
        # A file system without shared memory stays with its journal, which is as safe.
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def _make_tables(self, connection: sqlite3.Connection) -> None:
        if _value(connection, "PRAGMA user_version") == 0:
            with _transaction(connection):
                # Asked again: another process may have been first.
                if _value(connection, "PRAGMA user_version") == 0:
                    for statement in _TABLES:
                        connection.execute(statement)
                    connection.execute(f"PRAGMA user_version = {_VERSION}")
                    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        if (version := _value(connection, "PRAGMA user_version")) != _VERSION:
            raise StoreError(
                f"{self.path} was written by another version of lore-torchrl (tables {version}, "
                f"this one reads {_VERSION}). Name another file."
            )


def _decoded(text: bytes) -> str | bytes:
    """Return text of a database, as it came where it is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        # At once for writing: a lock taken only at the first change could find
        # that another process has changed what was read.
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _wait_until(connection: sqlite3.Connection, until: float) -> None:
    left = max(0.0, until - time.monotonic())
    connection.execute(f"PRAGMA busy_timeout = {int(1000 * left)}")


def _is_busy(error: Exception) -> bool:
    # The low byte is the code, the rest says more about it.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _BUSY_CODES


def _value(connection: sqlite3.Connection, sql: str) -> Any:
    return connection.execute(sql).fetchone()[0]


_forking = threading.local()  # what the thread that forks holds meanwhile


def _before_fork() -> None:
    # In a child that has the file open SQLite's record of its locks would be wrong, and
    # another process might delete a log that the child still writes to. So no connection
    # is open during a fork.
    _forking.held = ExitStack()
    for store in list(_stores):
        for lock in (store._locks["write"], store._locks["read"]):
            _forking.held.enter_context(lock)
        store.close()


def _after_fork_in_child() -> None:
    for lock in list(_locks):
        lock.inner = threading.RLock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=lambda: _forking.held.close(),
        after_in_child=_after_fork_in_child,
    )
