"""EngineLoop: an engine on a thread of its own. It takes steps while there is work, does between them what others ask
of the engine, and waits, without turning, when there is nothing to do.

It knows neither asyncio nor sockets: a server's engine process puts a socket on it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from dovetail.engine.controls import CONTROLS, Later
from dovetail.engine.controls import EngineDied as EngineDied
from dovetail.engine.engine import Engine
from dovetail.engine.request.outputs import Update

log = logging.getLogger(__name__)
T = TypeVar("T")


class _Asked(NamedTuple):
    function: Callable[[Engine], Any]
    future: Future
    idle: bool  # no step may be under way


class EngineLoop:
    """on_updates: given each step's updates (see Engine.close) on the engine's thread, which waits for it: hand them on
    and return. on_end: called once, when the thread ends. From here on the engine belongs to the thread: no other
    thread calls it, except what it says any thread may."""

    def __init__(
        self,
        engine: Engine,
        on_updates: Callable[[list[Update]], None],
        on_end: Callable[[EngineDied], None] | None = None,
    ):
        self.engine, self._on_updates, self._on_end = engine, on_updates, on_end
        self._asked: SimpleQueue[_Asked] = SimpleQueue()
        self._lock = threading.Lock()  # so that nothing is asked after the last look at what was
        self._later: list[_Asked] = []  # what waits for requests to end (see controls.Later)
        self._stopping = self._ended = False
        self._began: float | None = None  # what it does now; None: it waits to be asked
        self._compiled = 0.0  # when a compiler was last seen at work
        self._cause: BaseException | None = None
        # A daemon: a forgotten loop keeps no process alive. But it must not be in a step when jax is torn down.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        atexit.register(self.stop)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, function: Callable[[Engine], T], idle: bool = False) -> Future[T]:
        """function(engine) on the engine's thread, between two steps, in the order of the calls; what it raises is the
        future's alone. `idle`: no step may be under way then, so their tokens are taken in first.
        EngineDied if the thread has ended."""
        future: Future[T] = Future()
        with self._lock:
            self.check_health()
            self._asked.put(_Asked(function, future, idle))
        return future

    def abort(self, id: str, index: int | None = None) -> Future[None]:
        """End a request, or that one of its n; its last updates say so. One that is not there, or no more, is no
        error."""
        return self.submit(lambda engine: self._hand_on(engine.abort(id, index)))

    def control(self, name: str, *args: Any) -> Future[Any]:
        """One of engine.controls. What it has to prepare (read files, say) it does first, on the caller's thread."""
        control = CONTROLS[name]
        if control.prepare is not None:
            args = getattr(self.engine, control.prepare)(*args)
        return self.submit(lambda engine: getattr(engine, control.method)(*args), control.idle)

    def stop(self) -> None:
        """End the thread after the step it is in, and wait for that."""
        atexit.unregister(self.stop)
        with contextlib.suppress(EngineDied):
            self.submit(lambda _: self._set_stopping(), idle=True)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        return not self._ended

    def pulse(self) -> float:
        """Seconds that the step, or what was asked between two of them, has taken so far: many, and the device hangs.
        0 while it waits for something to do, and while steps are compiled, which takes as long as it takes."""
        now, began = time.monotonic(), self._began
        if began is None:
            return 0.0
        if self.engine.runner.is_compiling:
            self._compiled = now
        return now - max(began, self._compiled)

    def check_health(self) -> None:
        """EngineDied if no more steps will be taken."""
        if self._ended:
            raise self._died()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._do_asked()
                self._began = time.monotonic()
                if self._can_step and not self._stopping:
                    self._hand_on(self.engine.close(self.engine.step()))
                    self._try_later()
        except BaseException as error:
            log.exception("the engine died")
            self._cause = error
        self._end()

    @property
    def _can_step(self) -> bool:
        return self.engine.has_work and self.engine.blocked is None

    def _do_asked(self) -> None:
        """Do all that was asked so far; when no step can be taken, wait for something."""
        wait = not self._can_step
        while wait or not self._asked.empty():
            if wait:
                self._began = None
            asked = self._asked.get()
            self._began = time.monotonic()
            self._do(asked)
            self._try_later()
            wait = False

    def _do(self, asked: _Asked) -> None:
        if asked.idle:
            try:
                self._hand_on(self.engine.close(self.engine.drain()))
            except BaseException:  # not the caller's fault, but the engine's end: `_end` answers the future
                self._asked.put(asked)
                raise
        if asked.future.set_running_or_notify_cancel():
            self._try(asked)

    def _try(self, asked: _Asked) -> None:
        try:
            asked.future.set_result(asked.function(self.engine))
        except Later:
            self._later.append(asked)
        except BaseException as error:
            asked.future.set_exception(error)

    def _try_later(self) -> None:
        later, self._later = self._later, []
        for asked in later:
            self._try(asked)

    def _hand_on(self, updates: list[Update]) -> None:
        if updates:
            self._on_updates(updates)

    def _set_stopping(self) -> None:
        self._stopping = True

    def _end(self) -> None:
        with self._lock:
            self._ended = True
        for asked in self._later:
            asked.future.set_exception(self._died())
        while not self._asked.empty():
            future = self._asked.get().future
            if future.set_running_or_notify_cancel():
                future.set_exception(self._died())
        if self._on_end is not None:
            self._on_end(self._died())

    def _died(self) -> EngineDied:
        """A new one for each caller: an exception keeps the stack it was raised on."""
        died = EngineDied("the engine was stopped" if self._cause is None else f"the engine died: {self._cause!r}")
        died.__cause__ = self._cause
        return died
