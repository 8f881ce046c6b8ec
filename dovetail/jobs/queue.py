"""A queue of many tasks for few machines: which worker may run which task, and the worker that runs them.

A claim is a numbered lease, renewed by heartbeats. Once it has run out the task may be claimed again under the next
number, and reports under the old number are ignored.

A killed worker leaves its task running. The next worker that claims the task waits for it to end and takes its result,
so that a task never runs twice at once, nor again after it has succeeded: its processes hold a lock, and its shell
writes the exit code to a file. With Postgres the next worker may not see that file; then a task ends with its worker,
and a worker that cannot renew its lease ends the task before the lease has run out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.errors import UserError
from dovetail.jobs import files
from dovetail.jobs.outcome import PREEMPTED, error_line
from dovetail.jobs.store import JobStore

LOSSES = 100  # workers that a task may lose before it fails: by then the task itself kills them
OVER = ("succeeded", "failed", "cancelled")
POLL_S = 0.05
BEAT_S = 2.0  # the longest time between two heartbeats
TAIL = 8000
# The standard input is a pipe that only the worker holds open: when it closes, the whole process group is killed.
TIED = "exec 3<&0 </dev/null; (trap '' TERM INT; cat <&3 >/dev/null; kill -s KILL -- -$$) & exec 3<&-; "
# The exit code is written to another file and renamed, so that it is complete.
RUN = 'trap : TERM; sh -c "$DOVETAIL_TASK_COMMAND"; code=$?; echo $code > "$1.part" && mv "$1.part" "$1"; exit $code'


@dataclass(frozen=True)
class QueueTask:
    """Hold one row of the table of tasks."""

    id: int
    queue: str
    name: str
    command: str
    zones: str  # separated by commas; "": any
    status: str  # ready, running, succeeded, failed, cancelled
    worker: str
    claim: int
    lease: float
    tries: int  # claims that ended with an exit code
    losses: int  # claims that ended without one
    retries: int
    exit_code: int | None
    detail: str
    created: float
    started: float | None
    ended: float | None


_TASK = ", ".join(QueueTask.__dataclass_fields__)


class TaskQueue:
    """Manage the tasks of one queue."""

    def __init__(self, store: JobStore, queue: str) -> None:
        if not queue or "/" in queue or queue.startswith("."):
            raise UserError(f"`QUEUE` must be a valid folder name, got {queue!r}", param="QUEUE")
        self.store, self.queue = store, queue
        self.folder = store.root / "queues" / queue

    def add(
        self, name: str, command: str, after: Sequence[str] = (), zones: Sequence[str] = (), retries: int = 0
    ) -> QueueTask:
        """Add a task that runs once the tasks named in `after` have succeeded."""
        with self.store.transaction() as db:
            if self._named(name):
                raise UserError(f"queue {self.queue} already has a task {name!r}: give another name", param="--name")
            needs = [self.named(other).id for other in after]
            db.execute(
                "INSERT INTO tasks (queue, name, command, zones, retries, created) VALUES (?, ?, ?, ?, ?, ?)",
                (self.queue, name, command, ",".join(zones), retries, time.time()),
            )
            made = self.named(name)
            db.executemany("INSERT INTO needs VALUES (?, ?)", [(made.id, other) for other in needs])
        return made

    def all(self) -> list[QueueTask]:
        """Return all tasks, oldest first."""
        return self.store.rows(QueueTask, f"SELECT {_TASK} FROM tasks WHERE queue = ? ORDER BY id", (self.queue,))

    def named(self, name: str) -> QueueTask:
        """Return the task of this name."""
        found = self._named(name)
        if not found:
            raise UserError(f"queue {self.queue} has no task {name!r}", param="TASK", code="no_task")
        return found[0]

    def _named(self, name: str) -> list[QueueTask]:
        query = f"SELECT {_TASK} FROM tasks WHERE queue = ? AND name = ?"
        return self.store.rows(QueueTask, query, (self.queue, name))

    def claim(self, worker: str, lease: float, zone: str = "") -> QueueTask | None:
        """Claim the oldest task that may run in this zone; None if there is none now."""
        now = time.time()
        with self.store.transaction() as db:
            self._expire(now)
            row = db.execute(
                "SELECT id FROM tasks t WHERE queue = ?1 AND status = 'ready' "
                # a zone is in the list if removing it changes the list: both databases can compute this
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
            return self.store.rows(QueueTask, f"SELECT {_TASK} FROM tasks WHERE id = ?", row)[0]

    def _expire(self, now: float) -> None:
        with self.store.transaction() as db:
            db.execute(
                "UPDATE tasks SET status = CASE WHEN losses >= ?1 THEN 'failed' ELSE 'ready' END, losses = losses + 1, "
                "detail = 'lost ' || worker, worker = '' WHERE queue = ?2 AND status = 'running' AND lease < ?3",
                (LOSSES, self.queue, now),
            )
            # a task that needs a failed one never runs
            db.execute(
                "UPDATE tasks SET status = 'failed', ended = ?1, "
                "detail = 'a task that it needs failed or was cancelled' "
                "WHERE queue = ?2 AND status = 'ready' AND EXISTS "
                "(SELECT 1 FROM needs n JOIN tasks o ON o.id = n.needs WHERE n.task = tasks.id "
                "AND o.status IN ('failed', 'cancelled'))",
                (now, self.queue),
            )

    def heartbeat(self, task: QueueTask, lease: float) -> bool:
        """Renew the lease; return whether the claim is still valid."""
        return self._change(task, "lease = ?", time.time() + lease)

    def finish(self, task: QueueTask, code: int, detail: str = "") -> bool:
        """Record the exit code; return False, and record nothing, if the claim was lost."""
        if code == 0:
            return self._change(
                task, "status = 'succeeded', exit_code = 0, tries = tries + 1, detail = '', ended = ?", time.time()
            )
        return self._change(
            task, "status = CASE WHEN tries >= retries THEN 'failed' ELSE 'ready' END, tries = tries + 1, worker = '', "
            "exit_code = ?, detail = ?, ended = ?", code, detail, time.time(),
        )  # fmt: skip

    def release(self, task: QueueTask, detail: str) -> bool:
        """Return a task unfinished, without counting a failure."""
        return self._change(task, "status = 'ready', worker = '', losses = losses + 1, detail = ?", detail)

    def retry(self, name: str = "") -> int:
        """Make the failed tasks ready again, or the named one if it failed or was cancelled; return how many."""
        if name and (status := self.named(name).status) not in ("failed", "cancelled"):
            raise UserError(f"task {name} of queue {self.queue} is {status}: there is nothing to retry", param="TASK")
        which = "name = ? AND status IN ('failed', 'cancelled')" if name else "status = 'failed'"
        with self.store.transaction() as db:
            return db.execute(
                "UPDATE tasks SET status = 'ready', tries = 0, losses = 0, detail = '', ended = NULL WHERE queue = ? "
                f"AND {which}",
                (self.queue, name) if name else (self.queue,),
            ).rowcount

    def cancel(self, name: str) -> QueueTask:
        """Cancel a task; return it as it was before. A worker that runs it loses its claim, and ends it."""
        with self.store.transaction() as db:
            task = self.named(name)
            if task.status in OVER:
                raise UserError(
                    f"task {name} of queue {self.queue} is over already: {task.status}", param="TASK", code="task_over"
                )
            db.execute(
                "UPDATE tasks SET status = 'cancelled', detail = 'cancelled', ended = ? WHERE id = ?",
                (time.time(), task.id),
            )
        return task

    def is_cancelled(self, task: QueueTask) -> bool:
        """Return whether the task was cancelled."""
        return self.store.read("SELECT status FROM tasks WHERE id = ?", (task.id,)) == [("cancelled",)]

    def needs(self, task: QueueTask) -> list[str]:
        """Return the names of the tasks that must have succeeded first."""
        query = "SELECT o.name FROM needs n JOIN tasks o ON o.id = n.needs WHERE n.task = ? ORDER BY o.id"
        return [name for (name,) in self.store.read(query, (task.id,))]

    def log(self, task: QueueTask) -> Path:
        """Return the path of a task's log; with Postgres it is on the worker's machine."""
        return self.folder / str(task.id) / "log"

    def is_done(self) -> bool:
        """Return whether no task is left to run, now or later."""
        with self.store.transaction() as db:
            self._expire(time.time())
            query = "SELECT count(*) FROM tasks WHERE queue = ? AND status IN ('ready', 'running')"
            return db.execute(query, (self.queue,)).fetchone()[0] == 0

    def _change(self, task: QueueTask, what: str, *values: object) -> bool:
        with self.store.transaction() as db:
            return bool(
                db.execute(
                    f"UPDATE tasks SET {what} WHERE id = ? AND claim = ? AND status = 'running'",
                    (*values, task.id, task.claim),
                ).rowcount
            )


def counts(store: JobStore) -> list[tuple[str, str, int]]:
    """Return (queue, status, number of tasks) of all queues."""
    return store.read("SELECT queue, status, count(*) FROM tasks GROUP BY queue, status ORDER BY queue, status")


class QueueWorker:
    """Claim tasks and run them.

    Args:
        tasks: The queue.
        zone: The zone of this worker.
        lease: Seconds without a heartbeat after which a worker counts as dead.
        grace: Seconds that a task has to save in when the worker must stop.
        name: The worker's name; the host's, the process's and a random number if not given.
    """

    def __init__(
        self, tasks: TaskQueue, zone: str = "", lease: float = 30.0, grace: float = 60.0, name: str = ""
    ) -> None:
        self.tasks, self.zone, self.lease, self.grace = tasks, zone, lease, grace
        self.name = name or f"{platform.node()}-{os.getpid()}-{secrets.token_hex(2)}"
        self.stopped = False
        self._is_tied = bool(tasks.store.site)
        self._beat = 0.0  # when the lease was last renewed

    def stop(self) -> None:
        """Stop after the current task was signalled and released; for a signal handler."""
        self.stopped = True

    def run(self, forever: bool = False) -> int:
        """Run tasks until the queue is done, or `stop`; return how many tasks this worker has finished."""
        ended = 0
        while not self.stopped:
            task, self._beat = self.tasks.claim(self.name, self.lease, self.zone), time.monotonic()
            if task is not None:
                ended += self.work(task)
            elif not forever and self.tasks.is_done():
                break
            else:
                time.sleep(POLL_S * 4)
        return ended

    def work(self, task: QueueTask) -> bool:
        """Run one claimed task; return whether it ended and its result was recorded."""
        folder = self.tasks.folder / str(task.id)
        files.make_folder(folder)
        with open(folder / "lock", "a", opener=files.opener) as lock:
            if not self._until(task, lambda: _try_lock(lock.fileno())):
                return False
            code = 0 if _has_succeeded(folder) else self._run(task, folder, lock.fileno())
        if code is None and self.tasks.is_cancelled(task):
            (folder / "exit").unlink(missing_ok=True)  # a retry must not find it
            return False
        if code is None or (self.stopped and code) or code == PREEMPTED:
            self.tasks.release(task, f"{self.name} was stopped" if self.stopped else "preempted")
            return False
        # The table before the file: otherwise a task that succeeded could run again.
        finished = self.tasks.finish(task, code, error_line(_tail(self.tasks.log(task))) if code else "")
        (folder / "exit").unlink(missing_ok=True)
        return finished

    def _run(self, task: QueueTask, folder: Path, lock: int) -> int | None:
        """Return the exit code; None if the claim was lost."""
        variables = {
            "DOVETAIL_TASK": task.name, "DOVETAIL_QUEUE": task.queue, "DOVETAIL_TASK_COMMAND": task.command,
            "DOVETAIL_TASK_TRY": str(task.claim), "DOVETAIL_TASK_DIR": str(folder),
        }  # fmt: skip
        files.touch(folder / "exit.part")  # with a mode that lets the next worker, perhaps another user, write it
        with open(self.tasks.log(task), "ab", opener=files.opener) as log:
            child = subprocess.Popen(
                ["sh", "-c", TIED + RUN if self._is_tied else RUN, "task", str(folder / "exit")],
                stdin=subprocess.PIPE if self._is_tied else subprocess.DEVNULL, stdout=log, stderr=log,
                env=os.environ | variables, start_new_session=True, pass_fds=(lock,),
            )  # fmt: skip
        try:
            if not self._until(task, lambda: child.poll() is not None):
                self._end(task, child)
                if not self.stopped:
                    return None
            code = child.wait()
        finally:
            if child.stdin:
                child.stdin.close()
        return code if code >= 0 else 128 - code

    def _end(self, task: QueueTask, child: subprocess.Popen) -> None:
        """End a task with SIGTERM, and with SIGKILL when the grace is over or the claim is lost."""
        _signal(child, signal.SIGTERM)
        until = time.monotonic() + self.grace
        alone = not self._is_tied or self.tasks.is_cancelled(task)  # no other worker may begin it meanwhile
        while child.poll() is None and time.monotonic() < until and (alone or self._is_ours(task)):
            time.sleep(POLL_S)
        if child.poll() is None:
            _signal(child, signal.SIGKILL)
            child.wait()

    def _until(self, task: QueueTask, holds: Callable[[], bool]) -> bool:
        """Wait with heartbeats; return False if the worker must stop or the claim was lost."""
        while not holds():
            if self.stopped or not self._is_ours(task):
                return False
            time.sleep(POLL_S)
        return True

    def _is_ours(self, task: QueueTask) -> bool:
        """Renew the lease if it is time to; if it cannot be renewed, give it up after half of it."""
        age = time.monotonic() - self._beat
        if age <= min(self.lease / 4, BEAT_S):
            return True
        try:
            kept = self.tasks.heartbeat(task, self.lease)
        except OSError:  # the server does not answer
            return age < self.lease / 2
        self._beat = time.monotonic()
        return kept


def _signal(child: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def _has_succeeded(folder: Path) -> bool:
    """Return whether the task succeeded under a worker that died before it recorded this."""
    exit_file = folder / "exit"
    if exit_file.exists() and exit_file.read_text().strip() == "0":
        return True
    exit_file.unlink(missing_ok=True)
    return False


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return file.read().decode(errors="replace")
