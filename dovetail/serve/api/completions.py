"""/v1/completions: the request, and its answer. Several prompts run at the same time; their choices are in order."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from fastapi import APIRouter, Response

from dovetail.core.errors import RequestError, UserError
from dovetail.engine.request.params import SamplingParams
from dovetail.io.tool_formats.events import Content
from dovetail.serve.api.delivery import DONE, EventStream, JsonAnswer, TokenUsage, event
from dovetail.serve.api.requests import (
    Flag,
    GenerationRequest,
    Int,
    PromptField,
    RefusedField,
    ResponseFormat,
    prompt_list,
)
from dovetail.serve.errors import ApiError
from dovetail.serve.talk.answer import AnswerDelta, PromptRequest
from dovetail.serve.talk.service import Service

PATH = "/v1/completions"
T = TypeVar("T")


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: PromptField
    max_tokens: Int | None = None
    logprobs: Int | None = None
    echo: Flag = False
    response_format: ResponseFormat | None = None
    add_special_tokens: Flag = True

    refused: ClassVar = {
        **GenerationRequest.refused,
        "suffix": RefusedField("the model continues a text and cannot fill in", ("",)),
        "prompt_embeds": RefusedField("send text or token ids"),
        "max_completion_tokens": RefusedField("it is called max_tokens on this route"),
    }

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the engine's parameters; `defaults` are the model's own.

        With `echo` and max_tokens 0, which only scores the prompt, one token is generated and not shown.
        """
        self.check_stream()
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("`max_tokens` must be at least 1, got 0: only `echo` allows 0", param="max_tokens")
        most = 16 if self.max_tokens is None else self.max_tokens or 1
        scored = self.logprobs if self.echo and self.prompt_logprobs is None else None
        structured = self.response_format.structured() if self.response_format else None
        return self.sampling(
            defaults, most, logprobs=self.logprobs, structured_outputs=structured, prompt_logprobs=scored
        )


def routes(service: Service) -> APIRouter:
    """Return the route /v1/completions."""
    router = APIRouter()

    @router.post(PATH)
    async def completions(body: CompletionRequest) -> Response:
        """Continue a text."""
        adapter = service.adapter_of(body.model)
        requests = await asyncio.to_thread(_requests, service, body, adapter)
        service.check(requests)
        answer = _CompletionAnswer(service, body, requests)
        if body.stream:
            return EventStream(answer.chunks(), lambda error: event(error.body(PATH)))
        return JsonAnswer(answer.whole())

    return router


def _requests(service: Service, body: CompletionRequest, adapter: str | None) -> list[PromptRequest]:
    params, requests = body.params(service.config.defaults), []
    for prompt in prompt_list(body.prompt, "prompt"):
        tokens = prompt
        if isinstance(prompt, str):
            tokens = service.prompts.encode(prompt, body.add_special_tokens, service.prompts.max_tokens)
        if not tokens:
            raise RequestError("`prompt` must not be empty: give at least one token", param="prompt")
        if body.echo:
            _echoed(service, body, tokens)
        requests.append(PromptRequest(prompt=tokens, params=params, adapter=adapter, **body.prompt_options))
    return requests


class _Choice:
    """One of the answers, as far as it has arrived."""

    def __init__(self, request: PromptRequest):
        self.request = request
        self.deltas: list[AnswerDelta] = []
        self.shown = 0  # characters sent so far, for text_offset
        self.begun = False


class _CompletionAnswer:
    def __init__(self, service: Service, body: CompletionRequest, requests: list[PromptRequest]):
        self._service, self._body, self._requests = service, body, requests
        self._usage = TokenUsage(requests, service.config)
        self._choices = [_Choice(request) for request in requests for _ in range(body.n)]
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()),
            "model": service.name_of(requests[0].adapter),
        }  # fmt: skip
        self._scores_prompt = requests[0].params.prompt_logprobs is not None

    async def _deltas(self) -> AsyncGenerator[tuple[_Choice, AnswerDelta]]:
        answers = [self._service.answer(request) for request in self._requests]
        async with aclosing(_merged(answers)) as deltas:
            async for at, delta in deltas:
                if self._body.max_tokens == 0:
                    delta = replace(delta, events=[], tokens=[], logprobs=delta.logprobs and [])
                self._usage.count(delta, at)
                yield self._choices[at * self._body.n + delta.index], delta

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Stream the answer, or send it at the end if it begins with the prompt's log-probabilities.

        The engine sends these last.
        """
        if self._scores_prompt:
            whole = await self.whole()
            for choice in whole["choices"]:
                yield event({**self._head, "choices": [choice]})
        else:
            usage = {"usage": None} if self._body.with_usage else {}
            async for choice, delta in self._deltas():
                yield event({**self._head, "choices": [self._shown(choice, [delta])]} | usage)
        if self._body.with_usage:
            yield event({**self._head, "choices": [], "usage": self._usage.openai(), **self._usage.metrics()})
        yield DONE

    async def whole(self) -> dict[str, Any]:
        async for choice, delta in self._deltas():
            choice.deltas.append(delta)
        choices = [self._shown(choice, choice.deltas) for choice in self._choices]
        return {**self._head, "choices": choices, "usage": self._usage.openai(), **self._usage.metrics()}

    def _shown(self, choice: _Choice, deltas: list[AnswerDelta]) -> dict[str, Any]:
        """Return the JSON of what these deltas add to a choice."""
        first, choice.begun = not choice.begun, True
        text = "".join(each.text for delta in deltas for each in delta.events if isinstance(each, Content))
        if first and self._body.echo:
            text = _echoed(self._service, self._body, choice.request.prompt) + text
        end = next((delta for delta in deltas if delta.finish_reason is not None), None)
        found = {
            "index": self._choices.index(choice),
            "text": text,
            "logprobs": self._logprobs(choice, deltas, first) if self._body.logprobs is not None else None,
            "finish_reason": end.finish_reason if end else None,
            "stop_reason": end.stop_reason if end else None,
        }
        if self._scores_prompt:
            found["prompt_logprobs"] = self._service.token_text.prompt(self._prompt_logprobs(choice))
        if self._body.return_token_ids:
            found["token_ids"] = [token for delta in deltas for token in delta.tokens]
            found["prompt_token_ids"] = choice.request.prompt if first else None
        choice.shown += len(text)
        return found

    def _logprobs(self, choice: _Choice, deltas: list[AnswerDelta], first: bool) -> dict[str, Any]:
        tokens = [token for delta in deltas for token in delta.tokens]
        logprobs: list = [each for delta in deltas for each in delta.logprobs or ()]
        offset = choice.shown
        if first and self._body.echo:
            tokens, logprobs = choice.request.prompt + tokens, [*self._prompt_logprobs(choice), *logprobs]
        return self._service.token_text.completion(tokens, logprobs, offset)

    def _prompt_logprobs(self, choice: _Choice) -> list:
        """Return the prompt's log-probabilities: they arrive with one of the n answers and belong to all of them."""
        at = self._choices.index(choice) // self._body.n * self._body.n
        for other in self._choices[at : at + self._body.n]:
            for delta in other.deltas:
                if delta.prompt_logprobs is not None:
                    return list(delta.prompt_logprobs)
        raise ApiError(500, "the engine sent no log-probabilities of the prompt", code="internal_error")


def _echoed(service: Service, body: CompletionRequest, prompt: list[int]) -> str:
    try:
        return service.tokenizer.decode(prompt, body.skip_special_tokens)
    except UserError as error:
        raise RequestError(f"echo: {error}", param="prompt") from None


_END = object()


async def _merged(streams: list[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Merge several streams: yield (index of the stream, its next item) as items arrive, until all have ended.

    The first error ends all of them, and so does leaving.
    """
    if len(streams) == 1:  # the usual case needs no tasks
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    # Bounded, so that a slow reader slows the streams down instead of filling memory.
    queue: asyncio.Queue[Any] = asyncio.Queue(len(streams))
    tasks = [asyncio.create_task(_forward(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            which, item, error = await queue.get()
            if error is not None:
                raise error
            if item is _END:
                left -= 1
            else:
                yield which, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(which: int, stream: AsyncGenerator[Any], queue: asyncio.Queue[Any]) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put((which, item, None))
        await queue.put((which, _END, None))
    except Exception as error:
        await queue.put((which, None, error))
