"""Stream: a request's deltas on their way from the engine's process to whoever reads them."""

from __future__ import annotations

import asyncio

from dovetail.serve.messages import Delta


class Stream:
    """At most one delta a sequence waits, for later ones join it: who reads slowly costs no more than his answer."""

    def __init__(self, n: int):
        self._open = n  # sequences whose last delta has not come
        self._waiting: dict[int, Delta] = {}
        self._error: Exception | None = None
        self._news = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """Nothing more will come."""
        return self._open == 0 or self._error is not None

    def put(self, delta: Delta) -> None:
        earlier = self._waiting.pop(delta.index, None)  # out and in again: the request's last delta stays the last
        self._waiting[delta.index] = delta if earlier is None else earlier.then(delta)
        self._open -= delta.finished
        self._news.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._news.set()

    async def get(self) -> Delta | None:
        """The next delta; None after the last; what `fail` was given when no more will come."""
        while not self._waiting:
            if self._open == 0:
                return None
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return self._waiting.pop(next(iter(self._waiting)))
