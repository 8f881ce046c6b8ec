"""The table of jobs, in SQLite or Postgres (database.py): safe to be killed at any point.

A call to a backend is written down as an intent before it is made, in the transaction that decides on it, and settled
in the one that records what came of it. Between the two the process may die: who comes next finds the intent and makes
the call again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dovetail.core.errors import UserError
from dovetail.jobs import asked, database, modes, schema
from dovetail.jobs.attempt import Attempt
from dovetail.jobs.database import Connection, Database, Sqlite
from dovetail.jobs.home import database_url
from dovetail.jobs.job import ACTIVE, Event, Job, Try

if TYPE_CHECKING:  # a list of jobs is shown without a reader of YAML
    from dovetail.jobs.spec import Spec

T = TypeVar("T")
FOLDERS = ("jobs", "queues", "places")  # of the home of jobs, which its users share
SUPERVISOR = ("supervisor.lock", "supervisor.log")  # of the folder's owner (presence.py)
LETTERS = "abcdefghjkmnpqrstuvwxyz"
_JOB = ", ".join(f'"{name}"' for name in Job._fields)
_TRY = ", ".join(Try.__dataclass_fields__)


def new_id() -> str:
    """A letter, then letters and digits that are not mistaken for each other: fit for a cloud's resource names."""
    rest = LETTERS + "23456789"
    return secrets.choice(LETTERS) + "".join(secrets.choice(rest) for _ in range(6))


class Store:
    """`root` is the home of jobs. Threads may share it: each takes a connection for as long as it needs one."""

    def __init__(self, root: Path) -> None:
        self.root, self.user = Path(root), modes.user_name()
        _prepare(self.root)
        self._database = _database(self.root)
        self._local = threading.local()
        self._free: list[Connection] = []
        with self._connection() as connection:
            schema.prepare(self._database, connection, new_id())
        self.site = self._database.site
        self.owner: str = self.read("SELECT value FROM meta WHERE key = 'owner'")[0][0]

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Connection]:
        """The one that this thread has already, one that is free, or a new one."""
        if held := getattr(self._local, "held", None):
            yield held
            return
        try:
            held = self._free.pop()
        except IndexError:
            held = self._database.connect()
        self._local.held = held
        try:
            yield held
        finally:
            self._local.held = None
            if self._database.is_usable(held):
                self._free.append(held)
            else:
                held.close()

    def close(self) -> None:
        while self._free:
            self._free.pop().close()

    def __del__(self) -> None:
        for connection in getattr(self, "_free", ()):  # where opening it failed there may be none
            connection.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """All of it or nothing; one writer at a time."""
        with self._connection() as connection:
            if connection.in_transaction:  # within another: that one commits
                yield connection
                return
            try:
                self._database.begin(connection)
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(ConnectionError):
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                raise

    def read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """All rows at once: the connection is another's afterwards."""
        with self._connection() as connection:
            return connection.execute(query, values).fetchall()

    def rows(self, kind: type[T], query: str, values: Sequence[Any] = ()) -> list[T]:
        return [kind(*row) for row in self.read(query, values)]

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def add(self, spec: Spec, snapshot: str = "", id: str = "", user: str = "") -> Job:
        """A new job, queued."""
        from dovetail.jobs.spec import to_text

        id, now, text = id or new_id(), time.time(), to_text(spec)
        asked.keep(self.home(id), text, snapshot)  # first: a supervisor that finds the row looks for it
        with self.transaction() as db:
            db.execute(
                'INSERT INTO jobs (id, name, "user", backend, accelerator, status, snapshot, created, changed, site) '
                "VALUES (?, ?, ?, ?, ?, 'queued', ?, ?, ?, ?)",
                (id, spec.name, user or self.user, spec.backend, str(spec.device), snapshot, now, now, self.site),
            )
            db.execute("INSERT INTO specs VALUES (?, ?)", (id, text))
            self.note(id, 0, "created")
        return self.job(id)

    def jobs(self, statuses: Sequence[str] = (), limit: int = 0) -> list[Job]:
        """The newest first."""
        where = f"WHERE status IN ({', '.join('?' * len(statuses))})" if statuses else ""
        end = f"LIMIT {int(limit)}" if limit else ""
        return self.rows(Job, f"SELECT {_JOB} FROM jobs {where} ORDER BY created DESC, id {end}", statuses)

    def active(self) -> list[Job]:
        """Return this user's jobs of this site: those that this user's supervisor looks after."""
        return [job for job in self.jobs(ACTIVE) if self.is_ours(job)]

    def is_ours(self, job: Job) -> bool:
        """Whether its files are here, and its processes this user's."""
        return job.site == self.site and job.user == self.user

    def busy_users(self) -> set[str]:
        """Return the users whose jobs of this site are not over."""
        marks = ", ".join("?" * len(ACTIVE))
        query = f'SELECT DISTINCT "user" FROM jobs WHERE status IN ({marks}) AND site = ?'
        return {user for (user,) in self.read(query, (*ACTIVE, self.site))}

    def counts(self) -> dict[str, int]:
        """Status -> how many."""
        return dict(self.read("SELECT status, count(*) FROM jobs GROUP BY status"))

    def backends(self) -> list[str]:
        """Those that jobs have used."""
        return [name for (name,) in self.read("SELECT DISTINCT backend FROM jobs ORDER BY backend")]

    def job(self, id: str) -> Job:
        found = self.rows(Job, f"SELECT {_JOB} FROM jobs WHERE id = ?", (id,))
        if not found:
            raise UserError(f"no job {id!r}: `dovetail job list` shows those there are")
        return found[0]

    def find(self, text: str) -> Job:
        """By id, the beginning of one, or a name that one job has."""
        query = f"SELECT {_JOB} FROM jobs WHERE id = ?1 OR name = ?1 OR substr(id, 1, length(?1)) = ?1"
        found = self.rows(Job, query, (text,))
        exact = [job for job in found if job.id == text] or found
        if len(exact) > 1:
            ids = ", ".join(job.id for job in exact[:8])
            raise UserError(f"{len(exact)} jobs are called {text!r}: name one of them by its id ({ids})")
        return exact[0] if exact else self.job(text)

    def spec(self, id: str) -> Spec:
        from dovetail.jobs.spec import from_text

        return from_text(self._spec_text(id))

    def _spec_text(self, id: str) -> str:
        found = self.read("SELECT text FROM specs WHERE job = ?", (id,))
        if not found:
            raise UserError(f"no job {id!r}: `dovetail job list` shows those there are")
        return found[0][0]

    def check_asked(self, job: Job) -> None:
        """Raise ValueError where others can write the store and its user did not ask for what it says."""
        if self.is_shared:
            asked.check(self.home(job.id), self._spec_text(job.id), job.snapshot)

    @property
    def is_shared(self) -> bool:
        """Whether other users may write the tables."""
        return bool(database_url()) or modes.has_group(self.root)

    @property
    def snapshots(self) -> Path:
        """This user's archives of code: what others could write would be run as this user."""
        shared = modes.has_group(self.root)
        return self.root / (f"snapshots.{self.user}" if shared else "snapshots")

    def change_spec(self, id: str, spec: Spec) -> None:
        from dovetail.jobs.spec import to_text

        asked.keep(self.home(id), to_text(spec), self.job(id).snapshot)
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
        if not (id.isascii() and id.isalnum()):  # a row may be another user's
            raise UserError(f"a job's id must be letters and digits, got {id!r}")
        return self.root / "jobs" / id

    def where(self, job: Job) -> str:
        """Its folder; with its machine, where that is another site's (only Postgres has several)."""
        return str(self.home(job.id)) if job.site == self.site else f"{job.site.rpartition(' ')[0]}/jobs/{job.id}"

    def refuse_elsewhere(self, job: Job, what: str) -> None:
        """Raise ValueError where its files are not here, or not this user's to read."""
        if job.site != self.site:
            raise UserError(f"job {job.id} was created at {job.site.rpartition(' ')[0]}: {what} there")
        home = self.home(job.id)
        if home.exists() and not os.access(home, os.R_OK | os.X_OK):
            raise UserError(f"the files of job {job.id} are {job.user}'s alone: {job.user} runs `chmod -R g+rX {home}`")

    # --- attempts -----------------------------------------------------------------------------------------------------

    def attempts(self, id: str) -> list[Try]:
        return self.rows(Try, f"SELECT {_TRY} FROM attempts WHERE job = ? ORDER BY number", (id,))

    def last(self, id: str) -> Try | None:
        found = self.rows(Try, f"SELECT {_TRY} FROM attempts WHERE job = ? ORDER BY number DESC LIMIT 1", (id,))
        return found[0] if found else None

    def handles(self, backend: str) -> dict[str, str]:
        """Return the handle of each job's last attempt, by the job's id."""
        query = "SELECT a.job, a.handle FROM attempts a JOIN jobs j ON j.id = a.job AND j.attempts = a.number "
        return dict(self.read(query + "WHERE j.backend = ?", (backend,)))

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
        return self.read("SELECT job, number, verb FROM intents WHERE done IS NULL ORDER BY id")

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
            db.execute("INSERT INTO quarantine VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", values)

    def quarantined(self, backend: str) -> list[str]:
        query = "SELECT host FROM quarantine WHERE backend = ? ORDER BY host"
        return [host for (host,) in self.read(query, (backend,))]

    def release(self, host: str) -> int:
        """How many entries there were."""
        with self.transaction() as db:
            return db.execute("DELETE FROM quarantine WHERE host = ?", (host,)).rowcount


def _prepare(root: Path) -> None:
    """Make the folder, with the modes of what is in it; ValueError where this user cannot use it."""
    names = (*FOLDERS, *database.FILES)
    try:
        modes.make_folder(root)
    except PermissionError as error:
        raise UserError(
            f"the folder of jobs, {root}, cannot be used: {error}; set DOVETAIL_JOBS to a folder that you may write"
        ) from None
    modes.repair(root, (*names, "snapshots", *SUPERVISOR))
    modes.check(root, names)


def _database(root: Path) -> Database:
    """As $DOVETAIL_JOBS says."""
    url = database_url()
    if not url:
        return Sqlite(root)
    from dovetail.jobs.postgres import Postgres  # an extra

    return Postgres(url, root)
