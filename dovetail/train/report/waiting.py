"""A line that counts the seconds of something long and silent, such as a compilation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

SAID_AT = (3, 10, 20, 30, 60)  # seconds after which a plain line is printed, and then every minute


@dataclass(frozen=True)
class Elapsed:
    """What is waited for and since when, rendered anew at each refresh of a terminal."""

    what: str
    since: float
    clock: Callable[[], float]

    @property
    def seconds(self) -> float:
        return self.clock() - self.since

    def __str__(self) -> str:
        return f"{self.what}: {self.seconds:.0f} s"

    def __rich__(self) -> Text:
        return Text(str(self), "dim")


@contextmanager
def waiting(
    what: str,
    console: Console,
    say: Callable[[str], object],
    in_place: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """Show `what` with its elapsed seconds until the block ends: on a terminal in one place, elsewhere (and where the
    terminal is taken, `in_place` False) as lines given to `say`. What ends within SAID_AT[0] leaves no line."""
    elapsed, over = Elapsed(what, clock(), clock), threading.Event()

    def lines() -> None:
        for mark in _marks():
            if over.wait(max(0.0, mark - elapsed.seconds)):
                return
            say(str(elapsed))

    with ExitStack() as stack:
        if in_place and console.is_terminal:
            stack.enter_context(console.status(elapsed, spinner="dots"))
        else:
            threading.Thread(target=lines, name="waiting", daemon=True).start()
            stack.callback(over.set)
        yield
    if elapsed.seconds >= SAID_AT[0]:
        say(f"{what}: done in {elapsed.seconds:.0f} s")


def waiting_alone(what: str) -> AbstractContextManager[None]:
    """The same before a run has its live line, on stderr."""
    console = Console(stderr=True, highlight=False)
    return waiting(what, console, lambda line: console.print(Text(f"  {line}", "dim"), soft_wrap=True))


def _marks() -> Iterator[int]:
    yield from SAID_AT
    mark = SAID_AT[-1]
    while True:
        mark += 60
        yield mark
