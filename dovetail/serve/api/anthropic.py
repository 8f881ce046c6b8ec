"""/v1/messages and its count_tokens: Anthropic's request, and its answer in blocks of thinking, text and tool use."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from dovetail.core.errors import RequestError
from dovetail.engine.request.params import SamplingParams, StructuredOutputsParams
from dovetail.io.tool_formats.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning, collect
from dovetail.io.tool_formats.formats import SHORT_ID_LENGTH
from dovetail.serve.api.chat import Name
from dovetail.serve.api.delivery import EventStream, JsonAnswer, TokenUsage, event, json_answer, wanted
from dovetail.serve.api.requests import LABELS, Body, Flag, Int, Num, RefusedField, StopList
from dovetail.serve.errors import ApiError
from dovetail.serve.media.source import ImageReference
from dovetail.serve.talk.answer import AnswerDelta, PromptRequest, has_call
from dovetail.serve.talk.prompts import Conversation, message_content
from dovetail.serve.talk.service import Service

PATH = "/v1/messages"

# --- the request ------------------------------------------------------------------------------------------------------


class CacheControl(Body):
    """Where a prefix may be cached. Here every prefix is cached, so it is always accepted."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class ImageSource(Body):
    """An image, in base64 or by an address that the server may fetch."""

    type: Literal["base64", "url"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = None
    data: str | None = None
    url: str | None = None
    refused: ClassVar = {"file_id": RefusedField("no files are stored: send the image in base64")}

    def plain(self, where: str) -> ImageReference:
        """Return the image; `where` is the path of the source in the request."""
        if self.type == "url":
            return ImageReference(where, self.need("url", where))
        return ImageReference(where, f"data:{self.need('media_type', where)};base64,{self.need('data', where)}")


class Block(Body):
    """A block of a message's content."""

    type: Literal["text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    source: ImageSource | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: Flag | None = None
    cache_control: CacheControl | None = None
    refused: ClassVar = {
        "citations": RefusedField("answers have none", ({"enabled": False},)),
        "caller": RefusedField("only the model makes calls", ({"type": "direct"},)),
    }

    def plain(self, where: str) -> str | ImageReference:
        """Return the text or the image of such a block; `where` is its path in the request."""
        if self.type == "image":
            return self.need("source", where).plain(f"{where}.source")
        return self.need("text", where)


class MessagesTurn(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]

    def plain(self, where: str) -> list[dict[str, Any]]:
        """Return the message in OpenAI's format, in which tool results are separate messages and come first."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results, parts, message = [], [], {"role": self.role}
        for i, block in enumerate(self.content):
            here = f"{where}.content.{i}"
            if block.type == "text" or (block.type == "image" and self.role == "user"):
                parts.append(block.plain(here))
            elif block.type == "tool_result" and self.role == "user":
                results.append(_tool_result(block, here))
            elif block.type == "tool_use" and self.role == "assistant":
                message.setdefault("tool_calls", []).append(_tool_call(block, here))  # type: ignore[union-attr]
            elif block.type == "thinking" and self.role == "assistant":
                message["reasoning_content"] = block.need("thinking", here)
            elif block.type != "redacted_thinking":
                text = f"{here}.type must not be {block.type} in a message of the {self.role}"
                raise RequestError(text, param=f"{here}.type")
        if parts or "tool_calls" in message or not results:
            results.append({**message, "content": message_content(parts)})
        return results


class MessageTool(Body):
    """A tool that the model may call."""

    name: Name
    type: Literal["custom"] = "custom"
    description: str | None = None
    input_schema: dict[str, Any]
    strict: Flag | None = None
    cache_control: CacheControl | None = None
    refused: ClassVar = {
        "defer_loading": RefusedField("tools are read at once", (False,)),
        "input_examples": RefusedField("put them in the description", ([],)),
        "allowed_callers": RefusedField("only the model makes calls", (["direct"],)),
        "eager_input_streaming": RefusedField("arguments are always streamed", (True,)),
    }

    def chat(self) -> dict[str, Any]:
        """Return the tool in the format of /v1/chat/completions."""
        function = {"name": self.name, "parameters": self.input_schema}
        more = {"description": self.description, "strict": self.strict}
        return {"type": "function", "function": function | {k: v for k, v in more.items() if v is not None}}


class MessageToolChoice(Body):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Flag = False


class Thinking(Body):
    """Whether the model reasons before it answers."""

    type: Literal["disabled", "enabled", "adaptive"]
    refused: ClassVar = {
        "budget_tokens": RefusedField("thinking is not counted separately; use max_tokens and type adaptive"),
        "display": RefusedField("thinking is always returned in full", ("full",)),
    }


class OutputFormat(Body):
    """A JSON schema of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Options of the answer."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    refused: ClassVar = {"task_budget": RefusedField("use max_tokens")}


class CountRequest(Body):
    """The body of /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[MessagesTurn], Field(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    refused: ClassVar = {
        "mcp_servers": RefusedField("this server calls no others", ([],)),
        "context_management": RefusedField("shorten the messages before they are sent"),
        "user_profile_id": RefusedField("there are no profiles"),
        "workspace_id": RefusedField("there are no workspaces"),
        "output_format": RefusedField("send output_config.format"),
    }
    ignored: ClassVar = {"anthropic_version": "there is one version"}  # in a body made for a cloud's gateway

    def conversation(self) -> Conversation:
        """Return the conversation, checked."""
        messages = [plain for i, turn in enumerate(self.messages) for plain in turn.plain(f"messages.{i}")]
        if self.system is not None:
            messages = [{"role": "system", "content": _system(self.system)}, *messages]
        choice = self.tool_choice
        if choice is not None and choice.type == "tool":
            choice.need("name", "tool_choice")
        # A last message of the assistant is the beginning of the answer.
        is_continued = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        return Conversation(
            messages=messages,
            tools=[tool.chat() for tool in self.tools or ()],
            choice={"any": "required", "tool": "named"}.get(choice.type, choice.type) if choice else "auto",
            named=choice.name if choice else None,
            parallel=not (choice and choice.disable_parallel_tool_use),
            thinking=None if self.thinking is None else self.thinking.type != "disabled",
            effort=self.output_config.effort if self.output_config else None,
            add_generation_prompt=not is_continued,
            continue_final_message=is_continued,
        )


class MessagesRequest(CountRequest):
    """The body of /v1/messages."""

    max_tokens: Int
    stop_sequences: StopList | None = None
    temperature: Num | None = None
    top_p: Num | None = None
    top_k: Int | None = None
    stream: Flag = False
    refused: ClassVar = {
        **CountRequest.refused,
        "container": RefusedField("this server runs no code"),
        "inference_geo": RefusedField("the server runs in one place"),
        "diagnostics": RefusedField("there are none"),
    }
    ignored: ClassVar = {
        **CountRequest.ignored,
        "metadata": LABELS["metadata"],
        "service_tier": LABELS["service_tier"],
        "speed": "there is one speed",
    }

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the engine's parameters; `defaults` are the model's own."""
        values = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        values = {**defaults, **{name: value for name, value in values.items() if value is not None}}
        values["max_tokens"] = self.max_tokens
        form = self.output_config.format if self.output_config else None
        structured = StructuredOutputsParams(json=form.schema_ or "object") if form else None
        return SamplingParams(stop=tuple(self.stop_sequences or ()), structured_outputs=structured, **values)


def _system(system: str | list[Block]) -> str:
    if isinstance(system, str):
        return system
    return "\n".join(block.need("text", f"system.{i}") for i, block in enumerate(system))


def _tool_call(block: Block, where: str) -> dict[str, Any]:
    function = {"name": block.need("name", where), "arguments": block.input or {}}
    return {"id": _call_id(block.need("id", where)), "type": "function", "function": function}


def _tool_result(block: Block, where: str) -> dict[str, Any]:
    content = block.content or ""
    parts: list[str | ImageReference] = [content] if isinstance(content, str) else []
    if isinstance(content, list):
        parts = [part.plain(f"{where}.content.{i}") for i, part in enumerate(content)]
    if block.is_error:  # chat templates can show this only in the text
        text = "\n".join(part for part in parts if isinstance(part, str))
        images = [part for part in parts if not isinstance(part, str)]
        parts = [json.dumps({"error": text}, ensure_ascii=False), *images]
    id = _call_id(block.need("tool_use_id", where))
    return {"role": "tool", "tool_call_id": id, "content": message_content(parts)}


def _anthropic_id(id: str) -> str:
    """Return a call's id in Anthropic's form: toolu_ instead of call_."""
    return "toolu_" + id.removeprefix("call_")


def _call_id(id: str) -> str:
    """Return the id that `_anthropic_id` was given, for a chat template; any other id as it is."""
    rest = id.removeprefix("toolu_")
    return id if rest == id else rest if len(rest) == SHORT_ID_LENGTH else f"call_{rest}"


# --- the answer -------------------------------------------------------------------------------------------------------


def routes(service: Service) -> APIRouter:
    """Return the routes /v1/messages and /v1/messages/count_tokens."""
    router = APIRouter()

    @router.post(PATH)
    async def messages(body: MessagesRequest, http: Request) -> Response:
        """Answer a conversation with its next message, for Anthropic's clients."""
        adapter = service.adapter_of(body.model)
        params, talk = body.params(service.config.defaults), body.conversation()
        request = await wanted(http, service.prompt_request(talk, params, limit="max_tokens", adapter=adapter))
        service.check([request])
        answer = _MessageAnswer(service, request)
        return EventStream(answer.events(), _failed) if body.stream else JsonAnswer(answer.whole())

    @router.post(f"{PATH}/count_tokens")
    async def count_tokens(body: CountRequest, http: Request) -> Response:
        """Return the number of tokens of a conversation."""
        talk = replace(body.conversation(), adapter=service.adapter_of(body.model))
        images = await wanted(http, service.load_images(talk))
        prompt = await asyncio.to_thread(service.prompts.tokens, talk, images)
        return json_answer({"input_tokens": len(prompt.tokens)})

    return router


def _failed(error: ApiError) -> bytes:
    return event(error.body(PATH), "error")


class _MessageAnswer:
    def __init__(self, service: Service, request: PromptRequest):
        self._service, self._request = service, request
        self._usage = TokenUsage([request], service.config)
        self._called = False

    async def whole(self) -> dict[str, Any]:
        deltas: list[AnswerDelta] = []
        async with aclosing(self._service.answer(self._request)) as answer:
            async for delta in answer:
                self._usage.count(delta)
                deltas.append(delta)
        parsed = collect(each for delta in deltas for each in delta.events)
        content: list[dict[str, Any]] = []
        if parsed.reasoning:
            content.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
        if parsed.content or not parsed.calls:
            content.append({"type": "text", "text": parsed.content})
        for call in parsed.calls:
            block = {"type": "tool_use", "id": _anthropic_id(call.id), "name": call.name}
            content.append({**block, "input": _input(call.arguments)})
        self._called = bool(parsed.calls)
        usage = {"usage": self._usage.anthropic(), **self._usage.metrics()}
        return {**self._head(), "content": content, **self._end(deltas[-1]), **usage}

    async def events(self) -> AsyncGenerator[bytes]:
        blocks, last = _Blocks(), None
        async with aclosing(self._service.answer(self._request)) as answer:
            async for delta in answer:
                self._usage.count(delta)
                self._called |= has_call(delta)
                out = [] if last else [self._start()]
                out += [made for each in delta.events for made in blocks.take(each)]
                last = delta
                yield b"".join(event(data, data["type"]) for data in out)
        assert last is not None
        usage = {"usage": self._usage.anthropic(), **self._usage.metrics()}
        ends = [
            *blocks.close(),
            {"type": "message_delta", "delta": self._end(last), **usage},
            {"type": "message_stop"},
        ]
        yield b"".join(event(data, data["type"]) for data in ends)

    def _head(self) -> dict[str, Any]:
        id, name = f"msg_{uuid.uuid4().hex}", self._service.name_of(self._request.adapter)
        return {"id": id, "type": "message", "role": "assistant", "model": name}

    def _start(self) -> dict[str, Any]:
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
        return {"type": "message_start", "message": {**message, "usage": self._usage.anthropic()}}

    def _end(self, delta: AnswerDelta) -> dict[str, Any]:
        sequence = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        if delta.finish_reason == "length":
            reason = "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments; empty if max_tokens has cut them off, which stop_reason shows."""
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
                block = {"type": "tool_use", "id": _anthropic_id(id), "name": name, "input": {}}
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
