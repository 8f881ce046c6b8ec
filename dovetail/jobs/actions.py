"""Actions on jobs: create, cancel, resume, delete, clean. They change the store; the supervisor carries them out."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dovetail.core.errors import NotPermittedError, UserError
from dovetail.jobs import preflight, secrets, snapshot
from dovetail.jobs.job import CALL_FOLDER, OVER, Job
from dovetail.jobs.spec import Spec, changed
from dovetail.jobs.store import REQUEST_FILE, JobStore, new_id

# Files in a job's folder that the job itself did not write.
OURS = ("code", "code.tar.gz", "attempts", CALL_FOLDER, "notify.log", secrets.FILE, REQUEST_FILE)
WORDS = {"succeeded": "it succeeded", "failed": "it failed", "stopped": "it was stopped"}


def create(
    store: JobStore,
    spec: Spec,
    base: Path | None = None,
    before: Callable[[Path], object] = lambda home: None,
    confirm: Callable[[], object] = lambda: None,
) -> Job:
    """Create a job with a copy of the code.

    Args:
        store: The store.
        spec: What to run.
        base: The folder that `code.path` is relative to.
        before: Called with the job's folder before a supervisor can see the job, to add files that it needs.
        confirm: Called after all checks and before anything is made; it raises to stop.

    Returns:
        The job, with status `queued`.

    Raises:
        UserError: The job could never start.
    """
    check(spec, base)
    spec = replace(spec, after=ids_of(store, spec.after), code=snapshot.settled(spec.code, base))
    confirm()
    values = secrets.take(spec)
    digest = snapshot.take(spec.code, store.snapshots, base) if spec.code.path else ""
    id = new_id()
    home = store.make_home(id)
    try:
        if digest:
            _link(store.snapshots / f"{digest}.tar.gz", home / "code.tar.gz")
        secrets.keep(home, values)
        before(home)
        return store.add(spec, digest, id)
    except BaseException:  # the folder belongs to no job, and may hold secrets
        shutil.rmtree(home, ignore_errors=True)
        raise


def check(spec: Spec, base: Path | None = None) -> None:
    """Raise UserError if `create` would refuse the job; make nothing."""
    preflight.check(spec, snapshot.command_folder(spec.code, base))


def ids_of(store: JobStore, names: Sequence[str]) -> tuple[str, ...]:
    """Return the ids of jobs that are given by id, the beginning of one, or name."""
    return tuple(store.find(name).id for name in names)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


def cancel(store: JobStore, job: Job) -> Job:
    """Stop a job: it has `ceiling.grace` seconds to save and end, and `resume` continues it.

    A second cancel kills it at once.
    """
    if job.is_over:
        raise UserError(
            f"job {job.id} is over already: {WORDS.get(job.status, 'it was cancelled')}", param="JOB", code="job_over"
        )
    wanted = "stop" if job.wanted == "run" else "kill"
    with store.transaction():
        store.change(job.id, wanted=wanted)
        store.note(job.id, job.attempts, "asked to cancel" if wanted == "stop" else "asked to kill it at once")
    return store.job(job.id)


def resume(store: JobStore, job: Job, words: Sequence[str] = ()) -> Job:
    """Start a job again from where its last attempt stopped, with its full budgets.

    Args:
        store: The store.
        job: A job that is over and did not succeed.
        words: key=value changes of its spec. Only its user may change it, at its site, because it runs as that user.
    """
    if not job.is_over:
        raise UserError(f"job {job.id} is not over: it is {job.status}", param="JOB", code="job_not_over")
    if job.status == "succeeded":
        raise UserError(f"job {job.id} has succeeded: create another to run it again", param="JOB", code="job_over")
    if words and not store.is_ours(job):
        raise NotPermittedError(
            f"job {job.id} runs as {job.user} at {job.site.rpartition(' ')[0] or store.root}, so only {job.user} may "
            f"change its spec, there; got {_without_values(words[0])}. Resume it without changes, or create your own"
        )
    if store.is_ours(job):
        store.check_request(job)  # a change that another user wrote into the table must not become this user's own
    before = store.spec(job.id)
    spec = changed(before, words)
    spec = replace(spec, after=ids_of(store, spec.after)) if spec.after != before.after else spec
    if job.site == store.site:  # only machines of its site can check whether it starts
        code = store.home(job.id) / "code" / spec.code.cwd
        preflight.check(spec, code if code.is_dir() else None)
        if words:
            preflight.check_place(spec)
        secrets.keep(store.home(job.id), secrets.take(spec))
    elif secrets.names(spec):
        store.refuse_elsewhere(job, "its secrets are not in the database, so resume it")
    with store.transaction():
        if spec != before:
            store.change_spec(job.id, spec)
        store.change(
            job.id, wanted="run", status="queued", detail="", ended=None, not_before=0.0, preemptions=0, faults=0,
            failures=0, in_a_row=0, resumed=job.attempts,
        )  # fmt: skip
        store.note(job.id, job.attempts, " ".join(["resumed", *map(_without_values, words)]))
    return store.job(job.id)


def _without_values(word: str) -> str:
    """Return a changed key as history shows it, without the values of variables."""
    return f"env={secrets.MASK}" if word.startswith("env=") else word


def delete(store: JobStore, job: Job) -> None:
    """Remove the rows, logs, code and results of a job of this user that is over."""
    check_delete(store, job)
    home = store.home(job.id)
    if home.exists():
        shutil.rmtree(home)
    store.remove(job.id)


def check_delete(store: JobStore, job: Job) -> None:
    """Raise UserError if the job may not be deleted, or not by this user."""
    store.refuse_elsewhere(job, "delete it")
    if job.user != store.user:
        raise NotPermittedError(f"only {job.user} may delete job {job.id}; you are {store.user}")
    if not job.is_over:
        raise UserError(
            f"job {job.id} is {job.status}: cancel it first, then delete it when it is over", param="JOB",
            code="job_not_over",
        )  # fmt: skip


def size(store: JobStore, job: Job) -> int:
    """Return the bytes of a job's folder, without files that this user may not read."""
    return sum(path.lstat().st_size for path in _files(store.home(job.id)) if os.path.lexists(path))


def has_results(store: JobStore, job: Job) -> bool:
    """Return whether the job itself wrote files to its folder: a run, checkpoints, other files."""
    home = store.home(job.id)
    if home.is_dir() and any(path.name not in OURS for path in home.iterdir()):
        return True
    given = set(snapshot.names(home / "code.tar.gz")) if job.snapshot else set()
    written = (path.relative_to(home / "code") for path in _files(home / "code"))  # a command's working directory
    return any(str(path) not in given and path.parent.name != "__pycache__" for path in written)


def _files(folder: Path) -> Iterator[Path]:
    return (Path(where) / name for where, _, names in os.walk(folder) for name in names)


def old(
    store: JobStore, older: float, statuses: Sequence[str] = OVER, runs: bool = False
) -> tuple[list[Job], list[Job]]:
    """Return this user's jobs that have been over for `older` seconds: (those to delete, those to keep).

    Succeeded jobs with results are kept, unless `runs`.
    """
    before = time.time() - older
    over = [job for job in store.jobs(statuses) if job.is_over and (job.ended or job.changed) <= before]
    own = [job for job in over if store.is_ours(job)]
    kept = [job for job in own if not runs and job.status == "succeeded" and has_results(store, job)]
    return [job for job in own if job not in kept], kept


def clean(store: JobStore, jobs: Sequence[Job]) -> None:
    """Delete jobs, and snapshots that no job uses. If one may not be deleted, none is."""
    for job in jobs:
        check_delete(store, job)
    for job in jobs:
        delete(store, job)
    kept = {job.snapshot for job in store.jobs()}
    for archive in store.snapshots.glob("*.tar.gz"):
        if archive.name.removesuffix(".tar.gz") not in kept:
            archive.unlink(missing_ok=True)
