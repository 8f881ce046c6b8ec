"""The tables of jobs: a SQLite file in the folder of jobs, or a Postgres that a team shares.

Statements are written for SQLite (`?`, or `?1` if a value is used twice), and Postgres translates them. In the
tables `user` is quoted, because Postgres has a function of that name, and numbers are FLOAT, because REAL has 6 digits
there.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import re
import secrets
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from dovetail.core.errors import FileError, MissingPackageError, UserError
from dovetail.jobs import files

FILE = "jobs.sqlite"
FILES = (FILE, f"{FILE}-wal", f"{FILE}-shm")  # SQLite gives the others the mode of the first
WAIT_S = 30  # for another writer

VERSION = 2
TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, "user" TEXT NOT NULL, backend TEXT NOT NULL,
    accelerator TEXT NOT NULL, status TEXT NOT NULL, wanted TEXT NOT NULL DEFAULT 'run',
    detail TEXT NOT NULL DEFAULT '', zone TEXT NOT NULL DEFAULT '', host TEXT NOT NULL DEFAULT '',
    snapshot TEXT NOT NULL DEFAULT '', created FLOAT NOT NULL, changed FLOAT NOT NULL, ended FLOAT,
    not_before FLOAT NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0,
    preemptions INTEGER NOT NULL DEFAULT 0, faults INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0, in_a_row INTEGER NOT NULL DEFAULT 0,
    place INTEGER NOT NULL DEFAULT 0, seconds FLOAT NOT NULL DEFAULT 0, dollars FLOAT NOT NULL DEFAULT 0,
    resumed INTEGER NOT NULL DEFAULT 0, site TEXT NOT NULL DEFAULT '');
CREATE INDEX jobs_status ON jobs (status);
CREATE INDEX jobs_created ON jobs (created);
CREATE TABLE specs (job TEXT PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE attempts (
    job TEXT NOT NULL, number INTEGER NOT NULL, phase TEXT NOT NULL, state TEXT NOT NULL DEFAULT '',
    detail TEXT NOT NULL DEFAULT '', zone TEXT NOT NULL DEFAULT '', accelerator TEXT NOT NULL DEFAULT '',
    handle TEXT NOT NULL DEFAULT '', hosts TEXT NOT NULL DEFAULT '', exclude TEXT NOT NULL DEFAULT '',
    outcome TEXT NOT NULL DEFAULT '', exit_code INTEGER, failed_rank INTEGER, created FLOAT NOT NULL,
    started FLOAT, ran FLOAT NOT NULL DEFAULT 0, ended FLOAT, stop_sent FLOAT, absent_since FLOAT,
    look_at FLOAT NOT NULL DEFAULT 0, misses INTEGER NOT NULL DEFAULT 0,
    restarts INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (job, number));
CREATE TABLE intents (
    id INTEGER PRIMARY KEY, job TEXT NOT NULL, number INTEGER NOT NULL, verb TEXT NOT NULL, made FLOAT NOT NULL,
    done FLOAT, detail TEXT NOT NULL DEFAULT '');
CREATE INDEX intents_open ON intents (job, number) WHERE done IS NULL;
CREATE TABLE events (
    id INTEGER PRIMARY KEY, job TEXT NOT NULL, number INTEGER NOT NULL, at FLOAT NOT NULL, what TEXT NOT NULL);
CREATE INDEX events_job ON events (job);
CREATE TABLE quarantine (
    backend TEXT NOT NULL, host TEXT NOT NULL, job TEXT NOT NULL, at FLOAT NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY (backend, host));
CREATE TABLE tasks (
    id INTEGER PRIMARY KEY, queue TEXT NOT NULL, name TEXT NOT NULL, command TEXT NOT NULL,
    zones TEXT NOT NULL DEFAULT '', status TEXT NOT NULL DEFAULT 'ready', worker TEXT NOT NULL DEFAULT '',
    claim INTEGER NOT NULL DEFAULT 0, lease FLOAT NOT NULL DEFAULT 0, tries INTEGER NOT NULL DEFAULT 0,
    losses INTEGER NOT NULL DEFAULT 0, retries INTEGER NOT NULL DEFAULT 0, exit_code INTEGER,
    detail TEXT NOT NULL DEFAULT '', created FLOAT NOT NULL, started FLOAT, ended FLOAT, UNIQUE (queue, name));
CREATE INDEX tasks_ready ON tasks (queue, status);
CREATE TABLE needs (task INTEGER NOT NULL, needs INTEGER NOT NULL, PRIMARY KEY (task, needs));
"""
# version -> the statements that migrate the tables to the next version
STEPS: dict[int, str] = {
    1: """
ALTER TABLE jobs ADD COLUMN site TEXT NOT NULL DEFAULT '';
ALTER TABLE attempts ADD COLUMN restarts INTEGER NOT NULL DEFAULT 0
""",
}


class DatabaseUnavailableError(FileError, ConnectionError):
    """Report that the database server does not answer; a later call may succeed."""


class Cursor(Protocol):
    """Define the part of a database cursor that the store uses."""

    @property
    def rowcount(self) -> int:
        """Return the number of rows that the statement changed."""
        ...

    def fetchone(self) -> Any:
        """Return the next row; None after the last."""
        ...

    def fetchall(self) -> list[Any]:
        """Return the remaining rows."""
        ...

    def __iter__(self) -> Iterator[Any]: ...


class DatabaseConnection(Protocol):
    """Define a connection with the interface of sqlite3. A lost server raises DatabaseUnavailableError."""

    @property
    def in_transaction(self) -> bool:
        """Return whether a transaction is open."""
        ...

    def execute(self, query: str, values: Sequence[Any] = (), /) -> Cursor:
        """Execute one statement."""
        ...

    def executemany(self, query: str, values: Sequence[Sequence[Any]], /) -> Any:
        """Execute one statement per row of values."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class Database(Protocol):
    """Open connections and manage their transactions.

    `site` identifies the folder of jobs among those that use the same tables.
    """

    site: str

    def connect(self) -> DatabaseConnection:
        """Open a connection."""
        ...

    def begin(self, connection: DatabaseConnection) -> None:
        """Begin a transaction that excludes all other writers."""
        ...

    def version(self, connection: DatabaseConnection) -> int:
        """Return the version of the tables; 0 if there are none."""
        ...

    def set_version(self, connection: DatabaseConnection, version: int) -> None:
        """Record the version of the tables."""
        ...

    def is_usable(self, connection: DatabaseConnection) -> bool:
        """Return whether the connection may be used again."""
        ...


# --- SQLite -----------------------------------------------------------------------------------------------------------


class Sqlite:
    """Use one SQLite file, which belongs to one site: its own folder."""

    site = ""

    def __init__(self, root: Path) -> None:
        self._root = root

    def connect(self) -> DatabaseConnection:
        """Open the file, and create it if it does not exist."""
        files.create_file(self._root / FILE)
        made = sqlite3.connect(self._root / FILE, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
        _set_journal(made, "DELETE" if files.is_network_folder(self._root) else "WAL")
        made.execute("PRAGMA synchronous = FULL")  # an intent must survive a power failure
        return made

    def begin(self, connection: DatabaseConnection) -> None:
        """Begin a transaction that excludes all other writers."""
        connection.execute("BEGIN IMMEDIATE")

    def version(self, connection: DatabaseConnection) -> int:
        """Return the version of the tables; 0 if there are none."""
        return connection.execute("PRAGMA user_version").fetchone()[0]

    def set_version(self, connection: DatabaseConnection, version: int) -> None:
        """Record the version of the tables."""
        connection.execute(f"PRAGMA user_version = {version}")

    def is_usable(self, connection: DatabaseConnection) -> bool:
        """Return True: a file does not lose connections."""
        return True


def _set_journal(connection: DatabaseConnection, wanted: str) -> None:
    """Set the journal mode, with retries: SQLite's timeout does not apply while another process changes it."""
    until = time.monotonic() + WAIT_S
    while connection.execute("PRAGMA journal_mode").fetchone()[0].upper() != wanted:
        try:
            connection.execute(f"PRAGMA journal_mode = {wanted}")
        except sqlite3.OperationalError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def prepare(database: Database, connection: DatabaseConnection, owner: str) -> None:
    """Create the tables, or migrate older ones; raise UserError for those of a newer dovetail."""
    if database.version(connection) == VERSION:
        return
    database.begin(connection)
    try:
        found = database.version(connection)
        if found > VERSION:
            raise UserError(
                f"the table of jobs was written by a newer dovetail (schema {found}, this one supports {VERSION}): "
                "upgrade dovetail",
                code="newer_schema",
            )
        if found == 0:
            _run(connection, TABLES)
            connection.execute("INSERT INTO meta VALUES ('owner', ?)", (owner,))
        for version in range(found, VERSION) if found else ():
            _run(connection, STEPS[version])
        database.set_version(connection, VERSION)
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _run(connection: DatabaseConnection, statements: str) -> None:
    """Execute statements one by one: executescript would commit the open transaction."""
    for statement in statements.split(";"):
        if statement.strip():
            connection.execute(statement)


# --- Postgres ---------------------------------------------------------------------------------------------------------

CONNECT_S = 10
LOCK = 0x646F7665  # the advisory lock of writers: an arbitrary number
SITE = "site"
# One @ at most, before the host: a part of a password with an unescaped @ would be shown as the host's name.
URL = re.compile(r"postgres(ql)?://([^@/?#\s]*@)?[^@/?#\s]*(/[^@/?#\s]*)?(\?[^@#\s]*)?")
# Without these, a machine that vanishes in the middle of a transaction holds the lock until TCP gives up.
SESSION = f"""SET lock_timeout = '{WAIT_S}s'; SET idle_in_transaction_session_timeout = '60s';
SET tcp_keepalives_idle = 20; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3"""
KEEPALIVE = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}


class Postgres:
    """Use the database of a Postgres URL, for the folder of jobs `root`. Needs psycopg (the extra `postgres`).

    Files (code, logs, runs) stay in folders, one per machine or one that several machines share. Each folder is a site
    with a supervisor for the jobs that were created there; the tables hold the jobs of all sites. Error messages never
    contain the password of the URL.
    """

    def __init__(self, url: str, root: Path) -> None:
        if not URL.fullmatch(url):
            raise UserError(
                "`DOVETAIL_JOBS` must be a folder or postgresql://USER:PASSWORD@HOST:PORT/DATABASE, got another URL: "
                "in a password, @ / ? # and % are written %40 %2F %3F %23 and %25",
                param="DOVETAIL_JOBS",
            )
        self._url, self.site = url, _site(root)

    def connect(self) -> DatabaseConnection:
        """Open a connection."""
        psycopg = _psycopg()
        with _translated_errors(self._url):
            try:
                made = psycopg.connect(
                    self._url, autocommit=True, cursor_factory=psycopg.ClientCursor, connect_timeout=CONNECT_S,
                    application_name=f"dovetail {platform.node()}", **KEEPALIVE,
                )  # fmt: skip
            except psycopg.ProgrammingError as error:
                raise UserError(
                    f"the Postgres URL of DOVETAIL_JOBS cannot be used: {_line(error, self._url)}",
                    param="DOVETAIL_JOBS",
                ) from None
            made.execute(SESSION)
        return _Connection(made, self._url)

    def begin(self, connection: DatabaseConnection) -> None:
        """Begin a transaction that excludes all other writers."""
        connection.execute("BEGIN")
        connection.execute(f"SELECT pg_advisory_xact_lock({LOCK})")

    def version(self, connection: DatabaseConnection) -> int:
        """Return the version of the tables; 0 if there are none."""
        # to_regclass would answer from a cache that may be older than the lock
        there = "SELECT 1 FROM pg_catalog.pg_tables WHERE tablename = 'meta' AND schemaname = current_schema()"
        if connection.execute(there).fetchone() is None:
            return 0
        found = connection.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
        return int(found[0]) if found else 0

    def set_version(self, connection: DatabaseConnection, version: int) -> None:
        """Record the version of the tables."""
        query = "INSERT INTO meta VALUES ('version', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        connection.execute(query, (str(version),))

    def is_usable(self, connection: DatabaseConnection) -> bool:
        """Return whether the connection is still open."""
        return not connection.closed  # pyright: ignore[reportAttributeAccessIssue]


class _Connection:
    """Give a psycopg connection the interface of sqlite3."""

    def __init__(self, made: Any, url: str) -> None:
        self._made, self._url = made, url

    @property
    def in_transaction(self) -> bool:
        return self._made.info.transaction_status != _psycopg().pq.TransactionStatus.IDLE

    @property
    def closed(self) -> bool:
        return self._made.closed or self._made.broken

    def execute(self, query: str, values: Sequence[Any] = (), /) -> Cursor:
        with _translated_errors(self._url):
            return self._made.execute(*_statement(query, values))

    def executemany(self, query: str, values: Sequence[Sequence[Any]], /) -> None:
        with _translated_errors(self._url), self._made.cursor() as cursor:
            cursor.executemany(_translated(query), values)

    def close(self) -> None:
        self._made.close()


def _statement(query: str, values: Sequence[Any]) -> tuple[str, Any]:
    if not values:
        return _translated(query), None
    # Postgres refuses NUL in text, and the last line of a log may contain one.
    values = [value.replace("\0", "") if isinstance(value, str) else value for value in values]
    numbered = {f"v{n}": value for n, value in enumerate(values, 1)}
    return _translated(query), numbered if "?1" in query else values


@functools.lru_cache(256)
def _translated(query: str) -> str:
    """Translate placeholders and automatic ids."""
    query = re.sub(r"\?(\d*)", lambda found: f"%(v{found[1]})s" if found[1] else "%s", query)
    return query.replace("id INTEGER PRIMARY KEY", "id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY")


def _site(root: Path) -> str:
    """Return the folder's name in the tables, made once: machines that share the folder are one site."""
    path = root / SITE
    files.create_file(path, f"{platform.node()}:{root.resolve()} {secrets.token_hex(4)}")
    return path.read_text().strip()


@contextlib.contextmanager
def _translated_errors(url: str) -> Iterator[None]:
    """Turn an error of the server or the network into one line without the password."""
    psycopg = _psycopg()
    try:
        yield
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        raise DatabaseUnavailableError(
            f"the Postgres server of DOVETAIL_JOBS is not available: {_line(error, url)}", param="DOVETAIL_JOBS"
        ) from None


def _line(error: Exception, url: str) -> str:
    """Return the error as one line without the URL and its passwords."""
    text = " ".join(str(error).split()).replace(url, "the URL")
    found = [url.partition("//")[2].rpartition("@")[0].partition(":")[2], *re.findall(r"password=([^&]*)", url)]
    for one in filter(None, found):
        text = text.replace(one, "...")
    return text[:300]


def _psycopg() -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise MissingPackageError(
            f"a Postgres URL needs psycopg ({error}): pip install 'dovetail[postgres]'", param="DOVETAIL_JOBS"
        ) from error
    return psycopg
