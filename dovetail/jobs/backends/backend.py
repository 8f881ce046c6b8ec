"""The interface of a backend: local, slurm, gcp_tpu or gke.

Every call may be made twice: the supervisor records what it is about to do, does it, and records that it is done. If it
is killed in between, it does it again. So `create` succeeds for a name that exists, and `delete` for one that does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from dovetail.core.errors import UserError
from dovetail.jobs import files
from dovetail.jobs.job import Attempt, Resource
from dovetail.jobs.spec import Spec

State = Literal[
    "absent",  # the backend says that nothing of this name exists
    "waiting",  # requested: queued, or being created
    "running",
    "succeeded",  # every process exited with 0
    "failed",  # with exit_code, if the backend knows it
    "preempted",  # taken away by the backend
    "cancelled",  # by a person, with the backend's own command (scancel)
    "suspended",  # as preempted, but it counts against the quota until it is deleted
    "unknown",  # the request failed: repeated later, and nothing is concluded
]
OVER: tuple[State, ...] = ("succeeded", "failed", "preempted", "cancelled", "suspended")


@dataclass(frozen=True)
class Observed:
    """Hold the state of an attempt, as the backend sees it."""

    state: State
    detail: str = ""  # one line for people: the backend's own word for the state, or what failed
    hosts: tuple[str, ...] = ()  # by rank, if they are known
    exit_code: int | None = None  # of the process that decided the end; 128 + n for signal n
    failed_rank: int | None = None  # the first that failed
    handle: str = ""  # if it was not known before
    zone: str = ""  # if it was not known before: the partition that Slurm chose
    restarts: int = 0  # how often the backend's own queue restarted it


class UnavailableError(UserError):
    """Report that a backend could not do something now (a timeout, 429, 5xx, no quota or capacity).

    The supervisor tries again; with `elsewhere` it tries the next zone first. A request that can never succeed raises
    another UserError.
    """

    def __init__(self, message: str, elsewhere: bool = False) -> None:
        super().__init__(message, code="backend_unavailable")
        self.elsewhere = elsewhere


class RefusedJobError(UserError):
    """Report a `create` that can never succeed and made no request, so that there is nothing to delete."""


@contextmanager
def before_request() -> Iterator[None]:
    """Turn user errors into RefusedJobError, around the part of `create` before its first request."""
    try:
        yield
    except UnavailableError:
        raise
    except UserError as error:
        raise RefusedJobError(str(error), param=error.param, code=error.code) from error


@dataclass(frozen=True)
class LogPart:
    """Hold a part of a rank's log, and the byte at which the next part begins."""

    text: str
    position: int


class JobBackend(Protocol):
    """Define the interface of a place where jobs run.

    Calls return within seconds: longer operations are only requested, and `observe` shows their progress. Several
    threads make calls, but only one at a time for each job.
    """

    def check(self, spec: Spec) -> None:
        """Raise UserError for a spec that can never start here, without making any request.

        `dovetail job create` calls it before a job exists, and `create` at every start.
        """
        ...

    def create(self, attempt: Attempt) -> str:
        """Request the resource `attempt.name` and return its handle.

        After an UnavailableError the call is repeated; the resource may exist nevertheless.
        """
        ...

    def observe(self, attempt: Attempt) -> Observed:
        """Return the state of an attempt; a failing network gives the state `unknown`."""
        ...

    def stop(self, attempt: Attempt, grace: float) -> None:
        """Send SIGTERM to the processes, so that they save and end, and end them after `grace` seconds.

        With a grace of 0 they are ended at once, even if an earlier call gave them time.
        """
        ...

    def delete(self, resource: Resource) -> None:
        """Request the deletion of a resource; `observe` then becomes `absent`."""
        ...

    def list(self) -> Sequence[Resource]:
        """Return everything with our owner's label, in every zone that jobs have used.

        Raise UnavailableError rather than return a part.
        """
        ...

    def logs(self, attempt: Attempt, rank: int, since: int = 0) -> LogPart:
        """Return the part of a log that begins at byte `since`; an empty part if there is nothing new."""
        ...

    def command(self, attempt: Attempt, rank: int) -> list[str]:
        """Return a command line that opens a shell beside the process of a rank."""
        ...


class Places:
    """Record the places in which a backend has made requests: projects and zones, or clusters.

    The orphan reaper lists all of them, so a place is recorded before the first request there. Lines are only appended
    to the file, so that several processes may share it.
    """

    def __init__(self, root: Path, backend: str) -> None:
        self._path = Path(root) / "places" / backend

    def add(self, *words: str) -> None:
        """Record a place."""
        if words in self.all():
            return
        files.make_folder(self._path.parent)
        line = "\t".join(words) + "\n"
        with open(self._path, "ab", buffering=0, opener=files.opener) as file:
            file.write(line.encode())
            os.fsync(file.fileno())

    def all(self) -> list[tuple[str, ...]]:
        """Return all places, sorted."""
        if not self._path.exists():
            return []
        return sorted({tuple(line.split("\t")) for line in self._path.read_text().splitlines() if line})
