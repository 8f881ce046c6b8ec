"""A job and its attempts as the store has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

# error: the supervisor itself failed at this job; it tries again, and `detail` says why.
Status = Literal["queued", "waiting", "running", "stopping", "error", "succeeded", "failed", "stopped", "cancelled"]
OVER: tuple[Status, ...] = ("succeeded", "failed", "stopped", "cancelled")
ACTIVE: tuple[Status, ...] = ("queued", "waiting", "running", "stopping", "error")
Wanted = Literal["run", "stop", "kill"]  # stop: with time to save; kill: at once
# creating: a create is under way, or was when the supervisor died. ending: it is over, and is being given back.
Phase = Literal["creating", "live", "ending", "gone"]


def where(backend: str, zone: str, handle: str) -> str:
    """Return `local`, `gcp-tpu us-east5-b`, or for Slurm its job id and partition: `slurm 4711 low`."""
    return " ".join(filter(None, (backend, handle if backend == "slurm" else "", zone)))


class Job(NamedTuple):
    """One row. The spec, which is long, is read apart (Store.spec). A tuple: thousands are made for one list."""

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
    not_before: float  # of the next attempt
    attempts: int
    preemptions: int
    faults: int
    failures: int
    in_a_row: int  # ends that followed each other without much work between
    place: int  # among the spec's accelerators and zones: where the next attempt goes
    seconds: float  # of running, over all attempts
    dollars: float
    resumed: int  # the number of the attempt after which a person resumed it: earlier ones count in no budget
    site: str  # where its files are: "" with SQLite, which has one

    @property
    def is_over(self) -> bool:
        return self.status in OVER


@dataclass(frozen=True)
class Try:
    """One row of the table of attempts."""

    job: str
    number: int
    phase: Phase
    state: str  # as the backend last said
    detail: str
    zone: str
    accelerator: str
    handle: str
    hosts: str  # by rank, with commas
    exclude: str  # hosts in quarantine, with commas
    outcome: str  # outcome.Kind; "" before the end
    exit_code: int | None
    failed_rank: int | None
    created: float
    started: float | None  # when it began to run, this time
    ran: float  # seconds that it ran before that: a backend's own queue may take it back, and start it again
    ended: float | None
    stop_sent: float | None  # when it was told to stop
    absent_since: float | None  # the backend says there is none, since then
    look_at: float  # not looked at before: after a call that failed
    misses: int  # calls in a row that failed
    restarts: int  # how often the backend itself has put it back and started it again

    def seconds(self, now: float) -> float:
        """Of running, so far."""
        return self.ran + ((self.ended or now) - self.started if self.started else 0.0)


@dataclass(frozen=True)
class Event:
    job: str
    number: int
    at: float
    what: str
