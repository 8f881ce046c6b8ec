"""Backend: what the server needs of an engine. EngineClient is one; tests have another.

EngineClient: an engine in a process of its own, for asyncio. Tokens in, tokens out: the caller makes the text.

engine = await EngineClient.start("smollm2-135m", EngineOptions(max_num_seqs=64, seed=None))
async for delta in engine.generate("r1", tokens, SamplingParams(temperature=0)):
    print(delta.tokens)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from os import PathLike
from typing import Any, Literal, Protocol

import numpy as np

from dovetail.core.errors import UserError
from dovetail.engine.controls import EngineDied as EngineDied
from dovetail.engine.options import EngineOptions
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.stats import EngineStats
from dovetail.serve.remote.child import ShowProgress
from dovetail.serve.remote.supervisor import EngineSupervisor, RestartLimits
from dovetail.serve.remote.wire import Add, Delta, EngineInfo, StartEngine, plain


class EngineBackend(Protocol):
    @property
    def info(self) -> Any: ...  # EngineInfo
    @property
    def trouble(self) -> str | None: ...  # why no request would be taken, in words a client may read
    @property
    def unready(self) -> str | None: ...  # why none would be answered now: trouble, or it sleeps or is paused
    def generate(
        self,
        id: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[Delta]:
        """ValueError before the first delta for a request that is refused; leaving the iterator aborts it."""
        ...

    async def abort(self, id: str, index: int | None = None) -> None: ...
    async def stats(self) -> Any: ...  # Stats
    async def embed(
        self, prompts: list[list[int]], pooling: Literal["mean", "last"], adapter: str | None = None
    ) -> Any: ...
    async def score(self, prompts: list[list[int]], adapter: str | None = None) -> Any: ...
    async def control(self, name: str, *args: Any) -> Any: ...  # see engine.controls
    async def start_profile(self, folder: str) -> Any: ...
    async def stop_profile(self) -> Any: ...
    async def close(self) -> None: ...


STOP_SECONDS = 10.0  # for its current step, when it is told to end
ABORT_SECONDS = 1.0  # that the reader of an aborted request waits for the engine
State = Literal["ready", "restarting", "failed", "closing", "closed"]
_TROUBLE: dict[State, str | None] = {
    "ready": None,
    "restarting": "the engine died and is being started again",
    "failed": "the engine died too often and is not started again",
    "closing": "the server is stopping",
    "closed": "the server has stopped",
}


class EngineClient:
    """Made by `start`, in a running event loop, and used only there. Every method raises EngineDied while no engine is
    running, and ValueError, with the engine's own sentence, for a request or command it refuses."""

    def __init__(self, supervisor: EngineSupervisor):
        self._supervisor = supervisor
        self._info = supervisor.child.info
        self._closing: Literal["closing", "closed"] | None = None

    @classmethod
    async def start(
        cls,
        model: str | PathLike[str],
        options: EngineOptions = EngineOptions(seed=None),
        progress: ShowProgress | None = None,
        limits: RestartLimits = RestartLimits(),
    ) -> EngineClient:
        """`options`: a dtype by its name. With a seed of None, as here, requests without a seed get other samples after
        a restart and on another replica. ValueError if the engine says that the model or an option is wrong, EngineDied
        if it fails otherwise."""
        start = StartEngine(str(model), options, logging.getLogger("dovetail").getEffectiveLevel())
        supervisor = EngineSupervisor(start, limits, progress)
        await supervisor.start()
        return cls(supervisor)

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Take no more requests, wait up to `drain_seconds` for the open ones, abort the rest, and end the process."""
        if self._closing is not None:
            return
        self._closing = "closing"
        with contextlib.suppress(EngineDied):
            await self._drain(drain_seconds)
        await self._supervisor.close(STOP_SECONDS)
        self._closing = "closed"

    async def _drain(self, seconds: float) -> None:
        child = self._supervisor.child
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(child.idle.wait(), seconds)
        for id, stream in list(child.streams.items()):
            child.leave(id, stream)
        with contextlib.suppress(TimeoutError):  # their last deltas, with finish_reason "abort"
            await asyncio.wait_for(child.idle.wait(), 2.0)

    # --- its state ----------------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """Of the running engine, or of the last one that ran."""
        if self.is_alive:
            self._info = self._supervisor.child.info
        return self._info

    @property
    def is_alive(self) -> bool:
        """Whether a request would be taken: not during a restart, nor after `close` was called."""
        return self.state == "ready"

    @property
    def state(self) -> State:
        if self._closing is not None:
            return self._closing
        try:
            self._supervisor.child  # noqa: B018
        except EngineDied:
            return "failed" if self._supervisor.gave_up else "restarting"
        return "ready"

    @property
    def trouble(self) -> str | None:
        """Why no request would be taken, in words a client may read; None: one would."""
        if self._supervisor.control_state.lost and self.state in ("restarting", "failed"):
            return "the weights that were loaded last cannot be loaded again, and older ones are not served"
        return _TROUBLE[self.state]

    @property
    def unready(self) -> str | None:
        """Why a request would not be answered now: `trouble`, or the engine sleeps or is paused; None: it would."""
        return self.trouble or self._supervisor.control_state.rest

    @property
    def restarts(self) -> int:
        return self._supervisor.restarts

    @property
    def num_open(self) -> int:
        """Requests that the engine has not ended."""
        try:
            return len(self._supervisor.child.streams)
        except EngineDied:
            return 0

    async def stats(self) -> EngineStats:
        """A snapshot. It does not wait for the current step."""
        return plain(await self._call("stats"), EngineStats)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[Delta]:
        """Stream a request's deltas; those of its n sequences are interleaved. ValueError, before the first, if it is
        refused. A caller slower than the engine gets several deltas joined into one. Leaving the loop, being cancelled,
        or `aclose` aborts the request. `params.stop` is not looked for: the caller makes the text, finds it, and
        aborts."""
        self._check_open()
        if not isinstance(id, str):
            raise UserError(f"a request's id is a string; got {id!r}")
        child = self._supervisor.child
        stream = child.open(Add(id, list(prompt), params, priority, cache_salt, time.monotonic(), adapter))
        try:
            while (delta := await stream.get()) is not None:
                yield delta
        finally:
            child.leave(id, stream)

    async def abort(self, id: str, index: int | None = None) -> None:
        """End a request, or one of its n sequences; its last deltas have finish_reason "abort". Returns when its pages
        are free. An unknown id is no error. A reader of the request does not wait for an engine that is busy for longer
        than a second (it may compile): its stream ends without those deltas."""
        child = self._supervisor.child
        answer = asyncio.ensure_future(child.call("abort", id, index))
        done, _ = await asyncio.wait({answer}, timeout=ABORT_SECONDS)
        if not done and index is None and id in child.streams:
            child.streams[id].end()
        await answer

    async def embed(
        self,
        prompts: Sequence[Sequence[int]],
        pooling: Literal["mean", "last"] = "mean",
        adapter: str | None = None,
    ) -> list[list[float]]:
        """A vector of length 1 for each prompt, from the model's final hidden states."""
        vectors = []
        for each in await self._call("embed", [list(prompt) for prompt in prompts], pooling, adapter):
            vectors.append(np.frombuffer(each, "<f4").tolist())
            await asyncio.sleep(0)  # other tasks run between them
        return vectors

    async def score(self, prompts: Sequence[Sequence[int]], adapter: str | None = None) -> list[float]:
        """The score of each prompt, by a reward model; ValueError for another."""
        return await self._call("score", [list(prompt) for prompt in prompts], adapter)

    # --- the engine ---------------------------------------------------------------------------------------------------

    async def control(self, name: str, *args: Any) -> Any:
        """One of engine.controls, by its name; its answer. Weights come by a path that `dt.load` takes: keep the files,
        because an engine started after a death is brought to the state of the one before it (see ControlState)."""
        self._check_open()
        return await self._supervisor.control_state.control(self._supervisor.child, name, *args)

    async def start_profile(self, folder: str | PathLike[str]) -> None:
        """Write a trace for xprof until `stop_profile`."""
        await self._call("start_profile", str(folder))

    async def stop_profile(self) -> str:
        """The folder the trace was written to."""
        return await self._call("stop_profile")

    async def _call(self, name: str, *args: Any) -> Any:
        self._check_open()
        return await self._supervisor.child.call(name, *args)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise EngineDied("the server is stopping")
