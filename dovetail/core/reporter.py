"""Report what a long operation does: lines, progress bars and waits, on stderr.

A command or a call creates one Reporter and passes it down. Everything that it shows goes to one console, so lines are
printed above progress bars and above the live line of a training. `printable` makes foreign text safe to print.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
import logging
import re

# Called as progress(what, done, total), in bytes or in pieces. A total of 0 marks a line to show, nothing to count.
Progress = Callable[[str, int, int], None]

WAIT_MARKS = (3, 10, 20, 30, 60)  # seconds after which a plain line is printed, and then every minute
WIDTH = 32  # characters before the bar
PIECES = 10_000  # a total below this counts pieces, such as programs to compile, not bytes


class Reporter:
    """Show lines, progress and waits; with `show=False` nothing is shown.

    Args:
        show: Whether anything is printed.
        console: Where to print; default: stderr.

    Attributes:
        show: Whether anything is printed.
        lines: Every line that was reported, shown or not.
        is_live: Whether a live display occupies the terminal; waits are then printed as lines.
    """

    def __init__(self, show: bool = True, console: Console | None = None):
        self.show, self._given = show, console
        self.lines: list[str] = []
        self.is_live = False

    @cached_property
    def console(self) -> Console:
        """Return the console that everything is printed to."""
        return self._given or stderr_console()

    def mute(self) -> None:
        """Show nothing from now on: only the first of several processes reports."""
        self.show = False

    def line(self, text: str, style: str = "dim") -> None:
        """Print a line above what is displayed."""
        if not text:
            return
        self.lines.append(text)
        if self.show:
            from rich.text import Text

            self.console.print(Text(text, style), soft_wrap=True)

    def note(self, text: str | None, style: str = "dim") -> None:
        """Print an indented line, if there is a text."""
        if text:
            self.line(f"  {text}", style)

    def progress(self) -> AbstractContextManager[Progress | None]:
        """Return a context that yields a progress callable; None if nothing is shown."""
        return bar(self.console) if self.show else nullcontext()

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Return a context that shows how long something silent takes, such as a compilation."""
        if not self.show:
            return nullcontext()
        return waiting(what, self.console, self.note, in_place=not self.is_live)


def stderr_console() -> Console:
    """Return a console on stderr that does not highlight numbers."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Elapsed:
    """Show what is waited for and since when, rendered at each refresh of a terminal."""

    what: str
    since: float
    clock: Callable[[], float]

    @property
    def seconds(self) -> float:
        """Return the seconds since the start."""
        return self.clock() - self.since

    def __str__(self) -> str:
        return f"{self.what}: {self.seconds:.0f} s"

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(str(self), "dim")


@contextmanager
def waiting(
    what: str,
    console: Console,
    line: Callable[[str], object],
    in_place: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """Show `what` with its elapsed seconds until the block ends.

    Args:
        what: What is waited for.
        console: Where to show it.
        line: Prints a line; used where stderr is not a terminal, and at the end of a wait of WAIT_MARKS[0] or more.
        in_place: Whether the terminal is free for a spinner.
        clock: Returns seconds.
    """
    elapsed, over = Elapsed(what, clock(), clock), threading.Event()

    def lines() -> None:
        for mark in _marks():
            if over.wait(max(0.0, mark - elapsed.seconds)):
                return
            line(str(elapsed))

    with ExitStack() as stack:
        if in_place and console.is_terminal:
            stack.enter_context(console.status(elapsed, spinner="dots"))
        else:
            threading.Thread(target=lines, name="waiting", daemon=True).start()
            stack.callback(over.set)
        yield
    if elapsed.seconds >= WAIT_MARKS[0]:
        line(f"{what}: done in {elapsed.seconds:.0f} s")


def _marks() -> Iterator[int]:
    yield from WAIT_MARKS
    mark = WAIT_MARKS[-1]
    while True:
        mark += 60
        yield mark


@contextmanager
def bar(console: Console | None = None) -> Iterator[Progress]:
    """Yield a progress callable that draws bars on stderr.

    Reports with the same total are one piece of work and share one bar: a loader names each of its hundreds of tensors.
    The display starts with the first count, so that bars of other libraries (huggingface_hub has its own) and earlier
    lines are not overwritten.
    """
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Display
    from rich.text import Text

    class Amount(DownloadColumn):
        def render(self, task: Any) -> Text:
            return (
                super().render(task) if (task.total or 0) >= PIECES else Text(f"{task.completed:.0f}/{task.total:.0f}")
            )

    class Speed(TransferSpeedColumn):
        def render(self, task: Any) -> Text:
            return super().render(task) if (task.total or 0) >= PIECES else Text()

    console = console or stderr_console()
    words = TextColumn("  {task.description}", markup=False)
    display = Display(words, BarColumn(24), Amount(), Speed(), console=console)
    tasks, ended = {}, set()  # keyed by total

    def report(what: str, done: int, total: int) -> None:
        if total <= 0:
            console.print(f"  {what}", style="dim", markup=False, soft_wrap=True)
            return
        if total not in tasks:
            if done >= total and total in ended:
                return
            display.start()
            tasks[total] = display.add_task("", total=total)
        display.update(tasks[total], completed=min(done, total), description=_fit(what))
        if display.finished:
            end()

    def end() -> None:
        """Leave the finished bars as they are: a server runs for days and prints other lines below them."""
        if tasks:  # stopping a display that never started prints an empty line
            display.stop()
        for total, task in tasks.items():
            display.remove_task(task)
            ended.add(total)
        tasks.clear()

    try:
        yield report
    finally:
        end()


def _fit(what: str) -> str:
    """Return `what` in exactly WIDTH characters, so that the bar does not move; the end is more specific."""
    return what.ljust(WIDTH) if len(what) <= WIDTH else "…" + what[1 - WIDTH :]


# --- log level and foreign text ---------------------------------------------------------------------------------------

NOTE = logging.WARNING + 1  # shown like a warning, for news that is not a problem
logging.addLevelName(NOTE, "NOTE")

# CSI (colours, cursor moves), then OSC, DCS, SOS, PM and APC with all that they carry, then two-character sequences.
ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
OVERWRITTEN = re.compile(r"[^\n]*\r(?=[^\n])")  # a progress bar's earlier states
# C0 and C1 without tab and newline, and the characters that reorder a line
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return `text` without escape sequences and control characters; tabs and newlines stay.

    Of a line that a carriage return overwrites, the last state is kept.
    """
    return CONTROL.sub("", OVERWRITTEN.sub("", ESCAPE.sub("", text).replace("\r\n", "\n")))
