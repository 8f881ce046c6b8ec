"""`@dt.remote`: a plain function that runs as a job.

@dt.remote(backend="slurm", hosts=2)
def measure(size):
    ...
    return seconds

measure(8)                       # in this process
measure.run(8)                   # as a job; prints its output, and returns the value of the first process
handle = measure.submit(8)       # does not wait; attach(handle.id) returns the same handle anywhere
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
from typing import Any, Generic, ParamSpec, TypeVar, overload

from dovetail.core.errors import NotPermittedError, RecipeError
from dovetail.core.reporter import printable
from dovetail.jobs import actions, call, logs, preflight, presence
from dovetail.jobs.backends import chooser
from dovetail.jobs.files import jobs_home
from dovetail.jobs.job import CALL_FOLDER, Attempt, Job
from dovetail.jobs.spec import Spec, make
from dovetail.jobs.store import JobStore

POLL_S = 0.1
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class RemoteError(RuntimeError):
    """Report a job that ended without a value or an exception of its function."""


class RemoteTraceback(Exception):
    """Show the traceback of an exception in another process."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


@dataclasses.dataclass(frozen=True)
class Handle(Generic[R_co]):
    """Refer to a submitted call. `attach(handle.id)` returns an equal handle wherever the store is visible."""

    id: str
    root: Path

    @functools.cached_property
    def store(self) -> JobStore:
        """Return the store of the job."""
        return JobStore(self.root)

    @property
    def job(self) -> Job:
        """Return the job as it is now."""
        return self.store.job(self.id)

    def done(self) -> bool:
        """Return whether the job is over."""
        return self.job.is_over

    def cancel(self) -> None:
        """Cancel the job; a second call kills it."""
        actions.cancel(self.store, self.job)
        presence.ensure(self.root)

    def logs(self, rank: int = 0) -> str:
        """Return what a process of the last attempt has written so far."""
        path = self.store.home(self.id) / "attempts" / str(max(1, self.job.attempts)) / f"rank{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def result(self, timeout: float | None = None) -> R_co:
        """Wait for the function's value and return it.

        Args:
            timeout: Seconds to wait; for ever if not given.

        Raises:
            TimeoutError: The job is not over; it continues.
            RemoteError: The job ended without a value.
            Exception: The function's own exception.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with _explained((self,)):
            while not self.done():
                if until is not None and time.monotonic() > until:
                    raise TimeoutError(f"job {self.id} is {self.job.status} after {timeout:g} s; it continues")
                presence.ensure(self.root)
                time.sleep(POLL_S)
        return self._answer(self.job)

    def follow(self) -> None:
        """Print the output of its processes until it is over."""
        choose, news = chooser(self.root, self.store.owner), logs.waiting(self.store, self.id)

        def poll() -> None:
            presence.ensure(self.root)
            if why := news():
                print(why, file=sys.stderr)

        lines = logs.follow_job(self.store, choose, self.id, _all_ranks, poll=poll)
        with _explained((self,)):
            for attempt, rank, line in lines:
                print(f"{rank} | {printable(line)}" if attempt.spec.processes > 1 else printable(line), flush=True)

    def _answer(self, job: Job) -> R_co:
        self.store.refuse_elsewhere(job, "its value is")
        if job.user != self.store.user:
            raise NotPermittedError(
                f"job {job.id} is {job.user}'s: reading a value may run code, so only {job.user} may read it"
            )
        folder, row = self.store.home(self.id) / CALL_FOLDER, self.store.last(self.id)
        number, rank = (row.number, row.failed_rank or 0) if row else (0, 0)
        names = [f"{number}.{call.RESULT}"] + [f"{number}.{rank}.{call.RESULT}"] * bool(rank)
        found = [folder / name for name in reversed(names) if (folder / name).exists()]
        if job.status not in ("succeeded", "failed") or not found:
            why = printable(job.detail) or "it left no result"
            raise RemoteError(f"job {self.id} {job.status}: {why}; see `dovetail job logs {self.id}`")
        answer = pickle.loads(call.read(found[0], call.read_key(folder)))
        if "error" in answer:
            raise answer["error"] from RemoteTraceback(answer["traceback"])
        return answer["value"]


def _all_ranks(attempt: Attempt) -> range:
    return range(attempt.spec.processes)


@contextlib.contextmanager
def _explained(handles: Sequence[Handle[Any]]) -> Iterator[None]:
    """At ctrl-C, print that the jobs continue."""
    try:
        yield
    except KeyboardInterrupt:
        for handle in handles:
            if not (job := handle.job).is_over:
                attached = f"dovetail.jobs.remote.attach({job.id!r}).result() returns its value"
                print(f"\n{logs.goes_on(job)}, and {attached}", file=sys.stderr)
        raise


def attach(id: str, root: Path | None = None) -> Handle[Any]:
    """Return the handle of a call that another process submitted.

    Args:
        id: The job's id, the beginning of it, or its name.
        root: The folder of jobs; `$DOVETAIL_JOBS` or the default if not given.
    """
    root = root or jobs_home()
    return Handle(JobStore(root).find(id).id, root)


class RemoteFunction(Generic[P, R]):
    """Add `run`, `submit` and `map` to a function; calling it runs the function in this process."""

    def __init__(self, function: Callable[P, R], options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.function, self.options = function, dict(options)
        self._spec("true")  # refuse wrong options where they are written

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function in this process."""
        return self.function(*args, **kwargs)

    def run(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function as a job, print its output, and return its value."""
        handle = self.submit(*args, **kwargs)
        handle.follow()
        return handle.result()

    def map(self, *iterables: Iterable[Any]) -> list[R]:
        """Run one job per item, as the built-in `map`; raise the first exception once all jobs are over."""
        handles = [self._submit(args, {}) for args in zip(*iterables, strict=True)]
        with _explained(handles):
            while not all(handle.done() for handle in handles):
                time.sleep(POLL_S)
        return [handle.result() for handle in handles]

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Create the job and return its handle; the job continues if this process ends."""
        return self._submit(args, kwargs)

    def _submit(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Handle[R]:
        data, store = call.packed(self.function, args, kwargs), JobStore(jobs_home())
        folder = f'"$DOVETAIL_JOB_DIR"/{CALL_FOLDER}'
        python = "python" if self.options.get("environment") else shlex.quote(sys.executable)
        spec = self._spec(f"exec {python} -m dovetail.jobs.call {folder}")
        job = actions.create(store, spec, before=lambda home: _write_call(home / CALL_FOLDER, data))
        store.close()
        presence.ensure(store.root)
        return Handle(job.id, store.root)

    def _spec(self, command: str) -> Spec:
        given = dict(self.options)
        if given.pop("spot", False):
            given.setdefault("tier", "spot")
        given.setdefault("name", getattr(self.function, "__name__", "").strip("<>_") or "remote")
        given["command"] = command
        environment = given.get("environment") or {}
        if not environment:
            given["env"] = [*given.get("env", ()), f"PYTHONPATH={_import_path()}"]
        if not environment.get("lock"):  # the lock file is in the code's folder
            given.setdefault("code", {"path": ""})
        spec = make(given)
        _check(spec)
        return spec


def _write_call(folder: Path, data: bytes) -> None:
    call.write(folder / call.CALL, data, call.make_key(folder))


@overload
def remote(function: Callable[P, R], **options: Any) -> RemoteFunction[P, R]: ...
@overload
def remote(function: None = None, **options: Any) -> Callable[[Callable[P, R]], RemoteFunction[P, R]]: ...
def remote(function: Callable[P, R] | None = None, **options: Any) -> Any:
    """Make a function that can run as a job: `@remote`, or `@remote(accelerator=..., backend=..., hosts=2, ...)`.

    Args:
        function: The function to decorate.
        **options: Keys of a job's spec, and `spot=True` for `tier="spot"`.

    Returns:
        A RemoteFunction, or a decorator if only options are given.

    Raises:
        UserError: An option is unknown, or the place cannot run the function.
    """
    for name in ("command", "recipe"):
        if name in options:
            raise RecipeError(
                f"`{name}` is not an option of a remote function: the function is the command", param=name
            )
    if function is not None:
        return RemoteFunction(function, options)
    return lambda decorated: RemoteFunction(decorated, options)


def _check(spec: Spec) -> None:
    """Refuse a place that does not exist, and a machine without this one's files that lacks an environment."""
    preflight.check_place(spec)
    given = spec.environment
    if spec.backend == "gcp-tpu" and not (given.lock or given.venv or given.conda):
        raise RecipeError(
            "a remote function on gcp-tpu needs an environment with dovetail and the same Python as here: "
            "environment={'lock': 'requirements.lock'}, or 'venv' or 'conda'",
            param="environment",
        )
    if spec.backend == "gke" and not (given.image and spec.gke.bucket):
        raise RecipeError(
            "a remote function on gke needs environment={'image': ...}, with dovetail and the same Python as here, and "
            "gke={'bucket': 'gs://...'}, for its arguments and its value",
            param="environment" if spec.gke.bucket else "gke.bucket",
        )


def _import_path() -> str:
    """Return a PYTHONPATH with which the other process can import what this one can."""
    here = [str(Path(__file__).parents[2]), os.getcwd(), *(os.environ.get("PYTHONPATH") or "").split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(path for path in here if path))
