"""Live updates: tell every open page that a day has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class Listeners:
    """Hold the open pages. All methods run on the event loop's thread."""

    def __init__(self) -> None:
        self._changes: set[asyncio.Event] = set()
        self._closed = False

    def notify(self, day: str) -> None:
        """Wake every page; the day does not matter, because a page asks for the one that it shows."""
        for change in self._changes:
            change.set()

    def close(self) -> None:
        """End every stream."""
        self._closed = True
        self.notify("")

    async def listen(self, keep_alive: float = 15.0) -> AsyncIterator[str]:
        """Yield server-sent events: one for each change, and a comment now and then, which finds closed pages."""
        change = asyncio.Event()
        self._changes.add(change)
        try:
            yield ": connected\n\n"
            while not self._closed:
                try:
                    await asyncio.wait_for(change.wait(), keep_alive)
                    change.clear()
                    yield "event: changed\ndata: {}\n\n"
                except TimeoutError:
                    yield ": \n\n"
        finally:
            self._changes.discard(change)
