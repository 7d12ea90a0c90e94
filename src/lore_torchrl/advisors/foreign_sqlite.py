"""Reading SQLite files that others may have written."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection


def foreign_part(
    database: sqlite3.Connection, tables: Collection[str], indexes: Collection[str] = ()
) -> str | None:
    """Return what a database holds besides plain tables and indexes of these names, if anything.

    A view under a table's name may compute without end, and a trigger undo what is written.
    SQLite's own indexes may always be there.
    """
    for kind, name, sql in database.execute("SELECT type, name, sql FROM sqlite_master"):
        if str(sql).upper().startswith("CREATE VIRTUAL"):
            return f"the virtual table {name[:80]!r}"
        known = {"table": tables, "index": indexes}.get(kind, ())
        own = kind in ("table", "index") and name.startswith("sqlite_")
        if name not in known and not own:
            return f"the {kind} {name[:80]!r}"
    for table in tables:
        if any(column[6] for column in database.execute(f"PRAGMA table_xinfo({table})")):
            return f"generated columns in {table!r}"
    return None


def decoded(text: bytes) -> str | bytes:
    """Return text of a database, as it came where it is not UTF-8.

    As a connection's ``text_factory`` it keeps one such value from failing the whole query.
    """
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text
