"""Commands: what the HTTP process may ask of the engine beside tokens. A method is a command, by its name; it returns
its answer, or a future of it. Those in SLOW wait for files, compilers or several steps, and get a thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import jax

from dovetail.core.types import Weights
from dovetail.engine.embed import Embedder, Pooling
from dovetail.engine.engine import Engine
from dovetail.engine.loop import EngineLoop
from dovetail.engine.stats import Stats
from dovetail.io.load import load

SLOW = {"embed", "update_weights", "start_profile", "stop_profile"}


class Commands:
    def __init__(self, loop: EngineLoop):
        self._loop, self._embedder = loop, Embedder(loop)
        self._profile: str | None = None
        self._lock = threading.Lock()

    def pulse(self) -> float:
        return self._loop.pulse()

    def stats(self) -> Stats:
        return self._loop.engine.stats()

    def embed(self, prompts: list[list[int]], pooling: Pooling) -> list[list[float]]:
        return self._embedder.embed(prompts, pooling)

    def sleep(self, level: int) -> Future[None]:
        return self._loop.submit(lambda engine: engine.sleep(level), idle=True)

    def wake(self) -> Future[None]:
        return self._loop.submit(lambda engine: engine.wake())

    def pause(self) -> Future[None]:
        return self._loop.pause()

    def resume(self) -> Future[None]:
        return self._loop.resume()

    def reset_prefix_cache(self) -> Future[None]:
        return self._loop.submit(lambda engine: engine.reset_prefix_cache())

    def update_weights(self, path: str, keep_cache: bool, version: int | None = None) -> int:
        """Both versions are in memory until the new one is in place, unless the engine sleeps. `version`: what they are
        called, where that is not one more than those before."""
        runner = self._loop.engine.runner
        params: Any = load(path, runner.weights.params["embed"].dtype, runner.placement).params

        def swap(engine: Engine) -> int:
            found = engine.update_weights(params, keep_cache)
            if version is not None:
                engine.runner.weights = Weights(engine.runner.weights.params, version)
            return found if version is None else version

        return self._loop.submit(swap, idle=True).result()

    def start_profile(self, folder: str) -> None:
        with self._lock:
            if self._profile is not None:
                raise ValueError(f"a profile is being written to {self._profile}: stop that first")
            jax.profiler.start_trace(folder)
            self._profile = folder

    def stop_profile(self) -> str:
        """The folder it was written to."""
        with self._lock:
            if self._profile is None:
                raise ValueError("no profile is being written: start one first")
            folder, self._profile = self._profile, None
            jax.profiler.stop_trace()
            return folder


NAMES = {name for name in vars(Commands) if not name.startswith("_")}
