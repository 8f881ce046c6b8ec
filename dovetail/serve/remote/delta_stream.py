"""DeltaStream: a request's deltas between the engine's process and their reader."""

from __future__ import annotations

import asyncio

from dovetail.serve.remote.wire import Delta

TOKENS = 32  # that a reader is given at once: to make their text takes well under a millisecond


class DeltaStream:
    """At most one delta waits per sequence: later ones are joined to it, so a slow reader costs no more memory than its
    answer. It is given a long one in parts, and other tasks run between them."""

    def __init__(self, n: int):
        self._open = n  # sequences whose last delta has not come
        self._waiting: dict[int, Delta] = {}
        self._error: Exception | None = None
        self._ended = False
        self._news = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """No more deltas will come."""
        return self._open == 0 or self._error is not None

    def put(self, delta: Delta) -> None:
        earlier = self._waiting.pop(delta.index, None)  # back to the end: the request's last delta stays last
        self._waiting[delta.index] = delta if earlier is None else earlier.then(delta)
        self._open -= delta.finished
        self._news.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._news.set()

    def end(self) -> None:
        """Let the reader go on without the deltas that have not come. The stream is not complete until they have."""
        self._ended = True
        self._news.set()

    async def get(self) -> Delta | None:
        """The next delta; None after the last. Raises the error that `fail` was given once none is left."""
        while not self._waiting:
            if self._open == 0 or self._ended:
                return None
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        index, delta = next(iter(self._waiting.items()))
        if len(delta.tokens) > TOKENS:
            await asyncio.sleep(0)
            return self._waiting[index].cut(TOKENS)
        return self._waiting.pop(index)
