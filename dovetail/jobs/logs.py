"""Follow the logs of all ranks of a job, attempt by attempt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dovetail.core.reporter import printable
from dovetail.jobs.backends.backend import JobBackend, UnavailableError
from dovetail.jobs.job import Attempt, AttemptRow, Job
from dovetail.jobs.store import JobStore

POLL_S = 0.3


@dataclass
class Follower:
    """Read whole lines of each rank, in the order in which they appear."""

    backend: JobBackend
    attempt: Attempt
    ranks: Sequence[int]
    positions: dict[int, int] = field(default_factory=dict)
    halves: dict[int, str] = field(default_factory=dict)  # the beginning of an incomplete line

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield (rank, line) of the new lines."""
        for rank in self.ranks:
            while True:
                try:
                    part = self.backend.logs(self.attempt, rank, self.positions.get(rank, 0))
                except UnavailableError:
                    break
                if not part.text:
                    break
                self.positions[rank] = part.position
                *whole, half = (self.halves.get(rank, "") + part.text).split("\n")
                self.halves[rank] = half
                yield from ((rank, line) for line in whole)

    def rest(self) -> Iterator[tuple[int, str]]:
        """Yield the last lines that have no line break."""
        for rank, half in self.halves.items():
            if half:
                yield rank, half
        self.halves.clear()

    def follow(self, is_over: Callable[[], bool]) -> Iterator[tuple[int, str]]:
        """Yield lines until the attempt is over, including everything written before its end."""
        over = False
        while not over:
            over = is_over()
            yield from self.lines()
            if not over:
                time.sleep(POLL_S)
        yield from self.rest()


def follow_job(
    store: JobStore,
    choose: Callable[[str], JobBackend],
    id: str,
    ranks: Callable[[Attempt], Sequence[int]],
    ended: Callable[[AttemptRow], None] = lambda row: None,
    poll: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Attempt, int, str]]:
    """Yield (attempt, rank, line) of a job from its current attempt on, until the job is over.

    `ended` is called with each attempt that is over, after its last line; `poll` whenever the store is read.
    """

    def is_over() -> bool:
        poll()
        found = _row(store, id, number)
        return found is None or found.phase in ("ending", "gone")

    number = max(1, store.job(id).attempts)
    while True:
        row, job = _row(store, id, number), store.job(id)
        if row is not None:
            store.refuse_elsewhere(job, "look at it")
            attempt = store.attempt(job, row)
            follower = Follower(choose(job.backend), attempt, ranks(attempt))
            for rank, line in follower.follow(is_over):
                yield attempt, rank, line
            if found := _row(store, id, number):
                ended(found)
            number += 1
        elif job.is_over:
            return
        else:
            poll()
            time.sleep(POLL_S)


def _row(store: JobStore, id: str, number: int) -> AttemptRow | None:
    return next((row for row in store.attempts(id) if row.number == number), None)


def waiting(store: JobStore, id: str) -> Callable[[], str]:
    """Return a function that returns why the job waits, each time that this has changed, and "" otherwise."""
    last = ""

    def news() -> str:
        nonlocal last
        job = store.job(id)
        why = job.detail if job.status == "waiting" or (job.status == "queued" and not job.attempts) else ""
        why, last = "" if why == last else why, why
        return f"job {id} waits: {printable(why)}" if why else ""

    return news


def goes_on(job: Job) -> str:
    """Return what happens to a job whose output is no longer followed."""
    if job.is_over:
        return f"job {job.id} is over: {job.status}"
    how = f"`dovetail job logs -f {job.id}` follows it again, `dovetail job cancel {job.id}` ends it"
    return f"job {job.id} continues ({job.status}): {how}"
