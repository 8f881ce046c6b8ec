"""How an answer reaches the client: whole, or as server-sent events. When the client leaves, its work is ended.

TokenUsage: the tokens that an answer took, counted as its steps come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from dovetail.io.tool_formats.events import Content, Reasoning
from dovetail.serve.errors import ApiError, as_api_error
from dovetail.serve.talk.answer import AnswerDelta, Ask

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


class TokenUsage:
    def __init__(self, asks: list[Ask]):
        self.prompt = sum(len(ask.prompt) for ask in asks)
        self.completion = self.reasoning = 0
        self._cached = [0] * len(asks)

    @property
    def cached(self) -> int:
        return sum(self._cached)

    def count(self, step: AnswerDelta, prompt: int = 0) -> None:
        """`prompt`: the index of the prompt that the step answers."""
        self.completion += len(step.tokens)
        self._cached[prompt] = max(self._cached[prompt], step.cached_tokens)  # n answers share one prompt
        kinds = {type(event) for event in step.events}
        if Reasoning in kinds and Content not in kinds:
            self.reasoning += len(step.tokens)  # exact to one step: tokens are counted when their text appears

    def openai(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }

    def responses(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.completion,
        }

    def anthropic(self) -> dict[str, Any]:
        """Anthropic counts cached tokens separately."""
        return {
            "input_tokens": self.prompt - self.cached,
            "cache_read_input_tokens": self.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.completion,
        }
