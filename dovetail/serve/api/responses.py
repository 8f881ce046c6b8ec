"""/v1/responses: the request. Nothing is stored between requests, so `input` holds the whole conversation.

/v1/responses: how it is answered: a list of items (reasoning, message, calls), whole or event by event."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Response
from pydantic import Field

from dovetail.core.errors import UserError
from dovetail.engine.request.params import SamplingParams, StructuredOutputsParams
from dovetail.io.tool_formats.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from dovetail.serve.api.chat import CalledFunction, FunctionCall, Message, Name
from dovetail.serve.api.delivery import EventStream, JsonAnswer, TokenUsage, event
from dovetail.serve.api.requests import LABELS, Body, Flag, Int, Num, RefusedField, TopLogprobs
from dovetail.serve.errors import ApiError, bad, refused
from dovetail.serve.talk.answer import AnswerDelta, Ask
from dovetail.serve.talk.prompts import EFFORTS, Conversation
from dovetail.serve.talk.service import Service

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"  # asks for reasoning that can be sent back: here it comes as text, and can
_TEXT_ONLY = RefusedField("the model reads text only")
_NOT_STORED = RefusedField("nothing is stored between requests: send the whole conversation as input")


class InputPart(Body):
    type: Literal["input_text", "output_text", "refusal", "text", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None
    logprobs: list[dict[str, Any]] | None = None  # of an earlier answer: only its text is read
    refused: ClassVar = {
        "image_url": _TEXT_ONLY, "file_id": _TEXT_ONLY, "file_data": _TEXT_ONLY, "input_audio": _TEXT_ONLY,
    }  # fmt: skip
    ignored: ClassVar = {"annotations": "templates show a message's text"}


Parts = str | list[InputPart]


class Item(Body):
    """A message, a call, a call's result, or reasoning: as they come in an answer's `output`."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Parts | None = None
    summary: list[InputPart] | None = None
    refused: ClassVar = {
        "encrypted_content": RefusedField("reasoning comes as text"),
        "phase": RefusedField("answers have none"),
        "caller": RefusedField("calls are the model's own"),
        "namespace": RefusedField("there are no namespaces"),
        "async": RefusedField("calls are answered in the next request"),
        "async_": RefusedField("calls are answered in the next request"),
    }


class FunctionTool(Body):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None
    refused: ClassVar = {"defer_loading": RefusedField("tools are read at once", (False,))}

    def chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude_none=True, exclude={"type"})}


class NamedFunctionChoice(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag | None = None

    def structured(self) -> StructuredOutputsParams | None:
        if self.type == "text":
            return None
        return StructuredOutputsParams(json=(self.schema_ or "object") if self.type == "json_schema" else "object")


class TextOptions(Body):
    format: TextFormat | None = None
    ignored: ClassVar = {"verbosity": "templates have no place for it: ask for it in the prompt"}


class ReasoningOptions(Body):
    effort: Literal[EFFORTS] | None = None  # type: ignore[valid-type]
    refused: ClassVar = {
        "summary": RefusedField("reasoning comes whole, as reasoning text", ("auto",)),
        "generate_summary": RefusedField("reasoning comes whole, as reasoning text"),
    }


class ResponsesRequest(Body):
    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    temperature: Num | None = None
    top_p: Num | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionChoice | None = None
    parallel_tool_calls: Flag = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None  # returned with the answer
    include: list[Literal[LOGPROBS, ENCRYPTED]] | None = None  # type: ignore[valid-type]
    top_logprobs: TopLogprobs | None = None
    stream: Flag = False
    user: str | None = None  # returned with the answer

    refused: ClassVar = {
        "previous_response_id": _NOT_STORED,
        "conversation": _NOT_STORED,
        "prompt": _NOT_STORED,
        "background": RefusedField("answers are not stored", (False,)),
        "truncation": RefusedField("shorten the input before it is sent", ("disabled",)),
        "context_management": RefusedField("shorten the input before it is sent", ([],)),
        "moderation": RefusedField("there is none"),
        "access_programs": RefusedField("there are none"),
        "image": _TEXT_ONLY,
    }
    ignored: ClassVar = {
        **{name: why for name, why in LABELS.items() if name not in ("user", "metadata")},
        "max_tool_calls": "it counts tools that a server runs, and this one runs none",
        "stream_options": "events are not padded",
    }

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        if self.top_logprobs and not self.with_logprobs:
            raise bad(f'top_logprobs needs include: ["{LOGPROBS}"]', "top_logprobs")
        given = {"max_tokens": self.max_output_tokens, "temperature": self.temperature, "top_p": self.top_p}
        given["logprobs"] = (self.top_logprobs or 0) if self.with_logprobs else None
        values = {"max_tokens": None, **defaults, **{name: each for name, each in given.items() if each is not None}}
        form = self.text.format if self.text else None
        try:
            return SamplingParams(**values, structured_outputs=form.structured() if form else None)
        except UserError as error:
            raise refused(error) from None

    def conversation(self) -> Conversation:
        named = self.tool_choice.name if isinstance(self.tool_choice, NamedFunctionChoice) else None
        return Conversation(
            messages=self._messages(),
            tools=[tool.chat() for tool in self.tools or ()],
            choice="named" if named else self.tool_choice or "auto",  # type: ignore[arg-type]
            named=named,
            parallel=self.parallel_tool_calls,
            effort=self.reasoning.effort if self.reasoning else None,
        )

    def _messages(self) -> list[dict[str, Any]]:
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        turn = _Turn()
        for i, item in enumerate(self.input):
            messages += turn.take(item, f"input.{i}")
        return messages + turn.end()


class _Turn:
    """Collects one assistant message from several items: reasoning, text and calls are separate items here."""

    def __init__(self):
        self._parts: dict[str, Any] = {}

    def take(self, item: Item, where: str) -> list[dict[str, Any]]:
        """The messages that this item completes."""
        if item.type == "reasoning":
            before = self.end()
            self._parts["reasoning_content"] = _text(item.content or item.summary or "", where)
            return before
        if item.type == "function_call":
            function = CalledFunction(name=item.need("name", where), arguments=item.arguments or "{}")
            call = FunctionCall(id=item.need("call_id", where), function=function)
            self._parts.setdefault("tool_calls", []).append(call)
            return []
        if item.type == "message" and item.role == "assistant":
            before = self.end() if self._parts.keys() & {"content", "tool_calls"} else []
            self._parts["content"] = _text(item.content or "", where)  # null: cut off before its text
            return before
        made = _call_result if item.type == "function_call_output" else _message
        return [*self.end(), made(item, where)]

    def end(self) -> list[dict[str, Any]]:
        parts, self._parts = self._parts, {}
        if not parts.keys() & {"content", "tool_calls"}:
            return []  # reasoning without an answer
        return [Message(role="assistant", **parts).plain("input")]


def _call_result(item: Item, where: str) -> dict[str, Any]:
    content = _text(item.need("output", where), where)
    return {"role": "tool", "tool_call_id": item.need("call_id", where), "content": content}


def _message(item: Item, where: str) -> dict[str, Any]:
    return {"role": item.need("role", where), "content": _text(item.need("content", where), where)}


def _text(parts: Parts, where: str) -> str:
    if isinstance(parts, str):
        return parts
    texts = [part.refusal if part.type == "refusal" else part.text for part in parts]
    if None in texts:
        raise bad(f"{where}: a part of its content has no text", where)
    return "\n".join(text for text in texts if text is not None)


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
        self._usage = TokenUsage([ask])
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

    def _scores(self, step: AnswerDelta) -> list[dict[str, Any]]:
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
