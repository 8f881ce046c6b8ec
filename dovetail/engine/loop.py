"""EngineLoop: an engine on a thread of its own.

It takes steps while there is work, runs what other threads ask of the engine between steps, and blocks when there is
nothing to do. It uses neither asyncio nor sockets: a server's engine process connects it to a socket.
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

import jax

from dovetail.engine.engine import Engine
from dovetail.engine.interface import CONTROLS, EngineDied, Later
from dovetail.engine.request.outputs import OutputDelta

log = logging.getLogger(__name__)
T = TypeVar("T")
MOST_FAULTS = 3  # steps in a row that may fail before the engine ends
# These faults are the device's or the machine's, and resetting the engine's state does not help.
FATAL = (OSError, MemoryError, jax.errors.JaxRuntimeError)


class _Call(NamedTuple):
    function: Callable[[Engine], Any]
    future: Future
    idle: bool  # whether steps in flight are committed first


class EngineLoop:
    """Run an engine on its own thread; no other thread may use the engine, except for methods that say so.

    An exception in a step that is not fatal ends the requests of the engine with finish_reason "error", and the loop
    continues with the next request. A fatal one, or MOST_FAULTS in a row, ends the loop.

    Args:
        engine: The engine.
        on_deltas: Gets each step's deltas (see `Engine.close`) on the engine's thread, which waits for it.
        on_end: Called once, when the thread ends.
    """

    def __init__(
        self,
        engine: Engine,
        on_deltas: Callable[[list[OutputDelta]], None],
        on_end: Callable[[EngineDied], None] | None = None,
    ):
        self.engine, self._on_deltas, self._on_end = engine, on_deltas, on_end
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._lock = threading.Lock()  # no call is queued after the last look at the queue
        self._later: list[_Call] = []  # calls that wait for requests to end (see controls.Later)
        self._stopping = self._ended = False
        self._faults = 0  # steps in a row that failed
        self._began: float | None = None  # when the current work began; None: waiting for a call
        self._compiled = 0.0  # when a compiler was last seen running
        self._cause: BaseException | None = None
        # A daemon, so that a forgotten loop keeps no process alive. But it must not be in a step when jax is torn down.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        atexit.register(self.stop)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, function: Callable[[Engine], T], idle: bool = False) -> Future[T]:
        """Call function(engine) on the engine's thread between two steps, in the order of the calls.

        Args:
            function: What to call; its result or exception becomes the future's.
            idle: Whether steps in flight are committed first.

        Raises:
            EngineDied: If the thread has ended.
        """
        future: Future[T] = Future()
        with self._lock:
            self.check_health()
            self._calls.put(_Call(function, future, idle))
        return future

    def abort(self, id: str, index: int | None = None) -> Future[None]:
        """End a request, or one of its n sequences; an unknown id is ignored."""
        return self.submit(lambda engine: self._hand_on(engine.abort(id, index)))

    def control(self, name: str, /, *args: Any, **named: Any) -> Future[Any]:
        """Run one of CONTROLS. What it must prepare, such as files, is read first on the caller's thread."""
        control = CONTROLS[name]
        if control.prepare is not None:
            args, named = getattr(self.engine, control.prepare)(*args, **named), {}
        return self.submit(lambda engine: getattr(engine, control.method)(*args, **named), control.idle)

    def stop(self) -> None:
        """End the thread after its current step, and wait for that."""
        atexit.unregister(self.stop)
        with contextlib.suppress(EngineDied):
            self.submit(lambda _: self._set_stopping(), idle=True)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Return whether the loop still takes steps."""
        return not self._ended

    def pulse(self) -> float:
        """Return how many seconds the current step or call has taken: many mean that the device hangs.

        It is 0 while the loop waits, and while steps are compiled.
        """
        now, began = time.monotonic(), self._began
        if began is None:
            return 0.0
        if self.engine.runner.is_compiling:
            self._compiled = now
        return now - max(began, self._compiled)

    def check_health(self) -> None:
        """Raise EngineDied if no more steps will be taken."""
        if self._ended:
            raise self._died()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._do_calls()
                self._began = time.monotonic()
                if self._can_step and not self._stopping:
                    self._hand_on(self._deltas(self.engine.step))
                    self._try_later()
        except BaseException as error:
            log.exception("the engine died")
            self._cause = error
        self._end()

    @property
    def _can_step(self) -> bool:
        return self.engine.has_work and self.engine.blocked is None

    def _deltas(self, work: Callable[[], list[OutputDelta]]) -> list[OutputDelta]:
        """Return the deltas of a step, or the last deltas of all requests if it failed."""
        try:
            deltas = self.engine.close(work())
        except FATAL:
            raise
        except Exception as error:
            self._faults += 1
            if self._faults >= MOST_FAULTS:
                raise
            log.exception("internal error in a step of the engine: all its requests fail")
            return self.engine.fail_all(f"internal error in the engine: {type(error).__name__}")
        self._faults = 0
        return deltas

    def _do_calls(self) -> None:
        """Run all queued calls; when no step can be taken, wait for one."""
        wait = not self._can_step
        while wait or not self._calls.empty():
            if wait:
                self._began = None
            call = self._calls.get()
            self._began = time.monotonic()
            self._do(call)
            self._try_later()
            wait = False

    def _do(self, call: _Call) -> None:
        if call.idle:
            try:
                self._hand_on(self._deltas(self.engine.drain))
            except BaseException:  # the engine ends: `_end` answers the future
                self._calls.put(call)
                raise
        if call.future.set_running_or_notify_cancel():
            self._try(call)

    def _try(self, call: _Call) -> None:
        try:
            call.future.set_result(call.function(self.engine))
        except Later:
            self._later.append(call)
        except BaseException as error:
            call.future.set_exception(error)

    def _try_later(self) -> None:
        later, self._later = self._later, []
        for call in later:
            self._try(call)

    def _hand_on(self, deltas: list[OutputDelta]) -> None:
        if deltas:
            self._on_deltas(deltas)

    def _set_stopping(self) -> None:
        self._stopping = True

    def _end(self) -> None:
        with self._lock:
            self._ended = True
        for call in self._later:
            call.future.set_exception(self._died())
        while not self._calls.empty():
            future = self._calls.get().future
            if future.set_running_or_notify_cancel():
                future.set_exception(self._died())
        if self._on_end is not None:
            self._on_end(self._died())

    def _died(self) -> EngineDied:
        """Return a new error for each caller: an exception keeps the stack it was raised on."""
        died = EngineDied("the engine was stopped" if self._cause is None else f"the engine died: {self._cause!r}")
        died.__cause__ = self._cause
        return died
