"""/v1/responses: the request, and its answer: a list of items (reasoning, message, calls), whole or event by event.

Nothing is stored between requests, so `input` holds the whole conversation.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from dovetail.core.errors import RequestError
from dovetail.engine.request.params import SamplingParams, StructuredOutputsParams
from dovetail.io.tool_formats.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from dovetail.serve.api.chat import CalledFunction, FunctionCall, Message, Name
from dovetail.serve.api.delivery import EventStream, JsonAnswer, TokenUsage, event, wanted
from dovetail.serve.api.requests import LABELS, NO_MEDIA, Body, Flag, ImageDetail, Int, Num, RefusedField, TopLogprobs
from dovetail.serve.errors import ApiError
from dovetail.serve.media.source import ImageReference
from dovetail.serve.talk.answer import AnswerDelta, PromptRequest
from dovetail.serve.talk.prompts import EFFORTS, Conversation, message_content
from dovetail.serve.talk.service import Service

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"  # asks for reasoning that can be sent back: here it is text, which can
_NOT_STORED = RefusedField("nothing is stored between requests: send the whole conversation as input")
EventData = tuple[str, dict[str, Any]]  # an event's name and its fields

# --- the request ------------------------------------------------------------------------------------------------------


class InputPart(Body):
    """A part of an item's content."""

    type: Literal["input_text", "input_image", "output_text", "refusal", "text", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: ImageDetail = "auto"
    logprobs: list[dict[str, Any]] | None = None  # of an earlier answer: only its text is read
    refused: ClassVar = {
        **dict.fromkeys(("file_data", "input_audio"), NO_MEDIA),
        "file_id": RefusedField("no files are stored: send image_url with a data: URL"),
    }
    ignored: ClassVar = {"annotations": "templates show a message's text"}

    def plain(self, where: str) -> str | ImageReference:
        """Return the part's text or image; `where` is its path in the request."""
        if self.type == "input_image":
            return ImageReference(f"{where}.image_url", self.need("image_url", where), self.detail)
        return self.need("refusal" if self.type == "refusal" else "text", where)


Parts = str | list[InputPart]


class Item(Body):
    """A message, a call, a call's result, or reasoning, as in an answer's `output`."""

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
        "encrypted_content": RefusedField("reasoning is sent as text"),
        "phase": RefusedField("answers have none"),
        "caller": RefusedField("only the model makes calls"),
        "namespace": RefusedField("there are no namespaces"),
        "async": RefusedField("calls are answered in the next request"),
        "async_": RefusedField("calls are answered in the next request"),
    }


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None
    refused: ClassVar = {"defer_loading": RefusedField("tools are read at once", (False,))}

    def chat(self) -> dict[str, Any]:
        """Return the tool in the format of /v1/chat/completions."""
        return {"type": "function", "function": self.model_dump(exclude_none=True, exclude={"type"})}


class NamedFunctionChoice(Body):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag | None = None

    def structured(self) -> StructuredOutputsParams | None:
        """Return the engine's parameter; None for plain text."""
        if self.type == "text":
            return None
        return StructuredOutputsParams(json=(self.schema_ or "object") if self.type == "json_schema" else "object")


class TextOptions(Body):
    """Options of the answer's text."""

    format: TextFormat | None = None
    ignored: ClassVar = {"verbosity": "templates have no place for it: ask for it in the prompt"}


class ReasoningOptions(Body):
    """Options of the reasoning."""

    effort: Literal[EFFORTS] | None = None  # type: ignore[valid-type]
    refused: ClassVar = {
        "summary": RefusedField("reasoning is returned whole", ("auto",)),
        "generate_summary": RefusedField("reasoning is returned whole"),
    }


class ResponsesRequest(Body):
    """The body of /v1/responses."""

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
        "image": RefusedField("send an input_image in the content of a message"),
    }
    ignored: ClassVar = {
        **{name: why for name, why in LABELS.items() if name not in ("user", "metadata")},
        "max_tool_calls": "it counts tools that a server runs, and this one runs none",
        "stream_options": "events are not padded",
    }

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the engine's parameters; `defaults` are the model's own."""
        with_logprobs = LOGPROBS in (self.include or ())
        if self.top_logprobs and not with_logprobs:
            raise RequestError(f'`top_logprobs` requires include: ["{LOGPROBS}"]', param="top_logprobs")
        given = {"max_tokens": self.max_output_tokens, "temperature": self.temperature, "top_p": self.top_p}
        given["logprobs"] = (self.top_logprobs or 0) if with_logprobs else None
        values = {"max_tokens": None, **defaults, **{name: each for name, each in given.items() if each is not None}}
        form = self.text.format if self.text else None
        return SamplingParams(**values, structured_outputs=form.structured() if form else None)

    def conversation(self) -> Conversation:
        """Return the conversation, checked."""
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
        assistant = _AssistantMessage()
        for i, item in enumerate(self.input):
            messages += assistant.take(item, f"input.{i}")
        return messages + assistant.end()


class _AssistantMessage:
    """Collect one assistant message from several items: reasoning, text and calls are separate items here."""

    def __init__(self):
        self._parts: dict[str, Any] = {}

    def take(self, item: Item, where: str) -> list[dict[str, Any]]:
        """Return the messages that this item completes."""
        if item.type == "reasoning":
            before = self.end()
            name = "content" if item.content else "summary"
            self._parts["reasoning_content"] = _text(getattr(item, name) or "", f"{where}.{name}")
            return before
        if item.type == "function_call":
            function = CalledFunction(name=item.need("name", where), arguments=item.arguments or "{}")
            call = FunctionCall(id=item.need("call_id", where), function=function)
            self._parts.setdefault("tool_calls", []).append(call)
            return []
        if item.type == "message" and item.role == "assistant":
            before = self.end() if self._parts.keys() & {"content", "tool_calls"} else []
            self._parts["content"] = _text(
                item.content or "", f"{where}.content"
            )  # null: it was cut off before its text
            return before
        made = _call_result if item.type == "function_call_output" else _message
        return [*self.end(), made(item, where)]

    def end(self) -> list[dict[str, Any]]:
        """Return the message, if there is one, and begin the next."""
        parts, self._parts = self._parts, {}
        if not parts.keys() & {"content", "tool_calls"}:
            return []  # reasoning without an answer
        return [Message(role="assistant", **parts).plain("input")]


def _call_result(item: Item, where: str) -> dict[str, Any]:
    content = _content(item.need("output", where), f"{where}.output")
    return {"role": "tool", "tool_call_id": item.need("call_id", where), "content": content}


def _message(item: Item, where: str) -> dict[str, Any]:
    return {"role": item.need("role", where), "content": _content(item.need("content", where), f"{where}.content")}


def _content(parts: Parts, where: str) -> str | list[dict[str, Any]]:
    if isinstance(parts, str):
        return parts
    return message_content([part.plain(f"{where}.{i}") for i, part in enumerate(parts)])


def _text(parts: Parts, where: str) -> str:
    """Return the content of an item that is the model's own and so has no images."""
    content = _content(parts, where)
    if not isinstance(content, str):
        raise RequestError(f"{where} must not have images in an item of the assistant", param=where)
    return content


# --- the answer -------------------------------------------------------------------------------------------------------


def routes(service: Service) -> APIRouter:
    """Return the route /v1/responses."""
    router = APIRouter()

    @router.post(PATH)
    async def responses(body: ResponsesRequest, http: Request) -> Response:
        """Answer a conversation with its next items."""
        adapter = service.adapter_of(body.model)
        params, talk = body.params(service.config.defaults), body.conversation()
        limit = None if body.max_output_tokens is None else "max_output_tokens"
        request = await wanted(http, service.prompt_request(talk, params, limit=limit, adapter=adapter))
        service.check([request])
        answer = _ResponseAnswer(service, body, request)
        return EventStream(answer.events(), answer.failed) if body.stream else JsonAnswer(answer.whole())

    return router


class _ResponseAnswer:
    def __init__(self, service: Service, body: ResponsesRequest, request: PromptRequest):
        self._service, self._body, self._request = service, body, request
        self._usage = TokenUsage([request], service.config)
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
        async with aclosing(self._service.answer(self._request)) as deltas:
            async for delta in deltas:
                self._usage.count(delta)
                made = self._output.take(delta.events, self._logprobs(delta))
                if delta.finish_reason is not None:
                    self._reason = delta.finish_reason
                    made += self._output.close(delta.finish_reason != "length")
                yield made

    def _logprobs(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        return self._service.token_text.chat(delta.logprobs) if delta.logprobs else []

    def _event(self, name: str, data: dict[str, Any]) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number, **data}, name)

    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _object(self, status: str) -> dict[str, Any]:
        body, params = self._body, self._request.params
        ended = status in ("completed", "incomplete")
        choice, text = body.tool_choice or "auto", body.text
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None, "model": self._service.name_of(self._request.adapter),
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
            **(self._usage.metrics() if ended else {}),
        }  # fmt: skip


class _Output:
    """The items so far, the last of which may be open, and the events that report each change."""

    def __init__(self):
        self.items: list[dict[str, Any]] = []
        self._open: str | None = None  # the kind of the last item, while it is open
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []  # of the message's tokens, if requested
        self._fresh: list[dict[str, Any]] = []  # of tokens whose text has not appeared yet

    def take(self, events: Sequence[Event], logprobs: list[dict[str, Any]]) -> list[EventData]:
        """Add the events of a delta, and return the events for the client.

        A token's log-probability is sent with the text that it completes. Reasoning and calls have no place for them.
        """
        self._fresh += logprobs
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
                self._logprobs += fresh
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
        """End the open item."""
        if self._open is None:
            return
        item, at = self.items[-1], self._at()
        if self._open == "function_call":
            item["arguments"] = self._text
            done = {**at, "name": item["name"], "arguments": self._text}
            yield "response.function_call_arguments.done", done
        else:
            kind = "reasoning_text" if self._open == "reasoning" else "output_text"
            logprobs = self._logprobs + self._fresh  # those of an end token have no text
            part = _part(kind, self._text, logprobs)
            item["content"] = [part]
            more = {"logprobs": logprobs} if kind == "output_text" else {}
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
        self._open, self._text, self._logprobs = kind, "", []
        self.items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item})
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(self.items[-1])}

    def _add(self, name: str, text: str, **more: Any) -> Iterator[EventData]:
        self._text += text
        yield name, {**self._at(), "delta": text, **more}

    def _at(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _part(kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    more = {"annotations": [], "logprobs": list(logprobs)} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more}
