"""The tables of jobs in Postgres: what of it differs from SQLite. Needs psycopg (the extra `postgres`).

Files (code, logs, runs) stay in folders: each machine's own, or one that several share. A folder is a site, and has a
supervisor for the jobs that were created there; the tables show everybody's. The URL's password appears in no message.
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
from dovetail.jobs import modes
from dovetail.jobs.database import WAIT_S, Connection, Cursor

CONNECT_S = 10
LOCK = 0x646F7665  # the advisory lock of writers: any number that others are unlikely to take
SITE = "site"
# No @ but the one before the host: what comes of a password that is written otherwise would be shown as a host's name.
URL = re.compile(r"postgres(ql)?://([^@/?#\s]*@)?[^@/?#\s]*(/[^@/?#\s]*)?(\?[^@#\s]*)?")
# A machine that vanishes in the middle of a transaction would hold the lock for as long as TCP hopes.
SESSION = f"""SET lock_timeout = '{WAIT_S}s'; SET idle_in_transaction_session_timeout = '60s';
SET tcp_keepalives_idle = 20; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3"""

SILENCE = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}


class Postgres:
    def __init__(self, url: str, root: Path) -> None:
        if not URL.fullmatch(url):
            raise UserError(
                "DOVETAIL_JOBS must be a folder or postgresql://USER:PASSWORD@HOST:PORT/DATABASE, and what was given "
                "reads otherwise: in a password, @ / ? # and % are written %40 %2F %3F %23 and %25"
            )
        self._url, self.site = url, _site(root)

    def connect(self) -> Connection:
        psycopg = _psycopg()
        with _told(self._url):
            try:
                made = psycopg.connect(
                    self._url, autocommit=True, cursor_factory=psycopg.ClientCursor, connect_timeout=CONNECT_S,
                    application_name=f"dovetail {platform.node()}", **SILENCE,
                )  # fmt: skip
            except psycopg.ProgrammingError as error:
                raise UserError(
                    f"the Postgres URL of DOVETAIL_JOBS cannot be used: {_line(error, self._url)}"
                ) from None
            made.execute(SESSION)
        return _Connection(made, self._url)

    def begin(self, connection: Connection) -> None:
        connection.execute("BEGIN")
        connection.execute(f"SELECT pg_advisory_xact_lock({LOCK})")

    def version(self, connection: Connection) -> int:
        # to_regclass would answer from a cache that may be older than the lock
        there = "SELECT 1 FROM pg_catalog.pg_tables WHERE tablename = 'meta' AND schemaname = current_schema()"
        if connection.execute(there).fetchone() is None:
            return 0
        found = connection.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
        return int(found[0]) if found else 0

    def set_version(self, connection: Connection, version: int) -> None:
        query = "INSERT INTO meta VALUES ('version', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        connection.execute(query, (str(version),))

    def is_usable(self, connection: Connection) -> bool:
        return not connection.closed  # pyright: ignore[reportAttributeAccessIssue]


class _Connection:
    """A connection of psycopg that is spoken to as SQLite's are."""

    def __init__(self, made: Any, url: str) -> None:
        self._made, self._url = made, url

    @property
    def in_transaction(self) -> bool:
        return self._made.info.transaction_status != _psycopg().pq.TransactionStatus.IDLE

    @property
    def closed(self) -> bool:
        return self._made.closed or self._made.broken

    def execute(self, query: str, values: Sequence[Any] = (), /) -> Cursor:
        with _told(self._url):
            return self._made.execute(*_statement(query, values))

    def executemany(self, query: str, values: Sequence[Sequence[Any]], /) -> None:
        with _told(self._url), self._made.cursor() as cursor:
            cursor.executemany(_translated(query), values)

    def close(self) -> None:
        self._made.close()


def _statement(query: str, values: Sequence[Any]) -> tuple[str, Any]:
    if not values:
        return _translated(query), None
    # a log's last line may hold what no text of Postgres can
    values = [value.replace("\0", "") if isinstance(value, str) else value for value in values]
    numbered = {f"v{n}": value for n, value in enumerate(values, 1)}
    return _translated(query), numbered if "?1" in query else values


@functools.lru_cache(256)
def _translated(query: str) -> str:
    """Placeholders, and a column that counts by itself."""
    query = re.sub(r"\?(\d*)", lambda found: f"%(v{found[1]})s" if found[1] else "%s", query)
    return query.replace("id INTEGER PRIMARY KEY", "id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY")


def _site(root: Path) -> str:
    """The folder's own name in the tables, made once: machines that share the folder are one site."""
    path = root / SITE
    modes.create(path, f"{platform.node()}:{root.resolve()} {secrets.token_hex(4)}")
    return path.read_text().strip()


@contextlib.contextmanager
def _told(url: str) -> Iterator[None]:
    """What the server or the way to it refuses, in one line without the password."""
    psycopg = _psycopg()
    try:
        yield
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        raise ConnectionError(f"the Postgres of DOVETAIL_JOBS does not serve: {_line(error, url)}") from None


def _line(error: Exception, url: str) -> str:
    """Without the URL, and without what it says of passwords."""
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
            f"a Postgres URL needs psycopg ({error}): pip install 'dovetail[postgres]'"
        ) from error
    return psycopg
