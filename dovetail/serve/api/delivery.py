"""Delivery of answers: as JSON or as server-sent events, with the tokens that they used.

When the client disconnects, the work on its answer is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from dovetail.core.errors import RequestError
from dovetail.engine.interface import SpecDecodeMetrics
from dovetail.io.tool_formats.events import Content, Reasoning
from dovetail.serve.config import ServerConfig
from dovetail.serve.errors import ApiError, as_api_error
from dovetail.serve.talk.answer import AnswerDelta, PromptRequest

encode = msgspec.json.Encoder().encode
T = TypeVar("T")
_EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # a proxy must not buffer events


def event(data: Any, name: str | None = None) -> bytes:
    """Return one server-sent event."""
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (head, encode(data))


DONE = b"data: [DONE]\n\n"


def json_answer(content: Any) -> Response:
    """Return an answer that is already complete."""
    return Response(encode(content), media_type="application/json")


class JsonAnswer(Response):
    """Answer with one JSON object, made while the client waits."""

    def __init__(self, work: Coroutine[Any, Any, Any]):
        self._work = work
        super().__init__(media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer when it is complete."""

        async def work() -> None:
            await json_answer(await self._work)(scope, receive, send)

        await while_connected(receive, work())


class EventStream(Response):
    """Answer with server-sent events.

    The first event is awaited before the status is sent, so that a refused request has its own status. A later error
    ends the stream with an event made by `failed`.
    """

    def __init__(self, events: AsyncGenerator[bytes], failed: Callable[[ApiError], bytes]):
        self._events, self._failed = events, failed
        super().__init__(media_type="text/event-stream", headers=_EVENT_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they are made."""
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
    """Return the result of the work; cancel it and return None if the client disconnects first."""
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


async def wanted(http: Request, work: Awaitable[T]) -> T:
    """Return the result of work that precedes the answer, and cancel it if the client disconnects first."""
    result = await while_connected(http.receive, work)
    if result is None:
        raise RequestError("the client disconnected before its answer")
    return result


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class TokenUsage:
    """Count the tokens of an answer as its deltas arrive."""

    def __init__(self, requests: list[PromptRequest], config: ServerConfig):
        self._shows_drafts = config.per_request_spec_decode_metrics != "none"
        self._drafts: dict[tuple[int, int], SpecDecodeMetrics] = {}  # by prompt and index of the answer
        self._prompt = sum(len(request.prompt) for request in requests)
        self._completion = self._reasoning = 0
        self._cached = [0] * len(requests)

    def count(self, delta: AnswerDelta, prompt: int = 0) -> None:
        """Add a delta of the answer to the prompt with the index `prompt`."""
        self._completion += len(delta.tokens)
        self._cached[prompt] = max(self._cached[prompt], delta.cached_tokens)  # n answers share one prompt
        if delta.spec_decode_metrics is not None:
            self._drafts[prompt, delta.index] = delta.spec_decode_metrics
        kinds = {type(event) for event in delta.events}
        if Reasoning in kinds and Content not in kinds:
            self._reasoning += len(delta.tokens)  # exact to one delta: tokens are counted when their text appears

    def metrics(self) -> dict[str, Any]:
        """Return the field `metrics` of all answers together; no field if it is off or no draft token was verified."""
        if not (self._shows_drafts and self._drafts):
            return {}
        total = sum(self._drafts.values(), SpecDecodeMetrics())
        return {"metrics": {"speculative_decoding": total.shown()}}

    def openai(self) -> dict[str, Any]:
        """Return the usage as OpenAI's chat and completions routes show it."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning},
        }

    def responses(self) -> dict[str, Any]:
        """Return the usage as /v1/responses shows it."""
        return {
            "input_tokens": self._prompt,
            "input_tokens_details": {"cached_tokens": sum(self._cached), "cache_write_tokens": 0},
            "output_tokens": self._completion,
            "output_tokens_details": {"reasoning_tokens": self._reasoning},
            "total_tokens": self._prompt + self._completion,
        }

    def anthropic(self) -> dict[str, Any]:
        """Return the usage as Anthropic's routes show it: cached tokens are counted separately."""
        return {
            "input_tokens": self._prompt - sum(self._cached),
            "cache_read_input_tokens": sum(self._cached),
            "cache_creation_input_tokens": 0,
            "output_tokens": self._completion,
        }
