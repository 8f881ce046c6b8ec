"""What people do with jobs: create, cancel, resume, delete, clean. Each changes the store; the supervisor does it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dovetail.core.errors import UserError
from dovetail.jobs import asked, gate, preflight, secrets, sensitive, snapshot
from dovetail.jobs.attempt import CALL
from dovetail.jobs.job import OVER, Job
from dovetail.jobs.spec import Spec, changed
from dovetail.jobs.store import Store, new_id

# In a job's folder: the rest was written by the job.
OURS = ("code", "code.tar.gz", "attempts", CALL, "notify.log", secrets.FILE, asked.FILE)


def create(
    store: Store,
    spec: Spec,
    base: Path | None = None,
    before: Callable[[Path], object] = lambda home: None,
    confirm: Callable[[], object] = lambda: None,
) -> Job:
    """A job with the code as it is now. `base`: what code.path is relative to. `before` is given the job's folder, to
    put there what the job needs, before any supervisor hears of it. `confirm` is called once the job is known to be
    able to start, and before anything is made; it raises to stop."""
    check(spec, base)
    spec = replace(spec, after=ids_of(store, spec.after), code=snapshot.settled(spec.code, base))
    confirm()
    values = secrets.take(spec)
    digest = snapshot.take(spec.code, store.snapshots, base) if spec.code.path else ""
    id = new_id()
    home = store.home(id)
    asked.make_home(home)
    try:
        if digest:
            _link(store.snapshots / f"{digest}.tar.gz", home / "code.tar.gz")
        secrets.keep(home, values)
        before(home)
        return store.add(spec, digest, id)
    except BaseException:  # no job knows of the folder, which may hold secrets
        shutil.rmtree(home, ignore_errors=True)
        raise


def check(spec: Spec, base: Path | None = None) -> None:
    """Raise ValueError or ImportError where `create` would refuse the job, and make nothing."""
    preflight.check(spec, snapshot.command_folder(spec.code, base))


def ids_of(store: Store, names: Sequence[str]) -> tuple[str, ...]:
    """Return the ids of jobs that are given by id, the beginning of one, or name."""
    return tuple(store.find(name).id for name in names)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


def cancel(store: Store, job: Job) -> Job:
    """Tell it to stop: it has `ceiling.grace` seconds to save and end, and `resume` continues from there. A second
    cancel kills it at once."""
    if job.is_over:
        raise UserError(f"job {job.id} is over already: it {_word(job)}")
    wanted = "stop" if job.wanted == "run" else "kill"
    with store.transaction():
        store.change(job.id, wanted=wanted)
        store.note(job.id, job.attempts, "asked to cancel" if wanted == "stop" else "asked to kill it at once")
    return store.job(job.id)


def resume(store: Store, job: Job, words: Sequence[str] = ()) -> Job:
    """Start it again, its budgets full, where its last attempt stopped. `words`: key=value to change in its spec, which
    only its user may do, at its site: it runs there as that user."""
    if not job.is_over:
        raise UserError(f"job {job.id} is not over: it is {job.status}")
    if job.status == "succeeded":
        raise UserError(f"job {job.id} has succeeded: create another to run it again")
    if words and not store.is_ours(job):
        raise UserError(
            f"job {job.id} runs as {job.user} at {job.site.rpartition(' ')[0] or store.root}, so only {job.user} may "
            f"change its spec, there; got {_without_values(words[0])}. Resume it without changes, or create your own"
        )
    if store.is_ours(job):
        store.check_asked(job)  # what another wrote into the table must not become the user's own
    before = store.spec(job.id)
    spec = changed(before, words)
    spec = replace(spec, after=ids_of(store, spec.after)) if spec.after != before.after else spec
    if job.site == store.site:  # elsewhere, only that site's machines can say whether it starts
        code = store.home(job.id) / "code" / spec.code.cwd
        preflight.check(spec, code if code.is_dir() else None)
        if words:
            gate.check_place(spec)
        secrets.keep(store.home(job.id), secrets.take(spec))
    elif secrets.names(spec):
        store.refuse_elsewhere(job, "its secrets are not kept in the database, so resume it")
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
    """Return a changed key as history shows it: variables by their names alone."""
    return f"env={sensitive.MASK}" if word.startswith("env=") else word


def delete(store: Store, job: Job) -> None:
    """Remove its rows, logs, code and run. Only what is over (then no backend holds anything for it), and one's own."""
    refuse_delete(store, job)
    home = store.home(job.id)
    if home.exists():
        shutil.rmtree(home)
    store.remove(job.id)


def refuse_delete(store: Store, job: Job) -> None:
    """Raise ValueError where it may not be deleted, or not by this user."""
    store.refuse_elsewhere(job, "delete it")
    if job.user != store.user:
        raise UserError(f"job {job.id} is {job.user}'s, and only {job.user} may delete it; you are {store.user}")
    if not job.is_over:
        raise UserError(f"job {job.id} is {job.status}: cancel it first, then delete it when it is over")


def size(store: Store, job: Job) -> int:
    """Bytes of its folder; what this user may not read counts as nothing."""
    return sum(path.lstat().st_size for path in _files(store.home(job.id)) if os.path.lexists(path))


def has_results(store: Store, job: Job) -> bool:
    """Whether its folder holds what the job itself wrote: a training's run, checkpoints, other files."""
    home = store.home(job.id)
    if home.is_dir() and any(path.name not in OURS for path in home.iterdir()):
        return True
    given = set(snapshot.names(home / "code.tar.gz")) if job.snapshot else set()
    written = (path.relative_to(home / "code") for path in _files(home / "code"))  # a command's working directory
    return any(str(path) not in given and path.parent.name != "__pycache__" for path in written)


def _files(folder: Path) -> Iterator[Path]:
    return (Path(where) / name for where, _, names in os.walk(folder) for name in names)


def old(store: Store, older: float, statuses: Sequence[str] = OVER, runs: bool = False) -> tuple[list[Job], list[Job]]:
    """This user's jobs that have been over for `older` seconds: (those to delete, those to keep).

    Succeeded jobs with results are kept, unless `runs`.
    """
    before = time.time() - older
    over = [job for job in store.jobs(statuses) if job.is_over and (job.ended or job.changed) <= before]
    own = [job for job in over if store.is_ours(job)]
    kept = [job for job in own if not runs and job.status == "succeeded" and has_results(store, job)]
    return [job for job in own if job not in kept], kept


def clean(store: Store, jobs: Sequence[Job]) -> None:
    """Delete `jobs`, as `delete` does, and snapshots that no job has. Where one may not be deleted, none is."""
    for job in jobs:
        refuse_delete(store, job)
    for job in jobs:
        delete(store, job)
    kept = {job.snapshot for job in store.jobs()}
    for archive in store.snapshots.glob("*.tar.gz"):
        if archive.name.removesuffix(".tar.gz") not in kept:
            archive.unlink(missing_ok=True)


def _word(job: Job) -> str:
    return {"succeeded": "succeeded", "failed": "failed", "stopped": "was stopped"}.get(job.status, "was cancelled")
