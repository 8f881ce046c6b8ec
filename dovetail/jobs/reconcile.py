"""One job, a step nearer to what it wants: from what the store has and what the backend says.

An attempt passes through creating -> live -> ending -> gone. Each arrow is one transaction; a backend is called between
two of them, and every call may be repeated (backends/backend.py). So there is nothing to remember but the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from dovetail.jobs import budget, modes, price, secrets, snapshot
from dovetail.jobs.attempt import Attempt
from dovetail.jobs.backends.backend import OVER, Backend, Observed, Refused, Unavailable
from dovetail.jobs.job import Job, Try
from dovetail.jobs.outcome import Kind, Outcome, outcome
from dovetail.jobs.quarantine import hosts_at_fault
from dovetail.jobs.spec import Spec
from dovetail.jobs.store import Store

SETTLE_S = {"local": 1.0, "slurm": 20.0, "gcp-tpu": 60.0, "gke": 30.0}  # how long "absent" must be said to be believed
LATE_S = 10.0  # after the grace and SETTLE_S, until what has not ended by itself is ended
TROUBLE = "the supervisor failed"
TAIL = 16_000  # bytes of a log that are read for its last error


class Reconciler:
    """`settle`: seconds for which an absence must be said to be believed; as SETTLE_S has it if not given."""

    def __init__(self, store: Store, backends: Callable[[str], Backend], settle: float | None = None) -> None:
        self.store, self.backend, self.settle = store, backends, settle

    def step(self, id: str) -> float:
        """One step of one job; when it was last changed then. Who asks for something meanwhile changes it again."""
        job, spec, last = self.store.job(id), self.store.spec(id), self.store.last(id)
        if job.is_over:
            return job.changed
        if last is None or last.phase == "gone":
            last = self._begin(job, spec)
        if last is None:
            return self.store.job(id).changed
        step = {"creating": self._create, "live": self._look, "ending": self._give_back}
        step[last.phase](job, spec, last)
        after = self.store.job(id)
        return after.changed if after.wanted == job.wanted else 0.0

    def trouble(self, job: Job, error: Exception, give_up: bool) -> float:
        """Show an exception of the supervisor as the job's state; returns as `step`.

        `give_up`: fail a job that has not begun. One that runs, or holds something that must be given back, is tried
        again for ever: the exception says nothing about it.
        """
        why = f"{TROUBLE}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        row = self.store.last(job.id)
        with self.store.transaction():
            if self.store.job(job.id).detail != why:
                self.store.note(job.id, job.attempts, why)
            self.store.change(job.id, status="error", detail=why)
            if give_up and (row is None or row.phase == "gone"):
                changes = {"status": "failed", "detail": why, "ended": time.time()}
                self._finish(job, None, budget.Next(changes, f"failed: {why}"))
            elif give_up and row is not None and row.phase == "creating":
                self._end(job, row, Outcome("mistake", why))
        after = self.store.job(job.id)
        return after.changed if after.wanted == job.wanted else 0.0

    def recover(self, job: Job) -> float:
        """Clear what `trouble` showed, after a step that went well; returns as `step`."""
        now, row = self.store.job(job.id), self.store.last(job.id)
        if now.detail.startswith(TROUBLE) and not now.is_over:
            self.store.change(job.id, detail="")
        if now.status == "error":
            self.store.change(job.id, status="queued" if row is None or row.phase == "gone" else "waiting")
        after = self.store.job(job.id)
        return after.changed if after.wanted == job.wanted else 0.0

    # --- before an attempt --------------------------------------------------------------------------------------------

    def _begin(self, job: Job, spec: Spec) -> Try | None:
        """The next attempt, where its time has come."""
        if job.wanted != "run":
            self._finish(job, spec, budget.Next({"status": "cancelled", "ended": time.time()}, "cancelled"))
            return None
        if job.not_before > time.time() or not self._dependencies_done(job, spec):
            return None
        if reached := budget.ceiling(spec, job.seconds, job.dollars, price.hourly(spec)):
            changes = {"status": "stopped", "detail": reached, "ended": time.time()}
            self._finish(job, spec, budget.Next(changes, f"stopped: {reached}"))
            return None
        accelerator, zone = budget.place(spec, job.place)
        return self.store.begin(job.id, zone, accelerator, self.store.quarantined(job.backend))

    def _dependencies_done(self, job: Job, spec: Spec) -> bool:
        for other in spec.after:
            try:
                status = self.store.job(other).status
            except ValueError:
                status = "deleted"
            if status in ("failed", "stopped", "cancelled", "deleted"):
                changes = {"status": "failed", "detail": f"{other}, which it is after, {status}", "ended": time.time()}
                self._finish(job, spec, budget.Next(changes, f"failed: {changes['detail']}"))
                return False
            if status != "succeeded":
                if job.detail != f"after {other}":
                    self.store.change(job.id, detail=f"after {other}")
                return False
        return True

    # --- an attempt ---------------------------------------------------------------------------------------------------

    def _create(self, job: Job, spec: Spec, row: Try) -> None:
        if job.wanted != "run":  # it may have been made: it is given back like any other
            self._end(job, row, Outcome("stopped", "cancelled before it began"))
            return
        if row.look_at > time.time():
            return
        attempt, first = self.store.attempt(job, row, spec), not row.state
        if first:
            self.store.change_attempt(job.id, row.number, state="asked")
        try:
            self.store.check_asked(job)
            self._prepare(attempt)
            handle = self.backend(job.backend).create(attempt)
        except Unavailable as error:
            if error.elsewhere:
                self._end(job, row, Outcome("unavailable", str(error)))
            else:
                self._missed(job, spec, row, str(error))
            return
        except (ValueError, ImportError) as error:
            with self.store.transaction():
                self._end(job, row, Outcome("mistake", str(error)))
                if first and isinstance(error, Refused):
                    self._conclude(job, spec, row, Outcome("mistake", str(error)))
            return
        except OSError as error:  # a full disk, a file system that is away
            self._end(job, row, Outcome("fault", str(error)))
            return
        with self.store.transaction():
            self.store.settle(job.id, row.number, "create", handle)
            self.store.change_attempt(job.id, row.number, phase="live", handle=handle, state="waiting", misses=0)
            if job.detail:
                self.store.change(job.id, detail="")

    def _prepare(self, attempt: Attempt) -> None:
        modes.make_folder(attempt.folder)
        if attempt.snapshot and attempt.spec.backend in ("local", "slurm"):
            snapshot.unpack(attempt.home / "code.tar.gz", attempt.home / "code")

    def _missed(self, job: Job, spec: Spec, row: Try, why: str) -> None:
        """A call that failed is made again, later and later."""
        wait = budget.backoff(job, spec, row.misses)
        with self.store.transaction():
            self.store.change_attempt(
                job.id, row.number, look_at=time.time() + wait, misses=row.misses + 1, detail=why
            )  # fmt: skip
            self.store.change(job.id, detail=why)

    def _look(self, job: Job, spec: Spec, row: Try) -> None:
        if job.wanted == "run":  # on a TPU slice a look is what starts the program
            self.store.check_asked(job)
        attempt = self.store.attempt(job, row, spec)
        seen = self.backend(job.backend).observe(attempt)
        if seen.state == "unknown":  # never a reason to conclude anything
            self.store.change_attempt(job.id, row.number, detail=seen.detail)
            self._stop_where_due(job, spec, row, attempt)
        elif seen.state == "absent" and not self._is_believed(job, row):
            self.store.change_attempt(job.id, row.number, absent_since=row.absent_since or time.time())
        elif seen.state == "absent" or seen.state in OVER:
            self._account(job, spec, row)
            # sent, or about to be when the supervisor died: then the job may have heard of it
            asked = row.stop_sent is not None or (job.id, row.number, "stop") in self.store.open_intents()
            found = outcome(seen, spec, self._tail(attempt, seen), asked)
            if found.kind == "success" and asked and job.wanted != "run":  # jobs after it must not begin
                found = Outcome("stopped", "it ended with 0 after it was told to stop")
            self._end(job, row, found, seen)
        elif budget.is_spent(job, spec, seen.restarts - row.restarts):
            self._account(job, spec, row)
            # this end is the last of them
            last = replace(seen, restarts=seen.restarts - 1)
            self._end(job, row, Outcome("preemption", seen.detail or f"put back into {job.backend}'s queue"), last)
        else:
            self._record(job, row, seen)
            self._account(job, spec, row)
            self._stop_where_due(self.store.job(job.id), spec, row, attempt)

    def _is_believed(self, job: Job, row: Try) -> bool:
        return row.absent_since is not None and time.time() - row.absent_since >= self._settle(job)

    def _settle(self, job: Job) -> float:
        return SETTLE_S[job.backend] if self.settle is None else self.settle

    def _record(self, job: Job, row: Try, seen: Observed) -> None:
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
        # why it waits is the job's to show; why it is stopping stays
        detail = job.detail if status == "stopping" else seen.detail if status == "waiting" else ""
        if (status, host, zone, detail) != (job.status, job.host, job.zone, job.detail):
            with self.store.transaction():
                self.store.change(job.id, status=status, host=host, zone=zone, detail=detail)
                if (status, host) != (job.status, job.host):
                    self.store.note(job.id, row.number, f"{status}{f' on {host}' if host else ''}")

    def _count(self, job: Job, row: Try, times: int) -> None:
        """What the backend's own queue took back and starts again is a preemption, though the attempt goes on."""
        if times > 0:
            self.store.change(job.id, preemptions=job.preemptions + times)
            self.store.note(job.id, row.number, f"preempted, and put back into {job.backend}'s queue")

    def _account(self, job: Job, spec: Spec, row: Try) -> None:
        """Time and money so far, from the table of attempts alone."""
        seconds, dollars = budget.spent(self.store.attempts(job.id), spec, time.time())
        if int(seconds) != int(job.seconds) or abs(dollars - job.dollars) >= 0.01:
            self.store.change(job.id, seconds=seconds, dollars=dollars)

    def _stop_where_due(self, job: Job, spec: Spec, row: Try, attempt: Attempt) -> None:
        """Told to stop, it saves and ends; what has not when its grace is over is ended."""
        grace = spec.ceiling.grace
        if job.wanted == "kill":
            if self._stop(job, spec, row, attempt, 0.0, "cancelled: killed"):
                self._end(job, row, Outcome("stopped", "cancelled twice: killed"))
            return
        if row.stop_sent is not None:
            if time.time() > row.stop_sent + grace + self._settle(job) + LATE_S:
                self._end(job, row, Outcome("stopped", "it did not end by itself"))
            return
        reached = budget.ceiling(spec, job.seconds, job.dollars, price.hourly(attempt.spec))
        why = f"cancelled: sent SIGTERM, {grace:g} s to save and end" if job.wanted == "stop" else reached
        if why:
            self._stop(job, spec, row, attempt, grace, why)

    def _stop(self, job: Job, spec: Spec, row: Try, attempt: Attempt, grace: float, why: str) -> bool:
        """Whether the backend took it."""
        with self.store.transaction():
            self.store.intend(job.id, row.number, "stop")
            self.store.change(job.id, status="stopping", detail=why)
        try:
            self.backend(job.backend).stop(attempt, grace)
        except (Unavailable, ValueError) as error:
            self._missed(job, spec, row, str(error))
            return False
        with self.store.transaction():
            self.store.settle(job.id, row.number, "stop")
            self.store.change_attempt(job.id, row.number, stop_sent=time.time())
        return True

    def _tail(self, attempt: Attempt, seen: Observed) -> str:
        """The end of the log of the rank that failed."""
        if seen.state != "failed":
            return ""
        rank = seen.failed_rank or 0
        try:
            size = attempt.log(rank).stat().st_size if attempt.log(rank).exists() else 0
            return self.backend(attempt.spec.backend).logs(attempt, rank, max(0, size - TAIL)).text[-TAIL:]
        except (Unavailable, OSError):
            return ""

    # --- after an attempt ---------------------------------------------------------------------------------------------

    def _end(self, job: Job, row: Try, found: Outcome, seen: Observed | None = None) -> None:
        """It is over: what it was is written down, with the intent to give back what it held."""
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

    def _give_back(self, job: Job, spec: Spec, row: Try) -> None:
        """Only when the backend says that nothing is left is the attempt gone, and the next one thought of."""
        if row.look_at > time.time():
            return
        attempt, backend = self.store.attempt(job, row, spec), self.backend(job.backend)
        try:
            backend.delete(attempt.resource)
        except (Unavailable, ValueError, ImportError) as error:
            self._missed(job, spec, row, str(error))
            return
        seen = backend.observe(attempt)
        if seen.state != "absent":
            if seen.state == "unknown" and job.detail != seen.detail:
                self.store.change(job.id, detail=seen.detail)
            return
        for host, reason in hosts_at_fault(attempt, row):
            self.store.quarantine(job.backend, host, job.id, reason)
        kind: Kind = row.outcome  # pyright: ignore[reportAssignmentType]
        self._conclude(job, spec, row, Outcome(kind, row.detail))

    def _conclude(self, job: Job, spec: Spec, row: Try, found: Outcome) -> None:
        """Nothing is left of it: what follows is decided."""
        now = time.time()
        follows = budget.after(job, spec, found, row.seconds(now), now)
        with self.store.transaction():
            self.store.settle(job.id, row.number, "delete")
            self.store.change_attempt(job.id, row.number, phase="gone")
            self._finish(job, spec, follows, row.number)

    def _finish(self, job: Job, spec: Spec | None, follows: budget.Next, number: int = 0) -> None:
        with self.store.transaction():
            self.store.change(job.id, **follows.changes)
            self.store.note(job.id, number, follows.says)
            if "ended" in follows.changes:
                secrets.forget(self.store.home(job.id))
                if spec is not None and spec.notify:
                    self.store.intend(job.id, 0, "notify")
