"""EngineClient: an engine in its own process, for asyncio. It takes and returns tokens; the caller makes the text.

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
from typing import Any, Literal

import numpy as np

from dovetail.core.errors import RequestError
from dovetail.engine.interface import EngineDied as EngineDied
from dovetail.engine.interface import EngineStats
from dovetail.engine.options import EngineOptions
from dovetail.engine.request.params import SamplingParams
from dovetail.io.images.item import ImageSpan
from dovetail.serve.remote.child import ShowProgress
from dovetail.serve.remote.supervisor import EngineSupervisor, RestartLimits
from dovetail.serve.remote.wire import Add, Delta, EngineInfo, SentImage, StartEngine, frame, plain

STOP_SECONDS = 10.0  # for the current step when the process is stopped
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
    """Client of an engine process, made by `start` in a running event loop and used only there.

    Every method raises EngineDied while no engine is running, and UserError for a request or command that the engine
    refuses.
    """

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
        """Start the engine's process and wait until it is ready.

        Args:
            model: A folder, a .gguf file, or a name that `dt.load` takes.
            options: The engine's options, with the dtype by its name. With a seed of None, requests without a seed get
                other samples after a restart and on another replica.
            progress: Called with (what, done, total) during the start.
            limits: When the process is restarted.

        Raises:
            UserError: The model or an option is wrong.
            EngineDied: The engine could not start for another reason.
        """
        start = StartEngine(str(model), options, logging.getLogger("dovetail").getEffectiveLevel())
        supervisor = EngineSupervisor(start, limits, progress)
        await supervisor.start()
        return cls(supervisor)

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, wait up to `drain_seconds` for open ones, abort the rest, and end the process."""
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

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """Return the description of the running engine, or of the last one that ran."""
        if self.is_alive:
            self._info = self._supervisor.child.info
        return self._info

    @property
    def is_alive(self) -> bool:
        """Return whether a request would be accepted: not during a restart, nor after `close` was called."""
        return self.state == "ready"

    @property
    def state(self) -> State:
        """Return the state of the engine's process."""
        if self._closing is not None:
            return self._closing
        try:
            self._supervisor.child  # noqa: B018
        except EngineDied:
            return "failed" if self._supervisor.gave_up else "restarting"
        return "ready"

    @property
    def trouble(self) -> str | None:
        """Why no request would be accepted, as a sentence for a client; None if one would be."""
        if self._supervisor.control_state.lost and self.state in ("restarting", "failed"):
            return "the weights that were loaded last cannot be loaded again, and older ones are not served"
        return _TROUBLE[self.state]

    @property
    def unready(self) -> str | None:
        """Why a request would not be answered now: `trouble`, or the engine sleeps or is paused."""
        return self.trouble or self._supervisor.control_state.rest

    @property
    def restarts(self) -> int:
        """Return the number of restarts so far."""
        return self._supervisor.restarts

    @property
    def num_open(self) -> int:
        """Return the number of requests that the engine has not ended."""
        try:
            return len(self._supervisor.child.streams)
        except EngineDied:
            return 0

    async def stats(self) -> EngineStats:
        """Return the engine's current statistics, without waiting for its current step."""
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
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Delta]:
        """Stream the deltas of a request; those of its n sequences are interleaved.

        A caller slower than the engine gets several deltas joined into one. Leaving the loop, cancellation or `aclose`
        aborts the request. `params.stop` is not searched: the caller makes the text, finds stop strings, and aborts.

        Raises:
            UserError: The request is refused, before the first delta.
        """
        self._check_open()
        if not isinstance(id, str):
            raise RequestError(f"`id` must be a string, got {id!r}", param="id")
        child = self._supervisor.child
        add = Add(id, list(prompt), params, priority, cache_salt, time.monotonic(), adapter)
        payload = None
        if images:  # megabytes: copying them here would delay the streams of other requests
            add.images = [SentImage.of(span) for span in images]
            payload = await asyncio.to_thread(frame, add)
        stream = child.open(add, payload)
        try:
            while (delta := await stream.get()) is not None:
                yield delta
        finally:
            child.leave(id, stream)

    async def abort(self, id: str, index: int | None = None) -> None:
        """End a request, or one of its n sequences, and return when its pages are free.

        Its last deltas have finish_reason "abort". An unknown id is ignored. If the engine is busy for more than a
        second (it may compile), the reader's stream ends without those deltas.
        """
        child = self._supervisor.child
        answer = asyncio.ensure_future(child.call("abort", id=id, index=index))
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
        """Return a vector of length 1 for each prompt, pooled from the model's final hidden states."""
        tokens = [list(prompt) for prompt in prompts]
        vectors = []
        for each in await self._call("embed", prompts=tokens, pooling=pooling, adapter=adapter):
            vectors.append(np.frombuffer(each, "<f4").tolist())
            await asyncio.sleep(0)  # let other tasks run
        return vectors

    async def score(self, prompts: Sequence[Sequence[int]], adapter: str | None = None) -> list[float]:
        """Return a reward model's score of each prompt; refused by other models."""
        return await self._call("score", prompts=[list(prompt) for prompt in prompts], adapter=adapter)

    # --- controls -----------------------------------------------------------------------------------------------------

    async def control(self, name: str, /, **args: Any) -> Any:
        """Run one of the engine's controls (engine.interface.CONTROLS) with arguments by name, and return its result.

        Weights are given by a path that `dt.load` takes. Keep these files: a restarted engine loads them again to
        reach the state of the one before it (see ControlState).
        """
        self._check_open()
        return await self._supervisor.control_state.control(self._supervisor.child, name, **args)

    async def start_profile(self, folder: str | PathLike[str]) -> None:
        """Write a trace for xprof until `stop_profile`."""
        await self._call("start_profile", folder=str(folder))

    async def stop_profile(self) -> str:
        """Stop the trace and return the folder that it was written to."""
        return await self._call("stop_profile")

    async def _call(self, name: str, /, **args: Any) -> Any:
        self._check_open()
        return await self._supervisor.child.call(name, **args)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise EngineDied("the server is stopping")
