"""Take one job a step towards the wanted state, from what the store holds and what the backend observes.

An attempt passes through creating -> live -> ending -> gone. Each arrow is one transaction, and a backend is called
between two of them. Every call may be repeated (backends/backend.py), so the store is the only memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dovetail.core.errors import UserError
from dovetail.jobs import cost, files, outcome, secrets, snapshot
from dovetail.jobs.backends.backend import OVER, JobBackend, Observed, RefusedJobError, UnavailableError
from dovetail.jobs.job import Attempt, AttemptRow, Job
from dovetail.jobs.outcome import Kind, NextStep, Outcome
from dovetail.jobs.spec import Spec
from dovetail.jobs.store import JobStore, NoJobError

SETTLE_S = {"local": 1.0, "slurm": 20.0, "gcp-tpu": 60.0, "gke": 30.0}  # of "absent", before it is believed
LATE_S = 10.0  # after the grace and SETTLE_S, before an attempt that has not ended is ended
TROUBLE = "the supervisor failed"
TAIL = 16_000  # bytes of a log that are searched for the last error
HEALTH_FILE = "run/health.jsonl"  # in the job's folder; train/guard/doctor.py writes it


class Reconciler:
    """Step the jobs of a store.

    Args:
        store: The store.
        backends: Returns the backend of a name.
        settle: Seconds for which a backend must report an absence before it is believed; SETTLE_S if not given.
    """

    def __init__(self, store: JobStore, backends: Callable[[str], JobBackend], settle: float | None = None) -> None:
        self.store, self.backend, self.settle = store, backends, settle

    def step(self, id: str) -> float:
        """Take one step of a job; return when the job was last changed by it, 0 if a person has changed it since."""
        job, spec, last = self.store.job(id), self.store.spec(id), self.store.last(id)
        if job.is_over:
            return job.changed
        if last is None or last.phase == "gone":
            last = self._begin(job, spec)
        if last is None:
            return self.store.job(id).changed
        step = {"creating": self._create, "live": self._look, "ending": self._delete}
        step[last.phase](job, spec, last)
        return self._changed(job)

    def trouble(self, job: Job, error: Exception, give_up: bool) -> float:
        """Show an exception of the supervisor as the job's state; return as `step`.

        With `give_up` a job that has not begun fails. One that runs, or holds resources, is tried again for ever: the
        exception does not concern the job.
        """
        why = f"{TROUBLE}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        row = self.store.last(job.id)
        with self.store.transaction():
            if self.store.job(job.id).detail != why:
                self.store.note(job.id, job.attempts, why)
            self.store.change(job.id, status="error", detail=why)
            if give_up and (row is None or row.phase == "gone"):
                self._finish(job, None, outcome.over("failed", why, f"failed: {why}", time.time()))
            elif give_up and row is not None and row.phase == "creating":
                self._end(job, row, Outcome("mistake", why))
        return self._changed(job)

    def recover(self, job: Job) -> float:
        """Clear the error that `trouble` showed, after a step that succeeded; return as `step`."""
        now, row = self.store.job(job.id), self.store.last(job.id)
        if now.detail.startswith(TROUBLE) and not now.is_over:
            self.store.change(job.id, detail="")
        if now.status == "error":
            self.store.change(job.id, status="queued" if row is None or row.phase == "gone" else "waiting")
        return self._changed(job)

    def _changed(self, before: Job) -> float:
        after = self.store.job(before.id)
        return after.changed if after.wanted == before.wanted else 0.0

    # --- before an attempt --------------------------------------------------------------------------------------------

    def _begin(self, job: Job, spec: Spec) -> AttemptRow | None:
        """Add the next attempt if it is due."""
        now = time.time()
        if job.wanted != "run":
            self._finish(job, spec, NextStep({"status": "cancelled", "ended": now}, "cancelled"))
            return None
        if job.not_before > now or not self._dependencies_done(job, spec):
            return None
        if reached := outcome.reached_ceiling(spec, job.seconds, job.dollars, cost.hourly(spec)):
            self._finish(job, spec, outcome.over("stopped", reached, f"stopped: {reached}", now))
            return None
        accelerator, zone = outcome.place(spec, job.place)
        return self.store.begin(job.id, zone, accelerator, self.store.quarantined(job.backend))

    def _dependencies_done(self, job: Job, spec: Spec) -> bool:
        for other in spec.after:
            try:
                status = self.store.job(other).status
            except NoJobError:
                status = "deleted"
            if status in ("failed", "stopped", "cancelled", "deleted"):
                why = f"job {other} of `after` {status}"
                self._finish(job, spec, outcome.over("failed", why, f"failed: {why}", time.time()))
                return False
            if status != "succeeded":
                if job.detail != f"after {other}":
                    self.store.change(job.id, detail=f"after {other}")
                return False
        return True

    # --- an attempt ---------------------------------------------------------------------------------------------------

    def _create(self, job: Job, spec: Spec, row: AttemptRow) -> None:
        if job.wanted != "run":  # the resource may exist: it is deleted like any other
            self._end(job, row, Outcome("stopped", "cancelled before it began"))
            return
        if row.look_at > time.time():
            return
        attempt, first = self.store.attempt(job, row, spec), not row.state
        if first:
            self.store.change_attempt(job.id, row.number, state="asked")
        try:
            self.store.check_request(job)
            self._prepare(attempt)
            handle = self.backend(job.backend).create(attempt)
        except UnavailableError as error:
            if error.elsewhere:
                self._end(job, row, Outcome("unavailable", str(error)))
            else:
                self._missed(job, spec, row, str(error))
            return
        except OSError as error:  # a full disk, a file system that is not mounted
            self._end(job, row, Outcome("fault", str(error)))
            return
        except UserError as error:
            with self.store.transaction():
                self._end(job, row, Outcome("mistake", str(error)))
                if first and isinstance(error, RefusedJobError):
                    self._conclude(job, spec, row, Outcome("mistake", str(error)))
            return
        with self.store.transaction():
            self.store.settle(job.id, row.number, "create", handle)
            self.store.change_attempt(job.id, row.number, phase="live", handle=handle, state="waiting", misses=0)
            if job.detail:
                self.store.change(job.id, detail="")

    def _prepare(self, attempt: Attempt) -> None:
        files.make_folder(attempt.folder)
        if attempt.snapshot and attempt.spec.backend in ("local", "slurm"):
            snapshot.unpack(attempt.home / "code.tar.gz", attempt.home / "code")

    def _missed(self, job: Job, spec: Spec, row: AttemptRow, why: str) -> None:
        """Repeat a call that failed, with growing waits."""
        wait = outcome.backoff(job, spec, row.misses)
        with self.store.transaction():
            self.store.change_attempt(
                job.id, row.number, look_at=time.time() + wait, misses=row.misses + 1, detail=why
            )  # fmt: skip
            self.store.change(job.id, detail=why)

    def _look(self, job: Job, spec: Spec, row: AttemptRow) -> None:
        if job.wanted == "run":  # on a TPU slice `observe` starts the program
            self.store.check_request(job)
        attempt = self.store.attempt(job, row, spec)
        seen = self.backend(job.backend).observe(attempt)
        if seen.state == "unknown":  # conclude nothing
            self.store.change_attempt(job.id, row.number, detail=seen.detail)
            self._stop_if_due(job, spec, row, attempt)
        elif seen.state == "absent" and not self._is_believed(job, row):
            self.store.change_attempt(job.id, row.number, absent_since=row.absent_since or time.time())
        elif seen.state == "absent" or seen.state in OVER:
            self._account(job, spec)
            # An open intent: the supervisor died while it sent the signal, so the job may have received it.
            stop_sent = row.stop_sent is not None or (job.id, row.number, "stop") in self.store.open_intents()
            found = outcome.outcome(seen, spec, self._tail(attempt, seen), stop_sent)
            if found.kind == "success" and stop_sent and job.wanted != "run":  # jobs after it must not begin
                found = Outcome("stopped", "it exited with 0 after the stop signal")
            self._end(job, row, found, seen)
        elif outcome.are_preemptions_spent(job, spec, seen.restarts - row.restarts):
            self._account(job, spec)
            # The end counts as the last of these preemptions.
            last = replace(seen, restarts=seen.restarts - 1)
            self._end(job, row, Outcome("preemption", seen.detail or f"requeued by {job.backend}"), last)
        else:
            self._record(job, row, seen)
            self._account(job, spec)
            self._stop_if_due(self.store.job(job.id), spec, row, attempt)

    def _is_believed(self, job: Job, row: AttemptRow) -> bool:
        return row.absent_since is not None and time.time() - row.absent_since >= self._settle(job)

    def _settle(self, job: Job) -> float:
        return SETTLE_S[job.backend] if self.settle is None else self.settle

    def _record(self, job: Job, row: AttemptRow, seen: Observed) -> None:
        runs = seen.state == "running"
        hosts = ",".join(seen.hosts) or row.hosts
        found = {
            "state": seen.state, "detail": seen.detail, "hosts": hosts, "handle": seen.handle or row.handle,
            "zone": seen.zone or row.zone,
            "started": (row.started or time.time()) if runs else None, "absent_since": None, "misses": 0,
            "ran": row.ran if runs or not row.started else row.ran + time.time() - row.started,
            "restarts": max(row.restarts, seen.restarts),
        }  # fmt: skip
        if any(getattr(row, name) != value for name, value in found.items()):
            with self.store.transaction():
                self.store.change_attempt(job.id, row.number, **found)
                self._count(job, row, seen.restarts - row.restarts)
        stops = job.wanted != "run" or job.status == "stopping" or row.stop_sent is not None
        status = "stopping" if stops else seen.state
        host, zone = hosts.partition(",")[0], seen.zone or job.zone
        # The job shows why it waits; the reason for stopping is kept.
        detail = job.detail if status == "stopping" else seen.detail if status == "waiting" else ""
        if (status, host, zone, detail) != (job.status, job.host, job.zone, job.detail):
            with self.store.transaction():
                self.store.change(job.id, status=status, host=host, zone=zone, detail=detail)
                if (status, host) != (job.status, job.host):
                    self.store.note(job.id, row.number, f"{status}{f' on {host}' if host else ''}")

    def _count(self, job: Job, row: AttemptRow, times: int) -> None:
        """Count restarts by the backend's own queue as preemptions, though the attempt continues."""
        if times > 0:
            self.store.change(job.id, preemptions=job.preemptions + times)
            self.store.note(job.id, row.number, f"preempted and requeued by {job.backend}")

    def _account(self, job: Job, spec: Spec) -> None:
        """Update time and money from the table of attempts."""
        seconds, dollars = outcome.spent(self.store.attempts(job.id), spec, time.time())
        if int(seconds) != int(job.seconds) or abs(dollars - job.dollars) >= 0.01:
            self.store.change(job.id, seconds=seconds, dollars=dollars)

    def _stop_if_due(self, job: Job, spec: Spec, row: AttemptRow, attempt: Attempt) -> None:
        """Send the stop signal if the job is cancelled or has reached a ceiling; end it when the grace is over."""
        grace = spec.ceiling.grace
        if job.wanted == "kill":
            if self._stop(job, spec, row, attempt, 0.0, "cancelled: killed"):
                self._end(job, row, Outcome("stopped", "cancelled twice: killed"))
            return
        if row.stop_sent is not None:
            if time.time() > row.stop_sent + grace + self._settle(job) + LATE_S:
                self._end(job, row, Outcome("stopped", "it did not end by itself"))
            return
        reached = outcome.reached_ceiling(spec, job.seconds, job.dollars, cost.hourly(attempt.spec))
        why = f"cancelled: sent SIGTERM, {grace:g} s to save and end" if job.wanted == "stop" else reached
        if why:
            self._stop(job, spec, row, attempt, grace, why)

    def _stop(self, job: Job, spec: Spec, row: AttemptRow, attempt: Attempt, grace: float, why: str) -> bool:
        """Return whether the backend accepted the call."""
        with self.store.transaction():
            self.store.intend(job.id, row.number, "stop")
            self.store.change(job.id, status="stopping", detail=why)
        try:
            self.backend(job.backend).stop(attempt, grace)
        except UserError as error:
            self._missed(job, spec, row, str(error))
            return False
        with self.store.transaction():
            self.store.settle(job.id, row.number, "stop")
            self.store.change_attempt(job.id, row.number, stop_sent=time.time())
        return True

    def _tail(self, attempt: Attempt, seen: Observed) -> str:
        """Return the end of the log of the rank that failed."""
        if seen.state != "failed":
            return ""
        rank = seen.failed_rank or 0
        try:
            size = attempt.log(rank).stat().st_size if attempt.log(rank).exists() else 0
            return self.backend(attempt.spec.backend).logs(attempt, rank, max(0, size - TAIL)).text[-TAIL:]
        except (UnavailableError, OSError):
            return ""

    # --- after an attempt ---------------------------------------------------------------------------------------------

    def _end(self, job: Job, row: AttemptRow, found: Outcome, seen: Observed | None = None) -> None:
        """Record the end of an attempt, with the intent to delete its resource."""
        with self.store.transaction():
            self._count(job, row, seen.restarts - row.restarts if seen else 0)
            for verb in ("create", "stop"):
                self.store.settle(job.id, row.number, verb, found.says)
            self.store.change_attempt(
                job.id, row.number, phase="ending", outcome=found.kind, detail=found.says, ended=time.time(),
                exit_code=seen.exit_code if seen else None, failed_rank=seen.failed_rank if seen else None,
                hosts=(",".join(seen.hosts) if seen and seen.hosts else row.hosts), look_at=0.0, misses=0,
                restarts=max(row.restarts, seen.restarts if seen else 0), zone=(seen and seen.zone) or row.zone,
            )  # fmt: skip
            if seen and seen.zone:
                self.store.change(job.id, zone=seen.zone)
            self.store.intend(job.id, row.number, "delete")

    def _delete(self, job: Job, spec: Spec, row: AttemptRow) -> None:
        """Delete the resource; the attempt is gone, and the next one considered, once the backend holds nothing."""
        if row.look_at > time.time():
            return
        attempt, backend = self.store.attempt(job, row, spec), self.backend(job.backend)
        try:
            backend.delete(attempt.resource)
        except UserError as error:
            self._missed(job, spec, row, str(error))
            return
        seen = backend.observe(attempt)
        if seen.state != "absent":
            if seen.state == "unknown" and job.detail != seen.detail:
                self.store.change(job.id, detail=seen.detail)
            return
        for host, reason in _hosts_at_fault(attempt, row):
            self.store.quarantine(job.backend, host, job.id, reason)
        kind: Kind = row.outcome  # pyright: ignore[reportAssignmentType]
        self._conclude(job, spec, row, Outcome(kind, row.detail))

    def _conclude(self, job: Job, spec: Spec, row: AttemptRow, found: Outcome) -> None:
        """Decide what follows, after the resource was deleted."""
        now = time.time()
        follows = outcome.after(job, spec, found, row.seconds(now), now)
        with self.store.transaction():
            self.store.settle(job.id, row.number, "delete")
            self.store.change_attempt(job.id, row.number, phase="gone")
            self._finish(job, spec, follows, row.number)

    def _finish(self, job: Job, spec: Spec | None, follows: NextStep, number: int = 0) -> None:
        with self.store.transaction():
            self.store.change(job.id, **follows.changes)
            self.store.note(job.id, number, follows.says)
            if "ended" in follows.changes:
                secrets.forget(self.store.home(job.id))
                if spec is not None and spec.notify:
                    self.store.intend(job.id, 0, "notify")


def _hosts_at_fault(attempt: Attempt, row: AttemptRow) -> Iterator[tuple[str, str]]:
    """Yield (host, reason) of the hosts that the run found at fault during this attempt."""
    path = attempt.home / HEALTH_FILE
    for line in path.read_text().splitlines() if path.is_file() else ():
        found = _json_object(line)
        if found.get("what") == "quarantine" and found.get("time", 0.0) >= row.created:
            for host in found.get("at_fault", {}).get("hosts", ()):
                yield str(host), str(found.get("reason", ""))


def _json_object(line: str) -> dict[str, Any]:
    """Parse a line; {} for one that is damaged, as after a full disk."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
