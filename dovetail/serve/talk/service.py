"""Service: the model that is served: its engine, its tokenizer, and everything that the routes share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from dovetail.core.errors import UserError
from dovetail.engine.request.params import check_room
from dovetail.io.tokenizer import Tokenizer
from dovetail.serve.config import ServerConfig
from dovetail.serve.errors import RETRY_SECONDS, ApiError, bad, refused
from dovetail.serve.remote.client import EngineBackend
from dovetail.serve.remote.wire import Delta
from dovetail.serve.request_context import salted
from dovetail.serve.talk.answer import AnswerDelta, AnswerReader, Ask, TokenText
from dovetail.serve.talk.inflight import Inflight, Ticket
from dovetail.serve.talk.metrics import ServerMetrics
from dovetail.serve.talk.prompts import AdapterTemplates, Prompts

log = logging.getLogger(__name__)
T = TypeVar("T")


class Service:
    def __init__(self, backend: EngineBackend, tokenizer: Tokenizer, config: ServerConfig):
        self.backend, self.tokenizer, self.config = backend, tokenizer, config
        self.created = int(time.time())
        self.metrics = ServerMetrics(config.names[0])
        self.inflight = Inflight(config.limits, backend.info.max_num_seqs)
        self.prompts = Prompts(tokenizer, config, self.max_len, AdapterTemplates(tokenizer, backend))
        self.token_text = TokenText(tokenizer)
        self._templates = ThreadPoolExecutor(1, thread_name_prefix="template")
        self._aborts: set[asyncio.Task] = set()  # asyncio keeps only weak references to tasks

    @property
    def name(self) -> str:
        return self.config.names[0]

    @property
    def max_len(self) -> int:
        return self.backend.info.max_model_len

    def name_of(self, adapter: str | None) -> str:
        """What an answer calls the model."""
        return adapter or self.name

    def check_adapter(self, name: str) -> None:
        if name in self.config.names:
            raise bad(f"lora_name {name!r} is the model's own: choose another", "lora_name")

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request means by its model; None: the model alone. 404 for a name that is neither."""
        adapters = self.backend.info.adapters
        if name is None or name in self.config.names:
            return None
        if name not in adapters:
            known = ", ".join([*self.config.names, *adapters])
            message = f"the model {name[:200]!r} is not served here; this server has {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if adapters[name].replaced:
            message = f"the adapter {name!r} is being replaced, when the requests under way have ended"
            raise ApiError(503, message, param="model", code="adapter_replaced", retry_after=RETRY_SECONDS)
        return name

    def check_ready(self) -> None:
        """503 while a request would wait: for an engine to start, or for one that sleeps or is paused."""
        if self.inflight.draining:
            raise ApiError(503, "the server is stopping", code="stopping", retry_after=10)
        if self.backend.trouble is not None:
            raise ApiError(503, self.backend.trouble, code="engine_unavailable", retry_after=RETRY_SECONDS)
        if self.backend.unready is not None:
            raise ApiError(503, self.backend.unready, code="not_ready", retry_after=RETRY_SECONDS)

    def check(self, asks: list[Ask]) -> None:
        """The checks before the engine is asked: whether it answers, the sizes, and room in the queue."""
        self.check_ready()
        most = self.prompts.max_tokens
        for ask in asks:
            if ask.params.n > self.config.limits.max_n:
                raise bad(f"n must be at most {self.config.limits.max_n} on this server; got {ask.params.n}", "n")
            if len(ask.prompt) > most:
                message = f"the prompt has {len(ask.prompt)} tokens, and this server takes at most {most}"
                raise bad(message, code="context_length_exceeded")
            self._check_room(ask)
        self.inflight.check([ask.params.n for ask in asks])

    def _check_room(self, ask: Ask) -> None:
        """A limit that the client set must fit the context; a default is cut to it."""
        if ask.limit is not None:
            try:
                check_room(ask.limit, ask.params.max_tokens, len(ask.prompt), self.max_len)
            except UserError as error:
                raise bad(str(error), ask.limit, "context_length_exceeded") from None

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerDelta]:
        """The steps of a prompt's n answers, until all have ended. Leaving the loop aborts the request."""
        id = uuid.uuid4().hex
        readers: dict[int, AnswerReader] = {}  # by index, made with the first tokens: 64 at once take milliseconds
        unfinished = set(range(ask.params.n))
        place = self.inflight.ticket(lambda: self._abort(id), [ask.params.n])
        with place as ticket, _Clock(self.metrics, ticket, ask) as clock:
            generated = self.backend.generate(
                id, ask.prompt, ask.engine_params,
                priority=ask.priority, cache_salt=salted(ask.cache_salt), adapter=ask.adapter,
            )  # fmt: skip
            async with aclosing(generated) as deltas:
                delta = await self._first(deltas, ask)
                while delta is not None:
                    if delta.index in unfinished:  # else a stop string ended it, and this was already on its way
                        reader = readers.get(delta.index) or AnswerReader(ask, self.tokenizer)
                        readers[delta.index] = reader
                        step = self._read(delta, reader, ticket)
                        clock.tick(step)
                        if step.finish_reason is not None:
                            unfinished.discard(delta.index)
                            ticket.sequences = len(unfinished)
                            self._end_early(id, delta)
                        yield step
                    elif delta.prompt_logprobs is not None:
                        yield AnswerDelta(delta.index, [], [], prompt_logprobs=delta.prompt_logprobs)
                    if not unfinished and (ask.params.prompt_logprobs is None or delta.prompt_logprobs is not None):
                        return
                    delta = await anext(deltas, None)
        if unfinished:
            raise ticket.why or ApiError(500, "the answer ended early", code="aborted")

    async def in_thread(self, template: str | None, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call the function in a thread: one for all requests that bring a template, which may take seconds each, and
        those that others share."""
        pool = None if self.prompts.is_own(template) else self._templates
        return await asyncio.get_running_loop().run_in_executor(pool, partial(function, *args, **kwargs))

    def close(self) -> None:
        self._templates.shutdown(wait=False, cancel_futures=True)
        self.prompts.close()

    async def forward(self, work: Coroutine[Any, Any, T], prompts: int) -> T:
        """Await an answer that has no tokens (embeddings, scores), with a place and a time as those that have."""
        task = asyncio.ensure_future(work)
        with self.inflight.ticket(task.cancel, [1] * prompts) as ticket:
            try:
                return await task
            except asyncio.CancelledError:
                if ticket.why is None:  # the client has left
                    raise
                raise ticket.why from None

    async def _first(self, deltas: AsyncGenerator[Delta], ask: Ask) -> Delta | None:
        """A ValueError before the first delta is the engine's refusal of the request. Where its adapter has gone
        meanwhile, that is the reason."""
        try:
            return await anext(deltas, None)
        except ValueError as error:
            self.adapter_of(ask.adapter)
            raise refused(error) from None

    def _read(self, delta: Delta, reader: AnswerReader, ticket: Ticket) -> AnswerDelta:
        """A sequence that neither the model nor a limit ended is an error, not an answer. A grammar that cannot go on
        (it is too complex, or contradicts bad_words) is the request's own, and would end there again."""
        if delta.finish_reason == "error":  # a fault inside the engine, whose log has the traceback
            raise ApiError(500, delta.error or "internal error in the engine", code="internal_error")
        if delta.error is not None:
            raise bad(delta.error, code="structured_output_failed")
        if delta.finish_reason == "abort":
            raise ticket.why or ApiError(503, "the request was aborted", code="aborted")
        return reader.read(delta)

    def _end_early(self, id: str, delta: Delta) -> None:
        """Tell the engine that a stop string has ended one of the n, which it cannot see; the others go on."""
        if not delta.finished:
            self._abort(id, delta.index)

    def _abort(self, id: str, index: int | None = None) -> None:
        task = asyncio.ensure_future(_quietly(self.backend.abort(id, index)))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


async def _quietly(abort) -> None:
    with contextlib.suppress(Exception):  # a dead engine has nothing to abort
        await abort


class _Clock:
    """Adds one request's times and counts to the metrics."""

    def __init__(self, metrics: ServerMetrics, ticket: Ticket, ask: Ask):
        self._metrics, self._ticket, self._ask = metrics, ticket, ask
        self._last: dict[int, float] = {}
        self._open = ask.params.n

    def __enter__(self) -> _Clock:
        return self

    def tick(self, step: AnswerDelta) -> None:
        now, metrics = time.monotonic(), self._metrics
        if not self._ticket.begun:
            self._ticket.begun = True
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
