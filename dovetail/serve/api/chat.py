"""/v1/chat/completions: how it is answered, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Response

from dovetail.io.tool_formats.events import CallArguments, CallStart, Content, Event, Reasoning, collect
from dovetail.serve.api.chat_request import ChatRequest
from dovetail.serve.api.delivery import DONE, EventStream, JsonAnswer, event
from dovetail.serve.api.usage import Usage
from dovetail.serve.errors import ApiError
from dovetail.serve.talk.answer import Ask, Step
from dovetail.serve.talk.service import Service

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
        self._usage = Usage([ask])
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

    def _step(self, step: Step, called: bool) -> bytes:
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

    def _more(self, step: Step) -> dict[str, Any]:
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
        steps: list[list[Step]] = [[] for _ in range(self._ask.params.n)]
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

    def _choice(self, index: int, steps: list[Step]) -> dict[str, Any]:
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
