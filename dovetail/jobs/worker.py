"""A worker of a queue: claims a task, runs it, says how it ended; gives it back when it is told to stop.

Killed, it leaves its task running. Whoever claims the task next waits for that to end and takes its result, so that a
task never runs twice at once, nor again after it has succeeded: the task's processes hold a lock, and its shell writes
down the exit code itself.

With Postgres the next worker may see no file of this one's. Then a task dies with its worker, and a worker that cannot
renew its lease ends its task before the lease has run out.
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
from collections.abc import Callable
from pathlib import Path

from dovetail.jobs import modes
from dovetail.jobs.outcome import PREEMPTED, error_line
from dovetail.jobs.tasks import Task, Tasks

POLL_S = 0.05
BEAT_S = 2.0  # the longest time between two looks at whether the task is still ours
TAIL = 8000
# Its input is a pipe that the worker holds open, and nobody else: when that ends, so does the whole group.
TIED = "exec 3<&0 </dev/null; (trap '' TERM INT; cat <&3 >/dev/null; kill -s KILL -- -$$) & exec 3<&-; "
# The code is written beside and renamed: it is there whole or not at all.
RUN = 'trap : TERM; sh -c "$DOVETAIL_TASK_COMMAND"; code=$?; echo $code > "$1.part" && mv "$1.part" "$1"; exit $code'


class Worker:
    """`lease`: seconds after which a worker that says nothing is taken for dead."""

    def __init__(self, tasks: Tasks, zone: str = "", lease: float = 30.0, grace: float = 60.0, name: str = "") -> None:
        self.tasks, self.zone, self.lease, self.grace = tasks, zone, lease, grace
        self.name = name or f"{platform.node()}-{os.getpid()}-{secrets.token_hex(2)}"
        self.stopped = False
        self._is_tied = bool(tasks.store.site)
        self._beat = 0.0  # when the lease was last renewed

    def stop(self) -> None:
        """From a signal's handler: the task under way is told, and given back."""
        self.stopped = True

    def run(self, forever: bool = False) -> int:
        """Until the queue is done, or `stop`; how many tasks this worker has ended."""
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

    def work(self, task: Task) -> bool:
        """Run one task that is ours; whether it ended, and we said so."""
        folder = self.tasks.folder / str(task.id)
        modes.make_folder(folder)
        with open(folder / "lock", "a", opener=modes.opener) as lock:
            if not self._until(task, lambda: _taken(lock.fileno())):
                return False
            code = 0 if _has_succeeded(folder) else self._run(task, folder, lock.fileno())
        if code is None and self.tasks.is_cancelled(task):
            (folder / "exit").unlink(missing_ok=True)  # a retry begins anew, whatever it ended with
            return False
        if code is None or (self.stopped and code) or code == PREEMPTED:
            self.tasks.release(task, f"{self.name} was told to stop" if self.stopped else "preempted")
            return False
        # first the table, then the file: the other way round a success could be run again
        said = self.tasks.finish(task, code, error_line(_tail(self.tasks.log(task))) if code else "")
        (folder / "exit").unlink(missing_ok=True)
        return said

    def _run(self, task: Task, folder: Path, lock: int) -> int | None:
        """Its exit code; None where it was not to end here."""
        told = {
            "DOVETAIL_TASK": task.name, "DOVETAIL_QUEUE": task.queue, "DOVETAIL_TASK_COMMAND": task.command,
            "DOVETAIL_TASK_TRY": str(task.claim), "DOVETAIL_TASK_DIR": str(folder),
        }  # fmt: skip
        modes.touch(folder / "exit.part")  # for the next worker, who may be another user
        with open(self.tasks.log(task), "ab", opener=modes.opener) as log:
            child = subprocess.Popen(
                ["sh", "-c", TIED + RUN if self._is_tied else RUN, "task", str(folder / "exit")],
                stdin=subprocess.PIPE if self._is_tied else subprocess.DEVNULL, stdout=log, stderr=log,
                env=os.environ | told, start_new_session=True, pass_fds=(lock,),
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

    def _end(self, task: Task, child: subprocess.Popen) -> None:
        """By signal, with time to save while the task is ours. The shell that writes the code is in the same group."""
        _signal(child, signal.SIGTERM)
        until = time.monotonic() + self.grace
        alone = not self._is_tied or self.tasks.is_cancelled(task)  # nobody else may begin it meanwhile
        while child.poll() is None and time.monotonic() < until and (alone or self._is_ours(task)):
            time.sleep(POLL_S)
        if child.poll() is None:
            _signal(child, signal.SIGKILL)
            child.wait()

    def _until(self, task: Task, holds: Callable[[], bool]) -> bool:
        """Wait, with heartbeats; False where we were told to stop or the claim was lost."""
        while not holds():
            if self.stopped or not self._is_ours(task):
                return False
            time.sleep(POLL_S)
        return True

    def _is_ours(self, task: Task) -> bool:
        """Renews the lease where it is time to; one that cannot be renewed is given up when half of it is over."""
        age = time.monotonic() - self._beat
        if age <= min(self.lease / 4, BEAT_S):
            return True
        try:
            kept = self.tasks.heartbeat(task, self.lease)
        except OSError:  # the server is away
            return age < self.lease / 2
        self._beat = time.monotonic()
        return kept


def _signal(child: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def _has_succeeded(folder: Path) -> bool:
    """Under a worker that died before it could say so. What did not succeed is run again."""
    exit_file = folder / "exit"
    if exit_file.exists() and exit_file.read_text().strip() == "0":
        return True
    exit_file.unlink(missing_ok=True)
    return False


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return file.read().decode(errors="replace")
