"""The store of jobs, in SQLite or Postgres (database.py). A process that uses it may be killed at any point.

Before each call to a backend an intent is recorded, in the transaction that decides on the call. The intent is settled
in the transaction that records the result. If the process dies in between, the next one finds the intent and repeats
the call.

Users who share a store can all write its tables: Postgres has no Unix users, and a shared SQLite file is one file.
So the owner of a job also writes the spec to a request file, in a folder that only the owner can write, and a
supervisor starts a job only if the spec in the table is the same. Through the table other users can only stop a job, or
run it again unchanged.
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

from dovetail.core.errors import NotPermittedError, UserError
from dovetail.core.files import check_own_folder, read_own
from dovetail.jobs import database, files
from dovetail.jobs.database import Database, DatabaseConnection, Postgres, Sqlite
from dovetail.jobs.job import ACTIVE, Attempt, AttemptRow, Event, Job

if TYPE_CHECKING:  # listing jobs does not load the YAML reader
    from dovetail.jobs.spec import Spec

T = TypeVar("T")
FOLDERS = ("jobs", "queues", "places")  # of the folder of jobs, which its users share
SUPERVISOR = ("supervisor.lock", "supervisor.log")  # of the folder's owner (presence.py)
REQUEST_FILE = "asked.yaml"  # in the job's folder
LETTERS = "abcdefghjkmnpqrstuvwxyz"
_JOB = ", ".join(f'"{name}"' for name in Job._fields)
_ATTEMPT = ", ".join(AttemptRow.__dataclass_fields__)


class NoJobError(UserError):
    """Report an id or name that no job has."""

    def __init__(self, text: str) -> None:
        super().__init__(f"no job {text!r}: `dovetail job list` shows all jobs", param="JOB", code="no_job")


def new_id() -> str:
    """Return a letter, then letters and digits that are not easily confused: valid in a cloud's resource names."""
    rest = LETTERS + "23456789"
    return secrets.choice(LETTERS) + "".join(secrets.choice(rest) for _ in range(6))


class JobStore:
    """Store the jobs of the folder `root`. Threads may share it: each takes a connection while it needs one."""

    def __init__(self, root: Path) -> None:
        self.root, self.user = Path(root), files.user_name()
        _prepare(self.root)
        self._database = _database(self.root)
        self._local = threading.local()
        self._free: list[DatabaseConnection] = []
        with self._connection() as connection:
            database.prepare(self._database, connection, new_id())
        self.site = self._database.site
        self.owner: str = self.read("SELECT value FROM meta WHERE key = 'owner'")[0][0]

    @contextlib.contextmanager
    def _connection(self) -> Iterator[DatabaseConnection]:
        """Yield the connection that this thread holds, a free one, or a new one."""
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
        """Close the connections that no thread uses."""
        while self._free:
            self._free.pop().close()

    def __del__(self) -> None:
        for connection in getattr(self, "_free", ()):  # missing if __init__ failed
            connection.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[DatabaseConnection]:
        """Open a transaction, one writer at a time; an inner one is part of the outer one."""
        with self._connection() as connection:
            if connection.in_transaction:
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
        """Return all rows of a query."""
        with self._connection() as connection:
            return connection.execute(query, values).fetchall()

    def rows(self, kind: type[T], query: str, values: Sequence[Any] = ()) -> list[T]:
        """Return all rows of a query as objects of `kind`."""
        return [kind(*row) for row in self.read(query, values)]

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def add(self, spec: Spec, snapshot: str = "", id: str = "", user: str = "") -> Job:
        """Add a job with status `queued`."""
        from dovetail.jobs.spec import to_text

        id, now, text = id or new_id(), time.time(), to_text(spec)
        self._write_request(id, text, snapshot)  # before the row, which a supervisor may find at once
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
        """Return the jobs with these statuses (all if empty), newest first."""
        where = f"WHERE status IN ({', '.join('?' * len(statuses))})" if statuses else ""
        end = f"LIMIT {int(limit)}" if limit else ""
        return self.rows(Job, f"SELECT {_JOB} FROM jobs {where} ORDER BY created DESC, id {end}", statuses)

    def active(self) -> list[Job]:
        """Return the jobs that this user's supervisor manages: this user's jobs of this site that are not over."""
        return [job for job in self.jobs(ACTIVE) if self.is_ours(job)]

    def is_ours(self, job: Job) -> bool:
        """Return whether the job's files are at this site and its processes run as this user."""
        return job.site == self.site and job.user == self.user

    def busy_users(self) -> set[str]:
        """Return the users with jobs of this site that are not over."""
        marks = ", ".join("?" * len(ACTIVE))
        query = f'SELECT DISTINCT "user" FROM jobs WHERE status IN ({marks}) AND site = ?'
        return {user for (user,) in self.read(query, (*ACTIVE, self.site))}

    def counts(self) -> dict[str, int]:
        """Return the number of jobs per status."""
        return dict(self.read("SELECT status, count(*) FROM jobs GROUP BY status"))

    def backends(self) -> list[str]:
        """Return the names of the backends that jobs have used."""
        return [name for (name,) in self.read("SELECT DISTINCT backend FROM jobs ORDER BY backend")]

    def job(self, id: str) -> Job:
        """Return the job with this id; raise NoJobError if there is none."""
        found = self.rows(Job, f"SELECT {_JOB} FROM jobs WHERE id = ?", (id,))
        if not found:
            raise NoJobError(id)
        return found[0]

    def find(self, text: str) -> Job:
        """Return the job with this id, a unique beginning of an id, or a unique name."""
        query = f"SELECT {_JOB} FROM jobs WHERE id = ?1 OR name = ?1 OR substr(id, 1, length(?1)) = ?1"
        found = self.rows(Job, query, (text,))
        exact = [job for job in found if job.id == text] or found
        if len(exact) > 1:
            ids = ", ".join(job.id for job in exact[:8])
            raise UserError(f"{len(exact)} jobs match {text!r}: give one of the ids {ids}", param="JOB")
        return exact[0] if exact else self.job(text)

    def spec(self, id: str) -> Spec:
        """Return the spec of a job."""
        from dovetail.jobs.spec import from_text

        return from_text(self._spec_text(id))

    def _spec_text(self, id: str) -> str:
        found = self.read("SELECT text FROM specs WHERE job = ?", (id,))
        if not found:
            raise NoJobError(id)
        return found[0][0]

    @property
    def snapshots(self) -> Path:
        """Return the folder of this user's code archives: code that others could write would run as this user."""
        shared = files.has_group(self.root)
        return self.root / (f"snapshots.{self.user}" if shared else "snapshots")

    def change_spec(self, id: str, spec: Spec) -> None:
        """Replace the spec of a job of this user."""
        from dovetail.jobs.spec import to_text

        self._write_request(id, to_text(spec), self.job(id).snapshot)
        with self.transaction() as db:
            db.execute("UPDATE specs SET text = ? WHERE job = ?", (to_text(spec), id))

    def change(self, id: str, **columns: Any) -> None:
        """Change columns of a job."""
        names = ", ".join(f"{name} = ?" for name in (*columns, "changed"))
        with self.transaction() as db:
            db.execute(f"UPDATE jobs SET {names} WHERE id = ?", (*columns.values(), time.time(), id))

    def remove(self, id: str) -> None:
        """Remove a job from all tables."""
        with self.transaction() as db:
            db.execute("DELETE FROM jobs WHERE id = ?", (id,))
            for table in ("specs", "attempts", "intents", "events"):
                db.execute(f"DELETE FROM {table} WHERE job = ?", (id,))

    # --- folders and requests -----------------------------------------------------------------------------------------

    def home(self, id: str) -> Path:
        """Return the folder of a job."""
        if not (id.isascii() and id.isalnum()):  # another user may have written the row
            raise UserError(f"a job's id must be letters and digits, got {id!r}", param="JOB")
        return self.root / "jobs" / id

    def make_home(self, id: str) -> Path:
        """Make the folder of a job, which in a shared folder of jobs only its user may write."""
        home = self.home(id)
        files.make_folder(home.parent, files.EACH)
        files.make_folder(home, files.OWN)
        return home

    def where(self, job: Job) -> str:
        """Return the job's folder; with its machine if it is at another site (only Postgres has several)."""
        return str(self.home(job.id)) if job.site == self.site else f"{job.site.rpartition(' ')[0]}/jobs/{job.id}"

    def refuse_elsewhere(self, job: Job, what: str) -> None:
        """Raise UserError if the job's files are at another site, or this user may not read them."""
        if job.site != self.site:
            raise UserError(
                f"job {job.id} was created at {job.site.rpartition(' ')[0]}: {what} there", code="other_site"
            )
        home = self.home(job.id)
        if home.exists() and not os.access(home, os.R_OK | os.X_OK):
            raise NotPermittedError(
                f"only {job.user} may read the files of job {job.id}: {job.user} runs `chmod -R g+rX {home}`"
            )

    def _write_request(self, id: str, spec: str, snapshot: str) -> None:
        files.write_text(self.make_home(id) / REQUEST_FILE, _request(spec, snapshot))

    def check_request(self, job: Job) -> None:
        """Raise UserError if other users can write the store and this user did not request this spec and code."""
        if not (files.database_url() or files.has_group(self.root)):
            return
        home = self.home(job.id)
        try:
            check_own_folder(home)
            found = read_own(home / REQUEST_FILE).decode()
        except OSError as error:
            raise UserError(
                f"there is no {REQUEST_FILE} of {self.user} that requests this job ({error}), so it may be another "
                "user's and is not run: create it again if it is yours",
                code="not_requested",
            ) from None
        if found != _request(self._spec_text(job.id), job.snapshot):
            raise UserError(
                f"the spec in the table of jobs differs from the one that {self.user} requested in "
                f"{home / REQUEST_FILE}, so the job is not run: create it again",
                code="not_requested",
            )

    # --- attempts -----------------------------------------------------------------------------------------------------

    def attempts(self, id: str) -> list[AttemptRow]:
        """Return all attempts of a job, oldest first."""
        return self.rows(AttemptRow, f"SELECT {_ATTEMPT} FROM attempts WHERE job = ? ORDER BY number", (id,))

    def last(self, id: str) -> AttemptRow | None:
        """Return the last attempt of a job."""
        query = f"SELECT {_ATTEMPT} FROM attempts WHERE job = ? ORDER BY number DESC LIMIT 1"
        found = self.rows(AttemptRow, query, (id,))
        return found[0] if found else None

    def handles(self, backend: str) -> dict[str, str]:
        """Return the handle of each job's last attempt, by the job's id."""
        query = "SELECT a.job, a.handle FROM attempts a JOIN jobs j ON j.id = a.job AND j.attempts = a.number "
        return dict(self.read(query + "WHERE j.backend = ?", (backend,)))

    def live(self) -> list[AttemptRow]:
        """Return the attempts for which a backend may hold something."""
        return self.rows(AttemptRow, f"SELECT {_ATTEMPT} FROM attempts WHERE phase != 'gone'")

    def begin(self, id: str, zone: str, accelerator: str, exclude: Sequence[str] = ()) -> AttemptRow:
        """Add the next attempt with the intent to create it, before the backend is called."""
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

    def attempt(self, job: Job, row: AttemptRow, spec: Spec | None = None) -> Attempt:
        """Return the attempt as a backend receives it; `spec` if it has been read already."""
        own = dataclasses.replace(spec or self.spec(job.id), accelerator=row.accelerator)
        exclude = tuple(host for host in row.exclude.split(",") if host)
        home = self.home(job.id)
        return Attempt(job.id, row.number, own, home, self.owner, row.zone, row.handle, exclude, job.snapshot)

    def change_attempt(self, id: str, number: int, **columns: Any) -> None:
        """Change columns of an attempt."""
        names = ", ".join(f"{name} = ?" for name in columns)
        with self.transaction() as db:
            db.execute(f"UPDATE attempts SET {names} WHERE job = ? AND number = ?", (*columns.values(), id, number))

    # --- intents and events -------------------------------------------------------------------------------------------

    def intend(self, id: str, number: int, verb: str) -> None:
        """Record a call that is about to be made; an equal open intent is kept."""
        with self.transaction() as db:
            db.execute(
                "INSERT INTO intents (job, number, verb, made) SELECT ?1, ?2, ?3, ?4 WHERE NOT EXISTS "
                "(SELECT 1 FROM intents WHERE job = ?1 AND number = ?2 AND verb = ?3 AND done IS NULL)",
                (id, number, verb, time.time()),
            )
            self.note(id, number, f"to {verb}")

    def settle(self, id: str, number: int, verb: str, detail: str = "") -> None:
        """Close an intent: the call was made."""
        with self.transaction() as db:
            db.execute(
                "UPDATE intents SET done = ?, detail = ? WHERE job = ? AND number = ? AND verb = ? AND done IS NULL",
                (time.time(), detail, id, number, verb),
            )

    def open_intents(self) -> list[tuple[str, int, str]]:
        """Return (job, attempt, verb) of the calls that may not have been made."""
        return self.read("SELECT job, number, verb FROM intents WHERE done IS NULL ORDER BY id")

    def note(self, id: str, number: int, what: str) -> None:
        """Add a line to a job's history."""
        with self.transaction() as db:
            db.execute(
                "INSERT INTO events (job, number, at, what) VALUES (?, ?, ?, ?)", (id, number, time.time(), what)
            )

    def events(self, id: str) -> list[Event]:
        """Return a job's history, oldest first."""
        return self.rows(Event, "SELECT job, number, at, what FROM events WHERE job = ? ORDER BY id", (id,))

    # --- hosts in quarantine ------------------------------------------------------------------------------------------

    def quarantine(self, backend: str, host: str, job: str, reason: str) -> None:
        """Exclude a host from further attempts."""
        with self.transaction() as db:
            values = (backend, host, job, time.time(), reason)
            db.execute("INSERT INTO quarantine VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", values)

    def quarantined(self, backend: str) -> list[str]:
        """Return the excluded hosts of a backend."""
        query = "SELECT host FROM quarantine WHERE backend = ? ORDER BY host"
        return [host for (host,) in self.read(query, (backend,))]

    def release(self, host: str) -> int:
        """Remove a host from quarantine; return the number of entries."""
        with self.transaction() as db:
            return db.execute("DELETE FROM quarantine WHERE host = ?", (host,)).rowcount


def _request(spec: str, snapshot: str) -> str:
    return f"# code: {snapshot or 'none'}\n{spec}"


def _prepare(root: Path) -> None:
    """Make the folder and repair the modes in it; raise NotPermittedError if this user cannot use it."""
    names = (*FOLDERS, *database.FILES)
    try:
        files.make_folder(root)
    except PermissionError as error:
        raise NotPermittedError(
            f"the folder of jobs, {root}, cannot be used: {error}; set DOVETAIL_JOBS to a folder that you may write",
            param="DOVETAIL_JOBS",
        ) from None
    files.repair_modes(root, (*names, "snapshots", *SUPERVISOR))
    files.check_access(root, names)


def _database(root: Path) -> Database:
    """Return the database that $DOVETAIL_JOBS names."""
    url = files.database_url()
    return Postgres(url, root) if url else Sqlite(root)
