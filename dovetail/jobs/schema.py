"""The tables of the store, and how an older file comes to have them."""

from __future__ import annotations

import sqlite3

VERSION = 1

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, user TEXT NOT NULL, backend TEXT NOT NULL,
    accelerator TEXT NOT NULL, status TEXT NOT NULL, wanted TEXT NOT NULL DEFAULT 'run',
    detail TEXT NOT NULL DEFAULT '', zone TEXT NOT NULL DEFAULT '', host TEXT NOT NULL DEFAULT '',
    snapshot TEXT NOT NULL DEFAULT '', created REAL NOT NULL, changed REAL NOT NULL, ended REAL,
    not_before REAL NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0,
    preemptions INTEGER NOT NULL DEFAULT 0, faults INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0, in_a_row INTEGER NOT NULL DEFAULT 0,
    place INTEGER NOT NULL DEFAULT 0, seconds REAL NOT NULL DEFAULT 0, dollars REAL NOT NULL DEFAULT 0,
    resumed INTEGER NOT NULL DEFAULT 0);
CREATE INDEX jobs_status ON jobs (status);
CREATE INDEX jobs_created ON jobs (created);
CREATE TABLE specs (job TEXT PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE attempts (
    job TEXT NOT NULL, number INTEGER NOT NULL, phase TEXT NOT NULL, state TEXT NOT NULL DEFAULT '',
    detail TEXT NOT NULL DEFAULT '', zone TEXT NOT NULL DEFAULT '', accelerator TEXT NOT NULL DEFAULT '',
    handle TEXT NOT NULL DEFAULT '', hosts TEXT NOT NULL DEFAULT '', exclude TEXT NOT NULL DEFAULT '',
    outcome TEXT NOT NULL DEFAULT '', exit_code INTEGER, failed_rank INTEGER, created REAL NOT NULL,
    started REAL, ran REAL NOT NULL DEFAULT 0, ended REAL, stop_sent REAL, absent_since REAL,
    look_at REAL NOT NULL DEFAULT 0, misses INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (job, number));
CREATE TABLE intents (
    id INTEGER PRIMARY KEY, job TEXT NOT NULL, number INTEGER NOT NULL, verb TEXT NOT NULL, made REAL NOT NULL,
    done REAL, detail TEXT NOT NULL DEFAULT '');
CREATE INDEX intents_open ON intents (job, number) WHERE done IS NULL;
CREATE TABLE events (
    id INTEGER PRIMARY KEY, job TEXT NOT NULL, number INTEGER NOT NULL, at REAL NOT NULL, what TEXT NOT NULL);
CREATE INDEX events_job ON events (job);
CREATE TABLE quarantine (
    backend TEXT NOT NULL, host TEXT NOT NULL, job TEXT NOT NULL, at REAL NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY (backend, host));
CREATE TABLE tasks (
    id INTEGER PRIMARY KEY, queue TEXT NOT NULL, name TEXT NOT NULL, command TEXT NOT NULL,
    zones TEXT NOT NULL DEFAULT '', status TEXT NOT NULL DEFAULT 'ready', worker TEXT NOT NULL DEFAULT '',
    claim INTEGER NOT NULL DEFAULT 0, lease REAL NOT NULL DEFAULT 0, tries INTEGER NOT NULL DEFAULT 0,
    losses INTEGER NOT NULL DEFAULT 0, retries INTEGER NOT NULL DEFAULT 0, exit_code INTEGER,
    detail TEXT NOT NULL DEFAULT '', created REAL NOT NULL, started REAL, ended REAL, UNIQUE (queue, name));
CREATE INDEX tasks_ready ON tasks (queue, status);
CREATE TABLE needs (task INTEGER NOT NULL, needs INTEGER NOT NULL, PRIMARY KEY (task, needs));
"""
# version -> the statements that lead from it to the next
STEPS: dict[int, str] = {}


def prepare(connection: sqlite3.Connection, owner: str) -> None:
    """Make the tables, or bring older ones up to date; refuse those of a newer dovetail."""
    if connection.execute("PRAGMA user_version").fetchone()[0] == VERSION:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        if found > VERSION:
            raise ValueError(
                f"the table of jobs was written by a newer dovetail (schema {found}, this one knows {VERSION}): upgrade"
            )
        if found == 0:
            _run(connection, TABLES)
            connection.execute("INSERT INTO meta VALUES ('owner', ?)", (owner,))
        for version in range(max(found, 1), VERSION):
            _run(connection, STEPS[version])
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _run(connection: sqlite3.Connection, statements: str) -> None:
    """executescript would commit what is under way."""
    for statement in statements.split(";"):
        if statement.strip():
            connection.execute(statement)
