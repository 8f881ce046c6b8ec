"""What the supervisor asks of a place where jobs run. Four places answer: local, slurm, gcp_tpu, gke.

Every call may be made twice: the supervisor writes down what it is about to do, does it, and writes down that it is
done; killed between the two, it does it again. So `create` of a name that is there is a success, and so is `delete` of
one that is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from dovetail.jobs.attempt import Attempt, Resource
from dovetail.jobs.spec import Spec

State = Literal[
    "absent",  # the backend says, for certain, that there is nothing of this name
    "waiting",  # asked for: queued, being made
    "running",
    "succeeded",  # every process ended with 0
    "failed",  # exit_code says how, where the backend knows
    "preempted",  # taken away by the backend
    "cancelled",  # by a person, with the backend's own command (scancel)
    "suspended",  # as preempted, and it goes on costing quota until it is deleted
    "unknown",  # the question itself failed: asked again later, and nothing is concluded
]
OVER: tuple[State, ...] = ("succeeded", "failed", "preempted", "cancelled", "suspended")


@dataclass(frozen=True)
class Observed:
    """How an attempt stands, as the backend sees it now."""

    state: State
    detail: str = ""  # one line for people: the backend's own word for it, or what failed
    hosts: tuple[str, ...] = ()  # by rank, where they are known
    exit_code: int | None = None  # of the process that decided the end; 128 + n for signal n
    failed_rank: int | None = None  # the first that failed
    handle: str = ""  # where it is known only now
    zone: str = ""  # where it is known only now: the partition that Slurm chose
    restarts: int = 0  # how often the backend's own queue took it back, and starts it again


class Unavailable(Exception):
    """The backend could not do it now (a time-out, 429, 5xx, no quota or stock): the supervisor tries again. With
    `elsewhere` it tries the next zone first. What will never work is a ValueError."""

    def __init__(self, message: str, elsewhere: bool = False) -> None:
        super().__init__(message)
        self.elsewhere = elsewhere


class Refused(ValueError):
    """A create that will never work, and that asked for nothing: there is nothing to look for or to give back."""


@contextmanager
def unasked() -> Iterator[None]:
    """Around what a create does before its first request."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise Refused(str(error)) from error


@dataclass(frozen=True)
class LogPart:
    """What was written since `since`, and where to go on: bytes of the rank's log."""

    text: str
    position: int


class Backend(Protocol):
    """Calls are quick (seconds): what takes longer is asked for here and seen in `observe`. They come from several
    threads, one job in one of them at a time."""

    def check(self, spec: Spec) -> None:
        """Raise ValueError or ImportError for a spec that can never start here. Asks for nothing, and makes nothing:
        `dovetail job create` calls it before a job exists, and `create` at every start."""
        ...

    def create(self, attempt: Attempt) -> str:
        """Ask for it under attempt.name; the handle. Unavailable: try again (it may all the same have been made)."""
        ...

    def observe(self, attempt: Attempt) -> Observed:
        """Never raises for what a network does: that is `unknown`."""
        ...

    def stop(self, attempt: Attempt, grace: float) -> None:
        """Signal the processes (SIGTERM), so that they save and end; after `grace` seconds they are ended. With a grace
        of 0 they are ended now, also where an earlier call gave them time."""
        ...

    def delete(self, resource: Resource) -> None:
        """End it and give it back. Returns once the backend has taken the request; `observe` then comes to absent."""
        ...

    def list(self) -> Sequence[Resource]:
        """All that carries our owner's label, in every zone that jobs have named. Raises Unavailable rather than tell a
        part."""
        ...

    def logs(self, attempt: Attempt, rank: int, since: int = 0) -> LogPart:
        """An empty part where there is nothing yet."""
        ...

    def command(self, attempt: Attempt, rank: int) -> list[str]:
        """A command line that opens a shell beside the process of that rank."""
        ...
