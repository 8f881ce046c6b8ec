"""The interface of a backend (local, slurm, gcp_tpu or gke), and logs as files on this machine.

Every call may be made twice: the supervisor records what it is about to do, does it, and records that it is done. If it
is killed in between, it does it again. So `create` succeeds for a name that exists, and `delete` for one that does not.
"""

from __future__ import annotations

import fcntl
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


# --- logs: read part by part, and copied from machines of the cloud ---------------------------------------------------

MAX_PART = 1 << 20  # bytes


def read_log(path: Path, since: int = 0) -> LogPart:
    """Return the part of a log from byte `since` on, whole characters only."""
    if not path.exists():
        return LogPart("", since)
    with path.open("rb") as file:
        file.seek(since)
        data = file.read(MAX_PART)
    cut = _incomplete(data)
    return LogPart(data[: len(data) - cut].decode(errors="replace"), since + len(data) - cut)


def _incomplete(data: bytes) -> int:
    """Return the number of bytes at the end that begin an incomplete UTF-8 character."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < length else 0
        if byte < 0x80:
            return 0
    return 0


def append_log(path: Path, since: int, text: bytes) -> None:
    """Add the bytes of a remote log from `since` on, without those that the copy already has.

    The supervisor and a person who follows the log may fetch the same part.
    """
    if not text:
        return
    files.make_folder(path.parent)
    with open(path, "ab", opener=files.opener) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        length = file.seek(0, 2)
        if length >= since:
            file.write(text[length - since :])


def merge_log(path: Path, text: str) -> None:
    """Add the lines that the copy does not have: hosts and attempts may report the same lines."""
    here = path.read_text().splitlines() if path.exists() else []
    new = [line for line in text.splitlines() if line and line not in here]
    if new:
        files.make_folder(path.parent)
        files.write_text(path, "\n".join([*here, *new]) + "\n")


def log_size(path: Path) -> int:
    """Return the length of the copy in bytes; 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0
