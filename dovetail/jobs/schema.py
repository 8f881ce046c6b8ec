"""The tables of the store, and how older ones come to have what they lack.

SQLite and Postgres read them alike: `user` is quoted, for Postgres has a function of that name, and a number is a
FLOAT, for a REAL has 6 digits there.
"""

from __future__ import annotations

from dovetail.core.errors import UserError
from dovetail.jobs.database import Connection, Database

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
# version -> the statements that lead from it to the next
STEPS: dict[int, str] = {
    1: """
ALTER TABLE jobs ADD COLUMN site TEXT NOT NULL DEFAULT '';
ALTER TABLE attempts ADD COLUMN restarts INTEGER NOT NULL DEFAULT 0
""",
}


def prepare(database: Database, connection: Connection, owner: str) -> None:
    """Make the tables, or bring older ones up to date; refuse those of a newer dovetail."""
    if database.version(connection) == VERSION:
        return
    database.begin(connection)
    try:
        found = database.version(connection)
        if found > VERSION:
            raise UserError(
                f"the table of jobs was written by a newer dovetail (schema {found}, this one knows {VERSION}): upgrade"
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


def _run(connection: Connection, statements: str) -> None:
    """executescript would commit what is under way."""
    for statement in statements.split(";"):
        if statement.strip():
            connection.execute(statement)
