"""The database: one SQLite file with the meals, the messages and the pictures."""

from __future__ import annotations

import sqlite3
from pathlib import Path

SCHEMA = """
CREATE TABLE IF NOT EXISTS meals (
    id INTEGER PRIMARY KEY AUTOINCREMENT, day TEXT NOT NULL, time TEXT NOT NULL, food TEXT NOT NULL,
    grams REAL NOT NULL CHECK (grams > 0),
    kcal REAL NOT NULL, protein_g REAL NOT NULL, carbohydrate_g REAL NOT NULL, fat_g REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS meals_by_day ON meals (day);
CREATE TABLE IF NOT EXISTS pictures (id INTEGER PRIMARY KEY AUTOINCREMENT, jpeg BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, conversation INTEGER NOT NULL, message TEXT NOT NULL,
    picture INTEGER REFERENCES pictures
);
"""


def connect(path: Path | str) -> sqlite3.Connection:
    """Open the database, and create its tables where they are missing. Each statement commits by itself."""
    # Statements take microseconds and run on the event loop's thread; tests look at the database from another one.
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.row_factory = sqlite3.Row
    database.execute("PRAGMA foreign_keys = ON")
    database.execute("PRAGMA journal_mode = WAL")
    database.executescript(SCHEMA)
    return database
