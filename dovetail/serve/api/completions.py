"""/v1/completions: the request.

/v1/completions: how it is answered. Several prompts run at the same time; their choices are listed in order.

Several streams as one, in the order in which items arrive."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import APIRouter, Response
from pydantic import Field

from dovetail.core.errors import UserError
from dovetail.engine.request.params import SamplingParams
from dovetail.io.tool_formats.events import Content
from dovetail.serve.api.chat import ResponseFormat
from dovetail.serve.api.delivery import DONE, EventStream, JsonAnswer, TokenUsage, event
from dovetail.serve.api.requests import Flag, GenerationRequest, Int, RefusedField, Tokens
from dovetail.serve.errors import ApiError, bad
from dovetail.serve.talk.answer import AnswerDelta, Ask
from dovetail.serve.talk.service import Service

Batch = Annotated[list[str], Field(min_length=1, max_length=2048)]
TokenBatch = Annotated[list[Tokens], Field(min_length=1, max_length=2048)]


class CompletionRequest(GenerationRequest):
    prompt: str | Batch | Tokens | TokenBatch
    max_tokens: Int | None = None
    logprobs: Int | None = None
    echo: Flag = False
    response_format: ResponseFormat | None = None
    add_special_tokens: Flag = True

    refused: ClassVar = {
        **GenerationRequest.refused,
        "suffix": RefusedField("the model continues a text, it does not fill in", ("",)),
        "prompt_embeds": RefusedField("send text or token ids"),
        "max_completion_tokens": RefusedField("it is called max_tokens on this route"),
    }

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """With `echo` and max_tokens 0, which only scores the prompt, one token is generated and not shown."""
        self.check_stream()
        if self.max_tokens == 0 and not self.echo:
            raise bad("max_tokens must be at least 1; 0 is for echo", "max_tokens")
        most = 16 if self.max_tokens is None else self.max_tokens or 1
        scored = self.logprobs if self.echo and self.prompt_logprobs is None else None
        structured = self.response_format.structured() if self.response_format else None
        return self.sampling(
            defaults, most, logprobs=self.logprobs, structured_outputs=structured, prompt_logprobs=scored
        )

    def prompts(self) -> list[Any]:
        return as_many(self.prompt, "prompt")


def as_many(value: Any, name: str) -> list[Any]:
    """One prompt or several, each of them text or token ids, as a list."""
    many = [value] if isinstance(value, str) or (value and isinstance(value[0], int)) else value
    if not all(many) or not many:
        raise bad(f"{name} is empty: give at least one token", name)
    return many


PATH = "/v1/completions"


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(PATH)
    async def completions(body: CompletionRequest) -> Response:
        """The text that follows a prompt."""
        adapter = service.adapter_of(body.model)
        asks = await asyncio.to_thread(_asks, service, body, adapter)
        service.check(asks)
        made = _Completion(service, body, asks)
        if body.stream:
            return EventStream(made.chunks(), lambda error: event(error.body(PATH)))
        return JsonAnswer(made.whole())

    return router


def _asks(service: Service, body: CompletionRequest, adapter: str | None) -> list[Ask]:
    params, asks = body.params(service.config.defaults), []
    for prompt in body.prompts():
        tokens = prompt
        if isinstance(prompt, str):
            tokens = service.prompts.encode(prompt, body.add_special_tokens, service.prompts.max_tokens)
        if not tokens:
            raise bad("prompt is empty: give at least one token", "prompt")
        if body.echo:
            _echoed(service, body, tokens)
        asks.append(Ask(prompt=tokens, params=params, adapter=adapter, **body.ask_options))
    return asks


class _Choice:
    """One of the answers, as far as it has come."""

    def __init__(self, ask: Ask):
        self.ask = ask
        self.steps: list[AnswerDelta] = []
        self.shown = 0  # characters sent so far, for text_offset
        self.begun = False


class _Completion:
    def __init__(self, service: Service, body: CompletionRequest, asks: list[Ask]):
        self._service, self._body, self._asks = service, body, asks
        self._usage = TokenUsage(asks)
        self._choices = [_Choice(ask) for ask in asks for _ in range(body.n)]
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()),
            "model": service.name_of(asks[0].adapter),
        }  # fmt: skip
        self._scores_prompt = asks[0].params.prompt_logprobs is not None

    async def _steps(self) -> AsyncGenerator[tuple[_Choice, AnswerDelta]]:
        answers = [self._service.answer(ask) for ask in self._asks]
        async with aclosing(merge_streams(answers)) as steps:
            async for at, step in steps:
                if self._body.max_tokens == 0:
                    step = step._replace(events=[], tokens=[], logprobs=step.logprobs and [])
                self._usage.count(step, at)
                yield self._choices[at * self._body.n + step.index], step

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The prompt's log-probabilities are last from the engine and first in an answer: with them, all comes at the
        end."""
        if self._scores_prompt:
            whole = await self.whole()
            for choice in whole["choices"]:
                yield event({**self._head, "choices": [choice]})
        else:
            async for choice, step in self._steps():
                yield event({**self._head, "choices": [self._shown(choice, [step])]} | self._no_usage())
        if self._body.with_usage:
            yield event({**self._head, "choices": [], "usage": self._usage.openai()})
        yield DONE

    async def whole(self) -> dict[str, Any]:
        async for choice, step in self._steps():
            choice.steps.append(step)
        choices = [self._shown(choice, choice.steps) for choice in self._choices]
        return {**self._head, "choices": choices, "usage": self._usage.openai()}

    def _no_usage(self) -> dict[str, Any]:
        return {"usage": None} if self._body.with_usage else {}

    def _shown(self, choice: _Choice, steps: list[AnswerDelta]) -> dict[str, Any]:
        """The JSON of what these steps add to a choice."""
        first, choice.begun = not choice.begun, True
        text = "".join(each.text for step in steps for each in step.events if isinstance(each, Content))
        if first and self._body.echo:
            text = _echoed(self._service, self._body, choice.ask.prompt) + text
        end = next((step for step in steps if step.finish_reason is not None), None)
        found = {
            "index": self._choices.index(choice),
            "text": text,
            "logprobs": self._logprobs(choice, steps, first) if self._body.logprobs is not None else None,
            "finish_reason": end.finish_reason if end else None,
            "stop_reason": end.stop_reason if end else None,
        }
        if self._scores_prompt:
            found["prompt_logprobs"] = self._service.token_text.prompt(self._prompt_logprobs(choice))
        if self._body.return_token_ids:
            found["token_ids"] = [token for step in steps for token in step.tokens]
            found["prompt_token_ids"] = choice.ask.prompt if first else None
        choice.shown += len(text)
        return found

    def _logprobs(self, choice: _Choice, steps: list[AnswerDelta], first: bool) -> dict[str, Any]:
        tokens = [token for step in steps for token in step.tokens]
        logprobs: list = [each for step in steps for each in step.logprobs or ()]
        offset = choice.shown
        if first and self._body.echo:
            tokens, logprobs = choice.ask.prompt + tokens, [*(self._prompt_logprobs(choice) or ()), *logprobs]
        return self._service.token_text.completion(tokens, logprobs, offset)

    def _prompt_logprobs(self, choice: _Choice) -> list | None:
        """They come with one of the request's n answers and belong to all of them."""
        at = self._choices.index(choice) // self._body.n * self._body.n
        for other in self._choices[at : at + self._body.n]:
            for step in other.steps:
                if step.prompt_logprobs is not None:
                    return list(step.prompt_logprobs)
        raise ApiError(500, "the engine sent no log-probabilities of the prompt", code="internal_error")


def _echoed(service: Service, body: CompletionRequest, prompt: list[int]) -> str:
    try:
        return service.tokenizer.decode(prompt, body.skip_special_tokens)
    except UserError as error:
        raise bad(f"echo: {error}", "prompt") from None


T = TypeVar("T")


async def merge_streams(streams: list[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """(index of the stream, its next item) until all have ended. The first error ends them all; so does leaving."""
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


_END = object()


async def _forward(which: int, stream: AsyncGenerator[Any], queue: asyncio.Queue[Any]) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put((which, item, None))
        await queue.put((which, _END, None))
    except Exception as error:
        await queue.put((which, None, error))
