"""AsyncEngine: the engine for asyncio. Many coroutines ask, each gets its own stream, one thread takes the steps.

async with AsyncEngine(llm.engine) as engine:
    async for update in engine.generate("The capital of France is", SamplingParams(temperature=0)):
        print(update.text, end="")
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from dovetail.core.types import Params
from dovetail.engine.engine import Engine
from dovetail.engine.intake import Prompt
from dovetail.engine.loop import EngineDied, EngineLoop
from dovetail.engine.params import SamplingParams
from dovetail.engine.sequence import Request, Update
from dovetail.engine.stats import Stats

T = TypeVar("T")


class AsyncEngine:
    """Made in a running event loop, and used in that one only. The engine (and an LLM it came from) is its own from
    here on."""

    def __init__(self, engine: Engine):
        self._asyncio = asyncio.get_running_loop()
        self._streams: dict[str, _Stream] = {}
        self._ids = itertools.count()
        self.loop = EngineLoop(engine, self._on_updates, self._on_end)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def close(self) -> None:
        """End the engine's thread; streams that are open get EngineDied."""
        await asyncio.to_thread(self.loop.stop)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: Prompt, params: SamplingParams, id: str | None = None, **more: Any
    ) -> AsyncGenerator[Update]:
        """Add a request (see Intake.request) and stream its updates. Leaving the loop, being cancelled, or `aclose`
        aborts it."""
        id = f"async-{next(self._ids)}" if id is None else id
        await self.add(id, prompt, params, **more)
        async with contextlib.aclosing(self.stream(id)) as updates:
            async for update in updates:
                yield update

    async def add(self, id: str, prompt: Prompt, params: SamplingParams, **more: Any) -> None:
        """Queue a request (see Intake.request); ValueError for a bad one. `stream(id)` must follow."""
        self.check_health()
        request = await asyncio.to_thread(self.loop.engine.intake.request, id, prompt, params, **more)
        if id in self._streams:
            raise ValueError(f"a request {id!r} is under way already")
        self._streams[id] = _Stream(request)  # before it is queued: no update is missed
        try:
            await self._do(lambda engine: engine.enqueue(request))
        except asyncio.CancelledError:
            self._leave(id)
            raise
        except Exception:
            del self._streams[id]
            raise

    async def stream(self, id: str) -> AsyncGenerator[Update]:
        """The updates of a request that was added; the last brings its `output`. Who is slower than the engine gets
        several in one. Leaving before the last aborts the request."""
        if id not in self._streams:
            raise ValueError(f"no request {id!r} is under way: add it first")
        stream = self._streams[id]
        try:
            while not stream.is_read:
                yield await stream.get()
        finally:
            self._leave(id)

    async def abort(self, id: str) -> None:
        """End a request, at any moment; its stream ends with finish_reason "abort". An unknown id is no error."""
        await asyncio.wrap_future(self.loop.abort(id))

    def _leave(self, id: str) -> None:
        stream = self._streams.pop(id, None)
        if stream is not None and not stream.is_complete:
            with contextlib.suppress(EngineDied):
                self.loop.abort(id)

    # --- the engine ---------------------------------------------------------------------------------------------------

    async def update_weights(self, params: Params, keep_cache: bool = False) -> int:
        """See Engine.update_weights: between two steps, whoever is running."""
        return await self._do(lambda engine: engine.update_weights(params, keep_cache), idle=True)

    async def sleep(self, level: int = 1) -> None:
        """See Engine.sleep. Requests, old and new, wait for `wake`."""
        await self._do(lambda engine: engine.sleep(level), idle=True)

    async def wake(self) -> None:
        await self._do(lambda engine: engine.wake())

    async def pause(self) -> None:
        """No more steps until `resume`. Who runs keeps his pages, and who comes waits."""
        await asyncio.wrap_future(self.loop.pause())

    async def resume(self) -> None:
        await asyncio.wrap_future(self.loop.resume())

    async def reset_prefix_cache(self) -> None:
        await self._do(lambda engine: engine.reset_prefix_cache())

    def stats(self) -> Stats:
        return self.loop.engine.stats()

    @property
    def is_alive(self) -> bool:
        return self.loop.is_alive

    def check_health(self) -> None:
        """EngineDied if no more steps will be taken."""
        self.loop.check_health()

    async def _do(self, function: Callable[[Engine], T], idle: bool = False) -> T:
        return await asyncio.wrap_future(self.loop.submit(function, idle))

    # --- from the engine's thread -------------------------------------------------------------------------------------

    def _on_updates(self, updates: list[Update]) -> None:
        self._asyncio.call_soon_threadsafe(self._deliver, updates)  # one wake-up a step, whatever the number of streams

    def _on_end(self, died: EngineDied) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is there to be told
            self._asyncio.call_soon_threadsafe(self._fail, died)

    def _deliver(self, updates: list[Update]) -> None:
        for update in updates:
            stream = self._streams.get(update.id)
            # another request may go by the id of one that was left
            if stream is not None and stream.request is update.seq.request:
                stream.put(update)

    def _fail(self, died: EngineDied) -> None:
        for stream in self._streams.values():
            stream.fail(died)


class _Stream:
    """A request's updates on their way to whoever reads them: at most one a sequence waits, for later ones join it."""

    def __init__(self, request: Request):
        self.request = request
        self.is_complete = False  # the last update is there
        self._waiting: dict[int, Update] = {}
        self._died: EngineDied | None = None
        self._news = asyncio.Event()

    @property
    def is_read(self) -> bool:
        return self.is_complete and not self._waiting

    def put(self, update: Update) -> None:
        earlier = self._waiting.pop(update.index, None)  # out and in again: the request's last update stays the last
        self._waiting[update.index] = update if earlier is None else earlier.then(update)
        self.is_complete = update.output is not None
        self._news.set()

    def fail(self, died: EngineDied) -> None:
        self._died = died
        self._news.set()

    async def get(self) -> Update:
        """The next update; EngineDied when no more will come."""
        while not self._waiting:
            if self._died is not None:
                raise EngineDied(str(self._died)) from self._died.__cause__
            self._news.clear()
            await self._news.wait()
        return self._waiting.pop(next(iter(self._waiting)))
