"""A polite end: SIGTERM (a preemption) and ctrl-C let the step under way end, and the run save itself. Before the first
step there is nothing to save, and the process ends at once.

Processes of one run must stop after the same step, though the signal may reach one of them only. They agree through
jax's coordination service and not through the devices: a collective would wait for the steps under way.
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
MARGIN = 4  # steps between saying that something will be done and doing it: by then all have heard


class Together:
    """Something that all processes do after the same step, when one of them wants it; again after `done`."""

    def __init__(self, name: str) -> None:
        self._name, self._turn, self._after = name, 0, -1

    def is_due(self, wanted: bool, step: int) -> bool:
        """Asked by every process at every step."""
        import jax  # here: signals are watched for before it is imported

        if jax.process_count() == 1:
            return wanted
        from jax._src.distributed import global_state

        client, key = global_state.client, f"dovetail/{self._name}/{self._turn}"
        if self._after < 0 and wanted:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was first
                client.key_value_set(key, str(step + MARGIN))  # type: ignore[union-attr]
        if self._after < 0:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # nobody has said it yet
                self._after = int(client.key_value_try_get(key))  # type: ignore[union-attr]
        return 0 <= self._after <= step

    def done(self) -> None:
        self._turn, self._after = self._turn + 1, -1


class Stopped(SystemExit):
    """A signal came before the first step."""

    code: int

    def __init__(self, number: int) -> None:
        super().__init__(130 if number == signal.SIGINT else PREEMPTED)

    def __str__(self) -> str:
        return f"exit {self.code}: stopped before the first step, so there was nothing to save: start it again"


class Stop:
    """A context in which the first signal raises Stopped, and after `begin` only a flag; a second ctrl-C ends the
    process as usual. It may be entered again within itself.

    With `ends_process` (a command's) Stopped ends the process when the context is left, and not by Python's way out,
    which waits for what C++ has under way, or crashes with it. Nor does it wait for C++ that makes weights or compiles
    for minutes, during which no handler of Python's runs: a signal's number is written to a pipe at once, and a thread
    that reads it ends the process after GRACE_S. An import is not broken off by an exception either, for jaxlib's
    crashes on it: the process ends there and then. `tell` is called with the exit code and a line.
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
        if early and not isinstance(error, Stopped):  # what the signal broke off failed in its own way
            raise Stopped(self.signal) from error

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """A signal that comes meanwhile raises Stopped at the end of this."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.signal and not self._begun:
            raise Stopped(self.signal)

    def begin(self) -> None:
        """The first step is launched: from here on there is something to save."""
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
        goodbye = threading.Thread(target=self.tell, args=(stopped.code, str(stopped)), daemon=True)
        goodbye.start()
        goodbye.join(GRACE_S)
        print(stopped, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(stopped.code)

    def is_due(self, step: int) -> bool:
        """Whether to stop after `step`."""
        due = self._together.is_due(bool(self.signal), step)
        if due and not self.signal:
            self.signal = signal.SIGTERM  # another process's
        return due


def _is_importing(frame: FrameType | None) -> bool:
    while frame and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


class Watcher:
    """A thread that calls `then` with the number of each signal for which Python has a handler."""

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
        signal.set_wakeup_fd(self._before)
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)
