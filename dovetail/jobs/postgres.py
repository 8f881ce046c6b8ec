"""The tables of jobs in Postgres, with the interface of SQLite (database.py). Needs psycopg (the extra `postgres`).

Files (code, logs, runs) stay in folders, one per machine or one that several machines share. Each folder is a site with
a supervisor for the jobs that were created there; the tables hold the jobs of all sites. Error messages never contain
the password of the URL.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dovetail.core.errors import MissingPackageError, UserError
from dovetail.jobs import files
from dovetail.jobs.database import WAIT_S, Cursor, DatabaseConnection, DatabaseUnavailableError

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
    """Use the database of a Postgres URL, for the folder of jobs `root`."""

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
