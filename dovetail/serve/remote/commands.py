"""Commands: what the HTTP process may ask of the engine besides tokens. The engine's
controls are commands, and each public method here is one that returns its answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from dovetail.core.errors import UserError
from dovetail.engine.controls import CONTROLS
from dovetail.engine.embed import Cancelled, Embedder, Pooling
from dovetail.engine.loop import EngineLoop
from dovetail.engine.stats import Stats

# These run the model over many prompts, in threads of their own; they end early when their caller has left.
FORWARDS = {"embed", "score"}
# These wait for files or compilers, and run in a thread.
SLOW = {"start_profile", "stop_profile"} | {name for name, control in CONTROLS.items() if control.prepare}


class Commands:
    def __init__(self, loop: EngineLoop):
        self._loop = loop
        self._embedder = Embedder(loop.engine, lambda function: loop.submit(function).result())
        self._profile: str | None = None
        self._lock = threading.Lock()

    def find(self, name: str) -> Callable[..., Any] | None:
        """The command of that name; a control gives a future of its answer."""
        if name in CONTROLS:
            return partial(self._loop.control, name)
        return getattr(self, name) if name in PUBLIC else None

    def pulse(self) -> float:
        return self._loop.pulse()

    def stats(self) -> Stats:
        return self._loop.engine.stats()

    def embed(
        self, cancelled: Cancelled, prompts: list[list[int]], pooling: Pooling, adapter: str | None = None
    ) -> list[bytes]:
        """Little-endian float32, which the HTTP process decodes one by one."""
        vectors = self._embedder.embed(prompts, pooling, adapter, cancelled)
        return [np.asarray(vector, "<f4").tobytes() for vector in vectors]

    def score(self, cancelled: Cancelled, prompts: list[list[int]], adapter: str | None = None) -> list[float]:
        return self._embedder.score(prompts, adapter, cancelled)

    def start_profile(self, folder: str) -> None:
        with self._lock:
            if self._profile is not None:
                raise UserError(f"a profile is being written to {self._profile}: stop that first")
            jax.profiler.start_trace(folder)
            self._profile = folder

    def stop_profile(self) -> str:
        """The folder it was written to."""
        with self._lock:
            if self._profile is None:
                raise UserError("no profile is being written: start one first")
            folder, self._profile = self._profile, None
            jax.profiler.stop_trace()
            return folder


PUBLIC = {name for name in vars(Commands) if not name.startswith("_")} - {"find"}
