"""`@dt.remote`: a plain function that runs as a job.

@dt.remote(backend="slurm", hosts=2)
def measure(size):
    ...
    return seconds

measure(8)                       # here, as ever
measure.run(8)                   # as a job; prints what it prints, and returns the first process's value
handle = measure.submit(8)       # does not wait: handle.id is a job's, attach(id) finds it again from anywhere
measure.map([8, 16, 32])         # one job each
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pickle
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.core.errors import UserError
from dovetail.core.printable import printable
from dovetail.jobs import actions, gate, logs, parcel, presence
from dovetail.jobs.attempt import CALL as FOLDER
from dovetail.jobs.attempt import Attempt
from dovetail.jobs.backends.choose import chooser
from dovetail.jobs.call import CALL, RESULT
from dovetail.jobs.home import jobs_home
from dovetail.jobs.job import Job
from dovetail.jobs.spec import Spec, make
from dovetail.jobs.store import Store

POLL_S = 0.1


class RemoteError(RuntimeError):
    """The job ended, and not by the function's own doing."""


class RemoteTraceback(Exception):
    """What stands above the exception, as text: the frames are another process's."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


@dataclasses.dataclass(frozen=True)
class Handle:
    """A call under way. Where its store is seen, `attach(handle.id)` is the same handle."""

    id: str
    root: Path

    @functools.cached_property
    def store(self) -> Store:
        return Store(self.root)

    @property
    def job(self) -> Job:
        return self.store.job(self.id)

    def done(self) -> bool:
        return self.job.is_over

    def cancel(self) -> None:
        actions.cancel(self.store, self.job)
        presence.ensure(self.root)

    def logs(self, rank: int = 0) -> str:
        """What a process of the last attempt has written so far."""
        path = self.store.home(self.id) / "attempts" / str(max(1, self.job.attempts)) / f"rank{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def result(self, timeout: float | None = None) -> Any:
        """The value, once there is one; the function's own exception where it raised one."""
        until = None if timeout is None else time.monotonic() + timeout
        with _explained((self,)):
            while not self.done():
                if until is not None and time.monotonic() > until:
                    raise TimeoutError(f"job {self.id} is {self.job.status} after {timeout:g} s; it goes on")
                presence.ensure(self.root)
                time.sleep(POLL_S)
        return self._answer(self.job)

    def follow(self) -> None:
        """Print what its processes print, until it is over."""
        choose, news = chooser(self.root, self.store.owner), logs.waiting(self.store, self.id)

        def poll() -> None:
            presence.ensure(self.root)
            if why := news():
                print(why, file=sys.stderr)

        lines = logs.follow_job(self.store, choose, self.id, _all_ranks, poll=poll)
        with _explained((self,)):
            for attempt, rank, line in lines:
                print(f"{rank} | {printable(line)}" if attempt.spec.processes > 1 else printable(line), flush=True)

    def _answer(self, job: Job) -> Any:
        self.store.refuse_elsewhere(job, "its value is")
        if job.user != self.store.user:
            raise UserError(
                f"job {job.id} is {job.user}'s, and a value is code to whoever reads it: only {job.user} may"
            )
        folder, row = self.store.home(self.id) / FOLDER, self.store.last(self.id)
        number, rank = (row.number, row.failed_rank or 0) if row else (0, 0)
        names = [f"{number}.{RESULT}"] + [f"{number}.{rank}.{RESULT}"] * bool(rank)
        found = [folder / name for name in reversed(names) if (folder / name).exists()]
        if job.status not in ("succeeded", "failed") or not found:
            why = printable(job.detail) or "it left no result"
            raise RemoteError(f"job {self.id} {job.status}: {why}; dovetail job logs {self.id}")
        answer = pickle.loads(parcel.read(found[0], parcel.key_of(folder)))
        if "error" in answer:
            raise answer["error"] from RemoteTraceback(answer["traceback"])
        return answer["value"]


def _all_ranks(attempt: Attempt) -> range:
    return range(attempt.spec.processes)


@contextlib.contextmanager
def _explained(handles: Sequence[Handle]) -> Iterator[None]:
    """At ctrl-C, say what becomes of the jobs."""
    try:
        yield
    except KeyboardInterrupt:
        for handle in handles:
            if not (job := handle.job).is_over:
                attached = f"dovetail.jobs.remote.attach({job.id!r}).result() returns its value"
                print(f"\n{logs.goes_on(job)}, and {attached}", file=sys.stderr)
        raise


def attach(id: str, root: Path | None = None) -> Handle:
    """The handle of a call that was submitted elsewhere, or by a process that has ended."""
    root = root or jobs_home()
    return Handle(Store(root).find(id).id, root)


class Remote:
    """A function with `.run`, `.submit` and `.map`; called, it is the function."""

    def __init__(self, function: Callable, options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.function, self.options = function, dict(options)
        self._spec("true")  # a wrong option is refused where it is written

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Create the job, print what the function prints, and return its value."""
        handle = self.submit(*args, **kwargs)
        handle.follow()
        return handle.result()

    def map(self, *iterables: Iterable[Any]) -> list[Any]:
        """As the built-in, a job for each; the first exception, where there is one, once all have ended."""
        handles = [self.submit(*args) for args in zip(*iterables, strict=True)]
        with _explained(handles):
            while not all(handle.done() for handle in handles):
                time.sleep(POLL_S)
        return [handle.result() for handle in handles]

    def submit(self, *args: Any, **kwargs: Any) -> Handle:
        """Create the job; it goes on if this process ends."""
        data, store = parcel.packed(self.function, args, kwargs), Store(jobs_home())
        folder = f'"$DOVETAIL_JOB_DIR"/{FOLDER}'
        python = "python" if self.options.get("environment") else shlex.quote(sys.executable)
        spec = self._spec(f"exec {python} -m dovetail.jobs.call {folder}")
        job = actions.create(store, spec, before=lambda home: _put(home / FOLDER, data))
        store.close()
        presence.ensure(store.root)
        return Handle(job.id, store.root)

    def _spec(self, command: str) -> Spec:
        given = dict(self.options)
        if given.pop("spot", False):
            given.setdefault("tier", "spot")
        given.setdefault("name", self.function.__name__.strip("<>_") or "remote")
        given["command"] = command
        environment = given.get("environment") or {}
        if not environment:
            given["env"] = [*given.get("env", ()), f"PYTHONPATH={_import_path()}"]
        if not environment.get("lock"):  # which lies in the code's folder
            given.setdefault("code", {"path": ""})
        spec = make(given)
        _check(spec)
        return spec


def _put(folder: Path, data: bytes) -> None:
    parcel.write(folder / CALL, data, parcel.make_key(folder))


def remote(function: Callable | None = None, **options: Any) -> Any:
    """`@remote` or `@remote(accelerator=..., backend=..., spot=True, hosts=2, ...)`: the keys of a job's spec."""
    for name in ("command", "recipe"):
        if name in options:
            raise UserError(f"{name} is not for a remote function: the function is what runs")
    if function is not None:
        return Remote(function, options)
    return lambda decorated: Remote(decorated, options)


def _check(spec: Spec) -> None:
    """Refuse a place that does not exist, and a machine without this one's files that is not given what it needs."""
    gate.check_place(spec)
    given = spec.environment
    if spec.backend == "gcp-tpu" and not (given.lock or given.venv or given.conda):
        raise UserError(
            "a remote function on gcp-tpu needs an environment with dovetail and the same Python as here: "
            "environment={'lock': 'requirements.lock'}, or 'venv' or 'conda'"
        )
    if spec.backend == "gke" and not (given.image and spec.gke.bucket):
        raise UserError(
            "a remote function on gke needs environment={'image': ...}, with dovetail and the same Python as here, and "
            "gke={'bucket': 'gs://...'}, through which its arguments and its value travel"
        )


def _import_path() -> str:
    """What this process can import, the other one can."""
    here = [str(Path(__file__).parents[2]), os.getcwd(), *(os.environ.get("PYTHONPATH") or "").split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(path for path in here if path))
