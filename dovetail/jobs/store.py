"""The table of jobs: SQLite, one file, safe to be killed at any point.

A call to a backend is written down as an intent before it is made, in the transaction that decides on it, and settled
in the one that records what came of it. Between the two the process may die: who comes next finds the intent and makes
the call again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dovetail.jobs import schema
from dovetail.jobs.attempt import Attempt
from dovetail.jobs.home import is_shared
from dovetail.jobs.job import ACTIVE, Event, Job, Try
from dovetail.jobs.spec import Spec, from_text, to_text

T = TypeVar("T")
FILE = "jobs.sqlite"
LETTERS = "abcdefghjkmnpqrstuvwxyz"
WAIT_S = 30  # for another writer
_JOB = ", ".join(Job._fields)
_TRY = ", ".join(Try.__dataclass_fields__)


def new_id() -> str:
    """A letter, then letters and digits that are not mistaken for each other: fit for a cloud's resource names."""
    rest = LETTERS + "23456789"
    return secrets.choice(LETTERS) + "".join(secrets.choice(rest) for _ in range(6))


class Store:
    """`root` is the home of jobs. Threads may share it: each has a connection of its own."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self._local = threading.local()
        self._all: list[sqlite3.Connection] = []
        schema.prepare(self._connection, new_id())
        self.owner: str = self._connection.execute("SELECT value FROM meta WHERE key = 'owner'").fetchone()[0]

    @property
    def _connection(self) -> sqlite3.Connection:
        made = getattr(self._local, "connection", None)
        if made is None:
            made = sqlite3.connect(self.root / FILE, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
            made.execute(f"PRAGMA journal_mode = {'DELETE' if is_shared(self.root) else 'WAL'}")
            made.execute("PRAGMA synchronous = FULL")  # an intent must outlive a loss of power too
            self._local.connection = made
            self._all.append(made)
        return made

    def close(self) -> None:
        for connection in self._all:
            connection.close()
        self._all, self._local = [], threading.local()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of it or nothing; one writer at a time."""
        connection = self._connection
        if connection.in_transaction:  # within another: that one commits
            yield connection
            return
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    def rows(self, kind: type[T], query: str, values: Sequence[Any] = ()) -> list[T]:
        return [kind(*row) for row in self._connection.execute(query, values)]

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def add(self, spec: Spec, snapshot: str = "", id: str = "", user: str = "") -> Job:
        """A new job, queued."""
        id, now = id or new_id(), time.time()
        with self.transaction() as db:
            db.execute(
                "INSERT INTO jobs (id, name, user, backend, accelerator, status, snapshot, created, changed) "
                "VALUES (?, ?, ?, ?, ?, 'queued', ?, ?, ?)",
                (id, spec.name, user or _user(), spec.backend, str(spec.device), snapshot, now, now),
            )
            db.execute("INSERT INTO specs VALUES (?, ?)", (id, to_text(spec)))
            self.note(id, 0, "created")
        return self.job(id)

    def jobs(self, statuses: Sequence[str] = (), limit: int = 0) -> list[Job]:
        """The newest first."""
        where = f"WHERE status IN ({', '.join('?' * len(statuses))})" if statuses else ""
        end = f"LIMIT {int(limit)}" if limit else ""
        return self.rows(Job, f"SELECT {_JOB} FROM jobs {where} ORDER BY created DESC, id {end}", statuses)

    def active(self) -> list[Job]:
        return self.jobs(ACTIVE)

    def counts(self) -> dict[str, int]:
        """Status -> how many."""
        return dict(self._connection.execute("SELECT status, count(*) FROM jobs GROUP BY status"))

    def backends(self) -> list[str]:
        """Those that jobs have used."""
        return [name for (name,) in self._connection.execute("SELECT DISTINCT backend FROM jobs ORDER BY backend")]

    def job(self, id: str) -> Job:
        found = self.rows(Job, f"SELECT {_JOB} FROM jobs WHERE id = ?", (id,))
        if not found:
            raise ValueError(f"no job {id!r}: `dovetail job list` shows those there are")
        return found[0]

    def find(self, text: str) -> Job:
        """By id, the beginning of one, or a name that one job has."""
        query = f"SELECT {_JOB} FROM jobs WHERE id = ?1 OR name = ?1 OR substr(id, 1, length(?1)) = ?1"
        found = self.rows(Job, query, (text,))
        exact = [job for job in found if job.id == text] or found
        if len(exact) > 1:
            ids = ", ".join(job.id for job in exact[:8])
            raise ValueError(f"{len(exact)} jobs are called {text!r}: name one of them by its id ({ids})")
        return exact[0] if exact else self.job(text)

    def spec(self, id: str) -> Spec:
        row = self._connection.execute("SELECT text FROM specs WHERE job = ?", (id,)).fetchone()
        if row is None:
            raise ValueError(f"no job {id!r}: `dovetail job list` shows those there are")
        return from_text(row[0])

    def change_spec(self, id: str, spec: Spec) -> None:
        with self.transaction() as db:
            db.execute("UPDATE specs SET text = ? WHERE job = ?", (to_text(spec), id))

    def change(self, id: str, **columns: Any) -> None:
        names = ", ".join(f"{name} = ?" for name in (*columns, "changed"))
        with self.transaction() as db:
            db.execute(f"UPDATE jobs SET {names} WHERE id = ?", (*columns.values(), time.time(), id))

    def remove(self, id: str) -> None:
        with self.transaction() as db:
            db.execute("DELETE FROM jobs WHERE id = ?", (id,))
            for table in ("specs", "attempts", "intents", "events"):
                db.execute(f"DELETE FROM {table} WHERE job = ?", (id,))

    def home(self, id: str) -> Path:
        return self.root / "jobs" / id

    # --- attempts -----------------------------------------------------------------------------------------------------

    def attempts(self, id: str) -> list[Try]:
        return self.rows(Try, f"SELECT {_TRY} FROM attempts WHERE job = ? ORDER BY number", (id,))

    def last(self, id: str) -> Try | None:
        found = self.rows(Try, f"SELECT {_TRY} FROM attempts WHERE job = ? ORDER BY number DESC LIMIT 1", (id,))
        return found[0] if found else None

    def live(self) -> list[Try]:
        """Attempts that a backend may hold something for."""
        return self.rows(Try, f"SELECT {_TRY} FROM attempts WHERE phase != 'gone'")

    def begin(self, id: str, zone: str, accelerator: str, exclude: Sequence[str] = ()) -> Try:
        """The next attempt, with the intent to create it: before the backend hears of it."""
        now = time.time()
        with self.transaction() as db:
            (number,) = db.execute("SELECT attempts + 1 FROM jobs WHERE id = ?", (id,)).fetchone()
            db.execute(
                "INSERT INTO attempts (job, number, phase, zone, accelerator, exclude, created) "
                "VALUES (?, ?, 'creating', ?, ?, ?, ?)",
                (id, number, zone, accelerator, ",".join(exclude), now),
            )
            self.change(id, attempts=number, zone=zone, accelerator=accelerator, host="", status="waiting", detail="")
            self.intend(id, number, "create")
        found = self.last(id)
        assert found is not None
        return found

    def attempt(self, job: Job, row: Try, spec: Spec | None = None) -> Attempt:
        """What a backend is given; `spec` where it has been read already."""
        own = dataclasses.replace(spec or self.spec(job.id), accelerator=row.accelerator)
        exclude = tuple(host for host in row.exclude.split(",") if host)
        home = self.home(job.id)
        return Attempt(job.id, row.number, own, home, self.owner, row.zone, row.handle, exclude, job.snapshot)

    def change_attempt(self, id: str, number: int, **columns: Any) -> None:
        names = ", ".join(f"{name} = ?" for name in columns)
        with self.transaction() as db:
            db.execute(f"UPDATE attempts SET {names} WHERE job = ? AND number = ?", (*columns.values(), id, number))

    # --- intents and events -------------------------------------------------------------------------------------------

    def intend(self, id: str, number: int, verb: str) -> None:
        """What is about to be asked of a backend. One that is open already stays: the call is made again."""
        with self.transaction() as db:
            db.execute(
                "INSERT INTO intents (job, number, verb, made) SELECT ?1, ?2, ?3, ?4 WHERE NOT EXISTS "
                "(SELECT 1 FROM intents WHERE job = ?1 AND number = ?2 AND verb = ?3 AND done IS NULL)",
                (id, number, verb, time.time()),
            )
            self.note(id, number, f"to {verb}")

    def settle(self, id: str, number: int, verb: str, detail: str = "") -> None:
        with self.transaction() as db:
            db.execute(
                "UPDATE intents SET done = ?, detail = ? WHERE job = ? AND number = ? AND verb = ? AND done IS NULL",
                (time.time(), detail, id, number, verb),
            )

    def open_intents(self) -> list[tuple[str, int, str]]:
        return list(self._connection.execute("SELECT job, number, verb FROM intents WHERE done IS NULL ORDER BY id"))

    def note(self, id: str, number: int, what: str) -> None:
        with self.transaction() as db:
            db.execute(
                "INSERT INTO events (job, number, at, what) VALUES (?, ?, ?, ?)", (id, number, time.time(), what)
            )

    def events(self, id: str) -> list[Event]:
        return self.rows(Event, "SELECT job, number, at, what FROM events WHERE job = ? ORDER BY id", (id,))

    # --- hosts in quarantine ------------------------------------------------------------------------------------------

    def quarantine(self, backend: str, host: str, job: str, reason: str) -> None:
        with self.transaction() as db:
            values = (backend, host, job, time.time(), reason)
            db.execute("INSERT OR IGNORE INTO quarantine VALUES (?, ?, ?, ?, ?)", values)

    def quarantined(self, backend: str) -> list[str]:
        query = "SELECT host FROM quarantine WHERE backend = ? ORDER BY host"
        return [host for (host,) in self._connection.execute(query, (backend,))]

    def release(self, host: str) -> int:
        """How many entries there were."""
        with self.transaction() as db:
            return db.execute("DELETE FROM quarantine WHERE host = ?", (host,)).rowcount


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name
        return str(os.getuid())
