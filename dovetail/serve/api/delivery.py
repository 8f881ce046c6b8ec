"""How an answer reaches the client: whole, or as server-sent events. When the client leaves, its work is ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from dovetail.serve.errors import ApiError, as_api_error

encode = msgspec.json.Encoder().encode
T = TypeVar("T")
_EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # a proxy must not buffer events


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (head, encode(data))


DONE = b"data: [DONE]\n\n"


def json_answer(content: Any) -> Response:
    """An answer that is complete already."""
    return Response(encode(content), media_type="application/json")


class JsonAnswer(Response):
    """One JSON object, made while the client waits."""

    def __init__(self, work: Coroutine[Any, Any, Any]):
        self._work = work
        super().__init__(media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            await json_answer(await self._work)(scope, receive, send)

        await while_connected(receive, work())


class EventStream(Response):
    """Server-sent events. The first is awaited before the status is sent, so that a refusal has its own status; a later
    error ends the stream with an event made by `failed`."""

    def __init__(self, events: AsyncGenerator[bytes], failed: Callable[[ApiError], bytes]):
        self._events, self._failed = events, failed
        super().__init__(media_type="text/event-stream", headers=_EVENT_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._work(send))

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


async def while_connected(receive: Receive, work: Awaitable[T]) -> T | None:
    """Do the work; if the client leaves meanwhile, cancel it and return None."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.wait({doing, leaving})
        if not doing.cancelled():
            doing.exception()  # retrieved, or asyncio warns that it never was


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
