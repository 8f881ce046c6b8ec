"""The compiled steps, by shape: read from disk where an earlier start kept them, else compiled, several at a time."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

from dovetail.engine.batch import Shape
from dovetail.engine.limits import MOST_PADDING
from dovetail.engine.program import Compilations, Program


class Steps:
    """From any thread. `program`: what a shape's step is, a runner's method."""

    def __init__(self, program: Callable[[Shape], Program], devices: list[Any]):
        # weak: a runner that is dropped frees its device memory at once, not when Python looks for garbage
        self._program, self._devices = weakref.WeakMethod(program), devices
        self._futures: dict[Shape, Future] = {}
        self._lock = threading.Lock()
        self.compilations = Compilations()
        self._pool = ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2), thread_name_prefix="compile")

    def __len__(self) -> int:
        return len(self._futures)

    def __call__(self, shape: Shape) -> Callable:
        """The step for a shape, compiled now unless it was before; another thread may be compiling it already."""
        return self.later(shape).result()

    def later(self, shape: Shape, ahead: bool = False) -> Future:
        """`ahead`: of any request that needs it."""
        with self._lock:
            if shape not in self._futures:
                self._futures[shape] = self._pool.submit(self._get, shape, ahead)
            return self._futures[shape]

    def _get(self, shape: Shape, ahead: bool) -> Any:
        program = self._program()
        assert program is not None, "its runner is gone"
        return program(shape).kept(self._devices, ahead, self.compilations)

    def all(self, shapes: Iterable[Shape], progress: Callable[[str, int, int], None] | None = None) -> None:
        """Have these, all of them."""
        futures = [self.later(shape, ahead=True) for shape in dict.fromkeys(shapes)]
        for done, future in enumerate(as_completed(futures), 1):
            future.result()
            if progress:
                progress("compiling steps", done, len(futures))

    def load(self, shapes: Iterable[Shape]) -> None:
        """Have those of these that an earlier start kept."""
        program = self._program()
        assert program is not None, "its runner is gone"
        self.all(shape for shape in shapes if program(shape).is_kept)

    def nearest(self, shape: Shape, waits: bool = True) -> Shape:
        """Return the shape; or where it is not compiled yet and one that holds it is, without many times as many
        tokens, that one, while this one is compiled in the background. Unless the caller `waits` for a compiler, any
        shape that can run the step is taken, also one with prompts for a step that decodes."""
        if self.is_ready(shape):
            return shape
        self.have(shape)
        ready = self.ready()
        holding = [other for other in ready if other.holds(shape)]
        near = [other for other in holding if other.tokens <= MOST_PADDING * shape.tokens]
        if not waits and not near:
            near = holding or [other for other in ready if other.can_run(shape)]
        return min(near, key=lambda s: (s.tokens, s.rows, s.pages), default=shape)

    def have(self, shape: Shape) -> None:
        """Compile a step in the background, with the sampler that follows it."""
        for part in (shape,) if shape.is_decode else (shape, shape.sampler):
            self.later(part)

    def ready(self) -> list[Shape]:
        """Return the steps that can be run now."""
        return [shape for shape in list(self._futures) if shape.tokens and self.is_ready(shape)]

    def is_ready(self, shape: Shape) -> bool:
        parts = (shape, shape.sampler) if shape.tokens and not shape.is_decode else (shape,)
        futures = [self._futures.get(part) for part in parts]
        return all(future is not None and future.done() and future.exception() is None for future in futures)

    @property
    def busy(self) -> bool:
        return any(not future.done() for future in list(self._futures.values()))
