"""Run steps of `dovetail job` as several Unix users: python as_user.py UMASK, as root.

Reads turns [[uid, gid, [words, ...]], ...] as JSON from stdin and writes what each step printed as JSON to stdout.
A gid of 0 means no group. Root's words are commands. Other users' words are those of `dovetail job`, or
`! COMMAND ...` (its exit code and output), `sql STATEMENT` (in the tables), or `tick` (of a supervisor).
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile

from typer.testing import CliRunner

from dovetail.cli.job import app
from dovetail.jobs import presence
from dovetail.jobs.backends import chooser
from dovetail.jobs.files import jobs_home
from dovetail.jobs.store import JobStore
from dovetail.jobs.supervisor import JobSupervisor


def call(*words: str) -> str:
    if words[0] == "!":
        done = subprocess.run(words[1:], capture_output=True, text=True)
        return f"{done.returncode} {done.stdout}{done.stderr}"
    if words[0] == "sql":
        with contextlib.closing(sqlite3.connect(jobs_home() / "jobs.sqlite")) as table, table:
            return str(table.execute(words[1]).rowcount)
    if words[0] == "tick":
        return tick()
    done = CliRunner().invoke(app, words)
    return done.output or f"{type(done.exception).__name__}: {done.exception}"


def tick() -> str:
    """A supervisor that looks at each job until none of them changes."""
    store = JobStore(jobs_home())
    supervisor = JobSupervisor(store, chooser(store.root, store.owner), looks=0.0)
    for _ in range(10):
        supervisor.tick()
    store.close()
    return ""


def warm_up() -> None:
    """Python may lie where only root can read: all that the steps load is loaded before."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DOVETAIL_JOBS"] = f"{folder}/jobs"
        made = json.loads(call("create", "name=x", "command=true", "--json"))["id"]
        for words in (("list",), ("show", made), ("logs", made), ("queue", "add", "q", "true"), ("queue", "work", "q")):
            call(*words)
        call("cancel", made)
        call("clean", "--yes")
        call("tick")


def turn(uid: int, gid: int, umask: int, steps: list[list[str]]) -> list[str]:
    """In a child, which becomes the user."""
    if uid == 0:
        return [subprocess.run(words, check=True, capture_output=True, text=True).stdout for words in steps]
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            os.setgroups([gid] if gid else [])
            os.setgid(uid)
            os.setuid(uid)
            os.umask(umask)
            os.write(writer, json.dumps([call(*words) for words in steps]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        found = answer.read()
    os.wait()
    return json.loads(found)


def main(umask: str) -> None:
    presence.ensure = lambda root: None
    wanted, turns = os.environ["DOVETAIL_JOBS"], json.load(sys.stdin)
    warm_up()
    os.environ["DOVETAIL_JOBS"] = wanted
    print(json.dumps([turn(uid, gid, int(umask, 8), steps) for uid, gid, steps in turns]))


if __name__ == "__main__":
    main(sys.argv[1])
