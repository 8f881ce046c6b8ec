"""A job, its attempts and its events: the rows of the store, and the attempt that a backend receives."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from dovetail.jobs.spec import Spec

# error: the supervisor itself failed at this job; it tries again, and `detail` gives the reason.
Status = Literal["queued", "waiting", "running", "stopping", "error", "succeeded", "failed", "stopped", "cancelled"]
OVER: tuple[Status, ...] = ("succeeded", "failed", "stopped", "cancelled")
ACTIVE: tuple[Status, ...] = ("queued", "waiting", "running", "stopping", "error")
Wanted = Literal["run", "stop", "kill"]  # stop: with time to save; kill: at once
# creating: `create` is in progress, or was when the supervisor died. ending: it has ended, and its resources are being
# deleted. gone: the backend holds nothing for it.
Phase = Literal["creating", "live", "ending", "gone"]
PREFIX = "dt"  # of the names of all resources
CALL_FOLDER = "call"  # in the job's folder: the arguments and the result of a remote function (call.py)


def where(backend: str, zone: str, handle: str) -> str:
    """Return `local`, `gcp-tpu us-east5-b`, or for Slurm its job id and partition: `slurm 4711 low`."""
    return " ".join(filter(None, (backend, handle if backend == "slurm" else "", zone)))


class Job(NamedTuple):
    """Hold one row of the table of jobs, without the spec (`JobStore.spec`). A tuple, because lists have thousands."""

    id: str
    name: str
    user: str
    backend: str
    accelerator: str
    status: Status
    wanted: Wanted
    detail: str
    zone: str
    host: str  # host 0 of the last attempt
    snapshot: str
    created: float
    changed: float
    ended: float | None
    not_before: float  # the earliest start of the next attempt
    attempts: int
    preemptions: int
    faults: int
    failures: int
    in_a_row: int  # attempts in a row that ended after little work
    place: int  # index of the next attempt's accelerator and zone in the spec's lists
    seconds: float  # running time of all attempts
    dollars: float
    resumed: int  # number of the last attempt before `resume`: attempts up to it count in no budget
    site: str  # where its files are; "" with SQLite, which has one site

    @property
    def is_over(self) -> bool:
        """Return whether no further attempt follows."""
        return self.status in OVER


@dataclass(frozen=True)
class AttemptRow:
    """Hold one row of the table of attempts."""

    job: str
    number: int
    phase: Phase
    state: str  # as the backend last reported
    detail: str
    zone: str
    accelerator: str
    handle: str
    hosts: str  # by rank, separated by commas
    exclude: str  # hosts in quarantine, separated by commas
    outcome: str  # an outcome.Kind; "" before the end
    exit_code: int | None
    failed_rank: int | None
    created: float
    started: float | None  # when it last began to run
    ran: float  # seconds that it ran before `started`: a backend's own queue may requeue and restart it
    ended: float | None
    stop_sent: float | None  # when it was sent the stop signal
    absent_since: float | None  # since when the backend has reported that it does not exist
    look_at: float  # not observed before this time, after a call that failed
    misses: int  # calls in a row that failed
    restarts: int  # how often the backend's own queue has restarted it

    def seconds(self, now: float) -> float:
        """Return the running time so far."""
        return self.ran + ((self.ended or now) - self.started if self.started else 0.0)


@dataclass(frozen=True)
class Event:
    """Hold one line of a job's history."""

    job: str
    number: int  # of the attempt; 0: of the job itself
    at: float
    what: str


@dataclass(frozen=True)
class Resource:
    """Describe what a backend holds under one name, with everything that deleting it requires."""

    name: str
    zone: str = ""
    handle: str = ""  # the backend's own id (Slurm's job number), if it has one

    @property
    def attempt(self) -> tuple[str, int] | None:
        """(job, number) if the name is one that `Attempt.name` makes."""
        match = re.fullmatch(rf"{PREFIX}-([a-z0-9]+)-(\d+)", self.name)
        return (match[1], int(match[2])) if match else None


@dataclass(frozen=True)
class Attempt:
    """Describe one start of a job, as a backend receives it.

    The name depends only on the job and the number, so that creating an attempt twice makes one resource.
    """

    job: str  # the id: lower-case letters and digits, a letter first
    number: int  # from 1
    spec: Spec  # with the accelerator of this attempt
    home: Path  # the job's folder on this machine: code.tar.gz, code/, run/ and attempts/N
    owner: str = ""  # of the store: the label of all our resources (lower-case letters and digits)
    zone: str = ""
    handle: str = ""  # as `create` returned it; "" before
    exclude: tuple[str, ...] = ()  # hosts in quarantine
    snapshot: str = ""  # digest of home/code.tar.gz; "": no code

    @property
    def name(self) -> str:
        """Return the name of its resource."""
        return f"{PREFIX}-{self.job}-{self.number}"

    @property
    def folder(self) -> Path:
        """Its own folder: logs, and the files of the backend."""
        return self.home / "attempts" / str(self.number)

    @property
    def is_call(self) -> bool:
        """Return whether it runs a remote function."""
        return (self.home / CALL_FOLDER).is_dir()

    @property
    def resource(self) -> Resource:
        """Return the resource to delete when it has ended."""
        return Resource(self.name, self.zone, self.handle)

    def log(self, rank: int) -> Path:
        """Return the path of a rank's log on this machine."""
        return self.folder / f"rank{rank}.log"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of every process. The backend adds DOVETAIL_JOB_DIR and the rank."""
        return {
            "DOVETAIL_JOB": self.job,
            "DOVETAIL_JOB_NAME": self.spec.name,
            "DOVETAIL_ATTEMPT": str(self.number),
        }
