"""Stop a run in good order: on SIGTERM (a preemption) or ctrl-C the current step ends and the run is saved.

Before the first step there is nothing to save, and the process ends at once.

All processes of a run must stop after the same step, although the signal may reach only one of them. They agree through
jax's coordination service and not through the devices: a collective would wait for the steps in flight.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn

from dovetail.train.guard.exits import PREEMPTED

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_S = 5.0  # from a signal before the first step to the end of the process, whatever it is doing
MARGIN = 4  # steps between announcing an action and doing it, so that all processes have read the announcement


class Together:
    """Let all processes do something after the same step once one of them asks for it; `done` starts over."""

    def __init__(self, name: str) -> None:
        self._name, self._turn, self._after = name, 0, -1

    def is_due(self, wanted: bool, step: int) -> bool:
        """Return whether to act after `step`. Every process calls this at every step; `wanted`: this one asks."""
        import jax  # here: signals are handled before jax is imported

        if jax.process_count() == 1:
            return wanted
        from jax._src.distributed import global_state

        client, key = global_state.client, f"dovetail/{self._name}/{self._turn}"
        if self._after < 0 and wanted:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
                client.key_value_set(key, str(step + MARGIN))  # type: ignore[union-attr]
        if self._after < 0:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # no process has asked yet
                self._after = int(client.key_value_try_get(key))  # type: ignore[union-attr]
        return 0 <= self._after <= step

    def done(self) -> None:
        """Start over: the next request is a new one."""
        self._turn, self._after = self._turn + 1, -1


class Stopped(SystemExit):
    """Report that a signal came before the first step."""

    def __init__(self, number: int) -> None:
        self.status = 130 if number == signal.SIGINT else PREEMPTED
        super().__init__(self.status)

    def __str__(self) -> str:
        return f"exit {self.status}: stopped before the first step, nothing to save: start it again"


class Stop:
    """Handle SIGTERM and SIGINT: raise Stopped before the first step, set a flag after `begin`.

    A second ctrl-C raises KeyboardInterrupt. The context is reentrant.

    With `ends_process` (used by commands) Stopped ends the process when the context is left, without Python's normal
    exit, which waits for running C++ code or crashes with it. C++ code that initialises weights or compiles for minutes
    is not waited for either: no Python handler runs meanwhile, but the signal's number is written to a pipe at once,
    and a thread that reads it ends the process after GRACE_S. An exception must not interrupt an import, because
    jaxlib's crashes: the process ends immediately. `tell` is called with the exit code and a line.
    """

    def __init__(self, ends_process: bool = False, tell: Callable[[int, str], object] = lambda code, line: None):
        self.signal, self.tell = 0, tell
        self._begun, self._deferred, self._depth, self._ends_process = False, False, 0, ends_process
        self._before: dict[int, Any] = {}
        self._watcher: Watcher | None = None
        self._together = Together("stop")

    def __enter__(self) -> Stop:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._raise) for number in SIGNALS}
            self._watcher = Watcher(self._await_end) if self._ends_process else None
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth:
            return
        early = bool(self.signal) and not self._begun and error is not None
        if early and self._ends_process:
            self._leave(self.signal)
        if self._watcher:
            self._watcher.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if early and not isinstance(error, Stopped):  # the interrupted operation raised its own error
            raise Stopped(self.signal) from error

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Delay a signal: it raises Stopped at the end of the block."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.signal and not self._begun:
            raise Stopped(self.signal)

    def begin(self) -> None:
        """Record that the first step is launched: from here on there is something to save."""
        self._begun = True

    def _raise(self, number: int, frame: FrameType | None) -> None:
        again, self.signal = self.signal, number
        if again == signal.SIGINT == number:
            raise KeyboardInterrupt
        if not self._begun and not self._deferred and not again:
            if self._ends_process and _is_importing(frame):
                self._leave(number)
            raise Stopped(number)

    def _await_end(self, number: int) -> None:
        if number in SIGNALS and not self._begun:
            time.sleep(GRACE_S)
            if not self._begun:
                self._leave(number)

    def _leave(self, number: int) -> NoReturn:
        stopped = Stopped(number)
        goodbye = threading.Thread(target=self.tell, args=(stopped.status, str(stopped)), daemon=True)
        goodbye.start()
        goodbye.join(GRACE_S)
        print(stopped, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(stopped.status)

    def is_due(self, step: int) -> bool:
        """Return whether to stop after `step`."""
        due = self._together.is_due(bool(self.signal), step)
        if due and not self.signal:
            self.signal = signal.SIGTERM  # another process received it
        return due


def _is_importing(frame: FrameType | None) -> bool:
    while frame and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


class Watcher:
    """Call `then` on a thread with the number of each signal for which Python has a handler."""

    def __init__(self, then: Callable[[int], object]) -> None:
        self._then, (self._read, self._write) = then, os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while number := os.read(self._read, 1)[0]:
            self._then(number)

    def close(self) -> None:
        """Stop the thread."""
        signal.set_wakeup_fd(self._before)
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)
