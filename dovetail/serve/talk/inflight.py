"""Inflight: the requests under way: how many may wait, how long each may take, and their end when the server stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

from dovetail.serve.config import ServerLimits
from dovetail.serve.errors import ApiError, bad


class Ticket:
    """A request's place. `prompts`: the number of sequences of each of its prompts. `end` is called once, when its time
    is over; `why` is then the error for the client."""

    def __init__(self, end: Callable[[], object], prompts: list[int]):
        self._end, self.prompts, self.sequences = end, prompts, sum(prompts)
        self.arrival = time.monotonic()
        self.begun = False  # its first token has come
        self.why: ApiError | None = None

    def stop(self, why: ApiError) -> None:
        if self.why is None:
            self.why = why
            self._end()


class Inflight:
    """`batch`: how many sequences the engine runs at once; further ones wait."""

    def __init__(self, limits: ServerLimits, batch: int):
        self._limits, self._batch = limits, batch
        self._tickets: dict[Ticket, None] = {}  # in the order they came
        self.draining = False

    def __len__(self) -> int:
        return len(self._tickets)

    def check(self, more: list[int]) -> None:
        """`more`: the number of sequences of each new prompt. Too many to wait are refused: with 429, or with 400 where
        trying again would not help."""
        most, running = self._limits.max_queue, sum(ticket.sequences for ticket in self._tickets if ticket.begun)
        queued = [count for ticket in self._tickets if not ticket.begun for count in ticket.prompts]
        if _waiting(more, self._batch) > most:
            alone = f"{self._batch} sequences run at once and {most} prompts may wait"
            raise bad(f"prompt: {len(more)} of them are more than this server takes ({alone}); send fewer", "prompt")
        if _waiting(queued + more, self._batch - running) > most:
            waiting = _waiting(queued, self._batch - running)
            message = f"{waiting} requests are waiting, and this server takes no more than {most}; try again later"
            raise ApiError(429, message, code="queue_full", retry_after=1)

    @contextmanager
    def ticket(self, end: Callable[[], object], prompts: list[int]) -> Iterator[Ticket]:
        ticket = Ticket(end, prompts)
        self._tickets[ticket] = None
        seconds = self._limits.request_timeout
        late = ApiError(504, f"the request took longer than the {seconds:g} s that one may take", code="timeout")
        timer = asyncio.get_running_loop().call_later(seconds, ticket.stop, late)
        try:
            yield ticket
        finally:
            timer.cancel()
            del self._tickets[ticket]

    def drain(self) -> None:
        """Take no more requests."""
        self.draining = True

    def end_all(self) -> None:
        """End the requests under way: their clients get an error."""
        for ticket in list(self._tickets):
            ticket.stop(ApiError(503, "the server is stopping", code="stopping"))


def _waiting(prompts: list[int], places: int) -> int:
    """How many of these prompts, given the sequences of each, do not fit in the places."""
    return sum(total > places for total in accumulate(prompts))
