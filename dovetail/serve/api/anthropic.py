"""/v1/messages: how it is answered, in Anthropic's form: blocks of thinking, text and tool use."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Response

from dovetail.io.tool_formats.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning, collect
from dovetail.serve.api.anthropic_request import CountRequest, MessagesRequest, to_anthropic
from dovetail.serve.api.delivery import EventStream, JsonAnswer, event, json_answer
from dovetail.serve.api.usage import Usage
from dovetail.serve.errors import ApiError
from dovetail.serve.talk.answer import Ask, Step
from dovetail.serve.talk.service import Service

PATH = "/v1/messages"


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(PATH)
    async def messages(body: MessagesRequest) -> Response:
        """A conversation's next message, for Anthropic's clients."""
        adapter = service.adapter_of(body.model)
        params, talk = body.params(service.config.defaults), body.conversation()
        ask = await asyncio.to_thread(service.prompts.ask, talk, params, limit="max_tokens", adapter=adapter)
        service.check([ask])
        made = _Message(service, ask)
        return EventStream(made.events(), _failed) if body.stream else JsonAnswer(made.whole())

    @router.post(f"{PATH}/count_tokens")
    async def count_tokens(body: CountRequest) -> Response:
        talk = replace(body.conversation(), adapter=service.adapter_of(body.model))
        prompts = service.prompts
        tokens = await asyncio.to_thread(lambda: prompts.encode(prompts.text(talk), False, rendered=True))
        return json_answer({"input_tokens": len(tokens)})

    return router


def _failed(error: ApiError) -> bytes:
    return event(error.body(PATH), "error")


class _Message:
    def __init__(self, service: Service, ask: Ask):
        self._service, self._ask = service, ask
        self._usage = Usage([ask])
        self._called = False

    async def whole(self) -> dict[str, Any]:
        steps: list[Step] = []
        async with aclosing(self._service.answer(self._ask)) as answer:
            async for step in answer:
                self._usage.count(step)
                steps.append(step)
        parsed = collect(each for step in steps for each in step.events)
        content: list[dict[str, Any]] = []
        if parsed.reasoning:
            content.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
        if parsed.content or not parsed.calls:
            content.append({"type": "text", "text": parsed.content})
        for call in parsed.calls:
            block = {"type": "tool_use", "id": to_anthropic(call.id), "name": call.name}
            content.append({**block, "input": _input(call.arguments)})
        self._called = bool(parsed.calls)
        return {**self._head(), "content": content, **self._end(steps[-1]), "usage": self._usage.anthropic()}

    async def events(self) -> AsyncGenerator[bytes]:
        blocks, last = _Blocks(), None
        async with aclosing(self._service.answer(self._ask)) as answer:
            async for step in answer:
                self._usage.count(step)
                self._called |= any(isinstance(each, CallStart) for each in step.events)
                out = [] if last else [self._start()]
                out += [made for each in step.events for made in blocks.take(each)]
                last = step
                yield b"".join(event(data, data["type"]) for data in out)
        assert last is not None
        ends = [
            *blocks.close(),
            {"type": "message_delta", "delta": self._end(last), "usage": self._usage.anthropic()},
            {"type": "message_stop"},
        ]
        yield b"".join(event(data, data["type"]) for data in ends)

    def _head(self) -> dict[str, Any]:
        id, name = f"msg_{uuid.uuid4().hex}", self._service.name_of(self._ask.adapter)
        return {"id": id, "type": "message", "role": "assistant", "model": name}

    def _start(self) -> dict[str, Any]:
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
        return {"type": "message_start", "message": {**message, "usage": self._usage.anthropic()}}

    def _end(self, step: Step) -> dict[str, Any]:
        sequence = step.stop_reason if isinstance(step.stop_reason, str) else None
        if step.finish_reason == "length":
            reason = "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}


def _input(arguments: str) -> dict[str, Any]:
    """The input of a call that max_tokens cut off is incomplete: it is left out, and stop_reason tells why."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {}


class _Blocks:
    """The blocks of a stream; one is open at a time."""

    def __init__(self):
        self._index = -1
        self._open: str | None = None

    def take(self, each: Event) -> Iterator[dict[str, Any]]:
        match each:
            case Reasoning(text):
                yield from self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case Content(text):
                yield from self._enter("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case CallStart(_, id, name):
                block = {"type": "tool_use", "id": to_anthropic(id), "name": name, "input": {}}
                yield from self._enter(id, block)
            case CallArguments(_, text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnd():
                yield from self.close()

    def close(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}

    def _enter(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            yield from self.close()
            self._open, self._index = kind, self._index + 1
            yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
