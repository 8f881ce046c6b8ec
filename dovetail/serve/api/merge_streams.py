"""Several streams as one, in the order in which items arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")


async def merge_streams(streams: list[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """(index of the stream, its next item) until all have ended. The first error ends them all; so does leaving."""
    if len(streams) == 1:  # the usual case needs no tasks
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    # Bounded, so that a slow reader slows the streams down instead of filling memory.
    queue: asyncio.Queue[Any] = asyncio.Queue(len(streams))
    tasks = [asyncio.create_task(_forward(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            which, item, error = await queue.get()
            if error is not None:
                raise error
            if item is _END:
                left -= 1
            else:
                yield which, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_END = object()


async def _forward(which: int, stream: AsyncGenerator[Any], queue: asyncio.Queue[Any]) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put((which, item, None))
        await queue.put((which, _END, None))
    except Exception as error:
        await queue.put((which, None, error))
