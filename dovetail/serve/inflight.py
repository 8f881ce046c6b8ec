"""Inflight: the requests under way: how many may wait, how long each may take, and how all of them end at a stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dovetail.serve.config import Limits
from dovetail.serve.errors import ApiError, bad


class Ticket:
    """One prompt's place. `end` is called, once, when its time is over; `why` then says what the client is told."""

    def __init__(self, end: Callable[[], None]):
        self._end = end
        self.arrival = time.monotonic()
        self.waits = True
        self.why: ApiError | None = None

    def stop(self, why: ApiError) -> None:
        if self.why is None:
            self.why = why
            self._end()


class Inflight:
    def __init__(self, limits: Limits):
        self._limits = limits
        self._tickets: set[Ticket] = set()
        self._draining = False

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def waiting(self) -> int:
        return sum(ticket.waits for ticket in self._tickets)

    def check(self, prompts: int) -> None:
        """429 or 503 if there is no room for so many more."""
        if self._draining:
            raise ApiError(503, "the server is stopping", code="stopping", retry_after=10)
        if prompts > self._limits.queue > 0:
            raise bad(f"prompt: {prompts} of them are more than the {self._limits.queue} that may wait; send fewer")
        if self.waiting + prompts > self._limits.queue:
            message = f"{self.waiting} requests are waiting, which is as many as this server takes; try again later"
            raise ApiError(429, message, code="queue_full", retry_after=1)

    @contextmanager
    def ticket(self, end: Callable[[], None]) -> Iterator[Ticket]:
        ticket = Ticket(end)
        self._tickets.add(ticket)
        seconds = self._limits.request_seconds
        late = ApiError(504, f"the request took longer than the {seconds:g} s that one may take", code="timeout")
        timer = asyncio.get_running_loop().call_later(seconds, ticket.stop, late)
        try:
            yield ticket
        finally:
            timer.cancel()
            self._tickets.discard(ticket)

    def drain(self) -> None:
        """No more are taken; what is under way when the limit is reached is ended."""
        if not self._draining:
            self._draining = True
            asyncio.get_running_loop().call_later(self._limits.drain_seconds, self._stop_all)

    def _stop_all(self) -> None:
        for ticket in list(self._tickets):
            ticket.stop(ApiError(503, "the server is stopping", code="stopping"))
