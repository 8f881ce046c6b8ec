"""The supervisor: the loop that moves every job towards the wanted state. It may be killed and started at any point.

    python -m dovetail.jobs.supervisor HOME

reconcile.py takes the steps of one job; this file decides when, and isolates jobs from each other's errors. The first
command that needs a supervisor starts it (presence.py), and it ends when there is nothing left to do.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.errors import UserError
from dovetail.jobs import files
from dovetail.jobs.backends import chooser
from dovetail.jobs.backends.backend import JobBackend
from dovetail.jobs.job import Job, Resource
from dovetail.jobs.presence import only_one
from dovetail.jobs.reconcile import Reconciler
from dovetail.jobs.spec import Spec
from dovetail.jobs.store import JobStore

log = logging.getLogger(__name__)

TICK_S = 0.25  # between reads of the store
LOOK_S = {"local": 0.25, "slurm": 3.0, "gcp-tpu": 15.0, "gke": 10.0}  # between observations of one attempt
REAP_S = 600.0
TROUBLE_S = 5.0  # before the store is read again after an error
CALLS = 8  # concurrent calls to backends
ERROR_S, ERROR_MAX_S = 5.0, 300.0  # before a job is tried again after an exception: doubles each time
ERRORS = 5  # exceptions in a row after which a job that has not begun fails
IDLE_S = 60.0  # without jobs, before the process ends


class JobSupervisor:
    """Supervise the jobs of a store.

    Args:
        store: The store.
        backends: Returns the backend of a name, the same object each time.
        looks: Seconds between observations of an attempt, and before an absence is believed; the defaults of each
            backend if not given.
    """

    def __init__(self, store: JobStore, backends: Callable[[str], JobBackend], looks: float | None = None) -> None:
        self.store, self.backend, self._looks = store, backends, looks
        self.reconciler = Reconciler(store, backends, looks)
        self._next_look: dict[str, float] = {}
        self._busy: set[str] = set()  # jobs that a thread works on
        self._seen: dict[str, float] = {}  # job -> its `changed` after our own last change
        self._errors: dict[str, int] = {}  # job -> exceptions in a row
        self._reaped: float | None = None

    def run(self, idle: float | None = None, until: Callable[[], bool] = lambda: False) -> None:
        """Run until `until` returns True, or there has been nothing to do for `idle` seconds."""
        busy_at = time.monotonic()
        with ThreadPoolExecutor(CALLS, "jobs") as pool:
            while not until():
                if self._tick(pool):
                    busy_at = time.monotonic()
                elif idle is not None and time.monotonic() - busy_at >= idle:
                    return
                time.sleep(TICK_S if self._looks is None else min(TICK_S, self._looks))

    def _tick(self, pool: ThreadPoolExecutor) -> bool:
        """Tick; a store that cannot be read (its file system is not mounted) is read again later."""
        try:
            return self.tick(pool)
        except Exception as error:
            log.error("cannot read the store: %s", error, exc_info=not isinstance(error, OSError))
            time.sleep(TROUBLE_S)
            return True

    def tick(self, pool: ThreadPoolExecutor | None = None) -> bool:
        """Step every job that is due once; return whether any job is not over."""
        call = pool.submit if pool else lambda function, *values: function(*values)
        if self._reaped is None or time.monotonic() - self._reaped > REAP_S:
            self._reaped = time.monotonic()
            call(self._reap)
        jobs = self.store.active()
        for job in jobs:
            if job.id not in self._busy and self._is_due(job):
                self._busy.add(job.id)
                call(self._guarded, job)
        for id, _, verb in self.store.open_intents():
            if verb == "notify" and self.store.is_ours(job := self.store.job(id)):
                self._notify(job)
                self.store.settle(id, 0, verb)
        return bool(jobs)

    def _notify(self, job: Job) -> None:
        try:
            self.store.check_request(job)
            notify(job, self.store.spec(job.id), self.store.home(job.id))
        except OSError:
            raise
        except UserError as error:
            log.error("job %s: its notify command was not run: %s", job.id, error)

    def _is_due(self, job: Job) -> bool:
        """Return whether it is time to look at the job, or another process has changed it."""
        now = time.monotonic()
        due = self._next_look.get(job.id, 0.0) <= now and (job.not_before <= time.time() or job.wanted != "run")
        due |= self._seen.get(job.id) != job.changed
        if due:
            self._next_look[job.id] = now + (LOOK_S[job.backend] if self._looks is None else self._looks)
        return due

    def _guarded(self, job: Job) -> None:
        """Step one job; an exception is recorded for this job and does not affect others."""
        try:
            self._seen[job.id] = self.reconciler.step(job.id)
            if self._errors.pop(job.id, 0) or job.status == "error":
                self._seen[job.id] = self.reconciler.recover(job)
        except Exception as error:
            log.exception("job %s", job.id)
            self._failed(job, error)
        finally:
            self._busy.discard(job.id)

    def _failed(self, job: Job, error: Exception) -> None:
        """Show the exception as the job's state, and try again later."""
        count = self._errors[job.id] = self._errors.get(job.id, 0) + 1
        wait = min(ERROR_MAX_S, ERROR_S * 2 ** min(count - 1, 30)) if self._looks is None else self._looks
        self._next_look[job.id] = time.monotonic() + wait
        try:
            self._seen[job.id] = self.reconciler.trouble(job, error, give_up=count >= ERRORS)
        except Exception:  # the store itself fails
            log.exception("job %s: its error could not be recorded", job.id)
            self._seen[job.id] = job.changed

    def _reap(self) -> None:
        try:
            for orphan in reap(self.store, self.backend):
                log.info("deleted a resource that no job needs: %s", orphan.resource.name)
        except Exception:
            log.exception("the orphan reaper failed")


def notify(job: Job, spec: Spec, home: Path) -> None:
    """Start the user's command after the end of a job, without waiting for it; its output is in notify.log."""
    files.make_folder(home)
    variables = {"DOVETAIL_JOB": job.id, "DOVETAIL_JOB_NAME": job.name, "DOVETAIL_JOB_STATUS": job.status}
    with open(home / "notify.log", "ab", opener=files.opener) as out:
        # The shell starts the command in the background and ends.
        subprocess.run(
            ["sh", "-c", f"({spec.notify}\n) &"], stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=home,
            env=os.environ | variables, start_new_session=True, check=False,
        )  # fmt: skip


# --- orphans ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Orphan:
    """Hold a resource with our label that no job needs."""

    backend: str
    resource: Resource


def orphans(store: JobStore, backends: Callable[[str], JobBackend], names: Sequence[str] = ()) -> list[Orphan]:
    """Return the resources with our label that belong to no attempt.

    The row of an attempt is written before its resource is created, so a resource without a row is not in use. A
    backend that cannot be listed is skipped.

    Args:
        store: The store.
        backends: Returns the backend of a name.
        names: Backends to list; those that jobs have used if not given.
    """
    found = []
    for name in names or store.backends():
        try:
            held = backends(name).list()
        except (UserError, OSError) as error:
            log.warning("cannot list the resources of %s: %s", name, error)
            continue
        # Read after the list was made: an attempt that began meanwhile is in the table by now.
        wanted = {(row.job, row.number) for row in store.live()}
        found += [Orphan(name, one) for one in held if one.attempt not in wanted]
    return found


def reap(store: JobStore, backends: Callable[[str], JobBackend], names: Sequence[str] = ()) -> list[Orphan]:
    """Delete the orphans; return those that were deleted."""
    done = []
    for orphan in orphans(store, backends, names):
        job, number = orphan.resource.attempt or (orphan.resource.name, 0)
        store.intend(job, number, "reap")
        try:
            backends(orphan.backend).delete(orphan.resource)
        except UserError as error:
            log.warning("cannot delete %s: %s", orphan.resource.name, error)
            continue
        store.settle(job, number, "reap")
        done.append(orphan)
    return done


# --- the process ------------------------------------------------------------------------------------------------------


def supervise(root: Path, idle: float | None = IDLE_S) -> bool:
    """Supervise in this process until there is nothing left to do (idle=None: never), ctrl-C or SIGTERM.

    Jobs keep running when it ends. Return False if another process supervises.
    """
    store, stopped = JobStore(root), []
    before = signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    try:
        while True:
            with only_one(root) as mine:
                if not mine:
                    return False
                JobSupervisor(store, chooser(root, store.owner)).run(idle, lambda: bool(stopped))
            # A job created just before the lock was released found a supervisor, and started none.
            if stopped or not store.active():
                return True
    finally:
        signal.signal(signal.SIGTERM, before)
        store.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    supervise(Path(sys.argv[1]))
