"""A queue of many tasks for few machines: who may run which, decided in one transaction.

A claim is a lease with a number. It is renewed by heartbeats; once it has run out the task may be claimed again, under
the next number, and whoever holds the old number can no longer say anything about it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.errors import UserError
from dovetail.jobs.store import Store

LOSSES = 100  # workers that a task may lose before it is called failed: by then it is the task that kills them


@dataclass(frozen=True)
class Task:
    id: int
    queue: str
    name: str
    command: str
    zones: str  # with commas; "": any
    status: str  # ready, running, succeeded, failed, cancelled
    worker: str
    claim: int
    lease: float
    tries: int  # ends of its own
    losses: int  # claims that ended without one
    retries: int
    exit_code: int | None
    detail: str
    created: float
    started: float | None
    ended: float | None


OVER = ("succeeded", "failed", "cancelled")
_TASK = ", ".join(Task.__dataclass_fields__)


class Tasks:
    """The tasks of one queue."""

    def __init__(self, store: Store, queue: str) -> None:
        if not queue or "/" in queue or queue.startswith("."):
            raise UserError(f"a queue's name must be fit for a folder; got {queue!r}")
        self.store, self.queue = store, queue
        self.folder = store.root / "queues" / queue

    def add(
        self, name: str, command: str, after: Sequence[str] = (), zones: Sequence[str] = (), retries: int = 0
    ) -> Task:
        """`after`: names of tasks of this queue that must have succeeded."""
        with self.store.transaction() as db:
            if self._named(name):
                raise UserError(f"queue {self.queue} has a task {name!r} already: give this one another name")
            needs = [self.named(other).id for other in after]
            db.execute(
                "INSERT INTO tasks (queue, name, command, zones, retries, created) VALUES (?, ?, ?, ?, ?, ?)",
                (self.queue, name, command, ",".join(zones), retries, time.time()),
            )
            made = self.named(name)
            db.executemany("INSERT INTO needs VALUES (?, ?)", [(made.id, other) for other in needs])
        return made

    def all(self) -> list[Task]:
        return self.store.rows(Task, f"SELECT {_TASK} FROM tasks WHERE queue = ? ORDER BY id", (self.queue,))

    def named(self, name: str) -> Task:
        found = self._named(name)
        if not found:
            raise UserError(f"queue {self.queue} has no task {name!r}")
        return found[0]

    def _named(self, name: str) -> list[Task]:
        query = f"SELECT {_TASK} FROM tasks WHERE queue = ? AND name = ?"
        return self.store.rows(Task, query, (self.queue, name))

    def claim(self, worker: str, lease: float, zone: str = "") -> Task | None:
        """The oldest task that may run here; None where there is none now."""
        now = time.time()
        with self.store.transaction() as db:
            self._expire(now)
            row = db.execute(
                "SELECT id FROM tasks t WHERE queue = ?1 AND status = 'ready' "
                # a zone is in the list if taking it out changes the list: what both databases have
                "AND (zones = '' OR replace(',' || zones || ',', ',' || ?2 || ',', '') != ',' || zones || ',') "
                "AND NOT EXISTS "
                "(SELECT 1 FROM needs n JOIN tasks o ON o.id = n.needs WHERE n.task = t.id "
                "AND o.status != 'succeeded') ORDER BY id LIMIT 1",
                (self.queue, zone),
            ).fetchone()
            if row is None:
                return None
            db.execute(
                "UPDATE tasks SET status = 'running', worker = ?, claim = claim + 1, lease = ?, started = ? "
                "WHERE id = ?",
                (worker, now + lease, now, row[0]),
            )
            return self.store.rows(Task, f"SELECT {_TASK} FROM tasks WHERE id = ?", row)[0]

    def _expire(self, now: float) -> None:
        with self.store.transaction() as db:
            db.execute(
                "UPDATE tasks SET status = CASE WHEN losses >= ?1 THEN 'failed' ELSE 'ready' END, losses = losses + 1, "
                "detail = 'lost ' || worker, worker = '' WHERE queue = ?2 AND status = 'running' AND lease < ?3",
                (LOSSES, self.queue, now),
            )
            # what needs a task that failed never runs
            db.execute(
                "UPDATE tasks SET status = 'failed', ended = ?1, "
                "detail = 'a task that it needs failed or was cancelled' "
                "WHERE queue = ?2 AND status = 'ready' AND EXISTS "
                "(SELECT 1 FROM needs n JOIN tasks o ON o.id = n.needs WHERE n.task = tasks.id "
                "AND o.status IN ('failed', 'cancelled'))",
                (now, self.queue),
            )

    def heartbeat(self, task: Task, lease: float) -> bool:
        """Whether the task is still this claim's."""
        return self._change(task, "lease = ?", time.time() + lease)

    def finish(self, task: Task, code: int, detail: str = "") -> bool:
        """False where the claim had been lost: then it is as if this had not been said."""
        if code == 0:
            return self._change(
                task, "status = 'succeeded', exit_code = 0, tries = tries + 1, detail = '', ended = ?", time.time()
            )
        return self._change(
            task, "status = CASE WHEN tries >= retries THEN 'failed' ELSE 'ready' END, tries = tries + 1, worker = '', "
            "exit_code = ?, detail = ?, ended = ?", code, detail, time.time(),
        )  # fmt: skip

    def release(self, task: Task, detail: str) -> bool:
        """Give it back unfinished: a preemption is no failure of the task."""
        return self._change(task, "status = 'ready', worker = '', losses = losses + 1, detail = ?", detail)

    def retry(self, name: str = "") -> int:
        """Make the tasks that failed ready again, or the named one if it failed or was cancelled; return how many."""
        if name and self.named(name).status not in ("failed", "cancelled"):
            raise UserError(
                f"task {name} of queue {self.queue} is {self.named(name).status}: there is nothing to retry"
            )
        which = "name = ? AND status IN ('failed', 'cancelled')" if name else "status = 'failed'"
        with self.store.transaction() as db:
            return db.execute(
                "UPDATE tasks SET status = 'ready', tries = 0, losses = 0, detail = '', ended = NULL WHERE queue = ? "
                f"AND {which}",
                (self.queue, name) if name else (self.queue,),
            ).rowcount

    def cancel(self, name: str) -> Task:
        """Take a task out of the queue. The worker that runs it finds that its claim is gone, and ends it."""
        with self.store.transaction() as db:
            task = self.named(name)
            if task.status in OVER:
                raise UserError(f"task {name} of queue {self.queue} is over already: {task.status}")
            db.execute(
                "UPDATE tasks SET status = 'cancelled', detail = 'cancelled', ended = ? WHERE id = ?",
                (time.time(), task.id),
            )
        return task

    def is_cancelled(self, task: Task) -> bool:
        return self.store.read("SELECT status FROM tasks WHERE id = ?", (task.id,)) == [("cancelled",)]

    def needs(self, task: Task) -> list[str]:
        """Return the names of the tasks that must have succeeded first."""
        query = "SELECT o.name FROM needs n JOIN tasks o ON o.id = n.needs WHERE n.task = ? ORDER BY o.id"
        return [name for (name,) in self.store.read(query, (task.id,))]

    def log(self, task: Task) -> Path:
        """Where its worker writes what it prints; with Postgres, on the worker's own machine."""
        return self.folder / str(task.id) / "log"

    def is_done(self) -> bool:
        """Whether nothing is left to run, now or later."""
        with self.store.transaction() as db:
            self._expire(time.time())
            query = "SELECT count(*) FROM tasks WHERE queue = ? AND status IN ('ready', 'running')"
            return db.execute(query, (self.queue,)).fetchone()[0] == 0

    def _change(self, task: Task, what: str, *values: object) -> bool:
        with self.store.transaction() as db:
            return bool(
                db.execute(
                    f"UPDATE tasks SET {what} WHERE id = ? AND claim = ? AND status = 'running'",
                    (*values, task.id, task.claim),
                ).rowcount
            )


def queues(store: Store) -> list[tuple[str, str, int]]:
    """(queue, status, how many)."""
    return store.read("SELECT queue, status, count(*) FROM tasks GROUP BY queue, status ORDER BY queue, status")
