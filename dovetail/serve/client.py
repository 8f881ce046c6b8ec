"""EngineClient: an engine in a process of its own, for asyncio. Tokens in, tokens out: text is made where it is read.

engine = await EngineClient.start("smollm2-135m", {"max_num_seqs": 64})
async for delta in engine.generate("r1", tokens, SamplingParams(temperature=0)):
    print(delta.tokens)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from os import PathLike
from typing import Any, Literal

from dovetail.engine.died import EngineDied as EngineDied
from dovetail.engine.params import SamplingParams
from dovetail.engine.stats import Stats
from dovetail.serve.child import ShowProgress
from dovetail.serve.messages import Add, Delta, EngineInfo, Start, plain
from dovetail.serve.standing import stamp_of
from dovetail.serve.supervisor import Limits, Supervisor

STOP_SECONDS = 10.0  # for the step it is in when it is told to end
State = Literal["ready", "restarting", "failed", "closing", "closed"]
_TROUBLE: dict[State, str | None] = {
    "ready": None,
    "restarting": "the engine died and is being started again",
    "failed": "the engine died too often and is not started again",
    "closing": "the server is stopping",
    "closed": "the server has stopped",
}


class EngineClient:
    """Made by `start`, in a running event loop, and used in that one only. Every method raises EngineDied while there
    is no engine to ask, and ValueError, with the engine's own sentence, for what it does not take."""

    def __init__(self, supervisor: Supervisor):
        self._supervisor = supervisor
        self._info = supervisor.child.info
        self._closing: Literal["closing", "closed"] | None = None

    @classmethod
    async def start(
        cls,
        model: str | PathLike[str],
        options: Mapping[str, Any] | None = None,
        progress: ShowProgress | None = None,
        limits: Limits = Limits(),
    ) -> EngineClient:
        """`options`: LLM's keyword arguments, as plain values (a dtype by its name). ValueError if the engine says that
        the model or an option is wrong, EngineDied if it fails otherwise."""
        plain_options = {
            key: str(value) if isinstance(value, PathLike) else value for key, value in (options or {}).items()
        }
        supervisor = Supervisor(
            Start(str(model), plain_options, logging.getLogger("dovetail").getEffectiveLevel()), limits, progress
        )
        await supervisor.start()
        return cls(supervisor)

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Take no more requests, let those that are open end for so long, abort the rest, and end the process."""
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
            await asyncio.wait_for(child.quiet.wait(), seconds)
        for id, stream in list(child.streams.items()):
            child.leave(id, stream)
        with contextlib.suppress(TimeoutError):  # their last deltas, with finish_reason "abort"
            await asyncio.wait_for(child.quiet.wait(), 2.0)

    # --- how it stands ------------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """Of the engine that serves, or of the last that did."""
        if self.is_alive:
            self._info = self._supervisor.child.info
        return self._info

    @property
    def is_alive(self) -> bool:
        """Whether a request would be taken: not while the engine is started again, nor once `close` was called."""
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
        """Why no request would be taken, in words that anybody may read; None: one would."""
        if self._supervisor.standing.lost and self.state in ("restarting", "failed"):
            return "the weights that were loaded last cannot be loaded again, and older ones are not served"
        return _TROUBLE[self.state]

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

    async def stats(self) -> Stats:
        """A snapshot; also amid a step, for it waits for none."""
        return plain(await self._call("stats"), Stats)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Delta]:
        """Stream a request's deltas, those of its n sequences among each other. ValueError, before the first, if it is
        refused. Who is slower than the engine gets several in one. Leaving the loop, being cancelled, or `aclose`
        aborts it. `params.stop` is not looked for: whoever makes the text does, and aborts."""
        self._check_open()
        if not isinstance(id, str):
            raise ValueError(f"a request's id is a string; got {id!r}")
        child = self._supervisor.child
        stream = child.open(Add(id, list(prompt), params, priority, cache_salt, time.monotonic()))
        try:
            while (delta := await stream.get()) is not None:
                yield delta
        finally:
            child.leave(id, stream)

    async def abort(self, id: str, index: int | None = None) -> None:
        """End a request, or that one of its n, at any moment; its last deltas have finish_reason "abort". Returns when
        its pages are free. An unknown id is no error."""
        await self._supervisor.child.call("abort", id, index)

    async def embed(
        self, prompts: Sequence[Sequence[int]], pooling: Literal["mean", "last"] = "mean"
    ) -> list[list[float]]:
        """A vector of length 1 for each prompt, from the model's final hidden states."""
        return await self._call("embed", [list(prompt) for prompt in prompts], pooling)

    # --- the engine ---------------------------------------------------------------------------------------------------

    # An engine that is started again stands as the one before it stood: see Standing.

    async def sleep(self, level: int = 1) -> None:
        """See Engine.sleep. Requests, old and new, wait for `wake`."""
        await self._call("sleep", level)
        self._supervisor.standing.slept(level)

    async def wake(self) -> None:
        await self._call("wake")
        self._supervisor.standing.woke()

    async def pause(self) -> None:
        """No more steps until `resume`. Who runs keeps his pages, and who comes waits."""
        await self._call("pause")
        self._supervisor.standing.paused = True

    async def resume(self) -> None:
        await self._call("resume")
        self._supervisor.standing.paused = False

    async def reset_prefix_cache(self) -> None:
        await self._call("reset_prefix_cache")

    async def update_weights(self, path: str | PathLike[str], keep_cache: bool = False) -> int:
        """Those of a folder that `dt.load` takes, swapped between two steps (see Engine.update_weights); their version.
        Keep the folder: an engine that is started again loads it."""
        self._check_open()
        child, stamp = self._supervisor.child, stamp_of(str(path))
        version = await child.call("update_weights", str(path), keep_cache)
        child.set_version(version)
        self._supervisor.standing.loaded(str(path), version, stamp)
        return version

    async def start_profile(self, folder: str | PathLike[str]) -> None:
        """A trace for xprof, until `stop_profile`."""
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
