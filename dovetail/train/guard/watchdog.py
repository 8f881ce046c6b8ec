"""A run that hangs says where, and ends, so that the job runner can start it again.

    with Watchdog(settings.hang_seconds, run_dir) as watchdog:
        for step in ...:
            ...
            watchdog.beat(step)
            with watchdog.suspend("evaluation"): ...

A collective that waits for a lost host hangs every process; each has its own watchdog and writes its own stacks.
"""

from __future__ import annotations

import faulthandler
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dovetail.core.errors import UserError
from dovetail.train.guard.exits import HUNG, meaning

GOODBYE_SECONDS = 10.0  # on_hang may itself wait for what hangs


class Watchdog:
    """`on_hang` is given the message, after the stacks are written and before the process exits with HUNG."""

    def __init__(
        self, hang_seconds: float, run_dir: str | os.PathLike, on_hang: Callable[[str], object] | None = None
    ) -> None:
        if hang_seconds < 0:
            raise UserError(f"hang_seconds must be 0 (no watchdog) or more; got {hang_seconds}")
        self.hang_seconds = hang_seconds
        self.path = Path(run_dir) / f"hang-{platform.node()}-{os.getpid()}.txt"
        self._on_hang = on_hang
        self._step, self._last = -1, time.monotonic()
        self._suspended: list[str] = []
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self.hang_seconds:
            self._last = time.monotonic()
            self._done.clear()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def beat(self, step: int) -> None:
        """A step has ended."""
        self._step, self._last = step, time.monotonic()

    @contextmanager
    def suspend(self, what: str = "a known pause") -> Iterator[None]:
        """For a long known pause: compilation, evaluation, the last save. Then the clock starts anew."""
        self._suspended.append(what)
        try:
            yield
        finally:
            self._last = time.monotonic()
            self._suspended.remove(what)

    def _watch(self) -> None:
        pause = min(self.hang_seconds / 4, 10.0)
        try:
            while not self._done.wait(pause):
                # Should a C call keep Python's lock, this thread cannot run. Then faulthandler's own, which needs no
                # lock, writes the stacks and ends the process (with exit code 1): this line puts it off each time.
                # Not sys.stderr: a notebook's has no file descriptor.
                later = self.hang_seconds + 4 * pause
                faulthandler.dump_traceback_later(later, exit=True, file=sys.__stderr__ or 2)
                silent = time.monotonic() - self._last
                if silent > self.hang_seconds and not self._suspended:
                    self._report(silent)
                    os._exit(HUNG)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _report(self, silent: float) -> None:
        after = f"since step {self._step}" if self._step >= 0 else "since the start"
        message = (
            f"no step has ended for {silent:.0f} s {after} (health.hang_seconds is {self.hang_seconds:g}) "
            f"on {platform.node()}, process {os.getpid()}; stacks in {self.path}; {meaning(HUNG)}"
        )
        try:
            self._write(message)
        except OSError as error:
            print(f"{self.path} could not be written: {error}", file=sys.stderr)
        print(message, file=sys.stderr)
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        sys.stderr.flush()
        if self._on_hang is not None:
            goodbye = threading.Thread(target=self._on_hang, args=(message,), daemon=True)
            goodbye.start()
            goodbye.join(GOODBYE_SECONDS)

    def _write(self, message: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            print(message, file=file, flush=True)
            faulthandler.dump_traceback(file=file, all_threads=True)
