"""LLM on a terminal: progress bars, and Ctrl-C between steps."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dovetail.core.reporter import Progress, bar


@contextmanager
def compiling(room: str, progress: Progress | None) -> Iterator[Progress | None]:
    """Yield `progress`, or if it is None on a terminal, print `room` and yield the update of a bar."""
    if progress is not None or not sys.stderr.isatty():
        yield progress
        return
    with bar() as report:
        report(room, 0, 0)
        yield report


class RequestBar:
    """Show a progress bar of requests, and when they wait for a compiler; show nothing unless `shown`."""

    def __init__(self, total: int, shown: bool, is_compiling: Callable[[], bool]):
        self.total, self.display = total, None
        if shown:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            class Doing(TextColumn):
                def render(self, task):
                    self.text_format = "requests (compiling a step)" if is_compiling() else "requests"
                    return super().render(task)

            self.display = Progress(Doing(""), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.task = self.display.add_task("", total=total)

    def __enter__(self):
        if self.display:
            self.display.start()
        return lambda: self.display.advance(self.task) if self.display else None

    def __exit__(self, *_):
        if self.display:
            self.display.stop()


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Raise an interrupt that comes meanwhile at the end, or at once if a second one comes.

    An interrupted step would lose pages, tokens and donated buffers.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, Any]] = []

    def note(number: int, frame: Any) -> None:
        came.append((number, frame))
        if len(came) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(*came[0])


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable Python's garbage collector meanwhile: a search through all objects of jax would delay a step."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
