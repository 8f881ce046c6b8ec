"""/v1/chat/completions: the request, and its answer as JSON or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from dovetail.core.errors import RequestError
from dovetail.engine.request.params import SamplingParams
from dovetail.io.tool_formats.events import CallArguments, CallStart, Content, Event, Reasoning, collect
from dovetail.io.tool_formats.notation import read_cut_off
from dovetail.serve.api.delivery import DONE, EventStream, JsonAnswer, TokenUsage, event, wanted
from dovetail.serve.api.requests import (
    NO_MEDIA,
    Body,
    Flag,
    GenerationRequest,
    ImageDetail,
    Int,
    RefusedField,
    ResponseFormat,
    TopLogprobs,
)
from dovetail.serve.errors import ApiError
from dovetail.serve.media.source import ImageReference
from dovetail.serve.talk.answer import AnswerDelta, PromptRequest, has_call
from dovetail.serve.talk.prompts import EFFORTS, Conversation, message_content
from dovetail.serve.talk.service import Service

PATH = "/v1/chat/completions"
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]

# --- the request ------------------------------------------------------------------------------------------------------


class ImageUrl(Body):
    """An image, as a data: URL or as an address that the server may fetch."""

    url: str
    detail: ImageDetail = "auto"


class Part(Body):
    """A part of a message's content."""

    type: Literal["text", "refusal", "image_url"]
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None
    refused: ClassVar = {
        **dict.fromkeys(("input_audio", "audio_url", "video_url", "file", "image_embeds"), NO_MEDIA),
        "image": RefusedField("send image_url with a data: URL"),
    }
    ignored: ClassVar = {
        "cache_control": "every prefix is cached",
        "uuid": "images are cached under a hash of their bytes",
    }

    def plain(self, where: str) -> str | ImageReference:
        """Return the part's text or image; `where` is its path in the request."""
        given = self.need(self.type, where)
        return ImageReference(f"{where}.image_url", given.url, given.detail) if self.type == "image_url" else given


class CalledFunction(Body):
    """The function of a tool call, with its arguments as JSON text."""

    name: str
    arguments: str = "{}"
    ignored: ClassVar = {"parsed_arguments": "arguments say the same"}


class FunctionCall(Body):
    """A tool call of an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Int | None = None  # of a stream's deltas, which some clients send back unchanged


class Message(Body):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[FunctionCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    refused: ClassVar = {
        "audio": NO_MEDIA,
        "function_call": RefusedField("send tool_calls, its name since 2023"),
    }
    ignored: ClassVar = {  # what clients and gateways add to an answer that they send back in the history
        "annotations": "templates show a message's text",
        "parsed": "content says the same",
        "provider_specific_fields": "they are another server's",
    }

    def plain(self, where: str) -> dict[str, Any]:
        """Return the message as templates read it; `where` is its path in the request."""
        content = self.content
        if isinstance(content, list):
            content = message_content([part.plain(f"{where}.content.{i}") for i, part in enumerate(content)])
        if content is None and self.refusal is not None:
            content = self.refusal
        found: dict[str, Any] = {"role": self.role, "content": content}
        for key in ("name", "tool_call_id", "reasoning_content", "reasoning"):
            if getattr(self, key) is not None:
                found[key] = getattr(self, key)
        if self.tool_calls:
            found["tool_calls"] = [
                _plain_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(self.tool_calls)
            ]
        elif content is None and self.role == "assistant":
            found["content"] = ""  # an answer that was cut off before its text, or refused
        elif content is None:
            self.need("content", where)
        return found


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class ChatTool(Body):
    """A tool: always a function."""

    type: Literal["function"]
    function: Function
    refused: ClassVar = {"custom": RefusedField("a tool is a function with JSON arguments")}


class NamedFunction(Body):
    """The function that `tool_choice` names."""

    name: str


class NamedChoice(Body):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    function: NamedFunction
    refused: ClassVar = {"allowed_tools": RefusedField("send only the tools that are allowed")}


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    logprobs: Flag = False
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: list[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: Flag = True
    reasoning_effort: Literal[EFFORTS] | None = None  # type: ignore[valid-type]
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    add_special_tokens: Flag = False
    include_reasoning: Flag = True

    refused: ClassVar = {
        **GenerationRequest.refused,
        "audio": RefusedField("answers are text"),
        "modalities": RefusedField("answers are text", (["text"],)),
        "web_search_options": RefusedField("this server does not search"),
        "moderation": RefusedField("there is none"),
        "functions": RefusedField("send tools, their name since 2023"),
        "function_call": RefusedField("send tool_choice, its name since 2023"),
        "mm_processor_kwargs": RefusedField("images are processed as the model's preprocessor_config.json says"),
    }
    ignored: ClassVar = {
        **GenerationRequest.ignored,
        "verbosity": "templates have no place for it: ask for it in the prompt",
        "prediction": "it would not make the answer faster",
    }

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the engine's parameters; `defaults` are the model's own."""
        self.check_stream()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("`top_logprobs` requires logprobs: true", param="top_logprobs")
        # max_tokens is the old name; with both, the new one counts, as in vLLM.
        most = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        structured = self.response_format.structured() if self.response_format else None
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling(defaults, most, logprobs=logprobs, structured_outputs=structured)

    def conversation(self) -> Conversation:
        """Return the conversation, checked."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None
        kwargs = dict(self.chat_template_kwargs or {})
        if self.documents is not None:
            kwargs["documents"] = self.documents
        asks_for_turn = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and asks_for_turn:
            message = "`continue_final_message` requires add_generation_prompt: false"
            raise RequestError(message, param="continue_final_message")
        return Conversation(
            messages=plain_messages(self.messages),
            tools=plain_tools(self.tools),
            choice="named" if named else self.tool_choice or "auto",  # type: ignore[arg-type]
            named=named,
            parallel=self.parallel_tool_calls,
            template=self.chat_template,
            template_kwargs=kwargs,
            effort=self.reasoning_effort,
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
            add_special_tokens=self.add_special_tokens,
        )


def plain_messages(messages: list[Message] | None, where: str = "messages") -> list[dict[str, Any]]:
    """Return messages as templates read them."""
    return [message.plain(f"{where}.{i}") for i, message in enumerate(messages or ())]


def plain_tools(tools: list[ChatTool] | None) -> list[dict[str, Any]]:
    """Return tools as templates read them."""
    return [tool.model_dump(exclude_none=True) for tool in tools or ()]


def _plain_call(call: FunctionCall, where: str) -> dict[str, Any]:
    """Return a call with its arguments as an object, which templates write in the model's own notation."""
    arguments = read_cut_off(call.function.arguments or "{}")  # a call that max_tokens cut off is sent back as it was
    if arguments is None:
        path = f"{where}.function.arguments"
        raise RequestError(f"{path} must be the text of a JSON object, or its beginning", param=path)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


# --- the answer -------------------------------------------------------------------------------------------------------


def routes(service: Service) -> APIRouter:
    """Return the route /v1/chat/completions."""
    router = APIRouter()

    @router.post(PATH)
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        """Answer a conversation with its next message."""
        adapter = service.adapter_of(body.model)
        params, talk = body.params(service.config.defaults), body.conversation()
        making = service.prompt_request(talk, params, adapter=adapter, **body.prompt_options)
        request = await wanted(http, making)
        service.check([request])
        answer = _ChatAnswer(service, body, request)
        if body.stream:
            return EventStream(answer.chunks(), lambda error: event(error.body(PATH)))
        return JsonAnswer(answer.whole())

    return router


class _ChatAnswer:
    def __init__(self, service: Service, body: ChatRequest, request: PromptRequest):
        self._service, self._body, self._request = service, body, request
        self._usage = TokenUsage([request], service.config)
        name = service.name_of(request.adapter)
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    # in chunks

    async def chunks(self) -> AsyncGenerator[bytes]:
        begun: set[int] = set()
        called: set[int] = set()
        async with aclosing(self._service.answer(self._request)) as deltas:
            async for delta in deltas:
                self._usage.count(delta)
                out = b""
                if delta.index not in begun:
                    out += self._chunk(delta.index, {"role": "assistant", "content": ""}, first=not begun)
                    begun.add(delta.index)
                if has_call(delta):
                    called.add(delta.index)
                yield out + self._chunks_of(delta, delta.index in called)
        if self._body.with_usage:
            yield event({**self._base(), "choices": [], "usage": self._usage.openai(), **self._usage.metrics()})
        yield DONE

    def _chunks_of(self, delta: AnswerDelta, called: bool) -> bytes:
        parts = [part for each in delta.events if (part := _part(each)) and self._is_wanted(each)]
        more = self._more(delta)
        if more and not parts:
            parts = [{}]  # tokens without text: it comes later, or is not shown
        out = b""
        for i, part in enumerate(parts):
            out += self._chunk(delta.index, part, **(more if i == 0 else {}))
        if delta.finish_reason is not None:
            reason = _finish_reason(delta.finish_reason, called)
            out += self._chunk(delta.index, {}, finish_reason=reason, stop_reason=delta.stop_reason)
        return out

    def _chunk(
        self, index: int, delta: dict, first: bool = False, finish_reason: str | None = None, **more: Any
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason} | more
        base = self._base()
        if first and self._body.return_token_ids:
            base["prompt_token_ids"] = self._request.prompt
        if self._body.with_usage:
            base["usage"] = None
        return event({**base, "choices": [choice]})

    def _base(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _more(self, delta: AnswerDelta) -> dict[str, Any]:
        """Return the requested fields of a choice about the delta's tokens."""
        more: dict[str, Any] = {}
        if delta.logprobs:
            more["logprobs"] = {"content": self._service.token_text.chat(delta.logprobs), "refusal": None}
        if self._body.return_token_ids and delta.tokens:
            more["token_ids"] = list(delta.tokens)
        if delta.prompt_logprobs is not None:
            more["prompt_logprobs"] = self._service.token_text.prompt(delta.prompt_logprobs)
        return more

    def _is_wanted(self, each: Event) -> bool:
        return self._body.include_reasoning or not isinstance(each, Reasoning)

    # as one JSON object

    async def whole(self) -> dict[str, Any]:
        deltas: list[list[AnswerDelta]] = [[] for _ in range(self._request.params.n)]
        async with aclosing(self._service.answer(self._request)) as answer:
            async for delta in answer:
                self._usage.count(delta)
                deltas[delta.index].append(delta)
        answer = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, of) for index, of in enumerate(deltas)],
            "usage": self._usage.openai(),
            **self._usage.metrics(),
        }
        scored = next((d.prompt_logprobs for of in deltas for d in of if d.prompt_logprobs is not None), None)
        if scored is not None:
            answer["prompt_logprobs"] = self._service.token_text.prompt(scored)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._request.prompt
        return answer

    def _choice(self, index: int, deltas: list[AnswerDelta]) -> dict[str, Any]:
        parsed = collect(each for delta in deltas for each in delta.events)
        end = next((delta for delta in deltas if delta.finish_reason is not None), None)
        if end is None or end.finish_reason is None:
            raise ApiError(500, "the answer ended early", code="aborted")
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content or (None if parsed.calls else "")}
        message["refusal"] = None
        if parsed.reasoning and self._body.include_reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in parsed.calls]
        choice = {"index": index, "message": message, "logprobs": None, "stop_reason": end.stop_reason}
        choice["finish_reason"] = _finish_reason(end.finish_reason, bool(parsed.calls))
        if self._body.logprobs:
            logprobs = [each for delta in deltas for each in delta.logprobs or ()]
            choice["logprobs"] = {"content": self._service.token_text.chat(logprobs), "refusal": None}
        if self._body.return_token_ids:
            choice["token_ids"] = [token for delta in deltas for token in delta.tokens]
        return choice


def _part(each: Event) -> dict[str, Any] | None:
    """Return the `delta` field of a chunk for an event."""
    match each:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, id, name):
            return {"tool_calls": [{"index": index, **_call(id, name, "")}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return None


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _finish_reason(reason: str, called: bool) -> str:
    return "tool_calls" if called and reason == "stop" else reason
