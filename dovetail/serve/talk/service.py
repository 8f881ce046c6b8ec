"""Service: the served model: its engine, its tokenizer, and what the routes share.

Inflight counts the running requests: how many may wait, how long each may take, and their end when the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from dovetail.core.errors import RequestError, UserError
from dovetail.engine.request.params import SamplingParams, check_room
from dovetail.io.images.item import ProcessedImage
from dovetail.io.tokenizer import Tokenizer
from dovetail.serve.config import ServerConfig, ServerLimits
from dovetail.serve.errors import RETRY_SECONDS, ApiError
from dovetail.serve.media.loader import LoadsImages
from dovetail.serve.remote.client import EngineClient
from dovetail.serve.remote.wire import Delta
from dovetail.serve.request_context import request_id, salted
from dovetail.serve.talk.answer import AnswerDelta, AnswerReader, PromptRequest, TokenText
from dovetail.serve.talk.metrics import ServerMetrics
from dovetail.serve.talk.prompts import Conversation, Prompts

T = TypeVar("T")


class Ticket:
    """Track one running request.

    Args:
        end: Called once, if the request is stopped.
        prompts: The number of sequences of each of its prompts.
    """

    def __init__(self, end: Callable[[], object], prompts: list[int]):
        self._end, self.prompts, self.sequences = end, prompts, sum(prompts)
        self.arrival = time.monotonic()
        self.begun = False  # whether its first token has arrived
        self.error: ApiError | None = None  # why it was stopped

    def stop(self, error: ApiError) -> None:
        """End the request; its client gets the error."""
        if self.error is None:
            self.error = error
            self._end()


class Inflight:
    """Keep the running requests within the server's limits.

    Args:
        limits: The server's limits.
        batch: How many sequences the engine runs at once; further ones wait.
    """

    def __init__(self, limits: ServerLimits, batch: int):
        self._limits, self._batch = limits, batch
        self._tickets: dict[Ticket, None] = {}  # in the order of arrival
        self.draining = False  # whether the server is stopping and refuses new requests

    def __len__(self) -> int:
        return len(self._tickets)

    def check(self, more: list[int]) -> None:
        """Refuse new prompts if too many would wait.

        Args:
            more: The number of sequences of each new prompt.

        Raises:
            RequestError: There are more than the server can ever take.
            ApiError: The queue is full (429).
        """
        most, running = self._limits.max_queue, sum(ticket.sequences for ticket in self._tickets if ticket.begun)
        queued = [count for ticket in self._tickets if not ticket.begun for count in ticket.prompts]
        if _waiting(more, self._batch) > most:
            message = (
                f"`prompt` must hold fewer prompts, got {len(more)}: {self._batch} sequences run at once and {most} "
                "prompts may wait"
            )
            raise RequestError(message, param="prompt")
        if _waiting(queued + more, self._batch - running) > most:
            waiting = _waiting(queued, self._batch - running)
            message = f"the queue is full: {waiting} requests wait, and at most {most} may; try again later"
            raise ApiError(429, message, code="queue_full", retry_after=1)

    @contextmanager
    def ticket(self, end: Callable[[], object], prompts: list[int]) -> Iterator[Ticket]:
        """Count a request as running, and stop it after the time that one may take."""
        ticket = Ticket(end, prompts)
        self._tickets[ticket] = None
        seconds = self._limits.request_timeout
        late = ApiError(504, f"the request took longer than the limit of {seconds:g} s", code="timeout")
        timer = asyncio.get_running_loop().call_later(seconds, ticket.stop, late)
        try:
            yield ticket
        finally:
            timer.cancel()
            del self._tickets[ticket]

    def end_all(self) -> None:
        """End all running requests; their clients get an error."""
        for ticket in list(self._tickets):
            ticket.stop(ApiError(503, "the server is stopping", code="stopping"))


def _waiting(prompts: list[int], places: int) -> int:
    """Return how many of these prompts, given the sequences of each, do not fit in `places`."""
    return sum(total > places for total in accumulate(prompts))


class Service:
    """Answer prompts with the engine, within the server's limits."""

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, config: ServerConfig, images: LoadsImages | None = None
    ):
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self.images = images  # None: the model reads text only
        self.created = int(time.time())
        self.metrics = ServerMetrics(config.names[0])
        self.inflight = Inflight(config.limits, engine.info.max_num_seqs)
        self.prompts = Prompts(engine, tokenizer, config, None if images is None else images.placeholder)
        self.token_text = TokenText(tokenizer)
        self._template_thread = ThreadPoolExecutor(1, thread_name_prefix="template")
        self._aborts: set[asyncio.Task] = set()  # asyncio keeps only weak references to tasks
        self._numbers = itertools.count()

    @property
    def name(self) -> str:
        """Return the model's name in answers."""
        return self.config.names[0]

    @property
    def max_len(self) -> int:
        """Return the most tokens of a prompt and its answer."""
        return self.engine.info.max_model_len

    def name_of(self, adapter: str | None) -> str:
        """Return the name of the model that answers, in an answer."""
        return adapter or self.name

    def check_adapter(self, name: str) -> None:
        """Refuse an adapter under the model's own name."""
        if name in self.config.names:
            raise RequestError(f"`lora_name` must not be the model's name, got {name!r}", param="lora_name")

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter that a request's `model` field names, or None for the base model.

        Raises:
            ApiError: 404 for an unknown name, 503 while the adapter is being replaced.
        """
        adapters = self.engine.info.adapters
        if name is None or name in self.config.names:
            return None
        if name not in adapters:
            known = ", ".join([*self.config.names, *adapters])
            message = f"the model {name[:200]!r} is not served here; this server has {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if adapters[name].replaced:
            message = f"the adapter {name!r} is being replaced: it waits for running requests to end"
            raise ApiError(503, message, param="model", code="adapter_replaced", retry_after=RETRY_SECONDS)
        return name

    def check_ready(self) -> None:
        """Raise ApiError 503 if a request would have to wait: the engine starts, sleeps or is paused."""
        if self.inflight.draining:
            raise ApiError(503, "the server is stopping", code="stopping", retry_after=10)
        if self.engine.trouble is not None:
            raise ApiError(503, self.engine.trouble, code="engine_unavailable", retry_after=RETRY_SECONDS)
        if self.engine.unready is not None:
            raise ApiError(503, self.engine.unready, code="not_ready", retry_after=RETRY_SECONDS)

    def check(self, requests: list[PromptRequest]) -> None:
        """Check that the engine is ready, the sizes of the requests, and the room in the queue."""
        self.check_ready()
        most = self.prompts.max_tokens
        for request in requests:
            count, params = len(request.prompt), request.params
            if params.n > self.config.limits.max_n:
                message = f"`n` must be at most {self.config.limits.max_n} on this server, got {params.n}"
                raise RequestError(message, param="n")
            if count > most:
                message = f"the prompt must have at most {most} tokens on this server, got {count}"
                raise RequestError(message, code="context_length_exceeded")
            if request.limit is not None:  # a limit that the client set must fit; a default is cut to the context
                check_room(request.limit, params.max_tokens, count, self.max_len)
        self.inflight.check([request.params.n for request in requests])

    async def answer(self, request: PromptRequest) -> AsyncGenerator[AnswerDelta]:
        """Stream the deltas of a prompt's n answers until all have ended. Leaving the loop aborts the request."""
        id = f"{request_id()}-{next(self._numbers)}"
        readers: dict[int, AnswerReader] = {}  # by index, made with the first tokens: 64 at once take milliseconds
        unfinished = set(range(request.params.n))
        place = self.inflight.ticket(lambda: self._abort(id), [request.params.n])
        with place as ticket, _Clock(self.metrics, ticket, request) as clock:
            generated = self.engine.generate(
                id, request.prompt, request.engine_params,
                priority=request.priority, cache_salt=salted(request.cache_salt), adapter=request.adapter,
                images=request.images,
            )  # fmt: skip
            async with aclosing(generated) as deltas:
                delta = await self._first(deltas, request)
                while delta is not None:
                    if delta.index in unfinished:  # else a stop string has ended it, and this was already on its way
                        reader = readers.get(delta.index) or AnswerReader(request, self.tokenizer)
                        readers[delta.index] = reader
                        made = _read(delta, reader, ticket)
                        clock.tick(made)
                        if made.finish_reason is not None:
                            unfinished.discard(delta.index)
                            ticket.sequences = len(unfinished)
                            if not delta.finished:  # ended by a stop string, which the engine cannot see
                                self._abort(id, delta.index)
                        yield made
                    elif delta.prompt_logprobs is not None:
                        yield AnswerDelta(delta.index, [], [], prompt_logprobs=delta.prompt_logprobs)
                    if not unfinished and (request.params.prompt_logprobs is None or delta.prompt_logprobs is not None):
                        return
                    delta = await anext(deltas, None)
        if unfinished:
            raise ticket.error or ApiError(500, "the answer ended early", code="aborted")

    async def prompt_request(self, talk: Conversation, params: SamplingParams, **more: Any) -> PromptRequest:
        """Return the request for a conversation, after its images have been loaded; see Prompts.request."""
        images = await self.load_images(talk)
        return await self.in_thread(talk.template, self.prompts.request, talk, params, images, **more)

    async def load_images(self, talk: Conversation) -> Sequence[ProcessedImage]:
        """Return the images of a conversation, in order.

        Raises:
            RequestError: The model takes none, or one is refused; `param` is its field.
        """
        if not talk.images:
            return ()
        if self.images is None:
            where = talk.images[0].where
            raise RequestError(
                f"{where} is not supported: the model reads text only", param=where, code="refused_field"
            )
        for each in talk.messages:
            if isinstance(each["content"], list) and each["role"] not in ("user", "tool"):
                where = next(part["image"].where for part in each["content"] if part["type"] == "image")
                raise RequestError(f"{where} must be in a message of the user or a tool's result", param=where)
        self.check_ready()
        return await self.images.load(talk.images)

    async def in_thread(self, template: str | None, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call the function in a thread.

        All requests that bring a template share one thread, because each may take seconds.
        """
        pool = None if self.prompts.is_own(template) else self._template_thread
        return await asyncio.get_running_loop().run_in_executor(pool, partial(function, *args, **kwargs))

    def close(self) -> None:
        """Stop rendering templates."""
        self._template_thread.shutdown(wait=False, cancel_futures=True)
        self.prompts.close()
        if self.images is not None:
            self.images.close()

    async def forward(self, work: Coroutine[Any, Any, T], prompts: int) -> T:
        """Await an answer without tokens (embeddings, scores), within the same limits as those with tokens."""
        task = asyncio.ensure_future(work)
        with self.inflight.ticket(task.cancel, [1] * prompts) as ticket:
            try:
                return await task
            except asyncio.CancelledError:
                if ticket.error is None:  # the client has left
                    raise
                raise ticket.error from None

    async def _first(self, deltas: AsyncGenerator[Delta], request: PromptRequest) -> Delta | None:
        """Return the first delta. If the engine refuses the request because its adapter is gone, say so."""
        try:
            return await anext(deltas, None)
        except UserError:
            self.adapter_of(request.adapter)
            raise

    def _abort(self, id: str, index: int | None = None) -> None:
        task = asyncio.ensure_future(self._abort_quietly(id, index))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort_quietly(self, id: str, index: int | None) -> None:
        with contextlib.suppress(Exception):  # a dead engine has nothing to abort
            await self.engine.abort(id, index)


def _read(delta: Delta, reader: AnswerReader, ticket: Ticket) -> AnswerDelta:
    """Read a delta; raise an error for a sequence that neither the model nor a limit has ended."""
    if delta.finish_reason == "error":  # the engine's process has logged the traceback
        raise RuntimeError(delta.error)
    if delta.error is not None:  # a grammar that is too complex or contradicts bad_words: the request's own fault
        raise RequestError(delta.error, code="structured_output_failed")
    if delta.finish_reason == "abort":
        raise ticket.error or ApiError(503, "the request was aborted", code="aborted")
    return reader.read(delta)


class _Clock:
    """Add one request's times and counts to the metrics."""

    def __init__(self, metrics: ServerMetrics, ticket: Ticket, request: PromptRequest):
        self._metrics, self._ticket, self._request = metrics, ticket, request
        self._last: dict[int, float] = {}
        self._open = request.params.n

    def __enter__(self) -> _Clock:
        return self

    def tick(self, delta: AnswerDelta) -> None:
        now, metrics = time.monotonic(), self._metrics
        if not self._ticket.begun:
            self._ticket.begun = True
            metrics.first_token.observe(now - self._ticket.arrival)
            metrics.prompt_tokens += len(self._request.prompt)
        elif delta.index in self._last and delta.tokens:
            count = len(delta.tokens)
            metrics.between.observe((now - self._last[delta.index]) / count, count)
        self._last[delta.index] = now
        metrics.generated_tokens += len(delta.tokens)
        if delta.finish_reason is not None:
            self._open -= 1
            metrics.finished[delta.finish_reason] += 1
            metrics.whole.observe(now - self._ticket.arrival)

    def __exit__(self, kind, error, trace) -> None:
        left = kind is not None and issubclass(kind, GeneratorExit | asyncio.CancelledError)
        self._metrics.finished["abort" if left or error is None else "error"] += self._open
