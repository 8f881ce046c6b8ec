"""The compiled steps, by shape: read from disk where an earlier start kept them, else compiled, several at a time."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

from dovetail.engine.batch import Shape
from dovetail.io.compiled import compile_program, load_program

log = logging.getLogger(__name__)
MOST_PADDING = 4  # times a step's tokens


class Steps:
    """From any thread. `compile` makes a shape's step, `key` names it on disk: both a runner's methods."""

    def __init__(self, compile: Callable[[Shape], Any], key: Callable[[Shape], str], devices: list[Any]):
        # weak: a runner that is dropped frees its device memory at once, not when Python looks for garbage
        self._compile, self._key, self._devices = weakref.WeakMethod(compile), weakref.WeakMethod(key), devices
        self._futures: dict[Shape, Future] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2), thread_name_prefix="compile")

    def __call__(self, shape: Shape) -> Callable:
        """The step for a shape, compiled now unless it was before; another thread may be compiling it already."""
        return self.later(shape).result()

    def later(self, shape: Shape) -> Future:
        with self._lock:
            if shape not in self._futures:
                self._futures[shape] = self._pool.submit(self._get, shape)
            return self._futures[shape]

    def _get(self, shape: Shape) -> Any:
        make_key, make = self._key(), self._compile()
        assert make_key is not None and make is not None, "its runner is gone"
        key = make_key(shape)
        step = load_program(key, self._devices)
        if step is None:
            log.info("compiling a step of %d tokens in %d rows, once: it is kept", shape.tokens, shape.rows)
            step = compile_program(key, lambda: make(shape))
        return step

    def all(self, shapes: Iterable[Shape], progress: Callable[[str, int, int], None] | None = None) -> None:
        """Have these, all of them."""
        futures = [self.later(shape) for shape in dict.fromkeys(shapes)]
        for done, future in enumerate(as_completed(futures), 1):
            future.result()
            if progress:
                progress("compiling steps", done, len(futures))

    def nearest(self, shape: Shape) -> Shape:
        """The shape; or where it is not compiled yet and one that holds it is, without many times as many tokens, that
        one, while this one is compiled in the background."""
        if shape in self._futures and self.is_ready(shape):
            return shape
        holding = [other for other in list(self._futures) if other.holds(shape) and self.is_ready(other)]
        least = min(holding, key=lambda s: (s.tokens, s.rows, s.pages), default=None)
        self.later(shape)
        return least if least is not None and least.tokens <= MOST_PADDING * shape.tokens else shape

    def is_ready(self, shape: Shape) -> bool:
        future = self._futures.get(shape)
        return future is not None and future.done() and future.exception() is None

    @property
    def busy(self) -> bool:
        return any(not future.done() for future in list(self._futures.values()))
