"""The loop that brings what backends hold to what jobs want. Killed at any point and started again, it goes on.

What is done about one job is in reconcile.py; here is when, and that no job's trouble is another's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dovetail.jobs.backends.backend import Backend
from dovetail.jobs.job import Job
from dovetail.jobs.notify import notify
from dovetail.jobs.reaper import reap
from dovetail.jobs.reconcile import Reconciler
from dovetail.jobs.store import Store

log = logging.getLogger(__name__)

TICK_S = 0.25  # between looks at the store
LOOK_S = {"local": 0.25, "slurm": 3.0, "gcp-tpu": 15.0, "gke": 10.0}  # between looks at one attempt
REAP_S = 600.0
TROUBLE_S = 5.0  # before the store is tried again
CALLS = 8  # to backends at a time
ERROR_S, ERROR_MAX_S = 5.0, 300.0  # before a job at which the supervisor failed is tried again: doubles each time
ERRORS = 5  # in a row, after which a job that has not begun is given up


class Supervisor:
    """`backends` gives the backend of a name; the same object each time."""

    def __init__(self, store: Store, backends: Callable[[str], Backend], looks: float | None = None) -> None:
        """`looks`: seconds between looks at an attempt, and before an absence is believed; each backend's usual ones if
        not given."""
        self.store, self.backend, self._looks = store, backends, looks
        self.reconciler = Reconciler(store, backends, looks)
        self._next_look: dict[str, float] = {}
        self._busy: set[str] = set()  # jobs that a thread is at
        self._seen: dict[str, float] = {}  # job -> its `changed` after our own last change
        self._errors: dict[str, int] = {}  # job -> exceptions in a row
        self._reaped: float | None = None

    def run(self, idle: float | None = None, until: Callable[[], bool] = lambda: False) -> None:
        """Until `until` says so, or there has been nothing to do for `idle` seconds."""
        busy_at = time.monotonic()
        with ThreadPoolExecutor(CALLS, "jobs") as pool:
            while not until():
                if self._tick(pool):
                    busy_at = time.monotonic()
                elif idle is not None and time.monotonic() - busy_at >= idle:
                    return
                time.sleep(TICK_S if self._looks is None else min(TICK_S, self._looks))

    def _tick(self, pool: ThreadPoolExecutor) -> bool:
        """A store that cannot be read now (a file system that is away) is read again later."""
        try:
            return self.tick(pool)
        except Exception as error:
            log.error("the table of jobs: %s", error, exc_info=not isinstance(error, OSError))
            time.sleep(TROUBLE_S)
            return True

    def tick(self, pool: ThreadPoolExecutor | None = None) -> bool:
        """Look once at every job that is due; whether any is not over."""
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
            self.store.check_asked(job)
            notify(job, self.store.spec(job.id), self.store.home(job.id))
        except ValueError as error:
            log.error("job %s: its notify was not run: %s", job.id, error)

    def _is_due(self, job: Job) -> bool:
        """By the clock, or because somebody has changed it."""
        now = time.monotonic()
        due = self._next_look.get(job.id, 0.0) <= now and (job.not_before <= time.time() or job.wanted != "run")
        due |= self._seen.get(job.id) != job.changed
        if due:
            self._next_look[job.id] = now + (LOOK_S[job.backend] if self._looks is None else self._looks)
        return due

    def _guarded(self, job: Job) -> None:
        """Step one job. Its trouble, or a backend that does not answer, does not keep the others waiting."""
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
        except Exception:  # the store itself does not serve
            log.exception("job %s: its trouble could not be recorded", job.id)
            self._seen[job.id] = job.changed

    def _reap(self) -> None:
        try:
            for orphan in reap(self.store, self.backend):
                log.info("given back, for no job wants it: %s", orphan.resource.name)
        except Exception:
            log.exception("the orphan reaper")
