"""/v1/responses: how it is answered: a list of items (reasoning, message, calls), whole or event by event."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Response

from dovetail.io.tool_formats.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from dovetail.serve.api.delivery import EventStream, JsonAnswer, event
from dovetail.serve.api.responses_request import ResponsesRequest
from dovetail.serve.api.usage import Usage
from dovetail.serve.errors import ApiError
from dovetail.serve.talk.answer import Ask, Step
from dovetail.serve.talk.service import Service

PATH = "/v1/responses"
EventData = tuple[str, dict[str, Any]]  # an event's name and its fields


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(PATH)
    async def responses(body: ResponsesRequest) -> Response:
        """A conversation's next items."""
        adapter = service.adapter_of(body.model)
        params, talk = body.params(service.config.defaults), body.conversation()
        limit = None if body.max_output_tokens is None else "max_output_tokens"
        ask = await asyncio.to_thread(service.prompts.ask, talk, params, limit=limit, adapter=adapter)
        service.check([ask])
        made = _Response(service, body, ask)
        return EventStream(made.events(), made.failed) if body.stream else JsonAnswer(made.whole())

    return router


class _Response:
    def __init__(self, service: Service, body: ResponsesRequest, ask: Ask):
        self._service, self._body, self._ask = service, body, ask
        self._usage = Usage([ask])
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._output = _Output()
        self._number = -1  # of the last event
        self._reason: str | None = None

    async def whole(self) -> dict[str, Any]:
        async for _ in self._made():
            pass
        return self._object(self._status())

    async def events(self) -> AsyncGenerator[bytes]:
        begun = False
        async with aclosing(self._made()) as batches:
            async for batch in batches:
                if not begun:
                    begun = True
                    started = {"response": self._object("in_progress")}
                    yield self._event("response.created", started) + self._event("response.in_progress", started)
                yield b"".join(self._event(name, data) for name, data in batch)
        yield self._event(f"response.{self._status()}", {"response": self._object(self._status())})

    def failed(self, error: ApiError) -> bytes:
        failure = {"code": "server_error", "message": error.message}
        return self._event("response.failed", {"response": {**self._object("failed"), "error": failure}})

    async def _made(self) -> AsyncGenerator[list[EventData]]:
        async with aclosing(self._service.answer(self._ask)) as steps:
            async for step in steps:
                self._usage.count(step)
                made = self._output.take(step.events, self._scores(step))
                if step.finish_reason is not None:
                    self._reason = step.finish_reason
                    made += self._output.close(step.finish_reason != "length")
                yield made

    def _scores(self, step: Step) -> list[dict[str, Any]]:
        return self._service.token_text.chat(step.logprobs) if step.logprobs else []

    def _event(self, name: str, data: dict[str, Any]) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number, **data}, name)

    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _object(self, status: str) -> dict[str, Any]:
        body, params = self._body, self._ask.params
        ended = status in ("completed", "incomplete")
        choice, text = body.tool_choice or "auto", body.text
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None, "model": self._service.name_of(self._ask.adapter),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "output": self._output.items if ended else [], "top_logprobs": body.top_logprobs or 0,
            "parallel_tool_calls": body.parallel_tool_calls, "previous_response_id": None,
            "reasoning": body.reasoning.model_dump() if body.reasoning else None,
            "store": False, "temperature": params.temperature, "top_p": params.top_p, "metadata": body.metadata or {},
            "text": text.model_dump(by_alias=True, exclude_none=True) if text else {"format": {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()], "truncation": "disabled", "user": body.user,
            "usage": self._usage.responses() if ended else None,
        }  # fmt: skip


class _Output:
    """The items so far, the last of which may be open, and the events that report each change."""

    def __init__(self):
        self.items: list[dict[str, Any]] = []
        self._open: str | None = None  # the kind of the last item, while it is open
        self._text = ""
        self._scores: list[dict[str, Any]] = []  # the message's tokens, where they were asked for
        self._fresh: list[dict[str, Any]] = []  # those of tokens whose text has not come out yet

    def take(self, events: Sequence[Event], scores: list[dict[str, Any]]) -> list[EventData]:
        """What a step brought. A token's score goes with the text that it makes certain; those of reasoning and of
        calls, which have no place for them, are left out."""
        self._fresh += scores
        if events and not any(isinstance(event, Content) for event in events):
            self._fresh = []
        return [each for event in events for each in self._one(event)]

    def _one(self, event: Event) -> Iterator[EventData]:
        match event:
            case Reasoning(text):
                yield from self._enter("reasoning")
                yield from self._add("response.reasoning_text.delta", text, content_index=0)
            case Content(text):
                yield from self._enter("message")
                fresh, self._fresh = self._fresh, []
                self._scores += fresh
                yield from self._add("response.output_text.delta", text, content_index=0, logprobs=fresh)
            case CallStart(_, id, name):
                yield from self.close()
                item = {"type": "function_call", "call_id": id, "name": name, "arguments": ""}
                yield from self._begin("function_call", "fc", item)
            case CallArguments(_, text):
                yield from self._add("response.function_call_arguments.delta", text)
            case CallEnd(_, complete):
                yield from self.close(complete)

    def close(self, complete: bool = True) -> Iterator[EventData]:
        """The open item has ended."""
        if self._open is None:
            return
        item, at = self.items[-1], self._at()
        if self._open == "function_call":
            item["arguments"] = self._text
            done = {**at, "name": item["name"], "arguments": self._text}
            yield "response.function_call_arguments.done", done
        else:
            kind = "reasoning_text" if self._open == "reasoning" else "output_text"
            scores = self._scores + self._fresh  # those of an end token came without text
            part = _part(kind, self._text, scores)
            item["content"] = [part]
            more = {"logprobs": scores} if kind == "output_text" else {}
            yield f"response.{kind}.done", {**at, "content_index": 0, "text": self._text, **more}
            yield "response.content_part.done", {**at, "content_index": 0, "part": part}
        item["status"] = "completed" if complete else "incomplete"
        self._open = None
        yield "response.output_item.done", {"output_index": at["output_index"], "item": dict(item)}

    def _enter(self, kind: str) -> Iterator[EventData]:
        if self._open == kind:
            return
        yield from self.close()
        if kind == "message":
            yield from self._begin(kind, "msg", {"type": "message", "role": "assistant", "content": []})
            part = _part("output_text", "")
        else:
            yield from self._begin(kind, "rs", {"type": "reasoning", "summary": [], "content": []})
            part = _part("reasoning_text", "")
        yield "response.content_part.added", {**self._at(), "content_index": 0, "part": part}

    def _begin(self, kind: str, prefix: str, item: dict[str, Any]) -> Iterator[EventData]:
        self._open, self._text, self._scores = kind, "", []
        self.items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item})
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(self.items[-1])}

    def _add(self, name: str, text: str, **more: Any) -> Iterator[EventData]:
        self._text += text
        yield name, {**self._at(), "delta": text, **more}

    def _at(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _part(kind: str, text: str, scores: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    more = {"annotations": [], "logprobs": list(scores)} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more}
