"""/v1/chat/completions: the request.

/v1/chat/completions: how it is answered, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Response
from pydantic import Field

from dovetail.engine.request.params import SamplingParams, StructuredOutputsParams
from dovetail.io.tool_formats.events import CallArguments, CallStart, Content, Event, Reasoning, collect
from dovetail.serve.api.cut_json import read_cut_off
from dovetail.serve.api.delivery import DONE, EventStream, JsonAnswer, TokenUsage, event
from dovetail.serve.api.requests import Body, Flag, GenerationRequest, Int, RefusedField, TopLogprobs
from dovetail.serve.errors import ApiError, bad
from dovetail.serve.talk.answer import AnswerDelta, Ask
from dovetail.serve.talk.prompts import EFFORTS, Conversation
from dovetail.serve.talk.service import Service

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
_TEXT_ONLY = "the model reads text only"


class Part(Body):
    """A part of a message's content."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    refused: ClassVar = {
        name: RefusedField(_TEXT_ONLY)
        for name in ("image_url", "input_audio", "audio_url", "video_url", "file", "image", "image_embeds")
    }
    ignored: ClassVar = {"cache_control": "every prefix is cached"}


class CalledFunction(Body):
    name: str
    arguments: str = "{}"
    ignored: ClassVar = {"parsed_arguments": "arguments say the same"}


class FunctionCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Int | None = None  # in a stream's deltas, which some clients send back as they came


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[FunctionCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    refused: ClassVar = {
        "audio": RefusedField(_TEXT_ONLY),
        "function_call": RefusedField("send tool_calls, its name since 2023"),
    }
    ignored: ClassVar = {  # what clients and gateways add to an answer that comes back in the history
        "annotations": "templates show a message's text",
        "parsed": "content says the same",
        "provider_specific_fields": "they are another server's",
    }

    def plain(self, where: str) -> dict[str, Any]:
        """The message as templates read it."""
        content = text_of(self.content, where)
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
            raise bad(f"{where}.content is missing", f"{where}.content", "missing_required_parameter")
        return found


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class ChatTool(Body):
    type: Literal["function"]
    function: Function
    refused: ClassVar = {"custom": RefusedField("a tool is a function with JSON arguments")}


class NamedFunction(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: NamedFunction
    refused: ClassVar = {"allowed_tools": RefusedField("send only the tools that are allowed")}


class JsonSchema(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag | None = None  # a schema is always enforced


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    refused: ClassVar = {"grammar": RefusedField("send structured_outputs with a grammar")}

    def structured(self) -> StructuredOutputsParams | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructuredOutputsParams(json="object")
        if self.json_schema is None:
            raise bad("response_format.json_schema is missing", "response_format.json_schema")
        return StructuredOutputsParams(json=self.json_schema.schema_ or "object")


class ChatRequest(GenerationRequest):
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
        "audio": RefusedField(_TEXT_ONLY),
        "modalities": RefusedField(_TEXT_ONLY, (["text"],)),
        "web_search_options": RefusedField("this server does not search"),
        "moderation": RefusedField("there is none"),
        "functions": RefusedField("send tools, their name since 2023"),
        "function_call": RefusedField("send tool_choice, its name since 2023"),
        "mm_processor_kwargs": RefusedField(_TEXT_ONLY),
    }
    ignored: ClassVar = {
        **GenerationRequest.ignored,
        "verbosity": "templates have no place for it: ask for it in the prompt",
        "prediction": "it would not make the answer come sooner",
    }

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        self.check_stream()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad("top_logprobs needs logprobs: true", "top_logprobs")
        # max_tokens is the old name; with both, the new one counts, as in vLLM.
        most = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        structured = self.response_format.structured() if self.response_format else None
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling(defaults, most, logprobs=logprobs, structured_outputs=structured)

    def conversation(self) -> Conversation:
        messages = [message.plain(f"messages.{i}") for i, message in enumerate(self.messages)]
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None
        kwargs = dict(self.chat_template_kwargs or {})
        if self.documents is not None:
            kwargs["documents"] = self.documents
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise bad("continue_final_message goes with add_generation_prompt: false", "continue_final_message")
        return Conversation(
            messages=messages,
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools or ()],
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


def text_of(content: str | list[Part] | None, where: str) -> str | None:
    """Parts become lines of one text: few templates take parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for i, part in enumerate(content):
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise bad(f"{where}.content.{i}.{part.type} is missing", f"{where}.content.{i}")
        texts.append(text)
    return "\n".join(texts)


def _plain_call(call: FunctionCall, where: str) -> dict[str, Any]:
    """Templates take arguments as an object and write them in the model's own notation."""
    arguments = read_cut_off(call.function.arguments or "{}")  # a call that max_tokens cut off comes back as it was
    if arguments is None:
        message = f"{where}.function.arguments must be the text of a JSON object, or its beginning"
        raise bad(message, f"{where}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


PATH = "/v1/chat/completions"


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(PATH)
    async def chat_completions(body: ChatRequest) -> Response:
        """A conversation's next message."""
        adapter = service.adapter_of(body.model)
        params, talk = body.params(service.config.defaults), body.conversation()
        make = service.prompts.ask
        ask = await service.in_thread(talk.template, make, talk, params, adapter=adapter, **body.ask_options)
        service.check([ask])
        chat = _Chat(service, body, ask)
        if body.stream:
            return EventStream(chat.chunks(), lambda error: event(error.body(PATH)))
        return JsonAnswer(chat.whole())

    return router


class _Chat:
    def __init__(self, service: Service, body: ChatRequest, ask: Ask):
        self._service, self._body, self._ask = service, body, ask
        self._usage = TokenUsage([ask])
        name = service.name_of(ask.adapter)
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    # --- in chunks ----------------------------------------------------------------------------------------------------

    async def chunks(self) -> AsyncGenerator[bytes]:
        begun: set[int] = set()
        called: set[int] = set()
        async with aclosing(self._service.answer(self._ask)) as steps:
            async for step in steps:
                self._usage.count(step)
                out = b""
                if step.index not in begun:
                    out += self._chunk(step.index, {"role": "assistant", "content": ""}, first=not begun)
                    begun.add(step.index)
                if any(isinstance(each, CallStart) for each in step.events):
                    called.add(step.index)
                yield out + self._step(step, step.index in called)
        if self._body.with_usage:
            yield event({**self._base(), "choices": [], "usage": self._usage.openai()})
        yield DONE

    def _step(self, step: AnswerDelta, called: bool) -> bytes:
        deltas = [delta for each in step.events if (delta := _delta(each)) and self._is_wanted(each)]
        more = self._more(step)
        if more and not deltas:
            deltas = [{}]  # tokens without text: it comes later, or is not shown
        out = b""
        for i, delta in enumerate(deltas):
            out += self._chunk(step.index, delta, **(more if i == 0 else {}))
        if step.finish_reason is not None:
            reason = _finish(step.finish_reason, called)
            out += self._chunk(step.index, {}, finish_reason=reason, stop_reason=step.stop_reason)
        return out

    def _chunk(
        self, index: int, delta: dict, first: bool = False, finish_reason: str | None = None, **more: Any
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason} | more
        base = self._base()
        if first and self._body.return_token_ids:
            base["prompt_token_ids"] = self._ask.prompt
        if self._body.with_usage:
            base["usage"] = None
        return event({**base, "choices": [choice]})

    def _base(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _more(self, step: AnswerDelta) -> dict[str, Any]:
        """What a choice has about the step's tokens, where the request asks for it."""
        more: dict[str, Any] = {}
        if step.logprobs:
            more["logprobs"] = {"content": self._service.token_text.chat(step.logprobs), "refusal": None}
        if self._body.return_token_ids and step.tokens:
            more["token_ids"] = list(step.tokens)
        if step.prompt_logprobs is not None:
            more["prompt_logprobs"] = self._service.token_text.prompt(step.prompt_logprobs)
        return more

    def _is_wanted(self, each: Event) -> bool:
        return self._body.include_reasoning or not isinstance(each, Reasoning)

    # --- whole --------------------------------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        steps: list[list[AnswerDelta]] = [[] for _ in range(self._ask.params.n)]
        async with aclosing(self._service.answer(self._ask)) as answer:
            async for step in answer:
                self._usage.count(step)
                steps[step.index].append(step)
        answer = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, of) for index, of in enumerate(steps)],
            "usage": self._usage.openai(),
        }
        scored = next((s.prompt_logprobs for of in steps for s in of if s.prompt_logprobs is not None), None)
        if scored is not None:
            answer["prompt_logprobs"] = self._service.token_text.prompt(scored)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._ask.prompt
        return answer

    def _choice(self, index: int, steps: list[AnswerDelta]) -> dict[str, Any]:
        parsed = collect(each for step in steps for each in step.events)
        end = next((step for step in steps if step.finish_reason is not None), None)
        if end is None or end.finish_reason is None:
            raise ApiError(500, "the answer ended early", code="aborted")
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content or (None if parsed.calls else "")}
        message["refusal"] = None
        if parsed.reasoning and self._body.include_reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in parsed.calls]
        choice = {"index": index, "message": message, "logprobs": None, "stop_reason": end.stop_reason}
        choice["finish_reason"] = _finish(end.finish_reason, bool(parsed.calls))
        if self._body.logprobs:
            logprobs = [each for step in steps for each in step.logprobs or ()]
            choice["logprobs"] = {"content": self._service.token_text.chat(logprobs), "refusal": None}
        if self._body.return_token_ids:
            choice["token_ids"] = [token for step in steps for token in step.tokens]
        return choice


def _delta(each: Event) -> dict[str, Any] | None:
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


def _finish(reason: str, called: bool) -> str:
    return "tool_calls" if called and reason == "stop" else reason
