"""Service: one model being served: its engine, its tokenizer, and everything that the routes share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from dovetail.io.tokenizer import Tokenizer
from dovetail.serve.answer import Ask, Reader, Step
from dovetail.serve.backend import Backend
from dovetail.serve.config import ServerConfig
from dovetail.serve.errors import ApiError, as_api_error, bad, refused
from dovetail.serve.inflight import Inflight, Ticket
from dovetail.serve.messages import Delta
from dovetail.serve.metrics import Metrics
from dovetail.serve.prompts import Prompts
from dovetail.serve.token_text import TokenText

log = logging.getLogger(__name__)


class Service:
    def __init__(self, backend: Backend, tokenizer: Tokenizer, config: ServerConfig):
        self.backend, self.tokenizer, self.config = backend, tokenizer, config
        self.created = int(time.time())
        self.metrics = Metrics(config.names[0])
        self.inflight = Inflight(config.limits)
        self.prompts = Prompts(tokenizer, config)
        self.token_text = TokenText(tokenizer)
        self._aborts: set[asyncio.Task] = set()  # asyncio forgets tasks that nobody holds

    @property
    def name(self) -> str:
        return self.config.names[0]

    @property
    def max_len(self) -> int:
        return self.backend.info.max_model_len

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.config.names:
            known = ", ".join(self.config.names)
            message = f"the model {name[:200]!r} is not served here; this server has {known}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check(self, asks: list[Ask]) -> None:
        """What can be told before the engine is asked: sizes, and whether there is room."""
        most = min(self.max_len - 1, self.config.limits.prompt_tokens or self.max_len)
        for ask in asks:
            if ask.params.n > self.config.limits.n:
                raise bad(f"n must be at most {self.config.limits.n} on this server; got {ask.params.n}", "n")
            if len(ask.prompt) > most:
                message = f"the prompt has {len(ask.prompt)} tokens, and this server takes at most {most}"
                raise bad(message, code="context_length_exceeded")
        self.inflight.check(len(asks))

    async def answer(self, ask: Ask) -> AsyncGenerator[Step]:
        """The steps of a prompt's n answers, until all have ended. Leaving aborts it."""
        id = uuid.uuid4().hex
        readers = [Reader(ask, self.tokenizer) for _ in range(ask.params.n)]
        going = set(range(ask.params.n))
        with self.inflight.ticket(lambda: self._abort(id)) as ticket, _Clock(self.metrics, ticket, ask) as clock:
            generated = self.backend.generate(
                id, ask.prompt, ask.engine_params, priority=ask.priority, cache_salt=ask.cache_salt
            )
            async with aclosing(generated) as deltas:
                delta = await _first(deltas)
                while delta is not None:
                    if delta.index in going:  # else a stop string has ended it, and this is what was on its way
                        step = self._read(delta, readers[delta.index], ticket)
                        clock.tick(step)
                        if step.finish_reason is not None:
                            going.discard(delta.index)
                            self._end_early(id, delta)
                        yield step
                    elif delta.prompt_logprobs is not None:
                        yield Step(delta.index, [], [], prompt_logprobs=delta.prompt_logprobs)
                    if not going and (ask.params.prompt_logprobs is None or delta.prompt_logprobs is not None):
                        return
                    delta = await anext(deltas, None)
        if going:
            raise ticket.why or ApiError(500, "the answer ended early", code="aborted")

    def _read(self, delta: Delta, reader: Reader, ticket: Ticket) -> Step:
        """An end that nobody wished for is an error, and not an answer."""
        if delta.error is not None:
            raise as_api_error(RuntimeError(delta.error))
        if delta.finish_reason == "abort":
            raise ticket.why or ApiError(503, "the request was aborted", code="aborted")
        return reader.read(delta)

    def _end_early(self, id: str, delta: Delta) -> None:
        """A stop string has ended one of the n, of which the engine does not know: the others may go on."""
        if not delta.finished:
            self._abort(id, delta.index)

    def _abort(self, id: str, index: int | None = None) -> None:
        task = asyncio.ensure_future(_quietly(self.backend.abort(id, index)))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


async def _quietly(abort) -> None:
    with contextlib.suppress(Exception):  # an engine that died has nothing left to abort
        await abort


async def _first(deltas: AsyncGenerator[Delta]) -> Delta | None:
    """A ValueError before the first delta is what the engine has to say against the request."""
    try:
        return await anext(deltas, None)
    except ValueError as error:
        raise refused(error) from None


class _Clock:
    """Puts one request's times and counts into the metrics."""

    def __init__(self, metrics: Metrics, ticket: Ticket, ask: Ask):
        self._metrics, self._ticket, self._ask = metrics, ticket, ask
        self._last: dict[int, float] = {}
        self._open = ask.params.n

    def __enter__(self) -> _Clock:
        return self

    def tick(self, step: Step) -> None:
        now, metrics = time.monotonic(), self._metrics
        if self._ticket.waits:
            self._ticket.waits = False
            metrics.first_token.observe(now - self._ticket.arrival)
            metrics.prompt_tokens += len(self._ask.prompt)
        elif step.index in self._last and step.tokens:
            count = len(step.tokens)
            metrics.between.observe((now - self._last[step.index]) / count, count)
        self._last[step.index] = now
        metrics.generated_tokens += len(step.tokens)
        if step.finish_reason is not None:
            self._open -= 1
            metrics.finished[step.finish_reason] += 1
            metrics.whole.observe(now - self._ticket.arrival)

    def __exit__(self, kind, error, trace) -> None:
        left = kind is not None and issubclass(kind, GeneratorExit | asyncio.CancelledError)
        self._metrics.finished["abort" if left or error is None else "error"] += self._open
