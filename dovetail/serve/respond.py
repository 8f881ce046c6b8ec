"""Answers on their way to the client: whole or as server-sent events. A client that leaves ends the work for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from dovetail.serve.errors import ApiError, as_api_error

encode = msgspec.json.Encoder().encode
_EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # a proxy must not hold events back


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (head, encode(data))


DONE = b"data: [DONE]\n\n"


class Whole(Response):
    """One JSON object, made while the client waits."""

    def __init__(self, work: Coroutine[Any, Any, Any]):
        self._work = work
        super().__init__(media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            content = encode(await self._work)
            await Response(content, media_type="application/json")(scope, receive, send)

        await _while_connected(receive, work())


class Stream(Response):
    """Server-sent events. The first is awaited before the status goes out, so that what is refused is refused with a
    status of its own; what fails later ends the stream with an event made by `failed`."""

    def __init__(self, events: AsyncGenerator[bytes], failed: Callable[[ApiError], bytes]):
        self._events, self._failed = events, failed
        super().__init__(media_type="text/event-stream", headers=_EVENT_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _while_connected(receive, self._work(send))

    async def _work(self, send: Send) -> None:
        async def put(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async with aclosing(self._events) as events:
            first = await anext(events)
            headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                await put(first)
                async for each in events:
                    await put(each)
            except Exception as error:
                await put(self._failed(as_api_error(error)))
            await put(b"", more=False)


async def _while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Do the work; if the client leaves, end it at once, wherever it stands."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.wait({doing, leaving})
        if not doing.cancelled():
            doing.exception()  # it is nobody's any more: asyncio need not warn


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
