"""Where the tables of jobs lie: a SQLite file in the home of jobs, or a Postgres that a team shares.

One set of statements serves both: they are written for SQLite (`?`, or `?1` where a value is used twice), and
postgres.py rewrites what differs. Here is what else the store asks of either.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from dovetail.jobs import modes
from dovetail.jobs.home import is_shared

FILE = "jobs.sqlite"
FILES = (FILE, f"{FILE}-wal", f"{FILE}-shm")  # SQLite gives the others the mode of the first
WAIT_S = 30  # for another writer


class Cursor(Protocol):
    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """As sqlite3 has it. A server that is gone is a ConnectionError."""

    @property
    def in_transaction(self) -> bool: ...

    def execute(self, query: str, values: Sequence[Any] = (), /) -> Cursor: ...

    def executemany(self, query: str, values: Sequence[Sequence[Any]], /) -> Any: ...

    def close(self) -> None: ...


class Database(Protocol):
    """`site`: by which the jobs of this home are told from those of others in the same tables."""

    site: str

    def connect(self) -> Connection: ...

    def begin(self, connection: Connection) -> None:
        """A transaction that has no other writer beside it."""
        ...

    def version(self, connection: Connection) -> int:
        """Of the tables; 0 where there are none."""
        ...

    def set_version(self, connection: Connection, version: int) -> None: ...

    def is_usable(self, connection: Connection) -> bool:
        """Whether it may be used again."""
        ...


class Sqlite:
    """One file, whose only site is its own folder."""

    site = ""

    def __init__(self, root: Path) -> None:
        self._root = root

    def connect(self) -> Connection:
        modes.create(self._root / FILE)
        made = sqlite3.connect(self._root / FILE, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
        _set_journal(made, "DELETE" if is_shared(self._root) else "WAL")
        made.execute("PRAGMA synchronous = FULL")  # an intent must outlive a loss of power too
        return made

    def begin(self, connection: Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")

    def version(self, connection: Connection) -> int:
        return connection.execute("PRAGMA user_version").fetchone()[0]

    def set_version(self, connection: Connection, version: int) -> None:
        connection.execute(f"PRAGMA user_version = {version}")

    def is_usable(self, connection: Connection) -> bool:
        return True


def _set_journal(connection: Connection, wanted: str) -> None:
    """By whoever comes first: while SQLite changes it, it does not wait for others as it does for writers."""
    until = time.monotonic() + WAIT_S
    while connection.execute("PRAGMA journal_mode").fetchone()[0].upper() != wanted:
        try:
            connection.execute(f"PRAGMA journal_mode = {wanted}")
        except sqlite3.OperationalError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)
