"""Inflight: the running requests: how many may wait, how long each may take, and their end when the server stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

from dovetail.core.errors import RequestError
from dovetail.serve.config import ServerLimits
from dovetail.serve.errors import ApiError


class Ticket:
    """Track one running request.

    Args:
        end: Called once, if the request is stopped.
        prompts: The number of sequences of each of its prompts.
    """

    def __init__(self, end: Callable[[], object], prompts: list[int]):
        self._end, self.prompts, self.sequences = end, prompts, sum(prompts)
        self.arrival = time.monotonic()
        self.begun = False  # whether its first token has arrived
        self.error: ApiError | None = None  # why it was stopped

    def stop(self, error: ApiError) -> None:
        """End the request; its client gets the error."""
        if self.error is None:
            self.error = error
            self._end()


class Inflight:
    """Keep the running requests within the server's limits.

    Args:
        limits: The server's limits.
        batch: How many sequences the engine runs at once; further ones wait.
    """

    def __init__(self, limits: ServerLimits, batch: int):
        self._limits, self._batch = limits, batch
        self._tickets: dict[Ticket, None] = {}  # in the order of arrival
        self.draining = False  # whether the server is stopping and refuses new requests

    def __len__(self) -> int:
        return len(self._tickets)

    def check(self, more: list[int]) -> None:
        """Refuse new prompts if too many would wait.

        Args:
            more: The number of sequences of each new prompt.

        Raises:
            RequestError: There are more than the server can ever take.
            ApiError: The queue is full (429).
        """
        most, running = self._limits.max_queue, sum(ticket.sequences for ticket in self._tickets if ticket.begun)
        queued = [count for ticket in self._tickets if not ticket.begun for count in ticket.prompts]
        if _waiting(more, self._batch) > most:
            message = (
                f"`prompt` must hold fewer prompts, got {len(more)}: {self._batch} sequences run at once and {most} "
                "prompts may wait"
            )
            raise RequestError(message, param="prompt")
        if _waiting(queued + more, self._batch - running) > most:
            waiting = _waiting(queued, self._batch - running)
            message = f"the queue is full: {waiting} requests wait, and at most {most} may; try again later"
            raise ApiError(429, message, code="queue_full", retry_after=1)

    @contextmanager
    def ticket(self, end: Callable[[], object], prompts: list[int]) -> Iterator[Ticket]:
        """Count a request as running, and stop it after the time that one may take."""
        ticket = Ticket(end, prompts)
        self._tickets[ticket] = None
        seconds = self._limits.request_timeout
        late = ApiError(504, f"the request took longer than the limit of {seconds:g} s", code="timeout")
        timer = asyncio.get_running_loop().call_later(seconds, ticket.stop, late)
        try:
            yield ticket
        finally:
            timer.cancel()
            del self._tickets[ticket]

    def end_all(self) -> None:
        """End all running requests; their clients get an error."""
        for ticket in list(self._tickets):
            ticket.stop(ApiError(503, "the server is stopping", code="stopping"))


def _waiting(prompts: list[int], places: int) -> int:
    """Return how many of these prompts, given the sequences of each, do not fit in `places`."""
    return sum(total > places for total in accumulate(prompts))
