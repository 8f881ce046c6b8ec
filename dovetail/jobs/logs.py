"""The logs of all ranks of an attempt, as they grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dovetail.jobs.attempt import Attempt
from dovetail.jobs.backends.backend import Backend, Unavailable

POLL_S = 0.3


@dataclass
class Follower:
    """Whole lines of each rank, in the order in which they were seen."""

    backend: Backend
    attempt: Attempt
    ranks: Sequence[int]
    positions: dict[int, int] = field(default_factory=dict)
    halves: dict[int, str] = field(default_factory=dict)  # the beginning of a line that is not whole yet

    def lines(self) -> Iterator[tuple[int, str]]:
        """What is new: (rank, line)."""
        for rank in self.ranks:
            while True:
                try:
                    part = self.backend.logs(self.attempt, rank, self.positions.get(rank, 0))
                except Unavailable:
                    break
                if not part.text:
                    break
                self.positions[rank] = part.position
                *whole, half = (self.halves.get(rank, "") + part.text).split("\n")
                self.halves[rank] = half
                yield from ((rank, line) for line in whole)

    def rest(self) -> Iterator[tuple[int, str]]:
        """Last lines without an end."""
        for rank, half in self.halves.items():
            if half:
                yield rank, half
        self.halves.clear()

    def follow(self, is_over: Callable[[], bool]) -> Iterator[tuple[int, str]]:
        """Until it is over; what was written before its end is told too."""
        over = False
        while not over:
            over = is_over()
            yield from self.lines()
            if not over:
                time.sleep(POLL_S)
        yield from self.rest()
